#!/usr/bin/env python3
"""Compares this project with transformers and peft on your own model and samples.

    python scripts/compare_reference.py MODEL SAMPLES.json --output PACK
    cargo run --release -p tests --bin parity -- PACK

The first command needs your Python with torch, transformers and peft. It computes in f32 on the CPU, or with
`--device cuda`: token ids, labels, pixels, loss and logits of each sample, then LoRA steps over all of them. It stores
them in PACK, with links to the files of MODEL. The second command computes the same here and prints each difference
with its tolerance. Both take about 4 bytes of memory per parameter.

MODEL is a directory of a family that transformers itself implements: GLM-4.1V, GLM-4.6V-Flash (published as glm4v, or
as glm46v) and GLM-OCR. Families with remote code (MiniCPM, CogVLM, GLM-4V) are refused, with the commands that compare
their losses. SAMPLES.json is a list of samples with
`conversations` (or `messages`) and `image` (or `images`), as in the README; relative paths of images start at its
directory.
"""

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

IGNORED = -100
# Attention of the language model. The vision tower of the family has other names.
TARGETS = ["k_proj", "o_proj", "q_proj", "v_proj"]
BETAS = (0.9, 0.999)
EPS = 1e-8
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class Refused(Exception):
    """An input that the comparison does not cover, in words."""


# ---- samples -------------------------------------------------------------------------------------


def conversation(sample, at):
    """A sample as (messages, paths of images), with one `<image>` in the messages for each image."""
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
        # A single image without a mark stands before the text.
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"] = "<image>" + first["content"]
        return messages, images
    if len(images) != len(found) or named and sorted(found) != sorted(named):
        raise Refused(f"sample {at} has {len(images)} images and the marks {found}")
    return messages, [named[mark] for mark in found] if named else images


def read_samples(path, limit):
    """The first `limit` samples of a file as (messages, absolute paths of images, `enable_thinking` or None)."""
    samples = json.loads(Path(path).read_text())
    if isinstance(samples, dict):
        raise Refused(f"{path} is not a list of samples")
    read = [(*conversation(sample, at), sample.get("enable_thinking")) for at, sample in enumerate(samples[:limit])]
    if not read:
        raise Refused(f"{path} has no sample")
    directory = Path(path).resolve().parent
    return [(messages, [directory / image for image in images], switch) for messages, images, switch in read]


# ---- GLM -----------------------------------------------------------------------------------------


# What the prompt gives of an answer without a thought.
NO_THOUGHT = "\n<think></think>\n"
IMAGE = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")


def prompt(messages):
    """The text of a conversation as LLaMA-Factory renders it, with one image token for each image."""
    text = "[gMASK]<sop>"
    for message in messages:
        text += f"<|{message['role']}|>\n" + message["content"].replace("<image>", "".join(IMAGE))
    return text + "<|endoftext|>"


def parts(message, enable_thinking=None):
    """A message as chat templates take it: a list of texts and images. Without thinking an answer has no thought."""
    if message["role"] == "assistant":
        said = message["content"]
        return message | {"content": said.rsplit("</think>")[-1] if enable_thinking is False else said}
    texts = message["content"].split("<image>")
    content = [{"type": "text", "text": texts[0]}] if texts[0] else []
    for text in texts[1:]:
        content += [{"type": "image"}] + ([{"type": "text", "text": text}] if text else [])
    return {"role": message["role"], "content": content}


def expanded(text, features):
    """A text with as many image tokens as each image has `features`."""
    counts = iter(features)
    return re.sub(re.escape(IMAGE[1]), lambda token: token[0] * next(counts), text)


def labels_of(ids, assistant, roles, end, given=()):
    """Labels of a token sequence: every token of an answer after `given`, and `end` in place of the token after it."""
    labels, answers, start = [], False, 0
    for at, token in enumerate(ids):
        closes = token in roles or token == end
        said = answers and tuple(ids[start : at + 1]) != tuple(given[: at + 1 - start])
        labels.append(end if closes and answers else token if said else IGNORED)
        if closes:
            answers, start = token == assistant, at + 1
    return labels


class Glm:
    """transformers and peft for GLM-4.1V, GLM-4.6V-Flash and GLM-OCR."""

    def __init__(self, directory, device):
        import PIL
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        if int(PIL.__version__.split(".")[0]) >= 13:
            print("note: Pillow 13 resizes in another order; install pillow<13 for equal pixels", file=sys.stderr)
        self.torch, self.device = torch, device
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.images = AutoImageProcessor.from_pretrained(directory, use_fast=False)
        model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = model.to(device).eval()
        # GLM-4.6V-Flash is trained with its own chat template; the other two as LLaMA-Factory renders them.
        has_switch = "/nothink" in self.tokenizer.get_vocab()
        self.thinks = has_switch and model.config.model_type != "glm_ocr"

    def text(self, messages, enable_thinking):
        """The text of a conversation, with one image token for each image."""
        if not self.thinks:
            return prompt(messages)
        switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        shown = [parts(message, enable_thinking) for message in messages]
        return self.tokenizer.apply_chat_template(shown, tokenize=False, **switch) + "<|endoftext|>"

    def encode(self, messages, paths, enable_thinking=None):
        """Inputs of the model for one sample, and its labels."""
        if enable_thinking is not None and not self.thinks:
            raise Refused("the model's template has no switch `enable_thinking`")
        from PIL import Image

        torch, inputs, features = self.torch, {}, []
        if paths:
            images = [Image.open(path).convert("RGB") for path in paths]
            inputs = dict(self.images(images=images, return_tensors="pt"))
            merged = self.images.merge_size**2
            features = [int(grid.prod()) // merged for grid in inputs["image_grid_thw"]]
        text = expanded(self.text(messages, enable_thinking), features)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        number = self.tokenizer.convert_tokens_to_ids
        roles = {number(f"<|{role}|>") for role in ("user", "assistant", "system")}
        given = self.tokenizer(NO_THOUGHT, add_special_tokens=False)["input_ids"]
        given = given if self.thinks and enable_thinking is False else []
        labels = labels_of(ids, number("<|assistant|>"), roles, number("<|endoftext|>"), given)
        inputs["input_ids"] = torch.tensor([ids])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == number("<|image|>")).int()
        return inputs, torch.tensor([labels])

    def loss(self, model, inputs, labels):
        """Sum of the losses of a sample's supervised tokens, and its logits."""
        logits = model(**{name: value.to(self.device) for name, value in inputs.items()}).logits.float()
        wanted = labels[0, 1:].to(self.device)
        losses = self.torch.nn.functional.cross_entropy(
            logits[0, :-1], wanted, ignore_index=IGNORED, reduction="sum"
        )
        return losses, logits

    def case(self, inputs, labels):
        """What is stored of one sample: name -> tensor."""
        with self.torch.no_grad():
            losses, logits = self.loss(self.model, inputs, labels)
        count = supervised(labels)
        stored = {name: inputs[name] for name in ("input_ids", "pixel_values", "image_grid_thw") if name in inputs}
        stored |= {"labels": labels, "logits": logits.cpu(), "loss": losses.cpu() / count}
        return stored | {"n_loss_tokens": self.torch.tensor(count)}

    def lora_steps(self, samples, options, pack):
        """Trains adapters on all samples in every step. Saves them before and after, and returns the numbers."""
        from peft import LoraConfig, get_peft_model

        torch = self.torch
        torch.manual_seed(options.seed)
        config = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, lora_dropout=0.0, target_modules=TARGETS
        )
        model = get_peft_model(self.model, config)
        model.save_pretrained(pack / "adapter_init")
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=options.lr, betas=BETAS, eps=EPS, weight_decay=0.0)
        tokens = sum(supervised(labels) for _, labels in samples)

        def backward():
            total = 0.0
            for inputs, labels in samples:
                losses = self.loss(model, inputs, labels)[0] / tokens
                losses.backward()
                total += losses.item()
            return total

        losses, norms = [], []
        for _ in range(options.steps):
            optimizer.zero_grad()
            losses.append(backward())
            norms.append(sum(float(w.grad.double().square().sum()) for w in trained) ** 0.5)
            optimizer.step()
        optimizer.zero_grad()
        loss_after = backward()
        model.save_pretrained(pack / "adapter_after")
        return {"losses": losses, "grad_norms": norms, "loss_after": loss_after}

    @staticmethod
    def save(tensors, path):
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def supervised(labels):
    """Number of supervised tokens."""
    return int((labels != IGNORED).sum())


FAMILIES = {"glm4v": Glm, "glm46v": Glm, "glm_ocr": Glm}


def family_of(directory):
    """The reference of a model directory, by its `model_type`."""
    config = Path(directory) / "config.json"
    if not config.is_file():
        raise Refused(f"{directory} has no config.json")
    described = json.loads(config.read_text())
    model_type = described.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if "auto_map" not in described:
        raise Refused(f"model_type {model_type} is not supported; known: {', '.join(FAMILIES)}")
    raise Refused(
        f"the code of model_type {model_type} is in {directory}, and this script runs no code of a model directory. "
        f"Compare losses sample by sample: `launcher eval --model {directory} --data SAMPLES.json --precision f32 "
        "--max-new-tokens 1 --output here.json` writes loss_sum and supervised_tokens of each sample; in your Python, "
        "loss_sum is the cross entropy (reduction='sum') of AutoModel or AutoModelForCausalLM."
        f"from_pretrained('{directory}', trust_remote_code=True, torch_dtype=torch.float32) over the same labels"
    )


# ---- the pack ------------------------------------------------------------------------------------


def write_pack(reference, model, samples, options):
    """Writes what the reference computes, in the layout that `parity` reads."""
    pack = Path(options.output)
    if pack.exists():
        raise Refused(f"{pack} exists")
    (pack / "cases").mkdir(parents=True)
    encoded, counts, names = [], [], []
    for number, (messages, images, switch) in enumerate(samples):
        name = f"sample_{number}"
        case = pack / "cases" / name
        case.mkdir()
        copies = [f"image_{k}{path.suffix}" for k, path in enumerate(images)]
        for path, copy in zip(images, copies):
            shutil.copyfile(path, case / copy)
        stored = {"messages": messages, "images": copies}
        stored |= {} if switch is None else {"enable_thinking": switch}
        (case / "conversation.json").write_text(json.dumps(stored, indent=1))
        inputs, labels = reference.encode(messages, images, switch)
        if supervised(labels) == 0:
            raise Refused(f"sample {number} has no answer")
        reference.save(reference.case(inputs, labels), case / "expected.safetensors")
        encoded.append((inputs, labels))
        counts.append(supervised(labels))
        names.append(name)
    run = reference.lora_steps(encoded, options, pack)
    run |= {
        "micro_batches": names, "token_counts": counts, "rank": options.rank, "alpha": 2 * options.rank,
        "targets": TARGETS, "adapters": ["adapter_init", "adapter_after"],
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
    options = parser.parse_args(words)
    try:
        family = family_of(options.model)
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
