#!/usr/bin/env python3
"""Checks that transformers and bitsandbytes read the directories of `launcher export --quantize`.

    scripts/check_quantized.py LAUNCHER MODEL_DIRECTORY

It quantizes the model in each format and dequantizes the result again. transformers loads both directories. Their logits,
in f32, differ by rounding only. Needs torch, transformers and bitsandbytes; a CPU is enough. `.ci/nightly` runs it with a
tiny GLM-4.1V.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

FORMATS = {
    "nf4": ["--quantize", "nf4"],
    "nf4, double": ["--quantize", "nf4", "--quantize-double"],
    "fp4": ["--quantize", "fp4"],
    "int8": ["--quantize", "int8"],
}
# f32 sums of a few hundred terms in another order; logits are of the size of 1. A wrong code, block or scale is off by a
# thousand times as much.
TOLERANCE = 2e-5
TOKENS = 64


def export(launcher, model, flags, output):
    line = [launcher, "export", str(model), *flags, "--output", str(output)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def logits(directory):
    """Logits of some tokens, in f32, and the number of quantized layers."""
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    # The package quantizes the activations of int8 layers too, except in training.
    model.train()
    quantized = 0
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes"):
            quantized += 1
            if hasattr(module, "compute_dtype"):
                module.compute_dtype = torch.float32
                module.compute_type_is_set = True
    generator = torch.Generator().manual_seed(1)
    words = min(256, model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, words, (1, TOKENS), generator=generator)
    with torch.no_grad():
        return model(input_ids=tokens).logits.float(), quantized


def main():
    launcher, model = sys.argv[1:]
    failed = False
    logging.disable_progress_bar()
    plain, _ = logits(model)
    with tempfile.TemporaryDirectory() as site:
        for name, flags in FORMATS.items():
            packed, dense = (Path(site) / f"{name}-{kind}" for kind in ("packed", "dense"))
            export(launcher, model, flags, packed)
            export(launcher, packed, ["--dequantize", "--dtype", "f32"], dense)
            (got, layers), (want, others) = logits(packed), logits(dense)
            difference = (got - want).abs().max().item()
            effect = (want - plain).abs().max().item()
            # Without an effect the directories were not quantized.
            good = difference <= TOLERANCE < effect and layers > 0 and others == 0
            failed |= not good
            verdict = "ok" if good else "FAILED"
            print(
                f"{name}: {layers} quantized layers, logits differ by {difference:.1e} "
                f"from dequantized weights and by {effect:.1e} from plain ones: {verdict}"
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
