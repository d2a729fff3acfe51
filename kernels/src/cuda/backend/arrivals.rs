//! Uploads into places that were taken before: the copy runs beside what was queued in between.

use super::CudaBackend;
use crate::arrival::Arrival;
use crate::check;
use crate::error::Result;
use crate::pool::Tag;
use crate::tensor::OnDevice;
use crate::{DType, Shape, Tensor};

const OP: &str = "upload";

impl CudaBackend {
    pub(super) fn reserve_upload_op(
        &self,
        shape: Shape,
        dtype: DType,
        tag: Tag,
    ) -> Result<Arrival> {
        // Integers are kept by the host, too, which learns them with the bytes.
        if dtype == DType::I32 {
            return Ok(Arrival::later(shape, dtype, tag));
        }
        let bytes = shape.elems() * dtype.size_bytes();
        let place = OnDevice {
            memory: self.memory.clone(),
            placed: self.pool.place(bytes, tag)?,
            known: None,
        };
        let start = place.placed.offset();
        let tensor = Tensor::on_device(place, shape, dtype);
        let now = || self.executor.moment();
        let behind = self.uses.behind(start..start + bytes as u64, now);
        Ok(Arrival {
            behind: behind.map_err(Self::device_error(OP))?,
            tensor: Some(tensor),
            shape,
            dtype,
            tag,
        })
    }

    /// The place of an arrival with `bytes` in it.
    pub(super) fn upload_into_op(
        &self,
        tensor: Tensor,
        behind: Option<&super::Moment>,
        bytes: &[u8],
    ) -> Result<Tensor> {
        check::upload(bytes, tensor.shape(), tensor.dtype())?;
        let at = self.address(OP, &tensor)?;
        // SAFETY: the tensor has as many bytes. Nobody has had it since its place was taken, whose uses lie before that
        // moment.
        let uploaded = unsafe { self.executor.upload(at, bytes, behind) };
        uploaded.map_err(Self::device_error(OP))?;
        Ok(tensor)
    }
}
