//! Samples as inputs of models: token ids, labels, places of images and patches.

use crate::cogvlm::config::TemplateVersion;

/// Label of a position that is not supervised.
pub const IGNORED: i32 = kernels::IGNORED_LABEL;

/// Settings of a run that affect samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Most tokens of a sample, including those of images; longer samples are cut.
    pub model_max_length: usize,
    /// Maximal number of cells per image, in place of the model directory's. Only MiniCPM cuts images into cells.
    pub max_slice_nums: Option<usize>,
    /// Whether the loss of GLM-4V covers the role token after an answer. It does not in the published recipe, so its
    /// models never learn to stop. In the other families the loss always covers the end token.
    pub train_on_turn_end: bool,
    /// Prompt style in place of the model directory's. Only CogVLM, CogAgent and CogVLM2 have several.
    pub prompt: Option<PromptStyle>,
}

/// Form of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptStyle {
    /// The template.
    pub template: TemplateVersion,
    /// The code base whose form of the template is used.
    pub source: PromptSource,
}

/// The published code base that a prompt follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptSource {
    /// The code of the checkpoint on the Hub.
    #[default]
    Hub,
    /// The training scripts on SwissArmyTransformer, with their truncation of long samples.
    Sat,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self {
            model_max_length: 2048,
            max_slice_nums: None,
            train_on_turn_end: false,
            prompt: None,
        }
    }
}

/// When an image gets a number in the prompt, if the model numbers images at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlaceholderStyle {
    /// As in the fine-tuning script: only images with cells are numbered and counted.
    #[default]
    Training,
    /// As in the inference processor: every image is numbered.
    Inference,
}

/// One input of a vision tower: the patches of an image, or of a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Patches per column.
    pub rows: usize,
    /// Patches per row.
    pub cols: usize,
    /// `[rows * cols, 3 * patch * patch]` bytes. Patches are row-major. Within a patch the order is channel, pixel
    /// row, pixel column, as in a convolution's weight.
    pub patches: Vec<u8>,
}

impl Slice {
    /// Cuts the `width` x `height` pixels of `image` at `corner` (x, y) into patches of `side` x `side` pixels.
    pub fn cut(
        image: &crate::image::RgbImage,
        corner: (usize, usize),
        (width, height): (usize, usize),
        side: usize,
    ) -> Self {
        let (rows, cols) = (height / side, width / side);
        let mut patches = Vec::with_capacity(rows * cols * side * side * 3);
        for patch in 0..rows * cols {
            let x = corner.0 + patch % cols * side;
            let y = corner.1 + patch / cols * side;
            for channel in 0..3 {
                for pixel_row in 0..side {
                    let row = &image.row(y + pixel_row)[x * 3..][..side * 3];
                    patches.extend(row.iter().skip(channel).step_by(3));
                }
            }
        }
        Self {
            rows,
            cols,
            patches,
        }
    }
}

/// A training sample as input of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedSample {
    /// Token ids, `[tokens]`.
    pub input_ids: Vec<i32>,
    /// Target of each position, [`IGNORED`] without supervision, `[tokens]`: already shifted.
    pub labels: Vec<i32>,
    /// Token ranges `start..end` that features replace. Range `k` belongs to slice `k`, or to image `k` for models
    /// that see an image in several slices with one range (CogAgent).
    pub image_bounds: Vec<(usize, usize)>,
    /// Slices in the order of the text. Truncation may leave more slices than ranges; the last slices then have no
    /// effect.
    pub slices: Vec<Slice>,
    /// Number of tokens before truncation.
    pub untruncated_tokens: usize,
}

impl EncodedSample {
    /// Number of positions that enter the loss.
    pub fn supervised_tokens(&self) -> usize {
        self.labels.iter().filter(|&&l| l != IGNORED).count()
    }

    /// Number of patches of all slices.
    pub fn patches(&self) -> usize {
        self.slices
            .iter()
            .map(|slice| slice.rows * slice.cols)
            .sum()
    }
}

/// A prompt as input of the model, up to the start of the assistant's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// Token ids, `[tokens]`.
    pub input_ids: Vec<i32>,
    /// As [`EncodedSample::image_bounds`].
    pub image_bounds: Vec<(usize, usize)>,
    /// As [`EncodedSample::slices`].
    pub slices: Vec<Slice>,
}

/// Size of a sample, without its pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleSize {
    /// Number of tokens after truncation.
    pub tokens: usize,
    /// Number of tokens before truncation.
    pub untruncated_tokens: usize,
    /// Number of tokens, after truncation, that image features replace.
    pub picture_tokens: usize,
    /// Number of positions that enter the loss.
    pub supervised: usize,
    /// Number of patches of all slices.
    pub patches: usize,
    /// Number of slices.
    pub slices: usize,
}

/// Tokens of a training sample without its pixels. Fields as in [`EncodedSample`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleTokens {
    /// Token ids, `[tokens]`.
    pub input_ids: Vec<i32>,
    /// Target of each position, `[tokens]`.
    pub labels: Vec<i32>,
    /// Token ranges that features replace.
    pub image_bounds: Vec<(usize, usize)>,
    /// Number of tokens before truncation.
    pub untruncated_tokens: usize,
    /// Number of slices of all images.
    pub slices: usize,
}

/// Slices and tokens of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PicturePlan {
    /// Number of slices.
    pub slices: usize,
    /// Number of tokens of each slice.
    pub tokens_per_slice: usize,
}
