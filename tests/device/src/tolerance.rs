//! Tolerances for the distance from the f64 reference, derived from rounding errors.
//!
//! `u` is the unit roundoff (half an ulp of 1): 2^-24 for f32, 2^-8 for bf16, 2^-11 for f16.

use crate::numbers;
use kernels::DType;
pub use kernels::verify::{U32, store, trained};

/// Error of `exp2_approx` for the exact result `want`: 2 units in the last place of the rounded result.
#[must_use]
pub fn exp2_approx(want: f64) -> f64 {
    2.5 * f64::from(f32::EPSILON) * want
}

/// Error of `log2_approx` at `x`: absolute 2^-22 between 1/2 and 2, relative 2^-22 elsewhere, plus the rounding of the
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

/// Error of a matrix product's sum over `k` exact products and a summand, whose magnitudes sum to `size`. Tensor cores
/// may truncate each of them to 24 bits of the largest one, and truncate the sum.
#[must_use]
pub fn mma(k: usize, size: f64) -> f64 {
    (k + 2) as f64 * f64::from(f32::EPSILON) * size
}

/// Bounds for one row of a norm over `c` elements. Its sums are chains of at most `max(32, c / 256 + 1)` additions in a
/// thread, 5 in a warp and 16 over warps.
#[derive(Clone, Copy, Debug)]
pub struct NormRow {
    /// Relative error of such a sum of positive terms: its additions, and a few roundings of each term.
    sum: f64,
    /// Root mean square over standard deviation (0 for RMS norm, which subtracts no mean). The mean is off by `sum`
    /// times the mean magnitude of x, so a normalized element is off by `sum * cancel`.
    cancel: f64,
    scale: f64,
}

impl NormRow {
    /// Bounds of a row that the factor `scale` normalizes.
    #[must_use]
    pub fn new(c: usize, scale: f64, cancel: f64) -> Self {
        let additions = (c as f64 / 256.0 + 1.0).max(32.0) + 5.0 + 16.0;
        Self {
            sum: (additions + 4.0) * U32,
            cancel,
            scale,
        }
    }

    /// Error of a normalized element. It is half the relative error of the variance, whose terms have the mean's error
    /// twice and to second order. The roundings of root, quotient, difference and product are added.
    #[must_use]
    pub fn normal(self, normal: f64) -> f64 {
        (self.sum + 6.0 * U32) * normal.abs() + self.sum * self.cancel
    }

    /// Center and half width of the possible values of a normalized element after a rounding to `dtype`. Mostly it is
    /// one value.
    #[must_use]
    pub fn rounded(self, dtype: DType, normal: f64) -> [f64; 2] {
        let error = self.normal(normal);
        let round = |x: f64| f64::from(numbers::rounded(dtype, x as f32));
        let (low, high) = (round(normal - error), round(normal + error));
        [f64::midpoint(low, high), (high - low) / 2.0]
    }

    /// Error of `y = normal * weight + bias` for a normalized element that is off by at most `error`.
    #[must_use]
    pub fn value(dtype: DType, [normal, error]: [f64; 2], weight: f64, bias: f64) -> f64 {
        let product = normal * weight;
        store(dtype, product + bias)
            + error * weight.abs()
            + 2.0 * U32 * (product.abs() + bias.abs())
    }

    /// Error of `dx = scale * (g - mean(g) - normal * mean(g * normal))` for means of the magnitudes of `g` and of `g *
    /// normal`. `gx` is the mean of `g * normal`, whose terms have the errors of normalized elements.
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
        // The leading factor has the error of a normalized element without a mean.
        store(dtype, want) + self.scale * (inner + (self.sum + 6.0 * U32) * terms)
    }
}

/// Error of a sum over `rows` of terms whose magnitudes add up to `magnitude` and whose own errors to `terms`. It has
/// at most `rows / 264 + 1` additions per row group, then at most 264 row groups of up to 8 rows in 32 chains, then 32.
#[must_use]
pub fn norm_parameter(rows: usize, magnitude: f64, terms: f64) -> f64 {
    let additions = rows as f64 / 264.0 + 1.0 + 264.0 * 8.0 / 32.0 + 32.0;
    terms + (additions + 1.0) * U32 * magnitude
}

/// Error of a sum over `rows` terms whose magnitudes add up to `size`, stored in `to`. It has at most 32 additions in a
/// warp's chain, 7 over warps, and one for each 256 rows.
#[must_use]
pub fn column_sum(to: DType, rows: usize, want: f64, size: f64) -> f64 {
    let additions = 32.0 + 7.0 + (rows as f64 / 256.0).ceil();
    store(to, want) + additions * U32 * size
}

/// Whether two numbers are equal or adjacent.
#[must_use]
pub fn neighbours(a: f32, b: f32) -> bool {
    a == b || a == b.next_up() || a == b.next_down()
}

/// Relative distance of two f32 sums of a row's exponentials that add other stretches: 32 additions in a lane and 5
/// over lanes, in each.
const STRETCHES: f64 = 2.0 * 37.0 * U32;

/// Distance of two losses computed from such sums. The logarithm turns the relative error into an absolute one. The
/// largest logit has the magnitude `top`, and both results are rounded once.
#[must_use]
pub fn loss(want: f64, top: f64) -> f64 {
    STRETCHES + 2.0 * U32 * want.abs() + 1e-15 * top
}

/// Distance of two gradients `factor * (softmax - one at the label)` computed from such sums, each rounded to `out`.
/// `share` bounds `factor * softmax`. The rounded logarithm of a sum has the magnitude `base`, and its rounding is an
/// error of the exponent.
#[must_use]
pub fn softmax_gradient(out: DType, want: f64, share: f64, base: f64) -> f64 {
    2.0 * store(out, want) + (STRETCHES + 2.0 * U32 * base + 4.0 * U32) * share
}

/// Distance of two devices for the loss `want` after so many updates of Adam. Each update adds the error of one pass.
/// Adam divides by the root of squares, so a relative error of gradients is one of the update, and an update changes
/// the loss by less than the loss. A pass in 16 bits has the rounding errors of some dozen layers as in [`trained`].
/// The mean over tokens reduces independent errors, which add up as the root of their squares, to a quarter.
#[must_use]
pub fn trajectory(dtype: DType, want: f64, updates: usize) -> f64 {
    let pass = match dtype {
        DType::F32 => trained(dtype, want),
        _ => trained(dtype, want) / 4.0,
    };
    (updates + 1) as f64 * pass
}

/// Norm of a gradient that is zero without rounding, such as that of a key's bias, which the softmax cancels. It is a
/// small part of the possible error of `largest`, the model's largest norm.
#[must_use]
pub fn trained_noise(dtype: DType, largest: f64) -> f64 {
    trained(dtype, largest) / 64.0
}

/// Error of an f32 sum of `depth` products of 16-bit elements on tensor cores, with factor and bias. The magnitudes of
/// all terms add up to `magnitude`. Products are exact. The hardware adds up to 8 of them to the sum, aligns all to the
/// largest and truncates below its last bit. That is 9 truncations below `2 U32 * magnitude` every 8 terms, 2.25 U32
/// per term. A few further sums join the parts of the K loop. Factor and bias are one rounding.
#[must_use]
pub fn tensor_sum(depth: usize, magnitude: f64) -> f64 {
    (2.25 * depth as f64 + 32.0) * U32 * magnitude
}

/// Error of [`tensor_sum`] stored in `out`.
#[must_use]
pub fn tensor_product(out: DType, depth: usize, want: f64, magnitude: f64) -> f64 {
    store(out, want) + tensor_sum(depth, magnitude)
}

/// Error of GELU in its tanh form for an `x` that is off by `error`. A library may use the processor's approximate tanh
/// (2^-10.987 relative, half of `x` times that). The slope of GELU is at most 1.13. The cancellation in `1 + tanh` for
/// large negative `x` has the same error.
#[must_use]
pub fn library_gelu(out: DType, x: f64, want: f64, error: f64) -> f64 {
    store(out, want) + 1.13 * error + 0.5 * x.abs() * (1.0 / 2000.0 + 8.0 * U32)
}

/// The roundings of attention, each as a bound on an absolute error (`relative`: on a relative one).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attention {
    /// Dtype of the tensors.
    pub dtype: DType,
    /// Whether weights and their gradients are rounded to `dtype` before their products.
    pub narrow_weights: bool,
}

impl Attention {
    const U32: f64 = 1.0 / (1u64 << 24) as f64;

    /// One rounding to `dtype`: relative, plus half the smallest subnormal of f16. The rounded value is close to `x`,
    /// hence the factor 1 + 2^-10.
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

    /// An f32 sum of `n` products whose magnitudes add up to `magnitude`. Tensor cores may truncate instead of
    /// rounding, which doubles the error of an addition.
    #[must_use]
    pub fn sum(self, n: usize, magnitude: f64) -> f64 {
        2.0 * (n + 2) as f64 * Self::U32 * magnitude
    }

    /// A scaled score of `d` products: their sum, the rounded factor, and the product with it.
    #[must_use]
    pub fn score(self, d: usize, score: f64, magnitude: f64) -> f64 {
        self.sum(d, magnitude) + 3.0 * Self::U32 * score.abs()
    }

    /// Relative error of `exp(score - base)` from a score and a base with errors. Both are in powers of two (one
    /// rounding of the base). One rounding of the difference and 2^-22 for the exponential are added.
    #[must_use]
    pub fn exponential(self, score: (f64, f64), base: (f64, f64)) -> f64 {
        let sizes = 3.0 * score.0.abs() + 3.0 * base.0.abs();
        let exponent = score.1 + base.1 + Self::U32 * sizes;
        exponent.exp_m1() + 8.0 * Self::U32
    }

    /// Relative error of a running sum of `keys` positive weights that are rescaled once per tile of at most 32 keys.
    #[must_use]
    pub fn running_sum(self, keys: usize) -> f64 {
        (keys as f64 + 8.0 * (keys as f64 / 32.0 + 2.0)) * Self::U32
    }

    /// Error of the log-sum-exp from a sum with a relative error, including the error of the largest score. The
    /// logarithm is accurate to 2^-22, and a few roundings of the result and of the base follow.
    #[must_use]
    pub fn log_sum_exp(self, want: f64, sum_relative: f64, largest_score: f64) -> f64 {
        sum_relative + 8.0 * Self::U32 * (1.0 + want.abs() + largest_score.abs())
    }
}

/// Relative error of a sum of squares of gradients over so many blocks of 4096 elements, by
/// [`optim::clip::SquareSum`].
///
/// In a block, squares and what rounding takes from `high` are exact, so errors arise in `low` only. A pair of 16
/// squares collects in `low` up to `17 u` of its sum, and rounds its i-th addition twice, by up to `u²` and
/// `(i + 1) u²` more: `184 u²`. Eight levels over pairs let `low` grow to `25 u`, and round twice: `400 u²`. What
/// squares lose below the smallest f32 is smaller than `u²`. Blocks are added in f64: one after the other in a lane, ten
/// levels over lanes, and one conversion.
#[must_use]
pub fn square_sum(blocks: usize) -> f64 {
    let wide = f64::EPSILON / 2.0;
    600.0 * U32 * U32 + (blocks.div_ceil(1024) + 11) as f64 * wide
}
