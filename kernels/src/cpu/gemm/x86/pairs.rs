//! Panels of bf16 in pairs of `k`, the first of a pair in the upper half of 32 bits.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use super::square::{store, store_all, transpose, zeros};
use crate::cpu::gemm::kernel::Least;
use crate::cpu::matrix::Matrix;
use crate::cpu::simd::prefetch;
use half::bf16;

/// Lanes, and pairs, of a square.
const SIDE: usize = 16;
/// Elements of a lane in a square: one cache line.
const LONG: usize = 2 * SIDE;
/// Prefetch distance along a lane in elements.
const AHEAD: usize = 128;
/// Prefetch distance in `k`, if lanes are side by side in memory.
const AHEAD_ROWS: usize = 32;
/// Steps that are packed together, if lanes are side by side in memory.
const TOGETHER: usize = 16;

/// Packs `x [lanes, depth]` into panels of `width` lanes, which fill `out`. `data` are its elements. Returns their
/// smallest magnitude.
///
/// The processor has AVX-512 F and BW.
pub(in crate::cpu::gemm) fn pack(
    width: usize,
    data: &[bf16],
    x: Matrix<'_>,
    out: &mut [f32],
) -> Least {
    let (lane_stride, depth_stride) = x.strides();
    let (lanes, depth) = (x.rows, x.cols);
    assert!(out.len() == lanes.next_multiple_of(width) * depth.div_ceil(2));
    assert!((lanes - 1) * lane_stride + (depth - 1) * depth_stride < data.len());
    assert!(width == SIDE / 2 || width.is_multiple_of(SIDE));
    // SAFETY: all lanes are inside the slice, as asserted. Only processors with AVX512-BF16 pack pairs.
    unsafe {
        if lane_stride == 1 {
            beside(data, depth_stride, (lanes, depth), width, out)
        } else {
            assert!(depth_stride == 1, "strides {lane_stride}, {depth_stride}");
            across(data, lane_stride, (lanes, depth), width, out)
        }
    }
}

/// The smallest magnitude so far in each of 32 lanes, in the form of [`Least`].
#[derive(Clone, Copy)]
pub(super) struct Bound(__m512i);

impl Bound {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn new() -> Self {
        Self(_mm512_set1_epi16(-1))
    }

    /// Takes 32 more elements into account. Zero minus one wraps around to the largest number.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn with(self, x: __m512i) -> Self {
        let magnitudes = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
        let less = _mm512_sub_epi16(magnitudes, _mm512_set1_epi16(1));
        Self(_mm512_min_epu16(self.0, less))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn least(self) -> Least {
        let mut all = [0u16; LONG];
        // SAFETY: the array is as long as the vector.
        unsafe { _mm512_storeu_si512(all.as_mut_ptr().cast(), self.0) };
        all.into_iter().min().unwrap_or(Least::MAX)
    }
}

/// Packs an operand whose elements of one lane are side by side in memory.
///
/// # Safety
/// The processor has AVX-512 F and BW, and `x` contains all lanes.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn across(
    x: &[bf16],
    stride: usize,
    (lanes, depth): (usize, usize),
    width: usize,
    out: &mut [f32],
) -> Least {
    let mut bound = Bound::new();
    let (all, steps) = (lanes.next_multiple_of(width), depth.div_ceil(2));
    // Lanes of a square that are side by side in a panel.
    let piece = width.min(SIDE);
    for lane in (0..all).step_by(SIDE) {
        let filled = SIDE.min(lanes.saturating_sub(lane));
        for first in (0..depth).step_by(LONG) {
            let long = (depth - first).min(LONG);
            let mask = u32::MAX >> (LONG - long);
            let ahead = if first + AHEAD < depth {
                lane * stride + first + AHEAD
            } else {
                (lane + SIDE) * stride + (first + AHEAD) % depth
            };
            let from = x.as_ptr().wrapping_add(lane * stride + first);
            let ahead = x.as_ptr().wrapping_add(ahead);
            let mut square = zeros();
            for i in 0..filled {
                prefetch(ahead.wrapping_add(i * stride));
                // SAFETY: `long` elements of a lane; others are not read.
                let pairs = unsafe {
                    let from = from.wrapping_add(i * stride);
                    _mm512_maskz_loadu_epi16(mask, from.cast())
                };
                bound = bound.with(pairs);
                square[i] = _mm512_castsi512_ps(_mm512_rol_epi32::<16>(pairs));
            }
            let square = transpose(square);
            for at in (lane..all.min(lane + SIDE)).step_by(piece) {
                let panel = &mut out[at / width * width * steps..][..width * steps];
                let to = &mut panel[first / 2 * width + at % width..];
                let square = &square[..long.div_ceil(2)];
                store_all(to, width, square, at - lane, piece);
            }
        }
    }
    bound.least()
}

/// Packs an operand whose lanes are side by side in memory for each `k`: 32 lanes of a few steps at a time, so each panel
/// is written in whole cache lines.
///
/// # Safety
/// The processor has AVX-512 F and BW, and `x` contains all lanes.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn beside(
    x: &[bf16],
    stride: usize,
    (lanes, depth): (usize, usize),
    width: usize,
    out: &mut [f32],
) -> Least {
    let mut bound = Bound::new();
    let (all, steps) = (lanes.next_multiple_of(width), depth.div_ceil(2));
    let piece = width.min(SIDE);
    // Indices of a permutation of two rows of 32 elements: it puts the two elements of each lane side by side. One
    // vector of indices is for the first sixteen lanes, the other for the rest.
    let mut words = [[0u16; LONG]; 2];
    for (half, words) in words.iter_mut().enumerate() {
        for i in 0..SIDE {
            let lane = (half * SIDE + i) as u16;
            (words[2 * i], words[2 * i + 1]) = (lane, LONG as u16 + lane);
        }
    }
    // SAFETY: each array is as long as a vector.
    let words = words.map(|words| unsafe { _mm512_loadu_si512(words.as_ptr().cast()) });
    for first in (0..steps).step_by(TOGETHER) {
        let together = first..steps.min(first + TOGETHER);
        for lane in (0..all).step_by(LONG) {
            let there = lanes.saturating_sub(lane).min(LONG);
            let mask = u32::MAX.checked_shr((LONG - there) as u32).unwrap_or(0);
            // Where the first step of each piece of the lanes goes.
            let mut pieces = [0; LONG / (SIDE / 2)];
            let count = (all - lane).min(LONG) / piece;
            for (i, to) in pieces[..count].iter_mut().enumerate() {
                let at = lane + i * piece;
                *to = at / width * width * steps + at % width;
            }
            for step in together.clone() {
                let k = 2 * step;
                let upper = x.as_ptr().wrapping_add(k * stride + lane);
                let ahead = upper.wrapping_add(AHEAD_ROWS * stride);
                prefetch(ahead);
                prefetch(ahead.wrapping_add(stride));
                let both = if k + 1 < depth { mask } else { 0 };
                // SAFETY: masked lanes are not read; the others are inside the slice.
                let (upper, lower) = unsafe {
                    (
                        _mm512_maskz_loadu_epi16(mask, upper.cast()),
                        _mm512_maskz_loadu_epi16(both, upper.wrapping_add(stride).cast()),
                    )
                };
                bound = bound.with(upper).with(lower);
                let pairs = words.map(|words| {
                    _mm512_castsi512_ps(_mm512_permutex2var_epi16(lower, words, upper))
                });
                for (i, to) in pieces[..count].iter().enumerate() {
                    let to = &mut out[to + step * width..][..piece];
                    let at = i * piece;
                    // SAFETY: a slice of `piece` elements.
                    unsafe { store(to.as_mut_ptr(), pairs[at / SIDE], at % SIDE, piece) };
                }
            }
        }
    }
    bound.least()
}
