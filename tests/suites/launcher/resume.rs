//! Resuming from a checkpoint, and refusals of checkpoints that do not fit.

use crate::site::{Site, assert_says, golden, losses, read_json, text_only};
use kernels::DType;
use models::WeightSource;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
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
fn a_run_that_goes_back_leaves_its_later_checkpoints_behind() {
    let site = Site::new();
    let line = "--lr-scheduler-type constant --save-steps 2 --nproc 2";
    site.train(&format!("{line} --max-steps 6"));
    let back = "--resume out/checkpoint-2 --learning-rate 3e-3 --max-steps 7 --save-steps 3";
    let fault = "--max-restarts 1 --inject kill:rank=1,step=3";
    let screen = site.train(&format!("{line} {back} {fault}")).screen;
    assert!(screen.contains("continuing from checkpoint-2"), "{screen}");
    site.train(&format!(
        "{line} --resume out/checkpoint-2 --learning-rate 3e-3 --max-steps 7 --save-steps 3 --output unbroken"
    ));
    let model = "checkpoint-7/model.safetensors";
    let [broken, unbroken] =
        ["out", "unbroken"].map(|run| fs::read(site.path(run).join(model)).unwrap());
    assert!(broken == unbroken, "weights differ");
}

#[test]
fn a_moved_run_goes_on_where_it_is_and_true_means_auto() {
    let site = Site::new();
    site.train("--lora-rank 2 --max-steps 2");
    fs::rename(site.path("out"), site.path("moved")).unwrap();
    let resume = |line: &str| {
        let outcome = site.start_plain(line).finish();
        assert_eq!(outcome.code, Some(0), "{line}\n{}", outcome.screen);
        outcome.screen
    };
    resume("--resume moved/checkpoint-2 --max-steps 3");
    assert!(site.path("moved/checkpoint-3").is_dir() && !site.path("out").exists());
    let screen = resume("--resume_from_checkpoint True --output moved --max-steps 4");
    assert!(site.path("moved/checkpoint-4").is_dir(), "{screen}");
    site.train("--max-steps 2 --output full");
    let refused = site
        .start_plain("--resume full --lora-rank 2 --max-steps 3")
        .finish();
    assert_eq!(refused.code, Some(9), "{}", refused.screen);
}

#[test]
fn a_directory_with_another_run_is_never_written_to() {
    let site = Site::new();
    site.train("");
    let screen = site.refuse("", 2, "E09");
    assert!(screen.contains("--resume and its directory"), "{screen}");
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

/// Flags of a run of adapters alone, whose checkpoint has neither the base weights nor the data.
const ADAPTERS: &str = "--lora-rank 4 --nproc 1 --save-steps 2 --lr-scheduler-type constant";

/// Changes one byte in the middle of a file.
fn edit(path: &Path, at: usize, by: u8) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= by;
    fs::write(path, bytes).unwrap();
}

#[test]
fn another_base_under_the_same_adapters_is_refused() {
    let site = Site::new();
    site.train(ADAPTERS);
    let weights = site.path("model/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    // The lowest bit of a mantissa: shapes and names stay.
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let middle = 8 + header + (whole.len() - 8 - header) / 8 * 4;
    edit(&weights, middle, 1);
    let again = format!("{ADAPTERS} --resume auto --max-steps 4");
    let screen = site.refuse(&again, 9, "E08");
    assert!(screen.contains("frozen base weights differ"), "{screen}");
    assert!(screen.contains("--resume-anyway"), "{screen}");
    // A copy elsewhere, in the same bytes, is the same base.
    fs::write(&weights, &whole).unwrap();
    let from = "--resume out/checkpoint-2 --output moved --max-steps 4";
    fs::rename(site.path("model"), site.path("elsewhere")).unwrap();
    fs::rename(site.path("data"), site.path("other")).unwrap();
    site.train(&format!(
        "{ADAPTERS} {from} --model elsewhere --data other/samples.json"
    ));
}

#[test]
fn edited_data_of_the_same_length_is_refused_unless_it_is_accepted() {
    let site = Site::new();
    site.train(ADAPTERS);
    let data = site.path("data/samples.json");
    let whole = fs::read_to_string(&data).unwrap();
    let again = format!("{ADAPTERS} --resume auto --max-steps 4");
    let mut samples: Vec<serde_json::Value> = serde_json::from_str(&whole).unwrap();
    samples.swap(0, 1);
    fs::write(&data, json!(samples).to_string()).unwrap();
    let screen = site.refuse(&again, 9, "E08");
    assert!(screen.contains("the samples, their order"), "{screen}");
    // Another layout of the same samples is the same data.
    samples.swap(0, 1);
    fs::write(&data, serde_json::to_string_pretty(&samples).unwrap()).unwrap();
    site.train(&format!("{ADAPTERS} --resume auto --max-steps 3"));
    // One letter of one answer.
    let turns = samples[0]["conversations"].as_array().unwrap().len();
    let answer = &mut samples[0]["conversations"][turns - 1]["content"];
    *answer = json!(format!("{}!", answer.as_str().unwrap()));
    fs::write(&data, json!(samples).to_string()).unwrap();
    site.refuse(&again, 9, "E08");
    let outcome = site.train(&format!("{again} --resume-anyway"));
    assert!(
        outcome.screen.contains("--resume-anyway: the samples"),
        "{}",
        outcome.screen
    );
    let meta = read_json(&site.path("out/checkpoint-4/MANIFEST.json"))["meta"].clone();
    let accepted = meta["resumed_anyway"].as_array().unwrap();
    assert!(accepted[0].as_str().unwrap().contains("samples"), "{meta}");
    // The new checkpoint was trained on the edited data.
    site.train(&format!("{ADAPTERS} --resume auto --max-steps 5"));
}

#[test]
fn an_edited_image_is_other_data() {
    let site = Site::new();
    site.train(ADAPTERS);
    let images = fs::read_dir(site.path("data")).unwrap().flatten();
    let is_image = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e != "json");
    let mut images: Vec<_> = images.map(|entry| entry.path()).filter(is_image).collect();
    images.sort();
    let (first, last) = (&images[0], images.last().unwrap());
    assert!(fs::read(first).unwrap() != fs::read(last).unwrap());
    fs::copy(last, first).unwrap();
    let screen = site.refuse(&format!("{ADAPTERS} --resume auto --max-steps 4"), 9, "E08");
    assert!(screen.contains("or their images differ"), "{screen}");
}

#[test]
fn changed_settings_are_named_and_another_rank_is_refused() {
    let site = Site::new();
    site.train(ADAPTERS);
    let outcome = site.train(&format!(
        "{ADAPTERS} --resume auto --max-steps 3 --lora-alpha 32 --lora-dropout 0.1"
    ));
    for text in [
        "--lora-alpha was 8 in the checkpoint's run and is 32 now",
        "--lora-dropout was 0 in the checkpoint's run and is 0.1 now",
    ] {
        assert!(outcome.screen.contains(text), "{text}\n{}", outcome.screen);
    }
    let screen = site.refuse(
        "--nproc 1 --lora-rank 8 --lora-alpha 32 --resume auto --max-steps 4",
        9,
        "E08",
    );
    assert!(screen.contains("--lora-rank 4"), "{screen}");
    // No word makes adapters of other layers continue.
    site.refuse(
        &format!(
            "{ADAPTERS} --resume auto --max-steps 4 --lora-target-modules q_proj --resume-anyway"
        ),
        9,
        "E08",
    );
}

#[test]
fn a_checkpoint_between_two_log_rows_has_all_its_tokens() {
    let site = Site::new();
    let tokens = |output: &str, every: usize| {
        let outcome = site.train(&format!(
            "--max-steps 4 --save-steps 3 --logging-steps {every} --output {output}"
        ));
        let path = format!("{output}/checkpoint-3/MANIFEST.json");
        let manifest = read_json(&site.path(&path));
        let listed = manifest["files"].as_array().unwrap().len();
        assert!(
            outcome
                .screen
                .contains(&format!("· {listed} files, hashed")),
            "{listed}: {}",
            outcome.screen
        );
        manifest["meta"]["total_tokens"].clone()
    };
    assert_eq!(tokens("often", 1), tokens("rarely", 4));
}

/// Bits of every tensor of a weight file, by name.
fn bits(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let source = WeightSource::open_file(path).unwrap();
    let read = |name: &str| {
        let elements: usize = source.shape(name).unwrap().iter().product();
        let mut values = vec![0; elements * size_of::<f32>()];
        source
            .read_range(name, 0..elements, DType::F32, &mut values)
            .unwrap();
        (name.to_owned(), values)
    };
    source.names().map(read).collect()
}

#[test]
fn training_starts_from_adapters_of_peft_and_of_a_run() {
    let site = Site::new();
    let peft = golden("minicpm-v-2_6").join("adapter_after8");
    // A rate that moves no weight: what is saved is what was read.
    let still = "--max-steps 1 --learning-rate 1e-30 --nproc 1";
    let line = format!("--adapter {} {still} --lora-rank 99", peft.display());
    let screen = site.train(&format!("{line} --output first")).screen;
    assert_says(
        &screen,
        &[
            "rank 4 · alpha 8 · scale 2",
            "starts from",
            "--lora-rank",
            "the adapters of --adapter decide it",
        ],
    );
    let file = "adapter_model.safetensors";
    let saved = site.path("first/checkpoint-1").join(file);
    assert_eq!(bits(&saved), bits(&peft.join(file)));
    // A run directory means its latest checkpoint, and the run goes on after a stop.
    site.train(&format!("--adapter first {still} --output second"));
    let second = site.path("second/checkpoint-1").join(file);
    assert_eq!(bits(&second), bits(&saved));
    site.train("--resume auto --max-steps 2 --learning-rate 1e-3 --nproc 1 --output second");
    let moved = site.path("second/checkpoint-2").join(file);
    assert_ne!(bits(&moved), bits(&saved));

    let screen = site.refuse("--adapter nowhere", 10, "E10");
    assert_says(&screen, &["nowhere", "adapter_config.json"]);
    let screen = site.refuse("--adapter first --init random", 2, "E09");
    assert_says(&screen, &["--init random"]);
    site.train("--lora-rank 2 --modules-to-save resampler --max-steps 1 --nproc 1 --output whole");
    let screen = site.refuse("--adapter whole --modules-to-save none", 2, "E09");
    assert_says(&screen, &["this run freezes", "--modules-to-save NAMES"]);
}
