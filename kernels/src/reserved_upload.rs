//! Reserved device memory for host-to-device copies.

use crate::pool::Tag;
use crate::{DType, Shape, Tensor};
use std::any::Any;
use std::sync::Arc;

/// Device memory reserved for a later host-to-device copy. It is reserved before the work that should overlap
/// with the copy is queued. The copy then waits only for work that was queued before the reservation.
/// Dropping it frees the memory.
#[derive(Debug)]
pub struct ReservedUpload {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) tag: Tag,
    /// The reserved memory. `None` on a device that allocates when the bytes come.
    pub(crate) tensor: Option<Tensor>,
    /// Event that the copy waits for: the last use of the same memory by its previous owner, if any.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by GPUs"))]
    pub(crate) behind: Option<Arc<dyn Any + Send + Sync>>,
}

impl ReservedUpload {
    /// Reservation without memory; the device allocates on upload.
    pub(crate) const fn later(shape: Shape, dtype: DType, tag: Tag) -> Self {
        Self {
            shape,
            dtype,
            tag,
            tensor: None,
            behind: None,
        }
    }

    /// The reserved memory as a tensor with unspecified contents. `None` on a device that allocates only when
    /// the bytes are copied.
    #[must_use]
    pub fn into_tensor(self) -> Option<Tensor> {
        self.tensor
    }
}
