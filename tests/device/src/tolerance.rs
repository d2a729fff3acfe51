//! How far results may be from an f64 reference, with the reason.

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
