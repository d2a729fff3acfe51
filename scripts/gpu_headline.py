"""The stage `headline` of scripts/gpu-check.sh: runs the cases of headline.json at their real sizes, each under its cap of
device memory. Reports step time, tokens per second, and device and host memory beside the plan.

`launcher synth --weights seeded` makes the models: published configurations, with weights that are functions of a seed and
take no space on the disk. Each result is written at once, so that a case that is stopped does not lose earlier results.
usage: gpu_headline.py BIN OUT [--cases a,b] [--seconds N] [--device cuda|cpu] [--packages PATHS] [--list]
--device cpu runs the cases without a GPU, at the sizes of the golden packs.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpu_overlap import FORWARD, OVERLAP, beside_updates, bus_rates, context_bytes, longest, median

HERE = Path(__file__).resolve().parent
GIB, MIB = 1 << 30, 1 << 20
# Largest difference of a peak from the plan, on device and host: the project's goal.
SHARE = 0.05
STEPS = 5
# Disk space that a checkpoint must leave: for logs, traces and other programs.
DISK_SPARE = 2 * GIB
# The packages that a case's speed is judged against, and the text of a row that could not be judged.
JUDGE = "transformers + peft"
NOT_JUDGED = f"not judged against {JUDGE}"
# Golden packs whose configurations stand for the models with --device cpu.
PACKS = {
    "minicpm-v-2_6": "minicpm-v-2_6",
    "minicpm-o-2_6": "minicpm-o-2_6",
    "cogagent-chat": "cogagent-chat-hf",
    "cogvlm-chat": "cogvlm-chat-hf",
    "glm-4v-9b": "glm-4v-9b",
    "cogvlm2-llama3-chat-19b": "cogvlm2-llama3-chat-19B",
}
UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": MIB, "G": GIB, "T": 1 << 40, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}


def parse_bytes(text):
    number, unit = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text).groups()
    return int(float(number) * UNITS[unit])


def gib(count):
    return f"{count / GIB:.2f}"


def high_water_mark(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
    return int(found[1]) * 1024 if found else 0


def ranks_of(pid):
    """The ranks among the children of a process. Other children, such as Python asked for its libraries, have no job."""
    found = []
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"TESSERA_JOB_DIR=" in Path(f"/proc/{child}/environ").read_bytes():
                found.append(int(child))
    except OSError:  # a child that ended meanwhile
        pass
    return found


def stop(process):
    """Kills a process that this program started, with all of its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def watched(command, log, seconds, variables=None):
    """Runs a command with these variables added. Returns its exit status (None if it was stopped), its output, and VmHWM of each
    rank that it started."""
    marks = {}
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **(variables or {})})
        ends = time.monotonic() + seconds
        while process.poll() is None:
            for child in ranks_of(process.pid):
                marks[child] = max(marks.get(child, 0), high_water_mark(child))
            if time.monotonic() > ends:
                stop(process)
                return None, Path(log).read_text(), marks
            time.sleep(0.05)
    return process.returncode, Path(log).read_text(), marks


def model_config(case, tiny, published):
    """The published configuration of a case, with the fields that the case overrides."""
    path = published / f"{case['model']}.json"
    if tiny:
        path = HERE.parent / "tests/golden" / PACKS[case["model"]] / "config.json"
    config = json.loads(path.read_text())
    config.update({} if tiny else case.get("model_config", {}))
    return config


def free_memory():
    """Bytes of host memory that are available, as limited by the kernel and by the container."""
    kib = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = int(kib[1]) * 1024
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            read = lambda name: int((Path("/sys/fs/cgroup") / name).read_text())
            free = min(free, read(limit) - read(used))
        except (OSError, ValueError):  # no such cgroup, or no limit
            pass
    return free


def planned_with(case, binary, work, published, ram):
    """Returns a function from a number of layers to the JSON of `launcher plan` for the case. Host memory is the case's cap, or
    `ram` bytes."""
    def plan(layers):
        folder = work / f"plan-{layers}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.json"
        path.write_text(json.dumps({**model_config(case, False, published), "num_hidden_layers": layers}))
        commands = []
        model = [path, "--no-weights", "true", "--save-strategy", "no"]
        if case.get("saves"):
            # The plan reads the dtype of written weights from these files.
            model = [folder / "model", "--save-strategy", "steps"]
            commands = [[
                binary / "launcher", "synth", "--model-config", path, "--weights", "seeded", "--output", folder / "model",
                "--samples", 1, "--sample-tokens", 300,
            ]]
        commands.append([
            binary / "launcher", "plan", "--model", *model, "--device", "cuda", "--hw", f"{case['ranks']}x{case['device_cap']}",
            "--ram", case.get("host_cap", ram), "--eval-strategy", "no", "--json", "true", *case["flags"],
        ])
        for command in commands:
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise RuntimeError(f"launcher plan: {(done.stderr or done.stdout).strip()[-400:]}") from None

    return plan


def layers_that_fit(case, plan, disk, ram):
    """The most layers that fit, with the arithmetic. The checkpoint, if the case makes one, must fit the disk, and the ranks
    must fit the machine. If the case wants a share of the elements updated in backward, the plan must reach it. A cap of host
    memory is scaled by parameters. The layers are None if the fewest do not fit."""
    whole, least, early = case["layers"]["all"], case["layers"]["least"], case["layers"].get("early", 0)
    plans = {}

    def needs(layers):
        if layers not in plans:
            plans[layers] = plan(layers)
        found = plans[layers]
        state, weights = found["checkpoint_bytes"]["state"], found["checkpoint_bytes"]["weights"]
        return {
            "state": state,
            "weights": weights,
            # One checkpoint, after the last step.
            "disk": state + weights + DISK_SPARE if case.get("saves") else 0,
            "ram": int(found["need_bytes"]["host"] * (1 + SHARE)),
            "early": found.get("early_share", 0),
            "parameters": found["parameters_total"],
        }

    def fits(layers):
        need = needs(layers)
        return need["disk"] <= disk and need["ram"] <= ram and need["early"] >= early

    # More layers need more of everything.
    most, beyond = (least, whole + 1) if fits(least) else (None, least)
    while most and beyond - most > 1:
        middle = (most + beyond) // 2
        most, beyond = (middle, beyond) if fits(middle) else (most, middle)
    chosen = needs(most or least)
    cap = case.get("host_cap")
    if cap is not None:
        cap = parse_bytes(cap) * chosen["parameters"] // needs(whole)["parameters"]
    return {"layers": most, "of": whole, "disk_free": disk, "ram_free": ram, "host_cap": cap, "least_early": early, **chosen}


def layers_in_words(choice):
    parts = []
    if choice["disk"]:
        parts.append(
            f"{gib(choice['disk_free'])} GiB of disk are free, {gib(choice['state'])} of states + {gib(choice['weights'])} of weights "
            f"are written, {gib(choice['disk'])} with {gib(DISK_SPARE)} to spare"
        )
    parts.append(
        f"{gib(choice['ram_free'])} GiB of host memory are free, the ranks need {gib(choice['ram'])} with {SHARE:.0%} to spare"
    )
    if choice["least_early"]:
        parts.append(f"{choice['early']:.0%} of the elements are updated while backward runs, wanted {choice['least_early']:.0%}")
    if choice["host_cap"] is not None:
        parts.append(f"the host's cap, scaled by parameters, is {gib(choice['host_cap'])}")
    return f"{choice['layers'] or 'not even the fewest'} of {choice['of']} layers: " + "; ".join(parts)


def commands(case, binary, work, device, published):
    """The commands that make the model and train it."""
    tiny = device == "cpu"
    work.mkdir(parents=True)
    config = work / "config.json"
    config.write_text(json.dumps(model_config(case, tiny, published)))
    steps = 2 if tiny else case.get("steps", STEPS)
    synth = [
        binary / "launcher", "synth", "--model-config", config, "--weights", "seeded", "--output", work / "model",
        "--samples", max(8, case["ranks"] * steps * 4), "--sample-tokens", 300 if tiny else case["tokens"],
    ]
    if not tiny and "picture_side" in case:
        synth += ["--image-size", case["picture_side"]]
    host_cap = case.get("host_cap")
    # Without a GPU, no rank reads another GPU's memory.
    flags = ["shm" if tiny and word == "ipc" else word for word in case["flags"]]
    train = [
        binary / "launcher", "--model", work / "model", "--data", work / "model/samples.json", "--output", work / "run",
        "--device", device, "--verify-gpu", "off", "--nproc", case["ranks"], "--max-steps", steps, "--logging-steps", 1, "--warmup-steps", 0,
        "--learning-rate", "1e-6", "--trace-steps", f"{steps}..{steps + 1}", "--eval-strategy", "no",
        *(["--save-steps", steps] if case.get("saves") else ["--save-strategy", "no"]), *flags,
    ]
    train += ["--device-memory-limit", case["device_cap"]]
    train += ["--host-memory-limit", host_cap] if host_cap else []
    return [[str(word) for word in command] for command in (synth, train)]


def within(measured, planned):
    return abs(measured / planned - 1) <= SHARE


def footprint(out):
    """Bytes of host and GPU that a process takes by using CUDA, as the stage `probe` measured them. None where it did not."""
    measured = bus_rates(out, "probe")
    return {"host": measured.get("driver bytes"), "device": measured.get("context bytes")}


def blame(want, got, planned_fixed, measured_fixed):
    """Names the part of a memory figure that is off: the fixed part (what a process takes by using CUDA) or the planned part."""
    if measured_fixed is None:
        return "which part is off is not known, `probe` measured no fixed part"
    parts = {
        "fixed": (measured_fixed, planned_fixed, "planned", got - measured_fixed, want - planned_fixed),
        "planned": (got - measured_fixed, want - planned_fixed, "fixed", measured_fixed, planned_fixed),
    }
    off = max(parts, key=lambda part: abs(parts[part][0] - parts[part][1]))
    measured, planned, other, other_measured, other_planned = parts[off]
    return (
        f"the {off} part is off, {gib(measured)} GiB instead of {gib(planned)} "
        f"({other} part {gib(other_measured)} of {gib(other_planned)})"
    )


def outcome(case, run, text, marks, device, rates, fixed):
    """The figures of a run that ended with status 0, and a list of what is wrong. `rates` are those of the bus; `fixed` is the
    result of footprint."""
    wrong = []
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    # The first step compiles kernels and touches memory for the first time.
    rows = [row for row in rows if "step_seconds" in row][1:]
    plan = json.loads((run / "plan.json").read_text())["plan"]
    memory, config = plan["memory"], json.loads((run / "config.resolved.json").read_text())
    result = {
        "name": case["name"],
        "losses": [row["loss"] for row in rows],
        "step_seconds": median([row["step_seconds"] for row in rows]),
        "tokens_per_second": median([row["tokens_per_second"] for row in rows]),
        "seconds": {part: median([row["seconds"][part] for row in rows]) for part in rows[0]["seconds"]},
        "ranks": case["ranks"],
        "device_cap": parse_bytes(case["device_cap"]),
        "planned_host": memory["resident_by_rank"],
        "measured_host": sorted(marks.values(), reverse=True),
        "planned_fixed_host": max(phase["host"].get("driver", 0) for phase in memory["phases"].values()),
        "measured_fixed": fixed,
    }
    if all("device_seconds" in row for row in rows):
        own = {part: median([row["device_seconds"][part] for row in rows]) for part in rows[0]["device_seconds"]}
        on_gpu = -(-case["ranks"] // max(len(config["gpus"]), 1))
        parts, name, times, at_the_rate = longest(rows, rates, on_gpu)
        result |= {"device_seconds": own, "parts": parts, "longest": name, "times_longest": times, "bus_at_its_rate": at_the_rate}
        # Only if the rest of the update runs in the next forward pass.
        if "early_share" in plan and own["updates"] > result["seconds"]["step"]:
            result |= {"early_share": plan["early_share"], "least_step": beside_updates(parts, plan["early_share"])}
        offloads = config["offload"]
        if "cpu" in (offloads["param"], offloads["optimizer"], offloads["activation"]) and result["times_longest"] > OVERLAP:
            wrong.append(f"the step is {result['times_longest']:.2f} times its longest part ({name}), the goal is {OVERLAP}")
    if not all(loss == loss and abs(loss) < 1e4 for loss in result["losses"]):
        wrong.append("a loss is no number")
    # Only their size identifies the ranks. The small ranks of --device cpu may end before they are measured.
    planned = sorted(memory["resident_by_rank"], reverse=True)
    if device == "cuda" and len(planned) != len(marks):
        wrong.append(f"{len(marks)} processes for {len(planned)} ranks")
    for want, got in zip(planned, result["measured_host"]):
        # In small models the process itself is the largest part, so --device cpu does not judge it.
        if device == "cuda" and not within(got, want):
            why = blame(want, got, result["planned_fixed_host"], fixed["host"])
            wrong.append(f"VmHWM {gib(got)} GiB, planned {gib(want)}: {why}")
    host_cap = case.get("host_cap")
    if device == "cuda" and host_cap and sum(marks.values()) > parse_bytes(host_cap):
        wrong.append(f"VmHWM of all ranks {gib(sum(marks.values()))} GiB, more than the cap of {gib(parse_bytes(host_cap))} GiB")
    if device == "cuda":
        used = re.search(r"rank 0 used (\S+) of the", text)
        taken = re.search(r"the driver counts (\d+) bytes more", text)
        if not used or not taken:
            return result, [*wrong, "the run does not say what it used of the GPU"]
        on_gpu = -(-case["ranks"] // len(config["gpus"]))
        result |= {
            "planned_device": memory["peak"]["device"],
            "used_device": parse_bytes(used[1]),
            "arena": config["arena_bytes"],
            "planned_driver": config["arena_bytes"] + context_bytes(config),
            "driver": int(taken[1]) // on_gpu,
        }
        if not within(result["used_device"], result["planned_device"]):
            wrong.append(f"used {gib(result['used_device'])} GiB of the arena, planned {gib(result['planned_device'])}: the planned part is off")
        if not within(result["driver"], result["planned_driver"]):
            # The arena has exactly the size that was asked for.
            beside, probed = result["driver"] - result["arena"], fixed["device"]
            said = f"`probe` measured {gib(probed)}" if probed is not None else "`probe` measured none"
            wrong.append(
                f"the driver counts {gib(result['driver'])} GiB, planned {gib(result['planned_driver'])}: the fixed part is off, "
                f"{gib(beside)} GiB beside the arena instead of {gib(context_bytes(config))} ({said})"
            )
        if result["driver"] > result["device_cap"]:
            wrong.append(f"the driver counts {gib(result['driver'])} GiB, more than the cap")
    return result, wrong


def rows_printed(text):
    """The rows that gpu_peers.py printed, one per line. The last line may be cut."""
    found = {}
    for line in (text or "").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found |= row if isinstance(row, dict) else {}
    return found


def beside_peer(case, result, times, said):
    """Compares a case with its peer and returns what is wrong. `times` maps the ways of the peer to milliseconds."""
    result["peer_ms"], result["peer_said"] = times, said
    if not times:
        return [f"{NOT_JUDGED}: no peer to compare with: {said[-300:]}"]
    # Both process the same tokens.
    of_judge = {name: took for name, took in times.items() if name.startswith(JUDGE)}
    result["peer_tokens_per_second"] = case["tokens"] * 1e3 / min((of_judge or times).values())
    result["times_peer"] = result["tokens_per_second"] / result["peer_tokens_per_second"]
    if not of_judge:
        return [f"{NOT_JUDGED}: {result['times_peer']:.2f} times the tokens per second of {min(times, key=times.get)}: {said[-300:]}"]
    if result["times_peer"] < case["at_least"]:
        return [f"{result['times_peer']:.2f} times the peer's tokens per second, wanted {case['at_least']}"]
    return []


def peer(case, work, slices, seconds, packages):
    """Milliseconds of the peer's step for each way, and what the peer printed on stderr."""
    command = [
        sys.executable, HERE / "gpu_peers.py", "--stage", "step", "--model-config", work / "config.json", "--tokens",
        case["tokens"], "--slices", slices, "--rank", 64, "--budget", max(seconds - 10, 5),
    ]
    environment = dict(os.environ)
    if packages:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (packages, environment.get("PYTHONPATH"))))
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired as stopped:
        # TimeoutExpired may hold bytes, even with text=True.
        text = lambda output: output.decode(errors="replace") if isinstance(output, bytes) else output or ""
        return rows_printed(text(stopped.stdout)), f"{text(stopped.stderr).strip()} stopped after {seconds:.0f} s".strip()
    return rows_printed(done.stdout), done.stderr.strip()


def run_case(case, arguments, seconds):
    """Runs one case. Never raises."""
    out, work = arguments.out, arguments.out / "headline-work"
    shutil.rmtree(work, ignore_errors=True)
    begun = time.monotonic()
    result, wrong = {"name": case["name"]}, []
    try:
        if "layers" in case:
            work.mkdir(parents=True)
            ram = free_memory()
            plan = planned_with(case, arguments.bin, work, arguments.configs, ram)
            if arguments.device == "cuda":
                choice = layers_that_fit(case, plan, shutil.disk_usage(out).free, ram)
                result["layers"] = choice
                if choice["layers"] is None:
                    return result, [f"no room for {layers_in_words(choice)}"]
                case = {**case, "model_config": {"num_hidden_layers": choice["layers"]}}
                case |= {"host_cap": str(choice["host_cap"])} if choice["host_cap"] is not None else {}
            else:
                # The small model runs in any case. This checks that the case can be planned.
                plan(case["layers"]["least"])
            shutil.rmtree(work)
        synth, train = commands(case, arguments.bin, work, arguments.device, arguments.configs)
        made = subprocess.run(synth, capture_output=True, text=True, timeout=60)
        if made.returncode:
            return result, [f"the model cannot be made: {(made.stderr or made.stdout).strip()[-400:]}"]
        log = out / f"headline-{case['name']}.txt"
        left = seconds - (time.monotonic() - begun)
        code, text, marks = watched(train, log, left, case.get("variables"))
        if code is None:
            return result, [f"stopped after {left:.0f} s: {text.strip().splitlines()[-1:]}"]
        if code:
            return result, [f"exit {code}: " + " / ".join(text.strip().splitlines()[-8:])]
        said = result
        result, wrong = outcome(case, work / "run", text, marks, arguments.device, bus_rates(out), footprint(out))
        result |= {name: value for name, value in said.items() if name not in result}
        for trace in (work / "run/traces").glob("*.json"):
            shutil.copy(trace, out / f"headline-{case['name']}-{trace.name}")
        if "peer_step" in case and arguments.device == "cuda":
            left = seconds - (time.monotonic() - begun)
            wrong += beside_peer(case, result, *peer(case, work, case["slices"], left, arguments.packages))
    except Exception as error:  # a failing case does not stop the others
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        result["took"] = time.monotonic() - begun
        shutil.rmtree(work, ignore_errors=True)
    return result, wrong


HEAD = """## headline cases

| case | GiB of device memory: cap | plan | used | driver (planned) | GiB of host memory by rank: plan | VmHWM | s/step | tokens/s | peers | |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def verdict(wrong):
    """The verdict of a row. A row that was not judged has not passed."""
    if all(text.startswith(NOT_JUDGED) for text in wrong):
        return NOT_JUDGED if wrong else "ok"
    return "FAILED"


def row(case, result, wrong):
    many = lambda values: ", ".join(gib(value) for value in values)
    layers = result.get("layers")
    layers = f", {layers['layers']} of {layers['of']} layers" if layers else ""
    cells = [case["title"] + layers, case["device_cap"].removesuffix("GiB")]
    if "step_seconds" in result:
        device = ["-"] * 3
        if "driver" in result:
            device = [gib(result["planned_device"]), gib(result["used_device"])]
            device.append(f"{gib(result['driver'])} ({gib(result['planned_driver'])})")
        cells += [*device, many(result["planned_host"]), many(result["measured_host"])]
        cells += [f"{result['step_seconds']:.2f}", f"{result['tokens_per_second']:.0f}"]
    else:
        cells += ["-"] * 7
    said = case["peers"]
    if "times_peer" in result:
        said = f"{result['peer_tokens_per_second']:.0f} tokens/s ({min(result['peer_ms'], key=result['peer_ms'].get)})"
    return "| " + " | ".join([*cells, said, verdict(wrong)]) + " |\n"


def remarks(case, result, wrong):
    """Lines below the table: what differs from the case as written, where the time goes, and what is wrong."""
    lines = []
    if "layers" in result:
        lines.append(f"- {case['name']}: {layers_in_words(result['layers'])}")
    if "because" in case:
        lines.append(f"- {case['name']}: {case['because']}")
    for what, why in case.get("beyond", {}).items():
        lines.append(f"- {case['name']}: the plan exceeds the {what}'s cap: {why}")
    if "driver" in result:
        probed = result["measured_fixed"]
        of = lambda value: "not measured" if value is None else gib(value)
        lines.append(
            f"- {case['name']}: GiB of device memory: arena {gib(result['arena'])} + fixed part {gib(result['driver'] - result['arena'])} "
            f"(plan {gib(result['planned_driver'] - result['arena'])}, `probe` {of(probed['device'])}) = {gib(result['driver'])} by the driver"
        )
        host, planned = probed["host"], result["planned_fixed_host"]
        for want, got in zip(sorted(result["planned_host"], reverse=True), result["measured_host"]):
            rest = "not known" if host is None else gib(got - host)
            lines.append(
                f"- {case['name']}: GiB of a rank's host memory: fixed part {of(host)} by `probe` (plan {gib(planned)}) + planned part "
                f"{rest} (plan {gib(want - planned)}) = VmHWM {gib(got)} (plan {gib(want)})"
            )
    if "seconds" in result:
        parts = ", ".join(f"{part} {value:.3f}" for part, value in result["seconds"].items())
        lines.append(f"- {case['name']}: seconds of a step: {parts}")
    if "times_longest" in result:
        parts = ", ".join(f"{part} {value:.3f}" for part, value in result["device_seconds"].items())
        floors = ", ".join(f"{part} {value:.3f}" for part, value in result["parts"].items())
        bus = "at the measured rate of the bus" if result["bus_at_its_rate"] else "by spans of copies, `ceilings` did not run"
        goal = "within" if result["times_longest"] <= OVERLAP else "beyond"
        lines.append(
            f"- {case['name']}: seconds by the device's clock: {parts}; least ({bus}): {floors}; the step is {result['times_longest']:.2f} times its "
            f"longest part ({result['longest']}), {goal} the goal of {OVERLAP}"
        )
    if "least_step" in result:
        least, early = result["least_step"], result["early_share"]
        lines.append(
            f"- {case['name']}: {early:.0%} of the elements are updated beside backward: at best max(F, {1 - early:.2f} U) + max(B, {early:.2f} U) = "
            f"{least:.3f}, {least / max(result['parts'].values()):.2f} times the longest part (forward F taken as {FORWARD} of compute)"
        )
    lines += [f"- {'' if text.startswith(NOT_JUDGED) else 'FAILED '}{case['name']}: {text}" for text in wrong]
    return "".join(line + "\n" for line in lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", default="")
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--packages", default="")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    arguments.bin, arguments.out = arguments.bin.resolve(), arguments.out.resolve()
    arguments.configs = HERE.parent / "launcher/src/commands/synth/configs"
    cases = json.loads((HERE / "headline.json").read_text())
    names = [name for name in arguments.cases.split(",") if name]
    unknown = set(names) - {case["name"] for case in cases}
    if unknown:
        parser.error(f"no such cases: {', '.join(sorted(unknown))}")
    if arguments.list:
        print("\n".join(case["name"] for case in cases))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + arguments.seconds
    results, table, notes, failed = [], HEAD, "", []
    for case in (case for case in cases if not names or case["name"] in names):
        left = ends - time.monotonic()
        if left < 15:
            result, wrong = {"name": case["name"]}, ["NOT RUN, the time is spent"]
        else:
            print(f"-- {case['name']} (at most {min(case['seconds'], left):.0f} s)", flush=True)
            result, wrong = run_case(case, arguments, min(case["seconds"], left))
        result["wrong"] = wrong
        failed += [case["name"]] if wrong else []
        results.append(result)
        table += row(case, result, wrong)
        notes += remarks(case, result, wrong)
        (arguments.out / "headline.json").write_text(json.dumps(results, indent=1))
        (arguments.out / "headline.md").write_text(f"{table}\n{notes}")
        print(row(case, result, wrong) + remarks(case, result, wrong), end="", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
