//! AdamW with moments of 8 bits: one code per element and an `f32` absmax per block of 256 elements, with the rule of
//! bitsandbytes' GPU kernel (`kOptimizerStatic8bit2StateBlockwise`).
//!
//! A block is decoded, updated in `f32` and encoded again; weights move by the moments before they are encoded. Weight
//! decay follows the update. A code is the nearest value of a [dynamic map](kernels::dynamic_map) after division by the
//! block's absmax. The absmax is the exact maximum, so every SIMD path, split and thread count gives the same bits.

#![allow(
    clippy::needless_range_loop,
    reason = "one index runs over several arrays"
)]

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::codec::{FIRST_MOMENT, MAGNITUDE, SECOND_MOMENT, Values};
use super::update::{CHUNK_ELEMS, MOST_ITEM, Rounding, larger, put_each_weight};
use super::windows::{Item, LARGE, Mode, Number, Weights};
use super::{CAST_ELEMS, Coefficients};
use crate::groups::is_table_name;
use crate::lanes::{Lanes, Loop, Simd};
use crate::rounding::PageKey;

/// Elements of a tensor that share one absmax. The last block of a tensor may be shorter.
pub const BLOCK_ELEMS: usize = 256;
/// Smallest tensor, in elements, whose moments have 8 bits. Smaller ones keep moments in `f32`.
pub const LEAST_ELEMS: usize = 4096;

/// Whether the moments of the parameter `name` with `elems` elements have 8 bits. Those of small tensors, embeddings
/// and output heads stay in `f32`.
#[must_use]
pub fn has_blocks(name: &str, elems: usize) -> bool {
    elems >= LEAST_ELEMS && !is_table_name(name)
}

/// Moments of a chunk of elements that begins at a block border of its tensor.
#[derive(Debug)]
pub(crate) struct Blocks<'a> {
    pub(crate) codes: &'a mut [u8],
    /// Largest magnitude of each block.
    pub(crate) absmax: &'a mut [f32],
}

impl<'a> Blocks<'a> {
    /// Splits before element `mid`, a multiple of [`BLOCK_ELEMS`].
    fn split_at(self, mid: usize) -> (Self, Self) {
        let codes = self.codes.split_at_mut(mid);
        let absmax = self.absmax.split_at_mut(mid / BLOCK_ELEMS);
        let half = |codes: &'a mut [u8], absmax: &'a mut [f32]| Blocks { codes, absmax };
        (half(codes.0, absmax.0), half(codes.1, absmax.1))
    }

    /// The first block's codes and absmax, and the blocks after it.
    fn next(self) -> Option<(&'a mut [u8], &'a mut f32, Self)> {
        let (absmax, rest) = self.absmax.split_first_mut()?;
        let (own, codes) = self.codes.split_at_mut(BLOCK_ELEMS.min(self.codes.len()));
        let absmax_after = Self {
            codes,
            absmax: rest,
        };
        Some((own, absmax, absmax_after))
    }
}

/// One AdamW update of a chunk with moments of 8 bits. All parts have the same number of elements and begin at a block
/// border of their tensor.
pub(super) struct BlockUpdate<'a, G, W> {
    pub(super) coefficients: Coefficients,
    pub(super) rounding: Rounding,
    pub(super) grad: &'a [G],
    pub(super) weights: W,
    pub(super) m: Blocks<'a>,
    pub(super) v: Blocks<'a>,
}

impl<G: Number, W: Weights> BlockUpdate<'_, G, W> {
    /// Updates all elements, spread over the rayon pool.
    pub(super) fn spread(self, simd: Simd) {
        let n = self.grad.len();
        if n > CHUNK_ELEMS {
            let (a, b) = self.split_at((n / 2).next_multiple_of(CHUNK_ELEMS));
            rayon::join(|| a.spread(simd), || b.spread(simd));
        } else {
            simd.run(self);
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (grad, weights) = (self.grad.split_at(mid), self.weights.split_at(mid));
        let (m, v) = (self.m.split_at(mid), self.v.split_at(mid));
        let part = |skipped: usize, grad, weights, m, v| Self {
            coefficients: self.coefficients,
            rounding: self.rounding.after(skipped),
            grad,
            weights,
            m,
            v,
        };
        (
            part(0, grad.0, weights.0, m.0, v.0),
            part(mid, grad.1, weights.1, m.1, v.1),
        )
    }
}

impl<G: Number> BlockUpdate<'_, G, &mut [f32]> {
    /// Updates `f32` master weights and converts them to `f16` while they are in cache.
    pub(super) fn spread_f16(self, weight: &mut [f16], simd: Simd) {
        let n = self.grad.len();
        if n <= CAST_ELEMS {
            return self.run_f16(weight, simd);
        }
        let mid = (n / 2).next_multiple_of(CAST_ELEMS);
        let (a, b) = self.split_at(mid);
        let (first, second) = weight.split_at_mut(mid);
        if mid >= CHUNK_ELEMS {
            rayon::join(|| a.spread_f16(first, simd), || b.spread_f16(second, simd));
        } else {
            a.spread_f16(first, simd);
            b.spread_f16(second, simd);
        }
    }

    fn run_f16(self, weight: &mut [f16], simd: Simd) {
        let master = self.weights;
        simd.run(BlockUpdate {
            coefficients: self.coefficients,
            rounding: self.rounding,
            grad: self.grad,
            weights: &mut *master,
            m: self.m,
            v: self.v,
        });
        weight.convert_from_f32_slice(master);
    }
}

/// New values of one block, in `f32`. No vector of them crosses a cache line.
#[repr(align(64))]
struct Block {
    weight: Values,
    m: Values,
    v: Values,
}

/// New codes of one block, of both moments.
#[repr(align(64))]
struct Codes([[u8; BLOCK_ELEMS]; 2]);

/// Constants of the update as vectors.
#[derive(Clone, Copy)]
struct Vectors<L: Lanes> {
    beta1: L::F,
    one_minus_beta1: L::F,
    beta2: L::F,
    one_minus_beta2: L::F,
    eps: L::F,
    step_size: L::F,
    decay: L::F,
}

impl<L: Lanes> Vectors<L> {
    #[inline(always)]
    fn new(l: L, c: &Coefficients) -> Self {
        Self {
            beta1: l.f(c.beta1),
            one_minus_beta1: l.f(c.one_minus_beta1),
            beta2: l.f(c.beta2),
            one_minus_beta2: l.f(c.one_minus_beta2),
            eps: l.f(c.eps),
            step_size: l.f(c.step_size),
            decay: l.f(c.decay),
        }
    }
}

impl Block {
    /// Updates the moments of one vector from element `i` on. `most` are the largest magnitudes so far, as bits.
    #[inline(always)]
    fn update<L: Lanes>(
        &mut self,
        l: L,
        c: &Vectors<L>,
        i: usize,
        [grad, m, v]: [L::F; 3],
        most: &mut [L::U; 2],
    ) {
        let square = l.mul(l.mul(c.one_minus_beta2, grad), grad);
        let v = l.add(l.mul(v, c.beta2), square);
        let m = l.add(l.mul(m, c.beta1), l.mul(c.one_minus_beta1, grad));
        l.store(&mut self.m[i..], m);
        l.store(&mut self.v[i..], v);
        let magnitude = l.u(MAGNITUDE);
        most[0] = l.max_u(most[0], l.and(l.bits(m), magnitude));
        most[1] = l.max_u(most[1], l.and(l.bits(v), magnitude));
    }

    /// Weights of one vector from element `i` on after the update by its new moments.
    #[inline(always)]
    fn moved<L: Lanes>(&self, l: L, c: &Vectors<L>, i: usize, weight: L::F) -> L::F {
        let (m, v) = (l.load(&self.m[i..]), l.load(&self.v[i..]));
        let quotient = l.div(m, l.add(l.sqrt(v), c.eps));
        l.mul(l.sub(weight, l.mul(c.step_size, quotient)), c.decay)
    }

    /// Computes the new weights of all elements, for rounding one by one.
    #[inline(always)]
    fn move_each<L: Lanes, W: Weights>(&mut self, l: L, c: &Vectors<L>, weights: &W) {
        for i in (0..BLOCK_ELEMS).step_by(L::ITEM) {
            let weight = weights.load::<L, false>(l, i);
            for (half, weight) in weight.into_iter().enumerate() {
                let i = i + half * L::N;
                let moved = self.moved(l, c, i, weight);
                l.store(&mut self.weight[i..], moved);
            }
        }
    }

    /// Updates element by element with the arithmetic of [`Block::update`], and returns the largest magnitudes. An
    /// element whose gradient is not finite loses its moments and keeps its weight.
    #[cold]
    fn update_each<G: Number, W: Weights>(
        &mut self,
        c: &Coefficients,
        grad: &[G],
        weights: &W,
        decode: impl Fn(usize) -> [f32; 2],
    ) -> [f32; 2] {
        let mut most = [0; 2];
        self.m.fill(0.0);
        self.v.fill(0.0);
        for (i, grad) in grad.iter().enumerate() {
            let (grad, weight) = (grad.get() * c.grad_scale, weights.get(i));
            self.weight[i] = weight;
            if !grad.is_finite() {
                continue;
            }
            let [m, v] = decode(i);
            let square = c.one_minus_beta2 * grad * grad;
            let v = v * c.beta2 + square;
            let m = m * c.beta1 + c.one_minus_beta1 * grad;
            let moved = weight - c.step_size * (m / (v.sqrt() + c.eps));
            let moved = match W::ROUNDS_BETWEEN {
                true => bf16::from_f32(moved).to_f32(),
                false => moved,
            };
            self.weight[i] = moved * c.decay;
            (self.m[i], self.v[i]) = (m, v);
            most[0] = most[0].max(m.to_bits() & MAGNITUDE);
            most[1] = most[1].max(v.to_bits() & MAGNITUDE);
        }
        most.map(f32::from_bits)
    }
}

/// Rounding of the weights of a block of `n` elements, the first of which is `at.first_element`.
struct BlockRounding {
    at: Rounding,
    /// Key of the page of the first element, if rounding is stochastic.
    key: Option<PageKey>,
    one_page: bool,
}

impl BlockRounding {
    fn new<W: Weights>(at: Rounding, n: usize) -> Self {
        let stochastic = W::MODE == Mode::Stochastic;
        let key = stochastic.then(|| PageKey::new(at.stream, at.step, at.first_element));
        let one_page = PageKey::elems_left(at.first_element) >= n as u64;
        Self { at, key, one_page }
    }

    /// Whether the words of a vector's pairs round the vector.
    #[inline(always)]
    fn by_vectors(&self) -> bool {
        self.key.is_none() || (self.one_page && self.at.first_element.is_multiple_of(2))
    }

    /// What rounds element `i`.
    fn random(&self, i: usize) -> u16 {
        let element = self.at.first_element + i as u64;
        let key = match (self.key, self.one_page) {
            (Some(_), false) => Some(PageKey::new(self.at.stream, self.at.step, element)),
            (key, _) => key,
        };
        key.map_or(0, |key| key.halves(element)[0])
    }

    /// Words that round an item from element `i` on.
    #[inline(always)]
    fn words<L: Lanes>(&self, l: L, i: usize) -> Option<L::U> {
        let pair = ((self.at.first_element + i as u64) / 2) as u32;
        let key = self.key?;
        Some(l.word(key, 0, l.pairs(key, pair)))
    }
}

/// Writes the new weights of one item from element `i` on.
#[inline(always)]
fn put<L: Lanes, W: Weights>(l: L, to: &mut W, i: usize, item: Item<L>, rounding: &BlockRounding) {
    if !W::ROUNDS || l.all_below(larger(l, l.u(0), item), LARGE) {
        let packed = W::pack::<L, false>(l, item, rounding.words(l, i));
        to.store(l, i, packed);
    } else {
        let mut numbers = [0.0; MOST_ITEM];
        l.store(&mut numbers, item[0]);
        l.store(&mut numbers[L::N..], item[1]);
        for (j, x) in numbers[..L::ITEM].iter().enumerate() {
            to.put(i + j, *x, rounding.random(i + j));
        }
    }
}

impl<G: Number, W: Weights> Loop for BlockUpdate<'_, G, W> {
    const BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (first, second) = (&*FIRST_MOMENT, &*SECOND_MOMENT);
        let Self {
            coefficients,
            mut rounding,
            mut grad,
            mut weights,
            mut m,
            mut v,
        } = self;
        let constants = Vectors::new(l, &coefficients);
        let factor = l.f(coefficients.grad_scale);
        let mut block = Block {
            weight: [0.0; BLOCK_ELEMS],
            m: [0.0; BLOCK_ELEMS],
            v: [0.0; BLOCK_ELEMS],
        };
        let Codes(codes) = &mut Codes([[0; BLOCK_ELEMS]; 2]);
        while let (Some(of_m), Some(of_v)) = (m.next(), v.next()) {
            let n = of_m.0.len();
            let (own_grad, grad_left) = grad.split_at(n);
            let (mut own, weights_left) = weights.split_at(n);
            let by_vectors = n == BLOCK_ELEMS && !W::ROUNDS_BETWEEN;
            let absmax = [*of_m.1, *of_v.1];
            let mut most = [f32::INFINITY; 2];
            if by_vectors {
                let (absmax_m, absmax_v) = (l.f(absmax[0]), l.f(absmax[1]));
                let mut bits = [l.u(0), l.u(0)];
                for i in (0..BLOCK_ELEMS).step_by(2 * L::ITEM) {
                    let m = first.decode(l, &of_m.0[i..], absmax_m);
                    let v = second.decode(l, &of_v.0[i..], absmax_v);
                    for item in 0..2 {
                        let own = &own_grad[i + item * L::ITEM..][..L::ITEM];
                        G::prefetch(l, own);
                        let grad = G::load::<L, false>(l, own);
                        for half in 0..2 {
                            let vector = 2 * item + half;
                            let all = [l.mul(grad[half], factor), m[vector], v[vector]];
                            block.update(l, &constants, i + vector * L::N, all, &mut bits);
                        }
                    }
                }
                most = [l.largest(bits[0]), l.largest(bits[1])].map(f32::from_bits);
            }
            // A gradient that is not finite makes its moments so.
            let is_finite = most.iter().all(|most| most.is_finite());
            if !is_finite {
                most = block.update_each(&coefficients, own_grad, &own, |i| {
                    let m = first.value(of_m.0[i], absmax[0]);
                    [m, second.value(of_v.0[i], absmax[1])]
                });
            }
            [*of_m.1, *of_v.1] = most;
            let divisor_m = first.begin(l, &block.m, most[0], &mut codes[0]);
            let divisor_v = second.begin(l, &block.v, most[1], &mut codes[1]);
            let of_block = BlockRounding::new::<W>(rounding, n);
            let moves = is_finite && of_block.by_vectors();
            // Quotients and roots take long, so they run beside the search for codes.
            for i in (0..BLOCK_ELEMS).step_by(2 * L::ITEM) {
                for i in (i..i + 2 * L::ITEM).step_by(L::ITEM) {
                    if !moves {
                        break;
                    }
                    let weight = own.load::<L, false>(l, i);
                    let a = block.moved(l, &constants, i, weight[0]);
                    let b = block.moved(l, &constants, i + L::N, weight[1]);
                    put(l, &mut own, i, [a, b], &of_block);
                }
                if let Some(divisor) = &divisor_m {
                    first.encode(l, &block.m, i, divisor, &mut codes[0]);
                }
                if let Some(divisor) = &divisor_v {
                    second.encode(l, &block.v, i, divisor, &mut codes[1]);
                }
            }
            if !moves {
                if is_finite {
                    block.move_each(l, &constants, &own);
                }
                put_each_weight(own, &block.weight[..n], |i| of_block.random(i));
            }
            of_m.0.copy_from_slice(&codes[0][..n]);
            of_v.0.copy_from_slice(&codes[1][..n]);
            rounding = rounding.after(n);
            (grad, weights, m, v) = (grad_left, weights_left, of_m.2, of_v.2);
        }
    }
}
