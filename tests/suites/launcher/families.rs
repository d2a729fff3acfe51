//! Every model family, from the command line to the exported directory.

use crate::generate::{refuse, run};
use crate::site::{Site, golden, listing, losses, read_json, write_weights};
use crate::tuning::journey;
use kernels::DType;
use models::WeightSource;
use models::adapter::Adapter;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// For each family: pack, flags of an adapter run with modules trained in full, and a part of the path of every tensor
/// that it changes.
const FAMILIES: [(&str, &str, &[&str]); 9] = [
    (
        "cogvlm-chat-hf",
        "--lora-rank 4 --modules-to-save linear_proj",
        &["_expert_", "linear_proj"],
    ),
    (
        "cogagent-chat-hf",
        "--lora-rank 4 --lora-target-modules attn --modules-to-save linear_proj --text-without-cross",
        &["_expert_", "cross_attn", "linear_proj"],
    ),
    (
        "cogvlm2-llama3-chat-19B",
        "--lora-rank 4 --lora-target-modules attn,mlp --modules-to-save model.vision.conv",
        &["_expert_", "_mlp.", "vision.conv"],
    ),
    (
        "glm-4v-9b",
        "--lora-rank 4 --modules-to-save linear_proj,output_layer --train-on-turn-end",
        &[
            "self_attention.query_key_value",
            "linear_proj",
            "output_layer",
        ],
    ),
    (
        "glm-4.1v-9b-thinking",
        "--lora-rank 4 --modules-to-save merger",
        &["self_attn", "merger"],
    ),
    (
        "glm-ocr",
        "--lora-rank 4 --modules-to-save merger,q_norm",
        &["self_attn", "merger", "attn.q_norm"],
    ),
    ("glm-4.6v-flash", "--lora-rank 4", &["self_attn"]),
    (
        "minicpm-v-4_5",
        "--lora-rank 4 --modules-to-save resampler,q_norm",
        &["self_attn", "resampler", "self_attn.q_norm"],
    ),
    (
        "cogagent-9b-20241220",
        "--lora-rank 4",
        &["self_attention.query_key_value"],
    ),
];

macro_rules! families {
    ($($test:ident $index:literal)*) => {$(
        #[test]
        fn $test() {
            let (pack, flags, parts) = FAMILIES[$index];
            journey(&Site::with_family(pack), pack, flags, parts);
        }
    )*};
}

families! {
    cogvlm_with_adapters 0
    cogagent_with_adapters 1
    cogvlm2_with_adapters 2
    glm_4v_with_adapters 3
    glm_4_1v_with_adapters 4
    glm_ocr_with_adapters 5
    glm_4_6v_with_adapters 6
    minicpm_4_5_with_adapters 7
    cogagent_9b_with_adapters 8
}

/// A file that says nothing of tied heads, or that they are not tied, is trained, exported and resumed. The published
/// checkpoints keep head and embedding apart, and a tied head is refused by its field.
#[test]
fn heads_of_minicpm_are_not_tied() {
    for pack in ["minicpm-v-2_6", "minicpm-o-4_5"] {
        let site = Site::with_family(pack);
        let path = site.path("model/config.json");
        let set = |tied: &Value| {
            let mut config = read_json(&path);
            let fields = config.as_object_mut().unwrap();
            fields.remove("tie_word_embeddings");
            if !tied.is_null() {
                fields.insert("tie_word_embeddings".to_owned(), tied.clone());
            }
            fs::write(&path, config.to_string()).unwrap();
        };
        for (output, tied) in [("absent", json!(null)), ("apart", json!(false))] {
            set(&tied);
            let line = format!("--train embed_tokens,lm_head --output {output}");
            site.train(&format!("{line} --max-steps 1"));
            site.train(&format!("{line} --max-steps 2 --resume auto"));
            assert_eq!(losses(&site.path(output)).len(), 2, "{pack}");
            let exported = format!("exported-{output}");
            run(
                &site,
                &format!("export {output} --merge --output {exported}"),
            );
            let config = read_json(&site.path(&exported).join("config.json"));
            assert_eq!(config["tie_word_embeddings"], tied, "{pack}");
            let [head, embedding] = ["llm.lm_head", "llm.model.embed_tokens"].map(|prefix| {
                let [before, after] =
                    ["model", &exported].map(|at| tensors(&site.path(at), prefix));
                assert!(!before.is_empty() && before != after, "{pack}: {prefix}");
                after.into_values().next()
            });
            assert!(head != embedding, "{pack}");
        }
        set(&json!(true));
        let field = "tie_word_embeddings";
        assert!(site.refuse("", 10, "E10").contains(field), "{pack}");
        for line in [
            "generate --model model --prompt Hello",
            "eval --model model --data data/samples.json",
            "plan --model model --data data/samples.json",
            "synth --model-config model --output made",
        ] {
            refuse(&site, line, 10, "E10", &[field]);
        }
        assert!(!site.path("made").exists());
    }
}

/// Bytes of the tensors of a directory whose names begin with `prefix`, by name.
fn tensors(directory: &Path, prefix: &str) -> BTreeMap<String, Vec<u8>> {
    let source = WeightSource::open(directory).unwrap();
    let named = source.names().filter(|name| name.starts_with(prefix));
    named
        .map(|name| (name.to_owned(), source.read(name, DType::F32).unwrap()))
        .collect()
}

/// Dtype and shape of every tensor of a directory, by name.
fn described(directory: &Path) -> BTreeMap<String, (Dtype, Vec<usize>)> {
    let mut tensors = BTreeMap::new();
    for file in listing(directory) {
        if file.ends_with(".safetensors") {
            let bytes = fs::read(directory.join(file)).unwrap();
            let all = SafeTensors::deserialize(&bytes).unwrap();
            tensors.extend(all.iter().map(|(name, tensor)| {
                (name.to_owned(), (tensor.dtype(), tensor.shape().to_vec()))
            }));
        }
    }
    tensors
}

/// Divides the weights of `model` into files with an index, as large checkpoints are published.
fn divide(model: &Path) {
    let parts = model.with_file_name("parts");
    fs::create_dir(&parts).unwrap();
    let source = WeightSource::open(model).unwrap();
    let names: Vec<&str> = source.names().collect();
    write_weights(&source, &names, &parts, 100_000);
    fs::remove_file(model.join("model.safetensors")).unwrap();
    for file in listing(&parts) {
        fs::rename(parts.join(&file), model.join(&file)).unwrap();
    }
    let index = read_json(&model.join("model.safetensors.index.json"));
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), names.len());
    let files: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
    assert!(files.len() > 1, "{files:?}");
}

/// Adds a tensor to the only weight file of `model`.
fn add_tensor(model: &Path, name: &str) {
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let values = [0; 8];
    let added = TensorView::new(Dtype::F32, vec![2], &values).unwrap();
    let mut tensors: Vec<(String, TensorView<'_>)> = all
        .iter()
        .map(|(name, tensor)| (name.to_owned(), tensor))
        .collect();
    tensors.push((name.to_owned(), added));
    let written = safetensors::serialize(tensors, None).unwrap();
    fs::write(&path, written).unwrap();
}

/// `.ci/check-exports` loads such exports in transformers and peft.
#[test]
fn exports_have_the_base_models_tensors_and_settings_and_keep_those_that_no_model_has() {
    let further = &[
        "model.language_model.layers.2.",
        "model.language_model.layers.3.",
    ][..];
    let sound = &["apm.", "audio_projection_layer.", "tts."][..];
    // In one weight file, or in several with an index.
    for (pack, divided, prefixes, named) in [
        ("glm-ocr", false, further, "layers.2 16"),
        ("glm-ocr", true, further, "layers.2 16"),
        ("minicpm-o-4_5", false, sound, "tts "),
        ("minicpm-o-4_5", true, sound, "tts "),
        ("minicpm-v-4_5", true, &[], ""),
        ("glm-4.6v-flash", true, &[], ""),
    ] {
        let site = Site::with_family(pack);
        let model = site.path("model");
        if pack == "glm-ocr" {
            // A second layer after the decoder's last one.
            add_tensor(&model, "model.language_model.layers.3.enorm.weight");
        }
        if divided {
            divide(&model);
        }
        let screen = site
            .train("--zero 2 --nproc 2 --max-steps 1 --lora-rank 2")
            .screen;
        assert!(screen.contains(named), "{pack}\n{screen}");
        let line = "export out/checkpoint-1 --output merged --merge";
        let outcome = site.start_plain(line).finish();
        assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
        site.train("--zero 3 --nproc 2 --max-steps 1 --output full");
        for export in ["merged", "full/checkpoint-1"].map(|name| site.path(name)) {
            assert_eq!(
                described(&export),
                described(&model),
                "{}",
                export.display()
            );
            let settings = |directory: &Path| read_json(&directory.join("config.json"));
            assert_eq!(settings(&export), settings(&model), "{}", export.display());
            for prefix in prefixes {
                let [kept, found] = [&model, &export].map(|directory| tensors(directory, prefix));
                assert!(!kept.is_empty(), "{pack}: {prefix}");
                assert_eq!(found, kept, "{pack}: {}", export.display());
            }
        }
    }
}

#[test]
fn videos_of_frames_train() {
    let site = Site::with_family("glm-4.6v-flash");
    let pack = golden("glm-4.6v-flash").join("cases/video_four_frames");
    fs::create_dir(site.path("data/film")).unwrap();
    for frame in 0..4 {
        let name = format!("video_0_frame_{frame}.png");
        fs::copy(pack.join(&name), site.path("data/film").join(name)).unwrap();
    }
    let sample = json!({"messages": [
        {"role": "user", "content": "<video>What changes?"},
        {"role": "assistant", "content": "The circle."},
    ], "videos": ["film"]});
    fs::write(
        site.path("data/film.jsonl"),
        format!("{sample}\n").repeat(2),
    )
    .unwrap();
    site.train("--data data/film.jsonl --nproc 2 --zero 3 --max-steps 2");
    assert_eq!(losses(&site.path("out")).len(), 2);
    let older = golden("glm-4.1v-9b-thinking");
    let line = format!(
        "--data data/film.jsonl --max-steps 2 --output older --model {}",
        older.display()
    );
    site.train(&line);
    assert_eq!(losses(&site.path("older")).len(), 2);
    let other = Site::with_family("glm-ocr");
    fs::create_dir(other.path("data/film")).unwrap();
    for frame in 0..4 {
        let name = format!("video_0_frame_{frame}.png");
        fs::copy(pack.join(&name), other.path("data/film").join(name)).unwrap();
    }
    fs::copy(site.path("data/film.jsonl"), other.path("data/film.jsonl")).unwrap();
    let screen = other.refuse("--data data/film.jsonl", 3, "E06");
    assert!(screen.contains("video"), "{screen}");
}

#[test]
fn every_family_trains_in_full() {
    for (pack, ..) in FAMILIES {
        let site = Site::with_family(pack);
        let line = "--zero 3 --offload cpu --nproc 2 --text-without-cross --precision bf16";
        let screen = site.train(line).screen;
        assert!(screen.contains("(100 %)"), "{pack}\n{screen}");
        assert!(site.path("out/checkpoint-2/model.safetensors").is_file());
    }
}

#[test]
fn images_on_one_rank_and_none_on_the_other_do_not_hang() {
    for (pack, ..) in FAMILIES {
        let site = Site::with_family(pack);
        site.write_samples("samples", &site.samples()[..2]);
        site.train("--zero 3 --nproc 2 --max-steps 50 --save-strategy no --text-without-cross");
        let losses = losses(&site.path("out"));
        assert_eq!(losses.len(), 50, "{pack}");
        assert!(losses[49] < losses[0], "{pack}: {losses:?}");
    }
}

#[test]
fn cogagent_takes_samples_without_an_image_only_on_request() {
    let site = Site::with_family("cogagent-chat-hf");
    let screen = site.refuse("", 3, "E06");
    assert!(screen.contains("--text-without-cross"), "{screen}");
}

#[test]
fn adapters_of_projections_are_exported_for_peft() {
    let site = Site::with_family("cogvlm-chat-hf");
    let targets = r"model\.layers\.\d+\.self_attn\.language_expert_(query_key_value|dense)|model\.vision\.transformer\.layers\.\d+\.attention\.(query_key_value|dense)";
    let flags = format!(
        r"--lora-per-projection --lora-rank 3 --lora-alpha 1 --lora-target-modules {targets} --modules-to-save none --train model\.vision\.transformer\.layers\.1\.mlp --lr-scheduler-type sat_cosine --no-decay norm,.*\.bias --max-grad-norm 0.1 --learning-rate 1e-1"
    );
    let parts = ["language_expert_", "attention.", "layers.1.mlp"];
    journey(&site, "per projection", &flags, &parts);
    let config = read_json(&site.path("run/checkpoint-4/adapter_config.json"));
    assert_eq!(config["r"], 3);
    assert_eq!(config["rank_pattern"]["query_key_value"], 9);
    assert_eq!(
        config["alpha_pattern"]["language_expert_query_key_value"],
        3.0
    );
}

#[test]
fn rank_stabilized_adapters_of_projections_keep_their_scale_in_the_export() {
    let site = Site::with_family("cogvlm-chat-hf");
    let targets = "language_expert_query_key_value,language_expert_dense";
    site.train(&format!(
        "--use-rslora --lora-per-projection --lora-rank 4 --lora-alpha 2 --lora-target-modules {targets} --max-steps 1"
    ));
    let adapter = Adapter::open(&site.path("out/checkpoint-1")).unwrap();
    let lora = adapter.lora().unwrap();
    for (layer, rank) in [("query_key_value", 12), ("dense", 4)] {
        let path = format!("model.layers.0.self_attn.language_expert_{layer}");
        assert_eq!(lora.of(&path), (rank, 1.0), "2 / √4");
    }
}

#[test]
fn learned_prefixes_train_and_generate() {
    let site = Site::with_family("cogvlm-chat-hf");
    site.train("--ptuning-tokens 3 --learning-rate 1e-1 --nproc 2 --zero 2");
    let ask = |adapter: &str| {
        let line = format!(
            "eval --model model {adapter} --data data/samples.json --precision f32 --max-new-tokens 2"
        );
        run(&site, &line).json()["eval_loss"].as_f64().unwrap()
    };
    assert!(ask("--adapter out/checkpoint-2") < ask(""));
    let refused = site
        .start_plain("export out/checkpoint-2 --merge --output merged")
        .finish();
    assert_ne!(refused.code, Some(0), "{}", refused.screen);
    let next = "next      published models have no place for prefixes";
    assert!(refused.screen.contains(next), "{}", refused.screen);
    assert!(!site.path("merged").exists());
}

#[test]
fn a_preset_trains_like_its_flags() {
    let site = Site::with_family("cogvlm-chat-hf");
    fs::create_dir(site.path("captchas")).unwrap();
    for label in ["kQ7xZ", "0042", "abCD"] {
        let target = site.path("captchas").join(format!("{label}.png"));
        fs::copy(site.path("data/image_wide.png"), target).unwrap();
    }
    // The published script trains layers of the vision tower that this tiny model lacks.
    let screen = site
        .train(r"--preset cogvlm-captcha --data captchas --train model\.vision\.transformer\.layers\.1\.mlp --max-steps 2 --precision f32 --zero 1 --nproc 2 --model-max-length 100 --learning-rate 1e-5")
        .screen;
    for part in [
        " preset ",
        "finetune_cogvlm_lora.sh",
        "--lora-rank 10",
        "lr 1.0e-5",
    ] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
}
