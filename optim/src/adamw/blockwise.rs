//! AdamW with moments of 8 bits: one code per element and an `f32` absmax per block of 256 elements, with the rule of
//! bitsandbytes' GPU kernel (`kOptimizerStatic8bit2StateBlockwise`).
//!
//! A block is decoded, updated in `f32` and encoded again; weights move by the moments before they are encoded. Weight
//! decay follows the update. A code is the nearest value of a [dynamic map](kernels::dynamic_map) after division by the
//! block's absmax. The absmax is the exact maximum, so every SIMD path, split and thread count gives the same bits.

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

/// Exponent and leading mantissa bits (the `bf16` bits) of the first bucket of magnitudes, 2^-23. Every threshold
/// between codes is larger.
const FIRST_BUCKET: u32 = 0x3400;
/// Buckets of one sign, a power of two above those that magnitudes up to 1 need.
const BUCKETS: usize = 1 << 12;

/// Search for the code of a number, as a table over the number's leading bits.
pub(super) struct Codec {
    map: &'static [f32; 256],
    /// By sign and bucket. A bucket contains at most one threshold: adding the number's low half carries into the high
    /// half, which is the code, beyond that threshold. Codes of negative numbers are counted from 255 down.
    entries: Box<[u32; 2 * BUCKETS]>,
}

static FIRST_MOMENT: LazyLock<Codec> = LazyLock::new(|| Codec::new(&dynamic_map::SIGNED));
static SECOND_MOMENT: LazyLock<Codec> = LazyLock::new(|| Codec::new(&dynamic_map::UNSIGNED));

impl Codec {
    pub(super) fn new(map: &'static [f32; 256]) -> Self {
        let mut entries = Box::new([0; 2 * BUCKETS]);
        for negative in [false, true] {
            let code = |magnitude: u32| {
                let sign = u32::from(negative) << 31;
                let code = search(map, f32::from_bits(sign | magnitude));
                u32::from(code ^ mask(negative))
            };
            let first = usize::from(negative) * BUCKETS;
            for bucket in 0..=(1f32.to_bits() >> 16) - FIRST_BUCKET {
                let start = (FIRST_BUCKET + bucket) << 16;
                let lowest = code(start);
                // Number of low halves of the bucket with its lowest code.
                let (mut known, mut end) = (1, 1 << 16);
                while known < end {
                    let middle = (known + end) / 2;
                    if code(start | middle) == lowest {
                        known = middle + 1;
                    } else {
                        end = middle;
                    }
                }
                entries[first + bucket as usize] = (lowest << 16) + ((1 << 16) - known);
            }
        }
        Self { map, entries }
    }

    /// Code of a number of magnitude at most 1, from its bits.
    #[inline(always)]
    pub(super) fn code(&self, bits: u32) -> u8 {
        let magnitude = (bits & 0x7fff_ffff).max(FIRST_BUCKET << 16);
        let bucket = (magnitude >> 16) - FIRST_BUCKET;
        let sign = (bits >> 31) as usize;
        let entry = self.entries[sign << 12 | (bucket as usize & (BUCKETS - 1))];
        ((entry + (magnitude & 0xffff)) >> 16) as u8 ^ mask(sign == 1)
    }

    /// Encodes the values of a block whose largest magnitude is `absmax`.
    #[inline(always)]
    fn encode(&self, values: &[f32; BLOCK_ELEMS], absmax: f32, codes: &mut [u8]) {
        if absmax == 0.0 {
            // As the search for 0 / 0, NaN, ends.
            return codes.fill(search(self.map, f32::NAN.copysign(1.0)));
        }
        if !absmax.is_finite() {
            return self.encode_each(values, absmax, codes);
        }
        let mut bits = [0; BLOCK_ELEMS];
        for (bits, x) in bits.iter_mut().zip(values) {
            *bits = (x / absmax).to_bits();
        }
        for (code, bits) in codes.iter_mut().zip(&bits) {
            *code = self.code(*bits);
        }
    }

    /// Encodes values one by one, for a block with an overflow.
    #[cold]
    fn encode_each(&self, values: &[f32; BLOCK_ELEMS], absmax: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(values) {
            *code = search(self.map, (x / absmax).copysign(*x));
        }
    }

    /// Decodes a block; values beyond its codes are zero.
    #[inline(always)]
    fn decode(&self, codes: &[u8], absmax: f32) -> [f32; BLOCK_ELEMS] {
        let mut values = [0.0; BLOCK_ELEMS];
        for (x, code) in values.iter_mut().zip(codes) {
            *x = self.map[usize::from(*code)] * absmax;
        }
        values
    }
}

const fn mask(negative: bool) -> u8 {
    if negative { 0xff } else { 0 }
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
    grad: [f32; BLOCK_ELEMS],
    weight: [f32; BLOCK_ELEMS],
    m: [f32; BLOCK_ELEMS],
    v: [f32; BLOCK_ELEMS],
}

impl Block {
    /// Updates weights and moments. Returns the largest magnitude of either moment, as bits. An element whose
    /// gradient is not finite loses its moments and keeps its weight.
    #[inline(always)]
    fn update(&mut self, c: &Coefficients, rounds_between: bool) -> [u32; 2] {
        let mut most = [0; 2];
        for i in 0..BLOCK_ELEMS {
            let grad = self.grad[i] * c.grad_scale;
            let finite = grad.to_bits() & 0x7fff_ffff < f32::INFINITY.to_bits();
            let v = self.v[i] * c.beta2 + c.one_minus_beta2 * grad * grad;
            let m = self.m[i] * c.beta1 + c.one_minus_beta1 * grad;
            let (m, v) = if finite { (m, v) } else { (0.0, 0.0) };
            let moved = self.weight[i] - c.step_size * (m / (v.sqrt() + c.eps));
            let moved = if rounds_between {
                bf16::from_f32(moved).to_f32()
            } else {
                moved
            };
            self.weight[i] = if finite {
                moved * c.decay
            } else {
                self.weight[i]
            };
            most[0] = most[0].max(m.to_bits() & 0x7fff_ffff);
            most[1] = most[1].max(v.to_bits() & 0x7fff_ffff);
            (self.m[i], self.v[i]) = (m, v);
        }
        most
    }
}

/// Writes the new weights of a block whose first element is `rounding.first_element`.
#[inline(always)]
fn put<L: Lanes, W: Weights>(l: L, mut to: W, values: &[f32; BLOCK_ELEMS], n: usize, at: Rounding) {
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
                m: first.decode(of_m.0, *of_m.1),
                v: second.decode(of_v.0, *of_v.1),
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
            let most = block.update(&coefficients, W::ROUNDS_BETWEEN);
            let most = most.map(f32::from_bits);
            (*of_m.1, *of_v.1) = (most[0], most[1]);
            first.encode(&block.m, most[0], of_m.0);
            second.encode(&block.v, most[1], of_v.0);
            put(l, own, &block.weight, n, rounding);
            rounding = rounding.after(n);
            (grad, weights, m, v) = (grad_left, weights_left, of_m.2, of_v.2);
        }
    }
}
