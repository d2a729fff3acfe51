//! AVX2 kernel: tiles of 6 rows and two vectors of 256 bits, i.e. 12 chains in 16 registers.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use crate::cpu::gemm::kernel::TileIo;
use crate::cpu::simd::prefetch;
use crate::{DType, Float};

pub(in crate::cpu::gemm) const ROWS: usize = 6;
pub(in crate::cpu::gemm) const COLS: usize = 16;
/// Elements per vector.
const N: usize = 8;
const UNROLL: usize = 4;
/// Prefetch distance of packing along a lane, in elements.
const AHEAD: usize = 64;

/// # Safety
/// As [`Kernel::column`](crate::cpu::gemm::kernel::Kernel::column) for at most one panel of rows.
pub(in crate::cpu::gemm) unsafe fn tile(
    rows: usize,
    cols: usize,
    depth: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match rows {
            1 => high::<1>(cols, depth, a, b, factor, place),
            2 => high::<2>(cols, depth, a, b, factor, place),
            3 => high::<3>(cols, depth, a, b, factor, place),
            4 => high::<4>(cols, depth, a, b, factor, place),
            5 => high::<5>(cols, depth, a, b, factor, place),
            _ => high::<6>(cols, depth, a, b, factor, place),
        }
    }
}

/// A tile of `R` rows.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx2,fma")]
unsafe fn high<const R: usize>(
    cols: usize,
    depth: usize,
    mut a: *const f32,
    mut b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: by the contract the panels have depth `depth` and the rows `cols` elements.
    unsafe {
        for i in 0..R {
            let to = place.to.wrapping_add(i * place.to_stride);
            prefetch(to);
            prefetch(to.wrapping_add(cols - 1));
        }
        let mut sums = [[_mm256_setzero_ps(); 2]; R];
        let mut step = |a: *const f32, b: *const f32| {
            let right = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(N))];
            for i in 0..R {
                let left = _mm256_broadcast_ss(&*a.add(i));
                sums[i][0] = _mm256_fmadd_ps(left, right[0], sums[i][0]);
                sums[i][1] = _mm256_fmadd_ps(left, right[1], sums[i][1]);
            }
        };
        for _ in 0..depth / UNROLL {
            for u in 0..UNROLL {
                step(a.add(u * ROWS), b.add(u * COLS));
            }
            a = a.add(UNROLL * ROWS);
            b = b.add(UNROLL * COLS);
        }
        for u in 0..depth % UNROLL {
            step(a.add(u * ROWS), b.add(u * COLS));
        }
        let factor = _mm256_set1_ps(factor);
        for i in 0..R {
            for v in 0..2 {
                let n = cols.saturating_sub(v * N);
                add_scaled(place.at(i, v * N), n, factor, sums[i][v]);
            }
        }
    }
}

/// `to = from + factor * sum` for the first `n` lanes of a vector, or for all eight if `n` is larger.
///
/// # Safety
/// The place has one row of `n` elements, or of eight if `n` is larger.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn add_scaled(place: TileIo, n: usize, factor: __m256, sum: __m256) {
    // SAFETY: the caller's promise. Masked lanes are neither read nor written.
    unsafe {
        if n >= N {
            let from = _mm256_loadu_ps(place.from);
            _mm256_storeu_ps(place.to, _mm256_fmadd_ps(factor, sum, from));
        } else {
            // Only for the last columns, as masked stores are slow on AMD's processors: in every tile they took a tenth
            // of a product's time on Zen 3.
            let from = _mm256_maskload_ps(place.from, lanes(n));
            _mm256_maskstore_ps(place.to, lanes(n), _mm256_fmadd_ps(factor, sum, from));
        }
    }
}

/// Mask of the first `n` lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn lanes(n: usize) -> __m256i {
    let count = _mm256_set1_epi32(n.min(N) as i32);
    _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// A square of eight vectors.
type Square = [__m256; N];

/// Loads `n <= 8` elements as f32. The other lanes are zero.
///
/// # Safety
/// `from` points to `n` elements.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load<T: Float>(from: *const T, n: usize) -> __m256 {
    // SAFETY: masked lanes are not read; 16-bit elements are read as one vector of eight or one by one.
    unsafe {
        if T::DTYPE == DType::F32 {
            return match n {
                N => _mm256_loadu_ps(from.cast()),
                _ => _mm256_maskload_ps(from.cast(), lanes(n)),
            };
        }
        let halves = if n == N {
            _mm_loadu_si128(from.cast())
        } else {
            let mut some = [0u16; N];
            std::ptr::copy_nonoverlapping(from.cast(), some.as_mut_ptr(), n);
            _mm_loadu_si128(some.as_ptr().cast())
        };
        if T::DTYPE == DType::F16 {
            _mm256_cvtph_ps(halves)
        } else {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
        }
    }
}

/// Transposes a square: within 128-bit halves of vectors first, then whole halves.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(x: Square) -> Square {
    let mut y = [_mm256_setzero_ps(); N];
    for i in (0..N).step_by(4) {
        let (a, b) = (
            _mm256_unpacklo_ps(x[i], x[i + 1]),
            _mm256_unpacklo_ps(x[i + 2], x[i + 3]),
        );
        let (c, d) = (
            _mm256_unpackhi_ps(x[i], x[i + 1]),
            _mm256_unpackhi_ps(x[i + 2], x[i + 3]),
        );
        y[i] = _mm256_shuffle_ps::<0x44>(a, b);
        y[i + 1] = _mm256_shuffle_ps::<0xee>(a, b);
        y[i + 2] = _mm256_shuffle_ps::<0x44>(c, d);
        y[i + 3] = _mm256_shuffle_ps::<0xee>(c, d);
    }
    let mut z = y;
    for i in 0..4 {
        z[i] = _mm256_permute2f128_ps::<0x20>(y[i], y[i + 4]);
        z[i + 4] = _mm256_permute2f128_ps::<0x31>(y[i], y[i + 4]);
    }
    z
}

/// Packs an operand whose elements of one lane are side by side in memory: squares are transposed in registers.
///
/// # Safety
/// The processor has AVX2 and F16C, and `x` contains all lanes.
///
/// # Panics
/// When `width` is above 8 and no multiple of 8, or `out` has another length than the panels.
#[target_feature(enable = "avx2,f16c")]
pub(in crate::cpu::gemm) unsafe fn pack_across<T: Float>(
    x: &[T],
    stride: usize,
    (rows, depth): (usize, usize),
    width: usize,
    out: &mut [f32],
) {
    assert!(width < N || width.is_multiple_of(N), "panels of {width}");
    assert!(out.len() == rows.next_multiple_of(width) * depth);
    for (p, panel) in out.chunks_exact_mut(width * depth).enumerate() {
        for lane in (0..width).step_by(N) {
            let row = p * width + lane;
            let filled = N.min(width).min(rows.saturating_sub(row));
            for first in (0..depth).step_by(N) {
                let long = N.min(depth - first);
                let from = x.as_ptr().wrapping_add(row * stride + first);
                let mut square = [_mm256_setzero_ps(); N];
                for i in 0..filled {
                    let from = from.wrapping_add(i * stride);
                    prefetch(from.wrapping_add(AHEAD));
                    // SAFETY: `long` elements of a lane.
                    square[i] = unsafe { load(from, long) };
                }
                for (k, lanes_of_k) in transpose(square).into_iter().enumerate().take(long) {
                    let at = (first + k) * width + lane;
                    let to = &mut panel[at..];
                    // SAFETY: neither store leaves the panel. In a panel of fewer than eight lanes, a store of eight also
                    // writes to the first lanes of the next `k`, which get their values after it.
                    unsafe {
                        if to.len() >= N {
                            _mm256_storeu_ps(to.as_mut_ptr(), lanes_of_k);
                        } else {
                            _mm256_maskstore_ps(to.as_mut_ptr(), lanes(width), lanes_of_k);
                        }
                    }
                }
            }
        }
    }
}
