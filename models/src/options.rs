//! Settings of a model for a run, for all families.

use crate::lora::LoraConfig;
use crate::params::is_added;
use crate::quantization::QuantizedWeights;
use crate::selection::Selection;
use crate::{ModelError, Result, Tower};
use engine::ModelSpec;
use kernels::DType;

/// Whether the cosines and sines of the rotary position embedding are rounded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RopePrecision {
    /// Rounded as in the family's published code, which its checkpoints were trained with.
    #[default]
    Model,
    /// No rounding: they stay f32.
    F32,
}

/// Settings of a run that affect its model: dtype, trainable parameters, adapters.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelOptions {
    /// Dtype of the model's weights and activations.
    pub dtype: DType,
    /// Whether the vision tower trains. The projector trains in any case, unless the run has adapters or
    /// p-tuning and does not name it.
    pub tune_vision: bool,
    /// Whether the language model trains, embeddings and head included.
    pub tune_llm: bool,
    /// Parameters that train in addition to adapters. If set, it replaces `tune_vision` and `tune_llm`.
    pub train: Option<Selection>,
    /// Parameters that stay frozen; overrides all other settings, except for adapters.
    pub freeze: Option<Selection>,
    /// Settings of low-rank adapters; `None` trains without them.
    pub lora: Option<LoraConfig>,
    /// Whether the cosines and sines of the rotary position embedding are rounded.
    pub rope_precision: RopePrecision,
    /// Number of learned keys and values before each sample, per decoder layer (p-tuning v2); 0 for none.
    /// Only CogVLM, CogAgent and CogVLM2 support them.
    pub ptuning_tokens: usize,
    /// Which frozen weights are quantized in 4 or 8 bits.
    pub quantized: QuantizedWeights,
}

impl ModelOptions {
    /// Options that train all parameters of the model, with weights in `dtype`, without adapters.
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
            quantized: QuantizedWeights::None,
        }
    }

    /// Whether the base parameter called `name`, in the part `tower` of the model, trains. `name` must not be
    /// that of an adapter's parameter; those always train.
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

    /// Dtype that values of the rotary position embedding are rounded to: the model's dtype, or f32 with
    /// [`RopePrecision::F32`]. Only families whose published code rounds them use it.
    #[must_use]
    pub fn rotary_dtype(&self) -> DType {
        match self.rope_precision {
            RopePrecision::Model => self.dtype,
            RopePrecision::F32 => DType::F32,
        }
    }

    /// Checks that a run of a family without learned keys and values (p-tuning) does not ask for them.
    ///
    /// # Errors
    /// [`ModelError::Config`] if `ptuning_tokens` is not 0.
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

    /// Checks that every pattern in `train` and `freeze` matches a parameter of the base model, and that quantized weights
    /// do not train.
    ///
    /// # Errors
    /// [`ModelError::Selection`] with the first pattern that matches none, or as [`QuantizedWeights::check`].
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        let base = spec.params.iter().map(|param| &*param.name);
        let base = base.filter(|name| !is_added(name));
        for selection in [&self.train, &self.freeze].into_iter().flatten() {
            selection.check(base.clone())?;
        }
        self.quantized.check(spec)
    }
}
