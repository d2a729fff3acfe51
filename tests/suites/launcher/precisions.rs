//! Number formats and tiers in real runs.

use crate::endings::LONG;
use crate::site::{Site, assert_says, listing, losses, ranks, read_json, signal, wait_for_end};
use std::fs;
use std::time::Duration;

/// Bytes of the weights that a run saved.
fn weights(site: &Site, run: &str) -> Vec<u8> {
    fs::read(site.path(run).join("checkpoint-3/model.safetensors")).unwrap()
}

#[test]
fn every_tier_of_every_stage_has_the_same_bits() {
    let site = Site::new();
    let mixed = "param=nvme:spill,optimizer=cpu,activation=nvme:other";
    let mut number = 0;
    for (precision, cells) in [
        (
            "bf16",
            [
                (0, "nvme:spill"),
                (1, "activation=cpu"),
                (2, "nvme:spill"),
                (3, mixed),
            ],
        ),
        (
            "pure-bf16 --pure-bf16-weights kahan",
            [
                (0, "activation=nvme:spill"),
                (1, "nvme:spill"),
                (2, mixed),
                (3, "nvme:spill"),
            ],
        ),
    ] {
        let line = format!("--max-steps 3 --precision {precision}");
        number += 1;
        let whole = format!("whole-{number}");
        site.train(&format!("{line} --zero 3 --output {whole}"));
        for (stage, offload) in cells {
            number += 1;
            let run = format!("run-{number}");
            site.train(&format!(
                "{line} --zero {stage} --offload {offload} --output {run}"
            ));
            let cell = format!("{precision} stage {stage} {offload}");
            assert!(weights(&site, &run) == weights(&site, &whole), "{cell}");
            assert_eq!(
                losses(&site.path(&run)),
                losses(&site.path(&whole)),
                "{cell}"
            );
        }
    }
    for directory in ["spill", "other"] {
        assert_eq!(listing(&site.path(directory)), Vec::<String>::new());
    }
}

#[test]
fn moments_of_8_bits_have_the_same_bits_in_every_cell() {
    let site = Site::new();
    for (name, precision, cells) in [
        (
            "f32",
            "--precision f32 --optim adamw_8bit",
            [(0, "cpu"), (2, "nvme:spill --optimizer-in-backward all")],
        ),
        (
            "bf16",
            "--precision bf16 --moments 8bit --max-grad-norm 0",
            [(1, "nvme:spill"), (3, "cpu --optimizer-in-backward all")],
        ),
        (
            "fp16",
            "--precision fp16 --moments 8bit",
            [(1, "cpu"), (2, "nvme:spill")],
        ),
        (
            "kahan",
            "--precision pure-bf16 --pure-bf16-weights kahan --optim paged_adamw_8bit",
            [(2, "optimizer=cpu"), (3, "nvme:spill")],
        ),
    ] {
        let line = format!("--max-steps 3 --save-steps 3 {precision}");
        let whole = format!("{name}-whole");
        let outcome = site.train(&format!("{line} --zero 3 --output {whole}"));
        assert_says(&outcome.screen, &["exp_avg u8, exp_avg_absmax f32"]);
        for (stage, offload) in cells {
            let run = format!("{name}-{stage}");
            site.train(&format!(
                "{line} --zero {stage} --offload {offload} --output {run}"
            ));
            let cell = format!("{precision} stage {stage} {offload}");
            assert!(weights(&site, &run) == weights(&site, &whole), "{cell}");
            let of = |run: &str| losses(&site.path(run));
            assert_eq!(of(&run), of(&whole), "{cell}");
        }
        // One rank continues, on a disk too, with equal bits.
        let rest = format!("{precision} --max-steps 5 --nproc 1 --per-device-train-batch-size 2");
        for (run, cell) in [("a", "--zero 3"), ("b", "--zero 0 --offload nvme:spill")] {
            let run = format!("{name}-{run}");
            site.train(&format!(
                "{rest} {cell} --resume {whole}/checkpoint-3 --output {run}"
            ));
        }
        let last = |run: &str| {
            let run = site.path(&format!("{name}-{run}"));
            fs::read(run.join("checkpoint-5/model.safetensors")).unwrap()
        };
        assert!(last("a") == last("b"), "{name}");
    }
    // Only large tensors have codes: other moments stay as they were.
    let checkpoint =
        engine::checkpoint::Checkpoint::open(&site.path("f32-0/checkpoint-3")).unwrap();
    let tensors = checkpoint.tensors().iter();
    for tensor in tensors.filter(|tensor| tensor.kind == "exp_avg") {
        let elems: u64 = tensor.shape.iter().product();
        let has_codes = optim::adamw::has_blocks(&tensor.name, elems as usize);
        assert_eq!(tensor.dtype == kernels::DType::U8, has_codes, "{tensor:?}");
        let absmax = checkpoint.tensor("exp_avg_absmax", &tensor.name);
        let blocks = absmax.map(|absmax| absmax.shape.clone());
        assert_eq!(blocks, has_codes.then(|| vec![elems.div_ceil(256)]));
    }
    let resume = "--precision f32 --moments full --max-steps 4 --resume f32-0/checkpoint-3";
    let screen = site.refuse(&format!("{resume} --output x"), 9, "E08");
    assert_says(&screen, &["number format", "saved as u8"]);
}

#[test]
fn shard_groups_have_the_bits_of_one_group_and_save_one_copy() {
    let site = Site::new();
    let line = "--nproc 4 --precision bf16 --max-grad-norm 0 --max-steps 6 --save-steps 3";
    site.train(&format!("{line} --zero 3 --output flat"));
    let saved = |run: &str| {
        let state = site.path(run).join("checkpoint-3/state");
        let files = fs::read_dir(state).unwrap().map(|file| file.unwrap());
        files
            .map(|file| file.metadata().unwrap().len())
            .sum::<u64>()
    };
    for (run, cell) in [
        ("groups", "--zero 3 --shard-group 2 --offload cpu"),
        ("disk", "--zero 3 --shard-group 2 --offload nvme:spill"),
        ("gradients", "--zero 2 --shard-group 2"),
        ("copies", "--zero 1 --shard-group 1"),
    ] {
        site.train(&format!("{line} {cell} --output {run}"));
        assert!(weights(&site, run) == weights(&site, "flat"), "{cell}");
        assert_eq!(
            losses(&site.path(run)),
            losses(&site.path("flat")),
            "{cell}"
        );
        let (one, flat) = (saved(run), saved("flat"));
        assert!(one < flat + flat / 10, "{cell}: {one} bytes beside {flat}");
    }
    // A checkpoint of shard groups resumes in one group.
    site.train(&format!("{line} --zero 3 --resume groups/checkpoint-3"));
    let last = |run: &str| fs::read(site.path(run).join("checkpoint-6/model.safetensors")).unwrap();
    assert!(last("out") == last("flat"));
}

#[test]
fn the_optimizer_in_backward_has_the_same_bits() {
    let site = Site::new();
    let mut number = 0;
    // Cases: some of the units; stored gradients with a norm that clips; gradients stored nowhere.
    for (line, early, says) in [
        (
            "--zero 3 --offload cpu --max-grad-norm 0.5",
            "--optimizer-in-backward 512KiB",
            "stored until the gradient norm is known",
        ),
        (
            "--zero 2 --offload nvme:spill --precision fp16 --initial-scale-power 24 --gradient-accumulation-steps 2",
            "--optimizer-in-backward all",
            "stored until the gradient norm is known",
        ),
        (
            "--zero 3 --offload nvme:spill --precision pure-bf16 --max-grad-norm 0",
            "",
            "their gradients are not stored",
        ),
    ] {
        number += 1;
        let (plain, run) = (format!("plain-{number}"), format!("early-{number}"));
        site.train(&format!(
            "{line} --max-steps 3 --optimizer-in-backward off --output {plain}"
        ));
        let outcome = site.train(&format!("{line} --max-steps 3 {early} --output {run}"));
        assert!(outcome.screen.contains(says), "{}", outcome.screen);
        assert!(weights(&site, &run) == weights(&site, &plain), "{line}");
        assert_eq!(losses(&site.path(&run)), losses(&site.path(&plain)));
    }
    // The trace shows what ran at the same time.
    site.train("--zero 3 --offload nvme:spill --optimizer-in-backward all --max-steps 3 --trace-steps 2..3 --output traced");
    for rank in 0..2 {
        let trace = read_json(&site.path(&format!("traced/traces/rank-{rank:04}.json")));
        let events = trace["traceEvents"].as_array().unwrap();
        let count = |wanted: &dyn Fn(&str) -> bool| {
            let lanes = events.iter().filter(|event| event["ph"] == "M");
            let lane = lanes.filter(|lane| lane["args"]["name"].as_str().is_some_and(wanted));
            let lanes: Vec<_> = lane.map(|lane| &lane["tid"]).collect();
            let spans = events.iter().filter(|event| event["ph"] == "X");
            spans.filter(|span| lanes.contains(&&span["tid"])).count()
        };
        let lanes = ["compute", "communication", "early update"];
        assert!(
            lanes.iter().all(|lane| count(&|name| name == *lane) > 0),
            "{trace}"
        );
        assert!(count(&|name| name.starts_with("disk")) > 0, "{trace}");
    }
    // A resumed run has the same bits, whichever units ran the optimizer in backward before.
    site.train(
        "--zero 3 --offload cpu --optimizer-in-backward all --max-steps 3 --save-steps 1 --output whole",
    );
    site.train("--zero 3 --offload cpu --max-steps 3 --resume whole/checkpoint-1");
    assert!(weights(&site, "out") == weights(&site, "whole"));
}

#[test]
fn spilled_state_is_logged_saved_and_resumed() {
    let site = Site::new();
    let line = "--zero 2 --offload nvme:spill --precision fp16 --gradient-accumulation-steps 2";
    let outcome = site.train(&format!(
        "{line} --max-steps 3 --save-steps 1 --output whole"
    ));
    assert!(outcome.screen.contains(" I/O ("), "{}", outcome.screen);
    assert!(outcome.screen.contains("nvme "), "{}", outcome.screen);
    let log = fs::read_to_string(site.path("whole/trainer_log.jsonl")).unwrap();
    let row: serde_json::Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    assert!(row["nvme"]["written_bytes"].as_u64() > Some(0), "{row}");
    assert!(
        row["nvme"]["share_of_measured"].as_f64() > Some(0.0),
        "{row}"
    );
    let manifest = read_json(&site.path("whole/checkpoint-1/MANIFEST.json"));
    assert!(
        manifest.to_string().contains("\"loss_scale\":{"),
        "{manifest}"
    );
    site.train(&format!("{line} --max-steps 3 --resume whole/checkpoint-1"));
    assert!(
        weights(&site, "out") == weights(&site, "whole"),
        "weights differ"
    );
}

#[test]
fn jobs_in_one_directory_use_their_own_files_and_remove_those_of_dead_jobs() {
    let site = Site::new();
    let long = LONG.replace("--offload cpu", "--offload nvme:spill");
    let mut run = site.start(&long);
    run.wait_for_step();
    let [directory] = &listing(&site.path("spill"))[..] else {
        panic!("{:?}", listing(&site.path("spill")));
    };
    let files = listing(&site.path("spill").join(directory));
    assert_eq!(
        files,
        [
            "lock",
            "rank-0.optimizer",
            "rank-0.param",
            "rank-1.optimizer",
            "rank-1.param"
        ]
    );
    let other = "--max-steps 1 --zero 1 --offload optimizer=nvme:spill --output other";
    let outcome = site.start(other).finish();
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    assert_eq!(
        listing(&site.path("spill").join(directory)),
        files,
        "the other job's files"
    );
    // A killed job cannot clean up.
    let ranks = ranks(&site.token());
    signal(run.pid(), "KILL");
    run.finish();
    for (pid, _) in ranks {
        wait_for_end(pid, Duration::from_secs(10));
    }
    fs::create_dir(site.path("spill/tessera-spill-dead")).unwrap();
    fs::write(site.path("spill/tessera-spill-dead/lock"), "").unwrap();
    let outcome = site
        .start("--max-steps 1 --offload nvme:spill --output third")
        .finish();
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    assert!(
        outcome.screen.contains("which a killed job left"),
        "{}",
        outcome.screen
    );
    assert_eq!(listing(&site.path("spill")), Vec::<String>::new());
}

/// The sums of AMX, which processors without it compute in f32 arithmetic.
#[test]
fn the_order_of_sums_decides_the_bits_and_stays_when_a_run_continues() {
    let site = Site::new();
    let line = "--precision bf16 --nproc 2 --max-steps 6 --save-steps 3";
    let train = |run: &str, flags: &str| {
        let screen = site.train(&format!("{line} {flags} --output {run}")).screen;
        (weights(&site, run), losses(&site.path(run)), screen)
    };
    let portable = train("portable", "--zero 3 --cpu-math portable");
    let amx = train("amx", "--zero 3 --cpu-math amx");
    assert!(amx.2.contains("AMX"), "{}", amx.2);
    assert!(amx.0 != portable.0, "the flag changes nothing");
    for (run, cell) in [
        ("cpu", "--zero 2 --offload cpu"),
        ("disk", "--zero 3 --offload nvme:spill"),
        ("copies", "--zero 0 --checkpoint-activations none"),
    ] {
        let other = train(run, &format!("{cell} --cpu-math amx"));
        assert!(other.0 == amx.0, "{cell}: other weights");
        assert_eq!(other.1, amx.1, "{cell}");
    }
    for (run, losses) in [("amx", &amx.1), ("portable", &portable.1)] {
        let meta = read_json(&site.path(run).join("checkpoint-3/MANIFEST.json"));
        assert_eq!(meta["meta"]["cpu_math"], run);
        let resume = format!("--zero 1 --resume {run}/checkpoint-3 --output {run}-on");
        site.train(&format!("{line} {resume}"));
        let on = crate::site::losses(&site.path(&format!("{run}-on")));
        assert_eq!(losses[3..], on[..], "{run}");
    }
    // The order of the line wins, and the run names the difference.
    let resume = "--cpu-math portable --resume amx/checkpoint-3 --output mixed";
    let screen = site.train(&format!("{line} {resume}")).screen;
    assert_says(&screen, &["--cpu-math was amx", "portable now"]);
}

#[test]
fn a_loss_scale_that_cannot_fall_further_ends_the_run() {
    let site = Site::new();
    let line = "--precision fp16 --initial-scale-power 60 --min-loss-scale 1e18 --hysteresis 1";
    let outcome = site.run(&format!("{line} --max-steps 4"));
    assert_eq!(outcome.code, Some(15), "{}", outcome.screen);
    assert!(
        outcome.screen.contains("smallest loss scale")
            && outcome.screen.contains("--precision bf16"),
        "{}",
        outcome.screen
    );
}

#[test]
fn impossible_tiers_and_formats_are_refused() {
    let site = Site::new();
    // A file system without space, and a path that is no directory.
    let screen = site.refuse("--offload nvme:/proc/none", 5, "E17");
    assert!(screen.contains("spill files need"), "{screen}");
    let screen = site.refuse("--offload nvme:data/samples.json", 16, "E13");
    assert!(screen.contains("samples.json"), "{screen}");
    site.refuse("--precision bf16 --loss-scale 128", 2, "E09");
    let glm = Site::with_family("glm-4v-9b");
    let screen = glm.refuse("--precision fp16", 2, "E09");
    assert!(screen.contains("65504"), "{screen}");
}
