//! Vision-language models written forward-only on a tape of replayed segments, with their image and text processing.
//!
//! | module | concept |
//! |---|---|
//! | [`autograd`] | the tape: segments leased, run, and run again in backward |
//! | [`ops`] | differentiable operations, forward beside backward |
//! | [`nn`] | blocks over parameter handles |
//! | [`init`] | random start values |
//! | [`params`], [`lora`], [`selection`] | declaring parameters for the engine; adapters; which parts train |
//! | [`families`], [`options`] | which model a folder holds; how a run sets it up |
//! | [`batch`] | packed inputs of one pass |
//! | [`generate`] | answers: the decoder's cache, sampling, ranks in lock step |
//! | [`weights`], [`adapter`] | reading safetensors folders, and what a run saved beside its base |
//! | [`seeded`] | random weights of any size without a file |
//! | [`cogvlm`] | CogVLM, CogAgent and CogVLM2 |
//! | [`eva`] | the vision tower of the Cogs and GLM-4V |
//! | [`glm4v`], [`glm41v`] | GLM-4V-9B; GLM-4.1V-9B-Thinking |
//! | [`minicpm`] | MiniCPM-V 2.6 and MiniCPM-o 2.6 |
//! | [`data`], [`processor`] | samples as users write them and as models take them; who turns one into the other |
//! | [`config`], [`image`], [`text`] | reading `config.json`; pictures to pixels, conversations to tokens |
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

/// One sample on its way into a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub struct SampleInput<'a> {
    /// Token ids.
    pub input_ids: &'a [i32],
    /// Labels, already shifted; empty when nothing is supervised.
    pub labels: &'a [i32],
    /// Token ranges that features replace: range k belongs to slice k.
    pub image_bounds: &'a [(usize, usize)],
    /// Slices; those without a range have no effect.
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

/// The parts of a model whose activations are kept or computed again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tower {
    /// Pictures to features.
    Vision,
    /// Features to the width of the language model.
    Resampler,
    /// Tokens, decoder and loss.
    Language,
}

/// What training, evaluation and generation ask of a model.
pub trait VisionLanguageModel: Send + Sync + std::fmt::Debug {
    /// Units and parameters, in forward order.
    fn spec(&self) -> &ModelSpec;

    /// The run's settings.
    fn options(&self) -> &ModelOptions;

    /// The part of the model that the unit or parameter called `name` belongs to.
    fn tower_of(&self, name: &str) -> Tower;

    /// The part of the model that a unit belongs to.
    fn tower(&self, unit: UnitId) -> Tower {
        self.tower_of(&self.spec().units[unit.index()].name)
    }

    /// Fused layers whose projections have adapters of their own.
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

    /// Packs one token per sample, each at its position, to follow samples that lie in a cache.
    ///
    /// # Errors
    /// When memory runs out.
    fn collate_next(
        &self,
        tokens: &[i32],
        positions: &[i32],
        backend: &dyn Backend,
    ) -> Result<Batch>;

    /// What the decoder keeps of a token in a cache: memory of a generation is counted with it.
    fn cache_shape(&self) -> CacheShape;

    /// The decoder's last norm and the product with the vocabulary.
    fn head(&self) -> &LmHead;

    /// Hidden states of all tokens before the last norm, `[T, D]`. A batch without pictures does not run the vision
    /// units; keys and values go through the batch's cache, if it has one.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn hidden<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Var>;

    /// The forward pass with the loss.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn forward<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Loss> {
        let hidden = self.hidden(tape, batch)?;
        self.head().loss(tape, batch, &hidden)
    }

    /// f32 logits `[samples, vocabulary]` behind the last token of each sample.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn next_token_logits<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        self.head().logits(tape, &hidden, Some(&batch.last_rows))
    }

    /// f32 logits of all rows, `[T, v]`. For comparisons on small models: training never makes them.
    ///
    /// # Errors
    /// When the engine or the device fails.
    fn full_logits<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        self.head().logits(tape, &hidden, None)
    }

    /// Distribution of random start values of a parameter of the base with several axes.
    fn start_values(&self, param: &ParamSpec) -> Init;

    /// Writes random start values of `elements` (row-major) of a parameter into `out`; a function
    /// of seed, tensor name and element only.
    fn init(&self, id: ParamId, seed: u64, elements: Range<usize>, out: &mut [f32]) {
        let param = &self.spec().params[id.index()];
        init::fill(param, self.start_values(param), seed, elements, out);
    }
}
