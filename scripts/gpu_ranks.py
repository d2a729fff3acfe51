"""The stages `ranks` and `pipeline` of scripts/gpu-check.sh: compares one run with different collectives, or on different GPUs.
usage: gpu_ranks.py PREFIX RANKS SETTINGS, for logs PREFIX-HOW.jsonl of the ways in HOWS. The first one is the reference.
Prints rows of a table. The exit status is 1 if losses differ more than allowed."""

import json
import sys
from pathlib import Path

# Largest relative difference of a loss per update with NCCL, as for a pass in f32 (scripts/gpu_train.py). Two f32 values
# have one sum, so differences come from more than two ranks or from NCCL's order of summation.
PASS = 1e-4
HOWS = ("shm", "ipc", "nccl", "undivided", "divided", "divided-ipc", "two-gpus")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(prefix, ranks, settings):
    failures, first = [], None
    for how in HOWS:
        path = Path(f"{prefix}-{how}.jsonl")
        if not path.exists():
            continue
        log = rows(path)
        losses = [row["loss"] for row in log if "loss" in row]
        times = sorted(row["step_seconds"] for row in log if "step_seconds" in row)
        seconds = f"{times[len(times) // 2]:.3f}" if times else "?"
        if not losses:
            failures.append(f"{path.name} has no losses")
            continue
        if first is None:
            first, verdict = losses, f"{losses[0]:.4f} to {losses[-1]:.4f}"
        elif how != "nccl":
            verdict = "the same bits" if losses == first else "NOT the same bits"
            if losses != first:
                failures.append(f"{path.name}: {losses} instead of {first}")
        else:
            off = max(abs(a - b) / abs(b) / (k + 1) for k, (a, b) in enumerate(zip(losses, first)))
            verdict = f"off by at most {off:.1e} of the loss for each update"
            if len(losses) != len(first) or not off <= PASS:
                failures.append(f"{path.name}: {losses} instead of {first}")
        print(f"| {ranks} | `{settings}` | {how} | {verdict} | {seconds} |")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
