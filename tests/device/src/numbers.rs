//! Conversion of numbers to and from bytes.

use half::{bf16, f16};
use kernels::DType;
pub use kernels::verify::{bytes, first_difference};

/// The numbers in such bytes.
#[must_use]
pub fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::BF16 => {
            let narrow: Vec<bf16> = bytemuck::pod_collect_to_vec(bytes);
            narrow.into_iter().map(bf16::to_f32).collect()
        }
        DType::F16 => {
            let narrow: Vec<f16> = bytemuck::pod_collect_to_vec(bytes);
            narrow.into_iter().map(f16::to_f32).collect()
        }
        _ => bytemuck::pod_collect_to_vec(bytes),
    }
}

/// `values` after a rounding to a dtype.
#[must_use]
pub fn widened(dtype: DType, values: &[f32]) -> Vec<f32> {
    self::values(dtype, &bytes(dtype, values))
}

/// One number rounded to a dtype.
#[must_use]
pub fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}
