//! Settings of a run that shape a model of any family.

use crate::lora::LoraConfig;
use crate::params::is_added;
use crate::selection::Selection;
use crate::{ModelError, Result, Tower};
use engine::ModelSpec;
use kernels::DType;

/// Rounding of the cosines and sines of rotary positions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RopePrecision {
    /// Rounds where the family's reference code does; the published checkpoints were trained this way.
    #[default]
    Model,
    /// No rounding: f32 throughout.
    F32,
}

/// Settings of a run that shape a model.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelOptions {
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// Whether the vision tower is trainable. The projector is always trainable in a full fine-tune, and frozen in a
    /// run of adapters or p-tuning unless it is named.
    pub tune_vision: bool,
    /// Whether the language model is trainable, embeddings and head included.
    pub tune_llm: bool,
    /// The trainable base parameters, instead of `tune_vision` and `tune_llm`.
    pub train: Option<Selection>,
    /// Base parameters that stay frozen; wins over every other setting. Adapters are not affected.
    pub freeze: Option<Selection>,
    /// LoRA settings, if the run has adapters.
    pub lora: Option<LoraConfig>,
    /// Rounding of rotary positions.
    pub rope_precision: RopePrecision,
    /// Learned tokens per decoder layer (p-tuning v2); 0 for none. CogVLM and CogAgent only.
    pub ptuning_tokens: usize,
}

impl ModelOptions {
    /// A full fine-tune in `dtype`.
    #[must_use]
    pub fn new(dtype: DType) -> Self {
        Self {
            dtype,
            tune_vision: true,
            tune_llm: true,
            train: None,
            freeze: None,
            lora: None,
            rope_precision: RopePrecision::Model,
            ptuning_tokens: 0,
        }
    }

    /// Whether the base parameter `name` in `tower` is trainable. Adapters always are.
    #[must_use]
    pub fn trains(&self, name: &str, tower: Tower) -> bool {
        let chosen = match (&self.train, tower) {
            (Some(train), _) => train.contains(name),
            (None, Tower::Vision) => self.tune_vision,
            (None, Tower::Language) => self.tune_llm,
            (None, Tower::Resampler) => self.lora.is_none() && self.ptuning_tokens == 0,
        };
        let saved = self.lora.as_ref().is_some_and(|lora| lora.saves(name));
        let frozen = self
            .freeze
            .as_ref()
            .is_some_and(|freeze| freeze.contains(name));
        (chosen || saved) && !frozen
    }

    /// Dtype of rotary angles for families whose reference code rounds them.
    #[must_use]
    pub fn rotary_dtype(&self) -> DType {
        match self.rope_precision {
            RopePrecision::Model => self.dtype,
            RopePrecision::F32 => DType::F32,
        }
    }

    /// Checks that p-tuning is off, for families that do not support it.
    ///
    /// # Errors
    /// [`ModelError::Config`].
    pub fn refuse_ptuning(&self) -> Result<()> {
        match self.ptuning_tokens {
            0 => Ok(()),
            tokens => Err(ModelError::Config {
                field: "ptuning_tokens",
                value: tokens.to_string(),
                reason: "only CogVLM, CogAgent and CogVLM2 have learned keys and values",
            }),
        }
    }

    /// Checks that every word of `train` and `freeze` matches a parameter of the model.
    ///
    /// # Errors
    /// [`ModelError::Selection`], which names the word.
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        let base = spec.params.iter().map(|param| &*param.name);
        let base = base.filter(|name| !is_added(name));
        for selection in [&self.train, &self.freeze].into_iter().flatten() {
            selection.check(base.clone())?;
        }
        Ok(())
    }
}
