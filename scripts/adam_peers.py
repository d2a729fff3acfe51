"""Compares AdamW steps of this repository with those of torch and DeepSpeed, in one run.

usage: cargo build --release -p benches && python3 scripts/adam_peers.py --params 100e6 --threads 1 --rounds 7
Needs torch. The rows of DeepSpeed need the package deepspeed (installed with DS_ACCELERATOR=cpu) and a C++ compiler.

       ... --params 400e6 --threads 2 --groups runs only rows that are compared with each other at a time, for less memory (18 GB)

Every round runs each row once, so that a slow moment of the machine affects all rows. Figures are medians. `share` is the
row's bandwidth divided by that of an in-place read-modify-write in the same round.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--params", type=float, default=100e6)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--cpu", action="store_true", help="measure processor time divided by threads instead of wall time, for a busy machine")
parser.add_argument("--only", default="", help="names of the rows to run, separated by commas")
parser.add_argument("--groups", action="store_true", help="run compared rows together, each set of rows in a process of its own")
options = parser.parse_args()
GROUPS = [
    "f32,torch fused f32,deepspeed f32", "master,deepspeed cast + step + copy",
    "pure,torch fused all bf16", "moments,deepspeed bf16 + f32 moments",
    "f32-bf16-grad,master-f32-grad", "moments-f32-grad,pure-f32-grad,kahan",
    "f32,f32-8bit,master-8bit-f32-grad",
]
if options.groups:
    for group in GROUPS:
        words = [f"--params={options.params}", f"--threads={options.threads}", f"--rounds={options.rounds}", f"--only={group}"]
        subprocess.run([sys.executable, __file__, *words] + ["--cpu"] * options.cpu, check=True)
    sys.exit()
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = str(options.threads)

import torch  # noqa: E402  (reads the environment)

torch.set_num_threads(options.threads)
n = int(options.params) // 1024 * 1024
only = set(options.only.split(",")) - {""}
target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", pathlib.Path(__file__).parent.parent / "target"))
ours = subprocess.Popen(
    [target / "release" / "adam_step", str(n), str(options.threads)],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)

OURS = {
    "rmw": 8, "f32": 28, "f32-bf16-grad": 26, "master-f32-grad": 30, "master": 28,
    "moments-f32-grad": 24, "moments": 22, "pure-f32-grad": 16, "pure": 14, "kahan": 18,
    "f32-8bit": 16, "master-8bit-f32-grad": 18,
}


def step_ours(name):
    ours.stdin.write(name + "\n")
    ours.stdin.flush()
    return tuple(float(word) for word in ours.stdout.readline().split())


def timed(call):
    def run():
        start, processor = time.perf_counter(), time.process_time()
        call()
        return time.perf_counter() - start, time.process_time() - processor
    return run


class Peers:
    """Tensors of the peers. Each optimizer owns its states."""

    def __init__(self):
        self.wide = torch.zeros(n).normal_(std=0.02)
        self.grad = torch.zeros(n).normal_(std=1e-4)
        self.narrow = self.wide.bfloat16()
        self.narrow_grad = self.grad.bfloat16()

    def parameter(self, narrow):
        parameter = torch.nn.Parameter(self.narrow if narrow else self.wide)
        parameter.grad = self.narrow_grad if narrow else self.grad
        return [parameter]

    def torch(self, narrow):
        return torch.optim.AdamW(self.parameter(narrow), lr=1e-4, weight_decay=0.1, fused=True).step

    def deepspeed(self, narrow):
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        return DeepSpeedCPUAdam(self.parameter(narrow), lr=1e-4, weight_decay=0.1).step

    def offload(self):
        step = self.deepspeed(False)

        def run():
            self.grad.copy_(self.narrow_grad)
            step()
            self.narrow.copy_(self.wide)
        return run


peers = Peers()
PEERS = {
    "torch fused f32": (lambda: peers.torch(False), 28),
    "torch fused all bf16": (lambda: peers.torch(True), 14),
    "deepspeed f32": (lambda: peers.deepspeed(False), 28),
    "deepspeed cast + step + copy": (peers.offload, 28),
    "deepspeed bf16 + f32 moments": (lambda: peers.deepspeed(True), 22),
}

rows = {}
for name, moved in OURS.items():
    if not only or name in only or name == "rmw":
        rows[name] = (lambda name=name: step_ours(name), moved)
for name, (make, moved) in PEERS.items():
    if only and name not in only:
        continue
    try:
        call = make()
        call()
    except Exception as error:  # a missing package must not stop the other rows
        print(f"{name}: not available: {error!r}"[:200])
        continue
    rows[name] = (timed(call), moved)

seconds = {name: [] for name in rows}
for _ in range(options.rounds):
    for name, (run, _) in rows.items():
        wall, processor = run()
        seconds[name].append(processor / options.threads if options.cpu else wall)

print(f"{n} parameters, {options.threads} threads, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
print(f"{'':30} {'ns/param':>9} {'GB/s':>7} {'share':>6}")
for name, (_, moved) in rows.items():
    median = statistics.median(seconds[name])
    shares = [moved * ceiling / (8 * mine) for mine, ceiling in zip(seconds[name], seconds["rmw"])]
    print(f"{name:30} {median / n * 1e9:9.3f} {moved * n / median / 1e9:7.1f} {statistics.median(shares):6.2f}")


def ratio(label, ours_name, *others):
    others = [name for name in others if name in rows]
    if ours_name not in rows or not others:
        return
    faster = [min(times) for times in zip(*(seconds[name] for name in others))]
    ratios = [peer / own for peer, own in zip(faster, seconds[ours_name])]
    print(f"{label}: {statistics.median(ratios):.2f} times as fast as {' or '.join(others)}")


ratio("f32 state", "f32", "torch fused f32", "deepspeed f32")
ratio("offloaded step", "master", "deepspeed cast + step + copy")
ratio("all bf16", "pure", "torch fused all bf16")
ratio("bf16 weights, f32 moments", "moments", "deepspeed bf16 + f32 moments")
ours.stdin.close()
ours.wait()
