//! Processor of samples, from a model directory: tokenizer, image size, ids of the markers.

use std::path::Path;

use super::config::Glm4vConfig;
use crate::generation_config::stop_ids;
use crate::processor::ProcessorError;
use crate::text::{Tokenizer, TokenizerError};

/// Texts of the tokens that the sample rules write.
pub(super) mod marker {
    pub(in super::super) const PREFIX: [&str; 2] = ["[gMASK]", "<sop>"];
    pub(in super::super) const USER: &str = "<|user|>";
    pub(in super::super) const ASSISTANT: &str = "<|assistant|>";
    pub(in super::super) const IMAGE_START: &str = "<|begin_of_image|>";
    pub(in super::super) const IMAGE: &str = "<|endoftext|>";
    pub(in super::super) const IMAGE_END: &str = "<|end_of_image|>";
}

/// Ids of the tokens whose texts are in `marker`.
#[derive(Clone, Copy, Debug)]
pub(super) struct MarkerIds {
    pub(super) prefix: [i32; 2],
    pub(super) user: i32,
    pub(super) assistant: i32,
    pub(super) image_start: i32,
    pub(super) image: i32,
    pub(super) image_end: i32,
}

impl MarkerIds {
    fn find(tokenizer: &Tokenizer) -> Result<Self, TokenizerError> {
        let [mask, sop] = marker::PREFIX;
        Ok(Self {
            prefix: [tokenizer.id(mask)?, tokenizer.id(sop)?],
            user: tokenizer.id(marker::USER)?,
            assistant: tokenizer.id(marker::ASSISTANT)?,
            image_start: tokenizer.id(marker::IMAGE_START)?,
            image: tokenizer.id(marker::IMAGE)?,
            image_end: tokenizer.id(marker::IMAGE_END)?,
        })
    }
}

/// Processor of GLM-4V: turns samples into token ids, labels and image patches. Its sample rules are in
/// `sample.rs`.
#[derive(Clone, Debug)]
pub struct Glm4vProcessor {
    pub(super) tokenizer: Tokenizer,
    pub(super) ids: MarkerIds,
    pub(super) stop_ids: Vec<i32>,
    pub(super) vocab_size: usize,
    /// Side of the resized square images, in pixels.
    pub(super) image_size: usize,
    pub(super) patch_size: usize,
    /// Features of an image, without the rows around them.
    pub(super) features: usize,
    /// Whether the image may stand in the last question, as CogAgent's samples have it; it is shown in the first.
    pub(super) later_image: bool,
}

impl Glm4vProcessor {
    /// Reads `config.json` and the tokenizer files of the model directory `dir`.
    ///
    /// # Errors
    /// [`ProcessorError`] naming the file that is missing, invalid or contradicts another.
    pub fn load(dir: &Path) -> Result<Self, ProcessorError> {
        let model = Glm4vConfig::load(dir)?;
        let tokenizer = Tokenizer::load(dir)?;
        let ids = MarkerIds::find(&tokenizer)?;
        let mut ends = model.eos_ids.clone();
        for text in [marker::IMAGE, marker::USER, "<|observation|>"] {
            ends.push(tokenizer.id(text)?);
        }
        let stop_ids = stop_ids(dir, ends)?;
        Ok(Self {
            tokenizer,
            ids,
            stop_ids,
            vocab_size: model.language.vocab_size,
            image_size: model.vision.image_size,
            patch_size: model.vision.patch_size,
            features: model.features(),
            later_image: model.is_agent(),
        })
    }
}
