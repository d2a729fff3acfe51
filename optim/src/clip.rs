//! Global gradient norm and the factor that clips it.

use rayon::prelude::*;

use crate::lanes::Simd;
use crate::squares::{self, block_sum};

/// Number of elements per block of a [`SquareSum`].
pub const NORM_BLOCK_ELEMS: usize = squares::BLOCK_ELEMS;
/// Least number of blocks per rayon task.
const TASK_BLOCKS: usize = 32;
/// Number of interleaved partial sums over blocks.
const BLOCK_LANES: usize = 1024;

/// Sum of squares (of gradients, for their norm) with a fixed order of additions. The order has enough parallelism for
/// a GPU. Every stage, tier, thread count and device therefore gives the same bits.
///
/// - A block has [`NORM_BLOCK_ELEMS`] elements; the last one may have fewer. Its sum consists of sums of two `f32`,
///   whose order `optim/src/squares.rs` states. It is off by at most a share of 2^-38, usually below 2^-46.
/// - Block `b` is added in f64 to sum `b % 1024`, in order. The 1024 sums are halved (`x[k] += x[k + half]`) until one
///   is left.
///
/// The total is non-finite if and only if an element is.
#[derive(Clone, Debug)]
pub struct SquareSum {
    lanes: Vec<f64>,
    blocks: usize,
}

impl Default for SquareSum {
    fn default() -> Self {
        Self {
            lanes: vec![0.0; BLOCK_LANES],
            blocks: 0,
        }
    }
}

impl SquareSum {
    /// Adds the squares of the next block of elements. Every block but the last must have
    /// [`NORM_BLOCK_ELEMS`] elements.
    pub fn add_block(&mut self, block: &[f32]) {
        debug_assert!(block.len() <= NORM_BLOCK_ELEMS);
        self.lanes[self.blocks % BLOCK_LANES] += block_sum(Simd::detect(), block);
        self.blocks += 1;
    }

    /// Adds the squares of all elements of `values`, block by block, on the rayon pool. Only the last block
    /// of the whole sum may have fewer than [`NORM_BLOCK_ELEMS`] elements.
    pub fn add_blocks(&mut self, values: &[f32]) {
        let simd = Simd::detect();
        let blocks = values.par_chunks(NORM_BLOCK_ELEMS);
        let sums = blocks.with_min_len(TASK_BLOCKS);
        let sums: Vec<f64> = sums.map(|block| block_sum(simd, block)).collect();
        for sum in sums {
            self.lanes[self.blocks % BLOCK_LANES] += sum;
            self.blocks += 1;
        }
    }

    /// Sum of the squares of all added elements. Its square root is the L2 norm.
    #[must_use]
    pub fn total(mut self) -> f64 {
        halved(&mut self.lanes)
    }
}

/// Sum of the squares of all elements of a slice, with the order of additions of [`SquareSum`].
#[must_use]
pub fn sum_of_squares(values: &[f32]) -> f64 {
    let mut sum = SquareSum::default();
    sum.add_blocks(values);
    sum.total()
}

/// Adds the upper half to the lower half until one number is left. The length must be a power of two.
fn halved(values: &mut [f64]) -> f64 {
    let mut half = values.len() / 2;
    while half > 0 {
        let (low, high) = values.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    values[0]
}

/// Global L2 norm of the gradients, and the factor that divides them by tokens and clips them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GradientScale {
    /// Global L2 norm of the mean gradient per token, before clipping.
    pub norm: f64,
    /// Factor by which every summed gradient is multiplied: `min(1, max_norm / (norm + 1e-6)) / tokens`, as
    /// `torch.nn.utils.clip_grad_norm_` clips. Without `max_norm` it is `1 / tokens`.
    pub factor: f32,
}

impl GradientScale {
    /// Computes norm and factor for gradients that are sums over `tokens` tokens (more than 0). `squares` is
    /// the sum of the squares of all their elements. `max_norm` limits the norm of the mean gradient per
    /// token; `None` does not clip.
    #[must_use]
    pub fn new(squares: f64, tokens: f64, max_norm: Option<f32>) -> Self {
        let norm = squares.sqrt() / tokens;
        let clip = match max_norm {
            Some(max) => (f64::from(max) / (norm + 1e-6)).min(1.0),
            None => 1.0,
        };
        Self {
            norm,
            factor: (clip / tokens) as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_of_squares_is_accurate_and_flags_every_non_finite_value() {
        for n in [0, 1, 255, 4096, 10_001, 1025 * NORM_BLOCK_ELEMS + 3] {
            let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let plain: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
            // The plain sum has the larger error: n roundings of 2^-53, most of which cancel.
            let error = (sum_of_squares(&values) - plain).abs();
            assert!(error <= plain * 1e-11, "{n}: {error}");
        }
        assert!(sum_of_squares(&[f32::MAX; 100]).is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5f32; 10_001];
            values[7_777] = bad;
            assert!(!sum_of_squares(&values).is_finite());
        }
    }

    #[test]
    fn sums_of_single_blocks_add_up_to_that_of_the_slice() {
        let values: Vec<f32> = (0..9_000).map(|i| (i as f32 * 0.11).cos()).collect();
        let mut sum = SquareSum::default();
        for block in values.chunks(NORM_BLOCK_ELEMS) {
            sum.add_block(block);
        }
        assert_eq!(sum.total().to_bits(), sum_of_squares(&values).to_bits());
    }

    #[test]
    fn only_a_norm_above_the_maximum_is_clipped() {
        // Norm of the mean gradient: sqrt(3600) / 4 = 15.
        let free = GradientScale::new(3600.0, 4.0, None);
        assert_eq!(free, GradientScale::new(3600.0, 4.0, Some(15.1)));
        assert_eq!((free.norm, free.factor), (15.0, 0.25));
        let clipped = GradientScale::new(3600.0, 4.0, Some(3.0));
        assert!((clipped.factor - 0.05).abs() < 1e-7);
    }
}
