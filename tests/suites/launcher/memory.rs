//! Memory plans: comparison with the memory that the operating system reports, refusals, and suggestions.

use crate::site::{Site, golden};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tests::memory::{Measured, high_water_mark, measure, model_directory, small_sizes};
use tests::tolerance;

fn launcher() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
}

fn plan(line: &str) -> Output {
    let words = line.split_whitespace();
    let output = Command::new(launcher())
        .env("LC_ALL", "C")
        .arg("plan")
        .args(words)
        .output();
    output.unwrap()
}

fn plan_json(line: &str) -> (Option<i32>, Value) {
    let output = plan(&format!("{line} --json"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}{errors}"));
    (output.status.code(), value)
}

/// Runs a small model in a site and measures its memory.
fn measured(site: &Site, flags: &str) -> Measured {
    let model = site.path("small");
    if !model.is_dir() {
        model_directory(&golden("minicpm-v-2_6"), &model, &small_sizes()).unwrap();
    }
    let (output, spill) = (site.path("out"), site.path("spill"));
    fs::remove_dir_all(&output).ok();
    fs::create_dir_all(&spill).unwrap();
    let data = site.path("data/samples.json");
    let line = format!(
        "--model {} --data {} --eval-data {} --output {} --device cpu --init random --max-steps 3 --save-steps 2 \
         --eval-steps 2 --eval-strategy steps --logging-steps 1 {}",
        model.display(),
        data.display(),
        data.display(),
        output.display(),
        flags.replace("SPILL", &spill.display().to_string())
    );
    let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    measure(launcher(), &args, &output, Some(&spill)).unwrap()
}

/// Rows of docs/memory.md on long samples, with tiles of the feed-forward layers and without.
#[test]
fn long_samples_of_an_8b_model_fit_one_card_as_documented() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/memory.md");
    let docs = fs::read_to_string(docs).unwrap();
    let common = "--model openbmb/MiniCPM-V-4_5 --hw 80GiB --ram 200GiB --nproc 1 --device cuda --lora-rank 8";
    for flags in ["", "--mlp-tile-tokens 4096"] {
        let line = format!("{common} --model-max-length 131072 --eval-strategy no {flags}");
        let (code, plan) = plan_json(&line);
        assert_eq!(code, Some(0), "{line}: {plan}");
        let need = plan["need_bytes"]["device_per_rank"].as_f64().unwrap();
        let flags = match flags {
            "" => "none".to_owned(),
            flags => format!("`{flags}`"),
        };
        let need = need / f64::from(1 << 30);
        let row = format!("| 131072 | 80 GiB | {flags} | {need:.1} GiB |");
        assert!(docs.lines().any(|line| line == row), "{line}: {row}");
    }
}

#[test]
fn planned_memory_matches_the_figures_of_the_operating_system() {
    let site = Site::new();
    for flags in [
        "--zero 0 --nproc 1 --precision f32",
        "--zero 3 --nproc 2 --precision bf16 --offload cpu --gradient-accumulation-steps 2",
        "--zero 2 --nproc 2 --precision pure-bf16 --use-lora --checkpoint-activations none",
        "--zero 3 --nproc 2 --precision bf16 --offload nvme:SPILL",
        "--zero 3 --nproc 2 --precision bf16 --offload nvme:SPILL --max-grad-norm 0",
        "--zero 2 --nproc 2 --precision bf16 --offload cpu --optimizer-in-backward 16MiB",
        "--zero 3 --nproc 4 --shard-group 2 --precision bf16",
    ] {
        let seen = measured(&site, flags);
        assert!(!seen.resident.is_empty(), "{flags}");
        for (planned, resident) in seen.planned_resident.iter().zip(&seen.resident) {
            assert!(tolerance::memory(*planned, *resident), "{flags}: {seen:?}");
        }
        assert_eq!(
            seen.spilled > 0,
            flags.contains("nvme"),
            "{flags}: {seen:?}"
        );
        // The plan is that of rank 0. An extent of another rank may begin inside a block and touch one more.
        let off = seen.planned_spilled.abs_diff(seen.spilled);
        assert!(off * 100 <= seen.spilled, "{flags}: {seen:?}");
        // All ranks together take no more than planned, window included.
        let together: u64 = seen.resident.iter().sum();
        let mapped_twice = seen.window * seen.resident.len() as u64;
        assert!(
            seen.planned_host + mapped_twice >= together / 2,
            "{flags}: {seen:?}"
        );
        assert!(seen.window <= seen.planned_host, "{flags}: {seen:?}");
    }
}

#[test]
fn after_warm_up_a_step_allocates_no_memory() {
    /// Counters of the operating system are exact up to some pages per thread.
    const EXACT_TO: u64 = 1 << 20;
    let site = Site::new();
    let outcome = site.train("--max-steps 12 --nproc 2 --logging-steps 1 --save-strategy no");
    let text = fs::read_to_string(site.path("out/memory.jsonl")).unwrap();
    let rows = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    // The first two passes over the samples contain every length.
    let later = rows.filter(|row| row["step"].as_u64().unwrap() > 7);
    let resident = |row: &Value| row["phases"]["step"]["rss"].as_u64();
    let resident: Vec<u64> = later.filter_map(|row| resident(&row)).collect();
    assert!(resident.len() >= 4, "{}\n{text}", outcome.screen);
    let (first, last) = (resident[0], resident[resident.len() - 1]);
    assert!(last <= first + EXACT_TO, "{resident:?}");
}

#[test]
fn the_plan_of_every_family_comes_from_its_config_alone() {
    let configs =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../launcher/src/commands/synth/configs");
    for (name, billions) in [
        ("minicpm-v-2_6", 8.1),
        ("minicpm-o-2_6", 8.1),
        ("cogvlm-chat", 17.6),
        ("cogvlm2-llama3-chat-19b", 19.5),
        ("cogagent-chat", 18.3),
        ("glm-4v-9b", 13.9),
        ("glm-4.1v-9b-thinking", 10.3),
        ("minicpm-v-4_5", 8.7),
        ("minicpm-o-4_5", 8.7),
        ("cogagent-9b-20241220", 13.9),
        ("glm-4.6v-flash", 10.3),
        ("glm-ocr", 1.1),
    ] {
        let (code, plan) = plan_json(&format!(
            "--model {}/{name}.json --no-weights --hw 8x80GiB --ram 1TiB --use-lora --tune-llm false --tune-vision false",
            configs.display()
        ));
        assert_eq!(code, Some(0), "{name}: {plan:#}");
        let total = plan["parameters_total"].as_f64().unwrap() / 1e9;
        assert!(
            (total / billions - 1.0).abs() < 0.03,
            "{name}: {total} billion parameters"
        );
        assert_eq!(plan["fits"], true);
        for phase in ["load", "forward", "backward", "step", "eval", "save"] {
            let bytes = &plan["bytes_per_rank"][phase];
            assert!(
                // At least an eighth of the 16-bit weights.
                bytes["device"]["parameters"].as_f64() >= Some(total * 1e9 * 2.0 / 8.0),
                "{name} {phase}: {bytes}"
            );
            assert!(
                bytes["host"]["process"].as_u64() > Some(0),
                "{name} {phase}: {bytes}"
            );
        }
    }
}

#[test]
fn a_plan_that_does_not_fit_is_refused_with_the_nearest_that_does() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("small");
    model_directory(&golden("minicpm-v-2_6"), &model, &small_sizes()).unwrap();
    let line = format!(
        "--model {} --no-weights --zero 0 --per-device-train-batch-size 4",
        model.display()
    );
    let (code, whole) = plan_json(&format!("{line} --hw 2x64GiB --ram 64GiB"));
    assert_eq!((code, &whole["fits"]), (Some(0), &json!(true)));
    let device = whole["need_bytes"]["device_per_rank"].as_u64().unwrap();
    let small = format!("{line} --hw 2x{} --ram 64GiB", device - (60 << 20));
    let (code, refused) = plan_json(&small);
    assert_eq!((code, &refused["fits"]), (Some(5), &json!(false)));
    let command = refused["nearest"]["command"].as_str().unwrap();
    let again = plan(command.strip_prefix("launcher plan ").unwrap());
    assert_eq!(again.status.code(), Some(0), "{command}");
    // The printed text has the same line.
    let shown = plan(&small);
    assert_eq!(shown.status.code(), Some(5));
    let errors = String::from_utf8_lossy(&shown.stderr).into_owned();
    assert!(
        errors.contains("error[E17]") && errors.contains(command),
        "{errors}"
    );
    // The report says when no suggestion helps.
    let hopeless = plan(&format!("{line} --hw 2x16MiB --ram 64GiB"));
    assert_eq!(hopeless.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&hopeless.stderr).contains("no stage, offload"));
}

#[test]
fn the_matrix_has_every_stage_and_offload() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("small");
    model_directory(&golden("minicpm-v-2_6"), &model, &small_sizes()).unwrap();
    let line = format!("--model {} --no-weights --matrix", model.display());
    let (code, rows) = plan_json(&format!("{line} --hw 2x2GiB --ram 4GiB --nvme 10GiB"));
    assert_eq!(code, Some(0));
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 4 * 5);
    assert!(
        rows.iter()
            .any(|row| row["need_bytes"]["nvme"].as_u64() > Some(1 << 20))
    );
    let text = plan(&format!("{line} --hw 2x1KiB --ram 4GiB"));
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert_eq!(
        text.lines().filter(|line| line.ends_with(" no")).count(),
        4 * 3,
        "{text}"
    );
}

#[test]
fn plan_reads_weight_files_unless_told_not_to() {
    let site = Site::new();
    let model = site.path("model");
    let (code, _) = plan_json(&format!("--model {}", model.display()));
    assert_eq!(code, Some(0));
    fs::remove_file(model.join("model.safetensors")).unwrap();
    let refused = plan(&format!("--model {}", model.display()));
    assert_eq!(refused.status.code(), Some(10));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--no-weights"));
    let (code, with_data) = plan_json(&format!(
        "--model {} --data {} --no-weights",
        model.display(),
        site.path("data/samples.json").display()
    ));
    assert_eq!((code, &with_data["sample"]), (Some(0), &json!("data")));
}

/// Bytes of the files below a directory that `counts` accepts.
fn file_bytes(directory: &Path, counts: &dyn Fn(&str) -> bool) -> u64 {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let sizes = entries.map(|entry| {
        let meta = entry.metadata().unwrap();
        if meta.is_dir() {
            return file_bytes(&entry.path(), counts);
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        if counts(&name) { meta.len() } else { 0 }
    });
    sizes.sum()
}

#[test]
fn a_plan_knows_the_bytes_of_a_checkpoint() {
    /// Allowance for headers and manifests.
    const HEADERS: u64 = 256 << 10;
    let site = Site::new();
    for flags in [
        "--zero 3 --nproc 2 --precision bf16",
        "--zero 1 --nproc 2 --precision f32 --tune-vision false",
        "--zero 2 --nproc 1 --precision pure-bf16 --use-lora --lora-rank 4",
        "--zero 3 --nproc 1 --precision fp16 --use-lora --modules-to-save none --train resampler",
    ] {
        let (code, plan) = plan_json(&format!(
            "--model {} --data {} {flags}",
            site.path("model").display(),
            site.path("data/samples.json").display()
        ));
        assert_eq!(code, Some(0), "{flags}: {plan:#}");
        fs::remove_dir_all(site.path("out")).ok();
        let outcome = site.train(&format!("--max-steps 1 {flags}"));
        let directory = site.path("out/checkpoint-1");
        let in_state = file_bytes(&directory.join("state"), &|_| true);
        let state = file_bytes(&directory.join("state"), &|name| {
            name.ends_with(".safetensors")
        });
        let weights = file_bytes(&directory, &|_| true) - in_state;
        for (part, saved) in [("state", state), ("weights", weights)] {
            let planned = plan["checkpoint_bytes"][part].as_u64().unwrap();
            assert!(
                planned <= saved && saved <= planned + HEADERS,
                "{flags}: {part} planned {planned}, saved {saved}\n{}",
                outcome.screen
            );
        }
    }
}

/// A merged model is written block by block. For any model size, most of the memory is that of the process itself.
#[test]
fn check_25_an_export_does_not_load_the_whole_model() {
    const MOST: u64 = 40 << 20;
    let site = Site::new();
    let sizes = json!({"num_hidden_layers": 12, "intermediate_size": 16 << 10});
    model_directory(&golden("minicpm-v-2_6"), &site.path("sizes"), &sizes).unwrap();
    let mut synth = Command::new(launcher());
    synth
        .env("LC_ALL", "C")
        .current_dir(site.path("."))
        .args("synth --samples 2 --sample-tokens 150 --output big".split(' '))
        .args(["--model-config", "sizes"]);
    assert!(synth.output().unwrap().status.success());
    site.train(
        "--model big --data big/samples.json --nproc 1 --precision bf16 --use-lora --lora-rank 2 \
         --max-steps 1 --model-max-length 200",
    );
    let export = "export out/checkpoint-1 --merge --output merged";
    let mut child = Command::new(launcher())
        .env("LC_ALL", "C")
        .current_dir(site.path("."))
        .args(export.split(' '))
        .spawn()
        .unwrap();
    let mut most = 0;
    let status = loop {
        // The mark only grows, so the last sample is the peak, except for growth after it.
        most = high_water_mark(child.id()).unwrap_or(0).max(most);
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        std::thread::yield_now();
    };
    assert!(status.success());
    let model = file_bytes(&site.path("merged"), &|_| true);
    assert!(model > 3 * MOST, "{model} bytes");
    assert!(0 < most && most < MOST, "{most} bytes for {model}");
}
