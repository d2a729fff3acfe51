#!/usr/bin/env python3
"""Loads exports of the launcher in transformers and peft, and compares logits.

    python scripts/check_exports.py DIRECTORY_OF_BINARIES PACK...

PACK is a directory of tests/golden that transformers can load. The launcher trains adapters on it and exports them twice:
for peft, and merged. peft with the base model, transformers with the merged model, and this project with the merged model
must give the same logits, and others than the base model.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from compare_reference import main as compare_reference, read_samples
from reference_families import family_of

# Twice the rounding of two right implementations, as tests/src/tolerance.rs bounds logits.
LOGITS = 6e-5
# Least change of a logit that three updates at this learning rate make.
CHANGE = 1e-3
TRAINING = "--lora-rank 4 --learning-rate 1e-2 --max-steps 3 --precision f32 --device cpu --nproc 1"


def write_samples(pack, path):
    """Writes a sample with an image of the pack and one without."""
    image = min(pack.glob("cases/*/image*.png"))
    answer = {"role": "assistant", "content": "A cat."}
    samples = [
        {"image": str(image.resolve()), "messages": [{"role": "user", "content": "<image>What is this?"}, answer]},
        {"messages": [{"role": "user", "content": "Who are you?"}, answer]},
    ]
    path.write_text(json.dumps(samples))


def difference(first, second):
    """Largest difference of two lists of tensors."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def check(binaries, pack, work):
    """Trains, exports and compares one pack."""
    from peft import PeftModel

    data, run = work / "samples.json", work / "run"
    write_samples(pack, data)

    def launcher(line):
        subprocess.run([binaries / "launcher", *line.split()], check=True, stdout=subprocess.DEVNULL)

    launcher(f"--model {pack} --data {data} --output {run} {TRAINING}")
    launcher(f"export {run} --output {work / 'adapter'}")
    launcher(f"export {run} --output {work / 'merged'} --merge")
    samples = read_samples(data, None)

    def logits(directory, adapter=None):
        reference = family_of(directory)(directory, "cpu")
        if adapter:
            reference.model = PeftModel.from_pretrained(reference.model, adapter).eval()
        return [reference.case(*reference.encode(sample))["logits"] for sample in samples]

    base, merged, adapted = logits(pack), logits(work / "merged"), logits(pack, work / "adapter")
    apart, changed = difference(merged, adapted), difference(base, merged)
    print(f"{pack.name}: adapter in peft and merged model in transformers: {apart:.1e}; base model: {changed:.1e}", flush=True)
    if not apart <= LOGITS or not changed >= CHANGE:
        return False
    # The merged model here and in transformers.
    compared = ["--output", work / "pack", "--steps", "1"]
    if compare_reference([str(word) for word in [work / "merged", data, *compared]]) != 0:
        return False
    return subprocess.run([binaries / "parity", work / "pack"]).returncode == 0


def main(binaries, *packs):
    good = True
    for pack in packs:
        with tempfile.TemporaryDirectory() as work:
            good &= check(Path(binaries), Path(pack), Path(work))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
