//! Tensors from device memory of another library.

use super::CudaBackend;
use crate::cuda::launch::Address;
use crate::error::Result;
use crate::pool::Tag;
use crate::{DType, Shape, Tensor};

impl CudaBackend {
    /// Copies values that another library has in this device's memory into a new tensor, in queue order. `from` is
    /// their device address. The copy may run after this call returned.
    ///
    /// # Safety
    /// As many values as `shape` says, of `dtype`, start at `from` in memory of this device that this process can
    /// address. They are complete: the caller has synchronized the other library's stream. They stay unchanged until
    /// this backend's queue has passed the copy, for example until the tensor was read.
    ///
    /// # Errors
    /// When the pool is full or the device fails.
    pub unsafe fn import(
        &self,
        from: Address,
        shape: impl Into<Shape>,
        dtype: DType,
        tag: Tag,
    ) -> Result<Tensor> {
        const OP: &str = "import";
        let out = self.uninit(shape, dtype, tag)?;
        let to = self.address(OP, &out)?;
        // SAFETY: the caller vouches for the source; the target is a new tensor with as many bytes.
        let queued = unsafe { self.executor.copy(from, to, out.size_bytes() as u64) };
        self.counted(OP, queued)?;
        Ok(out)
    }
}
