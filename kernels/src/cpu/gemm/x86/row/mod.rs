//! One row times columns whose elements are side by side in memory, as those of a weight's rows: nothing is packed.
//!
//! Every column is read once, a cache line at a time. Sixteen bytes of eight columns make a square, which is
//! transposed in registers. So a vector has the same `k` of eight columns, and each lane continues the chain of its
//! column. A square of bf16 is transposed as pairs, which a shift and a mask make f32. This is the form for AVX2;
//! [`avx512`] has wider squares.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

mod avx512;

use super::avx2::add_scaled;
use crate::cpu::gemm::kernel::TileIo;
use crate::cpu::gemm::stretches;
use crate::cpu::matrix::{Floats, Matrix};
use crate::cpu::simd::{Level, prefetch};
use crate::{DType, Float};

/// Columns whose chains run at one time.
const COLS: usize = 16;
/// Columns per vector.
const N: usize = 8;
/// Bytes of a column in one square.
const SQUARE_BYTES: usize = 16;
/// Squares per cache line.
const SQUARES: usize = 4;
/// Prefetch distance along a column in bytes.
const AHEAD_BYTES: usize = 512;

/// Whether columns of this type are read in place. `grouped`: their sums are those of [`crate::CpuMath::Amx`].
pub(in crate::cpu::gemm) fn reads(level: Level, dtype: DType, grouped: bool) -> bool {
    match grouped {
        true => level >= Level::V4 && dtype == DType::BF16,
        false => level >= Level::V4 || (level == Level::V3 && dtype != DType::F16),
    }
}

/// `to = from + factor * chain + …` for one row `a`, and `columns [n, a.len()]` of a type that the level [`reads`], with a
/// chain for each stretch.
///
/// # Safety
/// The processor has the instructions of the level. The place has one row of `n` elements, and only this thread
/// accesses those that are written.
pub(in crate::cpu::gemm) unsafe fn row(
    level: Level,
    grouped: bool,
    columns: Matrix<'_>,
    a: &[f32],
    stretch: usize,
    factor: f32,
    place: TileIo,
) {
    let (stride, beside) = columns.strides();
    let (n, depth) = (columns.rows, columns.cols);
    assert!(beside == 1 && depth == a.len(), "{n} columns of {depth}");
    // SAFETY: the caller's promises.
    unsafe {
        match (columns.data(), level) {
            (Floats::BF16(b), Level::V4 | Level::V4Bf16) if grouped => {
                assert!(n == 0 || (n - 1) * stride + depth <= b.len());
                avx512::row_of::<_, true>(b, stride, n, a, stretch, factor, place);
            }
            (Floats::F32(b), _) => row_at(level, b, stride, n, a, stretch, factor, place),
            (Floats::BF16(b), _) => row_at(level, b, stride, n, a, stretch, factor, place),
            (Floats::F16(b), Level::V4 | Level::V4Bf16) => {
                row_at(level, b, stride, n, a, stretch, factor, place);
            }
            (Floats::F16(_), _) => unreachable!("columns of f16 are packed"),
        }
    }
}

/// # Safety
/// As [`row`].
unsafe fn row_at<T: Float>(
    level: Level,
    b: &[T],
    stride: usize,
    n: usize,
    a: &[f32],
    stretch: usize,
    factor: f32,
    mut place: TileIo,
) {
    assert!(n == 0 || (n - 1) * stride + a.len() <= b.len());
    // SAFETY: the caller's promises, and the assertion.
    unsafe {
        if level >= Level::V4 {
            return avx512::row_of::<_, false>(b, stride, n, a, stretch, factor, place);
        }
        for (first, len) in stretches(a.len(), stretch) {
            let a = &a[first..][..len];
            row_of(&b[first.min(b.len())..], stride, n, a, factor, place);
            place.from = place.to;
        }
    }
}

/// # Safety
/// As [`row`]. All columns have the length of `a`.
#[target_feature(enable = "avx2,fma")]
unsafe fn row_of<T: Float>(
    b: &[T],
    stride: usize,
    n: usize,
    a: &[f32],
    factor: f32,
    place: TileIo,
) {
    for first in (0..n).step_by(COLS) {
        let wide = COLS.min(n - first);
        // Columns that do not exist are copies of the last one.
        let column = |i: usize| b[(first + i.min(wide - 1)) * stride..].as_ptr();
        let columns: [[*const T; N]; 2] =
            [0, N].map(|half| std::array::from_fn(|i| column(half + i)));
        // SAFETY: all columns have the length of `a`.
        unsafe {
            let factor = _mm256_set1_ps(factor);
            for (i, chain) in chains(&columns, a.as_ptr(), a.len())
                .into_iter()
                .enumerate()
            {
                let n = wide.saturating_sub(i * N);
                add_scaled(place.at(0, first + i * N), n, factor, chain);
            }
        }
    }
}

/// The chains of all columns over all of `depth`.
///
/// # Safety
/// Each column, and `a`, have `depth` elements.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn chains<T: Float>(
    columns: &[[*const T; N]; 2],
    a: *const f32,
    depth: usize,
) -> [__m256; 2] {
    let step = SQUARE_BYTES / size_of::<T>();
    let mut sums = [_mm256_setzero_ps(); 2];
    let mut k = 0;
    // SAFETY: all positions are below `depth`.
    unsafe {
        while k + SQUARES * step <= depth {
            for (sum, columns) in sums.iter_mut().zip(columns) {
                for column in columns {
                    prefetch(column.wrapping_add(k).wrapping_byte_add(AHEAD_BYTES));
                }
                for k in (k..k + SQUARES * step).step_by(step) {
                    let square = square(&columns.map(|column| column.add(k)));
                    *sum = chain(&square, a.add(k), step, *sum);
                }
            }
            k += SQUARES * step;
        }
        while k < depth {
            let len = step.min(depth - k);
            for (sum, columns) in sums.iter_mut().zip(columns) {
                let ends = columns.map(|column| end(column.add(k), len));
                let square = square::<T>(&ends.each_ref().map(|end| end.as_ptr().cast()));
                *sum = chain(&square, a.add(k), len, *sum);
            }
            k += len;
        }
    }
    sums
}

/// The last `len` elements of a column, followed by zeros up to the size of a square.
///
/// # Safety
/// `from` points to `len` elements.
unsafe fn end<T: Float>(from: *const T, len: usize) -> [u8; SQUARE_BYTES] {
    let mut bytes = [0; SQUARE_BYTES];
    // SAFETY: the caller's promise; a square is at least as long.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().cast(), len) };
    bytes
}

/// Elements of eight columns as f32, one vector for each `k`. A square of f32 fills the first half.
///
/// # Safety
/// Each pointer points to as many bytes as a square has.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn square<T: Float>(columns: &[*const T; N]) -> [__m256; N] {
    // SAFETY: the caller's promise.
    let pair = |i: usize| unsafe {
        let (low, high) = (columns[i].cast(), columns[i + 4].cast());
        _mm256_insertf128_ps::<1>(
            _mm256_castps128_ps256(_mm_loadu_ps(low)),
            _mm_loadu_ps(high),
        )
    };
    let rows = [pair(0), pair(1), pair(2), pair(3)];
    let (a, b) = (
        _mm256_unpacklo_ps(rows[0], rows[1]),
        _mm256_unpacklo_ps(rows[2], rows[3]),
    );
    let (c, d) = (
        _mm256_unpackhi_ps(rows[0], rows[1]),
        _mm256_unpackhi_ps(rows[2], rows[3]),
    );
    let words = [
        _mm256_shuffle_ps::<0x44>(a, b),
        _mm256_shuffle_ps::<0xee>(a, b),
        _mm256_shuffle_ps::<0x44>(c, d),
        _mm256_shuffle_ps::<0xee>(c, d),
    ];
    let mut out = [_mm256_setzero_ps(); N];
    for (i, word) in words.into_iter().enumerate() {
        if T::DTYPE == DType::F32 {
            out[i] = word;
        } else {
            let pair = _mm256_castps_si256(word);
            let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            out[2 * i] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pair));
            out[2 * i + 1] = _mm256_castsi256_ps(_mm256_and_si256(pair, high));
        }
    }
    out
}

/// Continues the chains by `len` elements.
///
/// # Safety
/// `a` points to `len` elements, at most as many as a square has.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn chain(square: &[__m256; N], a: *const f32, len: usize, mut sum: __m256) -> __m256 {
    for (k, column) in square.iter().enumerate().take(len) {
        // SAFETY: the caller's promise.
        let left = unsafe { _mm256_broadcast_ss(&*a.add(k)) };
        sum = _mm256_fmadd_ps(left, *column, sum);
    }
    sum
}
