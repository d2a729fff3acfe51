//! Processor of samples, from a model directory: image settings, tokenizer, chat template and ids of
//! the markers.

use std::path::Path;

use serde::Deserialize;

use super::config::{MiniCpmConfig, Release, SlicingConfig};
use crate::data::SINGLE_IMAGE;
use crate::data::conversation::control_tokens;
use crate::generation_config::stop_ids;
use crate::processor::{Normalization, ProcessorError, agree, read_preprocessor};
use crate::text::{ChatTemplate, Tokenizer, TokenizerError};

/// Tokens that open or close turns, or stand for images and sound. `<box>`, `<ref>` and the like are content.
const CONTROL: [&str; 11] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<|audio_start|>",
    "<|audio|>",
    "<|audio_end|>",
];

/// Texts of the markers that a prompt puts around image features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Markers {
    /// Marker before the features of an image's overview (the whole image, resized).
    pub image_start: String,
    /// Marker after the features of the overview.
    pub image_end: String,
    /// Marker before the features of a cell (a part of a large image).
    pub slice_start: String,
    /// Marker after the features of a cell.
    pub slice_end: String,
    /// Marker before the number of an image.
    pub image_id_start: String,
    /// Marker after the number of an image.
    pub image_id_end: String,
    /// Placeholder token, of which a prompt has one for each image feature.
    pub feature: String,
}

impl Markers {
    /// All markers except [`SINGLE_IMAGE`], the mark of an image in the data.
    fn all(&self) -> impl Iterator<Item = &str> {
        let texts = [
            &self.image_start,
            &self.image_end,
            &self.slice_start,
            &self.slice_end,
            &self.image_id_start,
            &self.image_id_end,
            &self.feature,
        ];
        let texts = texts.into_iter().map(String::as_str);
        texts.filter(|text| *text != SINGLE_IMAGE)
    }
}

/// Image and prompt settings of a model directory.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessorConfig {
    /// Rules by which large images are cut into cells.
    pub slicing: SlicingConfig,
    /// Number of image tokens per slice.
    pub query_num: usize,
    /// Whether images get a number (image id) in the prompt.
    pub use_image_id: bool,
    /// How pixel bytes become inputs of the vision tower.
    pub normalization: Normalization,
    /// Texts of the markers around image features.
    pub markers: Markers,
}

impl ProcessorConfig {
    /// Reads the settings from `preprocessor_config.json` of the directory `dir` and from `model`, the
    /// configuration of the model.
    ///
    /// # Errors
    /// [`ProcessorError`] if they are missing or invalid, or contradict `model`.
    pub fn load(dir: &Path, model: &MiniCpmConfig) -> Result<Self, ProcessorError> {
        let raw: RawProcessor = read_preprocessor(dir)?;
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

#[derive(Deserialize, PartialEq)]
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

/// Ids of the tokens that the sample rules look for.
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

/// Processor of MiniCPM: turns samples into token ids, labels and image patches. Its sample rules are in
/// `sample.rs`.
#[derive(Clone, Debug)]
pub struct MiniCpmProcessor {
    pub(super) config: ProcessorConfig,
    pub(super) tokenizer: Tokenizer,
    pub(super) template: ChatTemplate,
    pub(super) ids: MarkerIds,
    /// Tokens that are plain text where a user types them. `<image>` is not one: it is the mark of an image.
    pub(super) control: Vec<String>,
    /// Tokens that end an answer.
    pub(super) stop_ids: Vec<i32>,
    pub(super) vocab_size: usize,
    /// Whether the template writes thoughts.
    pub(super) thinks: bool,
    /// Whether the model takes frames of a video with their times.
    pub(super) takes_videos: bool,
}

impl MiniCpmProcessor {
    /// Reads `config.json`, the image settings, the tokenizer files and the chat template of
    /// the model directory `dir`.
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
        let markers = config.markers.all();
        let control = control_tokens(&tokenizer, CONTROL.into_iter().chain(markers));
        let padding = tokenizer.id("<|endoftext|>").ok();
        let stop_ids = stop_ids(dir, [ids.eos, ids.turn_end].into_iter().chain(padding))?;
        Ok(Self {
            config,
            tokenizer,
            template,
            ids,
            stop_ids,
            control,
            vocab_size,
            thinks: model.release == Release::V4_5,
            takes_videos: model.takes_videos(),
        })
    }

    /// The image and prompt settings of the model directory.
    pub fn config(&self) -> &ProcessorConfig {
        &self.config
    }
}
