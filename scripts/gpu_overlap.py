"""What a step waits for at least, and how much longer it takes: the arithmetic that gpu_headline.py and gpu_train.py share.

The floor of a step with offload is its longest part: computing, either direction of the bus, or the processor's update. The
bus is taken at the rate that the stage `ceilings` measured for pinned memory, since spans of copies also hold what the host was
late for; without that measurement by the spans, which is more lenient, and said.
"""

import json

# A step to its longest part: the project's goal.
OVERLAP = 1.2
# Of compute, what forward is: backward computes it again and has two products for each of its own.
FORWARD = 1 / 4
# Of a row's device_bytes, the part that it is named, the key of device_seconds, and the ceiling.
DIRECTIONS = (("to the device", "inward", "bus up"), ("from the device", "outward", "bus down"))


def median(values):
    values = sorted(values)
    return values[len(values) // 2] if values else 0.0


def bus_rates(out, stage="ceilings"):
    """Bytes per second by direction, as the stage `ceilings` left them in `out`; empty where it did not run. Of another stage
    what that left for others."""
    try:
        return dict(json.loads((out / f"{stage}.json").read_text())["ceilings"])
    except (OSError, KeyError, TypeError, ValueError):
        return {}


def longest(rows, rates, ranks_on_gpu=1):
    """Of rows of trainer_log.jsonl: the parts in seconds, the name of the longest, the step as a multiple of it, and whether
    the bus was taken at its measured rate."""
    of = lambda kind, key: median([row[kind][key] for row in rows])
    # An update beside the next pass counts in the row of that pass: in a median that is the same.
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
    """The least step of these parts where the share `early` of the update runs beside backward and the rest beside the next forward:
    a pass whose part of the update is longer than itself is waited for."""
    compute, update = parts["compute"], parts["update on the processor"]
    passes = max(FORWARD * compute, (1 - early) * update) + max((1 - FORWARD) * compute, early * update)
    return max(passes, *parts.values())
