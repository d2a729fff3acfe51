//! Processor of samples, from a model directory: image settings, tokenizer and ids of the markers.

use std::path::Path;

use serde::Deserialize;

use super::config::{Glm41vConfig, MERGE, Network};
use super::resize::ImageLimits;
use super::thinking;
use crate::config::{ConfigError, size, unsupported};
use crate::data::conversation::control_tokens;
use crate::generation_config::stop_ids;
use crate::processor::{Normalization, ProcessorError, agree, read_preprocessor, settings_of};
use crate::text::{Tokenizer, TokenizerError};

/// Image settings from `preprocessor_config.json` and `config.json` of a model directory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessorConfig {
    /// Limits on the size to which images are resized.
    pub limits: ImageLimits,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// How pixel bytes become inputs of the vision tower.
    pub normalization: Normalization,
}

impl ProcessorConfig {
    /// Reads the settings from `preprocessor_config.json` of the directory `dir` and from `model`, the
    /// configuration of the model.
    ///
    /// # Errors
    /// [`ProcessorError`] if they are missing or invalid, or contradict `model`.
    pub fn load(dir: &Path, model: &Glm41vConfig) -> Result<Self, ProcessorError> {
        let raw: RawProcessor = read_preprocessor(dir)?;
        raw.check()?;
        let vision = &model.vision;
        agree("patch_size", vision.patch_size, raw.patch_size)?;
        agree("merge_size", MERGE, raw.merge_size)?;
        agree(
            "temporal_patch_size",
            vision.frames,
            raw.temporal_patch_size,
        )?;
        Ok(Self {
            limits: raw.size.limits(MERGE * vision.patch_size, vision.frames)?,
            patch_size: vision.patch_size,
            normalization: Normalization::new(raw.image_mean, raw.image_std)?,
        })
    }
}

#[derive(Deserialize, PartialEq)]
#[serde(default)]
struct RawProcessor {
    size: Size,
    do_resize: bool,
    do_rescale: bool,
    do_normalize: bool,
    rescale_factor: f64,
    patch_size: Option<usize>,
    merge_size: Option<usize>,
    temporal_patch_size: Option<usize>,
    image_mean: [f32; 3],
    image_std: [f32; 3],
}

/// Numbers of pixels, although the file calls them edges.
#[derive(Deserialize, PartialEq)]
struct Size {
    shortest_edge: usize,
    longest_edge: usize,
}

impl Size {
    fn of_videos() -> Self {
        Self {
            shortest_edge: 12_544,
            longest_edge: 47_040_000,
        }
    }

    fn limits(&self, block: usize, frames: usize) -> Result<ImageLimits, ProcessorError> {
        let max_pixels = size("size.longest_edge", self.longest_edge)?;
        let min_pixels = self.shortest_edge;
        if min_pixels > max_pixels {
            return Err(ProcessorError::Config(ConfigError::Inconsistent {
                field: "size.shortest_edge",
                found: min_pixels,
                reason: format!("size.longest_edge is {max_pixels}"),
            }));
        }
        Ok(ImageLimits {
            block,
            frames,
            min_pixels,
            max_pixels,
        })
    }
}

impl Default for RawProcessor {
    fn default() -> Self {
        Self {
            size: Size {
                shortest_edge: 12_544,
                longest_edge: 9_633_792,
            },
            do_resize: true,
            do_rescale: true,
            do_normalize: true,
            rescale_factor: 1.0 / 255.0,
            patch_size: None,
            merge_size: None,
            temporal_patch_size: None,
            image_mean: crate::processor::CLIP_MEAN,
            image_std: crate::processor::CLIP_STD,
        }
    }
}

impl RawProcessor {
    /// Fails if the file omits a step of the published pipeline.
    fn check(&self) -> Result<(), ConfigError> {
        for (field, done) in [
            ("do_resize", self.do_resize),
            ("do_rescale", self.do_rescale),
            ("do_normalize", self.do_normalize),
        ] {
            if !done {
                return Err(unsupported(field, "false".to_owned(), "true"));
            }
        }
        match (self.rescale_factor - 1.0 / 255.0).abs() < 1e-9 {
            true => Ok(()),
            false => Err(unsupported(
                "rescale_factor",
                self.rescale_factor.to_string(),
                "1/255",
            )),
        }
    }
}

/// Tokens that open or close turns, or stand for images and videos. `<think>` and the like are content.
const CONTROL: [&str; 16] = [
    "[gMASK]",
    "[MASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|video|>",
    "<|end_of_video|>",
];

/// Ids of the tokens that the sample rules write or look for.
#[derive(Clone, Copy, Debug)]
pub(super) struct MarkerIds {
    pub(super) end: i32,
    pub(super) image_start: i32,
    pub(super) image: i32,
    pub(super) image_end: i32,
}

/// Texts of the special tokens that the sample rules write or look for.
pub(super) mod marker {
    pub(in super::super) const PREFIX: &str = "[gMASK]<sop>";
    pub(in super::super) const END: &str = "<|endoftext|>";
    pub(in super::super) const IMAGE_START: &str = "<|begin_of_image|>";
    pub(in super::super) const IMAGE: &str = "<|image|>";
    pub(in super::super) const IMAGE_END: &str = "<|end_of_image|>";
    pub(in super::super) const VIDEO_START: &str = "<|begin_of_video|>";
    pub(in super::super) const VIDEO_END: &str = "<|end_of_video|>";
    pub(in super::super) const ASSISTANT: &str = "<|assistant|>";
}

impl MarkerIds {
    fn find(tokenizer: &Tokenizer) -> Result<Self, TokenizerError> {
        Ok(Self {
            end: tokenizer.id(marker::END)?,
            image_start: tokenizer.id(marker::IMAGE_START)?,
            image: tokenizer.id(marker::IMAGE)?,
            image_end: tokenizer.id(marker::IMAGE_END)?,
        })
    }
}

/// Fails if `config.json` gives the image token another id than the tokenizer.
fn check_image_id(stated: Option<i32>, found: i32) -> Result<(), ConfigError> {
    match stated {
        Some(stated) if stated != found => Err(ConfigError::Inconsistent {
            field: "image_token_id",
            found: usize::try_from(stated).unwrap_or_default(),
            reason: format!("{} of the tokenizer is {found}", marker::IMAGE),
        }),
        _ => Ok(()),
    }
}

/// Settings of videos: of `video_preprocessor_config.json`, or, as transformers 5 saves them, of `video_processor` in
/// `processor_config.json`. The defaults are those of the published class.
#[derive(Deserialize, PartialEq)]
struct VideoSettings {
    #[serde(default = "Size::of_videos")]
    size: Size,
    patch_size: Option<usize>,
    merge_size: Option<usize>,
    temporal_patch_size: Option<usize>,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
}

/// Limits on the frames of a video. The tower sees frames as it sees images, so all other settings must be those of `images`.
fn video_limits(dir: &Path, images: &ProcessorConfig) -> Result<ImageLimits, ProcessorError> {
    let ImageLimits { block, frames, .. } = images.limits;
    let own = settings_of(dir, "video_preprocessor_config.json", "video_processor")?;
    let Some::<VideoSettings>(own) = own else {
        return Size::of_videos().limits(block, frames);
    };
    agree("patch_size of videos", images.patch_size, own.patch_size)?;
    agree("merge_size of videos", MERGE, own.merge_size)?;
    agree(
        "temporal_patch_size of videos",
        frames,
        own.temporal_patch_size,
    )?;
    if own.image_mean.is_some() || own.image_std.is_some() {
        let mean = own.image_mean.unwrap_or(crate::processor::CLIP_MEAN);
        let std = own.image_std.unwrap_or(crate::processor::CLIP_STD);
        if Normalization::new(mean, std)? != images.normalization {
            let found = format!("{mean:?}, {std:?}");
            let field = "image_mean and image_std of videos";
            return Err(unsupported(field, found, "those of images").into());
        }
    }
    own.size.limits(block, frames)
}

/// Processor of the GLM-4.1V line: turns samples into token ids, labels and image patches. Its sample rules are in
/// `sample.rs`.
#[derive(Clone, Debug)]
pub struct Glm41vProcessor {
    pub(super) config: ProcessorConfig,
    /// Limits on the frames of a video; `None` in families whose videos are not supported.
    pub(super) video_limits: Option<ImageLimits>,
    /// Whether answers are written as GLM-4.6V does, with their thoughts.
    pub(super) thinks: bool,
    pub(super) tokenizer: Tokenizer,
    pub(super) ids: MarkerIds,
    /// Tokens that are plain text where a user types them.
    pub(super) control: Vec<String>,
    pub(super) stop_ids: Vec<i32>,
    pub(super) vocab_size: usize,
}

impl Glm41vProcessor {
    /// Reads `config.json`, the image settings and the tokenizer files of the model directory `dir`.
    ///
    /// # Errors
    /// [`ProcessorError`] naming the file that is missing, invalid or contradicts another.
    pub fn load(dir: &Path) -> Result<Self, ProcessorError> {
        let model = Glm41vConfig::load(dir)?;
        let config = ProcessorConfig::load(dir, &model)?;
        let tokenizer = Tokenizer::load(dir)?;
        let ids = MarkerIds::find(&tokenizer)?;
        check_image_id(model.image_token_id, ids.image)?;
        // The model type of GLM-4.6V-Flash is that of GLM-4.1V, whose tokenizer lacks the switch.
        let thinks = model.network == Network::Glm41v && tokenizer.id(thinking::OFF).is_ok();
        for text in [
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            marker::ASSISTANT,
        ] {
            tokenizer.id(text)?;
        }
        let stop_ids = stop_ids(dir, model.eos_ids.into_iter().chain([ids.end]))?;
        Ok(Self {
            config,
            video_limits: match model.network {
                Network::Glm41v => Some(video_limits(dir, &config)?),
                Network::GlmOcr => None,
            },
            thinks,
            control: control_tokens(&tokenizer, CONTROL),
            tokenizer,
            ids,
            stop_ids,
            vocab_size: model.language.vocab_size,
        })
    }

    /// The image settings of the model directory.
    #[must_use]
    pub fn config(&self) -> &ProcessorConfig {
        &self.config
    }
}
