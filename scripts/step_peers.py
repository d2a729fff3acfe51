"""Compares training steps of this repository with those of torch, FSDP2 and DeepSpeed, in one run.

usage: cargo build --release -p benches && python3 scripts/step_peers.py --precision bf16 --ranks 1 --threads 2 --rounds 3
Needs torch and transformers. The row of DeepSpeed needs the package deepspeed (installed with DS_ACCELERATOR=cpu).

All train a decoder of 134 M parameters on one text of 512 tokens per rank and recompute every block in the backward pass.
One rank is compared with torch; more ranks, with ZeRO-3, are compared with FSDP2 and DeepSpeed. Precisions: f32; bf16 (f32
weights and states, products of bf16); pure-bf16 (bf16 weights; ours has f32 states, as FSDP2 and DeepSpeed have not, so only
torch is compared). Every round runs each program once, so that a slow moment of the machine affects all of them. It prints
the median and the range of the seconds of a step, and of the ratios of each round: more than 1 means that ours is faster.

With --products it compares the matrix products of the step alone with torch's: one by one, and weighted by how often a step
has each (a block's forward product twice, because of recomputation).
"""

import argparse
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="bf16", choices=["f32", "bf16", "pure-bf16"])
parser.add_argument("--ranks", type=int, default=1)
parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--steps", type=int, default=4, help="measured steps of each run, after two that are not")
parser.add_argument("--products", action="store_true", help="compare the matrix products of a step with those of torch")
parser.add_argument("--worker", default="", help="run this peer's steps in this process: torch, fsdp2, deepspeed or products")
options = parser.parse_args()

TOKENS, VOCABULARY = 512, 32000


def worker(peer):
    """Trains with one peer and prints the median of its steps in seconds."""
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.Qwen2ForCausalLM(config).train()
    reentrant = peer == "deepspeed"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    if options.precision == "pure-bf16" or (peer == "deepspeed" and options.precision == "bf16"):
        model = model.bfloat16()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=peer == "torch" and options.precision == "bf16")
    if peer == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    elif peer == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.distributed.init_process_group("gloo")
        policy = MixedPrecisionPolicy()
        if options.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (options.ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    else:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        deepspeed.init_distributed("gloo")
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": options.precision == "bf16"},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4)
        model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    seconds = []
    for _ in range(options.steps + 2):
        text = torch.randint(0, VOCABULARY, (1, TOKENS))
        start = time.perf_counter()
        with autocast:
            loss = model(input_ids=text, labels=text).loss
        if peer == "deepspeed":
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if peer != "torch":
            torch.distributed.barrier()
        seconds.append(time.perf_counter() - start)
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{statistics.median(seconds[2:]):.4f} s a step")


# How often a step has a linear layer, by outputs and inputs.
LAYERS = {(768, 768): 48, (2048, 768): 24, (768, 2048): 12, (VOCABULARY, 768): 1}
REPEATS = 9


def products():
    """Prints the median seconds of each of torch's products, in the form of the program step_products."""
    import torch

    torch.set_num_threads(options.threads)
    dtype = torch.float32 if options.precision == "f32" else torch.bfloat16
    for n, k in LAYERS:
        x, w, dy = (torch.rand(*shape, dtype=dtype) - 0.5 for shape in ((TOKENS, k), (n, k), (TOKENS, n)))
        for name, product in {"forward": lambda: x @ w.T, "dx": lambda: dy @ w, "dw": lambda: dy.T @ x}.items():
            seconds = []
            for _ in range(REPEATS + 2):
                start = time.perf_counter()
                product()
                seconds.append(time.perf_counter() - start)
            print(f"{name} {TOKENS}x{n}x{k} {statistics.median(seconds[2:]):.6f}")


def compared_products(folder):
    dtype = "f32" if options.precision == "f32" else "bf16"
    commands = {
        "ours": [str(folder / "step_products"), str(options.threads), dtype, str(REPEATS)],
        "torch": [sys.executable, __file__, "--products", "--worker=products", *shape()],
    }
    rounds = []
    for _ in range(options.rounds):
        found = {name: re.findall(r"(\S+) (\S+) ([\d.]+)\n", output(command)) for name, command in commands.items()}
        rounds.append({name: {(op, size): float(s) for op, size, s in found[name]} for name in commands})
    print(f"products in {dtype}, {options.threads} threads, {options.rounds} rounds: ours, torch, ratio")
    for op, size in rounds[0]["torch"]:
        flops = 2 * math.prod(map(int, size.split("x")))
        rates = [spread([flops / each[name][op, size] / 1e9 for each in rounds], "%.0f") for name in commands]
        ratios = [each["torch"][op, size] / each["ours"][op, size] for each in rounds]
        print(f"| {op} {size} | {rates[0]} GFLOP/s | {rates[1]} | {spread(ratios, '%.2f')} |")
    for title, layers in {"whole step": list(LAYERS), "blocks": list(LAYERS)[:-1]}.items():
        ratios = []
        for each in rounds:
            total = dict.fromkeys(commands, 0.0)
            for name in commands:
                for n, k in layers:
                    for op, times in {"forward": 1 if n == VOCABULARY else 2, "dx": 1, "dw": 1}.items():
                        total[name] += LAYERS[n, k] * times * each[name][op, f"{TOKENS}x{n}x{k}"]
            ratios.append(total["torch"] / total["ours"])
        print(f"| {title} | | | {spread(ratios, '%.2f')} |")


def shape():
    """Flags that the compared programs share."""
    return [f"--precision={options.precision}", f"--threads={options.threads}", f"--steps={options.steps}"]


def output(command):
    """Runs a program and returns what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    return run.stdout


def measured(command):
    """Runs a program and returns the seconds of a step that it prints."""
    return float(re.search(r"([\d.]+) s a step", output(command)).group(1))


def spread(values, form):
    values = sorted(values)
    return f"{form % statistics.median(values)} ({form % values[0]} to {form % values[-1]})"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    folder = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target")) / "release"
    if options.products:
        return compared_products(folder)
    ours = [str(folder / "train_step"), *(word for flag in shape() for word in flag.split("="))]
    ours += ["--ranks", str(options.ranks), "--stage", "3" if options.ranks > 1 else "0"]
    peers = ["torch"] if options.ranks == 1 else ["fsdp2"]
    try:
        import deepspeed  # noqa: F401

        peers += ["deepspeed"] if options.ranks > 1 else []
    except ImportError:
        pass
    if options.precision == "pure-bf16" and options.ranks > 1:
        sys.exit("--precision pure-bf16 is compared on one rank")
    launch = [sys.executable]
    if options.ranks > 1:
        launch += ["-m", "torch.distributed.run", f"--nproc_per_node={options.ranks}"]
    commands = {"ours": ours}
    for peer in peers:
        commands[peer] = [*launch, __file__, *shape(), f"--ranks={options.ranks}", f"--worker={peer}"]
    seconds = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            seconds[name].append(measured(command))
    print(f"{options.precision}, {options.ranks} ranks of {options.threads} threads, {options.rounds} rounds")
    print(f"| ours | {spread(seconds['ours'], '%.3f')} s a step | |")
    for peer in peers:
        ratios = [theirs / own for theirs, own in zip(seconds[peer], seconds["ours"])]
        print(f"| {peer} | {spread(seconds[peer], '%.3f')} s a step | {spread(ratios, '%.2f')} |")


if __name__ == "__main__":
    if options.worker == "products":
        products()
    elif options.worker:
        worker(options.worker)
    else:
        main()
