"""Tests of the judgments of gpu_headline.py and gpu_train.py. The tests write directories like those of GPU runs. Some must
pass, and one of each kind must fail. They need no GPU. usage: python3 -m unittest discover -s scripts -p 'test_*.py'"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_frozen as frozen  # noqa: E402
import gpu_headline as headline  # noqa: E402
import gpu_overlap as overlap  # noqa: E402
import gpu_start as start  # noqa: E402
import gpu_tiles as tiles  # noqa: E402
import gpu_train as train  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
GIB, MIB = headline.GIB, headline.MIB
RATES = {"bus up": 50e9, "bus down": 40e9}
FIXED = {"host": 512 * MIB, "device": 768 * MIB}


def log_row(step, seconds=1.0, compute=0.9, moved=(20e9, 10e9), spans=(0.95, 0.3), step_part=0.05, updates=0.4, loss=2.0):
    return {
        "current_steps": step, "loss": loss, "tokens_per_second": 1024 / seconds, "step_seconds": seconds,
        "seconds": {"data": 0.0, "forward": 0.4, "communication": 0.0, "backward": seconds - 0.5, "step": step_part, "offload": 0.05},
        "device_seconds": {
            "compute": compute, "waits": 0.05, "inward": spans[0], "outward": spans[1], "communication": 0.0, "updates": updates,
        },
        "device_bytes": {"inward": moved[0], "outward": moved[1]},
    }


class Directory(unittest.TestCase):
    def setUp(self):
        temp = tempfile.TemporaryDirectory()
        self.addCleanup(temp.cleanup)
        self.out = Path(temp.name)

    def write(self, name, value):
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = value if isinstance(value, str) else json.dumps(value)
        path.write_text(text)

    def write_log(self, run, rows):
        self.write(f"{run}/trainer_log.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


class Headline(Directory):
    """Judgments of one case: one rank, states on the host, 20 GiB of the GPU and 40 GiB of the host in use."""

    case = {"name": "case", "title": "A case", "ranks": 1, "device_cap": "22.5GiB", "host_cap": "64GiB", "tokens": 1024, "peers": "none"}

    def judged(self, used="20.0G", driver=None, host=40 * GIB, rows=None, ranks=1, gpus=1, fixed=FIXED, rates=RATES, case=None,
               offload="cpu", text=None, early=None):
        arena = 21 * GIB
        driver = arena + 768 * MIB if driver is None else driver
        self.write_log("run", rows or [log_row(step) for step in range(1, 6)])
        memory = {
            "peak": {"device": 20 * GIB}, "resident_by_rank": [40 * GIB] * ranks,
            "phases": {"forward": {"device": {}, "host": {"driver": 512 * MIB, "optimizer": 39 * GIB}, "nvme": {}}},
        }
        share = {} if early is None else {"early_share": early}
        self.write("run/plan.json", {"plan": {"memory": memory, **share}})
        offloads = offload if isinstance(offload, dict) else {"param": offload, "optimizer": offload}
        config = {"offload": {"param": "none", "optimizer": "none", "activation": "none", **offloads}, "gpus": [{}] * gpus, "arena_bytes": arena}
        self.write("run/config.resolved.json", config)
        said = f"rank 0 used {used} of the 21.0G it reserved on GPU 0 · the driver counts {driver} bytes more in use than before the run"
        marks = {100 + rank: host for rank in range(ranks)}
        case = {**self.case, "ranks": ranks, **(case or {})}
        result, wrong = headline.outcome(case, self.out / "run", said if text is None else text, marks, "cuda", rates, fixed)
        # The text of the report, for either verdict.
        self.row = headline.row(case, result, wrong)
        self.remarks = headline.remarks(case, result, wrong)
        self.assertEqual(self.row.count("|"), headline.HEAD.splitlines()[2].count("|"))
        return result, wrong

    def fails(self, *words, **how):
        _, wrong = self.judged(**how)
        self.assertEqual(len(wrong), 1, wrong)
        for word in words:
            self.assertIn(word, wrong[0])
        self.assertIn("| FAILED |", self.row)
        self.assertIn(f"FAILED case: {wrong[0]}", self.remarks)

    def test_a_case_within_its_goals_passes(self):
        result, wrong = self.judged()
        self.assertEqual(wrong, [])
        self.assertIn("| ok |", self.row)
        self.assertEqual(result["longest"], "compute")
        self.assertAlmostEqual(result["times_longest"], 1 / 0.9)
        # 4 % is within the goal.
        _, wrong = self.judged(used="20.8G", host=int(40 * GIB * 1.04))
        self.assertEqual(wrong, [])

    def test_every_figure_of_the_sum_is_shown(self):
        self.judged(fixed={"host": 600 * MIB, "device": 700 * MIB})
        self.assertIn("arena 21.00 + fixed part 0.75 (plan 0.75, `probe` 0.68) = 21.75 by the driver", self.remarks)
        said = "fixed part 0.59 by `probe` (plan 0.50) + planned part 39.41 (plan 39.50) = VmHWM 40.00 (plan 40.00)"
        self.assertIn(said, self.remarks)
        self.judged(fixed={"host": None, "device": None})
        self.assertIn("fixed part not measured by `probe` (plan 0.50) + planned part not known", self.remarks)

    def test_a_device_peak_off_by_8_percent_fails_by_its_planned_part(self):
        self.fails("used 21.60 GiB of the arena", "planned 20.00", "the planned part is off", used="21.6G")
        self.fails("used 18.40 GiB of the arena", used="18.4G")

    def test_a_driver_count_off_by_8_percent_fails_by_its_fixed_part(self):
        driver = int((21 * GIB + 768 * MIB) * 0.92)
        self.fails("the driver counts 20.01 GiB, planned 21.75", "the fixed part is off", "`probe` measured 0.75", driver=driver)

    def test_more_device_memory_than_the_cap_fails(self):
        # Within 5 % of the plan.
        self.fails("more than the cap", driver=int(22.6 * GIB))

    def test_a_host_peak_off_by_8_percent_names_the_part(self):
        self.fails("VmHWM 43.20 GiB, planned 40.00", "the planned part is off, 42.70 GiB instead of 39.50", host=int(43.2 * GIB))
        self.fails("VmHWM 36.80 GiB, planned 40.00", "the planned part is off", host=int(36.8 * GIB))
        fixed = {"host": int(3.7 * GIB), "device": None}
        self.fails("the fixed part is off, 3.70 GiB instead of 0.50 (planned part 39.50 of 39.50)", host=int(43.2 * GIB), fixed=fixed)
        unknown = {"host": None, "device": None}
        self.fails("which part is off is not known", host=int(43.2 * GIB), fixed=unknown)

    def test_more_host_memory_than_the_cap_fails(self):
        self.fails("VmHWM of all ranks 80.00 GiB, more than the cap of 64.00 GiB", ranks=2, gpus=2)

    def test_a_step_slower_than_the_goal_fails_with_offload_only(self):
        rows = [log_row(step, seconds=1.2) for step in range(1, 6)]
        self.fails("the step is 1.33 times its longest part (compute), the goal is 1.2", rows=rows)
        _, wrong = self.judged(rows=rows, offload="none")
        self.assertEqual(wrong, [])
        for what in ("param", "optimizer", "activation"):
            self.fails("the step is 1.33 times its longest part", rows=rows, offload={what: "cpu"})

    def test_the_best_step_with_the_optimizer_in_backward_is_shown(self):
        # Forward takes 0.2 s, backward 0.6 s, the update 0.9 s.
        rows = [log_row(step, compute=0.8, step_part=0.0, updates=0.9) for step in range(1, 6)]
        for early, words in ((0.0, "= 1.500, 1.67 times"), (0.5, "= 1.050, 1.17 times"), (0.75, "= 0.900, 1.00 times")):
            result, wrong = self.judged(rows=rows, early=early)
            self.assertEqual(wrong, [])
            self.assertIn(words, self.remarks)
            self.assertIn(f"{early:.0%} of the elements are updated beside backward", self.remarks)
        # An update after the pass has no such bound.
        result, _ = self.judged(rows=[log_row(step, step_part=0.9, updates=0.0) for step in range(1, 6)], early=0.5)
        self.assertNotIn("least_step", result)

    def test_stalls_of_copies_do_not_count_as_bus_time(self):
        # Copies that always wait for compute still count as 20 GB at 50 GB/s.
        rows = [log_row(step, seconds=1.2, compute=0.5, spans=(1.15, 1.15)) for step in range(1, 6)]
        self.fails("the step is 2.40 times its longest part (compute)", rows=rows)
        self.assertIn("at the measured rate of the bus", self.remarks)
        # Without a measured rate the spans count, and the row says so.
        result, wrong = self.judged(rows=rows, rates={})
        self.assertEqual((wrong, result["bus_at_its_rate"]), ([], False))
        self.assertIn("by spans of copies", self.remarks)
        for row in rows:
            del row["device_bytes"]
        result, _ = self.judged(rows=rows)
        self.assertFalse(result["bus_at_its_rate"])

    def test_ranks_that_share_a_gpu_share_its_link(self):
        rows = [log_row(step, compute=0.3) for step in range(1, 6)]
        result, wrong = self.judged(rows=rows, ranks=2, gpus=1, host=30 * GIB, case={"host_cap": None}, driver=2 * (21 * GIB + 768 * MIB))
        self.assertAlmostEqual(result["parts"]["to the device"], 2 * 20e9 / 50e9)
        self.assertEqual(result["longest"], "to the device")
        # The plan needs 40 GiB for each rank.
        self.assertEqual(len([text for text in wrong if "VmHWM" in text]), 2)

    def test_updates_count_in_the_step_and_beside_the_passes(self):
        for step_part, updates in ((0.9, 0.0), (0.0, 0.9), (0.1, 0.8)):
            rows = [log_row(step, compute=0.2, step_part=step_part, updates=updates) for step in range(1, 6)]
            result, wrong = self.judged(rows=rows)
            self.assertEqual((wrong, result["longest"]), ([], "update on the processor"))
            self.assertAlmostEqual(result["parts"]["update on the processor"], 0.9)

    def test_the_first_step_with_the_optimizer_in_forward_does_not_count(self):
        rows = [log_row(1, updates=0.0, seconds=9.0), *(log_row(step, compute=0.1, updates=0.85) for step in range(2, 6))]
        result, wrong = self.judged(rows=rows)
        self.assertEqual((wrong, result["longest"]), ([], "update on the processor"))

    def test_a_loss_of_nan_fails(self):
        self.fails("a loss is no number", rows=[log_row(step, loss=float("nan")) for step in range(1, 6)])

    def test_a_run_without_gpu_figures_fails(self):
        self.fails("does not say what it used of the GPU", text="done")


class Runs(Directory):
    """Judgments of runs that fail. A shell script takes the place of the launcher."""

    def run_case(self, program, case=None, device="cpu"):
        binary = self.out / "bin"
        binary.mkdir()
        launcher = binary / "launcher"
        launcher.write_text("#!/bin/sh\n" + program)
        launcher.chmod(0o755)
        published = ROOT / "launcher/src/commands/synth/configs"
        arguments = mock.Mock(out=self.out, bin=binary, device=device, configs=published, packages="")
        case = {**Headline.case, "model": "minicpm-o-2_6", "flags": [], **(case or {})}
        result, wrong = headline.run_case(case, arguments, 20)
        return headline.row(case, result, wrong), wrong

    def test_a_run_out_of_memory_fails_with_its_error_message(self):
        program = '[ "$1" = synth ] && exit 0\necho "error[E01] the memory set aside on the GPU ran out"; exit 11\n'
        row, wrong = self.run_case(program)
        self.assertEqual(len(wrong), 1)
        self.assertIn("exit 11: error[E01] the memory set aside on the GPU ran out", wrong[0])
        self.assertIn("| FAILED |", row)

    def test_a_case_runs_with_its_variables(self):
        program = '[ "$1" = synth ] && exit 0\necho "products by $TESSERA_MATMUL"; exit 3\n'
        _, wrong = self.run_case(program, {"variables": {"TESSERA_MATMUL": "own"}})
        self.assertIn("exit 3: products by own", wrong[0])

    def test_a_checkpoint_larger_than_the_disk_fails_with_the_sizes(self):
        plan = {"checkpoint_bytes": {"state": 1, "weights": 1 << 60}, "need_bytes": {"host": 1}, "parameters_total": 100}
        case = {"layers": {"all": 28, "least": 4}, "host_cap": "64GiB", "saves": True}
        row, wrong = self.run_case(f"echo '{json.dumps(plan)}'\n", case, "cuda")
        self.assertEqual(len(wrong), 1)
        self.assertIn("no room for not even the fewest of 28 layers", wrong[0])
        self.assertIn("GiB of disk are free", wrong[0])
        self.assertIn("| FAILED |", row)


class Layers(unittest.TestCase):
    """Number of layers of the case that writes a checkpoint. A layer takes 2 GiB of disk and 1 GiB of host memory."""

    case = {
        "name": "save", "title": "Saves", "host_cap": "64GiB", "layers": {"all": 28, "least": 4}, "device_cap": "22.5GiB", "peers": "", "saves": True,
    }

    def plan(self, layers):
        state, weights = layers * 3 * GIB // 2, layers * GIB // 2
        return {
            "checkpoint_bytes": {"state": state, "weights": weights, "at_once": 1},
            "need_bytes": {"host": (layers + 2) * GIB}, "parameters_total": (layers + 4) * 10**9,
        }

    def chosen(self, disk, ram, case=None):
        return headline.layers_that_fit(case or self.case, self.plan, int(disk * GIB), int(ram * GIB))

    def test_all_layers_run_where_disk_and_memory_allow(self):
        choice = self.chosen(100, 100)
        self.assertEqual((choice["layers"], choice["host_cap"]), (28, 64 * GIB))

    def test_disk_and_memory_bound_the_layers(self):
        choice = self.chosen(52, 100)
        self.assertEqual(choice["layers"], 25)
        self.assertEqual(choice["host_cap"], 64 * GIB * 29 // 32)
        words = headline.layers_in_words(choice)
        for word in ("25 of 28 layers", "52.00 GiB of disk are free", "37.50 of states + 12.50 of weights"):
            self.assertIn(word, words)
        self.assertEqual(self.chosen(100, 12.7)["layers"], 10)
        self.assertIsNone(self.chosen(9, 100)["layers"])

    def test_only_memory_bounds_the_layers_of_a_case_without_checkpoint(self):
        case = {name: value for name, value in self.case.items() if name not in ("host_cap", "saves")}
        choice = self.chosen(0, 12.7, case)
        self.assertEqual((choice["layers"], choice["host_cap"]), (10, None))
        words = headline.layers_in_words(choice)
        self.assertNotIn("disk", words)
        self.assertNotIn("cap", words)
        self.assertIn("12.70 GiB of host memory are free, the ranks need 12.60", words)

    def test_the_optimizer_in_backward_bounds_the_layers(self):
        case = {**self.case, "layers": {"all": 28, "least": 4, "early": 0.5}, "because": "for a reason"}
        plan = lambda layers: {**self.plan(layers), "early_share": 5 / layers}
        choice = headline.layers_that_fit(case, plan, 100 * GIB, 100 * GIB)
        self.assertEqual(choice["layers"], 10)
        remarks = headline.remarks(case, {"layers": choice}, [])
        self.assertIn("50% of the elements are updated while backward runs, wanted 50%", remarks)
        self.assertIn("save: for a reason", remarks)
        # Other cases do not mention the optimizer in backward.
        self.assertNotIn("backward", headline.layers_in_words(self.chosen(52, 100)))

    def test_a_row_names_the_layers_that_ran(self):
        result = {"layers": self.chosen(52, 100)}
        self.assertIn("| Saves, 25 of 28 layers |", headline.row(self.case, result, []))
        self.assertIn("52.00 GiB of disk are free", headline.remarks(self.case, result, []))


class Peers(unittest.TestCase):
    case = {"name": "speed", "title": "Speed", "tokens": 2048, "at_least": 1.2, "device_cap": "139GiB", "peers": "them"}

    def judged(self, times, ours=15_000.0):
        result = {"tokens_per_second": ours}
        wrong = headline.beside_peer(self.case, result, times, "said so")
        return headline.row(self.case, result, wrong), headline.remarks(self.case, result, wrong), wrong

    def test_a_target_is_judged_by_transformers_and_peft(self):
        times = {"transformers + peft, activations kept": 200.0, "transformers + peft, activations computed again": 250.0}
        row, _, wrong = self.judged(times)
        self.assertEqual(wrong, [])
        self.assertIn("| ok |", row)
        row, _, wrong = self.judged(times, 12_000.0)
        self.assertIn("1.17 times the peer's tokens per second, wanted 1.2", wrong[0])
        self.assertIn("| FAILED |", row)

    def test_plain_pytorch_does_not_judge_a_target(self):
        for times in ({"plain PyTorch, activations kept": 400.0}, {}):
            row, remarks, wrong = self.judged(times)
            self.assertEqual(len(wrong), 1)
            self.assertIn("| not judged against transformers + peft |", row)
            self.assertNotIn("| ok |", row)
            self.assertIn("not judged against transformers + peft", remarks)

    def test_rows_printed_before_the_end_are_kept(self):
        text = '{"a": 1.5}\nwarning: odd\n{"b": 2.0}\n{"c": 3.'
        self.assertEqual(headline.rows_printed(text), {"a": 1.5, "b": 2.0})
        stopped = subprocess.TimeoutExpired("python3", 5, output=text.encode(), stderr=b"slow")
        with mock.patch.object(headline.subprocess, "run", side_effect=stopped):
            times, said = headline.peer(self.case, Path("."), 10, 5, "")
        self.assertEqual(times, {"a": 1.5, "b": 2.0})
        self.assertEqual(said, "slow stopped after 5 s")


class PeerRows(unittest.TestCase):
    def test_each_row_is_printed_as_it_is_measured(self):
        """A program killed after it measured two rows has printed both."""
        program = (
            "import sys, time; from unittest import mock; sys.argv += ['--names', '--stage', 'nothing']\n"
            "import gpu_peers as peers\n"
            "peers.NAMES, peers.STAGE, peers.torch = False, 'table', mock.Mock()\n"
            "times = iter((1.5, 2.5))\n"
            "peers.median_ms = lambda work: work() or next(times)\n"
            "def broken(): raise RuntimeError('no such kernel')\n"
            "peers.measure('one', lambda: lambda: None)\n"
            "peers.measure('odd', lambda: broken)\n"
            "peers.measure('two', lambda: lambda: None)\n"
            "print('after them', file=sys.stderr, flush=True)\n"
            "time.sleep(60)\n"
        )
        words = [sys.executable, "-c", program]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        with subprocess.Popen(words, cwd=ROOT / "scripts", env=plain, **pipes) as done:
            said = []
            for line in done.stderr:
                said.append(line.strip())
                if line.startswith("after"):
                    break
            done.kill()
            printed = done.stdout.read()
        self.assertEqual(headline.rows_printed(printed), {"one": 1.5, "two": 2.5})
        self.assertIn("odd: RuntimeError: no such kernel", said)


class Train(Directory):
    def setUp(self):
        super().setUp()
        self.rows = [log_row(step, loss=2.0 - 0.1 * step) for step in range(1, 9)]
        for precision in train.PASS:
            for where in ("cpu", "cuda"):
                self.write_log(f"train-{precision}-{where}", self.rows)
            run = f"train-{precision}-cuda"
            self.write(f"{run}/config.resolved.json", {"arena_bytes": 300 * MIB})
            self.write(f"{run}/plan.json", {"plan": {"memory": {"peak": {"device": 280 * MIB}}}})
            self.count(precision, 800 * MIB)
        self.write("ceilings.json", {"ceilings": list(map(list, RATES.items()))})
        self.trace({"device": (0, 10), "to the device": (2, 4), "from the device": (8, 12)})

    def count(self, precision, driver):
        said = f"rank 0 used 280.0M of the 300.0M it reserved on GPU 0 · the driver counts {driver} bytes more in use"
        self.write(f"train-{precision}-cuda.txt", said)

    def trace(self, lanes):
        events = []
        for tid, (name, (start, end)) in enumerate(lanes.items()):
            events.append({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})
            events.append({"ph": "X", "name": "unit", "tid": tid, "ts": start, "dur": end - start})
        self.write("train-traced-cuda/traces/rank-0000.json", {"traceEvents": events})

    def judged(self):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = train.main(self.out, "cuda")
        self.text = printed.getvalue()
        return code

    def fails(self, *words):
        self.assertEqual(self.judged(), 1)
        for word in words:
            self.assertIn(word, self.text)
        self.assertIn("FAILED", self.text)

    def test_runs_that_agree_pass(self):
        self.assertEqual(self.judged(), 0, "runs that agree")
        self.assertNotIn("FAILED", self.text)
        # ms: 20 GB at 50 GB/s, 10 GB at 40 GB/s, both parts of the update.
        self.assertIn("| bf16 | 900.00 | 400.00 | 250.00 | 450.00 | 50.00 | 1000.00 | 1.11 |", self.text)
        self.assertIn("The bus by bytes at its measured rate", self.text)

    def test_without_ceilings_the_bus_time_comes_from_spans_and_the_report_says_so(self):
        (self.out / "ceilings.json").unlink()
        self.assertEqual(self.judged(), 0)
        self.assertIn("The bus by spans of copies", self.text)

    def test_losses_that_differ_between_devices_fail(self):
        other = [{**row, "loss": row["loss"] * 1.01} for row in self.rows]
        self.write_log("train-f32-cuda", other)
        self.fails("f32: losses differ by more than allowed")

    def test_a_missing_loss_fails(self):
        self.write_log("train-fp16-cuda", self.rows[:-1])
        self.fails("fp16: 7 losses instead of 8")

    def test_a_loss_that_does_not_fall_fails(self):
        flat = [{**row, "loss": 2.0} for row in self.rows]
        for where in ("cpu", "cuda"):
            self.write_log(f"train-bf16-{where}", flat)
        self.fails("bf16: the loss does not fall")

    def test_a_driver_count_above_or_below_the_plan_fails(self):
        self.count("bf16", (300 + 768) * MIB + 1)
        self.fails("bf16: the driver counts")
        self.count("bf16", 299 * MIB)
        self.fails("bf16: the driver counts")

    def test_copies_that_do_not_overlap_compute_fail(self):
        self.trace({"device": (0, 10), "to the device": (2, 4), "from the device": (10, 12)})
        self.fails("no span of 'from the device' runs beside one of 'device'")
        self.trace({"device": (0, 10), "from the device": (8, 12)})
        self.fails("no lane 'to the device'")

    def test_times_of_timing_runs_are_written(self):
        for told, seconds, updates in (("off", 1.4, 0.0), ("on", 1.1, 0.4)):
            rows = [log_row(step, seconds=seconds, updates=updates, step_part=0.45 - updates) for step in range(1, 9)]
            self.write(f"train-late-{told}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.write("train-timing.txt", "late off train-late-off.jsonl\nlate on train-late-on.jsonl\n")
        self.assertEqual(self.judged(), 0)
        self.assertIn("| late | off | 1400.00 | 450.00 | 0.00 | 50.00 |", self.text)
        self.assertIn("| late | on | 1100.00 | 50.00 | 400.00 | 50.00 |", self.text)


class Shared(unittest.TestCase):
    def test_the_scripts_and_the_plan_assume_the_same_context_bytes(self):
        source = (ROOT / "kernels/src/footprint.rs").read_text()
        large, mib = map(int, re.search(r"LARGE: \(u64, u64\) = \((\d+), (\d+) << 20\)", source).groups())
        least = int(re.search(r"LEAST_DEVICE_BYTES: u64 = (\d+) << 20", source)[1])
        self.assertEqual((overlap.LARGE, overlap.CONTEXT_BYTES, overlap.LEAST_CONTEXT_BYTES), (large, mib * MIB, least * MIB))
        self.assertEqual(overlap.context_of(large), mib * MIB)
        self.assertEqual(overlap.context_of(1), least * MIB)

    def test_without_a_probe_no_footprint_is_known(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            self.assertEqual(headline.footprint(out), {"host": None, "device": None})
            (out / "probe.json").write_text(json.dumps({"ceilings": [["driver bytes", 5.0], ["context bytes", 7.0]]}))
            self.assertEqual(headline.footprint(out), {"host": 5.0, "device": 7.0})
            self.assertEqual(overlap.bus_rates(out), {})

    def test_a_case_without_host_cap_is_planned_for_the_free_memory(self):
        """A shell script takes the place of the launcher and records its arguments. Only a case with a checkpoint calls `synth`."""
        cases = {case["name"]: case for case in json.loads((ROOT / "scripts/headline.json").read_text())}
        published = ROOT / "launcher/src/commands/synth/configs"
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            program = work / "launcher"
            program.write_text(f"#!/bin/sh\necho \"$@\" >>'{work}/words'\necho '{{}}'\n")
            program.chmod(0o755)
            for name, ram, made in (("minicpm-v-full", "123", False), ("minicpm-o-full-save", "64GiB", True)):
                (work / "words").unlink(missing_ok=True)
                self.assertEqual(headline.planned_with(cases[name], work, work, published, 123)(9), {})
                words = (work / "words").read_text()
                self.assertIn(f"--ram {ram} ", words)
                self.assertEqual("synth" in words, made)
                self.assertEqual("--save-strategy steps" in words, made)
                self.assertEqual(json.loads((work / "plan-9/config.json").read_text())["num_hidden_layers"], 9)

    def test_every_case_that_did_not_run_is_reported_as_failed(self):
        cases = json.loads((ROOT / "scripts/headline.json").read_text())
        for case in cases:
            text = headline.row(case, {"name": case["name"]}, ["NOT RUN"]) + headline.remarks(case, {}, ["NOT RUN"])
            self.assertIn("FAILED", text)

    def test_three_calls_have_the_time_of_their_stages(self):
        listed = subprocess.run(["bash", ROOT / "scripts/gpu-check.sh", "--list"], capture_output=True, text=True, check=True)
        stages = [line.split() for line in listed.stdout.splitlines()]
        for call in "123":
            own = [(stage, int(limit)) for number, stage, limit in stages if number == call]
            self.assertEqual(own[0][0], "warm-up")
            self.assertLessEqual(sum(limit for _, limit in own), 480, f"call {call}")
        names = [stage for _, stage, _ in stages if stage not in ("warm-up", "ceilings")]
        self.assertEqual(len(names), len(set(names)), "a stage of two calls")
        text = (ROOT / "docs/gpu-kernels.md").read_text()
        for name in {stage for _, stage, _ in stages}:
            self.assertIn(f"`{name}`", text)

    def test_shared_frozen_weights_have_equal_losses_on_both_ways(self):
        shared = "one copy in shared memory"
        ways = {"registered": ([2.0, 1.0], 0.1, f"{shared}, the driver registered 1.0G in place"), "pinned": ([2.0, 1.0], 0.2, shared)}
        self.assertEqual(frozen.judged(ways, "cuda"), [])
        self.assertEqual(frozen.judged({**ways, "registered": ways["pinned"]}, "cpu"), [])
        self.assertIn("did not register", frozen.judged({**ways, "registered": ways["pinned"]}, "cuda")[0])
        self.assertIn("registered the base", frozen.judged({**ways, "pinned": ways["registered"]}, "cuda")[0])
        self.assertIn("do not share", frozen.judged({**ways, "pinned": ([2.0, 1.0], 0.2, "")}, "cuda")[0])
        for bad in ([2.0, 1.5], []):
            self.assertIn("losses", frozen.judged({**ways, "pinned": (bad, 0.2, shared)}, "cuda")[0])
        vision = {"num_hidden_layers": 63, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
        config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vision_config": vision, "vocab_size": 9}
        short = frozen.shortened(config)
        self.assertEqual((short["num_hidden_layers"], short["vision_config"]["num_hidden_layers"]), (4, 4))
        self.assertEqual((short["hidden_size"], short["vision_config"]["hidden_size"], vision["hidden_size"]), (4096, 128, 32))
        self.assertEqual((short["vocab_size"], short["vision_config"]["patch_size"]), (9, 14))

    def test_tiles_must_lower_the_peak_and_keep_the_losses(self):
        def log(peak, losses):
            rows = [{"loss": loss, "grad_norm": 1.0, "bytes": {"device": peak}, "step_seconds": 9.0 - step} for step, loss in enumerate(losses)]
            return [*rows, {"eval_loss": 1.0}]

        table, wrong = tiles.judged(log(9, [2.0, 1.0]), log(5, [2.0, 1.0]))
        self.assertEqual(wrong, [])
        self.assertEqual([row[:3] for row in table], [("all rows", 9, 8.0), ("tiles", 5, 8.0)])
        for other in (log(9, [2.0, 1.0]), log(5, [2.0, 1.0000000000000002]), log(5, [2.0]), log(5, [2.0, "NaN"])):
            self.assertNotEqual(tiles.judged(log(9, [2.0, 1.0]), other)[1], [])
        self.assertNotEqual(tiles.judged(log(9, [2.0, "NaN"]), log(5, [2.0, "NaN"]))[1], [])
        norms = log(5, [2.0, 1.0])
        norms[1]["grad_norm"] = 1.0000000000000002
        self.assertNotEqual(tiles.judged(log(9, [2.0, 1.0]), norms)[1], [])
        self.assertNotEqual(tiles.judged(log(9, []), log(5, []))[1], [])

    def test_every_headline_case_has_a_published_and_a_small_model(self):
        published = ROOT / "launcher/src/commands/synth/configs"
        for case in json.loads((ROOT / "scripts/headline.json").read_text()):
            whole, small = (headline.model_config(case, tiny, published) for tiny in (False, True))
            self.assertEqual(whole["architectures"], small["architectures"], case["name"])

    def test_losses_of_the_first_updates_are_compared(self):
        self.assertEqual(start.differences([2.0, 1.0], [2.0, 1.00015])[1], [])
        self.assertEqual(start.differences([2.0, 1.0], [2.0, 1.001])[1], ["update 2: loss 1.001 instead of 1.0"])
        for bad in ([2.0], [2.0, float("nan")], []):
            self.assertNotEqual(start.differences([2.0, 1.0], bad)[1], [])
        self.assertNotEqual(start.differences([], [])[1], [])


if __name__ == "__main__":
    unittest.main()
