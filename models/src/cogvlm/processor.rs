//! Processor of samples, from a model directory: sizes and tokenizer.

use super::config::CogConfig;
use crate::processor::ProcessorError;
use crate::text::Tokenizer;
use std::path::Path;

/// Processor of the CogVLM family: turns samples into token ids, labels and image patches. Its sample rules
/// are in `sample.rs`.
#[derive(Clone, Debug)]
pub struct CogProcessor {
    pub(super) config: CogConfig,
    pub(super) tokenizer: Tokenizer,
}

impl CogProcessor {
    /// Reads `config.json` and the tokenizer files of the model directory `dir`.
    ///
    /// # Errors
    /// [`ProcessorError`] naming the file that is missing or invalid.
    pub fn load(dir: &Path) -> Result<Self, ProcessorError> {
        let config = CogConfig::load(dir)?;
        let tokenizer = Tokenizer::load(dir)?;
        Ok(Self { config, tokenizer })
    }

    /// The configuration of the model that samples are encoded for.
    #[must_use]
    pub fn config(&self) -> &CogConfig {
        &self.config
    }
}
