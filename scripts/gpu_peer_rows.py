"""The rows that gpu_peers.py times. Each function makes the operands and returns the function that is timed.
Shapes and dtypes are those of the rows of `gpu_check table` and `gpu_check products`.
"""

import sys

# --names needs no PyTorch.
if "--names" not in sys.argv:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

# Sets of operands used in turn, so that none stays in the cache.
SETS = 4


def kind(name):
    return {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[name]


def normal(*shape, dtype="bf16", grad=False, scale=1.0):
    x = torch.randn(*shape, device="cuda", dtype=kind(dtype))
    return x.mul_(scale).requires_grad_(grad)


def in_turn(works):
    """Calls the functions in turn."""
    turn = [0]

    def work():
        turn[0] = (turn[0] + 1) % len(works)
        return works[turn[0]]()

    return work


def quietly(work):
    """Calls a function without recording gradients."""

    def quiet():
        with torch.no_grad():
            return work()

    return quiet


def forward_or_backward(function, inputs, backward, grad_of):
    """Calls `function`, or computes the gradients of `inputs` for a gradient of its result."""
    if not backward:
        return quietly(function)
    y = function()
    dy = grad_of(y)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def cast(source, target, n):
    def prepare():
        x = normal(n, dtype=source)
        return lambda: x.to(kind(target))

    return prepare


def gradient_norm(dtype, n):
    def prepare():
        x = normal(n, dtype=dtype)
        return lambda: torch.linalg.vector_norm(x)

    return prepare


def adamw(dtype, n):
    def prepare():
        weight = torch.nn.Parameter(normal(n, dtype=dtype))
        weight.grad = normal(n, dtype=dtype)
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1, fused=True)
        return optimizer.step

    return prepare


def norm(which, dtype, rows, c, backward, residual=False):
    def one():
        x, weight, bias = normal(rows, c, dtype=dtype, grad=backward), *(normal(c, dtype=dtype, grad=backward) for _ in "wb")
        beside = normal(rows, c, dtype=dtype, grad=backward) if residual else None

        def forward():
            total = x + beside if residual else x
            if which == "layer":
                y = F.layer_norm(total, (c,), weight, bias, 1e-6)
            else:
                y = F.rms_norm(total, (c,), weight, 1e-6)
            return (y, total) if residual else y

        inputs = [x, weight] if which == "rms" else [x, weight, bias]

        def grads(y):
            return tuple(normal(rows, c, dtype=dtype) for _ in y) if residual else normal(rows, c, dtype=dtype)

        return forward_or_backward(forward, inputs, backward, grads)

    return lambda: in_turn([one() for _ in range(SETS)])


def attention(dtype, batch, length, heads, kv_heads, d, causal, backward):
    # Flash has no f32.
    backend = "EFFICIENT_ATTENTION" if dtype == "f32" else "FLASH_ATTENTION"

    def prepare():
        q = normal(batch, heads, length, d, dtype=dtype, grad=backward)
        k, v = (normal(batch, kv_heads, length, d, dtype=dtype, grad=backward) for _ in range(2))

        def forward():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

        return forward_or_backward(forward, [q, k, v], backward, torch.randn_like)

    return prepare


def linear(t, n, k, rank, dtype="bf16"):
    def prepare():
        x, w = normal(t, k, dtype=dtype), normal(n, k, dtype=dtype)
        a, b = normal(rank, k, dtype=dtype), normal(n, rank, dtype=dtype)

        def work():
            y = F.linear(x, w)
            if rank:
                y += 0.5 * F.linear(F.linear(x, a), b)

        return quietly(work)

    return prepare


def input_gradient(t, n, k, dtype):
    def prepare():
        dy, w = normal(t, n, dtype=dtype), normal(n, k, dtype=dtype)
        return lambda: dy @ w

    return prepare


def weight_gradient(t, n, k, dtype):
    def prepare():
        x, dy = normal(t, k, dtype=dtype), normal(t, n, dtype=dtype)
        return lambda: dy.T @ x

    return prepare


def elements(function, operands, backward, *shape):
    """A function of tensors of one shape."""

    def one():
        inputs = [normal(*shape, grad=backward) for _ in range(operands)]
        return forward_or_backward(lambda: function(*inputs), inputs, backward, torch.randn_like)

    return lambda: in_turn([one() for _ in range(SETS)])


def rope(halves, tokens, heads, d, rotated, backward):
    """Rotates as published code does: in the dtype of x, with tables of that dtype."""

    def one():
        x, angles = normal(tokens, heads, d), normal(tokens, 1, rotated)
        cos, sin = angles.cos(), angles.sin() * (-1 if backward else 1)

        def work():
            turned, rest = x[..., :rotated], x[..., rotated:]
            if halves:
                first, second = turned.chunk(2, dim=-1)
                other = torch.cat((-second, first), dim=-1)
            else:
                other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
            y = turned * cos + other * sin
            return torch.cat((y, rest), dim=-1) if rotated < d else y

        return quietly(work)

    return lambda: in_turn([one() for _ in range(SETS)])


def rows_of(n, limit):
    return torch.randint(limit, (n,), device="cuda")


def embedding(t, v, c):
    def prepare():
        table = normal(v, c)
        return in_turn([quietly(lambda i=rows_of(t, v): F.embedding(i, table)) for _ in range(SETS)])

    return prepare


def embedding_gradient(t, v, c):
    """Adds to an existing table. PyTorch's own backward fills a table with zeros first."""

    def prepare():
        table = normal(v, c, dtype="f32")
        sets = [(rows_of(t, v), normal(t, c)) for _ in range(SETS)]
        return in_turn([lambda i=i, x=x: table.index_add_(0, i, x.float()) for i, x in sets])

    return prepare


def put_rows(part, t, c):
    def prepare():
        first = (t - part) // 2
        index = torch.arange(first, first + part, device="cuda")
        sets = [(normal(t, c), normal(part, c)) for _ in range(SETS)]
        return in_turn([lambda y=y, x=x: y.index_copy_(0, index, x) for y, x in sets])

    return prepare


def rows_by_group(part, t):
    """The host waits for the result, since its sizes depend on values."""

    def prepare():
        first = (t - part) // 2
        mask = torch.zeros(t, device="cuda", dtype=torch.bool)
        mask[first : first + part] = True
        return lambda: (torch.nonzero(~mask), torch.nonzero(mask))

    return prepare


def transposed(dtype, *shape):
    def prepare():
        x = normal(*shape, dtype=dtype)
        return lambda: x.transpose(1, 2).contiguous()

    return prepare


def row_sums(dtype, part, t, c):
    def prepare():
        first = (t - part) // 2
        index = torch.arange(first, first + part, device="cuda") if part < t else None
        sets = [normal(t, c, dtype=dtype) for _ in range(SETS)]
        return in_turn([lambda x=x: (x if index is None else x[index]).sum(0, dtype=torch.float32) for x in sets])

    return prepare


def losses(n, v):
    def prepare():
        logits, labels = normal(n, v, dtype="f32"), rows_of(n, v)
        return quietly(lambda: F.cross_entropy(logits, labels, reduction="none"))

    return prepare


def logit_gradients(dtype, n, v):
    def prepare():
        logits, labels = normal(n, v, dtype="f32", grad=True), rows_of(n, v)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return lambda: torch.autograd.grad(loss, [logits], retain_graph=True)[0].to(kind(dtype))

    return prepare


def head(n, c, v, hidden_grad, weight_grad):
    """Logits in f32, as in published code. Gradients are computed with the forward, as ours are for a chunk."""

    def prepare():
        hidden, weight = normal(n, c, grad=hidden_grad), normal(v, c, grad=weight_grad, scale=0.02)
        labels = rows_of(n, v)
        wanted = [x for x in (hidden, weight) if x.requires_grad]

        def work():
            with torch.set_grad_enabled(bool(wanted)):
                loss = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
            return torch.autograd.grad(loss, wanted) if wanted else loss

        return work

    return prepare


def two_layers(t, n, k, vision, which, dtype="bf16"):
    """As in published code: split the rows, compute a product of each part, put the results together."""

    def prepare():
        front = (t - vision) // 2
        second = torch.arange(front, front + vision, device="cuda")
        first = torch.cat([torch.arange(front, device="cuda"), torch.arange(front + vision, t, device="cuda")])
        groups = [(rows, normal(n, k, dtype=dtype)) for rows in (first, second)]
        x, dy = normal(t, k, dtype=dtype), normal(t, n, dtype=dtype)

        def work():
            with torch.no_grad():
                if which == "dW":
                    return [dy[rows].T @ x[rows] for rows, _ in groups]
                a, width = (dy, k) if which == "dx" else (x, n)
                out = torch.empty(t, width, device="cuda", dtype=kind(dtype))
                for rows, weight in groups:
                    out[rows] = a[rows] @ (weight if which == "dx" else weight.T)
                return out

        return work

    return prepare


def adapted(t, n, k, rank, backward, dtype="bf16"):
    def prepare():
        x, w = normal(t, k, dtype=dtype, grad=backward), normal(n, k, dtype=dtype)
        a, b = normal(rank, k, dtype=dtype, grad=backward), normal(n, rank, dtype=dtype, grad=backward)

        def forward():
            return F.linear(x, w) + 0.5 * F.linear(F.linear(x, a), b)

        return forward_or_backward(forward, [x, a, b], backward, torch.randn_like)

    return prepare
