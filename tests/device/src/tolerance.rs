//! How far a result may lie from the f64 reference, derived from the rounding errors made.
//!
//! `u` is the unit roundoff (half an ulp of 1): 2^-24 for f32, 2^-8 for bf16, 2^-11 for f16.

use kernels::DType;

/// The roundings of attention, each as a bound on an absolute error (`relative`: on a relative one).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attention {
    /// Of the tensors.
    pub dtype: DType,
    /// Weights and their gradients are rounded to `dtype` before they are multiplied.
    pub narrow_weights: bool,
}

impl Attention {
    const U32: f64 = 1.0 / (1u64 << 24) as f64;

    /// One rounding to `dtype`: relative, and half the smallest subnormal of f16. The rounded value lies within a
    /// small relative error of `x`: 1 + 2^-10.
    #[must_use]
    pub fn store(self, x: f64) -> f64 {
        match self.dtype {
            DType::BF16 => x.abs() * 1.001 / 256.0,
            DType::F16 => x.abs() * 1.001 / 2048.0 + 3.0e-8,
            _ => x.abs() * 1.001 * Self::U32 + 1e-38,
        }
    }

    /// A weight before its product.
    #[must_use]
    pub fn weight(self, x: f64) -> f64 {
        if self.narrow_weights {
            self.store(x)
        } else {
            0.0
        }
    }

    /// An f32 sum of `n` products whose magnitudes add up to `magnitude`: tensor cores may cut off instead of
    /// rounding, which doubles the error of an addition.
    #[must_use]
    pub fn sum(self, n: usize, magnitude: f64) -> f64 {
        2.0 * (n + 2) as f64 * Self::U32 * magnitude
    }

    /// A scaled score of `d` products: their sum; the rounded factor, and the product with it.
    #[must_use]
    pub fn score(self, d: usize, score: f64, magnitude: f64) -> f64 {
        self.sum(d, magnitude) + 3.0 * Self::U32 * score.abs()
    }

    /// Relative, of `exp(score - base)` from a score with an error and a base with an error: both in powers of two
    /// (a rounding of the base), one rounding of the difference, and 2^-22 for the exponential.
    #[must_use]
    pub fn exponential(self, score: (f64, f64), base: (f64, f64)) -> f64 {
        let sizes = 3.0 * score.0.abs() + 3.0 * base.0.abs();
        let exponent = score.1 + base.1 + Self::U32 * sizes;
        exponent.exp_m1() + 8.0 * Self::U32
    }

    /// Relative, of a running sum of `keys` positive weights that are rescaled once a tile of 32 keys or less.
    #[must_use]
    pub fn running_sum(self, keys: usize) -> f64 {
        (keys as f64 + 8.0 * (keys as f64 / 32.0 + 2.0)) * Self::U32
    }

    /// The log-sum-exp from a sum with a relative error: the largest score's error is part of it; the logarithm is
    /// good to 2^-22 and a few roundings of the result and of the base follow.
    #[must_use]
    pub fn log_sum_exp(self, want: f64, sum_relative: f64, largest_score: f64) -> f64 {
        sum_relative + 8.0 * Self::U32 * (1.0 + want.abs() + largest_score.abs())
    }
}
