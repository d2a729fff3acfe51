//! AVX-512 kernel: tiles of 8 rows and three vectors of 512 bits, i.e. 24 chains, which hide the latency of both FMA
//! units. This shape has the fewest loads of all shapes with 24 chains whose panels of `b` arrive from the L2 cache in
//! time: 11 for 24 multiply-adds.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use crate::cpu::gemm::kernel::TileIo;
use crate::cpu::simd::prefetch;

pub(in crate::cpu::gemm) const ROWS: usize = 8;
pub(in crate::cpu::gemm) const COLS: usize = 48;
/// Elements per vector.
const N: usize = 16;
const UNROLL: usize = 4;
/// Prefetch distance in `k` for panels of `b`, which are larger than the L1 cache.
const AHEAD: usize = 8;

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
        match cols.div_ceil(N) {
            1 => wide::<1>(rows, cols, depth, a, b, factor, place),
            2 => wide::<2>(rows, cols, depth, a, b, factor, place),
            _ => wide::<3>(rows, cols, depth, a, b, factor, place),
        }
    }
}

/// Tile of up to `V` vectors of columns.
///
/// # Safety
/// As [`tile`].
unsafe fn wide<const V: usize>(
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
            1 => of::<1, V>(cols, depth, a, b, factor, place),
            2 => of::<2, V>(cols, depth, a, b, factor, place),
            3 => of::<3, V>(cols, depth, a, b, factor, place),
            4 => of::<4, V>(cols, depth, a, b, factor, place),
            5 => of::<5, V>(cols, depth, a, b, factor, place),
            6 => of::<6, V>(cols, depth, a, b, factor, place),
            7 => of::<7, V>(cols, depth, a, b, factor, place),
            _ => of::<8, V>(cols, depth, a, b, factor, place),
        }
    }
}

/// Tile of `R` rows and up to `V` vectors of columns.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx512f")]
unsafe fn of<const R: usize, const V: usize>(
    cols: usize,
    depth: usize,
    mut a: *const f32,
    mut b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: by the contract the panels have depth `depth` and the rows `cols` elements. Masked lanes are neither
    // read nor written.
    unsafe {
        for i in 0..R {
            let to = place.to.wrapping_add(i * place.to_stride);
            for v in 0..V {
                prefetch(to.wrapping_add(v * N));
            }
            prefetch(to.wrapping_add(cols - 1));
        }
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        let mut step = |a: *const f32, b: *const f32| {
            let mut right = [_mm512_setzero_ps(); V];
            for v in 0..V {
                prefetch(b.wrapping_add(AHEAD * COLS + v * N));
                right[v] = _mm512_loadu_ps(b.add(v * N));
            }
            for i in 0..R {
                let left = _mm512_set1_ps(*a.add(i));
                for v in 0..V {
                    sums[i][v] = _mm512_fmadd_ps(left, right[v], sums[i][v]);
                }
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
        let factor = _mm512_set1_ps(factor);
        for i in 0..R {
            for v in 0..V {
                let mask = lanes(cols - (v * N).min(cols));
                let from = place.from.wrapping_add(i * place.from_stride + v * N);
                let from = _mm512_maskz_loadu_ps(mask, from);
                let to = place.to.wrapping_add(i * place.to_stride + v * N);
                let sum = _mm512_fmadd_ps(factor, sums[i][v], from);
                _mm512_mask_storeu_ps(to, mask, sum);
            }
        }
    }
}

/// Mask of the first `n` lanes.
pub(super) fn lanes(n: usize) -> __mmask16 {
    if n >= N { u16::MAX } else { (1 << n) - 1 }
}
