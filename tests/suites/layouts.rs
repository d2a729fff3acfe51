//! Checkpoints whose files are laid out otherwise than the packs': other versions of transformers, other trainers, several
//! weight files. Model and samples are the same, value for value.

use super::{all_ok, copy_of};
use models::{WeightSource, open_processor};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;
use tests::golden::{Pack, packs_of};
use tests::world::{Layout, run_case};

type Change = fn(&Path);

/// Pack, one of its cases, and layouts, each a list of changes of the directory.
const LAYOUTS: [(&str, &str, &[&[Change]]); 3] = [
    (
        "glm-ocr",
        "square_text",
        &[
            &[tokens_in_the_vocabulary, older_config, divided],
            &[tokens_in_the_config, other_merges, processor_config],
            &[template_in_the_config, more_layers, divided],
            &[no_further_layer, class_defaults],
        ],
    ),
    (
        "glm-4.6v-flash",
        "thought",
        &[
            &[tokens_in_the_vocabulary, older_config, divided],
            &[tokens_in_the_config, other_merges, processor_config],
            &[template_in_the_config, flat_config],
            &[other_type, class_defaults],
        ],
    ),
    (
        "minicpm-o-4_5",
        "single",
        &[
            &[tokens_in_the_config, other_merges, version_as_number],
            &[template_in_a_file, newer_config, divided],
            &[template_by_name, tokens_with_flags, no_sound],
            &[template_of_the_processor, more_sound, divided],
        ],
    ),
];

#[test]
fn checkpoints_in_other_layouts_are_the_same_models() {
    for (name, case, layouts) in LAYOUTS {
        for (index, changes) in layouts.iter().enumerate() {
            let copy = copy_of(name, case);
            for other in ["config.flat.json", "config.glm46v.json"] {
                drop(fs::remove_file(copy.path().join(other)));
            }
            changes.iter().for_each(|change| change(copy.path()));
            let what = format!("{name}, layout {index}");
            let pack = Pack::read(copy.path()).unwrap();
            let processor = open_processor(copy.path()).unwrap();
            let (case, family) = (pack.case(case).unwrap(), packs_of(pack.family));
            for (title, table) in family.tables(&pack, &*processor).unwrap() {
                all_ok(&format!("{what}: {title}"), &table);
            }
            let samples = family.samples(&pack, case, &*processor).unwrap();
            let inputs = family.compare_inputs(&pack, case, &*processor, &samples);
            all_ok(&what, &inputs.unwrap());
            let run = run_case(&pack, &samples, Layout::SINGLE).unwrap();
            all_ok(&what, &family.compare_run(case, &samples, &run).unwrap());
        }
    }
}

fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Map<String, Value>)) {
    let path = dir.join(file);
    let mut content: Map<String, Value> =
        serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut content);
    fs::write(path, serde_json::to_vec(&content).unwrap()).unwrap();
}

/// Takes the keys `keys` out of `from`.
fn moved(from: &mut Map<String, Value>, keys: &[&str]) -> Map<String, Value> {
    let value = |key: &&str| Some(((*key).to_owned(), from.shift_remove(*key)?));
    keys.iter().filter_map(value).collect()
}

/// A directory of a fast tokenizer alone.
fn tokens_in_the_vocabulary(dir: &Path) {
    fs::remove_file(dir.join("tokenizer_config.json")).unwrap();
}

/// As slow tokenizers save it: the vocabulary lacks the added tokens.
fn tokens_in_the_config(dir: &Path) {
    edit(dir, "tokenizer.json", |file| {
        file.insert("added_tokens".into(), json!([]));
    });
}

/// Merges as texts become pairs, and pairs become texts.
fn other_merges(dir: &Path) {
    edit(dir, "tokenizer.json", |file| {
        for merge in file["model"]["merges"].as_array_mut().unwrap() {
            *merge = match &*merge {
                Value::String(text) => json!(text.split(' ').collect::<Vec<_>>()),
                pair => json!(format!(
                    "{} {}",
                    pair[0].as_str().unwrap(),
                    pair[1].as_str().unwrap()
                )),
            };
        }
    });
}

/// Role tokens as objects.
fn tokens_with_flags(dir: &Path) {
    edit(dir, "tokenizer_config.json", |file| {
        for role in ["bos_token", "eos_token", "pad_token", "unk_token"] {
            if let Some(text) = file.get(role).cloned() {
                let token =
                    json!({"content": text, "lstrip": false, "normalized": false, "special": true});
                file.insert(role.into(), token);
            }
        }
    });
}

/// The template as transformers 4 saves it.
fn template_in_the_config(dir: &Path) {
    let path = dir.join("chat_template.jinja");
    let template = fs::read_to_string(&path).unwrap();
    fs::remove_file(path).unwrap();
    edit(dir, "tokenizer_config.json", |file| {
        file.insert("chat_template".into(), template.into());
    });
}

fn template_of(dir: &Path) -> String {
    let mut template = None;
    edit(dir, "tokenizer_config.json", |file| {
        template = file.shift_remove("chat_template");
    });
    template.unwrap().as_str().unwrap().to_owned()
}

/// The template as transformers 5 saves it.
fn template_in_a_file(dir: &Path) {
    fs::write(dir.join("chat_template.jinja"), template_of(dir)).unwrap();
}

/// The template as a processor of transformers 4 saves it.
fn template_of_the_processor(dir: &Path) {
    let file = json!({"chat_template": template_of(dir)}).to_string();
    fs::write(dir.join("chat_template.json"), file).unwrap();
}

fn template_by_name(dir: &Path) {
    let own = template_of(dir);
    edit(dir, "tokenizer_config.json", |file| {
        let all =
            json!([{"name": "tool_use", "template": "x"}, {"name": "default", "template": own}]);
        file.insert("chat_template".into(), all);
    });
}

/// Image settings as transformers 5 saves them.
fn processor_config(dir: &Path) {
    let mut settings = Map::new();
    for (name, key) in [
        ("preprocessor_config.json", "image_processor"),
        ("video_preprocessor_config.json", "video_processor"),
    ] {
        let path = dir.join(name);
        if let Ok(bytes) = fs::read(&path) {
            settings.insert(key.into(), serde_json::from_slice(&bytes).unwrap());
            fs::remove_file(path).unwrap();
        }
    }
    let settings = serde_json::to_vec(&settings).unwrap();
    fs::write(dir.join("processor_config.json"), settings).unwrap();
}

/// Names of fields of transformers 4: `torch_dtype`, `rope_scaling`, and the other settings of rotary positions flat.
fn older_config(dir: &Path) {
    edit(dir, "config.json", |file| {
        let text = file["text_config"].as_object_mut().unwrap();
        let mut rope = text.shift_remove("rope_parameters").unwrap();
        let rope = rope.as_object_mut().unwrap();
        text.extend(moved(rope, &["rope_theta", "partial_rotary_factor"]));
        let kind = rope.shift_remove("rope_type").unwrap();
        rope.insert("type".into(), kind);
        text.insert("rope_scaling".into(), rope.clone().into());
        text.shift_remove("dtype");
        let dtype = file.shift_remove("dtype").unwrap();
        file.insert("torch_dtype".into(), dtype);
    });
}

/// All fields of the language model at the top.
fn flat_config(dir: &Path) {
    edit(dir, "config.json", |file| {
        let Some(Value::Object(mut text)) = file.shift_remove("text_config") else {
            panic!("a nested file");
        };
        text.shift_remove("model_type");
        file.extend(text);
    });
}

/// The language model of a flat file as transformers 5 nests it.
fn newer_config(dir: &Path) {
    edit(dir, "config.json", |file| {
        let mut text = moved(
            file,
            &[
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "hidden_act",
                "rms_norm_eps",
                "attention_bias",
                "attention_dropout",
                "tie_word_embeddings",
            ],
        );
        let theta = file.shift_remove("rope_theta").unwrap();
        file.shift_remove("rope_scaling");
        let rope = json!({"rope_type": "default", "rope_theta": theta});
        text.insert("rope_parameters".into(), rope);
        text.insert("dtype".into(), "bfloat16".into());
        file.shift_remove("torch_dtype");
        file.insert("dtype".into(), "bfloat16".into());
        file.insert("text_config".into(), text.into());
    });
}

/// Without fields whose values are those of the published class.
fn class_defaults(dir: &Path) {
    edit(dir, "config.json", |file| {
        let text = file["text_config"].as_object_mut().unwrap();
        // Biases are the class's, whatever the file says.
        text.insert(
            "attention_bias".into(),
            json!(!text["attention_bias"].as_bool().unwrap()),
        );
        moved(text, &["rms_norm_eps", "hidden_act", "attention_dropout"]);
        let tower = file["vision_config"].as_object_mut().unwrap();
        let defaults = [
            "rms_norm_eps",
            "patch_size",
            "in_channels",
            "hidden_act",
            "spatial_merge_size",
            "temporal_patch_size",
            "attention_bias",
        ];
        moved(tower, &defaults);
        moved(file, &["tie_word_embeddings", "image_token_id"]);
    });
}

/// The model type that the library also gives this network.
fn other_type(dir: &Path) {
    edit(dir, "config.json", |file| {
        file.insert("model_type".into(), "glm46v".into());
        let class = json!(["Glm46VForConditionalGeneration"]);
        file.insert("architectures".into(), class);
    });
}

fn version_as_number(dir: &Path) {
    edit(dir, "config.json", |file| {
        file.insert("version".into(), json!(4.5));
    });
}

/// Writes the tensors that `change` makes of the directory's.
fn rewrite(dir: &Path, change: impl FnOnce(&mut Vec<(String, TensorView<'_>)>)) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> = all.iter().map(|(name, t)| (name.to_owned(), t)).collect();
    change(&mut tensors);
    fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
}

/// The name of a tensor of the layer after the decoder's two.
const FURTHER: &str = "model.language_model.layers.2.";

/// Two layers after the last one.
fn more_layers(dir: &Path) {
    rewrite(dir, |tensors| {
        let next = |(name, tensor): &(String, _)| {
            let part = name.strip_prefix(FURTHER)?;
            let name = format!("model.language_model.layers.3.{part}");
            Some((name, TensorView::clone(tensor)))
        };
        let more: Vec<_> = tensors.iter().filter_map(next).collect();
        assert!(!more.is_empty());
        tensors.extend(more);
    });
    edit(dir, "config.json", |file| {
        file["text_config"]["num_nextn_predict_layers"] = json!(2);
    });
}

fn no_further_layer(dir: &Path) {
    rewrite(dir, |tensors| {
        tensors.retain(|(name, _)| !name.starts_with(FURTHER));
    });
    edit(dir, "config.json", |file| {
        file["text_config"]["num_nextn_predict_layers"] = json!(0);
    });
}

const SOUND: [&str; 3] = ["apm.", "audio_projection_layer.", "tts."];

/// A checkpoint of vision and text alone.
fn no_sound(dir: &Path) {
    rewrite(dir, |tensors| {
        let is_sound = |name: &str| SOUND.iter().any(|prefix| name.starts_with(prefix));
        tensors.retain(|(name, _)| !is_sound(name));
    });
    edit(dir, "config.json", |file| {
        moved(file, &["audio_config", "tts_config"]);
        for part in ["init_audio", "init_tts"] {
            file.insert(part.into(), json!(false));
        }
    });
}

/// Further tensors of the sound's parts, in other dtypes.
fn more_sound(dir: &Path) {
    rewrite(dir, |tensors| {
        for (name, dtype, elems) in [
            ("apm.layers.7.self_attn.out_proj.weight", Dtype::F32, 2),
            ("tts.model.layers.3.mlp.gate_proj.weight", Dtype::F16, 4),
            ("tts.projector_spk.linear1.bias", Dtype::I64, 1),
        ] {
            let tensor = TensorView::new(dtype, vec![elems], &[0; 8]).unwrap();
            tensors.push((name.to_owned(), tensor));
        }
    });
}

/// Three weight files with an index. What is no part of the model is in a file of its own.
fn divided(dir: &Path) {
    let source = WeightSource::open(dir).unwrap();
    let mut map = Map::new();
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut parts: [Vec<(&str, TensorView<'_>)>; 3] = Default::default();
    for (index, name) in source.names().enumerate() {
        let layer = name.strip_prefix("model.language_model.layers.");
        let is_further = layer.is_some_and(|layer| !layer.starts_with(['0', '1']));
        let is_other = is_further || SOUND.iter().any(|prefix| name.starts_with(prefix));
        let part = if is_other { 2 } else { index % 2 };
        parts[part].push((name, all.tensor(name).unwrap()));
        let file = format!("model-{:05}-of-00003.safetensors", part + 1);
        map.insert(name.to_owned(), file.into());
    }
    for (index, part) in parts.into_iter().enumerate() {
        let file = format!("model-{:05}-of-00003.safetensors", index + 1);
        fs::write(dir.join(file), safetensors::serialize(part, None).unwrap()).unwrap();
    }
    fs::remove_file(&path).unwrap();
    let index = json!({"metadata": {"total_size": bytes.len()}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
