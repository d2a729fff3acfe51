//! The form for AVX-512: a square is a cache line of sixteen columns, so a vector has the same `k` of sixteen columns.
//!
//! A chain has one fused multiply-add per `k` and waits for each. So the chains of up to four stretches run at one time.
//! Each of the sixteen columns is then read in runs of a page or half a page, and the next runs are prefetched one after
//! the other, which memory serves faster than lines of many columns in turn.

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
/// Most stretches whose chains run at one time.
const TOGETHER: usize = 4;
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
    stride: usize,
    wide: usize,
}

impl<T: Float, const GROUPED: bool> Columns<T, GROUPED> {
    /// Elements of a column in one square.
    const STEP: usize = if matches!(T::DTYPE, DType::BF16) {
        2 * N
    } else {
        N
    };

    /// # Safety
    /// As [`row_of`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn all(self, a: &[f32], stretch: usize, factor: f32, place: TileIo) {
        let mask = lanes(self.wide);
        let factor = _mm512_set1_ps(factor);
        let (depth, whole) = (a.len(), stretch.is_multiple_of(Self::STEP));
        // SAFETY: the caller's promises; all positions are below `depth`, and masked lanes are neither read nor written.
        unsafe {
            let mut sum = _mm512_maskz_loadu_ps(mask, place.from);
            let mut at = 0;
            // One stretch, if it is empty.
            while at < depth || at == 0 {
                let left = (depth - at) / stretch.max(1);
                let len = if whole && left >= TOGETHER {
                    for chain in self.together::<TOGETHER>(a, at, stretch) {
                        sum = _mm512_fmadd_ps(factor, chain, sum);
                    }
                    TOGETHER * stretch
                } else if whole && left >= 2 {
                    for chain in self.together::<2>(a, at, stretch) {
                        sum = _mm512_fmadd_ps(factor, chain, sum);
                    }
                    2 * stretch
                } else {
                    let len = stretch.min(depth - at);
                    let chain = self.single(a.as_ptr().add(at), at, len);
                    sum = _mm512_fmadd_ps(factor, chain, sum);
                    len.max(1)
                };
                at += len;
            }
            _mm512_mask_storeu_ps(place.to, mask, sum);
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

    /// The chains of `S` stretches from `at` on, whole squares each.
    ///
    /// # Safety
    /// The columns, and `a`, have these stretches.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn together<const S: usize>(self, a: &[f32], at: usize, stretch: usize) -> [__m512; S] {
        let starts = self.starts(at);
        let mut sums = [_mm512_setzero_ps(); S];
        let next = at + S * stretch;
        let mut next_lines = NextLines::new(self, next, a.len(), TOGETHER * stretch);
        // Spread over the squares.
        let lines = (N * next_lines.run).div_ceil(S * stretch / Self::STEP);
        let a = a.as_ptr().wrapping_add(at);
        for k in (0..stretch).step_by(Self::STEP) {
            for s in 0..S {
                let k = k + s * stretch;
                next_lines.prefetch(lines);
                let mut lines = [_mm512_setzero_si512(); N];
                // SAFETY: the caller's promises.
                unsafe {
                    for i in 0..N {
                        lines[i] = line::<T>(starts[i].add(k));
                    }
                    sums[s] = chain::<T, GROUPED>(transposed(lines), a.add(k), Self::STEP, sums[s]);
                }
            }
        }
        sums
    }

    /// The chain of one stretch of `len` elements from `at` on.
    ///
    /// # Safety
    /// The columns have this stretch, and `a` points to as many elements.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn single(self, a: *const f32, at: usize, len: usize) -> __m512 {
        let starts = self.starts(at);
        let mut sum = _mm512_setzero_ps();
        let mut lines = [_mm512_setzero_si512(); N];
        let mut k = 0;
        // SAFETY: the caller's promises.
        unsafe {
            while k + Self::STEP <= len {
                for i in 0..N {
                    lines[i] = line::<T>(starts[i].add(k));
                }
                sum = chain::<T, GROUPED>(transposed(lines), a.add(k), Self::STEP, sum);
                k += Self::STEP;
            }
            if k < len {
                for i in 0..N {
                    lines[i] = line_end::<T>(starts[i].add(k), len - k);
                }
                sum = chain::<T, GROUPED>(transposed(lines), a.add(k), len - k, sum);
            }
        }
        sum
    }
}

/// Lines of the next runs of all columns, in the order in which they are prefetched: column after column.
struct NextLines {
    line: *const u8,
    column: *const u8,
    /// Lines left of the column's run, and of each later one.
    left: usize,
    run: usize,
    /// Bytes from column to column.
    stride: usize,
}

impl NextLines {
    /// Runs of up to `elems` elements from `at` on, or from the start of the next columns where these end at `depth`.
    #[inline(always)]
    fn new<T, const G: bool>(
        columns: Columns<T, G>,
        at: usize,
        depth: usize,
        elems: usize,
    ) -> Self {
        let (column, left) = if at < depth {
            (columns.start.wrapping_add(at), depth - at)
        } else {
            (columns.start.wrapping_add(N * columns.stride), depth)
        };
        let run = (elems.min(left) * size_of::<T>()).div_ceil(LINE);
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

/// The elements of a column in one square: sixteen f32, or sixteen pairs of bf16. Those of f16 become f32.
///
/// # Safety
/// `from` points to as many elements as a square has.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn line<T: Float>(from: *const T) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        if T::DTYPE == DType::F16 {
            let halves = std::ptr::read_unaligned(from.cast::<__m256i>());
            _mm512_castps_si512(_mm512_cvtph_ps(halves))
        } else {
            _mm512_loadu_si512(from.cast())
        }
    }
}

/// As [`line`] for the last `len` elements of a column, followed by zeros.
///
/// # Safety
/// `from` points to `len` elements, fewer than a square has.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn line_end<T: Float>(from: *const T, len: usize) -> __m512i {
    let mask = (1u32 << len) - 1;
    // SAFETY: the caller's promise; masked lanes are not read.
    unsafe {
        match T::DTYPE {
            DType::BF16 => _mm512_maskz_loadu_epi16(mask, from.cast()),
            DType::F16 => {
                let halves = _mm256_maskz_loadu_epi16(mask as __mmask16, from.cast());
                _mm512_castps_si512(_mm512_cvtph_ps(halves))
            }
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

/// Continues the chains by `len` elements.
///
/// # Safety
/// `a` points to `len` elements, at most as many as a square has.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn chain<T: Float, const GROUPED: bool>(
    square: [__m512i; N],
    a: *const f32,
    len: usize,
    mut sum: __m512,
) -> __m512 {
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    // A square is a group, so its two sums start at zero.
    let (mut evens, mut odds) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    for (i, words) in square.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            if T::DTYPE != DType::BF16 {
                if i < len {
                    let left = _mm512_set1_ps(*a.add(i));
                    sum = _mm512_fmadd_ps(left, _mm512_castsi512_ps(words), sum);
                }
                continue;
            }
            if 2 * i < len {
                let left = _mm512_set1_ps(*a.add(2 * i));
                let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
                match GROUPED {
                    true => evens = _mm512_fmadd_ps(left, even, evens),
                    false => sum = _mm512_fmadd_ps(left, even, sum),
                }
            }
            if 2 * i + 1 < len {
                let left = _mm512_set1_ps(*a.add(2 * i + 1));
                let odd = _mm512_castsi512_ps(_mm512_and_si512(words, high));
                match GROUPED {
                    true => odds = _mm512_fmadd_ps(left, odd, odds),
                    false => sum = _mm512_fmadd_ps(left, odd, sum),
                }
            }
        }
    }
    match GROUPED {
        true => _mm512_add_ps(sum, _mm512_add_ps(evens, odds)),
        false => sum,
    }
}
