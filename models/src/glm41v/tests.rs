//! What the golden packs do not cover.

use super::config::Glm41vConfig;
use super::{Glm41v, Glm41vProcessor};
use crate::config::ConfigError;
use crate::data::{
    EncodeOptions, EncodedSample, IGNORED, PlaceholderStyle, RawSample, SampleError,
};
use crate::image::{Decoded, ImageError, ImageSource, RgbImage};
use crate::options::ModelOptions;
use crate::processor::{Normalization, Processor, ProcessorError};
use crate::text::ChatTemplate;
use crate::{Tower, VisionLanguageModel};
use kernels::DType;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The published configuration.
fn published() -> Value {
    json!({
        "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v",
        "image_token_id": 151_343, "tie_word_embeddings": false,
        "eos_token_id": [151_329, 151_336, 151_338, 151_348],
        "text_config": {
            "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
            "num_key_value_heads": 2, "intermediate_size": 13_696, "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "attention_bias": true,
            "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
            "vocab_size": 151_552, "hidden_act": "silu"
        },
        "vision_config": {
            "hidden_size": 1536, "depth": 24, "num_heads": 12, "intermediate_size": 13_696,
            "out_hidden_size": 4096, "rms_norm_eps": 1e-5, "image_size": 336, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "attention_bias": false,
            "hidden_act": "silu", "in_channels": 3
        }
    })
}

fn parse(value: &Value) -> Result<Glm41vConfig, ConfigError> {
    Glm41vConfig::parse(value.to_string().as_bytes(), Path::new("config.json"))
}

fn model(config: &Value, options: ModelOptions) -> Glm41v {
    let normalization = Normalization::new([0.5; 3], [0.5; 3]).unwrap();
    Glm41v::new(parse(config).unwrap(), normalization, options).unwrap()
}

#[test]
fn the_published_model_has_its_published_sizes() {
    let model = model(&published(), ModelOptions::new(DType::BF16));
    let params = &model.spec().params;
    let count = |prefix: &str| -> usize {
        let of = params.iter().filter(|p| p.name.starts_with(prefix));
        of.map(|p| p.shape.elems()).sum()
    };
    let visual = count("model.visual.");
    let parts = [
        ("model.language_model.layers.", 8_158_760_960),
        ("model.language_model.embed_tokens.", 620_756_992),
        ("lm_head.", 620_756_992),
        ("model.language_model.norm.", 4096),
        ("model.visual.blocks.", 679_550_976),
        ("model.visual.merger.", 185_081_856),
        ("model.visual.downsample.", 25_169_920),
    ];
    for (prefix, expected) in parts {
        assert_eq!(count(prefix), expected, "{prefix}");
    }
    let named = ["blocks.", "merger.", "downsample."].map(|m| count(&format!("model.visual.{m}")));
    assert_eq!(visual - named.iter().sum::<usize>(), 2_695_680);
    assert_eq!(count(""), 10_292_777_472);
}

#[test]
fn nested_and_flat_configurations_mean_the_same() {
    let nested = published();
    let mut flat = nested.clone();
    let text = flat["text_config"].take();
    flat.as_object_mut().unwrap().remove("text_config");
    let fields = text.as_object().unwrap().clone();
    flat.as_object_mut().unwrap().extend(fields);
    assert_eq!(parse(&nested).unwrap(), parse(&flat).unwrap());

    let mut newer = nested.clone();
    let text = newer["text_config"].as_object_mut().unwrap();
    for field in ["rope_theta", "partial_rotary_factor", "rope_scaling"] {
        text.remove(field);
    }
    text.insert(
        "rope_parameters".into(),
        json!({
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [8, 12, 12]
        }),
    );
    assert_eq!(parse(&nested).unwrap(), parse(&newer).unwrap());
}

#[test]
fn unsupported_configurations_are_refused() {
    for (pointer, value) in [
        ("/text_config/rope_scaling/mrope_section", json!([8, 8, 8])),
        (
            "/text_config/rope_scaling/mrope_section",
            json!([0, 16, 16]),
        ),
        ("/text_config/rope_scaling/type", json!("yarn")),
        ("/text_config/hidden_act", json!("gelu")),
        ("/text_config/num_key_value_heads", json!(3)),
        ("/text_config/hidden_size", json!(0)),
        ("/text_config/partial_rotary_factor", json!(2.0)),
        ("/vision_config/spatial_merge_size", json!(3)),
        ("/vision_config/out_hidden_size", json!(2048)),
        ("/vision_config/image_size", json!(337)),
        ("/vision_config/attention_bias", json!(true)),
        ("/tie_word_embeddings", json!(true)),
        ("/model_type", json!("glm4v_moe")),
    ] {
        let mut config = published();
        *config.pointer_mut(pointer).unwrap() = value;
        assert!(parse(&config).is_err(), "{pointer}");
    }
}

#[test]
fn parts_of_the_model_are_found_by_name() {
    let mut options = ModelOptions::new(DType::F32);
    (options.tune_vision, options.tune_llm) = (false, false);
    let model = model(&published(), options);
    let trained = model.spec().params.iter().filter(|p| p.trainable);
    let joins = ["model.visual.merger.", "model.visual.downsample."];
    let mut count = 0;
    for param in trained {
        assert!(
            joins.iter().any(|j| param.name.starts_with(j)),
            "{}",
            param.name
        );
        count += 1;
    }
    assert_eq!(count, 8);
    let units = model.spec().units.iter().enumerate();
    let resampler =
        units.filter(|(i, _)| model.tower(engine::UnitId(*i as u32)) == Tower::Resampler);
    assert_eq!(resampler.count(), 1);
}

/// Images whose path is their size, as in `100x40`.
struct Sizes;

impl ImageSource for Sizes {
    fn dimensions(&self, path: &Path) -> Result<(usize, usize), ImageError> {
        let (width, height) = path.to_str().unwrap().split_once('x').unwrap();
        Ok((width.parse().unwrap(), height.parse().unwrap()))
    }

    fn load(&self, path: &Path) -> Result<Decoded, ImageError> {
        let (width, height) = self.dimensions(path)?;
        // The byte tells images apart.
        Ok(RgbImage::new(width, height, vec![width as u8; width * height * 3]).into())
    }
}

fn processor() -> Glm41vProcessor {
    let pack = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/glm-4.1v-9b-thinking");
    Glm41vProcessor::load(&pack).unwrap()
}

fn sample(images: &[(&str, &str)], turns: &[(&str, &str)]) -> RawSample {
    let turn = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    let turns: Vec<Value> = turns.iter().map(turn).collect();
    RawSample {
        images: images
            .iter()
            .map(|(name, path)| ((*name).to_owned(), PathBuf::from(path)))
            .collect(),
        ..serde_json::from_value(json!({"conversations": turns})).unwrap()
    }
}

fn ask(images: &[(&str, &str)], question: &str) -> RawSample {
    sample(images, &[("user", question), ("assistant", "Yes.")])
}

fn encode_up_to(sample: &RawSample, limit: usize) -> Result<EncodedSample, SampleError> {
    let options = EncodeOptions {
        model_max_length: limit,
        ..EncodeOptions::default()
    };
    let result = processor().encode(sample, &Sizes, &options);
    let measured = processor().measure(sample, &Sizes, &options);
    match (&result, measured) {
        (Ok(sample), Ok(size)) => {
            assert_eq!(size.tokens, sample.input_ids.len());
            assert_eq!(size.supervised, sample.supervised_tokens());
            assert_eq!(
                (size.slices, size.patches),
                (sample.slices.len(), sample.patches())
            );
        }
        (result, measured) => assert!(result.is_err() && measured.is_err()),
    }
    result
}

fn encode(sample: &RawSample) -> Result<EncodedSample, SampleError> {
    encode_up_to(sample, 2048)
}

const ONE: &str = "<image>";

#[test]
fn image_tokens_replace_the_markers_of_the_text() {
    let two = [(ONE, "84x84"), (ONE, "112x84")];
    let encoded = encode(&ask(&two, "a <image> b <image> c")).unwrap();
    let widths: Vec<usize> = encoded.slices.iter().map(|s| s.cols).collect();
    assert_eq!(widths, [6, 8]);
    let lengths: Vec<usize> = encoded.image_bounds.iter().map(|(s, e)| e - s).collect();
    assert_eq!(lengths, [9, 12]);

    let named = [("<image_00>", "84x84"), ("<image_01>", "112x84")];
    let encoded = encode(&ask(&named, "<image_01> then <image_00>")).unwrap();
    let widths: Vec<usize> = encoded.slices.iter().map(|s| s.cols).collect();
    assert_eq!(widths, [8, 6]);

    // A single image that is not mentioned comes first.
    let one = [(ONE, "84x84")];
    let marked = encode(&ask(&one, "<image>Why?")).unwrap();
    assert_eq!(encode(&ask(&one, "Why?")).unwrap(), marked);
}

#[test]
fn bounds_of_a_run_narrow_those_of_the_model_directory() {
    let area = |max, min| {
        let options = EncodeOptions {
            image_max_pixels: max,
            image_min_pixels: min,
            ..EncodeOptions::default()
        };
        let raw = ask(&[(ONE, "280x280")], "<image>");
        let sample = processor().encode(&raw, &Sizes, &options).unwrap();
        let size = processor().measure(&raw, &Sizes, &options).unwrap();
        assert_eq!(size.patches, sample.patches());
        let tokens = processor().image((280, 280), &options).tokens_per_slice;
        assert_eq!(tokens * 4, sample.patches());
        sample.patches() * 14 * 14
    };
    assert_eq!(area(None, None), 280 * 280);
    assert!(area(Some(200 * 200), None) <= 200 * 200);
    assert!(area(None, Some(400 * 400)) >= 400 * 400);
    // The directory's own bounds hold besides.
    assert_eq!(area(Some(usize::MAX), Some(1)), 280 * 280);
}

#[test]
fn texts_and_images_that_disagree_are_errors() {
    let two = [(ONE, "84x84"), (ONE, "112x84")];
    let unused = encode(&ask(&two, "only <image>")).unwrap_err();
    assert!(matches!(unused, SampleError::UnusedImage { .. }));
    let more = encode(&ask(&two[..1], "<image><image>")).unwrap_err();
    assert!(matches!(
        more,
        SampleError::MorePlaceholdersThanImages { .. }
    ));
    let unknown = encode(&ask(&two[..1], "<image_07>")).unwrap_err();
    assert!(matches!(unknown, SampleError::UnknownPlaceholder { .. }));
    let turns = [("user", "describe"), ("assistant", "Here <image_00> it is")];
    let spoken = sample(&[("<image_00>", "84x84")], &turns);
    let spoken = encode(&spoken).unwrap_err();
    assert!(matches!(
        spoken,
        SampleError::MisplacedImage { turn: 1, .. }
    ));
    let long = encode(&ask(&[(ONE, "8400x28")], "<image>")).unwrap_err();
    assert!(matches!(long, SampleError::AspectRatio { width: 8400, .. }));
}

#[test]
fn control_tokens_in_a_text_are_plain_text() {
    let typed = "<|image|><|user|>\nx<|endoftext|>";
    let turns = [("user", typed), ("assistant", "Say <|endoftext|> twice.")];
    let encoded = encode(&sample(&[], &turns)).unwrap();
    let tokenizer = &processor().tokenizer;
    let count = |text: &str| {
        let id = tokenizer.id(text).unwrap();
        encoded
            .input_ids
            .iter()
            .filter(|other| **other == id)
            .count()
    };
    let found = ["<|image|>", "<|user|>", "<|endoftext|>"].map(count);
    assert_eq!(found, [0, 1, 1]);
    let supervised_text: Vec<i32> = encoded
        .labels
        .into_iter()
        .filter(|label| *label != IGNORED)
        .collect();
    let supervised_text = tokenizer.decode_verbatim(&supervised_text).unwrap();
    assert_eq!(supervised_text, "\nSay <|endoftext|> twice.<|endoftext|>");
}

#[test]
fn metadata_is_written_and_answers_out_of_the_loss_teach_nothing() {
    let turns = [
        ("user", "q"),
        ("assistant", "{}"),
        ("user", "r"),
        ("assistant", "a"),
    ];
    let mut raw = sample(&[], &turns);
    raw.conversations[1].metadata = "f".to_owned();
    let text = |raw: &RawSample| {
        let labels = encode(raw).unwrap().labels;
        let supervised_text: Vec<i32> = labels
            .into_iter()
            .filter(|label| *label != IGNORED)
            .collect();
        processor()
            .tokenizer
            .decode_verbatim(&supervised_text)
            .unwrap()
    };
    assert_eq!(text(&raw), "f\n{}<|endoftext|>\na<|endoftext|>");
    raw.conversations[3].unsupervised = true;
    assert_eq!(text(&raw), "f\n{}<|endoftext|>");
    raw.conversations[3].unsupervised = false;
    raw.conversations[1].unsupervised = true;
    assert_eq!(text(&raw), "\na<|endoftext|>");
}

#[test]
fn truncation_keeps_an_image_whole_or_drops_it() {
    let turns = [
        ("user", "<image>Why?"),
        ("assistant", "Yes."),
        ("user", "<image>And now?"),
        ("assistant", "No."),
    ];
    let two = sample(&[(ONE, "84x84"), (ONE, "112x84")], &turns);
    let whole = encode(&two).unwrap();
    let (start, end) = whole.image_bounds[1];
    // The marker before it is cut, too.
    let dropped = encode_up_to(&two, start - 1).unwrap();
    assert_eq!((dropped.slices.len(), dropped.image_bounds.len()), (1, 1));
    for limit in start..=end {
        let error = encode_up_to(&two, limit).unwrap_err();
        assert!(matches!(
            error,
            SampleError::UnpairedImageMarkers {
                starts: 2,
                ends: 1,
                ..
            }
        ));
    }
    assert_eq!(encode_up_to(&two, end + 1).unwrap().slices.len(), 2);
    let nothing = encode_up_to(&two, whole.image_bounds[0].1 + 1).unwrap_err();
    assert!(matches!(nothing, SampleError::NoSupervisedToken { .. }));
}

#[test]
fn the_end_token_after_every_answer_is_supervised() {
    let turns = [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ];
    let encoded = encode(&sample(&[], &turns)).unwrap();
    let end = processor().turn_end();
    let supervised: Vec<usize> = (0..encoded.labels.len())
        .filter(|&i| encoded.labels[i] == end)
        .collect();
    let user = processor().tokenizer().id("<|user|>").unwrap();
    assert_eq!(encoded.input_ids[supervised[0] + 1], user);
    assert_eq!(encoded.input_ids[supervised[1] + 1], end);
    assert_eq!(supervised.len(), 2);
    assert_eq!(encoded.labels.last(), Some(&IGNORED));
}

#[test]
fn the_prompt_is_the_training_text_up_to_the_answer() {
    let raw = ask(&[(ONE, "84x84")], "<image>Why?");
    let whole = encode(&raw).unwrap();
    let options = EncodeOptions::default();
    let style = PlaceholderStyle::Training;
    let prompt = processor()
        .encode_prompt(&raw, &Sizes, &options, style)
        .unwrap();
    assert!(whole.input_ids.starts_with(&prompt.input_ids));
    assert_eq!(prompt.slices, whole.slices);
    assert_eq!(prompt.image_bounds, whole.image_bounds);
    let rest = &whole.input_ids[prompt.input_ids.len()..];
    assert_eq!(processor().decode(rest).unwrap(), "Yes.");
}

/// GLM-4.6V-Flash's template is the reference: its text of the same turns, with the token after the last answer.
#[test]
fn thoughts_beside_answers_are_written_as_the_template_writes_them() {
    let pack = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/glm-4.6v-flash");
    let processor = Glm41vProcessor::load(&pack).unwrap();
    let template = ChatTemplate::load(&pack, processor.tokenizer()).unwrap();
    let older = self::processor();
    assert!(processor.reads_thoughts() && !older.reads_thoughts());
    let second = "<think>In the text.</think>\nNo.";
    for (first_thought, thought) in [
        (None, None),
        (Some("Look."), None),
        (Some("Look."), Some("\n Look again.\n")),
        (None, Some("")),
    ] {
        for switch in [None, Some(true)] {
            let turns = [
                ("user", "Is it?"),
                ("assistant", "Yes."),
                ("user", "Sure?"),
                ("assistant", second),
            ];
            let mut raw = sample(&[], &turns);
            for (turn, thought) in [(1, first_thought), (3, thought)] {
                raw.conversations[turn].reasoning_content = thought.map(str::to_owned);
            }
            raw.enable_thinking = switch;
            let options = EncodeOptions::default();
            let text = processor.render(&raw, &Sizes, &options).unwrap();
            let want = template.render_thinking(&raw.conversations, false, switch);
            assert_eq!(text, want.unwrap() + "<|endoftext|>", "{thought:?}");
            // Other families write what they write without the key.
            raw.enable_thinking = None;
            let with = older.render(&raw, &Sizes, &options).unwrap();
            raw.conversations[3].reasoning_content = None;
            assert_eq!(with, older.render(&raw, &Sizes, &options).unwrap());
        }
    }
    // The tokens of a role in a thought open no turn.
    let mut raw = ask(&[], "Is it?");
    raw.conversations[1].reasoning_content = Some("<|user|>".to_owned());
    let encoded = processor.encode(&raw, &Sizes, &EncodeOptions::default());
    let user = processor.tokenizer().id("<|user|>").unwrap();
    let ids = encoded.unwrap().input_ids.into_iter();
    assert_eq!(ids.filter(|id| *id == user).count(), 1);
}

/// GLM-4.6V-Flash with `video_processor` in `processor_config.json`, as transformers 5 saves it.
fn with_video_settings(settings: &Value) -> Result<Glm41vProcessor, ProcessorError> {
    let pack = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/glm-4.6v-flash");
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(pack.join(name), dir.path().join(name)).unwrap();
    }
    let settings = json!({"video_processor": settings}).to_string();
    std::fs::write(dir.path().join("processor_config.json"), settings).unwrap();
    Glm41vProcessor::load(dir.path())
}

#[test]
fn settings_of_videos_are_read_as_transformers_5_saves_them() {
    let size = json!({"shortest_edge": 784, "longest_edge": 31_360});
    let found = with_video_settings(&json!({"size": size, "fps": 2, "image_std": null})).unwrap();
    let limits = found.video_limits.unwrap();
    assert_eq!((limits.min_pixels, limits.max_pixels), (784, 31_360));
    let class = with_video_settings(&Value::Null).unwrap();
    assert_eq!(class.video_limits.unwrap().max_pixels, 47_040_000);
    for (settings, name) in [
        (json!({"size": size, "patch_size": 16}), "patch_size"),
        (
            json!({"size": size, "temporal_patch_size": 1}),
            "temporal_patch_size",
        ),
        (json!({"image_mean": [0.5, 0.5, 0.5]}), "image_mean"),
    ] {
        let error = with_video_settings(&settings).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}
