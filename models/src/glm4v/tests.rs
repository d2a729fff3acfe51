//! What the golden packs do not cover.

use super::config::Glm4vConfig;
use super::{Glm4v, Glm4vProcessor};
use crate::VisionLanguageModel;
use crate::config::ConfigError;
use crate::data::{
    EncodeOptions, EncodedSample, IGNORED, PlaceholderStyle, RawSample, SampleError,
};
use crate::image::ImageFolder;
use crate::lora::{LoraConfig, LoraTargets};
use crate::options::ModelOptions;
use crate::processor::Processor;
use kernels::DType;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The published configuration.
fn published() -> Value {
    json!({
        "model_type": "chatglm", "architectures": ["ChatGLMModel"], "add_bias_linear": false,
        "add_qkv_bias": true, "apply_query_key_layer_scaling": true,
        "apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": true, "ffn_hidden_size": 13_696, "hidden_dropout": 0.0,
        "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1.562_5e-7,
        "multi_query_attention": true, "multi_query_group_num": 2, "num_attention_heads": 32,
        "num_layers": 40, "original_rope": true, "padded_vocab_size": 151_552,
        "post_layer_norm": true, "rmsnorm": true, "seq_length": 8192,
        "eos_token_id": [151_329, 151_336, 151_338], "boi_token_id": 151_339,
        "tie_word_embeddings": false,
        "vision_config": {
            "in_channels": 3, "image_size": 1120, "patch_size": 14, "hidden_size": 1792,
            "num_heads": 16, "num_hidden_layers": 63, "intermediate_size": 15_360,
            "num_positions": 6401, "layer_norm_eps": 1e-6, "hidden_act": "gelu",
            "dropout_prob": 0.0, "scaling_factor": 8
        }
    })
}

fn parse(value: &Value) -> Result<Glm4vConfig, ConfigError> {
    Glm4vConfig::parse(value.to_string().as_bytes(), Path::new("config.json"))
}

fn model(options: ModelOptions) -> Glm4v {
    Glm4v::new(parse(&published()).unwrap(), options).unwrap()
}

#[test]
fn the_published_model_has_its_published_sizes() {
    let model = model(ModelOptions::new(DType::BF16));
    let count = |prefix: &str| -> usize {
        let params = model.spec().params.iter();
        let of = params.filter(|p| p.name.starts_with(prefix));
        of.map(|p| p.shape.elems()).sum()
    };
    for (prefix, expected) in [
        ("transformer.encoder.layers.", 8_158_433_280),
        ("transformer.encoder.final_layernorm.", 4096),
        ("transformer.embedding.", 620_756_992),
        ("transformer.output_layer.", 620_756_992),
        ("transformer.vision.transformer.", 4_279_387_392),
        ("transformer.vision.patch_embedding.", 12_527_872),
        ("transformer.vision.conv.", 29_364_224),
        ("transformer.vision.linear_proj.", 185_081_856),
        ("transformer.vision.boi", 4096),
        ("transformer.vision.eoi", 4096),
        ("transformer.vision.", 4_506_369_536),
        ("", 13_906_320_896),
    ] {
        assert_eq!(count(prefix), expected, "{prefix}");
    }
    assert_eq!(model.config().features(), 1600);
}

#[test]
fn unsupported_configurations_are_refused() {
    for (pointer, value) in [
        ("/add_bias_linear", json!(true)),
        ("/rmsnorm", json!(false)),
        ("/apply_residual_connection_post_layernorm", json!(true)),
        ("/multi_query_group_num", json!(3)),
        ("/kv_channels", json!(130)),
        ("/hidden_size", json!(0)),
        ("/vision_config/num_positions", json!(6400)),
        ("/vision_config/scaling_factor", json!(0)),
        ("/vision_config/image_size", json!(1106)),
        ("/vision_config/hidden_act", json!("quick_gelu")),
        ("/model_type", json!("glm")),
    ] {
        let mut config = published();
        *config.pointer_mut(pointer).unwrap() = value;
        assert!(parse(&config).is_err(), "{pointer}");
    }
    let mut config = published();
    let vision = config["vision_config"].as_object_mut().unwrap();
    vision.remove("scaling_factor");
    let error = format!("{:?}", parse(&config).unwrap_err());
    assert!(error.contains("scaling_factor"), "{error}");
    for field in ["pre_seq_len", "quantization_bit"] {
        let with = |value| {
            let mut config = published();
            config[field] = value;
            parse(&config)
        };
        let error = with(json!(8)).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
        assert_eq!(with(json!(0)).unwrap(), with(json!(null)).unwrap());
    }
}

#[test]
fn rope_theta_scales_with_rope_ratio() {
    let mut config = published();
    config["rope_ratio"] = json!(500);
    assert!((parse(&config).unwrap().language.rope_theta - 5e6).abs() < 1.0);
    assert!((parse(&published()).unwrap().language.rope_theta - 1e4).abs() < 1e-9);
}

#[test]
fn the_default_adapters_are_those_of_the_decoder() {
    let mut options = ModelOptions::new(DType::F32);
    (options.tune_vision, options.tune_llm) = (false, false);
    options.lora = Some(LoraConfig {
        lora_rank: 8,
        lora_alpha: 32.0,
        lora_dropout: 0.0,
        others: std::collections::BTreeMap::new(),
        targets: LoraTargets::parse(crate::Family::Glm4v.default_lora_targets()),
        layers: None,
        per_projection: false,
        use_rslora: false,
        modules_to_save: Vec::new(),
    });
    let model = model(options);
    let trained = model.spec().params.iter().filter(|p| p.trainable);
    let names: Vec<&str> = trained.map(|p| p.name.as_str()).collect();
    assert_eq!(names.len(), 80);
    assert_eq!(
        names[0],
        "base_model.model.transformer.encoder.layers.0.self_attention.query_key_value.lora_A.weight"
    );
}

fn pack() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/glm-4v-9b")
}

fn processor() -> Glm4vProcessor {
    Glm4vProcessor::load(&pack()).unwrap()
}

fn sample(images: &[&str], turns: &[(&str, &str)]) -> RawSample {
    let turn = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    let turns: Vec<Value> = turns.iter().map(turn).collect();
    RawSample {
        images: images
            .iter()
            .map(|path| ("<image>".to_owned(), PathBuf::from(path)))
            .collect(),
        ..serde_json::from_value(json!({"conversations": turns})).unwrap()
    }
}

const IMAGE: &str = "cases/square_single/image_0.png";

fn ask(images: &[&str], question: &str) -> RawSample {
    sample(images, &[("user", question), ("assistant", "Yes.")])
}

fn encode_with(sample: &RawSample, options: &EncodeOptions) -> Result<EncodedSample, SampleError> {
    let images = ImageFolder::new(pack());
    let result = processor().encode(sample, &images, options);
    let measured = processor().measure(sample, &images, options);
    match (&result, measured) {
        (Ok(sample), Ok(size)) => {
            assert_eq!(size.tokens, sample.input_ids.len());
            assert_eq!(size.supervised, sample.supervised_tokens());
            assert_eq!((size.slices, size.patches), (1, sample.patches()));
        }
        (result, measured) => assert!(result.is_err() && measured.is_err()),
    }
    result
}

fn encode(sample: &RawSample) -> Result<EncodedSample, SampleError> {
    encode_with(sample, &EncodeOptions::default())
}

#[test]
fn special_tokens_in_the_text_are_plain_text() {
    let id = |text: &str| processor().tokenizer().id(text).unwrap();
    let encoded = encode(&ask(&[], "<|assistant|> <|end_of_image|>")).unwrap();
    let count = |id: i32| encoded.input_ids.iter().filter(|i| **i == id).count();
    assert_eq!(
        (count(id("<|assistant|>")), count(id("<|end_of_image|>"))),
        (1, 1)
    );
}

#[test]
fn the_image_marker_is_removed_from_the_text() {
    let marked = encode(&ask(&[IMAGE], "<image>\nWhy?")).unwrap();
    assert_eq!(encode(&ask(&[IMAGE], "Why?")).unwrap(), marked);
    // Without an image of its own, a sample says what it says.
    assert_ne!(
        encode(&ask(&[], "<image>Why?")).unwrap().input_ids,
        marked.input_ids
    );
}

#[test]
fn a_sample_has_one_image_at_most() {
    let error = encode(&ask(&[IMAGE, IMAGE], "Why?")).unwrap_err();
    assert!(matches!(
        error,
        SampleError::TooManyImages { images: 2, .. }
    ));
    for (turns, turn) in [
        (&[("user", "<image>a<image>"), ("assistant", "b")][..], 0),
        (&[("user", "a"), ("assistant", "<image>")], 1),
        (
            &[
                ("user", "a"),
                ("assistant", "b"),
                ("user", "<image>"),
                ("assistant", "c"),
            ],
            2,
        ),
    ] {
        let error = encode(&sample(&[IMAGE], turns)).unwrap_err();
        let expected = match turn {
            2 => matches!(error, SampleError::LaterImage { turn: 2 }),
            1 => matches!(error, SampleError::MisplacedImage { turn: 1, .. }),
            _ => matches!(
                error,
                SampleError::MorePlaceholdersThanImages {
                    placeholders: 2,
                    ..
                }
            ),
        };
        assert!(expected, "{error}");
    }
}

#[test]
fn an_agents_last_question_may_begin_with_the_image() {
    let mut agent = processor();
    agent.later_image = true;
    let encode = |question: &str| {
        let roles = ["user", "assistant", "user", "assistant"];
        let turns: Vec<_> = roles.into_iter().zip(["q", "a", question, "b"]).collect();
        let images = ImageFolder::new(pack());
        agent.encode(
            &sample(&[IMAGE], &turns),
            &images,
            &EncodeOptions::default(),
        )
    };
    assert_eq!(encode("<image>look").unwrap(), encode("look").unwrap());
    let later = encode("look <image> here").unwrap_err();
    assert!(matches!(later, SampleError::LaterImage { turn: 2 }));
}

#[test]
fn system_observation_and_metadata_are_written_as_published() {
    let mut raw = sample(
        &[IMAGE],
        &[
            ("system", "s"),
            ("user", "<image>q"),
            ("assistant", "{}"),
            ("observation", "3"),
            ("assistant", "a"),
        ],
    );
    raw.conversations[2].metadata = "f".to_owned();
    let options = EncodeOptions::default();
    let images = ImageFolder::new(pack());
    let text = processor().render(&raw, &images, &options).unwrap();
    assert_eq!(
        text,
        "[gMASK]<sop><|system|>\ns<|user|>\n<|begin_of_image|><|endoftext|><|end_of_image|>q<|assistant|>f\n{}<|observation|>\n3<|assistant|>\na<|user|>"
    );
    let supervised_text = |raw: &RawSample| {
        let labels = encode(raw).unwrap().labels;
        let supervised_text: Vec<i32> = labels
            .into_iter()
            .filter(|label| *label != IGNORED)
            .collect();
        processor()
            .tokenizer()
            .decode_verbatim(&supervised_text)
            .unwrap()
    };
    assert_eq!(supervised_text(&raw), "<|assistant|>f\n{}<|assistant|>\na");
    let whole = encode(&raw).unwrap();
    let (start, _) = whole.image_bounds[0];
    let before = processor()
        .tokenizer()
        .decode_verbatim(&whole.input_ids[..start]);
    assert!(before.unwrap().ends_with("<|user|>\n"));
    raw.conversations[2].unsupervised = true;
    assert_eq!(supervised_text(&raw), "<|assistant|>\na");
}

#[test]
fn the_end_of_an_answer_is_supervised_on_request() {
    let turns = [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ];
    let raw = sample(&[], &turns);
    let options = EncodeOptions {
        train_on_turn_end: true,
        ..EncodeOptions::default()
    };
    let (plain, ended) = (encode(&raw).unwrap(), encode_with(&raw, &options).unwrap());
    assert_eq!(plain.input_ids, ended.input_ids);
    let more: Vec<usize> = (0..plain.labels.len())
        .filter(|&i| plain.labels[i] != ended.labels[i])
        .collect();
    assert_eq!(more.len(), 2);
    let user = processor().turn_end();
    for i in more {
        assert_eq!((plain.labels[i], ended.labels[i]), (IGNORED, user));
    }
}

#[test]
fn truncation_inside_an_image_is_refused() {
    let raw = ask(&[IMAGE], "Why?");
    let (_, end) = encode(&raw).unwrap().image_bounds[0];
    let cut = |model_max_length| {
        let options = EncodeOptions {
            model_max_length,
            ..EncodeOptions::default()
        };
        encode_with(&raw, &options)
    };
    for limit in [0, 3, end - 1] {
        let error = cut(limit).unwrap_err();
        assert!(matches!(error, SampleError::UnpairedImageMarkers { .. }));
    }
    let error = cut(end).unwrap_err();
    assert!(matches!(error, SampleError::NoSupervisedToken { .. }));
}

#[test]
fn an_answer_is_decoded_without_the_leading_line_break() {
    let raw = ask(&[], "Why?");
    let whole = encode(&raw).unwrap();
    let (images, options) = (ImageFolder::new(pack()), EncodeOptions::default());
    let prompt = |style| {
        let prompt = processor().encode_prompt(&raw, &images, &options, style);
        prompt.unwrap()
    };
    let trained = prompt(PlaceholderStyle::Training);
    assert!(whole.input_ids.starts_with(&trained.input_ids));
    assert_eq!(trained.slices, whole.slices);
    let answer = &whole.input_ids[trained.input_ids.len()..whole.input_ids.len() - 1];
    assert_eq!(processor().decode(answer).unwrap(), "Yes.");
    let bare = prompt(PlaceholderStyle::Inference);
    assert!(bare.slices.is_empty() && bare.image_bounds.is_empty());
}
