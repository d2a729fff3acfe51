//! Uploads into reserved memory: the copy overlaps with work queued between reservation and upload.

use super::{CudaBackend, Event, Upload};
use crate::check;
use crate::error::Result;
use crate::pool::Tag;
use crate::reserved_upload::ReservedUpload;
use crate::tensor::OnDevice;
use crate::{Backend, DType, Shape, Tensor};

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
        let behind = self.last_use(OP, start..start + bytes as u64)?;
        Ok(ReservedUpload {
            behind,
            tensor: Some(tensor),
            shape,
            dtype,
            tag,
        })
    }

    /// Copies bytes into reserved tensors in one call. Integers have no reserved tensor: each is uploaded by itself.
    pub(super) fn upload_all_op(
        &self,
        uploads: Vec<(ReservedUpload, &[u8])>,
    ) -> Result<Vec<Tensor>> {
        let (mut all, mut reserved) = (Vec::with_capacity(uploads.len()), Vec::new());
        for (place, bytes) in uploads {
            let Some(tensor) = place.tensor else {
                all.push(self.upload(bytes, place.shape, place.dtype, place.tag)?);
                continue;
            };
            reserved.push((tensor.clone(), place.behind, bytes));
            all.push(tensor);
        }
        self.upload_reserved(reserved)?;
        Ok(all)
    }

    /// Copies bytes into reserved tensors, each after its event.
    pub(super) fn upload_reserved<'b>(
        &self,
        reserved: impl IntoIterator<Item = (Tensor, Option<Event>, &'b [u8])>,
    ) -> Result<()> {
        let mut uploads = Vec::new();
        for (tensor, behind, bytes) in reserved {
            check::upload(bytes, tensor.shape(), tensor.dtype())?;
            let to = self.address(OP, &tensor)?;
            uploads.push(Upload { to, bytes, behind });
        }
        // SAFETY: each tensor has as many bytes. Only the reservation has used its range since it was allocated, and its
        // event follows every earlier use.
        let uploaded = unsafe { self.executor.upload(&uploads) };
        uploaded.map_err(Self::device_error(OP))
    }
}
