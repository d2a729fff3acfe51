//! 16 × 16 squares of elements in registers.

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use super::avx512::lanes;
use crate::{DType, Float};

type Square = [__m512; 16];

/// A square of zeros.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::gemm) fn zeros() -> Square {
    [_mm512_setzero_ps(); 16]
}

/// Loads `n <= 16` elements as f32. The other lanes are zero.
///
/// # Safety
/// `from` points to `n` elements.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
pub(in crate::cpu::gemm) unsafe fn load<T: Float>(from: *const T, n: usize) -> __m512 {
    // SAFETY: masked lanes are not read; 16-bit elements are read as one vector of 16 or one by one.
    unsafe {
        if T::DTYPE == DType::F32 {
            return _mm512_maskz_loadu_ps(lanes(n), from.cast());
        }
        let halves = if n == 16 {
            _mm256_loadu_si256(from.cast())
        } else {
            let mut some = [0u16; 16];
            std::ptr::copy_nonoverlapping(from.cast(), some.as_mut_ptr(), n);
            _mm256_loadu_si256(some.as_ptr().cast())
        };
        if T::DTYPE == DType::F16 {
            _mm512_cvtph_ps(halves)
        } else {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }
}

/// Stores all sixteen lanes (`n` is 16), or the eight lanes from `first` on (`n` is 8, `first` is 0 or 8).
///
/// # Safety
/// `to` points to `n` elements.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store(to: *mut f32, x: __m512, first: usize, n: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if n == 16 {
            _mm512_storeu_ps(to, x);
        } else {
            let half = match first {
                0 => x,
                _ => _mm512_shuffle_f32x4::<0b1110>(x, x),
            };
            _mm256_storeu_ps(to, _mm512_castps512_ps256(half));
        }
    }
}

/// Stores lanes of each vector (see [`store`]) in `to`: those of vector `i` begin at element `i * stride`.
///
/// # Panics
/// When `to` is too short.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::gemm) fn store_all(
    to: &mut [f32],
    stride: usize,
    square: &[__m512],
    first: usize,
    n: usize,
) {
    assert!((square.len().max(1) - 1) * stride + n <= to.len());
    for (i, x) in square.iter().enumerate() {
        // SAFETY: the slice contains the elements of the last vector, as asserted, so it contains those of all.
        unsafe { store(to.as_mut_ptr().add(i * stride), *x, first, n) };
    }
}

/// Transposes a square: within 128-bit quarters of vectors first, then whole quarters.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::gemm) fn transpose(x: Square) -> Square {
    let mut y = zeros();
    for i in (0..16).step_by(4) {
        let a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
        let b = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
        let c = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
        let d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
        y[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        y[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        y[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        y[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    let mut z = zeros();
    for i in 0..4 {
        let [a, b, c, d] = [y[i], y[i + 4], y[i + 8], y[i + 12]];
        let (ab, cd) = (
            _mm512_shuffle_f32x4::<0x88>(a, b),
            _mm512_shuffle_f32x4::<0x88>(c, d),
        );
        z[i] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
        z[i + 8] = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
        let (ab, cd) = (
            _mm512_shuffle_f32x4::<0xdd>(a, b),
            _mm512_shuffle_f32x4::<0xdd>(c, d),
        );
        z[i + 4] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
        z[i + 12] = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
    }
    z
}
