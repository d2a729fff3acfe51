"""Families as their published code computes them, for compare_reference.py.

transformers implements GLM-4.1V, GLM-4.6V-Flash and GLM-OCR itself. The code of the others comes with their weights:
inputs are built by that code, and labels follow the published training script of the family.
"""

import inspect
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

IGNORED = -100
BETAS = (0.9, 0.999)
EPS = 1e-8
# No sample is cut.
LONGEST = 1_000_000


class Refused(Exception):
    """An input that the comparison does not cover, in words."""


@dataclass
class Sample:
    """A conversation with one `<image>` in the messages for each image, or none for a single image."""

    messages: list
    images: list
    thinking: bool | None = None
    # Whether names like `<image_00>` stand for the images, as they do for several.
    named: bool = False

    def led(self, mark="<image>"):
        """The messages; an image without a mark stands before the first question."""
        marked = any("<image>" in message["content"] for message in self.messages)
        if not self.images or marked:
            return self.messages
        first = next((m for m in self.messages if m["role"] == "user"), self.messages[0])
        return [m | {"content": mark + m["content"]} if m is first else m for m in self.messages]

    def unmarked(self):
        """The messages without marks, and without the line break next to a mark."""
        return [m | {"content": re.sub("<image>\n|\n<image>|<image>", "", m["content"])} for m in self.messages]


def opened(paths):
    from PIL import Image

    return [Image.open(path).convert("RGB") for path in paths]


def supervised(labels):
    """Number of supervised tokens."""
    return int((labels != IGNORED).sum())


class Reference:
    """A model of a family, its inputs and its losses. Inputs and labels are those of one sample."""

    # Ends of the paths of adapted modules, or a pattern of whole paths.
    TARGETS = []
    # Whether the template has a switch for thoughts.
    thinks = False
    remote = True
    auto = "AutoModelForCausalLM"

    def __init__(self, directory, device):
        import PIL
        import torch

        if int(PIL.__version__.split(".")[0]) >= 13:
            print("note: Pillow 13 resizes in another order; install pillow<13 for equal pixels", file=sys.stderr)
        torch.backends.cudnn.allow_tf32 = False
        self.torch, self.device = torch, device
        self.open(directory)
        self.model = self.load(directory).to(device).eval()

    def open(self, directory):
        """Reads the tokenizer and the processor of images."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True, use_fast=False)

    def load(self, directory, **options):
        import transformers

        auto, dtype = getattr(transformers, self.auto), self.torch.float32
        return auto.from_pretrained(directory, trust_remote_code=True, torch_dtype=dtype, **options)

    def check(self, sample):
        if sample.thinking is not None and not self.thinks:
            raise Refused("the model's template has no switch `enable_thinking`")
        control = set(self.tokenizer.all_special_tokens) - {"<image>"}
        if any(token in message["content"] for message in sample.messages for token in control):
            raise Refused("a text has control tokens")

    def encode(self, sample):
        """Inputs and labels of a sample."""
        raise NotImplementedError

    def logits(self, model, inputs):
        """Logits `[tokens, vocabulary]` of a sample."""
        moved = {name: value.to(self.device) for name, value in inputs.items()}
        return model(**moved).logits[0]

    def targets(self, inputs, labels):
        """The target of each row of logits."""
        return self.torch.nn.functional.pad(labels[0, 1:], (0, 1), value=IGNORED)

    def stored(self, inputs):
        """Inputs that the pack stores."""
        return inputs

    def layout(self, sample, images):
        """Files of a sample that the comparison reads, by name; `images` are names of copies."""
        shown = {"messages": sample.led(), "images": images, "max_length": LONGEST}
        return {"conversation.json": shown | ({} if sample.thinking is None else {"enable_thinking": sample.thinking})}

    def loss(self, model, inputs, labels):
        """Sum of the losses of a sample's supervised tokens, and its logits."""
        logits = self.logits(model, inputs).float()
        wanted = self.targets(inputs, labels).to(logits.device)
        losses = self.torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        return losses, logits

    def case(self, inputs, labels):
        """What is stored of one sample: name -> tensor."""
        with self.torch.no_grad():
            losses, logits = self.loss(self.model, inputs, labels)
        results = {"labels": labels, "logits": logits[None].cpu(), "loss": losses.cpu() / supervised(labels)}
        return self.stored(inputs) | results

    def lora_steps(self, samples, options, pack):
        """Trains adapters on all samples in every step. Saves them before and after, and returns the numbers."""
        from peft import LoraConfig, get_peft_model

        torch = self.torch
        torch.manual_seed(options.seed)
        config = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, lora_dropout=0.0, target_modules=self.TARGETS
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


# ---- GLM-4.1V, GLM-4.6V-Flash, GLM-OCR -----------------------------------------------------------


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


class Glm(Reference):
    """GLM-4.1V, GLM-4.6V-Flash and GLM-OCR."""

    # Attention of the language model. The vision tower of the family has other names.
    TARGETS = ["k_proj", "o_proj", "q_proj", "v_proj"]
    remote = False

    def open(self, directory):
        from transformers import AutoImageProcessor, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.images = AutoImageProcessor.from_pretrained(directory, use_fast=False)

    def load(self, directory):
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=self.torch.float32, attn_implementation="eager"
        )
        # GLM-4.6V-Flash is trained with its own chat template; the other two as LLaMA-Factory renders them.
        has_switch = "/nothink" in self.tokenizer.get_vocab()
        self.thinks = has_switch and model.config.model_type != "glm_ocr"
        return model

    def text(self, messages, enable_thinking):
        """The text of a conversation, with one image token for each image."""
        if not self.thinks:
            return prompt(messages)
        switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        shown = [parts(message, enable_thinking) for message in messages]
        return self.tokenizer.apply_chat_template(shown, tokenize=False, **switch) + "<|endoftext|>"

    def encode(self, sample):
        self.check(sample)
        torch, inputs, features = self.torch, {}, []
        if sample.images:
            inputs = dict(self.images(images=opened(sample.images), return_tensors="pt"))
            merged = self.images.merge_size**2
            features = [int(grid.prod()) // merged for grid in inputs["image_grid_thw"]]
        text = expanded(self.text(sample.led(), sample.thinking), features)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        number = self.tokenizer.convert_tokens_to_ids
        roles = {number(f"<|{role}|>") for role in ("user", "assistant", "system")}
        given = self.tokenizer(NO_THOUGHT, add_special_tokens=False)["input_ids"]
        given = given if self.thinks and sample.thinking is False else []
        labels = labels_of(ids, number("<|assistant|>"), roles, number("<|endoftext|>"), given)
        inputs["input_ids"] = torch.tensor([ids])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == number("<|image|>")).int()
        return inputs, torch.tensor([labels])

    def stored(self, inputs):
        return {name: inputs[name] for name in ("input_ids", "pixel_values", "image_grid_thw") if name in inputs}


# ---- MiniCPM-V, MiniCPM-o ------------------------------------------------------------------------


EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def shifted_labels(ids, start, assistant, end, skipped=0):
    """Labels of OpenBMB's finetune/dataset.py, already shifted: each token of an answer at the position before it, and
    `end` at that of its last one. `start` and `assistant` open an answer. The last one begins `skipped` tokens later."""
    opens = [at for at in range(1, len(ids)) if ids[at] == assistant and ids[at - 1] == start]
    last = max((at for at, token in enumerate(ids) if token == assistant), default=None)
    trained = set()
    for at in opens:
        first = at + 2 + (skipped if at == last else 0)
        close = next((k for k in range(first + 1, len(ids)) if ids[k] == end), None)
        trained |= set(range(first, close + 1)) if close else set()
    following = range(1, len(ids))
    labels = [ids[k] if k in trained else end if k - 1 in trained else IGNORED for k in following]
    return labels + [IGNORED]


class MiniCpm(Reference):
    """MiniCPM-V and MiniCPM-o. The tower sees what the folder's processor cuts; placeholders are those of training."""

    TARGETS = r"llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj|o_proj)"
    auto = "AutoModel"

    def open(self, directory):
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(directory, trust_remote_code=True)
        self.images, self.tokenizer = processor.image_processor, processor.tokenizer
        self.thinks = "</think>" in self.tokenizer.get_vocab()

    def load(self, directory):
        import transformers

        described = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
        omni = {"init_vision": True, "init_audio": False, "init_tts": False}
        return super().load(directory, **(omni if described.model_type == "minicpmo" else {}))

    def placeholders(self, sizes):
        """Placeholders of images. Only an image with cells has a number, as in training and unlike in chats."""
        images, texts, number = self.images, [], 0
        for size in sizes:
            counted = images.use_image_id and images.get_sliced_grid(size, images.max_slice_nums) is not None
            texts.append(images.get_slice_image_placeholder(size, number, use_image_id=counted))
            number += counted
        return texts

    def text(self, sample, sizes):
        """The text of a conversation. Images with names and the text between them have a line each."""
        texts, messages = iter(self.placeholders(sizes)), []
        for message in sample.led("<image>\n"):
            pieces = message["content"].split("<image>")
            content = pieces[0]
            for piece in pieces[1:]:
                between = "\n" if sample.named else ""
                content += between + next(texts) + between + piece
            messages.append({"role": message["role"], "content": content})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)

    def encode(self, sample):
        self.check(sample)
        torch, images = self.torch, opened(sample.images)
        text = self.text(sample, [image.size for image in images])
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        number, row = self.tokenizer.convert_tokens_to_ids, torch.tensor(ids)
        skipped = 4 if EMPTY_THOUGHT in text else 0
        labels = shifted_labels(
            ids, number("<|im_start|>"), number("assistant"), self.tokenizer.eos_token_id, skipped
        )

        def places(*marks):
            return sum(row == number(mark) for mark in marks).nonzero()

        bounds = torch.cat([places("<image>", "<slice>") + 1, places("</image>", "</slice>")], 1)
        seen = {"pixel_values": [[]], "tgt_sizes": [[]]}
        if images:
            seen = self.images([images], return_tensors="pt")
        data = {name: seen[name] for name in ("pixel_values", "tgt_sizes")}
        data |= {"input_ids": row[None], "image_bound": [bounds], "position_ids": torch.arange(len(ids))[None]}
        return data, torch.tensor(labels)

    def logits(self, model, inputs):
        data = inputs | {name: inputs[name].to(self.device) for name in ("input_ids", "position_ids")}
        data["pixel_values"] = [[slice.to(self.device) for slice in row] for row in inputs["pixel_values"]]
        # peft passes names only, so the dictionary has the name that `forward` gives it.
        return model(data=data, use_cache=False).logits[0]

    def targets(self, inputs, labels):
        return labels

    def stored(self, inputs):
        stored = {name: inputs[name][0] for name in ("input_ids", "position_ids")}
        if len(inputs["tgt_sizes"][0]):
            # As the model pads them: `[slices, 3, side, side * longest]`.
            longest = max(slice.shape[-1] for slice in inputs["pixel_values"][0])
            pad = self.torch.nn.functional.pad
            slices = [pad(slice, (0, longest - slice.shape[-1])) for slice in inputs["pixel_values"][0]]
            stored |= {"pixel_values": self.torch.stack(slices), "image_bound": inputs["image_bound"][0]}
            stored["tgt_sizes"] = inputs["tgt_sizes"][0]
        return stored

    def layout(self, sample, images):
        names = {f"<image_{k:02}>": image for k, image in enumerate(images)}
        marks = iter(names)
        shown = [
            m | {"content": re.sub("<image>", lambda _: next(marks), m["content"])} if sample.named else m
            for m in sample.messages
        ]
        row = {"id": "0", "conversations": shown}
        row |= {"image": names if sample.named else images[0]} if images else {}
        row |= {} if sample.thinking is None else {"enable_thinking": sample.thinking}
        return {"conversation.json": [row], "options.json": {"model_max_length": LONGEST}}


# ---- CogVLM, CogVLM2, CogAgent -------------------------------------------------------------------


class Cog(Reference):
    """CogVLM, CogVLM2 and CogAgent. The model builds the inputs, and the last answer is supervised."""

    EXPERTS = [f"{kind}_expert_{part}" for kind in ("language", "vision") for part in ("dense", "query_key_value")]
    TARGETS = EXPERTS

    def load(self, directory):
        model = super().load(directory)
        if hasattr(model.config, "cross_image_size"):
            self.TARGETS = self.EXPERTS + ["cross_attn.query", "cross_attn.key_value", "cross_attn.dense"]
        return model

    def encode(self, sample):
        self.check(sample)
        turns = sample.unmarked()
        if [turn["role"] for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
            raise Refused("the turns are not those of user and assistant in turn")
        if len(sample.images) > 1:
            raise Refused("the model takes one image")
        if not sample.images and hasattr(self.model.config, "cross_image_size"):
            raise Refused("the published code of CogAgent takes no sample without an image")
        texts = [turn["content"] for turn in turns]
        rounds = list(zip(texts[::2], texts[1::2]))
        query, answer = rounds.pop()
        build = self.model.build_conversation_input_ids
        takes_answer = "answer" in inspect.signature(build).parameters
        given = build(
            self.tokenizer, query=query, history=rounds, images=opened(sample.images) or None,
            **({"answer": answer} if takes_answer else {}),
        )
        torch, rows = self.torch, ("input_ids", "token_type_ids", "attention_mask")
        inputs = {name: given[name][None] for name in rows}
        labels = given.get("labels")
        if not takes_answer:
            ids = self.tokenizer.encode(answer, add_special_tokens=False) + [self.tokenizer.eos_token_id]
            more = {"input_ids": ids, "token_type_ids": [0] * len(ids), "attention_mask": [1] * len(ids)}
            labels = torch.tensor([IGNORED] * len(given["input_ids"]) + ids)
            inputs = {name: torch.cat([inputs[name], torch.tensor([more[name]])], 1) for name in rows}
        if sample.images:
            inputs |= {name: given[name] for name in ("images", "cross_images") if given.get(name)}
        return inputs, labels[None]

    def logits(self, model, inputs):
        def moved(value):
            return [[image.to(self.device) for image in value]] if isinstance(value, list) else value.to(self.device)

        return model(**{name: moved(value) for name, value in inputs.items()}, use_cache=False).logits[0]

    def stored(self, inputs):
        names = {"images": "pixel_values", "cross_images": "cross_pixel_values"}
        return {names.get(n, n): self.torch.stack(v) if n in names else v for n, v in inputs.items()}

    def layout(self, sample, images):
        version = self.model.config.template_version
        return {"conversation.json": {
            "conversations": sample.messages, "images": images, "template_version": version,
            "max_length": LONGEST,
        }}


# ---- GLM-4V, CogAgent-9B -------------------------------------------------------------------------


class ChatGlm(Reference):
    """GLM-4V-9B and CogAgent-9B. The tokenizer builds the inputs; labels are those of GLM-4's finetune_vision.py."""

    TARGETS = ["self_attention.query_key_value"]

    def encode(self, sample):
        from PIL import Image

        self.check(sample)
        if len(sample.images) > 1:
            raise Refused("the model takes one image")
        # A sample without an image has a black one.
        image = (opened(sample.images) or [Image.new("RGB", (224, 224))])[0]
        messages = sample.unmarked()
        first = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
        ids = list(self.tokenizer.get_prefix_tokens())
        labels, pixels = [IGNORED] * len(ids), None
        for at, message in enumerate(messages):
            shown = message | ({"image": image} if at == first else {})
            built = self.tokenizer.apply_chat_template([shown], tokenize=True, return_dict=True)
            pixels = built["images"] if at == first else pixels
            new = list(built["input_ids"][0])[2:]
            ids += new
            labels += new if message["role"] == "assistant" else [IGNORED] * len(new)
        torch = self.torch
        row = torch.tensor([ids + [self.tokenizer.convert_tokens_to_ids("<|user|>")]])
        inputs = {"input_ids": row, "images": pixels, "attention_mask": torch.ones_like(row)}
        inputs["position_ids"] = torch.arange(row.shape[1])[None]
        return inputs, torch.tensor([labels + [IGNORED]])

    def targets(self, inputs, labels):
        """As the model expands its tokens: all features of an image in place of one token."""
        config = self.model.config
        side = config.vision_config["image_size"] // config.vision_config["patch_size"] // 2
        start = inputs["input_ids"][0].tolist().index(config.boi_token_id)
        gap = self.torch.full((side**2 - 1,), IGNORED)
        row = self.torch.cat([labels[0, : start + 1], gap, labels[0, start + 1 :]])
        return super().targets(inputs, row[None])

    def stored(self, inputs):
        return {"pixel_values": inputs["images"], **{n: v for n, v in inputs.items() if n != "images"}}


# By `model_type`, or where a file has none, by the architecture.
FAMILIES = {
    "glm4v": Glm, "glm46v": Glm, "glm_ocr": Glm, "minicpmv": MiniCpm, "minicpmo": MiniCpm, "chatglm": ChatGlm,
    "CogVLMForCausalLM": Cog, "CogAgentForCausalLM": Cog,
}


def family_of(directory, trusted=False):
    """The reference of a model directory. Without `trusted` none runs code of the directory."""
    config = Path(directory) / "config.json"
    if not config.is_file():
        raise Refused(f"{directory} has no config.json")
    described = json.loads(config.read_text())
    name = described.get("model_type") or next(iter(described.get("architectures") or []), None)
    family = FAMILIES.get(name)
    if family is None:
        raise Refused(f"{name} is not supported; known: {', '.join(FAMILIES)}")
    if not family.remote:
        return family
    named = [value for value in described.get("auto_map", {}).values() if isinstance(value, str)]
    away = [value for value in named if "--" in value]
    absent = [value for value in named if not (Path(directory) / f"{value.split('.')[0]}.py").is_file()]
    if not named or away or absent:
        which = ", ".join(away or absent) or "`auto_map` of config.json is absent"
        raise Refused(
            f"the published code of {name} is not in {directory}: {which}. Copy the .py files of the model's page there"
        )
    if not trusted:
        raise Refused(
            f"the code of {name} is in {directory}; read it, and add --trust-remote-code to run it. Without it, compare "
            f"losses sample by sample: `launcher eval --model {directory} --data SAMPLES.json --precision f32 "
            "--max-new-tokens 1 --output here.json` writes loss_sum and supervised_tokens of each sample"
        )
    return family
