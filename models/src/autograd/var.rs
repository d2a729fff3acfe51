//! Values that gradients flow through.

use kernels::{DType, Shape, Tensor};
use std::sync::atomic::{AtomicU64, Ordering};

/// Identity of a tape or scope, so that a value of one is not used under another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RecorderId(u64);

impl RecorderId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Place of a gradient during the sweep.
pub(crate) type Slot = usize;

/// A value on a tape or scope. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct Var {
    value: Tensor,
    recorder: RecorderId,
    slot: Option<Slot>,
    requires_grad: bool,
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
        }
    }

    /// The forward value.
    #[must_use]
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// Gives up the place on the tape, keeps the value.
    #[must_use]
    pub fn into_value(self) -> Tensor {
        self.value
    }

    /// Extents.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.value.shape()
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Whether a trainable parameter or a leaf lies behind the value.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// Where its gradient is collected; `None` when none is wanted or nothing is recorded.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.slot
    }

    pub(crate) fn recorder(&self) -> RecorderId {
        self.recorder
    }
}
