//! Batch sizes, order of the data, recompute, loader threads.

use crate::site::{Site, log_rows, losses, read_json, text_only};
use models::WeightSource;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use tests::tolerance;

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
    fs::write(site.path("model/config.json"), config.to_string()).unwrap();
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

/// Tiles of the feed-forward layers change no bit: with all weights, adapters, adapters beside quantized weights, groups of
/// layers, and in the layers of every family. A micro-batch has more rows than the smallest tile of the CPU.
#[test]
fn tiles_of_feed_forward_layers_do_not_change_the_bits() {
    let lora = "--lora-rank 2 --lora-dropout 0.5";
    for (pack, flags) in [
        (
            "minicpm-v-2_6",
            "--nproc 2 --zero 3 --checkpoint-num-layers 2",
        ),
        ("minicpm-v-4_5", &*format!("{lora} --quantize nf4")),
        ("glm-4v-9b", "--precision bf16"),
        ("glm-4.1v-9b-thinking", lora),
        ("cogvlm-chat-hf", "--checkpoint-activations none"),
        (
            "cogvlm2-llama3-chat-19B",
            &*format!("{lora} --precision bf16"),
        ),
    ] {
        let site = Site::with_family(pack);
        let long = site.samples().into_iter().map(|mut sample| {
            let said = sample["conversations"][1]["content"].as_str().unwrap();
            sample["conversations"][1]["content"] = said.repeat(30).into();
            sample
        });
        site.write_samples("long", &long.collect::<Vec<_>>());
        let train = |name: &str, tile: &str| {
            site.train(&format!(
                "--data data/long.json --per-device-train-batch-size 3 --max-steps 3 --output {name} {flags} {tile}"
            ));
            losses(&site.path(name))
        };
        let whole = train("whole", "");
        assert_eq!(
            train("tiles", "--mlp-tile-tokens 7"),
            whole,
            "{pack} {flags}"
        );
        // On the CPU a tile has at most 256 rows.
        let rows = log_rows(&site.path("tiles"));
        let tokens = rows.last().unwrap()["total_tokens"].as_u64().unwrap();
        assert!(tokens > 3 * 2 * 256, "{pack}: {tokens} tokens in 3 steps");
        // In small models of other families another part of the pass needs most.
        let peaks = ["tiles", "whole"].map(|run| device_peak(&site, run));
        assert!(peaks[0] < peaks[1] || pack != "minicpm-v-2_6", "{peaks:?}");
    }
}

#[test]
fn loader_options_cores_and_limits_do_not_change_results() {
    let site = Site::new();
    let train = |name: &str, flags: &str| {
        let screen = site
            .train(&format!("--max-steps 3 --output {name} {flags}"))
            .screen;
        (losses(&site.path(name)), screen)
    };
    let (auto, _) = train("auto", "");
    assert_eq!(train("none", "--data-workers 0").0, auto);
    let (losses, screen) = train("three", "--dataloader_num_workers 3 --bind_cores_to_rank");
    assert_eq!(losses, auto);
    assert!(screen.contains("the ranks keep to "), "{screen}");
    let (_, screen) = train("limited", "--limit 2");
    assert!(screen.contains(" 2 samples"), "{screen}");
    // It is a number of each file, as `max_samples` of LLaMA-Factory.
    skewed(&site);
    for (all, number, mix) in [("both", "", None), ("one", "#1", Some("2 + 1 = 3 samples"))] {
        let files = format!("--data data/samples.json,data/skewed.json{number} --limit 2");
        let (_, screen) = train(all, &files);
        assert!(screen.contains(" 4 samples"), "{screen}");
        assert!(mix.is_none_or(|mix| screen.contains(mix)), "{screen}");
    }
}

/// Samples of many lengths: texts of one to nine sentences, and the images of the site.
fn skewed(site: &Site) {
    let texts = (1..24).map(|number| {
        let mut sample = text_only(number);
        let said = sample["conversations"][1]["content"].as_str().unwrap();
        sample["conversations"][1]["content"] = said.repeat(1 + number % 9).into();
        sample
    });
    let all: Vec<Value> = texts.chain(site.samples().into_iter().take(3)).collect();
    site.write_samples("skewed", &all);
}

/// What a run changed of each tensor of the model.
fn change(site: &Site, run: &str) -> BTreeMap<String, Vec<f32>> {
    let (before, after) = (site.path("model"), site.path(run).join("checkpoint-1"));
    let [before, after] = [before, after].map(|path| WeightSource::open(&path).unwrap());
    let read = |source: &WeightSource, name: &str| -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&source.read(name, kernels::DType::F32).unwrap())
    };
    let names = after.names().map(str::to_owned);
    names
        .map(|name| {
            let pairs = read(&before, &name).into_iter().zip(read(&after, &name));
            let change = pairs.map(|(before, after)| after - before).collect();
            (name, change)
        })
        .collect()
}

fn largest(values: &[f32]) -> f64 {
    values
        .iter()
        .fold(0.0, |most, value| most.max(f64::from(value.abs())))
}

#[test]
fn a_budget_of_tokens_gives_the_loss_and_gradients_of_its_samples_one_by_one() {
    let site = Site::new();
    skewed(&site);
    // With this epsilon an update is the gradient, at a learning rate of the same size.
    let line = "--data data/skewed.json --nproc 1 --max-steps 1 --learning-rate 1e4 --adam-epsilon 1e4 --warmup-ratio 0 \
        --weight-decay 0 --max-grad-norm 0 --adam-beta1 0 --longest-first false --lr-scheduler-type constant";
    let screen = site
        .train(&format!("{line} --tokens-per-batch 500 --output budget"))
        .screen;
    assert!(screen.contains("up to 500 tokens per rank"), "{screen}");
    let row = &log_rows(&site.path("budget"))[0];
    let taken = (row["epoch"].as_f64().unwrap() * 26.0).round();
    assert!(taken > 3.0, "{row}");
    site.train(&format!(
        "{line} --gradient-accumulation-steps {taken} --output single"
    ));
    let single = &log_rows(&site.path("single"))[0];
    assert_eq!(row["total_tokens"], single["total_tokens"]);
    let [loss, other] = [row, single].map(|row| row["loss"].as_f64().unwrap());
    assert!((loss - other).abs() < tolerance::LOSS, "{loss} {other}");
    let (budget, single) = (change(&site, "budget"), change(&site, "single"));
    let most = single
        .values()
        .map(|values| largest(values))
        .fold(0.0, f64::max);
    assert!(most > 0.0);
    for (name, values) in &single {
        let apart: Vec<f32> = values
            .iter()
            .zip(&budget[name])
            .map(|(a, b)| a - b)
            .collect();
        let bound =
            tolerance::GRADIENT_OF_OWN * largest(values) + tolerance::GRADIENT_OF_MODEL * most;
        assert!(
            largest(&apart) <= bound,
            "{name}: {} of {}",
            largest(&apart),
            largest(values)
        );
    }
}

#[test]
fn a_budget_of_tokens_resumes_and_takes_the_same_samples_on_other_ranks() {
    let site = Site::new();
    skewed(&site);
    let line = "--data data/skewed.json --tokens-per-batch 300 --lr-scheduler-type constant";
    site.train(&format!(
        "{line} --nproc 2 --max-steps 4 --save-steps 2 --output whole"
    ));
    let whole = losses(&site.path("whole"));
    site.train(&format!(
        "{line} --nproc 2 --max-steps 4 --resume whole/checkpoint-2 --output part"
    ));
    assert_eq!(losses(&site.path("part")), whole[2..]);
    let weights = |run: &str| fs::read(site.path(&format!("{run}/checkpoint-4/model.safetensors")));
    assert!(weights("whole").unwrap() == weights("part").unwrap());
    site.train(&format!(
        "{line} --nproc 1 --gradient-accumulation-steps 2 --max-steps 4 --output one"
    ));
    let tokens = |run: &str| log_rows(&site.path(run))[3]["total_tokens"].clone();
    assert_eq!(tokens("one"), tokens("whole"));
    for (loss, other) in losses(&site.path("one")).iter().zip(&whole) {
        assert!(
            (loss - other).abs() < tolerance::TRAJECTORY,
            "{loss} {other}"
        );
    }
    // The plan has the budget: every micro-batch fits, and a larger one needs more.
    let needs = |budget: usize| {
        let line = format!(
            "plan --model model --data data/skewed.json --nproc 2 --tokens-per-batch {budget} --json"
        );
        let plan = crate::generate::run(&site, &line).json();
        plan["peak_bytes_per_rank"]["device"].as_u64().unwrap()
    };
    assert!(device_peak(&site, "whole") <= needs(300));
    assert!(needs(300) < needs(600));
    // Another budget takes other samples in each step.
    let other = "--data data/skewed.json --tokens-per-batch 400 --nproc 2 --max-steps 4 --resume whole/checkpoint-2 --output x";
    let screen = site.refuse(other, 9, "E08");
    for part in ["--tokens-per-batch 300", "--tokens-per-batch 400"] {
        assert!(screen.contains(part), "{screen}");
    }
    let screen = site.refuse("--data data/skewed.json --tokens-per-batch 5", 3, "E06");
    assert!(
        screen.contains("has more tokens than --tokens-per-batch 5"),
        "{screen}"
    );
    site.refuse("--tokens-per-batch 300 --global-batch-size 4", 2, "E09");
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
