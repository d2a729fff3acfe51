//! Output files of runs, and results that must not depend on the layout.

use crate::site::{Site, golden, listing, log_rows, losses, read_json, tensors, text_only};
use engine::checkpoint::Checkpoint;
use half::bf16;
use kernels::DType;
use models::WeightSource;
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use tests::tolerance::TRAJECTORY;

/// Fields of every row of the log: ours and those that LLaMA-Factory reads.
const ROW_FIELDS: [&str; 12] = [
    "current_steps",
    "total_steps",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "percentage",
    "elapsed_time",
    "remaining_time",
    "throughput",
    "total_tokens",
    "bytes",
];
const COPIED: [&str; 4] = [
    "config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

fn assert_complete(site: &Site, steps: u64, nproc: usize) {
    let out = site.path("out");
    let training: Vec<_> = log_rows(&out)
        .into_iter()
        .filter(|row| row.get("loss").is_some())
        .collect();
    assert_eq!(training.len() as u64, steps);
    for row in &training {
        for field in ROW_FIELDS {
            assert!(row.get(field).is_some(), "no {field} in {row}");
        }
        for tier in ["device", "host", "rss"] {
            assert!(row["bytes"][tier].is_u64(), "no bytes of {tier} in {row}");
        }
        assert!(row["loss"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(training.last().unwrap()["percentage"], json!(100.0));
    let results = read_json(&out.join("eval_results.json"));
    for field in ["eval_loss", "exact_match", "exact_match_before"] {
        assert!(results[field].is_f64(), "no {field} in {results}");
    }
    assert_eq!(results["step"], json!(steps));
    assert_eq!(
        read_json(&out.join("trainer_state.json"))["global_step"],
        json!(steps)
    );
    let curve = fs::read_to_string(out.join("training_loss.svg")).unwrap();
    assert!(curve.contains("<svg") && curve.trim_end().ends_with("</svg>"));
    let logs = listing(&out.join("logs"));
    for rank in 0..nproc {
        for kind in ["log", "jsonl"] {
            let name = format!("rank-{rank:04}.{kind}");
            assert!(logs.contains(&name), "no {name} in {logs:?}");
        }
    }
    assert_checkpoint(site, &out.join(format!("checkpoint-{steps}")), nproc);
}

fn assert_checkpoint(site: &Site, directory: &Path, nproc: usize) {
    let checkpoint = Checkpoint::open(directory).unwrap();
    checkpoint.verify().unwrap();
    assert_eq!(checkpoint.world_size() as usize, nproc);
    assert_eq!(listing(&directory.join("state")).len(), 2 * nproc);
    for name in COPIED {
        let original = fs::read(site.path("model").join(name)).unwrap();
        assert_eq!(fs::read(directory.join(name)).unwrap(), original, "{name}");
    }
    // Every file is in the manifest, so damage of any file is detected.
    let listed: BTreeSet<&str> = checkpoint.files().iter().map(|f| f.path.as_str()).collect();
    for name in listing(directory) {
        let covered = name == "MANIFEST.json" || name == "state" || listed.contains(&*name);
        assert!(covered, "{name} is not in the manifest");
    }
}

#[test]
fn every_layout_and_precision_leaves_a_complete_run() {
    for (zero, offload, nproc, precision) in [
        (0, "none", 1, "f32"),
        (3, "cpu", 2, "bf16"),
        (0, "cpu", 2, "pure-bf16"),
        (3, "none", 1, "pure-bf16"),
        (0, "none", 2, "bf16"),
        (3, "cpu", 1, "f32"),
    ] {
        let site = Site::new();
        let outcome = site.train(&format!(
            "--zero {zero} --offload {offload} --nproc {nproc} --precision {precision} --eval-data data/samples.json"
        ));
        let plan = format!("ZeRO-{zero}");
        assert!(outcome.screen.contains(&plan), "{}", outcome.screen);
        assert_complete(&site, 2, nproc);
        let config = read_json(&site.path("out/config.resolved.json"));
        assert_eq!(
            (&config["zero"], &config["nproc"], &config["precision"]),
            (&json!(zero), &json!(nproc), &json!(precision))
        );
        assert_eq!(config["offload"]["param"], json!(offload));
        assert_eq!(config["init"], json!("checkpoint"));
        assert_eq!(
            tensors(&site.path("out/checkpoint-2/model.safetensors")),
            tensors(&site.path("model/model.safetensors"))
        );
    }
}

#[test]
fn a_step_with_learning_rate_zero_leaves_the_weights() {
    // The first step of a warm-up has rate 0. This also shows that weights were read, not drawn.
    for precision in ["f32", "bf16"] {
        let site = Site::new();
        site.train(&format!(
            "--max-steps 1 --warmup-steps 1 --precision {precision}"
        ));
        let read = |path: &str| WeightSource::open_file(&site.path(path)).unwrap();
        let ours = read("out/checkpoint-1/model.safetensors");
        let given = read("model/model.safetensors");
        for name in given.names() {
            let [ours, given] = [&ours, &given].map(|w| w.read(name, DType::F32).unwrap());
            let given: &[f32] = bytemuck::cast_slice(&given);
            let wanted: Vec<f32> = match precision {
                "f32" => given.to_vec(),
                _ => given.iter().map(|v| bf16::from_f32(*v).to_f32()).collect(),
            };
            assert!(
                bytemuck::cast_slice::<_, f32>(&ours) == wanted,
                "{name} changed in {precision}"
            );
        }
    }
}

#[test]
fn saved_tensors_keep_their_dtype_and_unknown_parts_are_kept() {
    let site = Site::with_model("minicpm-o-2_6");
    let original = tensors(&site.path("model/model.safetensors"));
    let dtypes: BTreeSet<_> = original.values().map(|(dtype, _)| *dtype).collect();
    assert_eq!(dtypes, BTreeSet::from([Some(DType::BF16)]), "of the pack");
    site.train("--precision bf16");
    assert_eq!(
        tensors(&site.path("out/checkpoint-2/model.safetensors")),
        original
    );
}

#[test]
fn one_rank_with_two_samples_trains_as_two_ranks_with_one() {
    let run = |line: &str| {
        let site = Site::new();
        site.train(&format!("--max-steps 4 {line}"));
        losses(&site.path("out"))
    };
    let one = run("--nproc 1 --per-device-train-batch-size 2 --zero 0");
    let two = run("--nproc 2 --per-device-train-batch-size 1 --zero 3 --offload cpu");
    let accumulated = run("--nproc 1 --gradient-accumulation-steps 2 --zero 2");
    assert_eq!(one.len(), 4);
    for step in 0..4 {
        // The same sums in another order, then optimizer steps: the tolerance of trajectories applies.
        for other in [&two, &accumulated] {
            let distance = (one[step] - other[step]).abs();
            assert!(distance < TRAJECTORY, "step {step}: {one:?} {other:?}");
        }
    }
    assert!(one[3] < one[0], "nothing was learnt: {one:?}");
}

#[test]
fn adapters_are_saved_as_peft_names_them_and_the_base_is_not() {
    let site = Site::new();
    site.train("--use-lora true --lora-rank 4 --modules-to-save embed_tokens,resampler");
    let directory = site.path("out/checkpoint-2");
    assert!(!directory.join("model.safetensors").exists());
    let saved = tensors(&directory.join("adapter_model.safetensors"));
    let mut wanted = tensors(&golden(
        "minicpm-v-2_6/adapter_init/adapter_model.safetensors",
    ));
    // Modules trained in full beside the adapters, as by OpenBMB's script.
    for (name, entry) in tensors(&site.path("model/model.safetensors")) {
        if name.starts_with("resampler.") || name.contains(".embed_tokens.") {
            wanted.insert(format!("base_model.model.{name}"), entry);
        }
    }
    assert_eq!(saved, wanted);
    assert!(!directory.join("trained.safetensors").exists());
    let config = read_json(&directory.join("adapter_config.json"));
    let reference = read_json(&golden("minicpm-v-2_6/adapter_init/adapter_config.json"));
    assert_eq!(config["lora_alpha"].as_f64(), Some(8.0));
    for key in ["peft_type", "r", "lora_dropout", "bias", "target_modules"] {
        assert_eq!(config[key], reference[key], "{key}");
    }
    assert_checkpoint(&site, &directory, 2);
}

#[test]
fn a_frozen_language_model_is_left_out_of_checkpoints() {
    let site = Site::new();
    site.train("--tune-llm false");
    let directory = site.path("out/checkpoint-2");
    assert!(!directory.join("model.safetensors").exists());
    assert!(!directory.join("adapter_model.safetensors").exists());
    let saved = tensors(&directory.join("trained.safetensors"));
    let mut wanted = tensors(&site.path("model/model.safetensors"));
    wanted.retain(|name, _| !name.starts_with("llm."));
    assert!(!wanted.is_empty());
    assert_eq!(saved, wanted);
    let states = Checkpoint::open(&directory).unwrap();
    assert!(states.tensors().iter().all(|t| !t.name.starts_with("llm.")));
}

#[test]
fn ranks_with_and_without_images_train_together() {
    for (zero, line) in [(3, "--offload cpu"), (2, ""), (3, "--tune-llm false")] {
        let site = Site::new();
        // Two samples and two ranks: in each step one rank has an image and the other has none.
        let mixed = [site.samples()[0].clone(), text_only(1)];
        site.write_samples("mixed", &mixed);
        site.train(&format!(
            "--data data/mixed.json --eval-data data/mixed.json --zero {zero} --max-steps 3 {line}"
        ));
        assert_eq!(losses(&site.path("out")).len(), 3);
    }
}

#[test]
fn a_run_without_any_image_trains() {
    let site = Site::new();
    site.write_samples("text", &[text_only(1), text_only(2), text_only(3)]);
    site.train("--data data/text.json");
    assert_eq!(losses(&site.path("out")).len(), 2);
}

#[test]
fn few_samples_wrap_around_and_the_log_reports_it() {
    let site = Site::new();
    site.write_samples("one", &[text_only(1)]);
    let outcome = site
        .train("--data data/one.json --eval-data data/one.json --per-device-train-batch-size 2");
    assert!(outcome.screen.contains("wrap around"), "{}", outcome.screen);
    let results = read_json(&site.path("out/eval_results.json"));
    assert_eq!(results["eval_samples"], json!(1));
    let enough = site.train("--output out2");
    assert!(!enough.screen.contains("wrap around"), "{}", enough.screen);
}

#[test]
fn save_total_limit_bounds_the_checkpoints() {
    let site = Site::new();
    site.train("--max-steps 3 --save-steps 1 --save-total-limit 1");
    let mut names = listing(&site.path("out"));
    names.retain(|name| name.starts_with("checkpoint"));
    assert_eq!(names, ["checkpoint-3"]);
    Checkpoint::open(&site.path("out/checkpoint-3"))
        .unwrap()
        .verify()
        .unwrap();
}

#[test]
fn bad_samples_are_skipped_only_on_request() {
    let site = Site::new();
    let mut samples = site.samples();
    samples[0]["image"] = json!("gone.png");
    site.write_samples("gone", &samples);
    let outcome = site.train("--data data/gone.json --skip-bad-samples true");
    assert!(
        outcome.screen.contains("1 bad sample skipped"),
        "{}",
        outcome.screen
    );
}

#[test]
fn a_command_line_of_the_hugging_face_trainer_works() {
    let site = Site::new();
    let published =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../launcher/tests/configs/minicpm-zero3.json");
    fs::copy(published, site.path("ds_config_zero3.json")).unwrap();
    let outcome = site
        .start_plain(
            "--model_name_or_path model --llm_type qwen --data_path data/samples.json \
             --eval_data_path data/samples.json --remove_unused_columns false --label_names labels \
             --prediction_loss_only false --bf16 false --fp16 false --do_train --do_eval \
             --tune_vision true --tune_llm true --model_max_length 2048 --max_slice_nums 9 --max_steps 2 \
             --eval_strategy steps --eval_steps 2 --output_dir out --logging_strategy steps --logging_steps 1 \
             --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 1 \
             --save_strategy steps --save_steps 2 --save_total_limit 10 --learning_rate 1e-6 \
             --weight_decay 0.1 --adam_beta2 0.95 --warmup_ratio 0.01 --lr_scheduler_type cosine \
             --gradient_checkpointing true --deepspeed ds_config_zero3.json --report_to none",
        )
        .finish();
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    assert_complete(&site, 2, 2);
    let config = read_json(&site.path("out/config.resolved.json"));
    assert_eq!(config["precision"], json!("f32"));
    // The file's schedule overrides the flags. The report says so before and after the run.
    assert_eq!(config["optimizer"]["scheduler"], json!("warmup_lr"));
    let overridden = "--lr-scheduler-type cosine has no effect";
    assert_eq!(
        outcome.screen.matches(overridden).count(),
        2,
        "{}",
        outcome.screen
    );
    for flag in [
        "--remove_unused_columns",
        "--label_names",
        "--prediction_loss_only",
        "--do_train",
        "--do_eval",
        "--llm_type",
    ] {
        let note = format!("{flag} has no effect");
        let times = outcome.screen.matches(&note).count();
        assert_eq!(times, 1, "{note}\n{}", outcome.screen);
    }
}

#[test]
fn evaluation_follows_its_strategy() {
    let site = Site::new();
    let line = "--eval-data data/samples.json";
    let outcome = site.train(&format!("{line} --eval-strategy no --output never"));
    assert!(!outcome.screen.contains(" eval "), "{}", outcome.screen);
    assert!(!site.path("never/eval_results.json").exists());
    site.train(&format!("{line} --eval-steps 1"));
    let rows = log_rows(&site.path("out"));
    let evaluated = rows.iter().filter(|row| row["eval_loss"].is_f64());
    assert_eq!(evaluated.count(), 2);
}

#[test]
fn images_may_have_absolute_paths_and_tensorboard_is_written_on_request() {
    let site = Site::new();
    let mut samples = site.samples();
    fs::create_dir(site.path("pictures")).unwrap();
    let moved = site.path("pictures/wide.png");
    fs::rename(site.path("data/image_wide.png"), &moved).unwrap();
    samples[0]["image"] = json!(moved);
    site.write_samples("absolute", &samples);
    site.train("--data data/absolute.json --report-to tensorboard");
    let events = listing(&site.path("out/runs"));
    assert!(
        events.len() == 1 && events[0].starts_with("events.out.tfevents"),
        "{events:?}"
    );
}
