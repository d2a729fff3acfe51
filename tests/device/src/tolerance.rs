//! How far a result may lie from the f64 reference, derived from the rounding errors made.
//!
//! `u` is the unit roundoff (half an ulp of 1): 2^-24 for f32, 2^-8 for bf16, 2^-11 for f16.

use kernels::DType;

const U32: f64 = 1.0 / (1u64 << 24) as f64;

/// Error of one rounding to a dtype of a value within a small relative error of `want`: relative, plus half the
/// smallest subnormal.
#[must_use]
pub fn store(dtype: DType, want: f64) -> f64 {
    let (unit, subnormal) = match dtype {
        DType::BF16 => (1.0 / 256.0, 1e-38),
        DType::F16 => (1.0 / 2048.0, 3.0e-8),
        _ => (U32, 1e-38),
    };
    // The rounded value is not exactly `want`: 1 + 2^-10.
    unit * want.abs() * 1.001 + subnormal
}

/// An f32 sum of `depth` products of 16-bit elements on tensor cores, with factor and bias; the magnitudes of all
/// terms add up to `magnitude`. Products are exact. The hardware adds up to 8 of them to the sum after aligning all
/// to the largest and cutting off below its last bit: 9 cuts below `2 U32 * magnitude` every 8 terms, 2.25 U32 a term.
/// Some sums more join the parts of the K loop; factor and bias are one rounding.
#[must_use]
pub fn tensor_sum(depth: usize, magnitude: f64) -> f64 {
    (2.25 * depth as f64 + 32.0) * U32 * magnitude
}

/// The same, stored in `out`.
#[must_use]
pub fn tensor_product(out: DType, depth: usize, want: f64, magnitude: f64) -> f64 {
    store(out, want) + tensor_sum(depth, magnitude)
}

/// Of `exp2_approx`, where the exact result is `want`: 2 units of the last place from the rounded result.
#[must_use]
pub fn exp2_approx(want: f64) -> f64 {
    2.5 * f64::from(f32::EPSILON) * want
}

/// Of `log2_approx` at `x`: absolute 2^-22 between 1/2 and 2, relative 2^-22 elsewhere, and the rounding of the
/// result.
#[must_use]
pub fn log2_approx(x: f64) -> f64 {
    let relative = 2.5 * f64::from(f32::EPSILON) * x.log2().abs();
    if (0.5..2.0).contains(&x) {
        2_f64.powi(-22) + relative
    } else {
        relative
    }
}

/// Of a matrix product's sum over `k` exact products and a summand, whose magnitudes sum to `size`: tensor cores may
/// truncate each of them to 24 bits of the largest, and truncate the sum.
#[must_use]
pub fn mma(k: usize, size: f64) -> f64 {
    (k + 2) as f64 * f64::from(f32::EPSILON) * size
}
