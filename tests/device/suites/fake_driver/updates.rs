//! The optimizer in backward and in forward: the same bits, in the planned memory.

use serde_json::Value;

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
