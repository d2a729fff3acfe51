//! How far a result may lie from the f64 reference, derived from the rounding errors made.
//!
//! `u` is the unit roundoff (half an ulp of 1): 2^-24 for f32, 2^-8 for bf16, 2^-11 for f16.

use kernels::DType;

use crate::numbers;

/// Unit roundoff of f32.
pub const U32: f64 = 1.0 / (1u64 << 24) as f64;

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

/// Bounds for one row of a normalisation of `c` elements, in which sums are made of chains of at most
/// `max(32, c / 256 + 1)` additions in a thread, 5 in a warp and 16 over warps.
#[derive(Clone, Copy, Debug)]
pub struct NormRow {
    /// Relative error of such a sum of positive terms: its additions and a few roundings of each term.
    sum: f64,
    /// Root mean square over standard deviation (0 for RMS norm, which subtracts no mean): the mean is off by `sum`
    /// times the mean size of x, so a normalised element by `sum * cancel`.
    cancel: f64,
    scale: f64,
}

impl NormRow {
    /// For the factor `scale` that normalises the row.
    #[must_use]
    pub fn new(c: usize, scale: f64, cancel: f64) -> Self {
        let additions = (c as f64 / 256.0 + 1.0).max(32.0) + 5.0 + 16.0;
        Self {
            sum: (additions + 4.0) * U32,
            cancel,
            scale,
        }
    }

    /// A normalised element: half the relative error of the variance, whose terms carry the mean's error twice and to
    /// second order; the roundings of root, quotient, difference and product.
    #[must_use]
    pub fn normal(self, normal: f64) -> f64 {
        (self.sum + 6.0 * U32) * normal.abs() + self.sum * self.cancel
    }

    /// Centre and half width of what a normalised element can be after a rounding to `dtype`: mostly one number.
    #[must_use]
    pub fn rounded(self, dtype: DType, normal: f64) -> [f64; 2] {
        let error = self.normal(normal);
        let round = |x: f64| f64::from(numbers::rounded(dtype, x as f32));
        let (low, high) = (round(normal - error), round(normal + error));
        [f64::midpoint(low, high), (high - low) / 2.0]
    }

    /// `y = normal * weight + bias` for a normalised element that is off by at most `error`.
    #[must_use]
    pub fn value(dtype: DType, [normal, error]: [f64; 2], weight: f64, bias: f64) -> f64 {
        let product = normal * weight;
        store(dtype, product + bias)
            + error * weight.abs()
            + 2.0 * U32 * (product.abs() + bias.abs())
    }

    /// `dx = scale * (g - mean(g) - normal * mean(g * normal))` for means of the sizes of `g` and of `g * normal`;
    /// `gx` is the mean of `g * normal`, whose terms carry the errors of normalised elements.
    #[must_use]
    pub fn input_gradient(
        self,
        dtype: DType,
        want: f64,
        [g, normal]: [f64; 2],
        [mean_g, mean_gx, gx]: [f64; 3],
    ) -> f64 {
        let gx_error = (2.0 * self.sum + 6.0 * U32) * mean_gx + self.sum * self.cancel * mean_g;
        let terms = g.abs() + mean_g + normal.abs() * gx.abs();
        let inner = self.sum * mean_g
            + normal.abs() * gx_error
            + self.normal(normal) * gx.abs()
            + 6.0 * U32 * terms;
        // The factor in front has the error of a normalised element without a mean.
        store(dtype, want) + self.scale * (inner + (self.sum + 6.0 * U32) * terms)
    }
}

/// Sum over `rows` of terms whose sizes add up to `magnitude` and whose own errors to `terms`: at most
/// `rows / 264 + 1` additions in a group, then at most 264 groups of up to 8 rows in 32 chains, then 32.
#[must_use]
pub fn norm_parameter(rows: usize, magnitude: f64, terms: f64) -> f64 {
    let additions = rows as f64 / 264.0 + 1.0 + 264.0 * 8.0 / 32.0 + 32.0;
    terms + (additions + 1.0) * U32 * magnitude
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
