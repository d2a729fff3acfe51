//! Configuration files of DeepSpeed and of trainers.

use crate::site::{Site, completed, losses, read_json};
use serde_json::Value;
use std::fs;
use std::process::Command;

/// Exit status and standard output of a subcommand that prints and ends.
fn printed(site: &Site, line: &str) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .args(line.split_whitespace())
        .current_dir(site.path(""))
        .env_clear()
        .env("HOME", site.path("home"))
        .env("TMPDIR", site.path("tmp"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    (output.status.code(), text)
}

/// Writes a published file with one change.
fn published(site: &Site, name: &str, from: &str, to: &str) {
    let path = format!(
        "{}/../launcher/tests/configs/{name}",
        env!("CARGO_MANIFEST_DIR")
    );
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} in {name}");
    fs::write(site.path("ds.json"), text.replace(from, to)).unwrap();
}

/// Writes the published file of MiniCPM, changed to states in host memory as its readme says.
fn offloaded(site: &Site) {
    published(
        site,
        "minicpm-zero3.json",
        "\"device\": \"none\"",
        "\"device\": \"cpu\"",
    );
}

#[test]
fn a_deepspeed_file_trains_as_its_flags_do_on_the_named_tiers() {
    let site = Site::new();
    offloaded(&site);
    let line = "--nproc 2 --max-steps 4 --warmup-steps 3";
    let run = site.train(&format!("{line} --deepspeed ds.json --output file"));
    site.train(&format!(
        "{line} --zero 3 --offload cpu --lr-scheduler-type warmup_lr --output flags"
    ));
    assert_eq!(losses(&site.path("file")), losses(&site.path("flags")));
    let config = |run: &str| read_json(&site.path(run).join("config.resolved.json"));
    for key in ["zero", "offload", "optimizer", "batch", "precision"] {
        assert_eq!(config("file")[key], config("flags")[key], "{key}");
    }
    let screen = run.screen;
    for part in [
        "ds.json (DeepSpeed) gives --zero 3 --offload cpu --lr-scheduler-type warmup_lr",
        "reduce_bucket_size, stage3_prefetch_bucket_size",
        "rank 0 stores host: parameters",
    ] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    assert!(!screen.contains("warning"), "{screen}");
}

#[test]
fn a_misplaced_key_is_a_warning_or_refused() {
    let site = Site::new();
    published(
        &site,
        "cogvlm-bf16.json",
        "\"train_micro_batch_size_per_gpu\": 4",
        "\"train_micro_batch_size_per_gpu\": 1",
    );
    let line = "--nproc 1 --precision bf16 --learning-rate 1e-5 --deepspeed ds.json";
    let screen = site.train(line).screen;
    let warning =
        "\"offload_optimizer\" has no effect at the top level: it belongs in \"zero_optimization\"";
    assert_eq!(screen.matches(warning).count(), 2, "{screen}");
    assert!(
        screen.contains("rank 0 stores device: parameters") && !screen.contains("host: "),
        "{screen}"
    );
    // A rank started by another launcher has no supervisor, so it must warn itself.
    let rank = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .args(completed(&format!("{line} --output foreign")).split_whitespace())
        .current_dir(site.path(""))
        .env("LC_ALL", "C")
        .envs(["RANK", "LOCAL_RANK"].map(|name| (name, "0")))
        .envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| (name, "1")))
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")])
        .env("TMPDIR", site.path("tmp"))
        .output()
        .unwrap();
    let screen = String::from_utf8_lossy(&rank.stderr);
    assert_eq!(rank.status.code(), Some(0), "{screen}");
    assert!(screen.contains(warning), "{screen}");
    let screen = site.refuse(&format!("{line} --strict-config --output strict"), 2, "E09");
    assert!(
        screen.contains("move it, or use --offload optimizer=cpu"),
        "{screen}"
    );
}

#[test]
fn flags_that_contradict_a_file_are_listed_together() {
    let site = Site::new();
    offloaded(&site);
    let screen = site.refuse(
        "--nproc 2 --zero 2 --offload none --deepspeed ds.json",
        2,
        "E09",
    );
    for part in ["--zero 2", "--offload none", "stage 3", "ds.json line"] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    fs::write(
        site.path("batch.json"),
        "{\"zero_optimization\": {\"stage\": 1}, \"train_batch_size\": 10, \"bf16\": {\"enabled\": \"auto\"}}",
    )
    .unwrap();
    let screen = site.refuse("--nproc 4 --deepspeed batch.json", 2, "E09");
    assert!(screen.contains("10 is not a multiple of"), "{screen}");
    assert!(screen.contains("batch.json (DeepSpeed) gives"), "{screen}");
}

#[test]
fn a_flag_file_names_its_deepspeed_file() {
    let site = Site::new();
    fs::create_dir(site.path("runs")).unwrap();
    offloaded(&site);
    fs::rename(site.path("ds.json"), site.path("runs/ds.json")).unwrap();
    fs::write(
        site.path("runs/run.yaml"),
        "stage: sft\nfinetuning_type: lora\nlora_rank: 2\ndeepspeed: ds.json # beside this file\nmax_steps: 9\nseed: 5\n",
    )
    .unwrap();
    let screen = site
        .train("--nproc 1 --config runs/run.yaml --seed 6")
        .screen;
    assert!(
        screen.contains("run.yaml (flags) gives --use-lora true"),
        "{screen}"
    );
    let config = read_json(&site.path("out/config.resolved.json"));
    // The site's default flags give the steps. The seed of the command line overrides that of the file.
    assert_eq!((&config["zero"], &config["seed"]), (&3.into(), &6.into()));
    assert_eq!(config["length"]["steps"], 2);
    assert_eq!(config["trainable"]["lora"]["lora_rank"], 2);
    let line =
        "plan --model model --data data/samples.json --nproc 1 --config runs/run.yaml --json";
    let (code, plan) = printed(&site, line);
    assert_eq!(code, Some(0), "{plan}");
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["stage"], 3);
    assert_eq!(plan["offload"], "cpu");
}

#[test]
fn a_deepspeed_file_is_explained_key_by_key() {
    let site = Site::new();
    offloaded(&site);
    let (code, page) = printed(&site, "explain-config ds.json --model model");
    assert_eq!(code, Some(0));
    assert!(page.contains("--offload cpu"), "{page}");
    assert!(page.contains("no effect (auto is "), "{page}");
    published(
        &site,
        "llama-factory-z2-autotp.json",
        "autotp_size",
        "autotp_size",
    );
    let (code, page) = printed(&site, "explain-config ds.json");
    assert_eq!(code, Some(2));
    assert!(
        page.contains("REFUSED the model is sharded by ZeRO and divided by layers (--mp-size)"),
        "{page}"
    );
}

#[test]
fn a_recipe_prints_the_defaults_it_takes_and_trains_with_them() {
    let site = Site::new();
    fs::write(
        site.path("lf.yaml"),
        "stage: sft\nfinetuning_type: lora\nlora_rank: 2\nper_device_train_batch_size: 1\n",
    )
    .unwrap();
    let line = "--nproc 1 --max-steps 1 --config lf.yaml";
    let screen = site.train(line).screen;
    let rows = "a recipe of LLaMA-Factory: absent keys take its defaults";
    assert!(screen.contains(rows), "{screen}");
    assert!(screen.contains("rank 2 · alpha 4 · scale 2"), "{screen}");
    let config = read_json(&site.path("out/config.resolved.json"));
    assert_eq!(config["trainable"]["lora"]["lora_alpha"], 4.0);
    assert_eq!(config["trainable"]["tune_vision"], false);
    assert_eq!(config["optimizer"]["adam_beta2"], 0.999);
    let screen = site
        .train(&format!("{line} --defaults ours --output ours"))
        .screen;
    assert!(!screen.contains(rows), "{screen}");
    let config = read_json(&site.path("ours/config.resolved.json"));
    assert_eq!(config["optimizer"]["adam_beta2"], 0.95);
}
