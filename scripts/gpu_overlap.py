"""The least time of a step, and how far a step exceeds it: arithmetic that gpu_headline.py and gpu_train.py share.

The least time of a step with offload is its longest part: compute, either direction of the bus, or the update on the CPU.
The time of the bus comes from bytes and the rate that the stage `ceilings` measured for pinned memory, since spans of copies
include delays of the host. Without that measurement the spans are used, which is more lenient, and the output says so.
"""

import json

# Largest ratio of a step to its longest part: the project's goal.
OVERLAP = 1.2
# The share of forward in compute. Backward recomputes the forward pass and has two products for each product of it.
FORWARD = 1 / 4
# Name of the part, its key in device_bytes and device_seconds, and its ceiling.
DIRECTIONS = (("to the device", "inward", "bus up"), ("from the device", "outward", "bus down"))

# GPU memory that the plan allows CUDA on a GPU with this many multiprocessors, and on the smallest GPU.
LARGE, CONTEXT_BYTES, LEAST_CONTEXT_BYTES = 132, 768 << 20, 320 << 20


def context_bytes(config):
    """Bytes that driver, context and loaded kernels may take beside the arena, as the plan says."""
    return max(context_of(gpu.get("multiprocessors", LARGE)) for gpu in config.get("gpus") or [{}])


def context_of(multiprocessors):
    """The plan's bytes for a GPU: kernels/src/footprint.rs has the same numbers."""
    return max(LEAST_CONTEXT_BYTES, CONTEXT_BYTES * multiprocessors // LARGE)


def median(values):
    values = sorted(values)
    return values[len(values) // 2] if values else 0.0


def bus_rates(out, stage="ceilings"):
    """Bytes per second by direction, as the stage `ceilings` wrote them to `out`; empty if it did not run. With another stage,
    the values that it wrote for others."""
    try:
        return dict(json.loads((out / f"{stage}.json").read_text())["ceilings"])
    except (OSError, KeyError, TypeError, ValueError):
        return {}


def longest(rows, rates, ranks_on_gpu=1):
    """From rows of trainer_log.jsonl: the parts in seconds, the name of the longest, the step as a multiple of it, and whether
    the measured rate of the bus was used."""
    of = lambda kind, key: median([row[kind][key] for row in rows])
    # An update in the next forward pass counts in the row of that pass. The median is the same.
    parts = {"compute": of("device_seconds", "compute"), "update on the processor": of("seconds", "step") + of("device_seconds", "updates")}
    measured = all(ceiling in rates for _, _, ceiling in DIRECTIONS) and all("device_bytes" in row for row in rows)
    for part, key, ceiling in DIRECTIONS:
        if measured:
            # Ranks that share a GPU share its link.
            parts[part] = ranks_on_gpu * of("device_bytes", key) / rates[ceiling]
        else:
            parts[part] = of("device_seconds", key)
    name = max(parts, key=parts.get)
    return parts, name, median([row["step_seconds"] for row in rows]) / max(parts[name], 1e-9), measured


def beside_updates(parts, early):
    """The least time of a step with these parts, if the share `early` of the update runs in backward and the rest in the next
    forward. A pass lasts at least as long as its part of the update."""
    compute, update = parts["compute"], parts["update on the processor"]
    passes = max(FORWARD * compute, (1 - early) * update) + max((1 - FORWARD) * compute, early * update)
    return max(passes, *parts.values())
