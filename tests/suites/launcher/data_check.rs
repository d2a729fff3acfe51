//! `launcher data check` on good and on bad files.

use crate::site::{Site, assert_says, text_only};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

fn check(site: &Site, line: &str) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .args(["data", "check"])
        .args(line.split_whitespace())
        .current_dir(site.path(""))
        .output()
        .unwrap();
    let text =
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code(), text)
}

#[test]
fn data_check_describes_a_good_file() {
    let site = Site::new();
    let (code, text) = check(&site, "data/samples.json --model model");
    assert_eq!(code, Some(0), "{text}");
    assert_says(
        &text,
        &[
            " samples  6 in ",
            "3 with images, 3 without",
            " images   4 · width ",
            "slices of 4 tokens (images): ",
            "end of sequence supervised in 7 of 7 answers",
            " longest  line 2, sample 0 (id 0): ",
            " balance  2 ranks x micro-batch 1 x accumulation 1: 3 steps per epoch",
            "<image 4x",
            "«",
            " verdict  all samples can be used",
        ],
    );
    let everything = fs::read_dir(site.path("")).unwrap().count();
    assert_eq!(everything, 4, "nothing is written");
}

#[test]
fn data_check_gives_the_figures_of_training() {
    let site = Site::new();
    let (code, text) = check(&site, "data/samples.json --model model --json --limit 2");
    assert_eq!(code, Some(0), "{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&report["samples"], &report["usable"]),
        (&json!(2), &json!(2))
    );
    let screen = site.train("--max-steps 1").screen;
    let (_, all) = check(&site, "data/samples.json --model model --json");
    let all: Value = serde_json::from_str(&all).unwrap();
    let longest = all["tokens"]["max"].as_u64().unwrap();
    let supervised = all["supervised_tokens"]["min"].as_u64().unwrap();
    assert_says(
        &screen,
        &[
            &format!("longest {longest} tokens"),
            &format!("supervised tokens min {supervised}"),
        ],
    );
    let pieces = all["rendered"]["pieces"].as_array().unwrap();
    let supervised = |piece: &&Value| piece["supervised"] == json!(true);
    let answer = site.samples()[0]["conversations"][1]["content"].clone();
    let first = pieces.iter().find(supervised).unwrap()["text"]
        .as_str()
        .unwrap();
    assert_eq!(first, format!("{}<|im_end|>", answer.as_str().unwrap()));
}

#[test]
fn unusable_samples_are_listed_and_end_with_status_3() {
    let site = Site::new();
    let mut samples = site.samples();
    samples[1]["image"]["<image_01>"] = json!("none.png");
    samples.push(text_only(2));
    samples[3]["conversations"]
        .as_array_mut()
        .unwrap()
        .truncate(1);
    site.write_samples("bad", &samples);
    let line = "data/bad.json --model model --model-max-length 60";
    let (code, text) = check(&site, line);
    assert_eq!(code, Some(3), "{text}");
    assert_says(
        &text,
        &[
            "none.png",
            "text-2 (2 times)",
            "cannot be used; images are never cut",
            " next     --model-max-length ",
        ],
    );
    assert!(!text.contains("error["), "{text}");
    let (code, text) = check(&site, &format!("{line} --output found"));
    assert_eq!(code, Some(3), "{text}");
    let rows = fs::read_to_string(site.path("found/data_problems.jsonl")).unwrap();
    let rows: Vec<Value> = rows
        .lines()
        .map(|row| serde_json::from_str(row).unwrap())
        .collect();
    let kinds: Vec<&str> = rows
        .iter()
        .map(|row| row["kind"].as_str().unwrap())
        .collect();
    assert!(
        kinds.contains(&"picture") && kinds.contains(&"roles"),
        "{rows:?}"
    );
    assert!(rows.iter().all(|row| row["line"].is_u64()), "{rows:?}");
}

#[test]
fn mistakes_in_the_command_are_refused_with_their_status() {
    let site = Site::new();
    for (line, status, words) in [
        ("data/samples.json", 2, &["error[E09]", "needs --model"][..]),
        ("--model model", 2, &["error[E09]", "needs a file"]),
        (
            "data/none.json --model model",
            3,
            &["error[E18]", "none.json"],
        ),
        (
            "data/samples.json --model nowhere",
            10,
            &["error[E10]", "nowhere"],
        ),
        (
            "data/samples.json --model model --limit 0",
            2,
            &["--limit 0"],
        ),
    ] {
        let (code, text) = check(&site, line);
        assert_eq!(code, Some(status), "{text}");
        assert_says(&text, words);
    }
}
