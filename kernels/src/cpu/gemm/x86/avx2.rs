//! AVX2 kernel: tiles of 6 rows and two vectors of 256 bits, i.e. 12 chains in 16 registers.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use crate::cpu::gemm::kernel::TileIo;

pub(in crate::cpu::gemm) const ROWS: usize = 6;
pub(in crate::cpu::gemm) const COLS: usize = 16;
/// Elements per vector.
const N: usize = 8;

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
    // SAFETY: by the contract the panels have depth `depth` and the rows `cols` elements. Masked lanes are neither
    // read nor written.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); 2]; R];
        for _ in 0..depth {
            let right = [_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(N))];
            for i in 0..R {
                let left = _mm256_broadcast_ss(&*a.add(i));
                sums[i][0] = _mm256_fmadd_ps(left, right[0], sums[i][0]);
                sums[i][1] = _mm256_fmadd_ps(left, right[1], sums[i][1]);
            }
            a = a.add(ROWS);
            b = b.add(COLS);
        }
        let factor = _mm256_set1_ps(factor);
        let masks = [lanes(cols), lanes(cols.saturating_sub(N))];
        for i in 0..R {
            for v in 0..2 {
                let from = place.from.wrapping_add(i * place.from_stride + v * N);
                let from = _mm256_maskload_ps(from, masks[v]);
                let to = place.to.wrapping_add(i * place.to_stride + v * N);
                let sum = _mm256_fmadd_ps(factor, sums[i][v], from);
                _mm256_maskstore_ps(to, masks[v], sum);
            }
        }
    }
}

/// Mask of the first `n` lanes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn lanes(n: usize) -> __m256i {
    let count = _mm256_set1_epi32(n.min(N) as i32);
    _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}
