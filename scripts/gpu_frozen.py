"""The stage `frozen` of scripts/gpu-check.sh: two ranks train adapters on one base in 4 bits, which both read in host memory. The
driver registers the base in place, or it goes through pinned chunks. The losses must be equal; the times are shown.

usage: gpu_frozen.py config CONFIG FILE      writes CONFIG to FILE with few layers
       gpu_frozen.py judge OUT DEVICE        prints a table of the runs OUT/frozen-registered and OUT/frozen-pinned; the exit
                                             status is 1 if they differ or did not run as named"""

import json
import re
import sys
from pathlib import Path
from statistics import median

# Layers of the language model and of the vision tower: the shapes of all, in a minute.
LAYERS = 4
# Smallest number of values of an attention head for which every build has kernels.
HEAD = 64
RUNS = {"registered": r"the driver registered (\S+) in place", "pinned": None}


def shortened(config):
    """The network `config` with few layers, and with heads for which kernels are built in."""
    config, vision = dict(config), dict(config["vision_config"])
    config["vision_config"] = vision
    for part, heads in (config, "num_attention_heads"), (vision, "num_heads"):
        part["num_hidden_layers"] = min(LAYERS, part["num_hidden_layers"])
        part["hidden_size"] = max(HEAD * part[heads], part["hidden_size"])
    return config


def read(out, run):
    """Losses, seconds of the median step without the first, and the screen of a run."""
    rows = [json.loads(line) for line in (out / f"frozen-{run}.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_seconds" in row]
    return [row["loss"] for row in rows], median(row["step_seconds"] for row in rows[1:]), (out / f"frozen-{run}.txt").read_text()


def judged(found, device):
    """What is wrong with the runs, by name."""
    wrong = []
    losses = {run: values for run, (values, _, _) in found.items()}
    if not losses["pinned"] or losses["registered"] != losses["pinned"]:
        wrong.append(f"losses {losses['registered']} instead of {losses['pinned']}")
    for run, words in RUNS.items():
        said = found[run][2]
        if "one copy in shared memory" not in said:
            wrong.append(f"{run}: the ranks do not share the base")
        if device == "cuda" and (re.search(RUNS["registered"], said) is not None) != (words is not None):
            wrong.append(f"{run}: the driver {'did not register' if words else 'registered'} the base")
    return wrong


def main():
    mode, first, second = sys.argv[1:]
    if mode == "config":
        Path(second).write_text(json.dumps(shortened(json.loads(Path(first).read_text()))))
        return 0
    found = {run: read(Path(first), run) for run in RUNS}
    wrong = judged(found, second)
    print("## frozen weights that two ranks read in host memory\n")
    print("| weights | seconds per step | losses |\n|---|---|---|")
    for run, (losses, seconds, _) in found.items():
        print(f"| {run} | {seconds:.4f} | {' '.join(f'{value:.6f}' for value in losses)} |")
    for line in wrong:
        print(f"\nFAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
