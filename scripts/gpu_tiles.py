"""The stage `tiles` of scripts/gpu-check.sh: long samples with tiles of the feed-forward layers, beside all rows at once.

usage: gpu_tiles.py OUT TITLE WHOLE TILED, for the runs OUT/WHOLE and OUT/TILED. Prints a table. The exit status is 1 if a
bit of a loss or gradient norm differs, or if tiles do not lower the peak of device memory."""

import sys
from pathlib import Path

from gpu_start import rows


def judged(whole, tiled):
    """Rows of the table, and what is wrong. Each argument is the log of a run."""
    table, wrong = [], []
    for name, log in (("all rows", whole), ("tiles", tiled)):
        log = [row for row in log if "loss" in row]
        peak = max((row["bytes"]["device"] for row in log), default=0)
        # The first step compiles and loads kernels.
        seconds = min((row["step_seconds"] for row in log[1:]), default=0.0)
        table.append((name, peak, seconds, [(row["loss"], row["grad_norm"]) for row in log]))
    (_, most, _, first), (_, least, _, second) = table
    if not first or len(first) != len(second):
        wrong.append(f"{len(first)} and {len(second)} losses")
    for step, (one, other) in enumerate(zip(first, second), start=1):
        # The log has as many digits as tell two numbers apart. A value that is not finite is a word.
        if one != other or not all(isinstance(value, float) for value in one):
            wrong.append(f"update {step}: loss and norm {other} instead of {one}")
    if not least < most:
        wrong.append(f"the peak with tiles is {least} bytes, without {most}")
    return table, wrong


def main():
    out, title, *runs = sys.argv[1:]
    table, wrong = judged(*(rows(Path(out) / run) for run in runs))
    print(f"## {title}, with tiles of the feed-forward layers\n")
    print("| feed-forward layers | peak of device memory | seconds per step | losses |\n|---|---|---|---|")
    for name, peak, seconds, losses in table:
        print(f"| {name} | {peak / 2**30:.2f} GiB | {seconds:.3f} | {' '.join(f'{loss:.5f}' for loss, _ in losses)} |")
    for line in wrong:
        print(f"\nFAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
