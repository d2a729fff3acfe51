//! Failure reports: evidence, suggestions that are then tried, and JSON copies.

use crate::site::{Outcome, Site, assert_nothing_left, assert_says, ranks, read_json, signal};
use serde_json::{Value, json};
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LONG: &str = "--max-steps 1000000 --lr-scheduler-type constant --zero 3 --offload cpu";

/// The JSON object on the last line of the screen. No other line has one.
fn twin(outcome: &Outcome) -> Value {
    let screen = &outcome.screen;
    let blocks = screen.lines().filter(|l| l.starts_with("error["));
    assert_eq!(blocks.count(), 0, "{screen}");
    let objects: Vec<&str> = screen.lines().filter(|l| l.starts_with('{')).collect();
    assert_eq!(objects.len(), 1, "{screen}");
    assert_eq!(screen.lines().last(), Some(objects[0]), "{screen}");
    let twin: Value = serde_json::from_str(objects[0]).unwrap();
    assert_eq!(twin["status"], outcome.code.unwrap(), "{screen}");
    twin
}

/// The part of `text` between `before` and the next blank.
fn word_after<'a>(text: &'a str, before: &str) -> &'a str {
    let (_, rest) = text.split_once(before).expect(before);
    rest.split_whitespace().next().unwrap()
}

#[test]
fn command_line_errors_are_also_printed_as_json() {
    let site = Site::new();
    for line in [
        "--zeor 3 --error-format json",
        "--error_format=json --zero 9",
        "doctor --bogus --error-format json",
        "explain E99 --error-format json",
        "data check --error-format json",
        "plam --error-format json",
    ] {
        let outcome = site.start_plain(line).finish();
        let twin = twin(&outcome);
        assert_eq!(
            (&twin["code"], outcome.code),
            (&json!("E09"), Some(2)),
            "{line}"
        );
        for key in ["title", "cause"] {
            assert!(twin[key].as_str().is_some_and(|t| !t.is_empty()), "{twin}");
        }
        assert!(!twin["next"].as_array().unwrap().is_empty(), "{twin}");
    }
    let outcome = site.start_plain("doctor --error-format xml").finish();
    assert_eq!(outcome.code, Some(2));
    assert_says(
        &outcome.screen,
        &["error[E09]", "--error-format needs a value"],
    );
}

#[test]
fn refusals_and_deaths_are_also_printed_as_json() {
    let site = Site::new();
    let outcome = site.run("--model-max-length 12 --error-format json");
    let refusal = twin(&outcome);
    assert_eq!((&refusal["code"], outcome.code), (&json!("E06"), Some(3)));

    let mut run = site.start(&format!("{LONG} --error-format json"));
    run.wait_for_step();
    let token = site.token();
    signal(ranks(&token)[1].0, "KILL");
    let mut twin = twin(&run.finish());
    assert_nothing_left(&site, &token);
    let details = twin["details"].as_str().unwrap().to_owned();
    assert!(details.ends_with("errors/rank-0001.json"), "{details}");
    // The stored copy lacks only the fields added for printing, and also has the texts in Chinese.
    let printed = twin.as_object_mut().unwrap();
    printed.remove("status");
    printed.remove("details");
    let mut stored = read_json(&site.path("out/errors/rank-0001.json"));
    let chinese = stored.as_object_mut().unwrap().remove("zh");
    assert!(chinese.is_some_and(|texts| texts["title"].is_string()));
    assert_eq!(twin, stored);
}

#[test]
fn a_killed_rank_is_reported_with_the_memory_of_all() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let token = site.token();
    signal(ranks(&token)[1].0, "KILL");
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(12), "{}", outcome.screen);
    assert_says(
        &outcome.screen,
        &[
            "error[E02] rank 1 was killed",
            "oom_kill +",
            "resident memory: rank 0 ",
            // Memory was free, so nothing is said about saving it.
            "somebody sent `kill -9`",
            "--max-restarts 3",
            "launcher --resume ",
        ],
    );
    assert!(
        !outcome.screen.contains("--precision"),
        "{}",
        outcome.screen
    );
}

#[test]
fn a_stalled_rank_ends_the_run_within_the_timeout() {
    let site = Site::new();
    let mut run = site.start(&format!("{LONG} --comm-timeout 2"));
    run.wait_for_step();
    let token = site.token();
    let (victim, rank) = ranks(&token)[1];
    assert_eq!(rank, 1);
    signal(victim, "STOP");
    let stopped = Instant::now();
    let outcome = run.finish();
    // Two seconds of waiting, four of grace for the stopped process, and time for a busy machine.
    assert!(stopped.elapsed() < Duration::from_secs(20));
    assert_eq!(outcome.code, Some(14), "{}", outcome.screen);
    assert_says(
        &outcome.screen,
        &[
            "error[E04] collective timed out after 2 s: rank 0 waits for rank 1",
            "rank 1 stopped taking part",
            "rank 0 waits in ",
            "rank 1 was last seen in ",
            &format!("rank 1: process {victim} is stopped by a signal (state T"),
            "--comm-timeout",
            "rank-0001.jsonl",
        ],
    );
    assert_eq!(outcome.screen.matches("error[").count(), 1);
    assert_nothing_left(&site, &token);
}

#[test]
fn a_loss_that_is_not_finite_is_traced_to_its_operation() {
    let site = Site::new();
    site.train("--max-steps 4 --save-steps 2 --lr-scheduler-type constant");
    let outcome = site.run(
        "--resume auto --learning-rate 1e30 --lr-scheduler-type constant --max-steps 100 --max-grad-norm 0",
    );
    assert_eq!(outcome.code, Some(15), "{}", outcome.screen);
    let screen = &outcome.screen;
    assert_says(
        screen,
        &[
            "warning step 6: loss ",
            "error[E05] loss is ",
            " at step 6 (micro-batch 1, rank 0)",
            "  cause     first non-finite value: output of ",
            "losses of the last 2 steps ",
            "gradient norm ",
            "sample ids ",
            "batch saved in errors/batch-6.json",
            "none was applied",
            "lower --learning-rate (now 1e30)",
            "--max-grad-norm 1",
            "# checkpoint-4 is good",
        ],
    );
    let batch = read_json(&site.path("out/errors/batch-6.json"));
    assert_eq!(batch["ranks"].as_array().unwrap().len(), 2);
    let first = &batch["ranks"][0]["found"]["micro_batches"][0];
    assert_eq!(first["loss_is_finite"], json!(false));
    let index = first["samples"][0]["index"].as_u64().unwrap() as usize;
    assert_eq!(first["samples"][0]["id"], site.samples()[index]["id"]);
    // The suggestion works: a run resumes from the checkpoint it calls good.
    let good = word_after(screen, "launcher --resume ");
    site.train(&format!(
        "--output next --resume {good} --max-steps 5 --lr-scheduler-type constant"
    ));
}

#[test]
fn samples_that_are_too_long_are_reported_with_a_sufficient_length() {
    let site = Site::new();
    let screen = site.refuse("--model-max-length 60", 3, "E06");
    assert_says(
        &screen,
        &[
            "samples in ",
            "--model-max-length 60 cuts off the answer, or cuts an image in two (",
            "line 2, sample 0 (id 0): ",
            " tokens, images ",
            " x 4 + text ",
            "--max-slice-nums 1 makes ",
            "launcher data check ",
        ],
    );
    let length = word_after(&screen, "  next      --model-max-length ");
    site.train(&format!("--model-max-length {length} --max-steps 1"));
    let left_out = site.train("--model-max-length 60 --skip-bad-samples --output some");
    assert_says(&left_out.screen, &["skipped"]);
    let rows = fs::read_to_string(site.path("some/data_problems.jsonl")).unwrap();
    let first: Value = serde_json::from_str(rows.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&first["line"], &first["kind"]),
        (&json!(2), &json!("too-long"))
    );
    assert!(first["tokens"].as_u64().unwrap() > 60, "{first}");
}

#[test]
fn wrong_image_markers_are_shown_with_their_position() {
    let site = Site::new();
    let mut samples = site.samples();
    samples[1]["conversations"][0]["content"] = json!("See <image_07>, is it taller?");
    site.write_samples("bad", &samples);
    let screen = site.refuse("--data data/bad.json", 3, "E07");
    assert_says(
        &screen,
        &[
            "sample 1 (id",
            "message 1: \"See <image_07>, is it taller?\"",
            "the images are [\"<image_00>\", \"<image_01>\"]",
        ],
    );
}

#[test]
fn plans_that_do_not_fit_suggest_one_that_does() {
    let site = Site::new();
    let line = "--zero 1 --nproc 2 --per-device-train-batch-size 4 --device-memory-limit 7M";
    let screen = site.refuse(line, 5, "E17");
    assert_says(
        &screen,
        &["device memory", "7.0M", "# plan: device ", ", fits"],
    );
}

#[test]
fn device_memory_that_runs_out_is_traced_to_its_unit() {
    let site = Site::new();
    site.train("--nproc 1 --zero 3 --offload cpu --max-steps 1");
    // A rank whose device has less memory than planned.
    let job = site.path("job");
    fs::create_dir(&job).unwrap();
    let mut config = read_json(&site.path("out/config.resolved.json"));
    config["device_memory_limit"] = json!(1 << 20);
    fs::write(job.join("config.json"), config.to_string()).unwrap();
    let mut rank = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .env("LC_ALL", "C")
        .current_dir(site.path(""))
        .envs(["RANK", "LOCAL_RANK"].map(|name| (name, "0")))
        .envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| (name, "1")))
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")])
        .env("TESSERA_RUN_TOKEN", "one-rank-on-a-small-device")
        .env("TESSERA_JOB_DIR", &job)
        .env("TMPDIR", site.path("tmp"))
        // The rank ends with its supervisor, which has the other end of the pipe.
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pipe = rank.stdin.take();
    let status = rank.wait().unwrap();
    drop(pipe);
    assert_eq!(status.code(), Some(11));
    let report = read_json(&site.path("out/errors/rank-0000.json"));
    assert_eq!(report["code"], "E01");
    let text = |key: &str| report[key].to_string();
    assert_says(
        &text("title"),
        &[
            "cannot train: device memory ran out in ",
            "ward of ",
            " at step 1",
        ],
    );
    assert_says(
        &text("cause"),
        &[" of --device-memory-limit (1.0M) are left"],
    );
    assert_says(
        &text("evidence"),
        &[
            "in use ",
            "gathered ",
            "step 1, micro-batch 1: sample ",
            " tokens",
        ],
    );
}

#[test]
fn incomplete_model_directories_name_the_missing_files() {
    let site = Site::new();
    let weights = site.path("model/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let half = whole.len() / 2;
    fs::write(&weights, &whole[..half]).unwrap();
    let screen = site.refuse("", 10, "E10");
    assert_says(
        &screen,
        &[
            "is incomplete",
            "interrupted download",
            "tensors are unreadable, first: ",
        ],
    );

    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4903351912\n";
    fs::write(&weights, pointer).unwrap();
    let screen = site.refuse("", 10, "E10");
    assert_says(
        &screen,
        &[
            "git-lfs pointer",
            "4 903 351 912 bytes",
            "sha256:4d7a",
            "git lfs pull",
        ],
    );

    fs::remove_file(&weights).unwrap();
    let index = json!({"weight_map": {
        "llm.lm_head.weight": "model-00001-of-00002.safetensors",
        "llm.model.norm.weight": "model-00002-of-00002.safetensors",
    }});
    fs::write(
        site.path("model/model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    fs::write(site.path("model/model-00001-of-00002.safetensors"), &whole).unwrap();
    let screen = site.refuse("", 10, "E10");
    assert_says(
        &screen,
        &[
            "model-00002-of-00002.safetensors is missing",
            "1 of 2 tensors in it, first: llm.model.norm.weight",
        ],
    );
}

#[test]
fn a_checkpoint_of_other_parts_lists_what_differs() {
    let site = Site::new();
    site.train("--max-steps 2 --save-steps 1");
    let screen = site.refuse("--resume out/checkpoint-1 --freeze resampler", 9, "E08");
    assert_says(
        &screen,
        &[
            "are frozen in this run, 0 trained tensors of this run are not in the checkpoint",
            "but frozen in this run: resampler (",
            "train these parts too",
        ],
    );
    site.train("--max-steps 2 --save-steps 1 --freeze resampler --output part");
    let screen = site.refuse(
        "--output part --resume part/checkpoint-1 --freeze none",
        9,
        "E08",
    );
    assert_says(
        &screen,
        &[
            "trained in this run, but not in the checkpoint: resampler (",
            "freeze these parts",
        ],
    );
    let screen = site.refuse(
        "--output again --resume out/checkpoint-2 --max-steps 2",
        9,
        "E16",
    );
    assert_says(&screen, &["2 of 2 steps", "--max-steps"]);
}

fn explained(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .env("LC_ALL", "C")
        .arg("explain")
        .args(arguments)
        .output()
        .unwrap();
    let text =
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code(), text)
}

#[test]
fn error_codes_are_explained_in_two_languages() {
    let (code, list) = explained(&[]);
    assert_eq!(code, Some(0));
    for code in ["E01", "E10", "E15", "E22"] {
        assert!(list.contains(code), "{list}");
        let (status, page) = explained(&[code]);
        assert_eq!(status, Some(0), "{page}");
        assert_says(
            &page,
            &[
                code,
                "usual causes",
                "what to do",
                &format!("error[{code}]"),
            ],
        );
    }
    let (code, page) = explained(&["e5", "--lang", "zh"]);
    assert_eq!(code, Some(0));
    assert_says(&page, &["E05", "常见原因", "怎么办", "error[E05]"]);
    let (code, text) = explained(&["E23"]);
    assert_eq!(code, Some(2));
    assert_says(&text, &["error[E09]", "did you mean `launcher explain E"]);
}
