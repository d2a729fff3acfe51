"""The stage `tiles` of scripts/gpu-check.sh: long samples with tiles of the feed-forward layers, beside all rows at once.

usage: gpu_tiles.py OUT TOKENS WHOLE TILED, for the runs OUT/WHOLE and OUT/TILED. Prints a table. The exit status is 1 if
losses differ, or if tiles do not lower the peak of device memory."""

import sys
from pathlib import Path

from gpu_start import PASS, rows

# Largest difference of a loss per pass in bf16, as a share of the loss: an f32 pass's, times the ratio of the two roundings
# (2^-9 and 2^-24) to the power of 1/2, since errors of single values average out.
IN_16_BITS = PASS * 2 ** ((24 - 9) / 2)


def judged(whole, tiled):
    """Rows of the table, and what is wrong. Each argument is the log of a run."""
    table, wrong = [], []
    for name, log in (("all rows", whole), ("tiles", tiled)):
        log = [row for row in log if "loss" in row]
        peak = max((row["bytes"]["device"] for row in log), default=0)
        # The first step compiles and loads kernels.
        seconds = min((row["step_seconds"] for row in log[1:]), default=0.0)
        table.append((name, peak, seconds, [row["loss"] for row in log]))
    (_, most, _, first), (_, least, _, second) = table
    if not first or len(first) != len(second):
        wrong.append(f"{len(first)} and {len(second)} losses")
    for step, (one, other) in enumerate(zip(first, second), start=1):
        if not abs(one - other) <= IN_16_BITS * step * abs(one):
            wrong.append(f"update {step}: loss {other} instead of {one}")
    if not least < most:
        wrong.append(f"the peak with tiles is {least} bytes, without {most}")
    return table, wrong


def main():
    out, tokens, *runs = sys.argv[1:]
    table, wrong = judged(*(rows(Path(out) / run) for run in runs))
    print(f"## Samples of {tokens} tokens with tiles of the feed-forward layers\n")
    print("| feed-forward layers | peak of device memory | seconds per step | losses |\n|---|---|---|---|")
    for name, peak, seconds, losses in table:
        print(f"| {name} | {peak / 2**30:.2f} GiB | {seconds:.3f} | {' '.join(f'{loss:.5f}' for loss in losses)} |")
    for line in wrong:
        print(f"\nFAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
