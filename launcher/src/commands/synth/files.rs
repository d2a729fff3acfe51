//! Small files of a model directory, by family: configuration, tokenizer, processor settings.

use crate::lang::Text;
use std::fs;
use std::path::Path;

use models::Family;
use models::cogvlm::CogConfig;
use models::cogvlm::config::Edition;
use models::glm4v::config::Glm4vConfig;
use models::glm41v::config::{Glm41vConfig, Network};
use models::minicpm::config::{MiniCpmConfig, Release};
use serde_json::{Value, json};

use super::config::Config;
use super::tokenizer::Vocabulary;
use super::writer::FileWriter;
use crate::error::{Failure, chain};

/// Special tokens of MiniCPM-V in id order, except `<unk>`, which is at another id.
pub(crate) const MINICPM: [&str; 23] = [
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

/// Special tokens of GLM-4V in id order, which all GLM models have first.
const GLM: [&str; 14] = [
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
];
/// Those of GLM-4.1V after [`GLM`].
const GLM_41V: [&str; 6] = [
    "<|image|>",
    "<|video|>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
];
/// Those of GLM-4.6V-Flash and GLM-OCR after [`GLM`].
const GLM_LATER: [&str; 22] = [
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
];
/// Special tokens of MiniCPM 4.5 in id order, except `<unk>`.
const MINICPM_4_5: [&str; 42] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
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
    "<unit>",
    "</unit>",
];
/// Chat template of MiniCPM 4.5: the last answer has a block for its thought, empty without one.
const THINKING_TEMPLATE: &str = include_str!("thinking.jinja");

/// Chat template. It adds a default system message to conversations without one.
pub(crate) const TEMPLATE: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Content of a model directory besides configuration and weights.
pub(crate) struct ModelFiles {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) tokenizer_config: Value,
    pub(crate) preprocessor: Option<Value>,
}

impl ModelFiles {
    /// Name and contents of every file.
    ///
    /// # Errors
    /// A sentence that says which token does not fit into the vocabulary.
    pub(crate) fn files(self) -> Result<Vec<(&'static str, Value)>, String> {
        let mut files = vec![
            ("tokenizer.json", self.vocabulary.to_json()?),
            ("tokenizer_config.json", self.tokenizer_config),
        ];
        let preprocessor = self.preprocessor;
        files.extend(preprocessor.map(|value| ("preprocessor_config.json", value)));
        Ok(files)
    }
}

/// Writes the small files of `config` into `directory`.
///
/// # Errors
/// When no supported model has this configuration or its vocabulary is too small (exit 10), and for disk errors.
pub(super) fn write(config: &Config, directory: &Path) -> Result<(), Failure> {
    let mut writer = FileWriter::new(directory, "\n");
    writer.put("config.json", &config.bytes)?;
    let files = small(directory).and_then(|small| small.files().map_err(Text::literal));
    for (name, value) in files.map_err(|cause| config.unusable(cause))? {
        writer.put_json(name, &value)?;
    }
    Ok(())
}

fn small(directory: &Path) -> Result<ModelFiles, Text> {
    let family = Family::of(directory).map_err(|error| chain(&error))?;
    let bytes = fs::read(directory.join("config.json")).map_err(|error| Text::literal(&error))?;
    let raw: Value = serde_json::from_slice(&bytes).map_err(|error| Text::literal(&error))?;
    Ok(match family {
        Family::MiniCpm => minicpm(&load(MiniCpmConfig::load(directory))?, &raw),
        Family::Glm4v => glm4v(&load(Glm4vConfig::load(directory))?),
        Family::Glm41v => glm41v(&load(Glm41vConfig::load(directory))?, &raw),
        Family::CogVlm | Family::CogVlm2 | Family::CogAgent => {
            cog(&load(CogConfig::load(directory))?)
        }
    })
}

fn load<T, E: std::error::Error + 'static>(loaded: Result<T, E>) -> Result<T, Text> {
    loaded.map_err(|error| chain(&error))
}

/// The first id in the field `field` of a `config.json`, if it has one.
fn id(config: &Value, field: &str) -> Option<usize> {
    let value = &config[field];
    let first = value.as_u64().or_else(|| value[0].as_u64())?;
    usize::try_from(first).ok()
}

fn minicpm(config: &MiniCpmConfig, raw: &Value) -> ModelFiles {
    let (tokens, template): (&[&str], _) = match config.release {
        Release::V2_6 | Release::V4_0 => (&MINICPM, TEMPLATE),
        Release::V4_5 => (&MINICPM_4_5, THINKING_TEMPLATE.trim_end()),
    };
    let size = config.language.vocab_size;
    let vocabulary = Vocabulary::of_bytes(size)
        // The sample rules search for this word after `<|im_start|>`.
        .with_word("assistant")
        .with_loose("<unk>");
    // `<|im_end|>`, the third special token, ends a sequence.
    let first = id(raw, "eos_token_id").and_then(|eos| eos.checked_sub(2));
    let first = first.unwrap_or_else(|| size.saturating_sub(tokens.len()));
    ModelFiles {
        vocabulary: vocabulary.with_run(first, tokens),
        tokenizer_config: json!({
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
            "chat_template": template,
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

/// Contents of the family's `preprocessor_config.json`. Lengths are in pixels.
pub(crate) fn preprocessor_config(
    queries: usize,
    scale_resolution: usize,
    patch_size: usize,
) -> Value {
    json!({
        "image_processor_type": "MiniCPMVImageProcessor",
        "max_slice_nums": 9,
        "scale_resolution": scale_resolution,
        "patch_size": patch_size,
        "use_image_id": true,
        "image_feature_size": queries,
        "im_start": "<image>",
        "im_end": "</image>",
        "slice_start": "<slice>",
        "slice_end": "</slice>",
        "unk": "<unk>",
        "im_id_start": "<image_id>",
        "im_id_end": "</image_id>",
        "slice_mode": true,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "version": 2.6,
    })
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

fn glm4v(config: &Glm4vConfig) -> ModelFiles {
    let size = config.language.vocab_size;
    let first = first_of(&config.eos_ids, size, GLM.len());
    ModelFiles {
        vocabulary: Vocabulary::of_bytes(size).with_run(first, &GLM),
        tokenizer_config: glm_tokenizer_config(),
        preprocessor: None,
    }
}

fn glm41v(config: &Glm41vConfig, raw: &Value) -> ModelFiles {
    let size = config.language.vocab_size;
    let image = id(raw, "image_token_id");
    let later = [&GLM[..], &GLM_LATER].concat();
    let place = |tokens: &[&str]| tokens.iter().position(|token| *token == "<|image|>");
    // The model type of GLM-4.6V-Flash is that of GLM-4.1V. Its image token is further behind the end token.
    let starts = image
        .zip(place(&later))
        .and_then(|(image, at)| image.checked_sub(at));
    let stated_end = config
        .eos_ids
        .first()
        .and_then(|id| usize::try_from(*id).ok());
    let is_later = config.network == Network::GlmOcr || (starts.is_some() && starts == stated_end);
    let (tokens, kind) = match is_later {
        true => (later, "Glm46V"),
        false => ([&GLM[..], &GLM_41V].concat(), "Glm4v"),
    };
    // The configuration states the id of the image token.
    let stated = image
        .zip(place(&tokens))
        .and_then(|(image, at)| image.checked_sub(at));
    let first = stated.unwrap_or_else(|| first_of(&config.eos_ids, size, tokens.len()));
    ModelFiles {
        vocabulary: Vocabulary::of_bytes(size).with_run(first, &tokens),
        tokenizer_config: glm_tokenizer_config(),
        preprocessor: Some(json!({
            "size": { "shortest_edge": 12_544, "longest_edge": 9_633_792 },
            "patch_size": config.vision.patch_size,
            "temporal_patch_size": config.vision.frames,
            "merge_size": 2,
            "image_mean": [0.481_454_66, 0.457_827_5, 0.408_210_73],
            "image_std": [0.268_629_54, 0.261_302_58, 0.275_777_11],
            "image_processor_type": format!("{kind}ImageProcessor"),
            "processor_class": format!("{kind}Processor"),
        })),
    }
}

/// First id of the special tokens. They begin with the first end-of-answer token if the configuration states it; else
/// they end the vocabulary.
fn first_of(eos: &[i32], size: usize, count: usize) -> usize {
    let stated = eos.first().and_then(|id| usize::try_from(*id).ok());
    stated.unwrap_or_else(|| size.saturating_sub(count))
}

fn cog(config: &CogConfig) -> ModelFiles {
    let [bos, eos, pad] = match config.edition {
        Edition::CogVlm | Edition::CogAgent => ["<s>", "</s>", "<unk>"],
        Edition::CogVlm2 => [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|reserved_special_token_0|>",
        ],
    };
    let mut vocabulary = Vocabulary::of_bytes(config.language.vocab_size);
    for (id, token) in [(config.bos, bos), (config.eos, eos), (config.pad, pad)] {
        // A negative id means none. The model's own checks refuse it if it matters.
        vocabulary
            .special
            .extend(usize::try_from(id).ok().map(|id| (id, token)));
    }
    ModelFiles {
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
