//! Values of a tape or scope, with the slot of their gradient.

use kernels::{DType, Shape, Tensor};
use std::sync::atomic::{AtomicU64, Ordering};

/// Identity of a tape or scope. Values of one must not be used under another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RecorderId(u64);

impl RecorderId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Index of a gradient during a sweep.
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

    /// The forward value, without its slot.
    #[must_use]
    pub fn into_value(self) -> Tensor {
        self.value
    }

    /// Shape.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.value.shape()
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// Whether the value depends on a trainable parameter or a leaf.
    #[must_use]
    pub fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// Slot of its gradient; `None` when the value has no gradient or nothing is recorded.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.slot
    }

    pub(crate) fn recorder(&self) -> RecorderId {
        self.recorder
    }
}
