//! Processor of samples, from a model directory: sizes and tokenizer.

use super::config::CogConfig;
use crate::data::conversation::control_tokens;
use crate::generation_config::stop_ids;
use crate::processor::ProcessorError;
use crate::text::Tokenizer;
use std::path::Path;

/// Tokens that open or close sequences and turns of Llama 2 and Llama 3.
const CONTROL: [&str; 9] = [
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
];

/// Processor of the CogVLM family: turns samples into token ids, labels and image patches. Its sample rules
/// are in `sample.rs`.
#[derive(Clone, Debug)]
pub struct CogProcessor {
    pub(super) config: CogConfig,
    pub(super) tokenizer: Tokenizer,
    /// Tokens that are plain text where a user types them.
    pub(super) control: Vec<String>,
    /// Tokens that end an answer.
    pub(super) stop_ids: Vec<i32>,
}

impl CogProcessor {
    /// Reads `config.json` and the tokenizer files of the model directory `dir`.
    ///
    /// # Errors
    /// [`ProcessorError`] naming the file that is missing or invalid.
    pub fn load(dir: &Path) -> Result<Self, ProcessorError> {
        let config = CogConfig::load(dir)?;
        let tokenizer = Tokenizer::load(dir)?;
        let named: Vec<String> = tokenizer
            .named_tokens()
            .map(|(_, text)| text.to_owned())
            .collect();
        let texts = CONTROL.into_iter().chain(named.iter().map(String::as_str));
        let control = control_tokens(&tokenizer, texts);
        let stop_ids = stop_ids(dir, [config.eos])?;
        Ok(Self {
            config,
            tokenizer,
            control,
            stop_ids,
        })
    }

    /// The configuration of the model that samples are encoded for.
    #[must_use]
    pub fn config(&self) -> &CogConfig {
        &self.config
    }
}
