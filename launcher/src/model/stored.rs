//! Stored weights: how files are divided, and conversion of values to the file's dtype, and the check that values are finite.

use crate::error::{Failure, failures};
use crate::lang::both;
use engine::checkpoint::{ShardedTensorWriter, TensorSpec};
use kernels::{DType, Float};
use models::adapter::ADAPTER_STEM;
use models::sat::write::SatWriter;
use models::weights::not_finite;
use std::ops::Range;

/// Maximal size of a weight file in bytes, as in Hugging Face.
pub(crate) const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Maximal size of a weight file with this stem. Adapters have one file only, since peft reads no more.
pub(crate) fn max_shard_bytes(stem: &str) -> u64 {
    if stem == ADAPTER_STEM {
        u64::MAX
    } else {
        MAX_SHARD_BYTES
    }
}

/// Files of weights that are being written, tensor after tensor.
pub(crate) trait TensorFiles {
    /// Appends the next bytes of the tensor `name`.
    ///
    /// # Errors
    /// A file cannot be written.
    fn append(&mut self, name: &str, bytes: &[u8]) -> Result<(), Failure>;
}

impl TensorFiles for ShardedTensorWriter {
    fn append(&mut self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        self.write(name, bytes)
            .map_err(|e| failures::checkpoint(both("write weights", "写入权重"), &e))
    }
}

impl TensorFiles for SatWriter {
    fn append(&mut self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        self.write(name, bytes).map_err(|e| failures::weights(&e))
    }
}

/// Writes a tensor in blocks of at most `elems_at_once` elements. `block` returns the bytes of a range of elements
/// (row-major) in the tensor's dtype. Returns the number of bytes written.
///
/// # Errors
/// Values are not finite in that dtype (exit 15); `block` fails; the file cannot be written.
pub(crate) fn write_finite(
    file: &mut impl TensorFiles,
    tensor: &TensorSpec,
    elems_at_once: usize,
    mut block: impl FnMut(Range<usize>) -> Result<Vec<u8>, Failure>,
) -> Result<u64, Failure> {
    let elems: usize = tensor.shape.iter().product();
    let (mut written, mut bad) = (0, 0);
    for start in (0..elems).step_by(elems_at_once) {
        let block = block(start..elems.min(start + elems_at_once))?;
        bad += not_finite(tensor.dtype, &block);
        written += block.len() as u64;
        file.append(&tensor.name, &block)?;
    }
    match bad {
        0 => Ok(written),
        _ => Err(failures::not_finite_tensor(
            &tensor.name,
            bad,
            elems,
            tensor.dtype,
        )),
    }
}

/// The bytes of `values` in `dtype`, rounded to nearest even. Anything but a 16-bit float is written as f32.
pub(crate) fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => rounded::<half::bf16>(values),
        DType::F16 => rounded::<half::f16>(values),
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}

fn rounded<T: Float>(values: &[f32]) -> Vec<u8> {
    let values: Vec<T> = values.iter().map(|v| T::from_f32(*v)).collect();
    bytemuck::cast_slice(&values).to_vec()
}
