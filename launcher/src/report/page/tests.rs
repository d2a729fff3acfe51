//! Tests of the page of an invented run: well formed, complete, self-contained, escaped.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{REPORT, write_pages};
use crate::error::{ErrorCode, Failure};

/// Elements without an end tag.
const VOID: [&str; 2] = ["!doctype", "?xml"];

/// Checks that every element is closed correctly, and returns all attribute values.
fn attributes(page: &str) -> Vec<(String, String)> {
    let mut open: Vec<String> = Vec::new();
    let mut found = Vec::new();
    let mut rest = page;
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').expect("a tag ends");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        let name = tag.split([' ', '\n']).next().expect("a name").to_owned();
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "before {rest:.60}");
            continue;
        }
        for part in tag.split("=\"").collect::<Vec<_>>().windows(2) {
            let name = part[0].rsplit([' ', '"']).next().expect("a name");
            let value = part[1].split('"').next().expect("a value");
            found.push((name.to_owned(), value.to_owned()));
        }
        let lower = name.to_lowercase();
        if !tag.ends_with('/') && !VOID.contains(&&*lower) {
            open.push(name);
        }
        if lower == "style" {
            let end = rest.find("</style>").expect("styles end");
            assert!(!rest[..end].contains("url(") && !rest[..end].contains("@import"));
            rest = &rest[end..];
        }
    }
    assert!(open.is_empty(), "never closed: {open:?}");
    found
}

fn write(directory: &Path, name: &str, value: &Value) {
    let path = directory.join(name);
    fs::create_dir_all(path.parent().expect("a parent")).expect("made");
    fs::write(path, value.to_string()).expect("written");
}

fn lines(directory: &Path, name: &str, rows: &[Value]) {
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(directory.join(name), text).expect("written");
}

fn answer(index: usize, text: &str, exact: bool) -> Value {
    json!({
        "index": index, "id": format!("sample-{index}"), "images": ["pictures/red.png", "gone.png"],
        "prompt": "Which shape?", "reference": "a red square", "answer": text, "exact": exact,
    })
}

/// Run directory with every kind of file.
fn complete(directory: &Path) {
    let step = |step: u64| {
        json!({
            "current_steps": step, "total_steps": 40, "loss": 4.0 / step as f64, "lr": 1e-3,
            "grad_norm": if step == 20 { json!("NaN") } else { json!(1.5) },
            "elapsed_time": "0:00:41", "remaining_time": "0:00:00", "percentage": 2.5 * step as f64,
            "tokens_per_second": 900.0, "step_seconds": 0.2, "data_wait": 0.01,
            "seconds": {"data": 0.002, "forward": 0.05, "communication": 0.03, "backward": 0.1, "step": 0.01, "offload": 0.008},
            "rank_seconds": [0.17, 0.2], "slowest_rank": 1, "slowest_part": "backward", "imbalance": 0.08,
        })
    };
    let mut rows: Vec<Value> = [1, 10, 20, 30, 40].map(step).to_vec();
    rows.push(json!({"current_steps": 40, "total_steps": 40, "eval_loss": 0.2, "elapsed_time": "0:00:42"}));
    lines(directory, "trainer_log.jsonl", &rows);
    let pool = |bytes: u64| json!({"bytes": bytes << 20, "at_peak": {"activations": bytes << 20}, "by_kind": {"activations": bytes << 20}});
    let peak = |bytes: u64| json!({"device": pool(bytes), "host": pool(2), "rss": 90 << 20});
    let memory = |step: u64| {
        json!({
            "step": step, "phases": {"forward": peak(10), "backward": peak(14), "step": peak(1)},
            "ranks": [
                {"device": 14 << 20, "host": 2 << 20, "rss": 90 << 20},
                {"device": 11 << 20, "host": step << 20, "rss": 90 << 20},
            ],
        })
    };
    lines(directory, "memory.jsonl", &[memory(1), memory(40)]);
    write(
        directory,
        "plan.json",
        &json!({
            "plan": {
                "model": "demo", "params": 1_300_000, "trainable": 1_300_000, "ranks": 2, "device": "cpu",
                "stage": 3, "precision": "f32", "offload": "cpu",
                "per_rank": [{"name": "activations", "device_bytes": 15 << 20, "host_bytes": 0}],
                "host_total_bytes": 1u64 << 34, "host_free_bytes": 1u64 << 33, "host_need_bytes": 1 << 28
            },
            "trains": [{"module": "llm.model.layers", "tensors": 12, "params": 900_000, "dtype": "f32", "lr": 1e-3}],
            "stages": {
                "units": [5, 3], "operations_percent": [49.2, 50.8], "bytes_percent": [61.0, 39.0], "boundary_bytes": [4096],
                "data_ranks": 1, "micro_batches": 4, "waiting_percent": 20.0
            },
            "data": null
        }),
    );
    write(
        directory,
        "config.resolved.json",
        &json!({"zero": 3, "offload": {"param": "cpu"}}),
    );
    write(
        directory,
        "eval_results.json",
        &json!({"eval_loss": 0.2, "exact_match": 0.9, "exact_match_before": 0.0}),
    );
    let script = "<script>alert(1)</script>";
    write(
        directory,
        "samples/step-000000.json",
        &json!([
            answer(0, "no idea", false),
            answer(1, "\" onload=\"alert(1)", false)
        ]),
    );
    write(
        directory,
        "samples/step-000040.json",
        &json!([answer(0, "a red square", true), answer(1, script, false)]),
    );
    fs::create_dir(directory.join("pictures")).expect("made");
    image::RgbImage::from_pixel(300, 200, image::Rgb([200, 30, 30]))
        .save(directory.join("pictures/red.png"))
        .expect("saved");
}

fn page_of(directory: &Path) -> String {
    write_pages(directory).expect("written");
    fs::read_to_string(directory.join(REPORT)).expect("read")
}

fn assert_self_contained(page: &str) {
    for (name, value) in attributes(page) {
        assert!(!value.contains("://"), "{name}={value}");
        assert!(!name.starts_with("on"), "{name} is a handler");
        if name == "src" {
            assert!(value.starts_with("data:image/jpeg;base64,"), "{value:.60}");
        }
        assert!(
            !matches!(&*name, "href" | "xlink:href" | "srcset"),
            "{name}={value}"
        );
    }
    for tag in ["<script", "<link", "<iframe", "<object", "<base"] {
        assert!(!page.contains(tag), "{tag}");
    }
}

#[test]
fn a_complete_run_has_every_section_on_one_page() {
    let directory = tempfile::tempdir().expect("temp dir");
    complete(directory.path());
    let page = page_of(directory.path());
    assert_self_contained(&page);
    let ids = [
        "training",
        "loss",
        "lr",
        "gradient-norm",
        "throughput",
        "time",
        "step-time",
        "imbalance",
        "memory",
        "memory-by-step",
        "memory-by-phase",
        "resident",
        "answers",
        "trains",
        "stages",
        "configuration",
    ];
    for id in ids {
        assert!(page.contains(&format!("id=\"{id}\"")), "no {id}");
    }
    assert!(!page.contains("id=\"failure\""));
    for text in [
        "finished, 40 steps",
        "1 of 2 exact after step 40, 0 of 2 after step 0",
        "no idea",
        "gone.png cannot be shown",
        "held out",
        "planned (dashed)",
        "offload.param",
        "llm.model.layers",
        "activations 14.0M",
        "rank 1, own time +8 % of the mean",
        "a stage waits 20 % of a step with 4 micro-batches",
        "<td>0</td><td>5</td><td>49 %</td><td>61 %</td><td>4.0K</td><td>14.0M</td><td>2.0M</td>",
        "<td>1</td><td>3</td><td>51 %</td><td>39 %</td><td>–</td><td>11.0M</td><td>40.0M</td>",
    ] {
        assert!(page.contains(text), "no {text:?}");
    }
    assert_eq!(page.matches("<img ").count(), 2);
    let chart = fs::read_to_string(directory.path().join("memory.svg")).expect("read");
    attributes(&chart);
    assert_eq!(
        page_of(directory.path()),
        page,
        "the same folder, the same page"
    );
}

#[test]
fn text_of_models_and_users_is_escaped() {
    let directory = tempfile::tempdir().expect("temp dir");
    complete(directory.path());
    let page = page_of(directory.path());
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
    assert!(page.contains("&quot; onload=&quot;alert(1)"));
    write(
        directory.path(),
        "config.resolved.json",
        &json!({"<b>x</b>": "</code><script>", "data": "a\"b'c&"}),
    );
    Failure::new(ErrorCode::Numeric, "</h3><script>", "<i>")
        .evidence("</dl>")
        .next("<a href=x>")
        .save(directory.path(), 0)
        .expect("saved");
    let page = page_of(directory.path());
    assert_self_contained(&page);
    assert!(page.contains("error[E05] &lt;/h3&gt;&lt;script&gt;"));
}

#[test]
fn a_run_that_failed_at_the_start_has_a_page_with_the_reason() {
    let directory = tempfile::tempdir().expect("temp dir");
    let page = page_of(directory.path());
    assert_self_contained(&page);
    assert!(page.contains("stopped after step 0 of 0") && page.contains("nothing yet"));
    assert!(!page.contains("id=\"answers\"") && !page.contains("id=\"time\""));
    assert!(!directory.path().join("memory.svg").exists());
    Failure::new(
        ErrorCode::HostMemory,
        "rank 1 was killed",
        "host memory ran out",
    )
    .evidence("oom_kill +1")
    .save(directory.path(), 1)
    .expect("saved");
    let page = page_of(directory.path());
    for text in [
        "failed after",
        "error[E02] rank 1 was killed",
        "oom_kill +1",
    ] {
        assert!(page.contains(text), "no {text:?}");
    }
}

#[test]
fn unreadable_files_only_omit_their_section() {
    let directory = tempfile::tempdir().expect("temp dir");
    complete(directory.path());
    for name in [
        "plan.json",
        "samples/step-000040.json",
        "config.resolved.json",
    ] {
        fs::write(directory.path().join(name), "{ broken").expect("written");
    }
    let log = directory.path().join("trainer_log.jsonl");
    let text = fs::read_to_string(&log).expect("read");
    fs::write(&log, text + "{\"current_steps\": 4").expect("written");
    let page = page_of(directory.path());
    assert_self_contained(&page);
    assert!(page.contains("finished, 40 steps") && !page.contains("id=\"trains\""));
    assert!(
        page.contains("0 of 2 exact after step 0"),
        "the other answers are there"
    );
}
