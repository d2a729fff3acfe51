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
pub const MODEL_TYPES: [&str; 6] = [
    "minicpmv",
    "minicpmo",
    "CogVLMForCausalLM",
    "CogAgentForCausalLM",
    "chatglm",
    "glm4v",
];

/// Family of published models that [`open_model`] supports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// MiniCPM-V 2.6 and MiniCPM-o 2.6.
    MiniCpm,
    /// GLM-4V-9B.
    Glm4v,
    /// GLM-4.1V-9B-Thinking.
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
        if let Ok(Some(edition)) = Edition::read(fields) {
            return Ok(match edition {
                Edition::CogVlm => Self::CogVlm,
                Edition::CogVlm2 => Self::CogVlm2,
                Edition::CogAgent => Self::CogAgent,
            });
        }
        let model_type: String = fields.or("model_type", String::new())?;
        let architectures: Vec<String> = fields.or("architectures", Vec::new())?;
        let architecture = architectures.into_iter().next().unwrap_or_default();
        let vision = fields.optional::<serde::de::IgnoredAny>("vision_config")?;
        match &*model_type {
            "minicpmv" | "minicpmo" => Ok(Self::MiniCpm),
            // The text models of the family have the same name.
            "chatglm" if vision.is_some() => Ok(Self::Glm4v),
            "glm4v" => Ok(Self::Glm41v),
            "" => Err(ConfigError::UnsupportedModel {
                found: architecture,
            }),
            _ => Err(ConfigError::UnsupportedModel { found: model_type }),
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
