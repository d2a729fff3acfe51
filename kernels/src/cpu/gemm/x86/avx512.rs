//! AVX-512 kernel: tiles of 8 rows and three vectors of 512 bits, i.e. 24 chains, which hide the latency of both FMA
//! units. This shape has the fewest loads of all shapes with 24 chains whose panels of `b` arrive from the L2 cache in
//! time: 11 for 24 multiply-adds.
//!
//! The panels have an f32 or a pair of bf16 for each step. Pairs are multiplied by dot products (AVX512-BF16), or
//! widened and multiplied by two fused multiply-adds.

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
/// Prefetch distance in steps for panels of `b`, which are larger than the L1 cache.
const AHEAD: usize = 8;

/// One step of a chain.
pub(in crate::cpu::gemm) trait Step {
    /// `sum` plus the product of the elements, or of the first and then of the second of each pair.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn step(left: __m512, right: __m512, sum: __m512) -> __m512;
}

/// Elements of f32.
pub(in crate::cpu::gemm) struct Single;

impl Step for Single {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn step(left: __m512, right: __m512, sum: __m512) -> __m512 {
        _mm512_fmadd_ps(left, right, sum)
    }
}

/// Pairs of bf16 by `vdpbf16ps`. It adds the upper product, rounds, adds the lower product, and rounds. Subnormal
/// operands and results are zero (Intel, "Architecture Instruction Set Extensions Programming Reference").
pub(in crate::cpu::gemm) struct Dot;

impl Step for Dot {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn step(left: __m512, right: __m512, sum: __m512) -> __m512 {
        // An instruction instead of its intrinsic: functions with this feature could not share code with the others.
        let mut sum = sum;
        // SAFETY: the caller's promise.
        unsafe {
            std::arch::asm!(
                "vdpbf16ps {sum}, {left}, {right}",
                sum = inout(zmm_reg) sum,
                left = in(zmm_reg) left,
                right = in(zmm_reg) right,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }
}

/// Pairs of bf16 in f32 arithmetic.
pub(in crate::cpu::gemm) struct Widened;

impl Step for Widened {
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn step(left: __m512, right: __m512, sum: __m512) -> __m512 {
        let (left, right) = (_mm512_castps_si512(left), _mm512_castps_si512(right));
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let first = |x| _mm512_castsi512_ps(_mm512_and_si512(x, upper));
        let second = |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x));
        let sum = _mm512_fmadd_ps(first(left), first(right), sum);
        _mm512_fmadd_ps(second(left), second(right), sum)
    }
}

/// # Safety
/// As [`Kernel::column`](crate::cpu::gemm::kernel::Kernel::column) for at most one panel of rows.
pub(in crate::cpu::gemm) unsafe fn tile<S: Step>(
    rows: usize,
    cols: usize,
    steps: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match cols.div_ceil(N) {
            1 => wide::<S, 1>(rows, cols, steps, a, b, factor, place),
            2 => wide::<S, 2>(rows, cols, steps, a, b, factor, place),
            _ => wide::<S, 3>(rows, cols, steps, a, b, factor, place),
        }
    }
}

/// Tile of up to `V` vectors of columns.
///
/// # Safety
/// As [`tile`].
unsafe fn wide<S: Step, const V: usize>(
    rows: usize,
    cols: usize,
    steps: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: the caller's promises.
    unsafe {
        match rows {
            1 => of::<S, 1, V>(cols, steps, a, b, factor, place),
            2 => of::<S, 2, V>(cols, steps, a, b, factor, place),
            3 => of::<S, 3, V>(cols, steps, a, b, factor, place),
            4 => of::<S, 4, V>(cols, steps, a, b, factor, place),
            5 => of::<S, 5, V>(cols, steps, a, b, factor, place),
            6 => of::<S, 6, V>(cols, steps, a, b, factor, place),
            7 => of::<S, 7, V>(cols, steps, a, b, factor, place),
            _ => of::<S, 8, V>(cols, steps, a, b, factor, place),
        }
    }
}

/// Tile of `R` rows and up to `V` vectors of columns.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx512f")]
unsafe fn of<S: Step, const R: usize, const V: usize>(
    cols: usize,
    steps: usize,
    mut a: *const f32,
    mut b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: by the contract the panels have `steps` steps and the rows `cols` elements. Masked lanes are neither
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
                    sums[i][v] = S::step(left, right[v], sums[i][v]);
                }
            }
        };
        for _ in 0..steps / UNROLL {
            for u in 0..UNROLL {
                step(a.add(u * ROWS), b.add(u * COLS));
            }
            a = a.add(UNROLL * ROWS);
            b = b.add(UNROLL * COLS);
        }
        for u in 0..steps % UNROLL {
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
