//! `launcher synth`: a synthetic model directory is reproducible and can be trained.

use super::site::{Site, assert_says, golden, listing, losses, read_json};
use std::fs;
use std::path::Path;

fn config() -> String {
    golden("minicpm-v-2_6").display().to_string()
}

/// Every file of a directory except its images, by name.
fn contents(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let names = listing(directory)
        .into_iter()
        .filter(|name| name != "pictures");
    names
        .map(|name| {
            let bytes = fs::read(directory.join(&name)).unwrap();
            (name, bytes)
        })
        .collect()
}

#[test]
fn a_synthetic_model_is_reproducible_and_trains() {
    let site = Site::new();
    let synth = |name: &str, seed: u64| {
        let line = format!(
            "synth --model-config {} --output {name} --seed {seed} --shards 3 --samples 4 --sample-tokens 150",
            config()
        );
        let outcome = site.start_plain(&line).finish();
        assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
        contents(&site.path(name))
    };
    let [first, again, other] =
        [("a", 1), ("b", 1), ("c", 2)].map(|(name, seed)| synth(name, seed));
    assert_eq!(first, again);
    let weights = |files: &[(String, Vec<u8>)]| {
        let kept = files
            .iter()
            .filter(|(name, _)| name.ends_with(".safetensors"));
        kept.cloned().collect::<Vec<_>>()
    };
    assert_eq!(weights(&first).len(), 3);
    assert_ne!(weights(&first), weights(&other));

    let run = site.train(
        "--model a --data a/samples.json --nproc 2 --zero 3 --precision bf16 --max-steps 1 --model-max-length 200",
    );
    assert_says(&run.screen, &["4 samples"]);
    let loss = losses(&site.path("out"));
    // Random weights give a loss of about the logarithm of the vocabulary size.
    let vocabulary = read_json(&site.path("a/config.json"))["vocab_size"]
        .as_f64()
        .unwrap();
    assert!(
        loss.len() == 1 && (loss[0] - vocabulary.ln()).abs() < 0.5,
        "{loss:?}"
    );
}

#[test]
fn impossible_synth_requests_are_refused() {
    let site = Site::new();
    for (line, status, code, words) in [
        ("synth --output x", 2, "E09", "--model-config is missing"),
        (
            "synth --model-config model",
            2,
            "E09",
            "--output is missing",
        ),
        (
            "synth --model-config model --output data",
            2,
            "E09",
            "not an empty directory",
        ),
        (
            "synth --model-config nothing --output x",
            10,
            "E10",
            "minicpm-v-2_6",
        ),
        (
            "synth --model-config data/samples.json --output x",
            10,
            "E10",
            "cannot make a model",
        ),
        (
            "synth --model-config model --output x --shards 0",
            2,
            "E09",
            "--shards",
        ),
    ] {
        let outcome = site.start_plain(line).finish();
        assert_eq!(outcome.code, Some(status), "{line}\n{}", outcome.screen);
        assert_says(
            &outcome.screen,
            &[&format!("error[{code}] "), "  next      ", words],
        );
        assert!(
            !site.path("x").exists() && !site.path(".x.tessera-tmp").exists(),
            "{line}"
        );
    }
}
