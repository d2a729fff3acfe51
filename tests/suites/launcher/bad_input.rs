//! Refused inputs: exit status, error code and message. A refusal changes no file.

use crate::site::{Site, assert_says, completed};
use serde_json::{Value, json};
use std::fs;

#[test]
fn flags_with_impossible_values_are_refused() {
    let site = Site::new();
    for (line, words) in [
        ("--zeor 3", &["--zeor", "did you mean --zero?"][..]),
        ("--lerning_rate 1", &["did you mean --learning_rate?"]),
        (
            "--bf16 true --precision f32",
            &["--bf16 true", "--precision f32"],
        ),
        (
            "--deepspeed a --deepspeed_config b",
            &["--deepspeed a", "--deepspeed_config b"],
        ),
        ("--nproc 0", &["--nproc 0"]),
        ("--zero 4", &["--zero"]),
        ("--offload gpu", &["--offload", "gpu"]),
        ("--max-steps 0", &["--max-steps 0"]),
        ("--save-total-limit 0", &["--save-total-limit 0"]),
        ("--learning-rate -1", &["--learning-rate"]),
        ("--host-memory-limit lots", &["--host-memory-limit", "lots"]),
        ("--fp16 true --bf16 true", &["--fp16 true", "--bf16 true"]),
        (
            "--lora-target-modules nothing",
            &["nothing", "--lora-target-modules"],
        ),
    ] {
        assert_says(&site.refuse(line, 2, "E09"), words);
    }
}

#[test]
fn flags_that_need_others_say_so() {
    let site = Site::new();
    let refuse = |line: &str| {
        let outcome = site.start_plain(line).finish();
        assert_eq!(outcome.code, Some(2), "{}", outcome.screen);
        outcome.screen
    };
    assert_says(&refuse("--model model"), &["--model needs --data"]);
    assert_says(
        &refuse("--data data/samples.json"),
        &["--data needs --model"],
    );
    assert_says(
        &refuse("--model model --data data/samples.json --resume auto"),
        &["--resume auto needs --output"],
    );
    assert_says(
        &refuse(&completed("").replace("--model", "train --model --bogus")),
        &["--model needs a value"],
    );
    assert!(!site.path("runs").exists());
}

#[test]
fn unusable_model_directories_are_refused() {
    let site = Site::new();
    assert_says(
        &site.refuse("--model nowhere", 10, "E10"),
        &["nowhere/config.json"],
    );
    let weights = site.path("model/model.safetensors");
    let config = site.path("model/config.json");
    let whole = fs::read(&weights).unwrap();
    let text = fs::read_to_string(&config).unwrap();

    fs::write(&config, text.replace("\"minicpmv\"", "\"llama\"")).unwrap();
    assert_says(&site.refuse("", 10, "E10"), &["llama", "minicpmv"]);
    fs::write(&config, &text[..text.len() / 2]).unwrap();
    assert_says(&site.refuse("", 10, "E10"), &["config.json"]);
    let heads = "\"num_key_value_heads\": 2";
    assert!(text.contains(heads));
    fs::write(&config, text.replace(heads, "\"num_key_value_heads\": 3")).unwrap();
    site.refuse("", 10, "E10");
    let hidden = "\"intermediate_size\": 56";
    assert!(text.contains(hidden));
    fs::write(&config, text.replace(hidden, "\"intermediate_size\": 64")).unwrap();
    assert_says(&site.refuse("", 10, "E10"), &["mlp", "64", "56"]);
    fs::write(&config, &text).unwrap();

    for bytes in [&whole[..whole.len() - 1], &whole[..100], &whole[..4], &[]] {
        fs::write(&weights, bytes).unwrap();
        assert_says(&site.refuse("", 10, "E10"), &["model.safetensors"]);
    }
    fs::remove_file(&weights).unwrap();
    assert_says(
        &site.refuse("", 10, "E10"),
        &["contains neither model.safetensors", "--init random"],
    );
    let index = json!({"weight_map": {"llm.lm_head.weight": "model-00001-of-00002.safetensors"}});
    let index_path = site.path("model/model.safetensors.index.json");
    fs::write(&index_path, index.to_string()).unwrap();
    assert_says(
        &site.refuse("", 10, "E10"),
        &["model-00001-of-00002.safetensors"],
    );
    fs::write(site.path("model/model-00001-of-00002.safetensors"), &whole).unwrap();
    site.train("--max-steps 1");

    fs::remove_file(site.path("model/tokenizer.json")).unwrap();
    assert_says(
        &site.refuse("--output next", 10, "E10"),
        &["tokenizer.json"],
    );
}

/// Expects a refusal of the samples in `data/NAME.json`, for training and for evaluation.
fn refuse_samples(site: &Site, samples: &[Value], code: &str, words: &[&str]) {
    site.write_samples("bad", samples);
    assert_says(&site.refuse("--data data/bad.json", 3, code), words);
    assert_says(&site.refuse("--eval-data data/bad.json", 3, code), words);
}

#[test]
fn unreadable_data_files_are_refused() {
    let site = Site::new();
    let path = site.path("data/bad.json");
    let good = serde_json::to_string_pretty(&site.samples()).unwrap();
    let line = good
        .lines()
        .position(|l| l.contains("conversations"))
        .unwrap()
        + 1;
    let broken = good.replacen("\"conversations\":", "\"conversations\"", 1);
    fs::write(&path, broken).unwrap();
    let place = format!("bad.json:{line}:");
    assert_says(&site.refuse("--data data/bad.json", 3, "E18"), &[&place]);
    for text in ["", "[]", "{}", "[{\"id\": 1}]", &good[..good.len() / 2]] {
        fs::write(&path, text).unwrap();
        assert_says(
            &site.refuse("--data data/bad.json", 3, "E18"),
            &["bad.json"],
        );
    }
    assert_says(
        &site.refuse("--data data/none.json", 3, "E18"),
        &["none.json"],
    );
}

#[test]
fn unusable_samples_are_refused() {
    let site = Site::new();
    let one = |change: &dyn Fn(&mut Value)| {
        let mut samples = site.samples();
        change(&mut samples[0]);
        samples
    };
    let missing = one(&|s| s["image"] = json!("none.png"));
    refuse_samples(&site, &missing, "E18", &["sample 0 (id 0)", "none.png"]);

    let image = fs::read(site.path("data/image_wide.png")).unwrap();
    for (name, bytes) in [
        ("half.png", &image[..image.len() / 2]),
        ("head.png", &image[..20]),
        ("text.png", b"no picture at all"),
        ("empty.png", b""),
    ] {
        fs::write(site.path("data").join(name), bytes).unwrap();
        let corrupt = one(&|s| s["image"] = json!(name));
        refuse_samples(&site, &corrupt, "E18", &["sample 0 (id 0)", name]);
    }
    let directory = one(&|s| s["image"] = json!("."));
    refuse_samples(&site, &directory, "E18", &["sample 0 (id 0)"]);

    let outside = one(&|s| s["image"] = json!("../model/config.json"));
    refuse_samples(&site, &outside, "E18", &["outside the data directory"]);

    let question = "<image>\n<image>\nHow many shapes?";
    let doubled = one(&|s| s["conversations"][0]["content"] = json!(question));
    refuse_samples(&site, &doubled, "E07", &["2 image placeholders"]);

    let unanswered = one(&|s| {
        s["conversations"].as_array_mut().unwrap().truncate(1);
    });
    refuse_samples(&site, &unanswered, "E06", &["sample 0 (id 0)"]);

    let screen = site.refuse("--model-max-length 12", 3, "E06");
    assert_says(&screen, &["no supervised token", "--model-max-length"]);
    assert_says(&screen, &["6 of 6 samples", "and 1 more"]);
}

#[test]
fn plans_larger_than_the_machine_are_refused() {
    let site = Site::new();
    let screen = site.refuse("--host-memory-limit 1M", 5, "E17");
    assert_says(
        &screen,
        &["host memory", "1.0M", "no single change", "comes closest"],
    );
    let screen = site.refuse("--device-memory-limit 100K", 5, "E17");
    assert_says(&screen, &["device memory", "100K"]);
}

#[test]
fn unwritable_outputs_are_refused() {
    let site = Site::new();
    fs::write(site.path("taken"), "a file").unwrap();
    assert_says(&site.refuse("--output taken", 2, "E09"), &["taken"]);
    assert_says(
        &site.refuse("--output taken/run", 16, "E13"),
        &["taken/run"],
    );
}
