//! Vision-language models whose authors write the forward pass only, with their image and text processing.
//!
//! | module | concept |
//! |---|---|
//! | [`autograd`] | the tape: checkpointed segments, recomputed in backward |
//! | [`ops`] | differentiable operations: forward and backward |
//! | [`nn`] | layers and blocks over parameter ids |
//! | [`init`] | random initial values |
//! | [`params`], [`lora`], [`selection`] | declaring parameters for the engine; adapters; which parameters are trainable |
//! | [`families`], [`options`] | which model a directory has; settings of a run |
//! | [`batch`] | packed inputs of one pass |
//! | [`generate`] | generation: KV cache, sampling, ranks in lockstep |
//! | [`weights`], [`adapter`] | readers of safetensors directories, and of what a run saved beside its base |
//! | [`seeded`] | random weights of any size without a file |
//! | [`cogvlm`] | CogVLM, CogAgent and CogVLM2 |
//! | [`eva`] | the vision tower of CogVLM, CogAgent, CogVLM2 and GLM-4V |
//! | [`glm4v`], [`glm41v`] | GLM-4V-9B; GLM-4.1V-9B-Thinking |
//! | [`minicpm`] | MiniCPM-V 2.6 and MiniCPM-o 2.6 |
//! | [`data`], [`processor`] | raw and encoded samples; the interface that encodes them |
//! | [`config`], [`image`], [`text`] | `config.json`; image decoding; tokenizers and chat templates |
#![forbid(unsafe_code)]

pub mod adapter;
pub mod autograd;
pub mod batch;
pub mod cogvlm;
pub mod config;
pub mod data;
mod error;
pub mod eva;
pub mod families;
#[doc(hidden)]
pub mod fuzzing;
pub mod generate;
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
pub mod processor;
pub mod seeded;
pub mod selection;
mod synthetic;
pub mod text;
pub mod weights;

pub use batch::{Batch, VisionBatch};
pub use error::{ModelError, Result};
pub use families::{Family, OpenError, open_model, open_processor, open_shapes};
pub use options::ModelOptions;
pub use processor::Processor;
pub use synthetic::largest_sample;
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

/// One encoded sample, before it is packed into a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct SampleInput<'a> {
    /// Token ids.
    pub input_ids: &'a [i32],
    /// Labels, already shifted; empty when nothing is supervised.
    pub labels: &'a [i32],
    /// Token ranges `start..end` that features replace; range `k` belongs to slice `k`.
    pub image_bounds: &'a [(usize, usize)],
    /// Image slices; a slice without a range has no effect.
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

/// Part of a model. Recompute, and whether parameters are trainable, are chosen per tower.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tower {
    /// Vision tower: images to features.
    Vision,
    /// Resampler, projector or merger: features to the width of the language model.
    Resampler,
    /// Language model: embedding, decoder, head and loss.
    Language,
}

/// A vision-language model for training, evaluation and generation.
pub trait VisionLanguageModel: Send + Sync + std::fmt::Debug {
    /// Units and parameters in forward order.
    fn spec(&self) -> &ModelSpec;

    /// The run's settings.
    fn options(&self) -> &ModelOptions;

    /// Tower of the unit or parameter called `name`.
    fn tower_of(&self, name: &str) -> Tower;

    /// Tower of a unit.
    fn tower(&self, unit: UnitId) -> Tower {
        self.tower_of(&self.spec().units[unit.index()].name)
    }

    /// Fused layers with one adapter per projection.
    fn split_adapters(&self) -> &SplitAdapters {
        static NONE: SplitAdapters = SplitAdapters::new();
        &NONE
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

    /// Packs one token per sample, each at its position, for samples whose previous tokens are cached.
    ///
    /// # Errors
    /// When memory runs out.
    fn collate_next(
        &self,
        tokens: &[i32],
        positions: &[i32],
        backend: &dyn Backend,
    ) -> Result<Batch>;

    /// Sizes of the KV cache.
    fn cache_shape(&self) -> CacheShape;

    /// The final norm and the output head.
    fn head(&self) -> &LmHead;

    /// Hidden states of all tokens before the final norm, `[T, D]`. A batch without images does not run the vision
    /// units. Attention uses the batch's cache, if it has one.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn hidden<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Var>;

    /// Forward pass with the loss.
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

    /// f32 logits `[T, vocabulary]` of all rows. For tests on small models; training does not materialize logits.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn full_logits<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        self.head().logits(tape, &hidden, None)
    }

    /// Distribution of initial values of a base parameter with more than one axis.
    fn start_values(&self, param: &ParamSpec) -> Init;

    /// Writes random initial values of `elements` (row-major) of a parameter into `out`. They depend on seed, tensor
    /// name and element index only.
    fn init(&self, id: ParamId, seed: u64, elements: Range<usize>, out: &mut [f32]) {
        let param = &self.spec().params[id.index()];
        init::fill(param, self.start_values(param), seed, elements, out);
    }
}
