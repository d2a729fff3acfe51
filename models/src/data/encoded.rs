//! Samples as inputs of models: token ids, labels, places of images and patches.

use super::SampleError;
use crate::cogvlm::config::TemplateVersion;

/// Label of a position that is not supervised.
pub const IGNORED: i32 = kernels::IGNORED_LABEL;

/// Settings of a run that affect how samples become token ids and patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Most tokens of a sample, including those of images; longer samples are cut.
    pub model_max_length: usize,
    /// Largest number of cells (parts) that an image is cut into; `None` takes the model directory's number.
    /// Only MiniCPM cuts images.
    pub max_slice_nums: Option<usize>,
    /// Largest area of a resized image in pixels, if it is below the model directory's; only GLM-4.1V has such a bound.
    pub image_max_pixels: Option<usize>,
    /// Smallest area of a resized image in pixels, if it is above the model directory's; only GLM-4.1V has such a bound.
    pub image_min_pixels: Option<usize>,
    /// Whether the loss of GLM-4V covers the role token after an answer. It does not in the published recipe, so its
    /// models never learn to stop. In the other families the loss always covers the end token.
    pub train_on_turn_end: bool,
    /// Whether answers begin with a thought, for samples that do not say; `None` leaves it to the template. Only
    /// GLM-4.6V-Flash and MiniCPM 4.5 have the switch.
    pub enable_thinking: Option<bool>,
    /// Prompt template to use; `None` takes the model directory's. Only CogVLM, CogAgent and CogVLM2 have
    /// several.
    pub prompt: Option<PromptStyle>,
    /// Whether CogAgent takes samples without an image, for which it skips its cross attention.
    pub text_without_cross: bool,
}

/// Prompt template of a run, and the code base whose variant of it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptStyle {
    /// The template that places questions and answers in the text.
    pub template: TemplateVersion,
    /// The code base whose form of the template is followed.
    pub source: PromptSource,
}

/// The published code base that a prompt follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptSource {
    /// The code of the checkpoint on the Hub.
    #[default]
    Hub,
    /// The training scripts on SwissArmyTransformer, with their rule for long samples.
    Sat,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self {
            model_max_length: 2048,
            max_slice_nums: None,
            image_max_pixels: None,
            image_min_pixels: None,
            train_on_turn_end: false,
            enable_thinking: None,
            prompt: None,
            text_without_cross: true,
        }
    }
}

/// When an image gets a number in the prompt (if the model numbers images at all).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlaceholderStyle {
    /// As the fine-tuning script writes it: only images with cells are numbered and counted.
    #[default]
    Training,
    /// As the inference processor writes it: every image is numbered and counted.
    Inference,
}

/// One input of a vision tower, cut into patches: a whole image, or a part of a large one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Number of patches in a column, from top to bottom.
    pub rows: usize,
    /// Number of patches in a row, from left to right.
    pub cols: usize,
    /// `[frames, rows * cols, 3 * patch * patch]` bytes: patches row-major, within a patch channel, pixel
    /// row, pixel column, which is the order of the convolution's weight.
    pub patches: Vec<u8>,
    /// Number of frames of a video that the tower embeds together; 1 for an image.
    pub frames: usize,
    /// When the frame of a video was taken, in towers that encode the time; `None` for an image.
    pub stamp: Option<Stamp>,
}

/// Time of a frame of a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Tenths of seconds after the beginning of the video, if known.
    pub tenths: Option<u32>,
    /// Whether the frame's features are those of the slice before it: both become one block of features.
    pub joins: bool,
}

impl Slice {
    /// The `width` x `height` pixels of `image` from `corner` (x, y) on, in patches of `side` x `side` pixels.
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
            frames: 1,
            stamp: None,
        }
    }

    /// Adds the only frame of `other`, a slice of the same size, after the frames of this one.
    pub fn push_frame(&mut self, other: &Self) {
        self.patches.extend_from_slice(&other.patches);
        self.frames += 1;
    }

    /// Adds the last frame once more.
    pub fn repeat_frame(&mut self) {
        let last = self.patches.len() / self.frames * (self.frames - 1);
        self.patches.extend_from_within(last..);
        self.frames += 1;
    }
}

/// A training sample as input of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedSample {
    /// Token ids of the sample, `[tokens]`, after truncation.
    pub input_ids: Vec<i32>,
    /// Target token id of each position, `[tokens]`, already shifted; [`IGNORED`] where nothing is supervised.
    pub labels: Vec<i32>,
    /// Token ranges `start..end` that features replace: range k belongs to slice k, or to image k where
    /// the model sees an image more than once.
    pub image_bounds: Vec<(usize, usize)>,
    /// Slices in the order of the text; truncation may leave more slices than ranges, the last ones
    /// then have no effect.
    pub slices: Vec<Slice>,
    /// Number of tokens that the sample had before it was cut to the maximum length.
    pub untruncated_tokens: usize,
}

impl EncodedSample {
    /// Number of positions whose label is not [`IGNORED`], which are those that enter the loss.
    pub fn supervised_tokens(&self) -> usize {
        self.labels.iter().filter(|&&l| l != IGNORED).count()
    }

    /// Number of patches of all slices together.
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
    /// Token ids of the prompt, `[tokens]`.
    pub input_ids: Vec<i32>,
    /// Token ranges that features replace, as [`EncodedSample::image_bounds`].
    pub image_bounds: Vec<(usize, usize)>,
    /// Image inputs of the prompt, as [`EncodedSample::slices`].
    pub slices: Vec<Slice>,
}

/// Counts of the tokens, patches and slices of one training sample, without its pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleSize {
    /// Number of tokens after truncation.
    pub tokens: usize,
    /// Number of tokens before truncation.
    pub untruncated_tokens: usize,
    /// Number of tokens that image features replace, of those that remain after truncation.
    pub image_tokens: usize,
    /// Number of positions that enter the loss.
    pub supervised: usize,
    /// Number of image patches of all slices together.
    pub patches: usize,
    /// Number of slices, the inputs of the vision tower.
    pub slices: usize,
}

/// The tokens of a training sample, without its pixels; fields as in [`EncodedSample`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleTokens {
    /// Token ids of the sample, `[tokens]`, after truncation.
    pub input_ids: Vec<i32>,
    /// Target token id of each position, `[tokens]`, already shifted; [`IGNORED`] where nothing is supervised.
    pub labels: Vec<i32>,
    /// Token ranges `start..end` that image features replace.
    pub image_bounds: Vec<(usize, usize)>,
    /// Number of tokens that the sample had before it was cut to the maximum length.
    pub untruncated_tokens: usize,
    /// Number of slices of all images together.
    pub slices: usize,
}

/// A training sample whose images were planned from their headers and not decoded yet.
pub struct PlannedSample<'a> {
    /// Its tokens.
    pub tokens: SampleTokens,
    /// Number of image patches of all slices together.
    pub patches: usize,
    /// Decodes the images and cuts them into slices, in the order of the text.
    pub cut: Cut<'a>,
}

/// Decoding of a sample's images, which fails with the image that cannot be read.
pub type Cut<'a> = Box<dyn FnOnce() -> Result<Vec<Slice>, SampleError> + 'a>;

impl std::fmt::Debug for PlannedSample<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlannedSample")
            .field("tokens", &self.tokens)
            .field("patches", &self.patches)
            .finish_non_exhaustive()
    }
}

/// Slices and tokens that an image of a given size becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePlan {
    /// Number of slices (inputs of the vision tower) that the image becomes.
    pub slices: usize,
    /// Number of tokens that the features of one slice take in the prompt; rounded up if slices share them.
    pub tokens_per_slice: usize,
}
