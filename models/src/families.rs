//! Model families, and the family of a model directory by its `config.json`.

use crate::cogvlm::config::Edition;
use crate::cogvlm::{CogConfig, CogProcessor, CogVlm};
use crate::config::{ConfigError, ConfigFile, Fields};
use crate::glm4v::config::Glm4vConfig;
use crate::glm4v::{Glm4v, Glm4vProcessor};
use crate::glm41v::config::Glm41vConfig;
use crate::glm41v::{self, Glm41v, Glm41vProcessor};
use crate::minicpm::config::MiniCpmConfig;
use crate::minicpm::processor::ProcessorConfig;
use crate::minicpm::{MiniCpm, MiniCpmProcessor};
use crate::options::ModelOptions;
use crate::processor::{Normalization, Processor, ProcessorError};
use crate::{ModelError, VisionLanguageModel};
use std::path::Path;
use std::sync::Arc;

/// Model types that are supported: values of `model_type` in `config.json`, or of the first entry of
/// `architectures` in a file without `model_type`.
pub const MODEL_TYPES: [&str; 8] = [
    "minicpmv",
    "minicpmo",
    "CogVLMForCausalLM",
    "CogAgentForCausalLM",
    "chatglm",
    "glm4v",
    "glm46v",
    "glm_ocr",
];

/// Family of published models that [`open_model`] supports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// MiniCPM-V 2.6 and MiniCPM-o 2.6.
    MiniCpm,
    /// GLM-4V-9B, and CogAgent-9B-20241220.
    Glm4v,
    /// GLM-4.1V-9B-Thinking, GLM-4.6V-Flash and GLM-OCR.
    Glm41v,
    /// CogVLM.
    CogVlm,
    /// CogVLM2.
    CogVlm2,
    /// CogAgent.
    CogAgent,
}

/// Why a model directory cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The configuration or another file of the directory cannot be used.
    #[error(transparent)]
    Files(#[from] ProcessorError),
    /// The run's settings do not fit the model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl From<ConfigError> for OpenError {
    fn from(error: ConfigError) -> Self {
        Self::Files(error.into())
    }
}

/// What this program lacks for MiniCPM-V 4.6.
pub(crate) const NEW_MINICPM: &str =
    "its tower merges windows of patches, and its decoder is of Qwen3.5's kind";

/// Why a checkpoint that the program recognizes cannot be used, and the nearest one that can.
struct Known {
    name: &'static str,
    reason: &'static str,
    nearest: &'static str,
}

impl Known {
    /// The checkpoint with the model type or architecture `found`, if it is known and not supported.
    fn of(found: &str) -> Option<Self> {
        const EXPERTS: &str = "its layers are mixtures of experts";
        let (name, reason, nearest) = match found {
            "glm4v_moe" | "glm4v_moe_text" | "Glm4vMoeForConditionalGeneration" => (
                "GLM-4.5V or GLM-4.6V (glm4v_moe)",
                EXPERTS,
                "GLM-4.6V-Flash",
            ),
            "glm4_moe" | "Glm4MoeForCausalLM" => ("GLM-4.5 (glm4_moe)", EXPERTS, "GLM-4.6V-Flash"),
            "minicpmv4_6" | "MiniCPMV4_6ForConditionalGeneration" => {
                ("MiniCPM-V 4.6 (minicpmv4_6)", NEW_MINICPM, "MiniCPM-V 4.5")
            }
            "minicpmv4_7" | "MiniCPMV4_7ForConditionalGeneration" => (
                "MiniCPM-V 4.7 (minicpmv4_7)",
                "its layout is not implemented",
                "MiniCPM-V 4.5",
            ),
            _ => return None,
        };
        Some(Self {
            name,
            reason,
            nearest,
        })
    }

    /// The checkpoint that a `config.json` describes, if it is known and not supported.
    fn read(fields: Fields<'_>) -> Result<Option<Self>, ConfigError> {
        let architectures: Vec<String> = fields.nullable("architectures")?.unwrap_or_default();
        let own: Option<String> = fields.nullable("model_type")?;
        let text: Option<String> = fields.nullable("text_config.model_type")?;
        let names = own.into_iter().chain(architectures).chain(text);
        let mut known = names.filter_map(|name| Self::of(&name));
        // The configuration class of GLM-4.6V also wraps text models with experts.
        let experts: Option<usize> = fields.nullable("text_config.n_routed_experts")?;
        let with_experts = experts.filter(|count| *count > 0);
        Ok(known
            .next()
            .or(with_experts.and_then(|_| Self::of("glm4v_moe"))))
    }
}

impl From<Known> for ConfigError {
    fn from(known: Known) -> Self {
        let Known {
            name,
            reason,
            nearest,
        } = known;
        Self::KnownCheckpoint {
            name: name.to_owned(),
            reason,
            nearest,
        }
    }
}

impl Family {
    /// Reads the family of the model in the directory `dir` from its `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] if `config.json` cannot be read or is of an unsupported family.
    pub fn of(dir: &Path) -> Result<Self, ConfigError> {
        Self::read(ConfigFile::load(dir)?.fields())
    }

    /// As [`Family::of`], for the content `bytes` of a `config.json`; `path` only serves error messages.
    ///
    /// # Errors
    /// As [`Family::of`].
    pub fn of_bytes(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        Self::read(ConfigFile::parse(bytes, path)?.fields())
    }

    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        fields.quantization()?;
        if let Some(edition) = Edition::read(fields)? {
            return Ok(match edition {
                Edition::CogVlm => Self::CogVlm,
                Edition::CogVlm2 => Self::CogVlm2,
                Edition::CogAgent => Self::CogAgent,
            });
        }
        if let Some(known) = Known::read(fields)? {
            return Err(known.into());
        }
        let model_type: String = fields.nullable("model_type")?.unwrap_or_default();
        let architectures: Vec<String> = fields.nullable("architectures")?.unwrap_or_default();
        let architecture = architectures.into_iter().next().unwrap_or_default();
        let vision = fields.section("vision_config")?;
        match &*model_type {
            "minicpmv" | "minicpmo" => Ok(Self::MiniCpm),
            // The text models of the family have the same name.
            "chatglm" if vision.is_some() => Ok(Self::Glm4v),
            "glm4v" | "glm46v" | "glm_ocr" => Ok(Self::Glm41v),
            _ => {
                let found = match model_type.is_empty() {
                    true => architecture,
                    false => model_type,
                };
                Err(ConfigError::UnsupportedModel { found })
            }
        }
    }

    /// Default LoRA targets of the family, from its published recipe: layer names separated by commas, or a
    /// regular expression.
    #[must_use]
    pub fn default_lora_targets(self) -> &'static str {
        match self {
            Self::MiniCpm => r"llm\..*layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj|o_proj)",
            // The published list names layers that the checkpoint does not have; attention is what it means.
            Self::Glm4v => "self_attention.query_key_value",
            Self::Glm41v => "q_proj,k_proj,v_proj,o_proj",
            Self::CogVlm | Self::CogAgent => {
                "language_expert_query_key_value,language_expert_dense,vision_expert_query_key_value,vision_expert_dense"
            }
            Self::CogVlm2 => "vision_expert_query_key_value",
        }
    }

    /// Names of the modules that a LoRA run trains in full by default, separated by commas; may be empty.
    /// With `tune_vision`, the vision tower of MiniCPM is one of them.
    #[must_use]
    pub fn default_modules_to_save(self, tune_vision: bool) -> &'static str {
        match self {
            Self::MiniCpm if tune_vision => "embed_tokens,resampler,vpm",
            Self::MiniCpm => "embed_tokens,resampler",
            Self::Glm4v | Self::Glm41v => "",
            Self::CogVlm | Self::CogVlm2 | Self::CogAgent => "",
        }
    }
}

/// Builds the model that the files in the directory `dir` describe: its parameter list and its forward pass.
/// Weights are not read.
///
/// # Errors
/// [`OpenError`] if a file cannot be used or `options` does not fit.
pub fn open_model(
    dir: &Path,
    options: ModelOptions,
) -> Result<Arc<dyn VisionLanguageModel>, OpenError> {
    match Family::of(dir)? {
        Family::MiniCpm => {
            let config = MiniCpmConfig::load(dir)?;
            let normalization = ProcessorConfig::load(dir, &config)?.normalization;
            Ok(Arc::new(MiniCpm::new(config, normalization, options)?))
        }
        Family::Glm4v => Ok(Arc::new(Glm4v::new(Glm4vConfig::load(dir)?, options)?)),
        Family::Glm41v => {
            let config = Glm41vConfig::load(dir)?;
            let normalization =
                glm41v::processor::ProcessorConfig::load(dir, &config)?.normalization;
            Ok(Arc::new(Glm41v::new(config, normalization, options)?))
        }
        Family::CogVlm | Family::CogVlm2 | Family::CogAgent => {
            let config = CogConfig::load(dir)?;
            Ok(Arc::new(CogVlm::new(config, options)?))
        }
    }
}

/// Builds the model that a `config.json` describes, for passes on the meta device, which has shapes but no
/// values. `path` is the file or its directory. The other files are not read, since they affect no sizes.
///
/// # Errors
/// As [`open_model`], except those of other files than `config.json`.
pub fn open_shapes(
    path: &Path,
    options: ModelOptions,
) -> Result<Arc<dyn VisionLanguageModel>, OpenError> {
    let normalization = Normalization::clip();
    match Family::of(path)? {
        Family::MiniCpm => {
            let config = MiniCpmConfig::load(path)?;
            Ok(Arc::new(MiniCpm::new(config, normalization, options)?))
        }
        Family::Glm41v => {
            let config = Glm41vConfig::load(path)?;
            Ok(Arc::new(Glm41v::new(config, normalization, options)?))
        }
        _ => open_model(path, options),
    }
}

/// Opens the processor of the model directory `dir`, which turns samples into model inputs.
///
/// # Errors
/// [`ProcessorError`] naming the file that is missing, invalid or contradicts another.
pub fn open_processor(dir: &Path) -> Result<Arc<dyn Processor>, ProcessorError> {
    match Family::of(dir)? {
        Family::MiniCpm => Ok(Arc::new(MiniCpmProcessor::load(dir)?)),
        Family::Glm4v => Ok(Arc::new(Glm4vProcessor::load(dir)?)),
        Family::Glm41v => Ok(Arc::new(Glm41vProcessor::load(dir)?)),
        Family::CogVlm | Family::CogVlm2 | Family::CogAgent => {
            Ok(Arc::new(CogProcessor::load(dir)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value, json};

    /// Keys of the language model, which transformers 5 nests in `text_config`.
    const LANGUAGE: [&str; 24] = [
        "hidden_size",
        "hidden_act",
        "intermediate_size",
        "ffn_hidden_size",
        "num_hidden_layers",
        "num_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "num_multi_query_heads",
        "multi_query_group_num",
        "kv_channels",
        "head_dim",
        "vocab_size",
        "padded_vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "layernorm_epsilon",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "add_qkv_bias",
        "attention_bias",
        "rope_theta",
        "partial_rotary_factor",
    ];

    #[test]
    fn known_checkpoints_are_refused_by_name_with_the_nearest_that_works() {
        for (config, name, nearest) in [
            (
                json!({"model_type": "glm4v_moe"}),
                "GLM-4.5V",
                "GLM-4.6V-Flash",
            ),
            (
                json!({"architectures": ["Glm4vMoeForConditionalGeneration"]}),
                "GLM-4.6V",
                "GLM-4.6V-Flash",
            ),
            (
                json!({"model_type": "glm46v", "text_config": {"model_type": "glm4v_moe_text"}}),
                "GLM-4.6V",
                "GLM-4.6V-Flash",
            ),
            (
                json!({"model_type": "glm46v", "text_config": {"n_routed_experts": 128}}),
                "GLM-4.6V",
                "GLM-4.6V-Flash",
            ),
            (
                json!({"model_type": "minicpmv4_6", "text_config": {"model_type": "qwen3_5_text"}}),
                "MiniCPM-V 4.6",
                "MiniCPM-V 4.5",
            ),
        ] {
            let bytes = serde_json::to_vec(&config).unwrap();
            let error = Family::of_bytes(&bytes, Path::new("config.json")).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(nearest), "{text}");
        }
    }

    /// Name and `config.json` of every golden pack with plain weights, in the flat layout.
    fn packs() -> Vec<(String, Map<String, Value>)> {
        let packs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        let mut found = Vec::new();
        for pack in std::fs::read_dir(packs).unwrap() {
            let pack = pack.unwrap().path();
            let Ok(bytes) = std::fs::read(pack.join("config.json")) else {
                continue;
            };
            let mut config: Map<String, Value> = serde_json::from_slice(&bytes).unwrap();
            if config.contains_key("quantization_config") {
                continue;
            }
            if let Some(Value::Object(text)) = config.shift_remove("text_config") {
                let kind = config["model_type"].clone();
                config.extend(text);
                config.insert("model_type".into(), kind);
            }
            found.push((pack.display().to_string(), config));
        }
        assert_eq!(found.len(), 13);
        found
    }

    /// What the family reads in `config`, as text.
    fn read(config: &Map<String, Value>) -> Result<String, ConfigError> {
        let bytes = serde_json::to_vec(config).unwrap();
        let path = Path::new("config.json");
        Ok(match Family::of_bytes(&bytes, path)? {
            Family::MiniCpm => format!("{:?}", MiniCpmConfig::parse(&bytes, path)?),
            Family::Glm4v => format!("{:?}", Glm4vConfig::parse(&bytes, path)?),
            Family::Glm41v => format!("{:?}", Glm41vConfig::parse(&bytes, path)?),
            _ => format!("{:?}", CogConfig::parse(&bytes, path)?),
        })
    }

    /// `config` as transformers 5 saves it.
    fn nested(config: &Map<String, Value>) -> Map<String, Value> {
        let mut config = config.clone();
        let mut text = Map::new();
        for key in LANGUAGE {
            text.extend(
                config
                    .shift_remove(key)
                    .map(|value| (key.to_owned(), value)),
            );
        }
        let mut rope = json!({"rope_type": "default"});
        for key in ["rope_theta", "partial_rotary_factor"] {
            if let Some(value) = text.shift_remove(key) {
                rope[key] = value;
            }
        }
        for key in ["rope_scaling", "rope_parameters"] {
            if let Some(Value::Object(scaling)) = config.shift_remove(key) {
                rope.as_object_mut().unwrap().extend(scaling);
            }
        }
        text.insert("rope_parameters".into(), rope);
        text.insert("dtype".into(), "float32".into());
        config.shift_remove("torch_dtype");
        config.insert("dtype".into(), "float32".into());
        config.insert("text_config".into(), text.into());
        config
    }

    /// Replaces the value at `path` (names between dots).
    fn set(config: &mut Map<String, Value>, path: &str, value: Value) {
        let mut config = config;
        let (parents, last) = path.rsplit_once('.').unwrap_or(("", path));
        for name in parents.split('.').filter(|name| !name.is_empty()) {
            config = config[name].as_object_mut().unwrap();
        }
        config.insert(last.to_owned(), value);
    }

    /// Paths of all numbers in `config`.
    fn numbers(config: &Map<String, Value>, parent: &str, found: &mut Vec<String>) {
        for (key, value) in config {
            match value {
                Value::Object(inside) => numbers(inside, &format!("{parent}{key}."), found),
                Value::Number(_) => found.push(format!("{parent}{key}")),
                _ => {}
            }
        }
    }

    #[test]
    fn every_family_reads_the_layout_of_transformers_5() {
        for (pack, flat) in packs() {
            let nested = nested(&flat);
            assert_eq!(read(&nested).unwrap(), read(&flat).unwrap(), "{pack}");
            let mut scaled = nested.clone();
            set(
                &mut scaled,
                "text_config.rope_parameters.rope_type",
                "yarn".into(),
            );
            assert!(read(&scaled).is_err(), "{pack}");
            let mut moved = nested.clone();
            set(
                &mut moved,
                "text_config.rope_parameters.rope_theta",
                json!(123),
            );
            assert_ne!(read(&moved).ok(), read(&flat).ok(), "{pack}");
            set(&mut moved, "text_config.rope_theta", json!(1e4));
            assert!(read(&moved).is_err(), "{pack}: two bases");
            let mut twice = nested;
            set(&mut twice, "hidden_size", json!(4096));
            let error = read(&twice).unwrap_err();
            let text = std::error::Error::source(&error).unwrap().to_string();
            assert!(text.contains("text_config.hidden_size"), "{pack}: {text}");
        }
    }

    #[test]
    fn every_family_refuses_what_no_decoder_computes() {
        for (pack, config) in packs() {
            let inside = match config.contains_key("text_config") {
                true => "text_config.",
                false => "",
            };
            let with = |field: &str, value: Value| {
                let mut config = config.clone();
                set(&mut config, &format!("{inside}{field}"), value);
                read(&config)
            };
            for (field, value) in [
                ("hidden_act", json!("gelu")),
                ("attention_dropout", json!(0.1)),
                (
                    "layer_types",
                    json!(["full_attention", "sliding_attention"]),
                ),
            ] {
                let error = with(field, value).unwrap_err().to_string();
                assert!(error.starts_with(field), "{pack}: {error}");
            }
        }
    }

    #[test]
    fn null_is_a_value_as_in_transformers() {
        for (pack, config) in packs() {
            let with = |path: &str| {
                let mut config = config.clone();
                set(&mut config, path, Value::Null);
                read(&config)
            };
            let whole = read(&config).unwrap();
            for path in [
                "text_config",
                "rope_scaling",
                "rope_parameters",
                "quantization_config",
            ] {
                // The GLM-4.1V line has the parts of its positions there.
                if !path.starts_with("rope_") || config.get(path).is_none_or(Value::is_null) {
                    assert_eq!(with(path).unwrap(), whole, "{pack}: {path}");
                }
            }
            let mut all = Vec::new();
            numbers(&config, "", &mut all);
            for path in all {
                let last = path.rsplit('.').next().unwrap();
                match with(&path) {
                    Ok(found) if last == "num_key_value_heads" => assert_ne!(found, whole),
                    Ok(found) => assert_eq!(found, whole, "{pack}: {path}"),
                    Err(error) => {
                        let text = format!("{error:?}");
                        assert!(text.contains("null"), "{pack}: {path}: {text}");
                    }
                }
            }
        }
        let (_, mini) = packs()
            .into_iter()
            .find(|(name, _)| name.ends_with("v-2_6"))
            .unwrap();
        for flag in ["drop_vision_last_layer", "use_image_id", "slice_mode"] {
            let mut null = mini.clone();
            set(&mut null, flag, Value::Null);
            let mut no = mini.clone();
            set(&mut no, flag, false.into());
            assert_eq!(read(&null).unwrap(), read(&no).unwrap(), "{flag}");
        }
    }

    #[test]
    fn sizes_of_no_model_are_refused_with_their_bound() {
        for (pack, config) in packs() {
            let whole = read(&config).unwrap();
            let mut all = Vec::new();
            numbers(&config, "", &mut all);
            for path in all {
                for hostile in [1_usize << 31, usize::MAX] {
                    let mut config = config.clone();
                    set(&mut config, &path, json!(hostile));
                    match read(&config) {
                        Err(ConfigError::Inconsistent { reason, .. }) => {
                            let bound =
                                reason.starts_with("it must be") || reason.contains("patches");
                            assert!(bound, "{pack}: {path}: {reason}");
                        }
                        Err(_) => {}
                        // A base of angles, an epsilon, or a field that no code reads.
                        Ok(found) => {
                            let real = ["rope_theta", "eps", "range", "factor", "ratio", "epsilon"];
                            let real = real.iter().any(|name| path.ends_with(name));
                            assert!(real || found == whole, "{pack}: {path} = {hostile}");
                        }
                    }
                }
            }
        }
    }
}
