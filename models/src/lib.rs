//! Vision-language models with their image and text processing. Their code is forward only; a tape of checkpointed
//! segments computes gradients.
//!
//! | module | concept |
//! |---|---|
//! | [`autograd`] | the tape: leases a segment, runs it, and recomputes it in backward |
//! | [`ops`] | differentiable operations, each with its backward |
//! | [`nn`] | blocks over parameter handles |
//! | [`init`] | random start values |
//! | [`params`], [`lora`], [`selection`] | declaring parameters for the engine; adapters; which parts train |
//! | [`families`], [`options`] | the model family of a directory; settings of a run |
//! | [`batch`] | packed inputs of one pass |
//! | [`generate`] | answers: the decoder's cache, sampling, ranks in lock step |
//! | [`weights`], [`adapter`] | reading safetensors directories; reading saved adapters |
//! | [`seeded`] | random weights of any size without a file |
//! | [`cogvlm`] | CogVLM, CogAgent and CogVLM2 |
//! | [`eva`] | the vision tower of the Cogs and GLM-4V |
//! | [`glm4v`], [`glm41v`] | GLM-4V-9B; GLM-4.1V-9B-Thinking |
//! | [`minicpm`] | MiniCPM-V 2.6 and MiniCPM-o 2.6 |
//! | [`data`], [`processor`] | samples in users' formats and as model inputs; the conversion |
//! | [`config`], [`image`], [`text`] | reading `config.json`; images to pixels, conversations to tokens |
#![forbid(unsafe_code)]

pub mod adapter;
pub mod autograd;
mod base64;
pub mod batch;
pub mod cogvlm;
pub mod config;
pub mod data;
mod declared;
mod error;
pub mod eva;
pub mod families;
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
pub mod generation_config;
pub mod glm41v;
pub mod glm4v;
pub mod image;
pub mod init;
pub mod lora;
pub mod minicpm;
pub mod nn;
pub mod ops;
pub mod options;
pub mod params;
mod parquet;
mod pieces;
pub mod pipeline;
pub mod places;
pub mod processor;
pub mod quantization;
pub mod sat;
pub mod seeded;
pub mod selection;
mod synthetic;
pub mod text;
pub mod torch_file;
pub mod weights;

pub use batch::{Batch, VisionBatch};
pub use declared::Declared;
pub use error::{ModelError, Result};
pub use families::{Family, OpenError, open_model, open_processor, open_shapes};
pub use options::ModelOptions;
pub use processor::Processor;
pub use quantization::QuantizedWeights;
pub use synthetic::{VideoBounds, largest_sample, largest_video, video_frames};
pub use weights::{WeightError, WeightSource};

use autograd::{Loss, Tape, Var};
use data::{EncodedPrompt, EncodedSample, Slice};
use engine::{ModelSpec, ParamId, ParamSpec, UnitId};
use generate::CacheShape;
use init::Init;
use kernels::{Backend, DType, Tensor};
use nn::LmHead;
use params::SplitAdapters;
use std::ops::Range;

/// Borrowed inputs of one sample, to be packed into a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct SampleInput<'a> {
    /// Token ids of the sample.
    pub input_ids: &'a [i32],
    /// Target token ids, already shifted, one per token; empty when nothing is supervised.
    pub labels: &'a [i32],
    /// Token ranges `start..end` that image features replace: range k belongs to slice k, or to image k in a
    /// model that sees each image more than once.
    pub image_bounds: &'a [(usize, usize)],
    /// Slices (inputs of the vision tower) of the sample's images; those without a range have no effect.
    pub slices: &'a [Slice],
}

impl<'a> From<&'a EncodedSample> for SampleInput<'a> {
    fn from(sample: &'a EncodedSample) -> Self {
        Self {
            input_ids: &sample.input_ids,
            labels: &sample.labels,
            image_bounds: &sample.image_bounds,
            slices: &sample.slices,
        }
    }
}

impl<'a> From<&'a EncodedPrompt> for SampleInput<'a> {
    fn from(prompt: &'a EncodedPrompt) -> Self {
        Self {
            input_ids: &prompt.input_ids,
            labels: &[],
            image_bounds: &prompt.image_bounds,
            slices: &prompt.slices,
        }
    }
}

/// Part of a model. Settings choose for each part whether it trains, and whether its activations are stored
/// or recomputed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tower {
    /// The vision tower, which turns images into features.
    Vision,
    /// The projector or resampler, which brings features to the width of the language model.
    Resampler,
    /// The language model: token embedding, decoder, head and loss.
    Language,
}

/// A vision-language model for training, evaluation and generation: its parameter list and its forward pass,
/// without weights.
pub trait VisionLanguageModel: Send + Sync + std::fmt::Debug {
    /// The model's units and parameters, with the settings of the run.
    fn declared(&self) -> &Declared;

    /// The model's units and parameters, in the order of the forward pass.
    fn spec(&self) -> &ModelSpec {
        &self.declared().spec
    }

    /// The settings of the run that affect the model.
    fn options(&self) -> &ModelOptions {
        &self.declared().options
    }

    /// The part of the model that the unit or parameter called `name` belongs to.
    fn tower_of(&self, name: &str) -> Tower {
        (self.declared().tower)(name)
    }

    /// The part of the model that a unit belongs to.
    fn tower(&self, unit: UnitId) -> Tower {
        self.tower_of(&self.spec().units[unit.index()].name)
    }

    /// Fused layers whose projections have one adapter each, by path; none in most models.
    fn split_adapters(&self) -> &SplitAdapters {
        &self.declared().split_adapters
    }

    /// Dtype of weights and activations.
    fn dtype(&self) -> DType {
        self.options().dtype
    }

    /// Packs samples into one batch on the device.
    ///
    /// # Errors
    /// When a sample does not fit the model or memory runs out.
    fn collate(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch>;

    /// Packs one new token per sample, each at its position, for a pass that reads the earlier tokens from a
    /// key/value cache.
    ///
    /// # Errors
    /// When memory runs out.
    fn collate_next(
        &self,
        tokens: &[i32],
        positions: &[i32],
        backend: &dyn Backend,
    ) -> Result<Batch>;

    /// Sizes of the keys and values that a key/value cache holds per token.
    fn cache_shape(&self) -> CacheShape;

    /// The last norm of the decoder and its output head.
    fn head(&self) -> &LmHead;

    /// Hidden states of all tokens before the last norm, `[T, D]`. A batch without images does not run the vision
    /// units. Keys and values go through the batch's cache, if any.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn hidden<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Var>;

    /// Runs the whole model on `batch` and computes the loss of every token.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn forward<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Loss> {
        let hidden = self.hidden(tape, batch)?;
        self.head().loss(tape, batch, &hidden)
    }

    /// f32 logits `[samples, vocabulary]` after the last token of each sample.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn next_token_logits<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        self.head().logits(tape, &hidden, Some(&batch.last_rows))
    }

    /// f32 logits of all rows, `[T, v]`. For comparisons on small models; training never computes them.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn full_logits<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        self.head().logits(tape, &hidden, None)
    }

    /// Distribution of the random initial values of a base parameter with several axes.
    fn start_values(&self, param: &ParamSpec) -> Init;

    /// Writes the random initial values of the range `elements` (row-major) of the parameter `id` into `out`.
    /// They are a function of seed, tensor name and element only.
    fn init(&self, id: ParamId, seed: u64, elements: Range<usize>, out: &mut [f32]) {
        let param = &self.spec().params[id.index()];
        init::fill(param, self.start_values(param), seed, elements, out);
    }
}
