//! Tolerances against the f64 reference, derived from the rounding errors.
//!
//! `u` is the unit roundoff (half an ulp of 1): 2^-24 for f32, 2^-8 for bf16, 2^-11 for f16. Every operation computes
//! in f32 and rounds once on store. So a tolerance is
//! `store(want) + U32 * (number of f32 roundings that can add up) * (magnitude of the rounded values)`.
//! In a sum of `n` terms every term goes through at most `n` additions, so the error is below `n * U32 * sum |terms|`
//! for the worst order. The kernels' lanes and fused products do better.

use kernels::DType;

pub(crate) const U32: f64 = 1.0 / (1u64 << 24) as f64;

/// Relative error of rounding to a dtype.
pub(crate) fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => U32,
    }
}

/// Error of one store: a relative part, plus half the smallest subnormal for f16 (2^-25).
pub(crate) fn store(dtype: DType, want: f64) -> f64 {
    let subnormal = if dtype == DType::F16 { 3.0e-8 } else { 1e-38 };
    // The rounded value is not exactly `want` but within the f32 error of it: a factor of 1 + 2^-10.
    unit(dtype) * want.abs() * 1.001 + subnormal
}

/// Error of a sum of `terms` products whose magnitudes sum to `magnitude`.
pub(crate) fn sum(dtype: DType, terms: usize, want: f64, magnitude: f64) -> f64 {
    // One rounding per product, one per addition, two for bias and factor.
    store(dtype, want) + (terms + 3) as f64 * U32 * magnitude
}

/// Error of an elementwise expression with `operations` roundings of values up to `size`.
pub(crate) fn pointwise(dtype: DType, operations: usize, want: f64, size: f64) -> f64 {
    store(dtype, want) + operations as f64 * U32 * size
}

/// Error of GELU and SiLU. The exponential is accurate to 4 `U32`. Its argument has up to 6 roundings of a value up
/// to 12 (|x| <= 4, and the tanh form's 2u is below 12). The exponential turns them into relative errors, and
/// sigmoid's slope damps them by 1/4. Products and sums add about 10.
pub(crate) fn gate(dtype: DType, want: f64, size: f64) -> f64 {
    pointwise(dtype, 4 + 6 * 12 / 4 + 10, want, size)
}

/// Error of a normalization of `c` elements. Mean, variance and the two sums of the backward are sums of `c` terms.
/// With 32 lanes and a tree, each has an error up to `c / 32 + 6` roundings, relative to the root mean square.
/// Subtracting the mean amplifies them by `cancel = rms(x) / std(x)`.
pub(crate) fn norm(dtype: DType, c: usize, want: f64, size: f64, cancel: f64) -> f64 {
    let roundings = 3.0 * (c as f64 / 32.0 + 6.0) + 12.0;
    store(dtype, want) + roundings * U32 * size * (1.0 + cancel)
}

/// Error of attention over `keys` keys, with scores up to `score` from `d` products each. A score has an error of
/// `(d + 2) * U32 * score_magnitude`, which the exponential makes relative. The weights sum to one, so the weighted
/// mean of values up to `size` has twice that error. Rescalings (two per tile) and the sums over keys add to it.
pub(crate) fn attention(
    dtype: DType,
    (keys, d): (usize, usize),
    want: f64,
    score_magnitude: f64,
    size: f64,
) -> f64 {
    let score = (d + 2) as f64 * score_magnitude;
    let tiles = 2.0 * (keys as f64 / 256.0 + 1.0);
    store(dtype, want) + U32 * size * (2.0 * score + keys as f64 + tiles + 16.0)
}

/// Error of one row's loss. The log-sum-exp has the error of a logit (`c` products) plus the relative error of a sum
/// of `v` positive terms (`1024 / 32 + 6` roundings in a stretch, f64 across). The result's rounding is added.
pub(crate) fn loss(c: usize, logit_magnitude: f64, want: f64) -> f64 {
    U32 * (2.0 * (c + 2) as f64 * logit_magnitude + 38.0 + 8.0 + want.abs())
}

/// Error of central differences in f64 with step `h` against an exact derivative. Truncation is `h^2` times the third
/// derivative (order 10 here). Rounding is `1e-16 / h` times the magnitude of the function.
pub(crate) fn finite_difference(h: f64, function: f64, derivative: f64) -> f64 {
    100.0 * h * h * (1.0 + derivative.abs()) + 1e-14 / h * (1.0 + function.abs())
}
