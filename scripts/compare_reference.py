#!/usr/bin/env python3
"""Compares this project with the published code and peft on your own model and samples.

    python scripts/compare_reference.py MODEL SAMPLES.json --output PACK
    cargo run --release -p tests --bin parity -- PACK

The first command needs your Python with torch, transformers and peft. It computes in f32 on the CPU, or with
`--device cuda`: token ids, labels, pixels, loss and logits of each sample, then LoRA steps over all of them. It stores
them in PACK, with links to the files of MODEL. The second command computes the same here and prints each difference
with its tolerance. Both take about 4 bytes of memory per parameter.

MODEL is a model directory. transformers itself implements GLM-4.1V, GLM-4.6V-Flash (published as glm4v, or as glm46v)
and GLM-OCR. The code of MiniCPM-V, MiniCPM-o, CogVLM, CogVLM2, CogAgent, GLM-4V and CogAgent-9B is in the directory
itself: read it, and let it run with `--trust-remote-code`. Such code needs the transformers that the model's page names
(transformers 5 has dropped what most of it imports), and that of CogVLM and CogVLM2 needs `--device cuda` for triton.
SAMPLES.json is a list of samples with `conversations` (or `messages`) and `image` (or `images`), as in the README;
relative paths of images start at its directory.
"""

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

from reference_families import BETAS, EPS, Refused, Sample, family_of, supervised

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


# ---- samples -------------------------------------------------------------------------------------


def conversation(sample, at):
    """A sample of a file, with one `<image>` in the messages for each image; a single image may have none."""
    turns = sample.get("conversations", sample.get("messages"))
    if not turns:
        raise Refused(f"sample {at} has neither `conversations` nor `messages`")
    if sample.get("videos") or sample.get("video"):
        raise Refused(f"sample {at} has a video")
    images = sample.get("image", sample.get("images", []))
    # Images by their marks, or in the order of the marks.
    named = images if isinstance(images, dict) else {}
    images = list(named.values()) if named else [images] if isinstance(images, str) else list(images)
    pattern = re.compile("|".join(re.escape(mark) for mark in named or ["<image>"]))
    messages, found = [], []
    for turn in turns:
        said = turn.get("role", turn.get("from"))
        if said not in ROLES:
            raise Refused(f"sample {at} has the role {said}")
        content = turn.get("content", turn.get("value"))
        if "<|" in content:
            raise Refused(f"sample {at} has control tokens in a text")
        found += pattern.findall(content)
        messages.append({"role": ROLES[said], "content": pattern.sub("<image>", content)})
    if len(images) == 1 and not found:
        return Sample(messages, images, sample.get("enable_thinking"))
    if len(images) != len(found) or named and sorted(found) != sorted(named):
        raise Refused(f"sample {at} has {len(images)} images and the marks {found}")
    images = [named[mark] for mark in found] if named else images
    return Sample(messages, images, sample.get("enable_thinking"), bool(named) or len(images) > 1)


def read_samples(path, limit):
    """The first `limit` samples of a file, with absolute paths of images."""
    samples = json.loads(Path(path).read_text())
    if isinstance(samples, dict):
        raise Refused(f"{path} is not a list of samples")
    read = [conversation(sample, at) for at, sample in enumerate(samples[:limit])]
    if not read:
        raise Refused(f"{path} has no sample")
    directory = Path(path).resolve().parent
    for sample in read:
        sample.images = [directory / image for image in sample.images]
    return read


# ---- the pack ------------------------------------------------------------------------------------


def write_pack(reference, model, samples, options):
    """Writes what the reference computes, in the layout that `parity` reads."""
    pack = Path(options.output)
    if pack.exists():
        raise Refused(f"{pack} exists")
    (pack / "cases").mkdir(parents=True)
    encoded, counts, names = [], [], []
    for number, sample in enumerate(samples):
        name = f"sample_{number}"
        case = pack / "cases" / name
        case.mkdir()
        copies = [f"image_{k}{path.suffix}" for k, path in enumerate(sample.images)]
        for path, copy in zip(sample.images, copies):
            shutil.copyfile(path, case / copy)
        for file, content in reference.layout(sample, copies).items():
            (case / file).write_text(json.dumps(content, indent=1))
        inputs, labels = reference.encode(sample)
        if supervised(labels) == 0:
            raise Refused(f"sample {number} has no answer")
        reference.save(reference.case(inputs, labels), case / "expected.safetensors")
        encoded.append((inputs, labels))
        counts.append(supervised(labels))
        names.append(name)
    run = reference.lora_steps(encoded, options, pack)
    run |= {
        "micro_batches": names, "token_counts": counts, "rank": options.rank, "alpha": 2 * options.rank,
        "targets": reference.TARGETS, "adapters": ["adapter_init", "adapter_after"],
    }
    optimizer = {"lr": options.lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    (pack / "trajectory.json").write_text(json.dumps({"optimizer": optimizer, "lora": run}, indent=1))
    # Last, so that nothing is written through a link.
    for file in Path(model).resolve().iterdir():
        if file.is_file() and not (pack / file.name).exists():
            os.symlink(file, pack / file.name)
    return run


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("samples", help="list of samples")
    parser.add_argument("--output", required=True, help="directory to write, which must not exist")
    parser.add_argument("--limit", type=int, default=3, help="number of samples (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="number of LoRA steps (default 10)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default 8, alpha is twice the rank)")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (default 1e-4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the adapters' start values")
    parser.add_argument("--device", default="cpu", help="torch device of the reference (default cpu)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code in the model's directory")
    options = parser.parse_args(words)
    try:
        family = family_of(options.model, options.trust_remote_code)
        samples = read_samples(options.samples, options.limit)
        run = write_pack(family(options.model, options.device), options.model, samples, options)
    except Refused as refused:
        print(f"compare_reference: {refused}", file=sys.stderr)
        return 2
    for step, loss in enumerate(run["losses"] + [run["loss_after"]]):
        print(f"reference: loss before step {step + 1}: {loss:.6f}")
    print(f"next: cargo run --release -p tests --bin parity -- {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
