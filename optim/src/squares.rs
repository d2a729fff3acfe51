//! Sum of squares of one block of gradients, in sums of two `f32`. GPUs compute the same bits
//! (`kernels/src/cuda/source/grad_norm.cu`), and few of them are fast in `f64`.
//!
//! A pair `(high, low)` stands for the exact sum of its two numbers. What rounding takes from `high` is itself an
//! `f32`, which additions and a fused multiply-add find without an error, and which is added to `low`.

use crate::lanes::{Lanes, Loop, Simd};

/// Number of elements per block.
pub(crate) const BLOCK_ELEMS: usize = 4096;
/// Number of interleaved pairs within a block.
const LANES: usize = 256;
/// Vectors of pairs that one pass over a block keeps in registers.
const VECTORS: usize = 4;
/// Squares of the largest elements with which a block is summed as it is: from 2^-80, and below 2^100. Sums stay below
/// 2^112, and what squares lose below the smallest `f32` is below 2^-137 in sum.
const PLAIN_SQUARES: std::ops::Range<f32> =
    f32::from_bits((127 - 80) << 23)..f32::from_bits((127 + 100) << 23);

/// Pairs of a block.
struct Pairs {
    high: [f32; LANES],
    low: [f32; LANES],
}

/// Sum of the squares of up to [`BLOCK_ELEMS`] elements. It is not finite if and only if an element is.
///
/// 1. Let `m` be the largest magnitude. Where it is 0, or from 2^-40 to below 2^50, all elements are multiplied by 1,
///    otherwise by the power of two that moves `m` into `[2, 4)`, or 2^127 if that is too little.
/// 2. Element `i`, now `x`, is added to pair `i % 256`, in order: `p = x * x`, `e = fma(x, x, -p)`, then `(high, d)` =
///    the sum of `high` and `p` and its error, then `low = low + (d + e)`. Missing elements count as 0.
/// 3. Pairs `4k..4k+4` are added as `(a + b) + (c + d)`, the 64 results are halved (`x[k] += x[k + half]`) until one is
///    left. Pairs are added by `(high, d)` = the sum of the two `high` and its error, `low = (low + low) + d`.
/// 4. The result is `high + low` in `f64`, times the square of the inverse of the factor of 1.
pub(crate) fn block_sum(simd: Simd, block: &[f32]) -> f64 {
    let (sum, largest) = plain_sum(simd, block);
    if PLAIN_SQUARES.contains(&largest) {
        return sum;
    }
    let magnitudes = block.iter().map(|x| x.to_bits() & 0x7fff_ffff);
    match magnitudes.max() {
        None | Some(0) => 0.0,
        Some(largest) => scaled_sum(simd, block, largest),
    }
}

/// Sum of the squares, and the largest square in `f32`.
fn plain_sum(simd: Simd, block: &[f32]) -> (f64, f32) {
    let mut out = [0f32; 3];
    let sum = &mut out;
    simd.run(BlockSum { block, sum });
    let [high, low, largest] = out;
    (f64::from(high) + f64::from(low), largest)
}

/// Sum of the squares of elements multiplied by the power of two that belongs to the magnitude with the bits `largest`,
/// and the square of that power taken out again. An element that is not finite gives NaN.
#[cold]
fn scaled_sum(simd: Simd, block: &[f32], largest: u32) -> f64 {
    let exponent = (largest >> 23).max(1);
    let factor = f32::from_bits((255 - exponent) << 23);
    let mut scaled = [0f32; BLOCK_ELEMS];
    let scaled = &mut scaled[..block.len()];
    for (scaled, x) in scaled.iter_mut().zip(block) {
        *scaled = x * factor;
    }
    // 2^(2 (exponent - 128)) as an f64.
    let back = f64::from_bits(u64::from(1023 + 2 * exponent - 256) << 52);
    plain_sum(simd, scaled).0 * back
}

/// Sum of one block: high and low number, and the largest square.
struct BlockSum<'a> {
    block: &'a [f32],
    sum: &'a mut [f32; 3],
}

impl Loop for BlockSum<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (runs, rest) = self.block.as_chunks::<LANES>();
        let mut last = [0f32; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let last = if rest.is_empty() { None } else { Some(&last) };

        let mut pairs = Pairs {
            high: [0.0; LANES],
            low: [0.0; LANES],
        };
        let mut largest = l.f(0.0);
        for at in (0..LANES).step_by(VECTORS * L::N) {
            let mut sums = [(l.f(0.0), l.f(0.0)); VECTORS];
            for run in runs.iter().chain(last) {
                let run = &run[at..at + VECTORS * L::N];
                for (v, sum) in sums.iter_mut().enumerate() {
                    let own = &run[v * L::N..];
                    // Each pass skips over most of the block, which no prefetcher of a processor follows.
                    l.prefetch(own.as_ptr().wrapping_add(BLOCK_ELEMS));
                    let x = l.load(own);
                    let square = l.mul(x, x);
                    largest = l.max(largest, square);
                    let (high, lost) = two_sum(l, sum.0, square);
                    let error = l.square_error(x, square);
                    *sum = (high, l.add(sum.1, l.add(lost, error)));
                }
            }
            for (v, (high, low)) in sums.into_iter().enumerate() {
                l.store(&mut pairs.high[at + v * L::N..], high);
                l.store(&mut pairs.low[at + v * L::N..], low);
            }
        }
        let [high, low] = pairs.total(l);
        let mut squares = [0f32; 16];
        l.store(&mut squares, largest);
        let largest = squares.into_iter().fold(0.0, f32::max);
        *self.sum = [high, low, largest];
    }
}

impl Pairs {
    /// Sum of all pairs: quads, then halves.
    #[inline(always)]
    fn total<L: Lanes>(mut self, l: L) -> [f32; 2] {
        for at in (0..LANES).step_by(4 * L::N) {
            let first = self.sums_of_two(l, at);
            let second = self.sums_of_two(l, at + 2 * L::N);
            let [high, high_after] = l.even_odd(first.0, second.0);
            let [low, low_after] = l.even_odd(first.1, second.1);
            self.put(l, at / 4, add(l, (high, low), (high_after, low_after)));
        }
        let mut half = LANES / 8;
        while half >= L::N {
            for at in (0..half).step_by(L::N) {
                let sum = add(l, self.get(l, at), self.get(l, at + half));
                self.put(l, at, sum);
            }
            half /= 2;
        }
        // Single numbers, as vectors of one.
        while half > 0 {
            for at in 0..half {
                let (a, b) = (self.high[at], self.high[at + half]);
                let high = a + b;
                let of_b = high - a;
                let lost = (a - (high - of_b)) + (b - of_b);
                self.high[at] = high;
                self.low[at] = (self.low[at] + self.low[at + half]) + lost;
            }
            half /= 2;
        }
        [self.high[0], self.low[0]]
    }

    /// Sums of the pairs `at + 2i` and `at + 2i + 1`.
    #[inline(always)]
    fn sums_of_two<L: Lanes>(&self, l: L, at: usize) -> (L::F, L::F) {
        let (first, second) = (self.get(l, at), self.get(l, at + L::N));
        let [high, high_after] = l.even_odd(first.0, second.0);
        let [low, low_after] = l.even_odd(first.1, second.1);
        add(l, (high, low), (high_after, low_after))
    }

    #[inline(always)]
    fn get<L: Lanes>(&self, l: L, at: usize) -> (L::F, L::F) {
        (l.load(&self.high[at..]), l.load(&self.low[at..]))
    }

    #[inline(always)]
    fn put<L: Lanes>(&mut self, l: L, at: usize, (high, low): (L::F, L::F)) {
        l.store(&mut self.high[at..], high);
        l.store(&mut self.low[at..], low);
    }
}

/// Rounded sum and its error (Knuth).
#[inline(always)]
fn two_sum<L: Lanes>(l: L, a: L::F, b: L::F) -> (L::F, L::F) {
    let sum = l.add(a, b);
    let of_b = l.sub(sum, a);
    let error = l.add(l.sub(a, l.sub(sum, of_b)), l.sub(b, of_b));
    (sum, error)
}

/// Sum of two pairs.
#[inline(always)]
fn add<L: Lanes>(l: L, a: (L::F, L::F), b: (L::F, L::F)) -> (L::F, L::F) {
    let (high, lost) = two_sum(l, a.0, b.0);
    (high, l.add(l.add(a.1, b.1), lost))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::RandomStream;

    /// The definition of [`block_sum`], element by element.
    fn defined(block: &[f32]) -> f64 {
        type Pair = (f32, f32);
        fn two_sum(a: f32, b: f32) -> Pair {
            let sum = a + b;
            // Exact where the larger number comes first (Dekker).
            let (large, small) = if a.abs() > b.abs() { (a, b) } else { (b, a) };
            (sum, small - (sum - large))
        }
        fn add(a: Pair, b: Pair) -> Pair {
            let (high, lost) = two_sum(a.0, b.0);
            (high, (a.1 + b.1) + lost)
        }
        let largest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
        let plain = largest == 0.0 || (2f32.powi(-40)..2f32.powi(50)).contains(&largest);
        let mut exponent = 0;
        if !plain {
            // The power that moves `largest` into [2, 4).
            while f64::from(largest) * 2f64.powi(exponent) >= 4.0 {
                exponent -= 1;
            }
            while exponent < 127 && f64::from(largest) * 2f64.powi(exponent) < 2.0 {
                exponent += 1;
            }
        }
        let mut lanes = [(0f32, 0f32); LANES];
        for (i, x) in block.iter().enumerate() {
            let x = (f64::from(*x) * 2f64.powi(exponent)) as f32;
            let square = x * x;
            let error = (f64::from(x) * f64::from(x) - f64::from(square)) as f32;
            let (high, low) = lanes[i % LANES];
            let (high, lost) = two_sum(high, square);
            lanes[i % LANES] = (high, low + (lost + error));
        }
        let quad = |q: &[Pair]| add(add(q[0], q[1]), add(q[2], q[3]));
        let mut quads: Vec<Pair> = lanes.chunks(4).map(quad).collect();
        while quads.len() > 1 {
            let half = quads.len() / 2;
            quads = (0..half).map(|k| add(quads[k], quads[k + half])).collect();
        }
        (f64::from(quads[0].0) + f64::from(quads[0].1)) * 2f64.powi(-2 * exponent)
    }

    #[test]
    fn every_instruction_set_has_the_bits_of_the_definition() {
        let stream = RandomStream::new(5, "squares");
        let two_to = |exponent: i32| 2f32.powi(exponent);
        let limits = [two_to(-40), two_to(50)].map(|x| [x.next_down(), x]);
        let other = [
            0.0,
            1e-45,
            3e-39,
            1e-30,
            1e-17,
            1e-6,
            1.0,
            3e9,
            1e19,
            1e30,
            f32::MAX,
        ];
        for largest in other.into_iter().chain(limits.into_iter().flatten()) {
            for n in [0, 1, 3, 255, 256, 257, 1000, 4095, 4096] {
                // Magnitudes over twelve orders, so that errors of all kinds occur.
                let value = |i: u64| {
                    let spread = 10f32.powf(4.0 * stream.normal(10_000 + i).clamp(-3.0, 0.0));
                    (stream.normal(i) * 0.3).clamp(-1.0, 1.0) * spread * largest
                };
                let mut block: Vec<f32> = (0..n).map(value).collect();
                if let Some(last) = block.last_mut() {
                    *last = -largest;
                }
                let want = defined(&block);
                assert!(want.is_finite());
                for simd in Simd::available() {
                    let got = block_sum(simd, &block);
                    assert_eq!(
                        got.to_bits(),
                        want.to_bits(),
                        "{simd:?}, {n} up to {largest:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_sum_is_finite_if_and_only_if_all_elements_are() {
        for simd in Simd::available() {
            assert!(block_sum(simd, &[f32::MAX; BLOCK_ELEMS]).is_finite());
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for usual in [0.0, 1e-42, 0.5, 1e38] {
                    for (n, at) in [(1, 0), (300, 299), (4096, 0), (4096, 4095)] {
                        let mut block = vec![usual; n];
                        block[at] = bad;
                        let sum = block_sum(simd, &block);
                        assert!(!sum.is_finite(), "{simd:?}: {bad} beside {usual:e}: {sum}");
                    }
                }
            }
        }
    }
}
