"""Times the same work in PyTorch, for the table of scripts/gpu-check.sh: the same shapes, on the same GPU, right after.

Prints one JSON object: name of the row -> milliseconds. What PyTorch cannot do is left out and named on stderr.
usage: gpu_peers.py [--budget SECONDS] [--params N] [--stage table|products]
       gpu_peers.py --stage step --model-config FILE [--tokens N] [--slices N] [--rank N]
The stage `step` times a training step of MiniCPM-V's shapes (gpu_peer_step.py).
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

def option(name, otherwise):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else otherwise


BUDGET = float(option("--budget", 60.0))
STAGE = option("--stage", "table")
STARTED = time.monotonic()
results = {}


def median_ms(work, seconds=0.5):
    """Median time of one call on the device, after three calls to warm up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times, begun = [], time.monotonic()
    while len(times) < 5 or (time.monotonic() - begun < seconds and len(times) < 200):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure(name, prepare, stage="table"):
    """Rows of another stage than the one that asks are left out."""
    if stage != STAGE:
        return
    if time.monotonic() - STARTED > BUDGET:
        print(f"{name}: not measured, the time is used up", file=sys.stderr)
        return
    try:
        results[name] = median_ms(prepare())
    except Exception as error:  # a peer that cannot do it is not our failure
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    torch.cuda.empty_cache()


def normal(*shape, dtype=torch.bfloat16, grad=False):
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def adamw(dtype, n):
    def prepare():
        weight = torch.nn.Parameter(normal(n, dtype=dtype))
        weight.grad = normal(n, dtype=dtype)
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1, fused=True)
        return optimizer.step

    return prepare


def norm(kind, rows, c, backward):
    def prepare():
        # Several inputs in turn, so that none is in the cache.
        sets = [(normal(rows, c, grad=backward), normal(rows, c)) for _ in range(4)]
        weight, bias = normal(c, grad=backward), normal(c, grad=backward)
        forward = {
            "rms": lambda x: F.rms_norm(x, (c,), weight, 1e-6),
            "layer": lambda x: F.layer_norm(x, (c,), weight, bias, 1e-6),
        }[kind]
        turn = [0]
        inputs = [weight] if kind == "rms" else [weight, bias]
        outputs = [forward(x) for x, _ in sets] if backward else None

        def work():
            turn[0] = (turn[0] + 1) % 4
            x, dy = sets[turn[0]]
            if backward:
                torch.autograd.grad(outputs[turn[0]], [x, *inputs], dy, retain_graph=True)
            else:
                with torch.no_grad():
                    forward(x)

        return work

    return prepare


def attention(batch, length, heads, kv_heads, d, causal, backward):
    def prepare():
        q = normal(batch, heads, length, d, grad=backward)
        k, v = (normal(batch, kv_heads, length, d, grad=backward) for _ in range(2))

        def forward():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

        if not backward:
            def work():
                with torch.no_grad():
                    forward()
            return work
        out, dout = forward(), normal(batch, heads, length, d)
        return lambda: torch.autograd.grad(out, [q, k, v], dout, retain_graph=True)

    return prepare


def linear(t, n, k, rank):
    def prepare():
        x, w = normal(t, k), normal(n, k)
        a, b = normal(rank, k), normal(n, rank)

        def work():
            with torch.no_grad():
                y = F.linear(x, w)
                if rank:
                    y += 0.5 * F.linear(F.linear(x, a), b)

        return work

    return prepare


def two_layers(t, n, k, vision, which):
    """As published code does it: rows taken apart, a product each, results put together."""

    def prepare():
        front = (t - vision) // 2
        second = torch.arange(front, front + vision, device="cuda")
        first = torch.cat([torch.arange(front, device="cuda"), torch.arange(front + vision, t, device="cuda")])
        groups = [(first, normal(n, k)), (second, normal(n, k))]
        x, dy = normal(t, k), normal(t, n)

        def work():
            with torch.no_grad():
                if which == "dW":
                    return [dy[rows].T @ x[rows] for rows, _ in groups]
                a, width = (dy, k) if which == "dx" else (x, n)
                out = torch.empty(t, width, device="cuda", dtype=torch.bfloat16)
                for rows, weight in groups:
                    out[rows] = a[rows] @ (weight if which == "dx" else weight.T)
                return out

        return work

    return prepare


def adapted(t, n, k, rank, backward):
    def prepare():
        x, w = normal(t, k, grad=backward), normal(n, k)
        a, b = normal(rank, k, grad=backward), normal(n, rank, grad=backward)

        def forward():
            return F.linear(x, w) + 0.5 * F.linear(F.linear(x, a), b)

        if not backward:
            def work():
                with torch.no_grad():
                    forward()
            return work
        y, dy = forward(), normal(t, n)
        return lambda: torch.autograd.grad(y, [x, a, b], dy, retain_graph=True)

    return prepare


def products():
    for t, n, k in ((8192, 4096, 4096), (8192, 11008, 4096), (8192, 4096, 11008), (9808, 15360, 1792)):
        measure(f"product bf16 {t}x{n}x{k}", linear(t, n, k, 0), "products")
    for vision in (2048, 6144):
        for which in ("forward", "dx", "dW"):
            name = f"two layers bf16 8192x4096x4096, {vision} rows of the second, {which}"
            measure(name, two_layers(8192, 4096, 4096, vision, which), "products")
    for rank in (16, 64):
        for which in ("forward", "backward"):
            name = f"adapted product bf16 8192x4096x4096 rank {rank} {which}"
            measure(name, adapted(8192, 4096, 4096, rank, which == "backward"), "products")


def training_steps():
    import gpu_peer_step

    numbers = [int(option(name, value)) for name, value in (("--tokens", 2048), ("--slices", 10), ("--rank", 64))]
    for name, prepare in gpu_peer_step.steps(option("--model-config", None), *numbers):
        measure(name, prepare, "step")


def main():
    if STAGE == "step":
        training_steps()
        print(json.dumps(results))
        return
    n = int(sys.argv[sys.argv.index("--params") + 1]) if "--params" in sys.argv else 1 << 28
    measure("adamw f32, f32 gradient", adamw(torch.float32, n))
    measure("adamw pure bf16, bf16 gradient", adamw(torch.bfloat16, n))
    for kind in ("rms", "layer"):
        for c in (4096, 1152):
            for backward in (False, True):
                which = "backward" if backward else "forward"
                measure(f"{kind} norm bf16 16384x{c} {which}", norm(kind, 16384, c, backward))
    for name, shape in {
        "d128 causal 4096 28:4": (2, 4096, 28, 4, 128, True),
        "d128 full 4096 16:16": (2, 4096, 16, 16, 128, False),
        "d112 full 1226 16:16": (8, 1226, 16, 16, 112, False),
        "d80 full 1024 16:16": (10, 1024, 16, 16, 80, False),
        "d72 full 1024 16:16": (10, 1024, 16, 16, 72, False),
        "d64 full 1226 16:16": (8, 1226, 16, 16, 64, False),
    }.items():
        measure(f"attention bf16 {name} forward", attention(*shape, False))
        measure(f"attention bf16 {name} backward", attention(*shape, True))
    for rank in (0, 16, 64):
        measure(f"linear bf16 8192x4096x4096 rank {rank}", linear(8192, 4096, 4096, rank))
    products()
    print(json.dumps(results))


main()
