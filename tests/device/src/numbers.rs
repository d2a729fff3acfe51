//! Conversion of numbers to and from bytes.

use half::{bf16, f16};
use kernels::DType;

/// `values` rounded to a dtype.
#[must_use]
pub fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::BF16 => {
            let narrow: Vec<_> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            bytemuck::pod_collect_to_vec(&narrow)
        }
        DType::F16 => {
            let narrow: Vec<_> = values.iter().map(|x| f16::from_f32(*x)).collect();
            bytemuck::pod_collect_to_vec(&narrow)
        }
        _ => bytemuck::pod_collect_to_vec(values),
    }
}

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

/// Index of the first difference in bits; any two NaN are equal.
#[must_use]
pub fn first_difference(got: &[f32], want: &[f32]) -> Option<usize> {
    let same = |(g, w): (&f32, &f32)| g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
    let difference = got.iter().zip(want).position(|pair| !same(pair));
    difference.or((got.len() != want.len()).then_some(got.len().min(want.len())))
}
