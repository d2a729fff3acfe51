//! Values with gradients.

use kernels::{DType, Shape, Tensor};
use std::sync::atomic::{AtomicU64, Ordering};

/// Identity of a tape or scope; a value cannot be used under another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RecorderId(u64);

impl RecorderId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Index of a gradient during the sweep.
pub(crate) type Slot = usize;

/// Tensor recorded on a tape or scope, through which gradients can flow. Cloning shares its memory.
#[derive(Clone, Debug)]
pub struct Var {
    value: Tensor,
    recorder: RecorderId,
    slot: Option<Slot>,
    requires_grad: bool,
    /// Index among the outputs of the pass's segments; `None` for other values.
    output: Option<u32>,
}

impl Var {
    pub(crate) fn new(
        value: Tensor,
        recorder: RecorderId,
        slot: Option<Slot>,
        requires_grad: bool,
    ) -> Self {
        Self {
            value,
            recorder,
            slot,
            requires_grad,
            output: None,
        }
    }

    /// The same value as output `index` of the pass's segments.
    pub(crate) fn with_output(self, index: u32) -> Self {
        Self {
            output: Some(index),
            ..self
        }
    }

    /// Index among the outputs of the pass's segments.
    pub(crate) fn output(&self) -> Option<u32> {
        self.output
    }

    /// The tensor that the forward pass computed.
    #[must_use]
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// Returns the tensor, which no longer belongs to a tape.
    #[must_use]
    pub fn into_value(self) -> Tensor {
        self.value
    }

    /// Shape of the value.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.value.shape()
    }

    /// Element type of the value.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Whether the value depends on a trainable parameter or a leaf.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// Slot of its gradient; `None` without a gradient or without a record.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.slot
    }

    pub(crate) fn recorder(&self) -> RecorderId {
        self.recorder
    }
}
