//! Where bytes will come to a device.

use crate::pool::Tag;
use crate::{DType, Shape, Tensor};
use std::any::Any;
use std::sync::Arc;

/// A place for an upload, taken before the work that is to run beside the copy is queued: the copy then waits for what
/// was queued before the place was taken, and no longer. Dropping it gives the place back.
#[derive(Debug)]
pub struct Arrival {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) tag: Tag,
    /// `None` where the device takes a place when the bytes come.
    pub(crate) tensor: Option<Tensor>,
    /// What the copy waits for, of a place that was used before.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by GPUs"))]
    pub(crate) behind: Option<Arc<dyn Any + Send + Sync>>,
}

impl Arrival {
    /// Without a place yet.
    pub(crate) const fn later(shape: Shape, dtype: DType, tag: Tag) -> Self {
        Self {
            shape,
            dtype,
            tag,
            tensor: None,
            behind: None,
        }
    }

    /// The place as a tensor, where the device took one; its contents are unspecified.
    #[must_use]
    pub fn into_tensor(self) -> Option<Tensor> {
        self.tensor
    }
}
