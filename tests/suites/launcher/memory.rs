//! Plans and what comes of them: memory as the kernel counts it, refusals, and what fits instead.

use crate::site::{Site, golden, read_json};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tests::memory::{Measured, measure, merge, model_folder, small_sizes};
use tests::tolerance;

fn launcher() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
}

fn plan(line: &str) -> Output {
    let words = line.split_whitespace();
    let output = Command::new(launcher()).arg("plan").args(words).output();
    output.unwrap()
}

fn plan_json(line: &str) -> (Option<i32>, Value) {
    let output = plan(&format!("{line} --json"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}{errors}"));
    (output.status.code(), value)
}

/// Runs a small model in a site and measures it.
fn measured(site: &Site, flags: &str) -> Measured {
    let model = site.path("small");
    if !model.is_dir() {
        model_folder(&golden("minicpm-v-2_6"), &model, &small_sizes()).unwrap();
    }
    let (output, spill) = (site.path("out"), site.path("spill"));
    fs::remove_dir_all(&output).ok();
    fs::create_dir_all(&spill).unwrap();
    let data = site.path("data/samples.json");
    let line = format!(
        "--model {} --data {} --eval-data {} --output {} --init random --max-steps 3 --save-steps 2 \
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

#[test]
fn a_plan_is_true_of_the_kernels_figures() {
    let site = Site::new();
    for flags in [
        "--zero 0 --nproc 1 --precision f32",
        "--zero 3 --nproc 2 --precision bf16 --offload cpu --gradient-accumulation-steps 2",
        "--zero 2 --nproc 2 --precision pure-bf16 --use-lora --checkpoint-activations none",
        "--zero 3 --nproc 2 --precision bf16 --offload nvme:SPILL",
    ] {
        let seen = measured(&site, flags);
        assert!(!seen.resident.is_empty(), "{flags}");
        for resident in &seen.resident {
            assert!(
                tolerance::memory(seen.planned_resident, *resident),
                "{flags}: {seen:?}"
            );
        }
        assert_eq!(
            seen.spilled > 0,
            flags.contains("nvme"),
            "{flags}: {seen:?}"
        );
        // Files are planned to the byte: activations are not among them here.
        assert_eq!(seen.planned_spilled, seen.spilled, "{flags}: {seen:?}");
        // All ranks together hold no more than the plan says, window included.
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
fn after_warm_up_a_step_takes_no_memory_from_the_system() {
    /// Counters of the kernel are exact to some pages per thread.
    const EXACT_TO: u64 = 1 << 20;
    let site = Site::new();
    let outcome = site.train("--max-steps 12 --nproc 2 --logging-steps 1 --save-strategy no");
    let text = fs::read_to_string(site.path("out/memory.jsonl")).unwrap();
    let rows = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    // Two passes over the samples have seen every length.
    let later = rows.filter(|row| row["step"].as_u64().unwrap() > 7);
    let resident = |row: &Value| row["phases"]["step"]["rss"].as_u64();
    let resident: Vec<u64> = later.filter_map(|row| resident(&row)).collect();
    assert!(resident.len() >= 4, "{}\n{text}", outcome.screen);
    let (first, last) = (resident[0], resident[resident.len() - 1]);
    assert!(last <= first + EXACT_TO, "{resident:?}");
}

#[test]
fn the_plan_of_every_family_comes_from_its_config_alone() {
    let cog = json!({
        "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000, "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vision_config": {
            "num_hidden_layers": 63, "hidden_size": 1792, "num_heads": 16, "intermediate_size": 15360,
            "image_size": 490, "num_positions": 1226,
        },
    });
    let agent = json!({
        "vision_config": {"image_size": 224, "num_positions": 257},
        "cross_image_size": 1120, "cross_hidden_size": 1024, "cross_compute_hidden_size": 1024,
        "cross_vision_config": {
            "embed_dim": 768, "layers": 24, "width": 1024, "head_width": 64, "mlp_ratio": 2.6667,
        },
    });
    let cog2 = json!({
        "intermediate_size": 14336, "vocab_size": 128_256, "num_multi_query_heads": 8,
        "bos_token_id": 128_000, "eos_token_id": 128_001, "pad_token_id": 128_002,
        "vision_config": {"image_size": 1344, "num_positions": 9217},
    });
    let minicpm = json!({
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 151_666, "query_num": 64,
        "slice_config": {"max_slice_nums": 9, "patch_size": 14, "scale_resolution": 448},
        "vision_config": {
            "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "num_attention_heads": 16,
            "num_hidden_layers": 27,
        },
    });
    let omni = json!({"model_type": "minicpmo", "architectures": ["MiniCPMO"]});
    let glm4v = json!({
        "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128, "multi_query_group_num": 2,
        "ffn_hidden_size": 13696, "num_layers": 40, "padded_vocab_size": 151_552,
        "vision_config": {
            "hidden_size": 1792, "num_heads": 16, "num_hidden_layers": 63, "intermediate_size": 15360,
            "image_size": 1120, "num_positions": 6401,
        },
    });
    let glm41v = json!({
        "text_config": {
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2,
            "intermediate_size": 13696, "num_hidden_layers": 40, "vocab_size": 151_552,
            "rope_scaling": {"mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            "hidden_size": 1536, "num_heads": 12, "depth": 24, "image_size": 336, "intermediate_size": 13696,
            "out_hidden_size": 4096,
        },
    });
    let folder = tempfile::tempdir().unwrap();
    for (pack, changes, billions) in [
        ("minicpm-v-2_6", vec![&minicpm], 8.1),
        ("minicpm-o-2_6", vec![&minicpm, &omni], 8.1),
        ("cogvlm-chat-hf", vec![&cog], 17.6),
        ("cogvlm2-llama3-chat-19B", vec![&cog, &cog2], 19.5),
        ("cogagent-chat-hf", vec![&cog, &agent], 18.3),
        ("glm-4v-9b", vec![&glm4v], 13.9),
        ("glm-4.1v-9b-thinking", vec![&glm41v], 10.3),
    ] {
        let mut config = read_json(&golden(pack).join("config.json"));
        changes
            .into_iter()
            .for_each(|change| merge(&mut config, change));
        let path = folder.path().join(format!("{pack}.json"));
        fs::write(&path, config.to_string()).unwrap();
        let (code, plan) = plan_json(&format!(
            "--model {} --no-weights --hw 8x80GiB --ram 1TiB --use-lora --tune-llm false --tune-vision false",
            path.display()
        ));
        assert_eq!(code, Some(0), "{pack}: {plan:#}");
        let total = plan["parameters_total"].as_f64().unwrap() / 1e9;
        assert!(
            (total / billions - 1.0).abs() < 0.03,
            "{pack}: {total} billion parameters"
        );
        assert_eq!(plan["fits"], true);
        for phase in ["load", "forward", "backward", "step", "eval", "save"] {
            let bytes = &plan["bytes_per_rank"][phase];
            assert!(
                bytes["device"]["parameters"].as_u64() > Some(1 << 30),
                "{pack} {phase}: {bytes}"
            );
            assert!(
                bytes["host"]["process"].as_u64() > Some(0),
                "{pack} {phase}: {bytes}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_nearest_that_does() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("small");
    model_folder(&golden("minicpm-v-2_6"), &model, &small_sizes()).unwrap();
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
    // People get the same line.
    let shown = plan(&small);
    assert_eq!(shown.status.code(), Some(5));
    let errors = String::from_utf8_lossy(&shown.stderr).into_owned();
    assert!(
        errors.contains("error[E17]") && errors.contains(command),
        "{errors}"
    );
    // What nothing helps is said too.
    let hopeless = plan(&format!("{line} --hw 2x16MiB --ram 64GiB"));
    assert_eq!(hopeless.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&hopeless.stderr).contains("no stage, offload"));
}

#[test]
fn the_matrix_has_every_stage_and_offload() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("small");
    model_folder(&golden("minicpm-v-2_6"), &model, &small_sizes()).unwrap();
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
fn weights_are_looked_at_unless_told_not_to() {
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
