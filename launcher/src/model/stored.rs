//! Weights as they are stored: how files are cut, and values in the dtype of the file.

use kernels::{DType, Float};
use models::adapter::ADAPTER_STEM;

/// Largest file of weights, as Hugging Face cuts them.
pub(crate) const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Largest file of the weights called `stem`: peft reads adapters from one file only.
pub(crate) fn max_shard_bytes(stem: &str) -> u64 {
    if stem == ADAPTER_STEM {
        u64::MAX
    } else {
        MAX_SHARD_BYTES
    }
}

/// The bytes of `values` in `dtype`, rounded to nearest even; anything but 16-bit floats is f32.
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
