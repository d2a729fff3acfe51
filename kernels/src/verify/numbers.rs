//! Operands of checks, and comparisons of results.

use crate::DType;
use crate::random::philox4x32;
use half::{bf16, f16};
use std::f64::consts::TAU;

/// Unit roundoff of f32.
pub const U32: f64 = 1.0 / (1u64 << 24) as f64;

/// Error of one rounding to a dtype of a value close to `want`: relative, plus half the smallest subnormal.
#[must_use]
pub fn store(dtype: DType, want: f64) -> f64 {
    let (unit, subnormal) = match dtype {
        DType::BF16 => (1.0 / 256.0, 1e-38),
        DType::F16 => (1.0 / 2048.0, 3.0e-8),
        _ => (U32, 1e-38),
    };
    // The rounded value is not exactly `want`, hence the factor 1 + 2^-10.
    unit * want.abs() * 1.001 + subnormal
}

/// Distance of two backends with different orders of sums, for results of at most `size` from small operations. It
/// allows a few roundings to `dtype` of values near the largest, and a few hundred f32 roundings of terms of that size.
/// A wrong operand, extent or stride is off by `size` itself.
#[must_use]
pub fn wiring(dtype: DType, size: f64) -> f64 {
    6.0 * store(dtype, size) + 512.0 * U32 * size
}

/// Distance of two devices for a loss, or for the norm of a tensor's gradient, of this size after some dozens of
/// layers. In f32 it allows sums of at most some thousands of terms in another order: 2^-11 of the sum of their
/// magnitudes, which is seldom a hundred times the sum. In 16 bits every layer rounds its results, and the gradients of
/// the logits are rounded too.
#[must_use]
pub fn trained(dtype: DType, size: f64) -> f64 {
    let unit = match dtype {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => return 1e-4 * size,
    };
    16.0 * unit * size
}

/// `values` rounded to a dtype.
#[must_use]
pub fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    let pairs = |narrow: &dyn Fn(f32) -> u16| -> Vec<u8> {
        values
            .iter()
            .flat_map(|x| narrow(*x).to_ne_bytes())
            .collect()
    };
    match dtype {
        DType::BF16 => pairs(&|x| bf16::from_f32(x).to_bits()),
        DType::F16 => pairs(&|x| f16::from_f32(x).to_bits()),
        _ => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

/// Index of the first difference in bits; any two NaN are equal.
#[must_use]
pub fn first_difference(got: &[f32], want: &[f32]) -> Option<usize> {
    let same = |(g, w): (&f32, &f32)| g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
    let difference = got.iter().zip(want).position(|pair| !same(pair));
    difference.or((got.len() != want.len()).then_some(got.len().min(want.len())))
}

/// Standard normal numbers, a function of the operand's number and the element. The same on every machine.
pub(super) fn normal(operand: u32, n: usize) -> Vec<f32> {
    let draw = |i: usize| {
        let [a, b, ..] = philox4x32([i as u32, operand, 0, 0], [61, 0]);
        // In (0, 1], so that the logarithm is finite.
        let unit = |word: u32| (f64::from(word) + 1.0) / 4_294_967_296.0;
        ((-2.0 * unit(a).ln()).sqrt() * (TAU * unit(b)).cos()) as f32
    };
    (0..n).map(draw).collect()
}
