#!/usr/bin/env python3
"""Makes the adapters in tests/fixtures/adapters: those of peft, with the loss that its model has on two samples of a golden pack.

    python scripts/make_adapters.py

It needs torch, transformers and peft. Each directory has peft's own files and expected.json: pack and loss.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from check_exports import write_samples
from compare_reference import read_samples
from reference_families import family_of, supervised

TESTS = Path(__file__).parent.parent / "tests"
DECODER = r".*language_model.*\.(q_proj|down_proj)"
COMMON = {"r": 2, "lora_alpha": 8, "lora_dropout": 0.0}
# Directory, pack, settings of peft, and whether the weights are safetensors or what torch.save writes.
ADAPTERS = [
    (
        "patterns",
        "glm-4.1v-9b-thinking",
        {
            "target_modules": ["q_proj", "k_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 1},
            "alpha_pattern": {"k_proj": 32},
            "use_rslora": True,
        },
        False,
    ),
    (
        "modules",
        "glm-ocr",
        {
            "target_modules": DECODER,
            "modules_to_save": ["model.language_model.norm"],
            "exclude_modules": ["layers.0.mlp.down_proj"],
        },
        True,
    ),
]


def make(name, pack, settings, safe):
    import torch
    from peft import LoraConfig, get_peft_model

    directory = TESTS / "golden" / pack
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        write_samples(directory, Path(file.name))
        samples = read_samples(Path(file.name), None)
    reference = family_of(directory)(directory, "cpu")
    torch.manual_seed(1)
    model = get_peft_model(reference.model, LoraConfig(**COMMON, **settings))
    # The second halves of adapters begin at zero.
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.add_(0.05 * torch.randn_like(weight))
    encoded = [reference.encode(sample) for sample in samples]
    with torch.no_grad():
        losses = sum(float(reference.loss(model.eval(), *one)[0]) for one in encoded)
    target = TESTS / "fixtures" / "adapters" / name
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target, safe_serialization=safe)
    (target / "README.md").unlink()
    for path in target.iterdir():
        path.chmod(0o644)
    config = json.loads((target / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = pack
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    expected = {"pack": pack, "loss": losses / sum(supervised(labels) for _, labels in encoded)}
    (target / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    for adapter in ADAPTERS:
        make(*adapter)
    sys.exit(0)
