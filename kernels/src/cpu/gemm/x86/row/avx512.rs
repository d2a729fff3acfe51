//! The form for AVX-512: a square is a cache line of sixteen columns. A vector of a transposed square has the same `k`
//! of sixteen columns, or the same two `k` in 16 bits.
//!
//! A chain is the sum over one stretch of `k`: a fused multiply-add per `k`, each of which waits for the one before. In
//! 16 bits two stretches are summed in turn, so that one works while the other waits. A line of f32 has half the
//! elements, so one chain is faster than memory, and the processor reads fewer places at a time. The columns of the
//! next stretches are prefetched one after the other, which memory serves faster than lines of many columns in turn.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use crate::cpu::gemm::kernel::TileIo;
use crate::cpu::gemm::x86::avx512::lanes;
use crate::{DType, Float};

/// Columns per vector, and vectors of `k` per square.
const N: usize = 16;
/// Bytes of a cache line.
const LINE: usize = 64;

/// # Safety
/// As [`super::row`], on a processor with AVX-512 F, BW, DQ and VL. All columns have the length of `a`.
pub(super) unsafe fn row_of<T: Float, const GROUPED: bool>(
    b: &[T],
    stride: usize,
    n: usize,
    a: &[f32],
    stretch: usize,
    factor: f32,
    place: TileIo,
) {
    for first in (0..n).step_by(N) {
        let columns = Columns::<T, GROUPED> {
            start: b[first * stride..].as_ptr(),
            stride,
            wide: (n - first).min(N),
        };
        let place = TileIo {
            from: place.from.wrapping_add(first),
            to: place.to.wrapping_add(first),
            ..place
        };
        // SAFETY: the caller's promises.
        unsafe { columns.all(a, stretch, factor, place) }
    }
}

/// Up to sixteen columns. `GROUPED`: of bf16, whose sums are those of [`crate::CpuMath::Amx`].
#[derive(Clone, Copy)]
struct Columns<T, const GROUPED: bool> {
    start: *const T,
    /// Elements from column to column.
    stride: usize,
    /// Number of columns.
    wide: usize,
}

impl<T: Float, const GROUPED: bool> Columns<T, GROUPED> {
    /// Elements of a column in one square.
    const STEP: usize = LINE / size_of::<T>();
    /// Elements of a column in one word of 32 bits, and most stretches whose chains run in turn.
    const PER_WORD: usize = size_of::<u32>() / size_of::<T>();

    /// # Safety
    /// As [`row_of`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn all(self, a: &[f32], stretch: usize, factor: f32, place: TileIo) {
        let mask = lanes(self.wide);
        let factor = _mm512_set1_ps(factor);
        // SAFETY: the caller's promises; all positions are below the depth, and masked lanes are not accessed.
        unsafe {
            let mut sum = _mm512_maskz_loadu_ps(mask, place.from);
            let mut at = 0;
            // One stretch, if it is empty.
            while at < a.len() || at == 0 {
                let count = Self::count(a.len() - at, stretch);
                sum = match count {
                    0 => self.add_part(a, at, stretch, factor, sum),
                    1 => self.add::<1>(a, at, stretch, factor, sum),
                    _ => self.add::<2>(a, at, stretch, factor, sum),
                };
                at += count.max(1) * stretch.max(1);
            }
            _mm512_mask_storeu_ps(place.to, mask, sum);
        }
    }

    /// Number of stretches whose chains run in turn if `left` elements follow. 0: the next has no whole squares.
    fn count(left: usize, stretch: usize) -> usize {
        match stretch.is_multiple_of(Self::STEP) {
            true => (left / stretch.max(1)).min(Self::PER_WORD),
            false => 0,
        }
    }

    /// Starts of the columns. Those that do not exist are copies of the last one.
    #[inline(always)]
    fn starts(self, at: usize) -> [*const T; N] {
        let mut starts = [self.start; N];
        for (i, start) in starts.iter_mut().enumerate() {
            *start = self
                .start
                .wrapping_add(i.min(self.wide - 1) * self.stride + at);
        }
        starts
    }

    /// Adds the chains of `S` stretches from `at` on, whole squares each.
    ///
    /// # Safety
    /// The columns, and `a`, have these stretches.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn add<const S: usize>(
        self,
        a: &[f32],
        at: usize,
        stretch: usize,
        factor: __m512,
        sum: __m512,
    ) -> __m512 {
        let starts = self.starts(at);
        let mut chains = [_mm512_setzero_ps(); S];
        let mut next_lines = NextLines::new(self, at + S * stretch, a.len(), stretch);
        // Spread over the squares.
        let lines = (N * next_lines.run).div_ceil(S * stretch / Self::STEP);
        let a = a.as_ptr().wrapping_add(at);
        let mut squares = [[_mm512_setzero_si512(); N]; S];
        for k in (0..stretch).step_by(Self::STEP) {
            // SAFETY: a stretch has whole squares, so each ends within its stretch, in the columns and in `a`.
            unsafe {
                for (s, square) in squares.iter_mut().enumerate() {
                    next_lines.prefetch(lines);
                    let mut lines = [_mm512_setzero_si512(); N];
                    for i in 0..N {
                        lines[i] = _mm512_loadu_si512(starts[i].add(k + s * stretch).cast());
                    }
                    *square = transposed(lines);
                }
                continue_chains::<T, S, GROUPED>(
                    &squares,
                    (a.add(k), stretch),
                    Self::STEP,
                    &mut chains,
                );
            }
        }
        let add = |sum, chain| _mm512_fmadd_ps(factor, chain, sum);
        chains.into_iter().fold(sum, add)
    }

    /// Adds the chain of up to one stretch from `at` on.
    ///
    /// # Safety
    /// The columns have the length of `a`, which does not end before `at`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn add_part(
        self,
        a: &[f32],
        at: usize,
        stretch: usize,
        factor: __m512,
        sum: __m512,
    ) -> __m512 {
        let (starts, len) = (self.starts(at), stretch.min(a.len() - at));
        let a = a.as_ptr().wrapping_add(at);
        let mut part = [_mm512_setzero_ps()];
        let mut lines = [_mm512_setzero_si512(); N];
        let mut k = 0;
        // SAFETY: `k + wide` is at most `len`, and the columns and `a` have `len` elements from `at` on.
        unsafe {
            while k < len {
                let wide = Self::STEP.min(len - k);
                for i in 0..N {
                    lines[i] = line_of::<T>(starts[i].add(k), wide);
                }
                let square = [transposed(lines)];
                continue_chains::<T, 1, GROUPED>(&square, (a.add(k), 0), wide, &mut part);
                k += wide;
            }
        }
        _mm512_fmadd_ps(factor, part[0], sum)
    }
}

/// Lines of the next stretches of all columns, in the order in which they are prefetched: column after column.
struct NextLines {
    line: *const u8,
    column: *const u8,
    /// Lines left of the column's stretches, and lines of each column.
    left: usize,
    run: usize,
    /// Bytes from column to column.
    stride: usize,
}

impl NextLines {
    /// Lines of the stretches that are summed in turn from `at` on. Where the columns end there, at `depth`, lines of
    /// the next columns.
    #[inline(always)]
    fn new<T: Float, const G: bool>(
        columns: Columns<T, G>,
        at: usize,
        depth: usize,
        stretch: usize,
    ) -> Self {
        let (column, left) = if at < depth {
            (columns.start.wrapping_add(at), depth - at)
        } else {
            (columns.start.wrapping_add(N * columns.stride), depth)
        };
        let elems = left.min(Columns::<T, G>::count(left, stretch).max(1) * stretch);
        let run = (elems * size_of::<T>()).div_ceil(LINE);
        Self {
            line: column.cast(),
            column: column.cast(),
            left: run,
            run,
            stride: columns.stride * size_of::<T>(),
        }
    }

    #[inline(always)]
    fn prefetch(&mut self, lines: usize) {
        for _ in 0..lines {
            // SAFETY: a prefetch changes caches only and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.line.cast()) };
            self.line = self.line.wrapping_add(LINE);
            self.left -= 1;
            if self.left == 0 {
                self.column = self.column.wrapping_add(self.stride);
                (self.line, self.left) = (self.column, self.run);
            }
        }
    }
}

/// The first `len` elements of a column in one square, followed by zeros.
///
/// # Safety
/// `from` points to `len` elements, at least one and at most as many as a square has.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn line_of<T: Float>(from: *const T, len: usize) -> __m512i {
    let mask = u32::MAX >> (u32::BITS - len as u32);
    // SAFETY: the caller's promise; masked lanes are not read.
    unsafe {
        match size_of::<T>() {
            2 => _mm512_maskz_loadu_epi16(mask, from.cast()),
            _ => _mm512_maskz_loadu_epi32(mask as __mmask16, from.cast()),
        }
    }
}

/// Transposes a square of 32-bit words.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(x: [__m512i; N]) -> [__m512i; N] {
    let mut pairs = x;
    for i in (0..N).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    // Four columns for one `k` in each of the four parts of 128 bits; the parts are four `k` apart.
    let mut fours = pairs;
    for i in (0..N).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut out = fours;
    for i in 0..4 {
        let (a, b, c, d) = (fours[i], fours[i + 4], fours[i + 8], fours[i + 12]);
        let (low_ab, low_cd) = (
            _mm512_shuffle_i32x4::<0x44>(a, b),
            _mm512_shuffle_i32x4::<0x44>(c, d),
        );
        let (high_ab, high_cd) = (
            _mm512_shuffle_i32x4::<0xee>(a, b),
            _mm512_shuffle_i32x4::<0xee>(c, d),
        );
        out[i] = _mm512_shuffle_i32x4::<0x88>(low_ab, low_cd);
        out[i + 4] = _mm512_shuffle_i32x4::<0xdd>(low_ab, low_cd);
        out[i + 8] = _mm512_shuffle_i32x4::<0x88>(high_ab, high_cd);
        out[i + 12] = _mm512_shuffle_i32x4::<0xdd>(high_ab, high_cd);
    }
    out
}

/// Adds `len` products to each of the `S` sums. They take turns, since an addition waits for the one before to its sum.
///
/// # Safety
/// `a` points to `len` elements of the first stretch, at most as many as a square has; those of each later stretch are
/// `stretch` further on.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn continue_chains<T: Float, const S: usize, const GROUPED: bool>(
    squares: &[[__m512i; N]; S],
    (a, stretch): (*const f32, usize),
    len: usize,
    sums: &mut [__m512; S],
) {
    let per_word = Columns::<T, GROUPED>::PER_WORD;
    // In the order of AMX, the even and the odd elements of a square have sums of their own, which start at zero.
    let mut halves = [[_mm512_setzero_ps(); 2]; S];
    for i in 0..N {
        for odd in 0..per_word {
            let k = per_word * i + odd;
            if k < len {
                for s in 0..S {
                    // SAFETY: `k` is below `len`, and the caller's promise.
                    let left = _mm512_set1_ps(unsafe { *a.add(k + s * stretch) });
                    let right = widened::<T>(squares[s][i], odd);
                    let sum = match GROUPED {
                        true => &mut halves[s][odd],
                        false => &mut sums[s],
                    };
                    *sum = _mm512_fmadd_ps(left, right, *sum);
                }
            }
        }
    }
    if GROUPED {
        for (sum, [even, odd]) in sums.iter_mut().zip(halves) {
            *sum = _mm512_add_ps(*sum, _mm512_add_ps(even, odd));
        }
    }
}

/// The first or second element of each word as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn widened<T: Float>(words: __m512i, second: usize) -> __m512 {
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    match (T::DTYPE, second) {
        (DType::BF16, 0) => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)),
        (DType::BF16, _) => _mm512_castsi512_ps(_mm512_and_si512(words, high)),
        (DType::F16, 0) => _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)),
        (DType::F16, _) => _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(words))),
        _ => _mm512_castsi512_ps(words),
    }
}
