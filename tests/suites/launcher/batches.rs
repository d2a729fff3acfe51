//! Batch sizes, order of the data, recompute, loader threads.

use crate::site::{Site, log_rows, losses, read_json};

/// Peak bytes of the device pool in a run.
fn device_peak(site: &Site, run: &str) -> u64 {
    let rows = log_rows(&site.path(run));
    let bytes = rows
        .iter()
        .filter_map(|row| row["bytes"]["device"].as_u64());
    bytes.max().unwrap_or(0)
}

#[test]
fn recompute_does_not_change_the_bits() {
    let site = Site::new();
    let train = |name: &str, flags: &str| {
        site.train(&format!("--nproc 2 --max-steps 3 --output {name} {flags}"));
        losses(&site.path(name))
    };
    let all = train("all", "--checkpoint-activations all");
    assert_eq!(train("none", "--gradient-checkpointing false"), all);
    assert!(device_peak(&site, "none") > device_peak(&site, "all"));
    assert_eq!(train("llm", "--checkpoint-activations llm"), all);
    assert_eq!(
        train("dropout", "--lora-rank 2 --lora-dropout 0.5"),
        train(
            "again",
            "--lora-rank 2 --lora-dropout 0.5 --gradient-checkpointing false"
        )
    );
    let needs = |run: &str| {
        read_json(&site.path(run).join("config.resolved.json"))["checkpoint_activations"].clone()
    };
    assert_eq!(needs("llm")["vit"], false);
}

/// Recomputing layer inputs changes no bit, on any tier.
#[test]
fn recompute_groups_of_layers_do_not_change_the_bits() {
    let site = Site::new();
    let mut config = read_json(&site.path("model/config.json"));
    config["num_hidden_layers"] = 5.into();
    config["vision_config"]["num_hidden_layers"] = 3.into();
    std::fs::write(site.path("model/config.json"), config.to_string()).unwrap();
    let train = |name: &str, flags: &str| {
        site.train(&format!(
            "--init random --max-steps 3 --gradient-accumulation-steps 2 --output {name} {flags}"
        ));
        losses(&site.path(name))
    };
    let plain = train("plain", "--nproc 2 --zero 2");
    for (name, flags) in [
        ("two", "--zero 2 --checkpoint-num-layers 2"),
        ("three", "--zero 3 --checkpoint-num-layers 3"),
        (
            "cpu",
            "--zero 3 --checkpoint-num-layers 4 --offload param=cpu,optimizer=cpu,activation=cpu",
        ),
        (
            "nvme",
            "--zero 3 --checkpoint-num-layers 2 --offload nvme:spill",
        ),
        (
            "llm",
            "--zero 2 --checkpoint-num-layers 2 --checkpoint-activations llm",
        ),
    ] {
        assert_eq!(train(name, &format!("--nproc 2 {flags}")), plain, "{flags}");
    }
    assert!(device_peak(&site, "two") < device_peak(&site, "plain"));
    let lora = "--lora-rank 2 --lora-dropout 0.5 --precision bf16";
    assert_eq!(
        train("adapters", lora),
        train(
            "again",
            &format!("{lora} --zero 3 --checkpoint-num-layers 2")
        )
    );
    let config = read_json(&site.path("adapters/config.resolved.json"));
    let stage = (config["zero"].as_u64(), config["zero_auto"].as_str());
    assert_eq!(stage, (Some(2), Some("lowest-fits")));
    let screen = site.refuse(
        "--output x --checkpoint-activations none --checkpoint-num-layers 2",
        2,
        "E09",
    );
    assert!(screen.contains("--checkpoint-activations all"), "{screen}");
}

#[test]
fn loader_options_and_limits_do_not_change_results() {
    let site = Site::new();
    let train = |name: &str, flags: &str| {
        let screen = site
            .train(&format!("--max-steps 3 --output {name} {flags}"))
            .screen;
        (losses(&site.path(name)), screen)
    };
    let (auto, _) = train("auto", "");
    assert_eq!(train("none", "--data-workers 0").0, auto);
    assert_eq!(train("three", "--dataloader_num_workers 3").0, auto);
    let (_, screen) = train("limited", "--limit 2");
    assert!(screen.contains(" 2 samples"), "{screen}");
}

#[test]
fn the_longest_samples_come_first_unless_told_otherwise() {
    let site = Site::new();
    site.train("--nproc 2 --max-steps 1 --output first");
    let config = read_json(&site.path("first/config.resolved.json"));
    let first: Vec<u64> = config["first_samples"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|i| i.as_u64())
        .collect();
    // The first three samples have images, the others are short texts.
    assert_eq!(first.len(), 2);
    assert!(first.iter().all(|i| *i < 3), "{first:?}");
    site.train("--nproc 2 --max-steps 1 --output shuffled --longest-first false");
    assert_ne!(losses(&site.path("first")), losses(&site.path("shuffled")));
    let screen = site.refuse(
        "--nproc 2 --max-steps 2 --output first --resume auto --longest-first false",
        9,
        "E08",
    );
    assert!(screen.contains("--longest-first true"), "{screen}");
}

#[test]
fn two_batch_sizes_determine_the_third_in_a_run() {
    let site = Site::new();
    let screen = site
        .train("--nproc 2 --global-batch-size 4 --gradient-accumulation-steps 2 --max-steps 1")
        .screen;
    assert!(
        screen.contains(
            "1 per rank × 2 accumulated × 2 ranks = 4 samples per update · learning rate 1.0e-3"
        ),
        "{screen}"
    );
    let screen = site.refuse("--nproc 2 --global-batch-size 5 --output x", 2, "E09");
    assert!(screen.contains("--global-batch-size 4 or 6"), "{screen}");
}

#[test]
fn the_largest_batch_that_fits_is_found_and_used() {
    let site = Site::new();
    let screen = site.train("--find-batch --nproc 1 --max-steps 1").screen;
    assert!(
        screen.contains("micro-batch     6") && screen.contains("<- chosen"),
        "{screen}"
    );
    assert!(screen.contains("6 per rank"), "{screen}");
    let site = Site::new();
    let screen = site
        .train("--find-batch --global-batch-size 4 --nproc 1 --max-steps 1")
        .screen;
    assert!(screen.contains("4 per rank × 1 accumulated"), "{screen}");
}
