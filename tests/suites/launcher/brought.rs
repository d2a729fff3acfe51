//! Directories as other programs and people leave them: layouts of transformers 5, values that are not finite, adapters
//! of other kinds, and files that are not what their names say.

use crate::generate::{launcher, refuse, run, say};
use crate::site::{Site, read_json};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Writes `value` in place of the first value of an f32 tensor.
fn poke(file: &Path, tensor: &str, value: f32) {
    let mut bytes = fs::read(file).unwrap();
    let (start, _) = SafeTensors::read_metadata(&bytes).unwrap();
    let header: Value = serde_json::from_slice(&bytes[8..8 + start]).unwrap();
    let offset = header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    let place = 8 + start + offset;
    bytes[place..place + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(file, bytes).unwrap();
}

/// Changes a JSON file.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = read_json(path);
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

#[test]
fn directories_saved_by_transformers_5_evaluate_alike() {
    for pack in ["minicpm-v-2_6", "glm-4.1v-9b-thinking"] {
        let site = Site::with_family(pack);
        let line = "eval --model model --data data/samples.json --limit 1 --max-new-tokens 1";
        let before = run(&site, line).json();
        let own = site.path("model/preprocessor_config.json");
        let settings = json!({"image_processor": read_json(&own), "processor_class": "P"});
        fs::write(
            site.path("model/processor_config.json"),
            settings.to_string(),
        )
        .unwrap();
        fs::remove_file(own).unwrap();
        edit(&site.path("model/config.json"), |config| {
            let fields = config.as_object_mut().unwrap();
            let theta = fields.remove("rope_theta").unwrap_or(json!(1e4));
            if !fields.contains_key("text_config") {
                let rope = json!({"rope_type": "default", "rope_theta": theta});
                fields.insert("rope_parameters".into(), rope);
            }
            let dtype = fields.remove("torch_dtype").unwrap();
            fields.insert("dtype".into(), dtype);
        });
        assert_eq!(
            run(&site, line).json()["eval_loss"],
            before["eval_loss"],
            "{pack}"
        );
    }
}

#[test]
fn values_that_are_not_finite_end_every_subcommand() {
    let norm = "llm.model.norm.weight";
    let site = Site::new();
    site.train("--max-steps 1 --output whole");
    let file = site.path("model/model.safetensors");
    poke(&file, norm, f32::NAN);
    let words = ["1 of 128 values of tensor llm.model.norm.weight are infinite or NaN"];
    let eval = "eval --model model --data data/samples.json --max-new-tokens 1";
    refuse(&site, eval, 15, "E05", &words);
    refuse(
        &site,
        "generate --model model --prompt hi",
        15,
        "E05",
        &words,
    );
    let export = "export model --output copy";
    refuse(
        &site,
        export,
        15,
        "E05",
        &["1 values of llm.model.norm.weight are not finite"],
    );
    assert!(!site.path("copy").exists());
    let trained = site.start("--output bad").finish();
    assert_eq!(trained.code, Some(15), "{}", trained.screen);
    assert!(trained.screen.contains(words[0]), "{}", trained.screen);
    // Finite weights of which an activation is not.
    poke(&file, norm, 3e38);
    poke(&file, "llm.lm_head.weight", 3e38);
    refuse(
        &site,
        eval,
        15,
        "E05",
        &["first non-finite value: output of"],
    );
    refuse(
        &site,
        "generate --model model --prompt hi",
        15,
        "E05",
        &["scores"],
    );
    // Finite values that another format cannot hold.
    let checkpoint = site.path("whole/checkpoint-1");
    fs::remove_file(checkpoint.join("MANIFEST.json")).unwrap();
    poke(&checkpoint.join("model.safetensors"), norm, 7e4);
    let half = "export whole/checkpoint-1 --output half --dtype f16";
    refuse(&site, half, 15, "E05", &[norm, "not finite in f16"]);
    assert!(!site.path("half").exists());
    run(
        &site,
        "export whole/checkpoint-1 --output wide --dtype bf16",
    );
}

#[test]
fn an_evaluation_that_is_not_finite_ends_the_run() {
    let site = Site::new();
    let line = "--eval-data data/samples.json --eval-steps 1 --max-steps 1 --learning-rate 1e30 --warmup-ratio 0 --nproc 2 --zero 3";
    let ended = site.start(line).finish();
    assert_eq!(ended.code, Some(15), "{}", ended.screen);
    for word in [
        "the loss of evaluation sample 0",
        "first non-finite value: output of",
    ] {
        assert!(ended.screen.contains(word), "{}", ended.screen);
    }
}

#[test]
fn adapters_of_other_kinds_are_refused_by_name_everywhere() {
    let site = Site::new();
    let lora = "--use-lora true --lora-rank 4 --train lm_head";
    site.train(&format!("{lora} --max-steps 1"));
    let adapter = "out/checkpoint-1";
    let data = "--data data/samples.json";
    for (key, value) in [
        ("use_dora", json!(true)),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("layer_replication", json!([[0, 2]])),
    ] {
        let path = site.path(adapter).join("adapter_config.json");
        let before = fs::read(&path).unwrap();
        edit(&path, |config| config[key] = value.clone());
        let value = value.to_string();
        for line in [
            format!("generate --model model --adapter {adapter} --prompt hi"),
            format!("eval --model model --adapter {adapter} {data}"),
            format!("export {adapter} --output x"),
            format!("export {adapter} --output x --merge"),
            format!("ckpt verify {adapter}"),
            format!("ckpt consolidate {adapter} --output x"),
            format!("ckpt reshard {adapter} --nproc 1 --output x"),
            format!("plan --model model {data} {lora} --resume {adapter}"),
            format!("--model model {data} {lora} --output y --max-steps 2 --resume {adapter}"),
        ] {
            refuse(
                &site,
                &line,
                10,
                "E10",
                &[key, &value, "merge it into its base model"],
            );
        }
        // As a model, where transformers would load the adapter too.
        fs::copy(&path, site.path("model/adapter_config.json")).unwrap();
        for line in [
            format!("plan --model model {data}"),
            format!("--model model {data} --output y"),
        ] {
            refuse(&site, &line, 10, "E10", &[key]);
        }
        fs::remove_file(site.path("model/adapter_config.json")).unwrap();
        fs::write(&path, before).unwrap();
    }
    run(&site, "ckpt verify out/checkpoint-1");
    let line = format!("--model out/checkpoint-1 {data} --output y");
    refuse(
        &site,
        &line,
        10,
        "E10",
        &["not a whole model", "export --merge"],
    );
}

#[test]
fn trained_tensors_replace_only_tensors_of_their_shape() {
    let site = Site::new();
    site.train("--train lm_head --max-steps 1");
    let file = site.path("out/checkpoint-1/trained.safetensors");
    let bytes = fs::read(&file).unwrap();
    let (length, _) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let shape = header["llm.lm_head.weight"]["shape"]
        .as_array_mut()
        .unwrap();
    shape.reverse();
    let header = header.to_string();
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend(header.as_bytes());
    changed.extend(&bytes[8 + length..]);
    fs::write(&file, changed).unwrap();
    fs::remove_file(site.path("out/checkpoint-1/MANIFEST.json")).unwrap();
    let words = ["llm.lm_head.weight is [128, 335], the model needs [335, 128]"];
    let adapter = "--model model --adapter out/checkpoint-1";
    refuse(
        &site,
        &format!("generate {adapter} --prompt hi"),
        10,
        "E10",
        &words,
    );
    let export = "export out/checkpoint-1 --model model --merge --output merged";
    refuse(&site, export, 10, "E10", &words);
}

#[test]
fn the_real_cause_of_an_unusable_directory_is_named() {
    let site = Site::new();
    let eval = "eval --model model --data data/samples.json";
    let changed = |name: &str, content: &[u8], words: &[&str]| {
        let path = site.path("model").join(name);
        let before = fs::read(&path).unwrap();
        fs::write(&path, content).unwrap();
        refuse(&site, eval, 10, "E10", words);
        fs::write(&path, before).unwrap();
    };
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7031645\n";
    fs::write(site.path("model/generation_config.json"), "{}").unwrap();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
    ] {
        changed(name, pointer, &[name, "git-lfs pointer", "git lfs pull"]);
    }
    let mut quantized = read_json(&site.path("model/config.json"));
    quantized["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
    let words = [
        "quantization_config",
        "gptq",
        "weights that are not quantized",
    ];
    changed("config.json", quantized.to_string().as_bytes(), &words);
    let plan = "plan --model openbmb/MiniCPM-V-2_6 --data data/samples.json";
    refuse(
        &site,
        plan,
        10,
        "E10",
        &["Hub", "hf download openbmb/MiniCPM-V-2_6"],
    );
    let (weights, other) = (
        site.path("model/model.safetensors"),
        site.path("model/pytorch_model.bin"),
    );
    fs::rename(&weights, &other).unwrap();
    refuse(
        &site,
        eval,
        10,
        "E10",
        &["pytorch_model.bin", "torch.save did not write it"],
    );
    fs::rename(other, weights).unwrap();
    fs::create_dir(site.path("other")).unwrap();
    fs::write(site.path("other/optimizer.pt"), "x").unwrap();
    let resume = "--model model --data data/samples.json --output out --resume other";
    refuse(
        &site,
        resume,
        9,
        "E08",
        &["optimizer.pt shows that a Hugging Face trainer saved it"],
    );
    for name in ["tokenizer.json", "tokenizer.model"] {
        fs::remove_file(site.path("model").join(name)).unwrap_or(());
    }
    refuse(&site, eval, 10, "E10", &["openbmb/MiniCPM-V-2_6"]);
    let cog = Site::with_family("cogvlm-chat-hf");
    fs::remove_file(cog.path("model/tokenizer.model")).unwrap();
    refuse(&cog, eval, 10, "E10", &["lmsys/vicuna-7b-v1.5"]);
}

#[test]
fn all_unknown_flags_are_reported_at_once() {
    let site = Site::new();
    let said = say(
        &site,
        &[
            "--learning-rat",
            "1",
            "--modle",
            "x",
            "--frobnicate",
            "--data",
            "d",
        ],
    );
    assert_eq!(said.code, Some(2));
    for word in [
        "--learning-rat",
        "--modle",
        "--frobnicate",
        "did you mean --learning-rate?",
        "did you mean --model?",
    ] {
        assert!(said.stderr.contains(word), "{word}\n{}", said.stderr);
    }
}

#[test]
fn lost_output_is_a_failure_of_every_subcommand() {
    let site = Site::new();
    site.train("--max-steps 1");
    for line in [
        "doctor --json",
        "plan --model model --data data/samples.json --json",
        "data check data/samples.json --model model --json",
        "generate --model model --prompt hi --max-new-tokens 1 --json",
        "eval --model model --data data/samples.json --limit 1 --max-new-tokens 1",
        "ckpt ls out --json",
        "ckpt verify out/checkpoint-1",
        "watch out --once --json",
        "export out/checkpoint-1 --output exported",
        "explain E05",
        "--help",
    ] {
        let full = fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let output = launcher(&site)
            .args(line.split_whitespace())
            .stdout(full)
            .output()
            .unwrap();
        let screen = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(16), "{line}\n{screen}");
        assert!(screen.contains("error[E13]"), "{line}\n{screen}");
    }
}

#[test]
fn the_limit_of_file_sizes_is_named() {
    let site = Site::new();
    let program = env!("CARGO_BIN_EXE_tessera_test_launcher");
    let line = format!("ulimit -f 100; exec {program} export model --output copy");
    let output = Command::new("sh")
        .args(["-c", &line])
        .env("LC_ALL", "C")
        .current_dir(site.path(""))
        .output()
        .unwrap();
    let screen = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(16), "{screen}");
    assert!(screen.contains("ulimit -f unlimited"), "{screen}");
}

#[test]
fn a_private_directory_that_cannot_be_made_names_tmpdir() {
    let site = Site::new();
    let output = launcher(&site)
        .args("--model model --data data/samples.json --max-steps 1 --output out".split(' '))
        .env("TMPDIR", site.path("data/samples.json"))
        .output()
        .unwrap();
    let screen = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(16), "{screen}");
    assert!(
        screen.contains("set TMPDIR to a writable directory"),
        "{screen}"
    );
}

#[test]
fn hostile_sizes_are_refused_before_they_are_planned() {
    let site = Site::new();
    for (path, value) in [
        ("/vision_config/image_size", 2_147_483_647_u64),
        ("/num_hidden_layers", 1_000_000),
        ("/slice_config/scale_resolution", 1 << 40),
    ] {
        let file = site.path("model/config.json");
        let before = fs::read(&file).unwrap();
        edit(&file, |config| {
            *config.pointer_mut(path).unwrap() = json!(value);
        });
        let plan = "plan --model model/config.json --no-weights true";
        refuse(&site, plan, 10, "E10", &["it must be at most"]);
        fs::write(&file, before).unwrap();
    }
}
