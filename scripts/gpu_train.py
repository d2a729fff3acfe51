"""The stage `train` of scripts/gpu-check.sh: losses of the GPU beside those of the CPU, and what the driver counts beside
the plan. usage: gpu_train.py OUT DEVICE; a table on standard output, exit status 1 when anything is off."""

import json
import re
import sys
from pathlib import Path

from gpu_overlap import OVERLAP, bus_rates, longest

# A loss behind k updates, as a share of the loss for k + 1 passes. In f32 a pass is off by sums in another order; in 16
# bits by the roundings of some dozen layers, independent ones: 4 units of the format. As in tests/device/src/tolerance.rs.
PASS = {"f32": 1e-4, "bf16": 4 / 256, "fp16": 4 / 2048, "pure-bf16": 4 / 256}
# What the driver, the context and loaded kernels may take beside the arena: the constant of the plan (kernels/src/footprint.rs).
CONTEXT_BYTES = 768 << 20
MIB = 1 << 20



def rows_of(run):
    return [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in rows_of(run) if "loss" in row]


def last_step(run, rates):
    """Milliseconds of the last step, of the parts that it waits for at least, and of the device's waits."""
    row = rows_of(run)[-1]
    parts, _, times, _ = longest([row], rates)
    names = ("compute", "to the device", "from the device", "update on the processor")
    return 1e3 * row["step_seconds"], [1e3 * parts[name] for name in names], 1e3 * row["device_seconds"]["waits"], times


def main(out, device):
    failures = []
    print(f"## training on {device}\n")
    print("| precision | largest difference of a loss to the CPU's | allowed there |\n|---|---|---|")
    for precision, share in PASS.items():
        pair = [losses(out / f"train-{precision}-{where}") for where in ("cpu", device)]
        if not pair[0] or len(pair[0]) != len(pair[1]):
            failures.append(f"{precision}: {len(pair[1])} losses instead of {len(pair[0])}")
            continue
        rows = [(abs(a - b), (k + 1) * share * abs(a)) for k, (a, b) in enumerate(zip(*pair))]
        worst = max(rows, key=lambda row: row[0] / row[1])
        print(f"| {precision} | {worst[0]:.2e} | {worst[1]:.2e} |")
        if not all(off <= allowed for off, allowed in rows):
            failures.append(f"{precision}: losses differ by more than allowed")
        if not pair[0][-1] < pair[0][0]:
            failures.append(f"{precision}: the loss does not fall")
    if device == "cuda":
        print("\n| precision | plan | arena | used | by the driver, context included |\n|---|---|---|---|---|")
        for precision in PASS:
            run = out / f"train-{precision}-{device}"
            config = json.loads((run / "config.resolved.json").read_text())
            plan = json.loads((run / "plan.json").read_text())["plan"]["memory"]["peak"]["device"]
            text = (out / f"train-{precision}-{device}.txt").read_text()
            used = re.search(r"rank 0 used (\S+) of the", text)
            driver = re.search(r"the driver counts (\d+) bytes more", text)
            if not used or not driver:
                failures.append(f"{precision}: the run does not say what it used of the GPU")
                continue
            arena, taken = config["arena_bytes"], int(driver[1])
            print(f"| {precision} | {plan / MIB:.1f}M | {arena / MIB:.1f}M | {used[1]} | {taken / MIB:.0f}M |")
            if not arena <= taken <= arena + CONTEXT_BYTES:
                failures.append(f"{precision}: the driver counts {taken} bytes, planned are {arena} and {CONTEXT_BYTES}")
        print(f"\nThe last step, ms; the goal at sizes that matter is {OVERLAP} times the longest part.\n")
        print("| precision | compute | bus in | bus out | update on the processor | waits for copies | step | times the longest |")
        print("|---|---|---|---|---|---|---|---|")
        for precision in PASS:
            step, own, waits, times = last_step(out / f"train-{precision}-{device}", bus_rates(out))
            cells = " | ".join(f"{value:.2f}" for value in own)
            print(f"| {precision} | {cells} | {waits:.2f} | {step:.2f} | {times:.2f} |")
    print()
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
