//! Uploads into reserved memory: the copy overlaps with work queued between reservation and upload.

use super::CudaBackend;
use crate::check;
use crate::error::Result;
use crate::pool::Tag;
use crate::reserved_upload::ReservedUpload;
use crate::tensor::OnDevice;
use crate::{DType, Shape, Tensor};

const OP: &str = "upload";

impl CudaBackend {
    pub(super) fn reserve_upload_op(
        &self,
        shape: Shape,
        dtype: DType,
        tag: Tag,
    ) -> Result<ReservedUpload> {
        // The host keeps a copy of integers, which it gets together with the bytes. So integers are allocated then.
        if dtype == DType::I32 {
            return Ok(ReservedUpload::later(shape, dtype, tag));
        }
        let bytes = shape.elems() * dtype.size_bytes();
        let place = OnDevice {
            memory: self.memory.clone(),
            placed: self.pool.place(bytes, tag)?,
            known: None,
        };
        let start = place.placed.offset();
        let tensor = Tensor::on_device(place, shape, dtype);
        let now = || self.executor.record_event();
        let behind = self.uses.behind(start..start + bytes as u64, now);
        Ok(ReservedUpload {
            behind: behind.map_err(Self::device_error(OP))?,
            tensor: Some(tensor),
            shape,
            dtype,
            tag,
        })
    }

    /// Copies `bytes` into the reserved tensor and returns it.
    pub(super) fn upload_into_op(
        &self,
        tensor: Tensor,
        behind: Option<&super::Event>,
        bytes: &[u8],
    ) -> Result<Tensor> {
        check::upload(bytes, tensor.shape(), tensor.dtype())?;
        let at = self.address(OP, &tensor)?;
        // SAFETY: the tensor has as many bytes. Only the reservation has used this range since it was allocated, and the
        // event `behind` follows every earlier use.
        let uploaded = unsafe { self.executor.upload(at, bytes, behind) };
        uploaded.map_err(Self::device_error(OP))?;
        Ok(tensor)
    }
}
