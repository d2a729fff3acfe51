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

use std::sync::LazyLock;

use half::{bf16, f16, slice::HalfFloatSliceExt};
use kernels::dynamic_map;

use super::update::{CHUNK_ELEMS, Rounding, larger, put_each_weight};
use super::windows::{LARGE, Mode, Number, Weights};
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

/// A bucket is all magnitudes with the same upper 16 bits, which are their bits as truncated `bf16`. This is the first
/// bucket, from 2^-23: smaller magnitudes are counted to it, because every threshold between two codes is larger.
const FIRST_BUCKET: u32 = 0x3400;
/// Buckets of one sign, a power of two above those that magnitudes up to 1 need.
const BUCKETS: usize = 1 << 12;

/// Elements whose codes are looked up together, a multiple of every vector's length. Look-ups are scalar; vectors of
/// other elements are computed between them.
const STRIDE: usize = 32;
/// Strides between computing an index and looking it up. Loads right after the store of the same bytes would wait.
const LEAD: usize = 2;
/// Codes of 0 in the maps of both moments.
const ZEROS: [u8; 2] = [127, 0];
const STRIDES: usize = BLOCK_ELEMS / STRIDE;
/// Bits of a number without its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Numbers of one block.
type Values = [f32; BLOCK_ELEMS];

/// Table that finds the code nearest to a number in one look-up, by the number's sign and upper 16 bits.
pub(super) struct Codec {
    map: &'static [f32; 256],
    /// One entry for each sign and bucket. The upper 16 bits are a code. A bucket contains at most one threshold between
    /// two codes, and the lower 16 bits are chosen so that adding those of the number overflows into the code exactly
    /// if the number is beyond the threshold. (For negative numbers the lower bits are inverted first.)
    entries: Box<[u32; 2 * BUCKETS]>,
}

static FIRST_MOMENT: LazyLock<Codec> = LazyLock::new(|| Codec::new(&dynamic_map::SIGNED));
static SECOND_MOMENT: LazyLock<Codec> = LazyLock::new(|| Codec::new(&dynamic_map::UNSIGNED));

/// Index of the entries of numbers, and what is added to them. Magnitudes must be at most 1.
#[inline(always)]
fn locate<L: Lanes>(l: L, numbers: L::F) -> [L::U; 2] {
    let bits = l.bits(numbers);
    let sign = l.shr::<31>(bits);
    let magnitude = l.and(bits, l.u(MAGNITUDE));
    let magnitude = l.max_u(magnitude, l.u(FIRST_BUCKET << 16));
    let bucket = l.add_u(l.shr::<16>(magnitude), l.u(FIRST_BUCKET.wrapping_neg()));
    let index = l.add_u(bucket, l.shl::<12>(sign));
    let inverted = l.mul_u(sign, l.u(0xffff));
    [index, l.xor(l.and(magnitude, l.u(0xffff)), inverted)]
}

impl Codec {
    pub(super) fn new(map: &'static [f32; 256]) -> Self {
        let mut entries = Box::new([0; 2 * BUCKETS]);
        for negative in [false, true] {
            let sign = u32::from(negative) << 31;
            let code = |magnitude: u32| u32::from(search(map, f32::from_bits(sign | magnitude)));
            let first = usize::from(negative) * BUCKETS;
            for bucket in 0..=(1f32.to_bits() >> 16) - FIRST_BUCKET {
                let start = (FIRST_BUCKET + bucket) << 16;
                let nearest = code(start);
                // Number of low halves of the bucket with the code of its first number.
                let (mut known, mut end) = (1, 1 << 16);
                while known < end {
                    let middle = (known + end) / 2;
                    if code(start | middle) == nearest {
                        known = middle + 1;
                    } else {
                        end = middle;
                    }
                }
                entries[first + bucket as usize] = match negative {
                    false => (nearest << 16) + ((1 << 16) - known),
                    true => (nearest << 16).wrapping_sub((1 << 16) - known),
                };
            }
        }
        Self { map, entries }
    }

    #[inline(always)]
    fn at(&self, index: u32, low: u32) -> u8 {
        let entry = self.entries[index as usize & (2 * BUCKETS - 1)];
        (entry.wrapping_add(low) >> 16) as u8
    }

    /// Encodes the values of a block whose largest magnitude is `absmax`.
    #[inline(always)]
    pub(super) fn encode<L: Lanes>(
        &self,
        l: L,
        values: &Values,
        absmax: f32,
        codes: &mut [u8; BLOCK_ELEMS],
    ) {
        if absmax == 0.0 {
            // As the search for 0 / 0, NaN, ends.
            codes.fill(search(self.map, f32::NAN.copysign(1.0)));
            return;
        }
        if !absmax.is_finite() {
            return self.encode_each(values, absmax, codes);
        }
        let divisor = l.f(absmax);
        let (mut index, mut low) = ([0.0; BLOCK_ELEMS], [0.0; BLOCK_ELEMS]);
        for s in 0..STRIDES + LEAD {
            if s < STRIDES {
                for i in (s * STRIDE..(s + 1) * STRIDE).step_by(L::N) {
                    let [own, added] = locate(l, l.div(l.load(&values[i..]), divisor));
                    l.store(&mut index[i..], l.float(own));
                    l.store(&mut low[i..], l.float(added));
                }
            }
            if s >= LEAD {
                for i in (s - LEAD) * STRIDE..(s - LEAD + 1) * STRIDE {
                    codes[i] = self.at(index[i].to_bits(), low[i].to_bits());
                }
            }
        }
    }

    /// Encodes values one by one, for a block with an overflow.
    #[cold]
    fn encode_each(&self, values: &Values, absmax: f32, codes: &mut [u8; BLOCK_ELEMS]) {
        for (code, x) in codes.iter_mut().zip(values) {
            *code = search(self.map, (x / absmax).copysign(*x));
        }
    }

    /// Values of some codes, as shares of the absmax.
    #[inline(always)]
    fn decode(&self, codes: &[u8], values: &mut [f32]) {
        for (x, code) in values.iter_mut().zip(codes) {
            *x = self.map[usize::from(*code)];
        }
    }
}

/// Code of a number by the kernel's binary search. It ends at an even code, which then competes with one neighbor:
/// the number stays if it is as near. With the signed map, a code of the other sign than the number's moves by one.
pub(super) fn search(map: &[f32; 256], x: f32) -> u8 {
    let (mut lower, mut upper) = (0, 255);
    let (mut low, mut high) = (if map[0] < 0.0 { -1.0 } else { 0.0 }, 1.0);
    let mut pivot = 127;
    for step in [64, 32, 16, 8, 4, 2, 1] {
        if x > map[pivot] {
            (lower, low) = (pivot, map[pivot]);
            pivot += step;
        } else {
            (upper, high) = (pivot, map[pivot]);
            pivot -= step;
        }
    }
    let code = if x > map[pivot] {
        let nearer = x > (high + map[pivot]) * 0.5;
        if nearer { upper } else { pivot }
    } else {
        let nearer = x < (low + map[pivot]) * 0.5;
        if nearer { lower } else { pivot }
    } as u8;
    let signed = map[0] < 0.0;
    let agrees = map[usize::from(code)].is_sign_negative() == x.is_sign_negative();
    match (signed && !agrees, x > 0.0) {
        (false, _) => code,
        (true, true) => code.wrapping_add(1),
        (true, false) => code.wrapping_sub(1),
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

/// Values of one block, in `f32`.
struct Block {
    /// Gradients, multiplied by their factor.
    grad: Values,
    weight: Values,
    /// Moments: before the update as shares of their absmax.
    m: Values,
    v: Values,
}

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
    absmax: [L::F; 2],
}

impl<L: Lanes> Vectors<L> {
    #[inline(always)]
    fn new(l: L, c: &Coefficients, absmax: [f32; 2]) -> Self {
        Self {
            beta1: l.f(c.beta1),
            one_minus_beta1: l.f(c.one_minus_beta1),
            beta2: l.f(c.beta2),
            one_minus_beta2: l.f(c.one_minus_beta2),
            eps: l.f(c.eps),
            step_size: l.f(c.step_size),
            decay: l.f(c.decay),
            absmax: [l.f(absmax[0]), l.f(absmax[1])],
        }
    }
}

impl Block {
    /// Updates weights and moments of one vector from element `i` on, whose gradients are finite. `most` are the
    /// largest magnitudes so far, as bits.
    #[inline(always)]
    fn update<L: Lanes>(&mut self, l: L, c: &Vectors<L>, i: usize, most: &mut [L::U; 2]) {
        let grad = l.load(&self.grad[i..]);
        let m = l.mul(l.load(&self.m[i..]), c.absmax[0]);
        let v = l.mul(l.load(&self.v[i..]), c.absmax[1]);
        let square = l.mul(l.mul(c.one_minus_beta2, grad), grad);
        let v = l.add(l.mul(v, c.beta2), square);
        let m = l.add(l.mul(m, c.beta1), l.mul(c.one_minus_beta1, grad));
        let quotient = l.div(m, l.add(l.sqrt(v), c.eps));
        let moved = l.sub(l.load(&self.weight[i..]), l.mul(c.step_size, quotient));
        l.store(&mut self.weight[i..], l.mul(moved, c.decay));
        l.store(&mut self.m[i..], m);
        l.store(&mut self.v[i..], v);
        let magnitude = l.u(MAGNITUDE);
        most[0] = l.max_u(most[0], l.and(l.bits(m), magnitude));
        most[1] = l.max_u(most[1], l.and(l.bits(v), magnitude));
    }

    /// Updates element by element with the arithmetic of [`Block::update`], and returns the largest magnitudes. An
    /// element whose gradient is not finite loses its moments and keeps its weight.
    #[cold]
    fn update_each(
        &mut self,
        c: &Coefficients,
        absmax: [f32; 2],
        rounds_between: bool,
    ) -> [f32; 2] {
        let mut most = [0; 2];
        for i in 0..BLOCK_ELEMS {
            let grad = self.grad[i];
            if !grad.is_finite() {
                (self.m[i], self.v[i]) = (0.0, 0.0);
                continue;
            }
            let square = c.one_minus_beta2 * grad * grad;
            let v = self.v[i] * absmax[1] * c.beta2 + square;
            let m = self.m[i] * absmax[0] * c.beta1 + c.one_minus_beta1 * grad;
            let moved = self.weight[i] - c.step_size * (m / (v.sqrt() + c.eps));
            let moved = match rounds_between {
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

/// The largest of some magnitudes, given as bits.
#[inline(always)]
fn largest<L: Lanes>(l: L, bits: L::U) -> f32 {
    let mut numbers = [0f32; STRIDE];
    l.store(&mut numbers, l.float(bits));
    let most = numbers.iter().fold(0, |most, x| x.to_bits().max(most));
    f32::from_bits(most)
}

/// Writes the new weights of a block whose first element is `rounding.first_element`.
#[inline(always)]
fn put<L: Lanes, W: Weights>(l: L, mut to: W, values: &Values, n: usize, at: Rounding) {
    let first = at.first_element;
    let key = PageKey::new(at.stream, at.step, first);
    let one_page = PageKey::elems_left(first) >= n as u64;
    let random = |i: usize| {
        let element = first + i as u64;
        let key = match one_page {
            true => key,
            false => PageKey::new(at.stream, at.step, element),
        };
        key.halves(element)[0]
    };
    let stochastic = W::MODE == Mode::Stochastic;
    if n < BLOCK_ELEMS || (stochastic && (!one_page || first % 2 == 1)) {
        return put_each_weight(to, &values[..n], random);
    }
    for i in (0..n).step_by(L::ITEM) {
        let item = [l.load(&values[i..]), l.load(&values[i + L::N..])];
        if !W::ROUNDS || l.all_below(larger(l, l.u(0), item), LARGE) {
            let pair = ((first + i as u64) / 2) as u32;
            let words = stochastic.then(|| l.word(key, 0, l.pairs(key, pair)));
            let packed = W::pack::<L, false>(l, item, words);
            to.store(l, i, packed);
        } else {
            for (j, x) in values[i..i + L::ITEM].iter().enumerate() {
                to.put(i + j, *x, random(i + j));
            }
        }
    }
}

impl<G: Number, W: Weights> Loop for BlockUpdate<'_, G, W> {
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
        while let (Some(of_m), Some(of_v)) = (m.next(), v.next()) {
            let n = of_m.0.len();
            let (own_grad, grad_left) = grad.split_at(n);
            let (own, weights_left) = weights.split_at(n);
            let mut block = Block {
                grad: [0.0; BLOCK_ELEMS],
                weight: [0.0; BLOCK_ELEMS],
                m: [0.0; BLOCK_ELEMS],
                v: [0.0; BLOCK_ELEMS],
            };
            for (x, grad) in block.grad.iter_mut().zip(own_grad) {
                *x = grad.get();
            }
            if n == BLOCK_ELEMS {
                for i in (0..n).step_by(L::ITEM) {
                    let [a, b] = own.load::<L, false>(l, i);
                    l.store(&mut block.weight[i..], a);
                    l.store(&mut block.weight[i + L::N..], b);
                }
            } else {
                for (i, x) in block.weight[..n].iter_mut().enumerate() {
                    *x = own.get(i);
                }
            }
            let (factor, mut gradients) = (l.f(coefficients.grad_scale), l.u(0));
            for i in (0..BLOCK_ELEMS).step_by(L::N) {
                let grad = l.mul(l.load(&block.grad[i..]), factor);
                gradients = l.max_u(gradients, l.and(l.bits(grad), l.u(MAGNITUDE)));
                l.store(&mut block.grad[i..], grad);
            }
            let each = W::ROUNDS_BETWEEN || !l.all_below(gradients, f32::INFINITY.to_bits());
            // A short block is followed by codes of zero.
            let mut codes = [[ZEROS[0]; BLOCK_ELEMS], [ZEROS[1]; BLOCK_ELEMS]];
            codes[0][..n].copy_from_slice(of_m.0);
            codes[1][..n].copy_from_slice(of_v.0);
            let absmax = [*of_m.1, *of_v.1];
            let constants = Vectors::new(l, &coefficients, absmax);
            let mut most = [l.u(0), l.u(0)];
            for s in 0..STRIDES + LEAD {
                if s < STRIDES {
                    let own = s * STRIDE..(s + 1) * STRIDE;
                    first.decode(&codes[0][own.clone()], &mut block.m[own.clone()]);
                    second.decode(&codes[1][own.clone()], &mut block.v[own]);
                }
                if s >= LEAD && !each {
                    for i in ((s - LEAD) * STRIDE..(s - LEAD + 1) * STRIDE).step_by(L::N) {
                        block.update(l, &constants, i, &mut most);
                    }
                }
            }
            [*of_m.1, *of_v.1] = if each {
                block.update_each(&coefficients, absmax, W::ROUNDS_BETWEEN)
            } else {
                [largest(l, most[0]), largest(l, most[1])]
            };
            first.encode(l, &block.m, *of_m.1, &mut codes[0]);
            second.encode(l, &block.v, *of_v.1, &mut codes[1]);
            of_m.0.copy_from_slice(&codes[0][..n]);
            of_v.0.copy_from_slice(&codes[1][..n]);
            put(l, own, &block.weight, n, rounding);
            rounding = rounding.after(n);
            (grad, weights, m, v) = (grad_left, weights_left, of_m.2, of_v.2);
        }
    }
}
