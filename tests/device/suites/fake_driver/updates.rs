//! The optimizer in backward and in forward: the same bits, in the planned memory.

use kernels::DType;
use serde_json::Value;

use crate::runs::near;
use crate::site::{Site, every};

/// The optimizer runs in backward where host memory is spare, with the same bits. The plan includes the second states.
pub(crate) fn the_optimizer_runs_in_backward_where_host_memory_is_spare() {
    let site = Site::with_model();
    let cells = [
        ("whole", "--precision bf16 --offload cpu"),
        (
            "consumed",
            "--precision bf16 --offload cpu --max-grad-norm 0",
        ),
        (
            "kahan",
            "--precision pure-bf16 --pure-bf16-weights kahan --offload cpu",
        ),
    ];
    for (cell, flags) in &cells[..if every() { 3 } else { 2 }] {
        updates_in_backward(&site, cell, flags);
    }
    // Second weights would be on the GPU, which has no spare memory for them, so they need an explicit request.
    let line = format!("{LINE} --precision bf16 --offload optimizer=cpu");
    for (mode, begins) in [("auto", false), ("1GiB", true)] {
        let run = format!("stay-{mode}");
        site.train(
            &[],
            &format!("{line} --optimizer-in-backward {mode} --output {run}"),
        );
        assert_eq!(spans(&site, &run, 0, "early update") > 0, begins, "{run}");
        assert_eq!(site.losses(&run), site.losses("stay-auto"));
        assert!(site.weights(&run, 3) == site.weights("stay-auto", 3));
        site.takes_what_the_plan_says(&run);
    }
}

/// The optimizer runs in the next forward, with the losses and weights of updates after the pass and in the planned memory.
/// Clipping and the last update change nothing: evaluation and the checkpoint wait for it.
pub(crate) fn the_optimizer_runs_in_forward_with_the_same_bits() {
    let site = Site::with_model();
    let cells = [
        ("f32", 2, "--precision f32 --offload cpu"),
        (
            "clipped",
            1,
            "--precision bf16 --offload cpu --max-grad-norm 0.05",
        ),
        ("there", 2, "--precision bf16 --offload optimizer=cpu"),
        (
            "wide",
            1,
            "--precision fp16 --loss-scale 1024 --offload cpu --gradient-accumulation-steps 2",
        ),
    ];
    for (cell, ranks, flags) in &cells[..if every() { 4 } else { 2 }] {
        let line = LINE.replace("--nproc 2", &format!("--nproc {ranks}"));
        let line = line.replace(
            "--eval-strategy no",
            "--eval-data held_out.json --eval-steps 2",
        );
        let line = format!("{line} {flags} --optimizer-in-backward off");
        let [off, on] = ["off", "on"].map(|mode| {
            let run = format!("{cell}-{mode}");
            let more = format!("--optimizer-in-forward {mode} --output {run}");
            let screen = site.train(&[], &format!("{line} {more}"));
            let said = screen.contains("is updated beside the next pass");
            assert_eq!(said, mode == "on", "{screen}");
            for rank in 0..*ranks {
                assert_eq!(spans(&site, &run, rank, "early update"), 0, "{run}");
                let late = spans(&site, &run, rank, "late update");
                assert_eq!(late > 0, mode == "on", "{run}, rank {rank}");
            }
            site.takes_what_the_plan_says(&run);
            takes_the_planned_host_memory(&site, &run);
            run
        });
        assert_eq!(site.losses(&on), site.losses(&off), "{cell}");
        let evaluated = site.logged(&on, "eval_loss");
        assert!(!evaluated.is_empty(), "{cell}");
        assert_eq!(evaluated, site.logged(&off, "eval_loss"), "{cell}");
        assert!(site.weights(&on, 3) == site.weights(&off, 3), "{cell}");
        if *cell == "f32" {
            let cpu = line.replace("--device cuda", "--device cpu");
            let cpu = cpu.replace("--trace-steps 2..4", "");
            site.train(&[], &format!("{cpu} --output cpu"));
            near(&site.losses(&on), &site.losses("cpu"), DType::F32);
        }
    }
}

const LINE: &str = "--device cuda --nproc 2 --max-steps 3 --save-strategy steps --save-steps 3 --eval-strategy no \
                    --trace-steps 2..4";

fn updates_in_backward(site: &Site, cell: &str, flags: &str) {
    let plan_of = |run: &str| site.json(&format!("{run}/plan.json"));
    let need = |run: &str| plan_of(run)["plan"]["host_need_bytes"].as_u64().unwrap();
    let run = |mode: &str| format!("{cell}-{mode}");
    let check = |mode: &str, more: &str, begins: bool| {
        let run = run(mode);
        let screen = site.train(&[], &format!("{LINE} {flags} {more} --output {run}"));
        let said = screen.contains("units are updated while backward runs");
        assert_eq!(said, begins, "{screen}");
        let costs = screen.contains("more of spare host memory");
        assert_eq!(costs, mode == "auto", "{screen}");
        for rank in 0..2 {
            let seen = |lane| spans(site, &run, rank, lane);
            let (early, late) = (seen("early update"), seen("late update"));
            assert_eq!(early > 0, begins, "{run}, rank {rank}: {early}");
            // The other units are updated in the next forward. If all were updated in backward, only rolled-back ones
            // are.
            assert!(begins || (late > 0) == (mode == "tight"), "{run}: {late}");
        }
        let rows = site.rows(&run);
        let updates = rows
            .iter()
            .filter_map(|row| row["device_seconds"]["updates"].as_f64());
        assert_eq!(updates.sum::<f64>() > 0.0, mode != "off", "{run}");
        let first = format!("{cell}-off");
        assert_eq!(site.losses(&run), site.losses(&first));
        let same = site.weights(&run, 3) == site.weights(&first, 3);
        assert!(same, "{run}: weights");
        site.takes_what_the_plan_says(&run);
        takes_the_planned_host_memory(site, &run);
    };
    check(
        "off",
        "--optimizer-in-backward off --optimizer-in-forward off",
        false,
    );
    check("auto", "", true);
    assert!(need(&run("off")) < need(&run("auto")), "{cell}");
    if every() {
        check("bound", "--optimizer-in-backward 1GiB", true);
    }
    if !every() && cell != "whole" {
        return;
    }
    // A tenth of the memory stays free, so nothing is left for second states.
    let limit = need(&run("off")) / 9 * 10;
    check("tight", &format!("--host-memory-limit {limit}"), false);
    assert_eq!(need(&run("tight")), need(&run("off")));
}

/// The peak of host memory of every kind of state is the planned one.
fn takes_the_planned_host_memory(site: &Site, run: &str) {
    let rows = site.lines(&format!("{run}/memory.jsonl"));
    let plan = site.json(&format!("{run}/plan.json"));
    let planned = plan["plan"]["memory"]["phases"].as_object().unwrap();
    for kind in ["parameters", "gradients", "optimizer"] {
        let phases = rows
            .iter()
            .flat_map(|row| row["phases"].as_object().unwrap().values());
        let taken = phases.filter_map(|phase| phase["host"]["by_kind"][kind].as_u64());
        let foreseen = planned
            .values()
            .filter_map(|phase: &Value| phase["host"][kind].as_u64());
        assert_eq!(taken.max(), foreseen.max(), "{run}: {kind}");
    }
}

/// Number of spans of one lane in a rank's trace.
fn spans(site: &Site, run: &str, rank: usize, lane: &str) -> usize {
    let trace = site.json(&format!("{run}/traces/rank-{rank:04}.json"));
    let events = trace["traceEvents"].as_array().unwrap();
    let mut named = events.iter().filter(|event| event["ph"] == "M");
    let lane = named.find(|event| event["args"]["name"] == lane);
    let Some(lane) = lane.map(|event| &event["tid"]) else {
        return 0;
    };
    let spans = events.iter().filter(|event| event["ph"] == "X");
    spans.filter(|event| &event["tid"] == lane).count()
}
