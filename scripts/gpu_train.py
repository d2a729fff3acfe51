"""The stage `train` of scripts/gpu-check.sh: compares losses of the GPU with those of the CPU, and the driver's count of
memory with the plan. usage: gpu_train.py OUT DEVICE [PRECISION...], all precisions by default. Prints tables. The exit status is 1 if anything is off."""

import json
import re
import sys
from pathlib import Path

from gpu_overlap import OVERLAP, bus_rates, context_bytes, longest, median

# Largest difference of a loss per pass, as a share of the loss; a loss after k updates has k + 1 passes. In f32 the order of
# sums differs. In 16 bits some dozen layers round independently: 4 units of the format. As in tests/device/src/tolerance.rs.
PASS = {"f32": 1e-4, "bf16": 4 / 256, "fp16": 4 / 2048, "pure-bf16": 4 / 256}
MIB = 1 << 20
# Lanes of a trace: the work of a GPU, and both directions of its bus.
WORK, BUS = "device", ("to the device", "from the device")


def rows_of(run):
    return [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in rows_of(run) if "loss" in row]


def last_step(run, rates):
    """Milliseconds of the last step, of its parts and of the device's waits; the step as a multiple of the longest part, and
    whether the measured rate of the bus was used."""
    row = rows_of(run)[-1]
    parts, _, times, measured = longest([row], rates)
    names = ("compute", "to the device", "from the device", "update on the processor")
    own = [1e3 * parts[name] for name in names]
    return 1e3 * row["step_seconds"], own, 1e3 * row["device_seconds"]["waits"], times, measured


def not_beside(trace):
    """What a trace lacks: a lane of work, a lane for each direction of the bus, copies that overlap with work."""
    events = trace["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    spans = {
        name: sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == lane)
        for name, lane in lanes.items()
    }
    lacks = [f"no lane {name!r}" for name in (WORK, *BUS) if not spans.get(name)]
    for name in BUS:
        pairs = ((a, b) for a in spans.get(name, []) for b in spans.get(WORK, []))
        if not lacks and not any(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs):
            lacks.append(f"no span of {name!r} runs beside one of {WORK!r}")
    return lacks


def timed(out):
    """Rows of the runs that differ only in when work is done, as the stage listed them in train-timing.txt."""
    try:
        lines = (out / "train-timing.txt").read_text().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        group, told, log = line.split()
        # The first step compiles kernels. An update in the next forward pass counts in the row of that pass.
        log = [json.loads(row) for row in (out / log).read_text().splitlines()]
        log = [row for row in log if "step_seconds" in row][2:]
        of = lambda kind, key: 1e3 * median([row[kind][key] for row in log if kind in row])
        step = 1e3 * median([row["step_seconds"] for row in log])
        rows.append((group, told, step, of("seconds", "step"), of("device_seconds", "updates"), of("device_seconds", "waits")))
    return rows


def main(out, device, precisions=PASS):
    failures = []
    print(f"## training on {device}\n")
    print("| precision | largest difference of a loss to the CPU's | allowed there |\n|---|---|---|")
    for precision in precisions:
        share = PASS[precision]
        pair = [losses(out / f"train-{precision}-{where}") for where in ("cpu", device)]
        if not pair[0] or len(pair[0]) != len(pair[1]):
            failures.append(f"{precision}: {len(pair[1])} losses instead of {len(pair[0])}")
            continue
        rows = [(abs(a - b), (k + 1) * share * abs(a)) for k, (a, b) in enumerate(zip(*pair))]
        worst = max(rows, key=lambda row: row[0] / row[1])
        print(f"| {precision} | {worst[0]:.2e} | {worst[1]:.2e} |")
        if not all(off <= allowed for off, allowed in rows):
            failures.append(f"{precision}: losses differ by more than allowed")
        if not pair[0][-1] < pair[0][0]:
            failures.append(f"{precision}: the loss does not fall")
    if device == "cuda":
        print("\n| precision | plan | arena | used | by the driver, context included |\n|---|---|---|---|---|")
        for precision in precisions:
            run = out / f"train-{precision}-{device}"
            config = json.loads((run / "config.resolved.json").read_text())
            plan = json.loads((run / "plan.json").read_text())["plan"]["memory"]["peak"]["device"]
            text = (out / f"train-{precision}-{device}.txt").read_text()
            used = re.search(r"rank 0 used (\S+) of the", text)
            driver = re.search(r"the driver counts (\d+) bytes more", text)
            if not used or not driver:
                failures.append(f"{precision}: the run does not say what it used of the GPU")
                continue
            arena, taken = config["arena_bytes"], int(driver[1])
            print(f"| {precision} | {plan / MIB:.1f}M | {arena / MIB:.1f}M | {used[1]} | {taken / MIB:.0f}M |")
            if not arena <= taken <= arena + context_bytes(config):
                failures.append(f"{precision}: the driver counts {taken} bytes, planned are {arena} and {context_bytes(config)}")
        print(f"\nThe last step, ms. The goal at real sizes is {OVERLAP} times the longest part.\n")
        print("| precision | compute | bus in | bus out | update on the processor | waits for copies | step | times the longest |")
        print("|---|---|---|---|---|---|---|---|")
        for precision in precisions:
            step, own, waits, times, measured = last_step(out / f"train-{precision}-{device}", bus_rates(out))
            cells = " | ".join(f"{value:.2f}" for value in own)
            print(f"| {precision} | {cells} | {waits:.2f} | {step:.2f} | {times:.2f} |")
        print("\nThe bus by " + ("bytes at its measured rate." if measured else "spans of copies: `ceilings` did not run."))
        lacks = not_beside(json.loads((out / f"train-traced-{device}/traces/rank-0000.json").read_text()))
        failures += [f"the trace of a run with its states on the host: {what}" for what in lacks]
        print("\nIn a trace, copies in both directions " + ("do NOT all run" if lacks else "run") + " beside work.")
    table = timed(out)
    if table:
        print("\nEqual bits, different times: medians of steps in bf16, ms.\n")
        print("| what | how | step | update after the pass | updates during passes | waits for copies |\n|---|---|---|---|---|---|")
    for group, told, *times in table:
        print(f"| {group} | {told} | " + " | ".join(f"{value:.2f}" for value in times) + " |")
    print()
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or PASS))
