//! Everything of a model folder that turns samples into model inputs: picture settings, tokenizer,
//! chat template and the ids of the markers.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use super::config::{ConfigError, MiniCpmConfig, SlicingConfig};
use crate::text::{ChatTemplate, TemplateError, Tokenizer, TokenizerError};

/// Why a model folder yields no processor.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcessorError {
    /// `config.json` cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tokenizer files cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// `preprocessor_config.json` is missing or cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// `preprocessor_config.json` is not valid.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        source: serde_json::Error,
    },
    /// The two configuration files disagree.
    #[error("{field} is {config} in config.json but {preprocessor} in preprocessor_config.json")]
    Disagree {
        /// The setting.
        field: &'static str,
        /// Its value in `config.json`.
        config: usize,
        /// Its value in `preprocessor_config.json`.
        preprocessor: usize,
    },
    /// A standard deviation of zero, or a mean or deviation that is not finite.
    #[error("norm_mean {mean:?} and norm_std {std:?} are no usable normalisation")]
    Normalization {
        /// Mean per channel.
        mean: [f32; 3],
        /// Standard deviation per channel.
        std: [f32; 3],
    },
}

/// Turns bytes into the values the vision tower sees, in `f32`: `(v / 255 - mean) / std`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalization {
    mean: [f32; 3],
    std: [f32; 3],
}

impl Normalization {
    /// Normalisation by `mean` and `std` per channel (red, green, blue).
    ///
    /// # Errors
    /// [`ProcessorError::Normalization`] if a deviation is zero or any value is not finite.
    pub fn new(mean: [f32; 3], std: [f32; 3]) -> Result<Self, ProcessorError> {
        let finite = mean.iter().chain(&std).all(|v| v.is_finite());
        if !finite || std.contains(&0.0) {
            return Err(ProcessorError::Normalization { mean, std });
        }
        Ok(Self { mean, std })
    }

    /// Value of `byte` in `channel` (0 to 2).
    pub fn normalize(&self, channel: usize, byte: u8) -> f32 {
        (f32::from(byte) / 255.0 - self.mean[channel]) / self.std[channel]
    }

    /// Values of `patches` as laid out in [`Slice::patches`](super::slicing::Slice::patches), each
    /// patch of `3 * patch_size * patch_size` bytes.
    pub fn normalize_patches(&self, patches: &[u8], patch_size: usize) -> Vec<f32> {
        let table: [[f32; 256]; 3] =
            std::array::from_fn(|c| std::array::from_fn(|byte| self.normalize(c, byte as u8)));
        let mut values = Vec::with_capacity(patches.len());
        for (i, plane) in patches.chunks(patch_size * patch_size).enumerate() {
            values.extend(plane.iter().map(|&byte| table[i % 3][usize::from(byte)]));
        }
        values
    }
}

/// Texts of the markers that stand around picture features in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Markers {
    /// Before the overview, and before its features.
    pub image_start: String,
    /// After the overview.
    pub image_end: String,
    /// Before a cell.
    pub slice_start: String,
    /// After a cell.
    pub slice_end: String,
    /// Before the number of a picture.
    pub image_id_start: String,
    /// After the number of a picture.
    pub image_id_end: String,
    /// The token whose embedding is replaced by one feature.
    pub feature: String,
}

/// Picture and prompt settings of a model folder.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessorConfig {
    /// How pictures are cut.
    pub slicing: SlicingConfig,
    /// Image tokens per slice.
    pub query_num: usize,
    /// Whether pictures are numbered in the prompt.
    pub use_image_id: bool,
    /// Bytes to values.
    pub normalization: Normalization,
    /// Marker texts.
    pub markers: Markers,
}

impl ProcessorConfig {
    /// Combines `model` with `preprocessor_config.json` of the folder `dir`.
    ///
    /// # Errors
    /// [`ProcessorError`] if the file is missing or invalid, or contradicts `model`.
    pub fn load(dir: &Path, model: &MiniCpmConfig) -> Result<Self, ProcessorError> {
        let path = dir.join("preprocessor_config.json");
        let bytes = std::fs::read(&path).map_err(|source| ProcessorError::Read {
            path: path.clone(),
            source,
        })?;
        let raw: RawProcessor = serde_json::from_slice(&bytes)
            .map_err(|source| ProcessorError::Json { path, source })?;
        agree(
            "scale_resolution",
            model.slicing.scale_resolution,
            raw.scale_resolution,
        )?;
        agree("patch_size", model.slicing.patch_size, raw.patch_size)?;
        agree(
            "query_num (image_feature_size)",
            model.query_num,
            raw.image_feature_size,
        )?;
        let mut slicing = model.slicing;
        if !raw.slice_mode {
            slicing.max_slice_nums = 1;
        }
        Ok(Self {
            slicing,
            query_num: model.query_num,
            use_image_id: model.use_image_id && raw.use_image_id,
            normalization: Normalization::new(raw.norm_mean, raw.norm_std)?,
            markers: Markers {
                image_start: raw.im_start,
                image_end: raw.im_end,
                slice_start: raw.slice_start,
                slice_end: raw.slice_end,
                image_id_start: raw.im_id_start,
                image_id_end: raw.im_id_end,
                feature: raw.unk,
            },
        })
    }
}

fn agree(
    field: &'static str,
    config: usize,
    preprocessor: Option<usize>,
) -> Result<(), ProcessorError> {
    match preprocessor {
        Some(preprocessor) if preprocessor != config => Err(ProcessorError::Disagree {
            field,
            config,
            preprocessor,
        }),
        _ => Ok(()),
    }
}

#[derive(Deserialize)]
#[serde(default)]
struct RawProcessor {
    scale_resolution: Option<usize>,
    patch_size: Option<usize>,
    image_feature_size: Option<usize>,
    use_image_id: bool,
    slice_mode: bool,
    norm_mean: [f32; 3],
    norm_std: [f32; 3],
    im_start: String,
    im_end: String,
    slice_start: String,
    slice_end: String,
    im_id_start: String,
    im_id_end: String,
    unk: String,
}

impl Default for RawProcessor {
    fn default() -> Self {
        Self {
            scale_resolution: None,
            patch_size: None,
            image_feature_size: None,
            use_image_id: true,
            slice_mode: true,
            norm_mean: [0.5; 3],
            norm_std: [0.5; 3],
            im_start: "<image>".to_owned(),
            im_end: "</image>".to_owned(),
            slice_start: "<slice>".to_owned(),
            slice_end: "</slice>".to_owned(),
            im_id_start: "<image_id>".to_owned(),
            im_id_end: "</image_id>".to_owned(),
            unk: "<unk>".to_owned(),
        }
    }
}

/// Token ids the sample rules look for.
#[derive(Clone, Copy, Debug)]
pub(super) struct MarkerIds {
    pub(super) turn_start: i32,
    pub(super) turn_end: i32,
    pub(super) assistant: i32,
    pub(super) eos: i32,
    pub(super) image_start: i32,
    pub(super) image_end: i32,
    pub(super) slice_start: i32,
    pub(super) slice_end: i32,
}

impl MarkerIds {
    fn find(tokenizer: &Tokenizer, markers: &Markers) -> Result<Self, TokenizerError> {
        Ok(Self {
            turn_start: tokenizer.id("<|im_start|>")?,
            turn_end: tokenizer.id("<|im_end|>")?,
            assistant: tokenizer.id("assistant")?,
            eos: tokenizer.eos_id()?,
            image_start: tokenizer.id(&markers.image_start)?,
            image_end: tokenizer.id(&markers.image_end)?,
            slice_start: tokenizer.id(&markers.slice_start)?,
            slice_end: tokenizer.id(&markers.slice_end)?,
        })
    }
}

/// Turns samples into model inputs; the sample rules are in [`super::sample`].
#[derive(Clone, Debug)]
pub struct Processor {
    pub(super) config: ProcessorConfig,
    pub(super) tokenizer: Tokenizer,
    pub(super) template: ChatTemplate,
    pub(super) ids: MarkerIds,
    pub(super) vocab_size: usize,
}

impl Processor {
    /// Reads `config.json`, `preprocessor_config.json`, the tokenizer files and the chat template of
    /// the model folder `dir`.
    ///
    /// # Errors
    /// [`ProcessorError`] naming the file that is missing, invalid or contradicts another.
    pub fn load(dir: &Path) -> Result<Self, ProcessorError> {
        let model = MiniCpmConfig::load(dir)?;
        let config = ProcessorConfig::load(dir, &model)?;
        let tokenizer = Tokenizer::load(dir)?;
        let template = ChatTemplate::load(dir, &tokenizer)?;
        let ids = MarkerIds::find(&tokenizer, &config.markers)?;
        // numbers and features are markers too, though no rule looks for their ids
        for text in [&config.markers.image_id_start, &config.markers.image_id_end] {
            tokenizer.id(text)?;
        }
        tokenizer.id(&config.markers.feature)?;
        let vocab_size = model.language.vocab_size;
        Ok(Self {
            config,
            tokenizer,
            template,
            ids,
            vocab_size,
        })
    }

    /// Picture and prompt settings.
    pub fn config(&self) -> &ProcessorConfig {
        &self.config
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Id of the end-of-sequence token.
    pub fn eos_id(&self) -> i32 {
        self.ids.eos
    }

    /// Ids of the tokens that end an answer: the end of the sequence, of a turn and of a text.
    pub fn stop_ids(&self) -> Vec<i32> {
        let mut ids = vec![self.ids.eos, self.ids.turn_end];
        ids.extend(self.tokenizer.id("<|endoftext|>").ok());
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Text of `ids`, special tokens left out.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] for a negative id, or if the tokenizer fails.
    pub fn decode(&self, ids: &[i32]) -> Result<String, TokenizerError> {
        self.tokenizer.decode(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalisation_is_per_channel() {
        let norm = Normalization::new([0.5, 0.0, 1.0], [0.5, 1.0, 2.0]).unwrap();
        let values = norm.normalize_patches(&[0, 255, 255, 0, 0, 255], 1);
        assert_eq!(values, [-1.0, 1.0, 0.0, -1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_zero_deviation_is_refused() {
        let result = Normalization::new([0.5; 3], [0.5, 0.0, 0.5]);
        assert!(matches!(result, Err(ProcessorError::Normalization { .. })));
    }
}
