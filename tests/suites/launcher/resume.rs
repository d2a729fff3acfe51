//! Resuming from a checkpoint, and refusals of checkpoints that do not fit.

use crate::site::{Site, losses, read_json, text_only};
use serde_json::json;
use std::fs;
use tests::tolerance::TRAJECTORY;

/// Compares a run of six steps with one resumed after three: same bits.
fn assert_exact(line: &str) {
    let site = Site::new();
    let line = format!("{line} --max-steps 6 --eval-data data/samples.json");
    site.train(&format!("{line} --save-steps 3 --output whole"));
    fs::create_dir(site.path("again")).unwrap();
    let outcome = site.train(&format!(
        "{line} --output again --resume whole/checkpoint-3"
    ));
    assert!(
        outcome.screen.contains("continues after step 3"),
        "{}",
        outcome.screen
    );
    let weights =
        |run: &str| fs::read(site.path(&format!("{run}/checkpoint-6/model.safetensors"))).unwrap();
    assert!(
        weights("whole") == weights("again"),
        "{line}: weights differ"
    );
    assert_eq!(
        losses(&site.path("whole"))[3..],
        losses(&site.path("again"))[..]
    );
    let loss =
        |run: &str| read_json(&site.path(run).join("eval_results.json"))["eval_loss"].clone();
    assert_eq!(loss("whole"), loss("again"));
}

#[test]
fn a_resumed_run_has_the_bits_of_an_unbroken_one() {
    assert_exact("--zero 3 --offload cpu --precision f32");
    assert_exact("--zero 3 --offload cpu --precision bf16");
    assert_exact("--zero 2 --precision pure-bf16 --gradient-accumulation-steps 2");
    assert_exact("--zero 0 --nproc 1 --precision f32 --lr-scheduler-type linear");
}

#[test]
fn resume_auto_continues_in_the_same_directory_with_one_log() {
    let site = Site::new();
    let line = "--lr-scheduler-type constant --zero 3 --offload cpu";
    site.train(&format!("{line} --max-steps 6 --output whole"));
    site.train(&format!("{line} --max-steps 3 --resume auto"));
    site.train(&format!("{line} --max-steps 6 --resume auto"));
    let model = "checkpoint-6/model.safetensors";
    let [whole, parts] = ["whole", "out"].map(|run| fs::read(site.path(run).join(model)).unwrap());
    assert!(whole == parts, "weights differ");
    assert_eq!(losses(&site.path("whole")), losses(&site.path("out")));
}

#[test]
fn a_checkpoint_continues_at_another_stage_and_number_of_ranks() {
    let site = Site::new();
    site.train("--max-steps 6 --save-steps 3 --zero 3 --offload cpu --nproc 2 --output whole");
    let whole = losses(&site.path("whole"));
    for (output, line) in [
        ("a", "--zero 0 --nproc 1 --per-device-train-batch-size 2"),
        ("b", "--zero 1 --offload cpu --nproc 2"),
        ("c", "--zero 2 --nproc 1 --gradient-accumulation-steps 2"),
    ] {
        site.train(&format!(
            "--max-steps 6 --output {output} --resume whole/checkpoint-3 {line}"
        ));
        let rest = losses(&site.path(output));
        assert_eq!(rest.len(), 3);
        for (ours, theirs) in rest.iter().zip(&whole[3..]) {
            assert!((ours - theirs).abs() < TRAJECTORY, "{whole:?} {rest:?}");
        }
    }
}

#[test]
fn adapters_resume_with_the_same_bits() {
    let site = Site::new();
    // Resumes in the middle of an epoch, with dropout masks that depend on each visit to a sample.
    let line = "--use-lora true --lora-rank 4 --lora-dropout 0.3 --gradient-accumulation-steps 2 --max-steps 4";
    site.train(&format!("{line} --save-steps 1 --output whole"));
    site.train(&format!("{line} --resume whole/checkpoint-1"));
    let [whole, parts] = ["whole", "out"].map(|run| {
        fs::read(
            site.path(run)
                .join("checkpoint-4/adapter_model.safetensors"),
        )
        .unwrap()
    });
    assert!(whole == parts, "the adapters differ");
}

#[test]
fn a_resumed_run_takes_what_its_checkpoint_trained() {
    let site = Site::new();
    let flags = "--lora-rank 2 --lora-alpha 7 --modules-to-save resampler --train lm_head";
    site.train(&format!("{flags} --output first"));
    site.train("--max-steps 3 --resume first/checkpoint-2");
    let trained = |run: &str| read_json(&site.path(run).join("config.resolved.json"));
    assert_eq!(trained("first")["trainable"], trained("out")["trainable"]);
    // A flag that is given decides.
    let screen = site.refuse(
        "--max-steps 3 --resume first/checkpoint-2 --modules-to-save none --output other",
        9,
        "E08",
    );
    assert!(screen.contains("resampler"), "{screen}");
}

#[test]
fn damaged_checkpoints_are_refused_before_any_file_changes() {
    let site = Site::new();
    site.train("--save-steps 1");
    let state = site.path("out/checkpoint-2/state/rank-0001.safetensors");
    let whole = fs::read(&state).unwrap();
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x10;
    fs::write(&state, damaged).unwrap();
    let screen = site.refuse("--max-steps 4 --resume auto", 9, "E08");
    assert!(
        screen.contains("rank-0001.safetensors is damaged"),
        "{screen}"
    );
    fs::write(&state, &whole[..middle]).unwrap();
    let screen = site.refuse("--max-steps 4 --resume auto", 9, "E08");
    assert!(screen.contains("rank-0001.safetensors"), "{screen}");
    fs::remove_file(&state).unwrap();
    let screen = site.refuse("--max-steps 4 --resume auto", 9, "E08");
    assert!(
        screen.contains("rank-0001.safetensors is missing"),
        "{screen}"
    );
    // The previous checkpoint is intact.
    site.train("--max-steps 4 --resume out/checkpoint-1");
}

#[test]
fn a_checkpoint_of_another_run_is_refused() {
    let site = Site::new();
    site.train("--seed 7");
    let from = "--seed 7 --resume out/checkpoint-2 --output next --max-steps 4";
    for (line, evidence) in [
        ("--tune-llm false", "llm."),
        ("--use-lora true", "--use-lora"),
        ("--precision bf16", "--precision f32"),
        ("--per-device-train-batch-size 2", "global batch of 4"),
    ] {
        let screen = site.refuse(&format!("{from} {line}"), 9, "E08");
        assert!(screen.contains(evidence), "{line}\n{screen}");
    }
    let other_seed = from.replace("--seed 7", "--seed 8");
    assert!(site.refuse(&other_seed, 9, "E08").contains("--seed 7"));
    site.write_samples("other", &[text_only(1), text_only(2)]);
    let screen = site.refuse(&format!("{from} --data data/other.json"), 9, "E08");
    assert!(screen.contains("saved with 6 samples"), "{screen}");
    let screen = site.refuse("--seed 7 --resume out/checkpoint-2", 9, "E16");
    assert!(screen.contains("--max-steps"), "{screen}");
    let screen = site.refuse("--resume out/checkpoint-9 --max-steps 4", 9, "E08");
    assert!(screen.contains("checkpoint-9"), "{screen}");
    site.refuse("--resume data --max-steps 4 --output next", 9, "E08");
}

#[test]
fn a_directory_with_another_run_is_never_written_to() {
    let site = Site::new();
    site.train("");
    let screen = site.refuse("", 2, "E09");
    assert!(screen.contains("--resume auto"), "{screen}");
    site.train("--output second");
    let screen = site.refuse(
        "--max-steps 4 --output second --resume out/checkpoint-2",
        2,
        "E09",
    );
    assert!(screen.contains("contains another run"), "{screen}");
    let meta = read_json(&site.path("out/checkpoint-2/MANIFEST.json"));
    assert_eq!(meta["step"], json!(2));
}
