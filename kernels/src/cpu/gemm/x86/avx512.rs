//! Tiles of 12 rows and two vectors of 512 bits: 24 chains, which hide the latency of both units.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use crate::cpu::gemm::kernel::Place;

pub(in crate::cpu::gemm) const ROWS: usize = 12;
pub(in crate::cpu::gemm) const COLS: usize = 32;
/// Elements of a vector.
const N: usize = 16;
const UNROLL: usize = 4;

/// # Safety
/// As [`Kernel::column`](crate::cpu::gemm::kernel::Kernel::column) for at most one panel of rows.
pub(in crate::cpu::gemm) unsafe fn tile(
    rows: usize,
    cols: usize,
    depth: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: Place,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match rows {
            1 => high::<1>(cols, depth, a, b, factor, place),
            2 => high::<2>(cols, depth, a, b, factor, place),
            3 => high::<3>(cols, depth, a, b, factor, place),
            4 => high::<4>(cols, depth, a, b, factor, place),
            5 => high::<5>(cols, depth, a, b, factor, place),
            6 => high::<6>(cols, depth, a, b, factor, place),
            7 => high::<7>(cols, depth, a, b, factor, place),
            8 => high::<8>(cols, depth, a, b, factor, place),
            9 => high::<9>(cols, depth, a, b, factor, place),
            10 => high::<10>(cols, depth, a, b, factor, place),
            11 => high::<11>(cols, depth, a, b, factor, place),
            _ => high::<12>(cols, depth, a, b, factor, place),
        }
    }
}

/// A tile of `R` rows.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx512f")]
unsafe fn high<const R: usize>(
    cols: usize,
    depth: usize,
    mut a: *const f32,
    mut b: *const f32,
    factor: f32,
    place: Place,
) {
    // SAFETY: panels of `depth` and rows of `cols` elements by the contract; masked lanes are
    // neither read nor written, and a prefetch of any address has no effect but on caches.
    unsafe {
        for i in 0..R {
            let to = place.to.wrapping_add(i * place.to_stride);
            _mm_prefetch::<_MM_HINT_T0>(to.cast());
            _mm_prefetch::<_MM_HINT_T0>(to.wrapping_add(N).cast());
            _mm_prefetch::<_MM_HINT_T0>(to.wrapping_add(cols - 1).cast());
        }
        let mut sums = [[_mm512_setzero_ps(); 2]; R];
        let mut step = |a: *const f32, b: *const f32| {
            let right = [_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(N))];
            for i in 0..R {
                let left = _mm512_set1_ps(*a.add(i));
                sums[i][0] = _mm512_fmadd_ps(left, right[0], sums[i][0]);
                sums[i][1] = _mm512_fmadd_ps(left, right[1], sums[i][1]);
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
        let masks = [lanes(cols), lanes(cols.saturating_sub(N))];
        for i in 0..R {
            for v in 0..2 {
                let from = place.from.wrapping_add(i * place.from_stride + v * N);
                let from = _mm512_maskz_loadu_ps(masks[v], from);
                let to = place.to.wrapping_add(i * place.to_stride + v * N);
                let sum = _mm512_fmadd_ps(factor, sums[i][v], from);
                _mm512_mask_storeu_ps(to, masks[v], sum);
            }
        }
    }
}

/// A mask of the first `n` lanes.
pub(super) fn lanes(n: usize) -> __mmask16 {
    if n >= N { u16::MAX } else { (1 << n) - 1 }
}
