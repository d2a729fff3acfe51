//! Real sizes on the meta device, and rules that no golden pack shows.

use super::config::{CogConfig, Edition};
use super::model::CogVlm;
use crate::lora::{LoraConfig, LoraTargets};
use crate::options::ModelOptions;
use crate::{Tower, VisionLanguageModel};
use kernels::DType;
use serde_json::{Value, json};
use std::path::Path;

/// The fields of a published `config.json`.
pub(super) fn real_config(edition: Edition) -> Value {
    let vision = |image: usize| {
        json!({
            "dropout_prob": 0.0, "hidden_act": "gelu", "hidden_size": 1792, "image_size": image,
            "in_channels": 3, "intermediate_size": 15360, "layer_norm_eps": 1e-6, "num_heads": 16,
            "num_hidden_layers": 63, "num_positions": (image / 14).pow(2) + 1, "patch_size": 14
        })
    };
    let mut config = json!({
        "architectures": ["CogVLMForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "rms_norm_eps": 1e-5, "template_version": "chat",
        "tie_word_embeddings": false, "vocab_size": 32000, "vision_config": vision(490)
    });
    let mut set = |fields: Value| {
        let fields = fields.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(fields);
    };
    match edition {
        Edition::CogVlm => {}
        Edition::CogVlm2 => set(json!({
            "num_multi_query_heads": 8, "intermediate_size": 14336, "vocab_size": 128_256,
            "bos_token_id": 128_000, "eos_token_id": 128_001, "pad_token_id": 128_002,
            "max_position_embeddings": 8192, "vision_config": vision(1344)
        })),
        Edition::CogAgent => set(json!({
            "architectures": ["CogAgentForCausalLM"], "vision_config": vision(224),
            "cross_hidden_size": 1024, "cross_compute_hidden_size": 1024, "cross_image_size": 1120
        })),
    }
    config
}

fn real(edition: Edition, options: ModelOptions) -> CogVlm {
    let text = real_config(edition).to_string();
    let config = CogConfig::parse(text.as_bytes(), Path::new("config.json")).unwrap();
    CogVlm::new(config, options).unwrap()
}

/// Elements of the parameters whose name the rule takes.
fn count(model: &CogVlm, rule: impl Fn(&str) -> bool) -> usize {
    let params = model.spec().params.iter().filter(|p| rule(&p.name));
    params.map(|p| p.shape.elems()).sum()
}

/// Whole, language part of the layers, vision experts, ViT, projector.
fn sizes(edition: Edition) -> [usize; 5] {
    let model = real(edition, ModelOptions::new(DType::BF16));
    let vit = |n: &str| {
        n.starts_with("model.vision.transformer.") || n.starts_with("model.vision.patch_embedding.")
    };
    [
        count(&model, |_| true),
        count(&model, |n| n.contains(".language_")),
        count(&model, |n| n.contains(".vision_")),
        count(&model, vit),
        count(&model, |n| n.starts_with("model.vision.linear_proj.")),
    ]
}

#[test]
fn published_sizes_have_the_published_parameter_counts() {
    assert_eq!(
        sizes(Edition::CogVlm),
        [
            17_639_685_376,
            6_476_005_376,
            6_476_005_376,
            4_282_641_664,
            142_614_528
        ]
    );
    assert_eq!(
        sizes(Edition::CogVlm2),
        [
            19_503_105_280,
            6_979_321_856,
            6_979_518_464,
            4_296_961_536,
            183_508_992
        ]
    );
    assert_eq!(
        sizes(Edition::CogAgent),
        [
            18_291_033_280,
            6_476_005_376,
            6_476_005_376,
            4_280_905_216,
            142_614_528
        ]
    );
}

#[test]
fn the_smaller_parts_have_the_published_parameter_counts() {
    let options = || ModelOptions::new(DType::BF16);
    let vlm = real(Edition::CogVlm, options());
    let norms = |n: &str| n.ends_with("layernorm.weight") || n == "model.norm.weight";
    assert_eq!(
        count(&vlm, |n| n == "model.embed_tokens.weight"),
        131_072_000
    );
    assert_eq!(count(&vlm, |n| n == "lm_head.weight"), 131_072_000);
    let llm_norm = |n: &str| norms(n) && !n.contains("vision.");
    assert_eq!(count(&vlm, llm_norm), 266_240);
    let frame = |n: &str| n.ends_with("boi") || n.ends_with("eoi");
    assert_eq!(count(&vlm, frame), 8192);
    let two = real(Edition::CogVlm2, options());
    assert_eq!(
        count(&two, |n| frame(n) || n.contains("vision.conv")),
        12_855_040
    );
    let agent = real(Edition::CogAgent, options());
    let cross = |n: &str| n.contains("cross_att");
    assert_eq!(count(&agent, cross), 335_675_392);
    assert_eq!(
        count(&agent, |n| n.starts_with("model.cross_vision.")),
        316_950_208
    );
    assert_eq!(
        count(&agent, |n| frame(n) || n == "model.vision.pos_embed"),
        466_944
    );
    assert_eq!(vlm.spec().params.len() + 32, 1187);
    assert_eq!(two.spec().params.len() + 32, 1221);
}

fn lora(targets: &str, lora_rank: usize, per_projection: bool) -> ModelOptions {
    let mut options = ModelOptions::new(DType::BF16);
    (options.tune_vision, options.tune_llm) = (false, false);
    options.lora = Some(LoraConfig {
        lora_rank,
        lora_alpha: 1.0,
        lora_dropout: 0.0,
        others: Default::default(),
        targets: LoraTargets::parse(targets),
        layers: None,
        per_projection,
        use_rslora: false,
        modules_to_save: Vec::new(),
    });
    options
}

fn trainable(model: &CogVlm) -> usize {
    let params = model.spec().params.iter().filter(|p| p.trainable);
    params.map(|p| p.shape.elems()).sum()
}

#[test]
fn adapters_have_the_parameter_counts_of_the_published_recipes() {
    let recipe = crate::Family::CogVlm2.default_lora_targets();
    assert_eq!(
        trainable(&real(Edition::CogVlm2, lora(recipe, 8, false))),
        2_621_440
    );
    let scripts = r"model\.layers\.\d+\.self_attn\.language_expert_(query_key_value|dense)";
    let language = real(Edition::CogVlm, lora(scripts, 10, true));
    assert_eq!(trainable(&language), 10_485_760);
    let tower = r"model\.vision\.transformer\.layers\.\d+\.attention\.(query_key_value|dense)";
    assert_eq!(
        trainable(&real(Edition::CogVlm, lora(tower, 10, true))),
        9_031_680
    );
    let cross = r"model\.layers\.\d+\.cross_attn\.(query|key_value|dense)";
    assert_eq!(
        trainable(&real(Edition::CogAgent, lora(cross, 50, true))),
        22_937_600
    );
    let words = real(Edition::CogAgent, lora("cross_attn.query,attn", 2, false));
    let adapters = words.spec().params.iter().filter(|p| p.trainable).count();
    assert_eq!(adapters, 7 * 2 * 32);
}

#[test]
fn parts_of_the_model_follow_the_switches() {
    let mut options = ModelOptions::new(DType::BF16);
    options.tune_llm = false;
    let model = real(Edition::CogAgent, options);
    let trains =
        |name: &str| model.spec().params[model.spec().find(name).unwrap().index()].trainable;
    assert!(trains("model.vision.transformer.layers.3.mlp.fc1.weight"));
    assert!(trains("model.cross_vision.vit.model.blocks.23.norm1.bias"));
    assert!(trains("model.cross_vision.pos_embed") && trains("model.vision.boi"));
    assert!(!trains("model.layers.0.cross_attn.query.weight") && !trains("lm_head.weight"));
    let units = &model.spec().units;
    let unit = |name: &str| {
        let index = units.iter().position(|u| u.name == name).unwrap();
        model.tower(engine::UnitId(index as u32))
    };
    assert_eq!(unit("model.vision.patch_embedding"), Tower::Vision);
    assert_eq!(unit("model.vision.linear_proj"), Tower::Resampler);
    assert_eq!(unit("model.cross_vision.pos_embed"), Tower::Resampler);
    assert_eq!(unit("model.layers.31"), Tower::Language);
}

#[test]
fn learned_prefixes_are_always_trainable_and_not_in_the_base() {
    let mut options = ModelOptions::new(DType::BF16);
    (
        options.tune_vision,
        options.tune_llm,
        options.ptuning_tokens,
    ) = (false, false, 8);
    options.freeze = Some(crate::selection::Selection::parse("model.vision").unwrap());
    let model = real(Edition::CogVlm2, options);
    assert_eq!(trainable(&model), 32 * 2 * 8 * 8 * 128);
    let name = "model.layers.5.self_attn.prefix";
    assert!(crate::params::is_added(name) && model.spec().find(name).is_some());
    let mut values = [0.0; 1000];
    model.init(model.spec().find(name).unwrap(), 3, 0..1000, &mut values);
    let variance = values.iter().map(|x| x * x).sum::<f32>() / 1000.0;
    assert!((variance.sqrt() - 0.01).abs() < 1e-3, "{variance}");
}
