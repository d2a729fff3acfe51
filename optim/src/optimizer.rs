//! What an update rule is: it declares the state it keeps per element, and steps flat windows of elements.

use std::str::FromStr;

use half::{bf16, f16};
use kernels::{DType, Form};
use serde::{Deserialize, Serialize};

use crate::{AdamW, OptimError};

/// The arithmetic a model is trained in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// Everything in `f32`.
    F32,
    /// `bf16` weights, `f32` master weights and optimizer state.
    Bf16,
    /// `f16` weights, `f32` master weights and optimizer state.
    Fp16,
    /// `bf16` weights without a master; the update rule says how they and its state are stored.
    PureBf16,
}

impl Precision {
    /// Element type of the weights that the model computes with.
    #[must_use]
    pub const fn weight_dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 | Self::PureBf16 => DType::BF16,
            Self::Fp16 => DType::F16,
        }
    }

    /// Whether an `f32` copy of the weights is kept beside them.
    #[must_use]
    pub const fn has_master(self) -> bool {
        matches!(self, Self::Bf16 | Self::Fp16)
    }

    /// The word used on command lines and in configuration files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::PureBf16 => "pure-bf16",
        }
    }
}

impl FromStr for Precision {
    type Err = OptimError;

    fn from_str(word: &str) -> Result<Self, OptimError> {
        [Self::F32, Self::Bf16, Self::Fp16, Self::PureBf16]
            .into_iter()
            .find(|precision| precision.name() == word.replace('_', "-"))
            .ok_or_else(|| OptimError::UnknownWord {
                what: "precision",
                got: word.into(),
                expected: "f32, bf16, fp16, pure-bf16",
            })
    }
}

/// One number that an update rule keeps per element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateSlot {
    /// The name used in checkpoints.
    pub name: &'static str,
    /// Its element type: `f32` or `bf16`.
    pub dtype: DType,
}

/// The gradient of a window.
#[derive(Clone, Copy, Debug)]
pub enum GradWindow<'a> {
    /// `f32`.
    F32(&'a [f32]),
    /// `bf16`.
    Bf16(&'a [bf16]),
}

impl GradWindow<'_> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The weights of a window, and what is written beside them.
#[derive(Debug)]
pub enum WeightWindow<'a> {
    /// `f32` weights.
    F32(&'a mut [f32]),
    /// `f32` master weights; the `bf16` weights are written (never read) in the same pass.
    Mixed {
        /// The weights that are updated.
        master: &'a mut [f32],
        /// Their rounded copy.
        weight: &'a mut [bf16],
    },
    /// `f32` master weights; the `f16` weights are written (never read) in the same pass.
    MixedF16 {
        /// The weights that are updated.
        master: &'a mut [f32],
        /// Their rounded copy.
        weight: &'a mut [f16],
    },
    /// `bf16` weights without a master; the update rule says how they are rounded.
    PureBf16(&'a mut [bf16]),
}

impl WeightWindow<'_> {
    /// The precision that keeps such weights.
    pub(crate) const fn precision(&self) -> Precision {
        match self {
            Self::F32(_) => Precision::F32,
            Self::Mixed { .. } => Precision::Bf16,
            Self::MixedF16 { .. } => Precision::Fp16,
            Self::PureBf16(_) => Precision::PureBf16,
        }
    }

    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32",
            Self::Mixed { .. } => "mixed bf16",
            Self::MixedF16 { .. } => "mixed f16",
            Self::PureBf16(_) => "pure bf16",
        }
    }
}

/// A window of one state slot.
#[derive(Debug)]
pub enum StateWindow<'a> {
    /// Stored as `f32`.
    F32(&'a mut [f32]),
    /// Stored as `bf16`.
    Bf16(&'a mut [bf16]),
}

/// One update of one window. All windows have the same number of elements.
#[derive(Debug)]
pub struct StepArgs<'a> {
    /// Number of this update, counted from 1.
    pub step: u64,
    /// Learning rate, the group's scale included.
    pub lr: f32,
    /// Decoupled weight decay of the group.
    pub weight_decay: f32,
    /// Factor on every gradient: one over the number of tokens, times the clip factor.
    pub grad_scale: f32,
    /// Seed of stochastic rounding.
    pub seed: u64,
    /// Global, unpadded logical index of the window's first element: the position in the rounding stream.
    pub first_element: u64,
    /// Unscaled gradient.
    pub grad: GradWindow<'a>,
    /// Weights.
    pub weight: WeightWindow<'a>,
    /// One window per slot, in the order of [`Optimizer::slots`].
    pub state: Vec<StateWindow<'a>>,
}

/// An update rule over flat windows. The result for an element depends on that element's inputs and its global
/// index only, so any split of a window gives the same bits.
pub trait Optimizer: Send + Sync + std::fmt::Debug {
    /// The rule's name, for messages and checkpoints.
    fn name(&self) -> &'static str;

    /// The state kept per element in a precision; it starts as zeros.
    fn slots(&self, precision: Precision) -> &'static [StateSlot];

    /// Bytes kept per element beside the weights that the model computes with: the master copy and every slot.
    fn state_bytes_per_elem(&self, precision: Precision) -> usize {
        let master = if precision.has_master() {
            size_of::<f32>()
        } else {
            0
        };
        let slots = self.slots(precision).iter();
        master + slots.map(|slot| slot.dtype.size_bytes()).sum::<usize>()
    }

    /// The rule as the kernels of a device do it where weights and state lie, with the same bits; `None` where they do
    /// not know it in this precision.
    fn on_device(&self, _precision: Precision) -> Option<(&AdamW, Form)> {
        None
    }

    /// Updates weights and state in place.
    ///
    /// # Errors
    /// [`OptimError`] when windows do not fit together; nothing was changed then.
    fn step(&self, args: StepArgs<'_>) -> Result<(), OptimError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn precisions_parse_with_hyphen_and_underscore() {
        assert_eq!(
            "pure_bf16".parse::<Precision>().unwrap(),
            Precision::PureBf16
        );
        assert!("bf32".parse::<Precision>().is_err());
    }
}
