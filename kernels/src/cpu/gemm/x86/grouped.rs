//! Sums of [`CpuMath::Amx`](crate::CpuMath::Amx) by f32 multiply-adds of vectors: each sum has two chains at a time, one of
//! the even and one of the odd `k`.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use super::{avx2, avx512};
use crate::cpu::gemm::kernel::TileIo;
use crate::cpu::gemm::stretches;
use crate::cpu::gemm::tiles::{PAIRS, SIDE, WORDS};

/// Rows computed at one time. With three vectors of columns, two chains for each need 24 of the 32 vector registers.
const ROWS: usize = 4;
/// Rows computed at one time with AVX2: with two vectors of columns, two chains for each need 12 of 16 registers.
const ROWS_V3: usize = 3;

/// Pairs of `k` of packed operands.
trait Operands: Copy {
    /// The even and the odd value of row `i`, in all lanes. Values behind the depth are zero.
    ///
    /// # Safety
    /// The processor has AVX-512 F, and the panels have this row and pair.
    unsafe fn left(self, i: usize, pair: usize) -> [__m512; 2];
    /// Those of sixteen columns from `16 v` on.
    ///
    /// # Safety
    /// As [`Operands::left`].
    unsafe fn right(self, v: usize, pair: usize) -> [__m512; 2];
}

/// Operands of f32, one value for each lane and `k`.
#[derive(Clone, Copy)]
struct Wide {
    a: *const f32,
    b: *const f32,
    depth: usize,
}

impl Operands for Wide {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn left(self, i: usize, pair: usize) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.a.add(2 * pair * avx512::ROWS + i);
            let odd = match 2 * pair + 1 < self.depth {
                true => _mm512_set1_ps(*at.add(avx512::ROWS)),
                false => _mm512_setzero_ps(),
            };
            [_mm512_set1_ps(*at), odd]
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn right(self, v: usize, pair: usize) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.b.add(2 * pair * avx512::COLS + v * SIDE);
            let odd = match 2 * pair + 1 < self.depth {
                true => _mm512_loadu_ps(at.add(avx512::COLS)),
                false => _mm512_setzero_ps(),
            };
            [_mm512_loadu_ps(at), odd]
        }
    }
}

/// Operands in tiles, with `pairs` words for each lane.
#[derive(Clone, Copy)]
struct Narrow {
    a: *const f32,
    b: *const f32,
    pairs: usize,
}

/// The even and the odd half of each word.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(words: __m512i) -> [__m512; 2] {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)),
        _mm512_castsi512_ps(_mm512_and_si512(words, upper)),
    ]
}

impl Operands for Narrow {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn left(self, i: usize, pair: usize) -> [__m512; 2] {
        let panel = i / SIDE * SIDE * self.pairs;
        let at = panel + pair / PAIRS * WORDS + i % SIDE * PAIRS + pair % PAIRS;
        // SAFETY: the caller's promise.
        halves(_mm512_set1_epi32(unsafe { *self.a.add(at).cast() }))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn right(self, v: usize, pair: usize) -> [__m512; 2] {
        let at = v * SIDE * self.pairs + pair * SIDE;
        // SAFETY: the caller's promise.
        halves(unsafe { _mm512_loadu_si512(self.b.add(at).cast()) })
    }
}

/// Tile of f32 for AVX-512.
///
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
    let all = Wide { a, b, depth };
    // SAFETY: the caller's promises.
    unsafe { sums(all, (rows, cols), depth.div_ceil(2), factor, place) }
}

/// Up to 32 rows and 48 columns of operands in tiles, for AVX-512.
///
/// # Safety
/// As [`tile`], for at most two panels of rows.
pub(in crate::cpu::gemm) unsafe fn tile_of_pairs(
    rows: usize,
    cols: usize,
    pairs: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    let all = Narrow { a, b, pairs };
    // SAFETY: the caller's promises.
    unsafe { sums(all, (rows, cols), pairs, factor, place) }
}

/// # Safety
/// As [`tile`].
unsafe fn sums(
    all: impl Operands,
    (rows, cols): (usize, usize),
    pairs: usize,
    factor: f32,
    place: TileIo,
) {
    for first in (0..rows).step_by(ROWS) {
        let rows = (first, ROWS.min(rows - first));
        // SAFETY: the caller's promises. Panels have a multiple of these rows.
        unsafe {
            match cols.div_ceil(SIDE) {
                1 => sums_of::<_, 1>(all, rows, cols, pairs, factor, place),
                2 => sums_of::<_, 2>(all, rows, cols, pairs, factor, place),
                _ => sums_of::<_, 3>(all, rows, cols, pairs, factor, place),
            }
        }
    }
}

/// The sums of `count` rows from `first` on, in up to `V` vectors of columns.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx512f")]
unsafe fn sums_of<O: Operands, const V: usize>(
    all: O,
    (first, count): (usize, usize),
    cols: usize,
    pairs: usize,
    factor: f32,
    place: TileIo,
) {
    let zeros = [[_mm512_setzero_ps(); V]; ROWS];
    let mut sums = zeros;
    for (at, len) in stretches(pairs, PAIRS) {
        let (mut even, mut odd) = (zeros, zeros);
        for pair in at..at + len {
            let mut right = [[_mm512_setzero_ps(); 2]; V];
            for (v, right) in right.iter_mut().enumerate() {
                // SAFETY: the caller's promises.
                *right = unsafe { all.right(v, pair) };
            }
            for i in 0..ROWS {
                // SAFETY: as above.
                let left = unsafe { all.left(first + i, pair) };
                for v in 0..V {
                    even[i][v] = _mm512_fmadd_ps(left[0], right[v][0], even[i][v]);
                    odd[i][v] = _mm512_fmadd_ps(left[1], right[v][1], odd[i][v]);
                }
            }
        }
        for i in 0..ROWS {
            for v in 0..V {
                sums[i][v] = _mm512_add_ps(sums[i][v], _mm512_add_ps(even[i][v], odd[i][v]));
            }
        }
    }
    let factor = _mm512_set1_ps(factor);
    for (i, sums) in sums.into_iter().enumerate().take(count) {
        for (v, sum) in sums.into_iter().enumerate() {
            let mask = avx512::lanes(cols - (v * SIDE).min(cols));
            let place = place.at(first + i, v * SIDE);
            // SAFETY: the caller's promises; masked lanes are neither read nor written.
            unsafe {
                let from = _mm512_maskz_loadu_ps(mask, place.from);
                _mm512_mask_storeu_ps(place.to, mask, _mm512_fmadd_ps(factor, sum, from));
            }
        }
    }
}

/// Tile of f32 for AVX2.
///
/// # Safety
/// As [`tile`].
pub(in crate::cpu::gemm) unsafe fn tile_v3(
    rows: usize,
    cols: usize,
    depth: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    for first in (0..rows).step_by(ROWS_V3) {
        let rows = (first, ROWS_V3.min(rows - first));
        // SAFETY: the caller's promises. Panels have a multiple of these rows.
        unsafe { sums_v3(rows, cols, depth, a, b, factor, place) }
    }
}

/// As [`sums_of`] for AVX2 and panels of f32.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx2,fma")]
unsafe fn sums_v3(
    (first, count): (usize, usize),
    cols: usize,
    depth: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    const N: usize = 8;
    const V: usize = avx2::COLS / N;
    let zeros = [[_mm256_setzero_ps(); V]; ROWS_V3];
    let mut sums = zeros;
    for (at, len) in stretches(depth, 2 * PAIRS) {
        let (mut even, mut odd) = (zeros, zeros);
        let step = |k: usize, chains: &mut [[__m256; V]; ROWS_V3]| {
            // SAFETY: the caller's promises.
            unsafe {
                let b = b.add(k * avx2::COLS);
                let right: [__m256; V] = std::array::from_fn(|v| _mm256_loadu_ps(b.add(v * N)));
                for (i, chains) in chains.iter_mut().enumerate() {
                    let left = _mm256_set1_ps(*a.add(k * avx2::ROWS + first + i));
                    for (chain, right) in chains.iter_mut().zip(right) {
                        *chain = _mm256_fmadd_ps(left, right, *chain);
                    }
                }
            }
        };
        for k in (at..at + len).step_by(2) {
            step(k, &mut even);
            if k + 1 < at + len {
                step(k + 1, &mut odd);
            }
        }
        for i in 0..ROWS_V3 {
            for v in 0..V {
                sums[i][v] = _mm256_add_ps(sums[i][v], _mm256_add_ps(even[i][v], odd[i][v]));
            }
        }
    }
    let factor = _mm256_set1_ps(factor);
    for (i, sums) in sums.into_iter().enumerate().take(count) {
        for (v, sum) in sums.into_iter().enumerate() {
            let place = place.at(first + i, v * N);
            // SAFETY: the caller's promises.
            unsafe { avx2::add_scaled(place, cols.saturating_sub(v * N), factor, sum) }
        }
    }
}
