//! Small files of a model directory, by family: configuration, tokenizer, processor settings.

use std::fs;
use std::path::Path;

use models::Family;
use models::cogvlm::CogConfig;
use models::cogvlm::config::Edition;
use models::glm4v::config::Glm4vConfig;
use models::glm41v::config::Glm41vConfig;
use models::minicpm::config::MiniCpmConfig;
use models::seeded;
use serde_json::{Value, json};

use super::config::Config;
use super::tokenizer::Vocabulary;
use crate::commands::demo::model_files::{TEMPLATE, preprocessor_config};
use crate::error::{ErrorCode, Failure, chain};

/// Special tokens of MiniCPM-V in id order, except `<unk>`, which is at another id.
const MINICPM: [&str; 23] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "</image>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
    "<quad>",
    "</quad>",
    "<point>",
    "</point>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|reserved_special_token_3|>",
    "<|reserved_special_token_4|>",
    "<|reserved_special_token_5|>",
];

/// Special tokens of GLM-4.1V in id order. GLM-4V has the first fourteen.
const GLM: [&str; 20] = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
];
const GLM4V_TOKENS: usize = 14;

/// Content of a model directory besides configuration and weights.
struct Small {
    vocabulary: Vocabulary,
    tokenizer_config: Value,
    preprocessor: Option<Value>,
}

/// Writes the small files of `config` into `directory`.
///
/// # Errors
/// When no supported model has this configuration or its vocabulary is too small (exit 10), and for disk errors.
pub(super) fn write(config: &Config, directory: &Path) -> Result<(), Failure> {
    put(directory, "config.json", &config.bytes)?;
    let small = small(directory).map_err(|cause| config.unusable(&cause))?;
    let tokenizer = small.vocabulary.to_json();
    let tokenizer = tokenizer.map_err(|cause| config.unusable(&cause))?;
    let mut files = vec![
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", small.tokenizer_config),
    ];
    files.extend(
        small
            .preprocessor
            .map(|value| ("preprocessor_config.json", value)),
    );
    for (name, value) in files {
        put(directory, name, format!("{value:#}\n").as_bytes())?;
    }
    Ok(())
}

/// Writes the file that replaces all weights by the seed they are generated from.
///
/// # Errors
/// When the disk fails.
pub(super) fn declare(seed: u64, directory: &Path) -> Result<(), Failure> {
    let marker = json!(seeded::Marker::new(seed));
    put(directory, seeded::FILE, format!("{marker:#}\n").as_bytes())
}

fn put(directory: &Path, name: &str, bytes: &[u8]) -> Result<(), Failure> {
    let path = directory.join(name);
    fs::write(&path, bytes).map_err(|error| Failure::io(ErrorCode::Disk, "write", &path, &error))
}

fn small(directory: &Path) -> Result<Small, String> {
    let family = Family::of(directory).map_err(|error| chain(&error))?;
    let bytes = fs::read(directory.join("config.json")).map_err(|error| error.to_string())?;
    let raw: Value = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    Ok(match family {
        Family::MiniCpm => minicpm(&load(MiniCpmConfig::load(directory))?, &raw),
        Family::Glm4v => glm4v(&load(Glm4vConfig::load(directory))?),
        Family::Glm41v => glm41v(&load(Glm41vConfig::load(directory))?, &raw),
        Family::CogVlm | Family::CogVlm2 | Family::CogAgent => {
            cog(&load(CogConfig::load(directory))?)
        }
    })
}

fn load<T, E: std::error::Error>(loaded: Result<T, E>) -> Result<T, String> {
    loaded.map_err(|error| chain(&error))
}

/// The first id in the field `field` of a `config.json`, if it has one.
fn id(config: &Value, field: &str) -> Option<usize> {
    let value = &config[field];
    let first = value.as_u64().or_else(|| value[0].as_u64())?;
    usize::try_from(first).ok()
}

fn minicpm(config: &MiniCpmConfig, raw: &Value) -> Small {
    let size = config.language.vocab_size;
    let vocabulary = Vocabulary {
        size,
        loose: vec!["<unk>"],
        // The sample rules search for this word after `<|im_start|>`.
        words: vec!["assistant"],
        ..Vocabulary::default()
    };
    // `<|im_end|>`, the third special token, ends a sequence.
    let first = id(raw, "eos_token_id").and_then(|eos| eos.checked_sub(2));
    let first = first.unwrap_or_else(|| size.saturating_sub(MINICPM.len()));
    Small {
        vocabulary: vocabulary.with_run(first, &MINICPM),
        tokenizer_config: json!({
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": false,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }),
        preprocessor: Some(preprocessor_config(
            config.query_num,
            config.slicing.scale_resolution,
            config.slicing.patch_size,
        )),
    }
}

fn glm_tokenizer_config() -> Value {
    json!({
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": false,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}

fn glm4v(config: &Glm4vConfig) -> Small {
    let size = config.language.vocab_size;
    let vocabulary = Vocabulary {
        size,
        ..Vocabulary::default()
    };
    let names = &GLM[..GLM4V_TOKENS];
    let first = first_of(&config.eos_ids, size, names.len());
    Small {
        vocabulary: vocabulary.with_run(first, names),
        tokenizer_config: glm_tokenizer_config(),
        preprocessor: None,
    }
}

fn glm41v(config: &Glm41vConfig, raw: &Value) -> Small {
    let size = config.language.vocab_size;
    let vocabulary = Vocabulary {
        size,
        ..Vocabulary::default()
    };
    // The configuration states the id of the image token, which is the fifteenth special token.
    let stated = id(raw, "image_token_id").and_then(|image| image.checked_sub(GLM4V_TOKENS));
    let first = stated.unwrap_or_else(|| first_of(&config.eos_ids, size, GLM.len()));
    Small {
        vocabulary: vocabulary.with_run(first, &GLM),
        tokenizer_config: glm_tokenizer_config(),
        preprocessor: Some(json!({
            "size": { "shortest_edge": 12_544, "longest_edge": 9_633_792 },
            "patch_size": config.vision.patch_size,
            "temporal_patch_size": config.vision.frames,
            "merge_size": 2,
            "image_mean": [0.481_454_66, 0.457_827_5, 0.408_210_73],
            "image_std": [0.268_629_54, 0.261_302_58, 0.275_777_11],
            "image_processor_type": "Glm4vImageProcessor",
            "processor_class": "Glm4vProcessor",
        })),
    }
}

/// First id of the special tokens. They begin with the first end-of-answer token if the configuration states it; else
/// they end the vocabulary.
fn first_of(eos: &[i32], size: usize, count: usize) -> usize {
    let stated = eos.first().and_then(|id| usize::try_from(*id).ok());
    stated.unwrap_or_else(|| size.saturating_sub(count))
}

fn cog(config: &CogConfig) -> Small {
    let language = &config.language;
    let [bos, eos, pad] = match config.edition {
        Edition::CogVlm | Edition::CogAgent => ["<s>", "</s>", "<unk>"],
        Edition::CogVlm2 => [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|reserved_special_token_0|>",
        ],
    };
    let mut vocabulary = Vocabulary {
        size: language.vocab_size,
        ..Vocabulary::default()
    };
    for (id, token) in [
        (language.bos, bos),
        (language.eos, eos),
        (language.pad, pad),
    ] {
        // A negative id means none. The model's own checks refuse it if it matters.
        vocabulary
            .special
            .extend(usize::try_from(id).ok().map(|id| (id, token)));
    }
    Small {
        vocabulary,
        tokenizer_config: json!({
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "clean_up_tokenization_spaces": false,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }),
        preprocessor: None,
    }
}
