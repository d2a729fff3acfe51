//! `--max-restarts`: a run whose ranks die is restarted and ends with the bits of an undisturbed run.

use crate::site::{Site, assert_says, listing, log_rows, losses, read_json};
use engine::checkpoint::Checkpoint;
use std::fs;
use tests::tolerance::TRAJECTORY;

const RUN: &str =
    "--max-steps 6 --save-steps 2 --nproc 2 --zero 3 --offload cpu --eval-data data/samples.json";

fn state(site: &Site, checkpoint: &str) -> Vec<(String, String)> {
    let checkpoint = Checkpoint::open(&site.path(checkpoint)).unwrap();
    checkpoint.verify().unwrap();
    let files = checkpoint.files().iter();
    let files = files.filter(|file| file.path.ends_with(".safetensors"));
    files
        .map(|file| (file.path.clone(), file.blake3.clone()))
        .collect()
}

#[test]
fn a_restarted_run_ends_with_the_bits_of_an_undisturbed_one() {
    let site = Site::new();
    site.train(&format!("{RUN} --precision bf16 --output plain"));
    // Deaths before the first save, after a save, during a save, and after a checkpoint with a flipped bit.
    for (faults, screen) in [
        (
            "--inject kill:rank=1,step=2",
            "restart 1 of 3 on 2 ranks: from the beginning",
        ),
        (
            "--inject panic:rank=0,step=4",
            "restart 1 of 3 on 2 ranks: continuing from checkpoint-2",
        ),
        (
            "--inject kill:rank=0,step=4,phase=save",
            "restart 1 of 3 on 2 ranks: continuing from checkpoint-2",
        ),
        (
            "--inject flip-bit:rank=1,step=4 --inject kill:rank=1,step=5,phase=collective",
            "checkpoint-4 is damaged and is skipped",
        ),
        (
            "--inject stop:rank=1,step=3,times=2 --comm-timeout 2",
            "restart 2 of 3 on 2 ranks: continuing from checkpoint-2",
        ),
    ] {
        fs::remove_dir_all(site.path("out")).ok();
        let outcome = site.train(&format!("{RUN} --precision bf16 --max-restarts 3 {faults}"));
        assert_says(&outcome.screen, &[screen, "done "]);
        assert_eq!(outcome.screen.matches("error[").count(), 0);
        assert_eq!(
            state(&site, "plain/checkpoint-6"),
            state(&site, "out/checkpoint-6"),
            "{faults}"
        );
        assert_eq!(
            losses(&site.path("plain")),
            losses(&site.path("out")),
            "{faults}"
        );
        let loss =
            |run: &str| read_json(&site.path(run).join("eval_results.json"))["eval_loss"].clone();
        assert_eq!(loss("plain"), loss("out"), "{faults}");
        // Each step is in the log once, and the failures of earlier attempts have their own directories.
        let rows = log_rows(&site.path("out"));
        let steps = rows.iter().filter(|row| row.get("loss").is_some());
        let steps: Vec<u64> = steps
            .map(|row| row["current_steps"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
        assert!(!listing(&site.path("out/errors/attempt-1")).is_empty());
        site.assert_tidy();
    }
}

#[test]
fn a_run_is_restarted_at_most_max_restarts_times() {
    let site = Site::new();
    let line = format!("{RUN} --max-restarts 1 --inject kill:rank=1,step=3,times=5");
    let outcome = site.run(&line);
    assert_eq!(outcome.code, Some(12), "{}", outcome.screen);
    let words = [
        "restart 1 of 1",
        "rank 1 was killed",
        "already restarted 1 times",
    ];
    assert_says(&outcome.screen, &words);
    assert_eq!(outcome.screen.matches("error[").count(), 1);
}

#[test]
fn failures_that_would_repeat_are_not_restarted() {
    let site = Site::new();
    for (line, status) in [
        (
            "--max-steps 3 --learning-rate 1e30 --lr-scheduler-type constant",
            15,
        ),
        ("--max-steps 3 --save-steps 1 --inject disk-full:step=2", 16),
    ] {
        let outcome = site.run(&format!("--max-restarts 3 --output run-{status} {line}"));
        assert_eq!(outcome.code, Some(status), "{}", outcome.screen);
        assert!(
            !outcome.screen.contains("restart 1 of"),
            "{}",
            outcome.screen
        );
    }
    site.refuse("--max-restarts 3 --data data/none.json", 3, "E18");
    site.refuse("--max-restarts 3 --device-memory-limit 1M", 5, "E17");
    site.refuse("--elastic true", 2, "E09");
    // A user's signal ends the run, even if a rank dies afterwards.
    let line = "--max-restarts 3 --max-steps 1000000 --lr-scheduler-type constant";
    let mut run = site.start(line);
    run.wait_for_step();
    run.signal("INT");
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(130), "{}", outcome.screen);
    assert!(
        !outcome.screen.contains("restart 1 of"),
        "{}",
        outcome.screen
    );
}

#[test]
fn elastic_runs_continue_with_fewer_ranks_after_a_permanent_loss() {
    let site = Site::new();
    let line = "--max-steps 6 --save-steps 2 --nproc 3 --zero 3 --gradient-accumulation-steps 2 --max-restarts 1";
    site.train(&format!("{line} --output plain"));
    let lost = "--inject kill:rank=1,step=4,lost=true";
    let outcome = site.run(&format!("{line} {lost} --output strict"));
    assert_eq!(outcome.code, Some(12), "{}", outcome.screen);
    assert_says(&outcome.screen, &["lost permanently", "--elastic"]);
    let outcome = site.train(&format!("{line} {lost} --elastic"));
    let words = [
        "restart 1 of 1 on 2 ranks: continuing from checkpoint-2",
        "3 accumulated × 2 ranks = 6 samples",
    ];
    assert_says(&outcome.screen, &words);
    let [plain, elastic] = ["plain", "out"].map(|run| losses(&site.path(run)));
    assert_eq!((plain.len(), elastic.len()), (6, 6));
    for (step, (plain, elastic)) in plain.iter().zip(&elastic).enumerate() {
        assert!(
            (plain - elastic).abs() < TRAJECTORY,
            "step {}: {plain} {elastic}",
            step + 1
        );
    }
    let checkpoint = Checkpoint::open(&site.path("out/checkpoint-6")).unwrap();
    assert_eq!(checkpoint.world_size(), 2);
    checkpoint.verify().unwrap();
}
