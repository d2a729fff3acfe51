"""Stages `start` and `quantized` of scripts/gpu-check.sh: compares the losses of a few updates in f32 on two devices.

usage: gpu_start.py OUT DEVICE OTHER [--runs NAME]. Prints a table. The exit status is 1 if the losses differ."""

import json
import sys
from pathlib import Path

# Largest difference of a loss per pass, as a share of the loss, as for f32 in gpu_train.py: the order of sums differs.
PASS = 1e-4


def rows(run):
    """Rows of the log of the run in this directory."""
    return [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in rows(run) if "loss" in row]


def differences(one, other):
    """Largest relative difference per pass, and what is wrong with the two lists."""
    if not one or len(one) != len(other):
        return 0.0, [f"{len(one)} and {len(other)} losses"]
    worst, wrong = 0.0, []
    for step, (a, b) in enumerate(zip(one, other), start=1):
        share = abs(a - b) / (step * max(abs(a), 1e-30))
        worst = max(worst, share)
        if not share <= PASS:
            wrong.append(f"update {step}: loss {b} instead of {a}")
    return worst, wrong


def main():
    out, one, other, *more = sys.argv[1:]
    name = more[1] if more else "start"
    both = [losses(Path(out) / f"{name}-{device}") for device in (one, other)]
    worst, wrong = differences(*both)
    print(f"## {name}: {len(both[1])} updates in f32 on {other}, beside {one}\n")
    print("| device | losses |\n|---|---|")
    for device, values in zip((one, other), both):
        print(f"| {device} | {' '.join(f'{value:.6f}' for value in values)} |")
    print(f"\nLargest difference per pass: {worst:.1e}, allowed {PASS:.0e}")
    for line in wrong:
        print(f"\nFAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
