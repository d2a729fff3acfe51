"""Times PyTorch on the work of the tables of scripts/gpu-check.sh: the same shapes, on the same GPU, right after.

Prints a JSON object for each row as soon as it is measured: name of the row -> milliseconds. A caller that kills this program
therefore keeps the rows so far. Rows that PyTorch cannot compute are left out and named on stderr.
usage: gpu_peers.py [--budget SECONDS] [--params N] [--stage table|products] [--names]
       gpu_peers.py --stage step --model-config FILE [--tokens N] [--slices N] [--rank N]
With --names it prints the names of the rows and needs no PyTorch.
The stage `step` times a training step of MiniCPM-V's shapes (gpu_peer_step.py).
"""

import json
import sys
import time

import gpu_peer_rows as peer

NAMES = "--names" in sys.argv
if not NAMES:
    import torch
    import torch.nn.functional as F


def option(name, otherwise):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else otherwise


BUDGET = float(option("--budget", 60.0))
STAGE = option("--stage", "table")
STARTED = time.monotonic()
results = {}


def median_ms(work, seconds=0.15):
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
    """Measures a row, if it belongs to the stage that runs."""
    if stage != STAGE:
        return
    if NAMES:
        results[name] = None
        return
    if time.monotonic() - STARTED > BUDGET:
        print(f"{name}: not measured, the time is spent", file=sys.stderr)
        return
    try:
        results[name] = median_ms(prepare())
        print(json.dumps({name: results[name]}), flush=True)
    except Exception as error:  # a peer that cannot compute a row is not our failure
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()


def products():
    for t, n, k in ((8192, 4096, 4096), (8192, 11008, 4096), (8192, 4096, 11008), (9808, 15360, 1792)):
        measure(f"product bf16 {t}x{n}x{k}", peer.linear(t, n, k, 0), "products")
    layer = (8192, 4096, 4096)
    measure("product f16 8192x4096x4096", peer.linear(*layer, 0, "f16"), "products")
    for dtype in ("bf16", "f16"):
        measure(f"product {dtype} 8192x4096x4096 dx", peer.input_gradient(*layer, dtype), "products")
        measure(f"product {dtype} 8192x4096x4096 dW", peer.weight_gradient(*layer, dtype), "products")
    for vision in (2048, 6144):
        for which in ("forward", "dx", "dW"):
            name = f"two layers bf16 8192x4096x4096, {vision} rows of the second, {which}"
            measure(name, peer.two_layers(8192, 4096, 4096, vision, which), "products")
    for rank in (16, 64):
        for which in ("forward", "backward"):
            name = f"adapted product bf16 8192x4096x4096 rank {rank} {which}"
            measure(name, peer.adapted(8192, 4096, 4096, rank, which == "backward"), "products")


def training_steps():
    import gpu_peer_step

    numbers = [int(option(name, value)) for name, value in (("--tokens", 2048), ("--slices", 10), ("--rank", 64))]
    for name, prepare in gpu_peer_step.steps(option("--model-config", None), *numbers):
        measure(name, prepare, "step")


WHICH = ((False, "forward"), (True, "backward"))


def table(n):
    for source, target in (("f32", "bf16"), ("bf16", "f32"), ("f32", "f16")):
        measure(f"cast {source} to {target}, 256 Mi", peer.cast(source, target, n))
    measure("adamw f32, f32 gradient", peer.adamw("f32", n))
    measure("adamw pure bf16, bf16 gradient", peer.adamw("bf16", n))
    for dtype in ("f32", "bf16", "f16"):
        measure(f"gradient norm {dtype}", peer.gradient_norm(dtype, n))
    for backward, which in WHICH:
        for name in ("rms", "layer"):
            for dtype, c in (("bf16", 4096), ("bf16", 1152), ("f16", 4096), ("f32", 4096)):
                measure(f"{name} norm {dtype} 16384x{c} {which}", peer.norm(name, dtype, 16384, c, backward))
        measure(f"rms norm bf16 16384x4096 with residual {which}", peer.norm("rms", "bf16", 16384, 4096, backward, True))
        measure(f"rms norm bf16 8192x12288 {which}", peer.norm("rms", "bf16", 8192, 12288, backward))
        measure(f"rms norm bf16 16384x4100 {which}", peer.norm("rms", "bf16", 16384, 4100, backward))
    for dtype, name, *shape in (
        ("bf16", "d128 causal 4096 28:4", 2, 4096, 28, 4, 128, True),
        ("bf16", "d128 full 4096 16:16", 2, 4096, 16, 16, 128, False),
        ("bf16", "d112 full 1226 16:16", 8, 1226, 16, 16, 112, False),
        ("bf16", "d80 full 1024 16:16", 10, 1024, 16, 16, 80, False),
        ("bf16", "d72 full 1024 16:16", 10, 1024, 16, 16, 72, False),
        ("bf16", "d64 full 1226 16:16", 8, 1226, 16, 16, 64, False),
        ("bf16", "d128 causal 512 28:4", 1, 512, 28, 4, 128, True),
        ("f16", "d128 causal 4096 28:4", 2, 4096, 28, 4, 128, True),
        ("f16", "d72 full 1024 16:16", 10, 1024, 16, 16, 72, False),
        ("f32", "d128 causal 1024 16:16", 2, 1024, 16, 16, 128, True),
    ):
        fused = () if dtype == "f32" else ((True, "backward, fused"),)
        for backward, which in (*WHICH, *fused):
            measure(f"attention {dtype} {name} {which}", peer.attention(dtype, *shape, backward))
    layer = (8192, 4096, 4096)
    for dtype, rank in (
        *(("bf16", rank) for rank in (0, 12, 16, 64)),
        *((dtype, rank) for dtype in ("f16", "f32") for rank in (0, 16)),
    ):
        measure(f"linear {dtype} 8192x4096x4096 rank {rank}", peer.linear(*layer, rank, dtype))
    for dtype in ("f16", "f32"):
        measure(f"linear {dtype} 8192x4096x4096 rank 16 backward", peer.adapted(*layer, 16, True, dtype))
    for dtype in ("bf16", "f32"):
        measure(f"linear {dtype} 8192x4096x4096 dW", peer.weight_gradient(*layer, dtype))
    for which in ("forward", "dx", "dW"):
        name = f"two layers f32 8192x4096x4096, 2048 rows of the second, {which}"
        measure(name, peer.two_layers(*layer, 2048, which, "f32"))
    pointwise()
    tables()
    for name, work in (
        ("losses f32 222x150528", peer.losses(222, 150528)),
        ("gradients of logits bf16 222x150528", peer.logit_gradients("bf16", 222, 150528)),
        ("gradients of logits f32 222x150528", peer.logit_gradients("f32", 222, 150528)),
        ("linear cross entropy bf16 222x4096x150528 forward", peer.head(222, 4096, 150528, False, False)),
        ("linear cross entropy bf16 222x4096x150528 with gradients of hidden states", peer.head(222, 4096, 150528, True, False)),
        ("linear cross entropy bf16 222x4096x150528 with all gradients", peer.head(222, 4096, 150528, True, True)),
    ):
        measure(name, work)


def pointwise():
    for backward, which in WHICH:
        swiglu = peer.elements(lambda gate, up: F.silu(gate) * up, 2, backward, 8192, 13696)
        measure(f"swiglu bf16 8192x13696 {which}", swiglu)
        tanh = peer.elements(lambda x: F.gelu(x, approximate="tanh"), 1, backward, 10240, 4304)
        measure(f"gelu tanh bf16 10240x4304 {which}", tanh)
        measure(f"gelu erf bf16 9808x15360 {which}", peer.elements(lambda x: F.gelu(x), 1, backward, 9808, 15360))
        for halves, name in ((True, "halves"), (False, "pairs")):
            measure(f"rope {name} bf16 8192x32x128 {which}", peer.rope(halves, 8192, 32, 128, 128, backward))
    measure("rope pairs bf16 8192x32x128, half of a head, forward", peer.rope(False, 8192, 32, 128, 64, False))
    measure("add bf16 8192x4096", peer.elements(lambda a, b: a + b, 2, False, 8192, 4096))
    measure("scale bf16 8192x4096", peer.elements(lambda x: x * 0.5, 1, False, 8192, 4096))
    measure("dropout bf16 8192x4096", peer.elements(lambda x: F.dropout(x, 0.1), 1, False, 8192, 4096))


def tables():
    measure("embedding bf16 8192 rows of 150528x4096", peer.embedding(8192, 150528, 4096))
    measure("embedding gradient f32 of bf16, 8192 rows of 150528x4096", peer.embedding_gradient(8192, 150528, 4096))
    measure("rows put bf16 6144 of 8192x4096", peer.put_rows(6144, 8192, 4096))
    measure("numbers of 8192 rows by group, 6144 of the second", peer.rows_by_group(6144, 8192))
    for dtype in ("bf16", "f32"):
        measure(f"transposed {dtype} 64x1024x1152", peer.transposed(dtype, 64, 1024, 1152))
        measure(f"sums over 8192 rows {dtype} x4096", peer.row_sums(dtype, 8192, 8192, 4096))
    measure("sums over 6144 of 8192 rows bf16 x4096", peer.row_sums("bf16", 6144, 8192, 4096))


def main():
    if STAGE == "step":
        training_steps()
    else:
        table(int(option("--params", 1 << 28)))
        products()
    if NAMES:
        print(json.dumps(list(results)))


main()
