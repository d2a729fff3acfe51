//! Stored weights: how files are divided, and conversion of values to the file's dtype.

use kernels::{DType, Float};
use models::adapter::ADAPTER_STEM;

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
