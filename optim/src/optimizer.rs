//! The trait of an update rule: it declares the state it needs per element and steps flat chunks of elements.

use std::str::FromStr;

use half::{bf16, f16};
use kernels::{DType, Form};
use serde::{Deserialize, Serialize};

use crate::adamw::Blocks;
use crate::{AdamW, OptimError};

/// Precision: the element types of weights and optimizer state, as mixed-precision training names them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// `f32` weights and optimizer state.
    F32,
    /// `bf16` weights with an `f32` master copy and `f32` optimizer state.
    Bf16,
    /// `f16` weights with an `f32` master copy and `f32` optimizer state.
    Fp16,
    /// `bf16` weights without a master copy. The update rule decides how it rounds them and which type its state has.
    PureBf16,
}

impl Precision {
    /// Element type of the weights with which the model computes, in this precision.
    #[must_use]
    pub const fn weight_dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 | Self::PureBf16 => DType::BF16,
            Self::Fp16 => DType::F16,
        }
    }

    /// Whether this precision stores an `f32` master copy in addition to the weights.
    #[must_use]
    pub const fn has_master(self) -> bool {
        matches!(self, Self::Bf16 | Self::Fp16)
    }

    /// Name of the precision on command lines and in configuration files, e.g. `pure-bf16`.
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

/// One state that an update rule stores for each weight element, e.g. `exp_avg`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateSlot {
    /// Name of the state in checkpoints, as in PyTorch's optimizer state.
    pub name: &'static str,
    /// Element type of the state: `f32`, `bf16`, or `u8` for codes.
    pub dtype: DType,
    /// Elements that share one stored value: 1, or the elements of a block for an absmax.
    pub per: usize,
    /// Parameters that have the state.
    pub coverage: Coverage,
}

impl StateSlot {
    /// A state with one value per element of every parameter.
    #[must_use]
    pub const fn new(name: &'static str, dtype: DType) -> Self {
        Self {
            name,
            dtype,
            per: 1,
            coverage: Coverage::All,
        }
    }
}

/// Parameters that have a state, where a rule stores the states of some parameters in blocks
/// ([`adamw::has_blocks`](crate::adamw::has_blocks)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Coverage {
    /// Every parameter.
    All,
    /// Parameters whose states are stored in blocks.
    Blocks,
    /// The other parameters, whose states are stored element by element.
    Elements,
}

/// Gradients of one chunk (a range of elements that one call updates), in one of two element types.
#[derive(Clone, Copy, Debug)]
pub enum GradChunk<'a> {
    /// Gradients in `f32`.
    F32(&'a [f32]),
    /// Gradients in `bf16`.
    Bf16(&'a [bf16]),
}

impl GradChunk<'_> {
    /// Number of gradients in the chunk.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether the chunk has no gradients.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Weights of one chunk (a range of elements that one call updates), as a precision stores them. With master
/// weights it includes their 16-bit copy, which the step writes.
#[derive(Debug)]
pub enum WeightChunk<'a> {
    /// Weights in `f32`.
    F32(&'a mut [f32]),
    /// `f32` master weights and their `bf16` copy. The step writes the copy in the same pass and never reads it.
    Mixed {
        /// Master weights, which the step updates.
        master: &'a mut [f32],
        /// Copy of the updated master weights, rounded to nearest.
        weight: &'a mut [bf16],
    },
    /// `f32` master weights and their `f16` copy. The step writes the copy in the same pass and never reads it.
    MixedF16 {
        /// Master weights, which the step updates.
        master: &'a mut [f32],
        /// Copy of the updated master weights, rounded to nearest.
        weight: &'a mut [f16],
    },
    /// `bf16` weights without a master copy. The update rule decides how it rounds them.
    PureBf16(&'a mut [bf16]),
}

impl WeightChunk<'_> {
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32",
            Self::Mixed { .. } => "mixed bf16",
            Self::MixedF16 { .. } => "mixed f16",
            Self::PureBf16(_) => "pure bf16",
        }
    }
}

/// Values of one optimizer state, e.g. `exp_avg`, for one chunk of elements, updated in place.
#[derive(Debug)]
pub enum StateChunk<'a> {
    /// State values in `f32`.
    F32(&'a mut [f32]),
    /// State values in `bf16`.
    Bf16(&'a mut [bf16]),
    /// State values as 8-bit codes in blocks. The chunk begins at a block border of its tensor.
    Blockwise {
        /// One code per element.
        codes: &'a mut [u8],
        /// Largest magnitude of every block of [`BLOCK_ELEMS`](crate::adamw::BLOCK_ELEMS) elements.
        absmax: &'a mut [f32],
    },
}

impl StateChunk<'_> {
    /// Number of elements in the chunk.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Blockwise { codes, .. } => codes.len(),
        }
    }

    /// Whether the chunk has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The codes and absmax; `None` unless the state is stored in blocks.
    pub(crate) fn blocks(&mut self) -> Option<Blocks<'_>> {
        match self {
            Self::Blockwise { codes, absmax } => Some(Blocks { codes, absmax }),
            Self::F32(_) | Self::Bf16(_) => None,
        }
    }
}

/// Arguments of one optimizer update of one chunk of elements. Gradients, weights and every optimizer state
/// have the same number of elements.
#[derive(Debug)]
pub struct StepArgs<'a> {
    /// Index of this optimizer update in the run, from 1.
    pub step: u64,
    /// Learning rate, already multiplied by the parameter group's scale.
    pub lr: f32,
    /// Decoupled weight decay of the parameter group.
    pub weight_decay: f32,
    /// Factor by which every gradient is multiplied: the clip factor divided by the number of tokens. See
    /// [`crate::clip::GradientScale`].
    pub grad_scale: f32,
    /// Seed of the run's stochastic rounding. Rules that round to nearest ignore it.
    pub seed: u64,
    /// Global index of the chunk's first element: its offset in the concatenation of all parameters without
    /// padding. It is the position in the random stream of stochastic rounding.
    pub first_element: u64,
    /// Gradients of the chunk, before they are multiplied by `grad_scale`.
    pub grad: GradChunk<'a>,
    /// Weights of the chunk, updated in place.
    pub weight: WeightChunk<'a>,
    /// Optimizer states of the chunk, updated in place: one entry per state, in the order of
    /// [`Optimizer::slots`].
    pub state: Vec<StateChunk<'a>>,
}

/// Update rule of an optimizer, applied to flat chunks of elements. An element's result depends only on its
/// own inputs and global index, and in blocks on those of its block. So any split into chunks gives the same bits, where
/// chunks of states in blocks end at block borders of their tensor.
pub trait Optimizer: Send + Sync + std::fmt::Debug {
    /// Name of the rule in messages and checkpoints.
    fn name(&self) -> &'static str;

    /// States that the rule stores for each weight element in a precision. Their initial value is zero.
    fn slots(&self, precision: Precision) -> &'static [StateSlot];

    /// Bytes of optimizer state per element: the master copy, where the precision has one, and every slot. Where
    /// parameters differ in their states, those of a parameter stored in blocks, without the absmax.
    fn state_bytes_per_elem(&self, precision: Precision) -> usize {
        let master = if precision.has_master() {
            size_of::<f32>()
        } else {
            0
        };
        let slots = self.slots(precision).iter();
        let slots = slots.filter(|slot| slot.per == 1 && slot.coverage != Coverage::Elements);
        master + slots.map(|slot| slot.dtype.size_bytes()).sum::<usize>()
    }

    /// The rule's constants and data layout for the device's own kernels, which give the same bits as
    /// [`Optimizer::step`]. With moments of 8 bits, parameters without blocks have [`Form::elementwise`]. `None` where no kernel supports this precision; the host then steps.
    fn on_device(&self, _precision: Precision) -> Option<(&AdamW, Form)> {
        None
    }

    /// Updates weights and state in place.
    ///
    /// # Errors
    /// [`OptimError`] when lengths or element types of the chunks do not match, or `step` is 0. Nothing was changed
    /// then.
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
