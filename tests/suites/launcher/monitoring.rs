//! Reports of a run during training and afterwards: step times, memory by phase, the report page, and `launcher watch`.

use crate::endings::LONG;
use crate::site::{Site, listing, log_rows, ranks, read_json, signal, wait_for_end};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};
use tests::tolerance;

const PARTS: [&str; 6] = [
    "data",
    "forward",
    "communication",
    "backward",
    "step",
    "offload",
];
/// Numbers in the log are rounded to microseconds.
const ROUNDING_SECONDS: f64 = 1e-5;

fn watch(site: &Site, words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .arg("watch")
        .args(words.split_whitespace())
        .current_dir(site.path("."))
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn view(site: &Site) -> Value {
    let output = watch(site, "--once out --json");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Measured bytes of a part of memory in the report `page`, in percent of the planned ones.
fn share_of_plan(page: &str, part: &str) -> u32 {
    let row = format!("<tr><td>{part}</td>");
    let row = page.split(&row).nth(1).unwrap().split("</tr>").next();
    let share = row.unwrap().rsplit("<td>").next().unwrap();
    share.split(" %").next().unwrap().parse().unwrap()
}

#[test]
fn a_run_logs_its_times_and_memory() {
    let site = Site::new();
    let line = "--zero 3 --offload cpu --max-steps 4 --eval-data data/samples.json --report-to tensorboard";
    let outcome = site.train(line);
    assert!(
        outcome.screen.contains("out/report.html"),
        "{}",
        outcome.screen
    );
    let out = site.path("out");
    let rows = log_rows(&out);
    for row in rows.iter().filter(|row| row.get("loss").is_some()) {
        let seconds = |name: &str| row["seconds"][name].as_f64().unwrap();
        let sum: f64 = PARTS.map(seconds).iter().sum();
        let step = row["step_seconds"].as_f64().unwrap();
        assert!((sum - step).abs() < ROUNDING_SECONDS, "{row}");
        for name in ["forward", "communication", "backward", "step", "offload"] {
            assert!(seconds(name) > 0.0, "{name} in {row}");
        }
        assert_eq!(row["rank_seconds"].as_array().unwrap().len(), 2);
        assert!(row["slowest_rank"].as_u64().unwrap() < 2);
        assert!(row["imbalance"].as_f64().unwrap() >= 0.0);
    }

    let memory = lines(&out.join("memory.jsonl"));
    let phases = |name: &str| {
        memory
            .iter()
            .filter_map(|row| row["phases"].get(name))
            .count()
    };
    for (name, times) in [
        ("load", 1),
        ("forward", 4),
        ("backward", 4),
        ("step", 4),
        ("save", 1),
    ] {
        assert_eq!(phases(name), times, "{name} in {memory:?}");
    }
    assert_eq!(phases("eval"), 2, "before and after training");
    let backward = &memory[1]["phases"]["backward"];
    assert!(backward["rss"].as_u64().unwrap() > 0);
    for pool in ["device", "host"] {
        let kinds = backward[pool]["at_peak"].as_object().unwrap();
        let sum: u64 = kinds.values().map(|bytes| bytes.as_u64().unwrap()).sum();
        assert_eq!(json!(sum), backward[pool]["bytes"], "{pool} of {backward}");
    }
    assert_eq!(memory[0]["ranks"].as_array().unwrap().len(), 2);

    let plan = read_json(&out.join("plan.json"));
    assert_eq!(
        (&plan["plan"]["ranks"], &plan["data"]["samples"]),
        (&json!(2), &json!(6))
    );
    assert!(!plan["trains"].as_array().unwrap().is_empty());
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    for text in [
        "finished, 4 steps",
        "id=\"imbalance\"",
        "id=\"memory-by-phase\"",
        "id=\"trains\"",
    ] {
        assert!(page.contains(text), "no {text:?}");
    }
    for part in ["params", "grads", "optimizer", "gathered", "activations"] {
        let share = share_of_plan(&page, part);
        assert!(
            tolerance::MEMORY_PARTS_PERCENT.contains(&share),
            "{part}: {share} % of the plan"
        );
    }
    assert!(
        fs::read_to_string(out.join("memory.svg"))
            .unwrap()
            .ends_with("</svg>\n")
    );
    let events = out.join("runs").join(&listing(&out.join("runs"))[0]);
    let events = fs::read(events).unwrap();
    for tag in PARTS
        .map(|part| format!("time/{part}"))
        .iter()
        .chain(&["perf/step_seconds".into()])
    {
        let found = events
            .windows(tag.len())
            .any(|bytes| bytes == tag.as_bytes());
        assert!(found, "no {tag}");
    }

    let view = view(&site);
    assert_eq!(
        (&view["state"], &view["step"]),
        (&json!("finished"), &json!(4))
    );
    assert_eq!(
        (&view["checkpoint"], &view["evaluation"]["step"]),
        (&json!("checkpoint-4"), &json!(4))
    );
    assert_eq!(view["remaining_seconds"], Value::Null);
    // `watch` shows a finished run and exits.
    let text = String::from_utf8(watch(&site, "out").stdout).unwrap();
    assert!(
        text.contains("finished") && text.contains("4 of 4"),
        "{text}"
    );
}

/// Peak bytes of a pool in the given phases of a run.
fn pool_peak(rows: &[Value], pool: &str, phases: &[&str]) -> u64 {
    let of = |row: &Value, phase: &&str| row["phases"][*phase][pool]["bytes"].as_u64();
    let peaks = rows
        .iter()
        .flat_map(|row| phases.iter().filter_map(move |phase| of(row, phase)));
    peaks.max().unwrap()
}

#[test]
fn saving_and_evaluating_need_no_more_memory_than_training() {
    for line in [
        "--zero 3 --offload cpu",
        "--zero 3 --offload cpu --lora-rank 4 --per-device-eval-batch-size 6",
        "--zero 1 --precision bf16 --nproc 1 --checkpoint-activations none",
    ] {
        let site = Site::new();
        site.train(&format!(
            "{line} --max-steps 3 --save-steps 1 --eval-steps 1 --eval-data data/samples.json"
        ));
        let rows = lines(&site.path("out/memory.jsonl"));
        for pool in ["device", "host"] {
            let training = pool_peak(&rows, pool, &["forward", "backward", "step"]);
            let others = pool_peak(&rows, pool, &["save", "eval"]);
            assert!(
                others <= training,
                "{line}: {pool} {others} after {training}"
            );
        }
    }
}

#[test]
fn watch_shows_a_running_and_a_stopped_run() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let running = view(&site);
    assert_eq!(running["state"], json!("running"), "{running}");
    assert!(running["remaining_seconds"].is_f64() && running["loss"].is_f64());
    run.signal("TERM");
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(130), "{}", outcome.screen);
    assert_eq!(view(&site)["state"], json!("stopped"));
    let page = fs::read_to_string(site.path("out/report.html")).unwrap();
    assert!(page.contains("stopped after step"));
}

#[test]
fn a_failed_run_has_a_report_and_watch_shows_its_failure() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let (victim, _) = ranks(&site.token())[1];
    signal(victim, "KILL");
    assert_eq!(run.finish().code, Some(12));
    let page = fs::read_to_string(site.path("out/report.html")).unwrap();
    assert!(page.contains("id=\"failure\"") && page.contains("rank 1 was killed"));
    let view = view(&site);
    assert_eq!(view["state"], json!("failed"));
    assert_eq!(view["failures"][0]["code"], json!("E02"));
}

#[test]
fn watch_shows_a_killed_run_as_dead() {
    let site = Site::new();
    let mut run = site.start(LONG);
    run.wait_for_step();
    let processes = ranks(&site.token());
    run.signal("KILL");
    run.finish();
    for (process, _) in processes {
        wait_for_end(process, Duration::from_secs(10));
    }
    // Makes the files one hour old, as if time had passed.
    let hour_ago = SystemTime::now() - Duration::from_secs(3600);
    for name in listing(&site.path("out")) {
        let file = File::open(site.path("out").join(name)).unwrap();
        file.set_modified(hour_ago).unwrap();
    }
    let view = view(&site);
    assert_eq!(view["state"], json!("dead"), "{view}");
    assert!(view["seconds_since_news"].as_f64().unwrap() >= 3600.0);
    let text = String::from_utf8(watch(&site, "out").stdout).unwrap();
    assert!(text.contains("no update for 1:00:0"), "{text}");
}

#[test]
fn watch_serves_the_page_of_a_run() {
    use std::io::{BufRead, BufReader, Read, Write};
    let site = Site::new();
    site.train("--max-steps 1");
    let mut server = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .args(["watch", "out", "--serve", "0"])
        .current_dir(site.path("."))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut link = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut link)
        .unwrap();
    let address = link
        .trim()
        .strip_prefix("http://")
        .unwrap()
        .trim_end_matches('/')
        .to_owned();
    let get = |path: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let (page, state) = (get("/"), get("/state.json"));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(
        page.starts_with("HTTP/1.1 200") && page.contains("finished, step 1 of 1"),
        "{page}"
    );
    let stored = fs::read_to_string(site.path("out/report.html")).unwrap();
    let charts = stored.split_once("</header>").unwrap().1;
    assert!(page.ends_with(charts), "the page is the one of report.html");
    let json = state.split_once("\r\n\r\n").unwrap().1;
    let state: Value = serde_json::from_str(json).unwrap();
    let expected = view(&site);
    for key in ["schema", "run", "state", "step", "loss", "checkpoint"] {
        assert_eq!(state[key], expected[key], "{json}");
    }
}

#[test]
fn watch_needs_the_directory_of_a_run() {
    let site = Site::new();
    for (words, cause) in [
        ("gone", "the directory does not exist"),
        ("data --once", "it contains no run"),
    ] {
        let output = watch(&site, words);
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            text.contains(cause) && text.contains("  next      "),
            "{text}"
        );
    }
}
