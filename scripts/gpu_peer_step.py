"""A training step with the shapes of MiniCPM-V in transformers and peft, or in plain PyTorch where these are missing. It is
the peer of `scripts/gpu-check.sh --stages headline`. Weights are random, on the device; nothing is downloaded.

The step: the frozen vision tower over all slices, the frozen resampler, the language model with adapters on its attention,
the loss over the same answer tokens as ours, backward, clipping, AdamW on the adapters. Everything is bf16, which is the
faster choice for the peer.
"""

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ALPHA_OVER_RANK = 1.0
QUERIES = 64


class Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, inside, outside, rank, bias):
        super().__init__()
        self.base = nn.Linear(inside, outside, bias=bias).requires_grad_(False)
        self.a = nn.Linear(inside, rank, bias=False)
        self.b = nn.Linear(rank, outside, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + ALPHA_OVER_RANK * self.b(self.a(x))


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DecoderLayer(nn.Module):
    def __init__(self, c, rank):
        super().__init__()
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.d = hidden // self.heads
        kv = self.kv_heads * self.d
        self.q, self.o = Adapted(hidden, hidden, rank, True), Adapted(hidden, hidden, rank, False)
        self.k, self.v = Adapted(hidden, kv, rank, True), Adapted(hidden, kv, rank, True)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(hidden, eps=c["rms_norm_eps"]) for _ in range(2)])
        for frozen in (self.gate, self.up, self.down, self.norms):
            frozen.requires_grad_(False)

    def forward(self, x, cos, sin):
        b, t, c = x.shape
        h = self.norms[0](x)
        heads = lambda y, n: y.view(b, t, n, self.d).transpose(1, 2)
        q, k = rotate(heads(self.q(h), self.heads), cos, sin), rotate(heads(self.k(h), self.kv_heads), cos, sin)
        v = heads(self.v(h), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """The language model with PyTorch alone."""

    def __init__(self, c, rank):
        super().__init__()
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"]).requires_grad_(False)
        self.layers = nn.ModuleList([DecoderLayer(c, rank) for _ in range(c["num_hidden_layers"])])
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"]).requires_grad_(False)
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False).requires_grad_(False)
        self.theta, self.recompute = c["rope_theta"], False

    def loss(self, x, labels):
        d = self.layers[0].d
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * (
            self.theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
        )
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recompute else layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


class VisionLayer(nn.Module):
    def __init__(self, v):
        super().__init__()
        hidden, self.heads = v["hidden_size"], v["num_attention_heads"]
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, v["intermediate_size"]), nn.Linear(v["intermediate_size"], hidden)
        self.norms = nn.ModuleList([nn.LayerNorm(hidden, eps=1e-6) for _ in range(2)])

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Vision(nn.Module):
    def __init__(self, v):
        super().__init__()
        self.patches = nn.Conv2d(3, v["hidden_size"], v["patch_size"], v["patch_size"])
        self.layers = nn.ModuleList([VisionLayer(v) for _ in range(v["num_hidden_layers"])])

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


class Resampler(nn.Module):
    """Queries over the features of a slice."""

    def __init__(self, inside, hidden):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, hidden))
        self.kv = nn.Linear(inside, hidden, bias=False)
        self.attention = nn.MultiheadAttention(hidden, hidden // 128, batch_first=True)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, features):
        kv = self.kv(features)
        q = self.queries.expand(len(kv), -1, -1)
        return self.out(self.attention(q, kv, kv, need_weights=False)[0])


def published(c, rank):
    """Language model and vision tower of transformers with adapters of peft. Raises ImportError where these are missing."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "rms_norm_eps", "rope_theta")
    config = Qwen2Config(**{name: c[name] for name in names}, use_cache=False, attn_implementation="sdpa")
    model = Qwen2ForCausalLM(config)
    adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    # In the dtype of the model, as ours are. peft would use f32.
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    v = c["vision_config"]
    side = c["slice_config"].get("scale_resolution", 448)
    vision = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=v["hidden_size"], intermediate_size=v["intermediate_size"], patch_size=v["patch_size"],
            num_hidden_layers=v["num_hidden_layers"], num_attention_heads=v["num_attention_heads"], image_size=side,
            attn_implementation="sdpa",
        )
    )

    def recompute(on):
        if on:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()

    embed = model.get_input_embeddings()
    loss = lambda x, labels: model(inputs_embeds=x, labels=labels).loss
    return model, embed, loss, recompute, lambda pixels: vision(pixel_values=pixels).last_hidden_state


def plain(c, rank):
    model, vision = Decoder(c, rank), Vision(c["vision_config"])

    def recompute(on):
        model.recompute = on

    return model, model.embed, model.loss, recompute, vision


def steps(config_path, tokens, slices, rank, device="cuda"):
    """Yields (name, function that prepares one step) for each way to compute it. The name says which packages it uses."""
    with open(config_path) as file:
        c = json.load(file)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    torch.manual_seed(0)
    try:
        kind, made = "transformers + peft", published(c, rank)
    except Exception as error:  # missing, or a version with other names
        print(f"transformers + peft: {type(error).__name__}: {error}; plain PyTorch instead", file=sys.stderr)
        kind, made = "plain PyTorch", plain(c, rank)
    model, embed, loss_of, recompute, vision = made
    resampler = Resampler(c["vision_config"]["hidden_size"], c["hidden_size"])
    side = c["slice_config"].get("scale_resolution", 448)
    pixels = torch.randn(slices, 3, side, side)
    ids = torch.randint(0, c["vocab_size"], (1, tokens))
    # The last quarter of the text tokens is supervised, as in the samples of `launcher synth`.
    labels = ids.clone()
    labels[:, : tokens - max(1, (tokens - slices * QUERIES) // 4)] = -100
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device == "cuda")

    def step():
        with torch.no_grad():
            features = resampler(vision(pixels)).flatten(0, 1)
            x = embed(ids).clone()
            x[0, 4 : 4 + len(features)] = features[: tokens - 4]
        loss_of(x, labels).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for on in (False, True):
        def prepare(on=on):
            model.train()
            recompute(on)
            return step

        yield f"{kind}, activations {'computed again' if on else 'kept'}", prepare
