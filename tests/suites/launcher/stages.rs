//! Pipeline stages: the bits of an undivided run, checkpoints for other meshes, and the end of a stage.

use crate::ckpt::done;
use crate::endings::LONG;
use crate::generate::{launcher, run};
use crate::site::{
    Site, assert_nothing_left, assert_says, log_rows, losses, ranks, read_json, signal,
};
use std::fs;
use std::time::{Duration, Instant};
use tests::tolerance::TRAJECTORY;

const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Losses, gradient norms and results of the evaluation of a run.
fn numbers(site: &Site, run: &str) -> (Vec<f64>, Vec<serde_json::Value>, [serde_json::Value; 2]) {
    let directory = site.path(run);
    let norms = log_rows(&directory)
        .iter()
        .filter(|row| row["loss"].is_number())
        .map(|row| row["grad_norm"].clone())
        .collect();
    let results = read_json(&directory.join("eval_results.json"));
    let eval = ["eval_loss", "exact_match"].map(|key| results[key].clone());
    (losses(&directory), norms, eval)
}

/// Compares a run on `stages` stages with an undivided one with the same data-parallel ranks: same bits.
fn assert_equal(site: &Site, common: &str, data_ranks: usize, stages: usize, weights: &str) {
    let common = format!("{common} --max-steps 3 --eval-data data/samples.json");
    site.train(&format!(
        "{common} --nproc {data_ranks} --output whole{stages}"
    ));
    let ranks = data_ranks * stages;
    let outcome = site.train(&format!(
        "{common} --nproc {ranks} --mp-size {stages} --output divided{stages}"
    ));
    let last = format!("(stage {}) stores", stages - 1);
    assert_says(&outcome.screen, &["cross each boundary", &last]);
    let runs = ["whole", "divided"].map(|run| format!("{run}{stages}"));
    let planned = read_json(&site.path(&format!("{}/plan.json", runs[1])));
    let count = |key: &str| planned["stages"][key].as_array().map(Vec::len);
    assert_eq!(count("units"), Some(stages));
    assert_eq!(count("boundary_bytes"), Some(stages - 1));
    let [whole, divided] = runs.each_ref().map(|run| numbers(site, run));
    assert_eq!(whole, divided, "{common}");
    let [whole, divided] = runs.each_ref().map(|run| {
        let path = format!("{run}/checkpoint-3/{weights}");
        fs::read(site.path(&path)).unwrap()
    });
    assert!(whole == divided, "{common}: weights differ");
}

#[test]
fn stages_have_the_bits_of_an_undivided_run() {
    let site = Site::with_family("cogagent-chat-hf");
    let line = "--text-without-cross true --zero 2 --gradient-accumulation-steps 3";
    assert_equal(&site, line, 1, 2, "model.safetensors");
    let site = Site::new();
    let line = "--use-lora true --lora-rank 4 --lora-dropout 0.3 --zero 3 --offload cpu --gradient-accumulation-steps 2";
    assert_equal(&site, line, 2, 2, "adapter_model.safetensors");
    let line = "--zero 1 --precision bf16 --checkpoint-num-layers 2";
    assert_equal(&site, line, 1, 3, "model.safetensors");
    let site = Site::new();
    let line = "--use-lora true --lora-rank 4 --zero auto --quantize nf4 --tokens-per-batch 300 --gradient-accumulation-steps 2";
    assert_equal(&site, line, 1, 2, "adapter_model.safetensors");
}

#[test]
fn a_checkpoint_of_stages_loads_on_other_meshes() {
    let site = Site::new();
    let mesh = "--nproc 4 --mp-size 2 --zero 2 --gradient-accumulation-steps 3";
    site.train(&format!(
        "{mesh} --max-steps 4 --save-steps 2 --output whole"
    ));
    let whole = losses(&site.path("whole"));
    site.train(&format!(
        "{mesh} --max-steps 4 --output again --resume whole/checkpoint-2"
    ));
    assert_eq!(losses(&site.path("again")), whole[2..]);
    for (output, line) in [
        (
            "a",
            "--nproc 3 --mp-size 1 --zero 3 --gradient-accumulation-steps 2",
        ),
        (
            "b",
            "--nproc 3 --mp-size 3 --zero 0 --gradient-accumulation-steps 6",
        ),
    ] {
        site.train(&format!(
            "{line} --max-steps 4 --output {output} --resume whole/checkpoint-2"
        ));
        let rest = losses(&site.path(output));
        assert_eq!(rest.len(), 2);
        for (ours, theirs) in rest.iter().zip(&whole[2..]) {
            assert!((ours - theirs).abs() < TRAJECTORY, "{whole:?} {rest:?}");
        }
    }
    // The state of all stages is divided again without a run.
    done(&site, "reshard whole/checkpoint-2 --nproc 3 --output cut");
    site.train(
        "--nproc 3 --zero 3 --gradient-accumulation-steps 2 --max-steps 4 --output c --resume cut",
    );
    assert_eq!(losses(&site.path("c")), losses(&site.path("a")));
}

#[test]
fn a_killed_stage_ends_the_run_with_one_report() {
    let site = Site::new();
    let mut job = site.start(&format!("{LONG} --nproc 3 --mp-size 3"));
    job.wait_for_step();
    let token = site.token();
    let (victim, rank) = ranks(&token)[1];
    let killed = Instant::now();
    signal(victim, "KILL");
    let outcome = job.finish();
    assert!(killed.elapsed() < STOP_LIMIT, "{:?}", killed.elapsed());
    assert_eq!(outcome.code, Some(12), "{}", outcome.screen);
    let named = format!("rank {rank} was killed");
    assert!(outcome.screen.contains(&named), "{}", outcome.screen);
    assert_eq!(outcome.screen.matches("error[").count(), 1);
    assert_nothing_left(&site, &token);
}

/// Its neighbors wait for it, and one of them reports.
#[test]
fn a_stopped_stage_ends_the_run_within_the_timeout() {
    let site = Site::new();
    let mut job = site.start(&format!("{LONG} --nproc 3 --mp-size 3 --comm-timeout 2"));
    job.wait_for_step();
    let token = site.token();
    let (victim, rank) = ranks(&token)[1];
    let stopped = Instant::now();
    signal(victim, "STOP");
    let outcome = job.finish();
    // Two seconds of waiting, four of grace for the stopped process, and time for a busy machine.
    assert!(stopped.elapsed() < Duration::from_secs(20));
    assert_eq!(outcome.code, Some(14), "{}", outcome.screen);
    let named = format!("rank {rank}: process {victim} is stopped by a signal");
    assert_says(&outcome.screen, &["error[E04]", &named]);
    assert_eq!(outcome.screen.matches("error[").count(), 1);
    assert_nothing_left(&site, &token);
}

#[test]
fn a_full_disk_on_one_stage_keeps_what_was_saved() {
    let site = Site::new();
    let line = "--nproc 2 --mp-size 2 --gradient-accumulation-steps 2 --max-steps 3 --save-steps 1";
    let outcome = site.run(&format!("{line} --inject disk-full:rank=1,step=2"));
    assert_eq!(outcome.code, Some(16), "{}", outcome.screen);
    let words = [
        "error[E13]",
        "no space left",
        "earlier checkpoints are intact",
    ];
    assert_says(&outcome.screen, &words);
    assert_eq!(outcome.screen.matches("error[").count(), 1);
    assert!(!site.path("out/checkpoint-2").exists());
    site.train(&format!("{line} --resume auto"));
    assert!(site.path("out/checkpoint-3").exists());
}

#[test]
fn a_run_continues_on_fewer_stages_after_a_permanent_loss() {
    let site = Site::new();
    let line = "--max-steps 4 --save-steps 2 --zero 0 --nproc 3 --mp-size 3 --gradient-accumulation-steps 2 --max-restarts 1";
    site.train(&format!("{line} --output plain"));
    let outcome = site.train(&format!(
        "{line} --inject kill:rank=1,step=3,lost=true --elastic"
    ));
    let words = ["restart 1 of 1 on 2 ranks: continuing from checkpoint-2"];
    assert_says(&outcome.screen, &words);
    let [plain, elastic] = ["plain", "out"].map(|run| losses(&site.path(run)));
    assert_eq!(plain, elastic);
}

#[test]
fn the_largest_batch_of_stages_is_found() {
    let site = Site::new();
    let line = "--max-steps 1 --gradient-accumulation-steps 2 --nproc 2 --mp-size 2";
    let outcome = site.train(&format!("{line} --find-batch --output found"));
    assert_says(&outcome.screen, &["<- chosen"]);
    let found = read_json(&site.path("found/config.resolved.json"));
    let size = found["batch"]["micro_batch"].as_u64().unwrap();
    assert!(size > 1);
    site.train(&format!(
        "{line} --per-device-train-batch-size {size} --output given"
    ));
    assert_eq!(losses(&site.path("found")), losses(&site.path("given")));
}

#[test]
fn divisions_that_do_not_exist_are_refused() {
    let site = Site::new();
    for (line, words) in [
        ("--nproc 2 --mp-size 3", "must divide the number of ranks"),
        ("--nproc 2 --mp-size 2 --mp-split 1,1", "the model has"),
        ("--nproc 2 --mp-size 2 --mp-split 3,2,1", "--mp-size 3"),
        (
            "--nproc 2 --mp-size 2 --mp-split 3,0",
            "does not divide the units",
        ),
        (
            "--nproc 2 --mp-size 2 --inject nan:rank=0,step=1",
            "only the last of 2",
        ),
        (
            "--nproc 2 --mp-size 2 --optimizer-in-backward all",
            "is not available with --optimizer-in-backward all",
        ),
    ] {
        let screen = site.refuse(line, 2, "E09");
        assert_says(&screen, &[words]);
    }
}

#[test]
fn stages_answer_as_one_rank_does() {
    let site = Site::new();
    let generate = |line: &str| {
        let image = "--image data/image_wide.png --max-new-tokens 6 --prompt Why?";
        run(&site, &format!("generate --model model {image} {line}")).stdout
    };
    let evaluate = |line: &str| {
        let output = "--output rows.json --per-device-eval-batch-size 2";
        run(
            &site,
            &format!("eval --model model --data data/samples.json {output} {line}"),
        );
        let mut result = read_json(&site.path("rows.json"));
        let result = result.as_object_mut().unwrap();
        result.retain(|key, _| ["eval_loss", "exact_match", "samples"].contains(&&**key));
        serde_json::to_string(result).unwrap()
    };
    assert_eq!(generate("--mp-size 2"), generate(""));
    assert_eq!(evaluate("--mp-size 2 --nproc 4"), evaluate(""));
    // The environment's MP_SIZE is for training and its plan, which says that it was read.
    let mut command = launcher(&site);
    command.args("plan --model model --data data/samples.json".split(' '));
    command.env("MP_SIZE", "2").env("NUM_GPUS_PER_WORKER", "4");
    let plan = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let words = [
        "MP_SIZE=2 stands for --mp-size 2",
        "NUM_GPUS_PER_WORKER=4 stands for --nproc 4",
        "4 ranks on",
        "2 data-parallel ranks each",
    ];
    assert_says(&plan, &words);
    let words = "generate --model model --prompt Why? --max-new-tokens 1";
    let mut command = launcher(&site);
    command.args(words.split(' ')).env("MP_SIZE", "2");
    assert!(command.output().unwrap().status.success());
}
