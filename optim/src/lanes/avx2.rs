//! AVX2: vectors of 256 bits.
#![expect(
    unsafe_code,
    reason = "calling instructions found at run time; loads and stores of checked length"
)]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "loads and stores that need no alignment"
)]

#[allow(
    clippy::wildcard_imports,
    reason = "intrinsics have unmistakable names"
)]
use std::arch::x86_64::*;

use half::bf16;

use super::{ByteTable, Lanes, Loop, PAD};

/// Proof that the processor has AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Returns the proof if the processor has the instructions, otherwise `None`.
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }

    /// Runs a loop compiled with AVX2 and FMA.
    pub(crate) fn run(self, work: impl Loop) {
        #[target_feature(enable = "avx2,fma")]
        fn compiled<W: Loop>(lanes: Avx2, work: W) {
            work.run(lanes);
        }
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { compiled(self, work) }
    }
}

impl Lanes for Avx2 {
    const N: usize = 8;
    const PERMUTES: bool = true;
    type F = __m256;
    type U = __m256i;

    #[inline(always)]
    fn f(self, x: f32) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn u(self, x: u32) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_set1_epi32(x.cast_signed()) }
    }
    #[inline(always)]
    fn iota(self) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7) }
    }
    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_castps_si256(x) }
    }
    #[inline(always)]
    fn float(self, x: Self::U) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_castsi256_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_sqrt_ps(a) }
    }
    #[inline(always)]
    fn square_error(self, a: Self::F, square: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_fmsub_ps(a, a, square) }
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_mullo_epi32(a, b) }
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_and_si256(a, b) }
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_xor_si256(a, b) }
    }
    #[inline(always)]
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_max_epu32(a, b) }
    }
    #[inline(always)]
    fn shr<const BITS: u32>(self, a: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_srl_epi32(a, _mm_cvtsi32_si128(BITS.cast_signed())) }
    }
    #[inline(always)]
    fn shl<const BITS: u32>(self, a: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_sll_epi32(a, _mm_cvtsi32_si128(BITS.cast_signed())) }
    }
    #[inline(always)]
    fn all_below(self, a: Self::U, limit: u32) -> bool {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            _mm256_movemask_epi8(_mm256_cmpgt_epi32(
                _mm256_set1_epi32(limit.cast_signed()),
                a,
            )) == -1
        }
    }
    #[inline(always)]
    fn max_halves(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_max_epu16(a, b) }
    }
    #[inline(always)]
    fn all_halves_below(self, a: Self::U, limit: u16) -> bool {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            _mm256_movemask_epi8(_mm256_cmpgt_epi16(
                _mm256_set1_epi16(limit.cast_signed()),
                a,
            )) == -1
        }
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        assert!(from.len() >= Self::N);
        // SAFETY: the instructions exist, and the slice holds what is read.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32], x: Self::F) {
        assert!(to.len() >= Self::N);
        // SAFETY: the instructions exist, and the slice holds what is written.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn load_halves(self, from: &[bf16]) -> Self::U {
        assert!(from.len() >= Self::ITEM);
        // SAFETY: the instructions exist, and the slice holds what is read.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store_halves(self, to: &mut [bf16], x: Self::U) {
        assert!(to.len() >= Self::ITEM);
        // SAFETY: the instructions exist, and the slice holds what is written.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), x) }
    }
    #[inline(always)]
    fn widen(self, x: Self::U) -> [Self::U; 2] {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            [
                _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(x)),
            ]
        }
    }
    #[inline(always)]
    fn narrow(self, [a, b]: [Self::U; 2]) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b)) }
    }
    #[inline(always)]
    fn high_halves(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_blend_epi16::<0b1010_1010>(self.shr::<16>(a), b) }
    }
    #[inline(always)]
    fn even_odd(self, a: Self::F, b: Self::F) -> [Self::F; 2] {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            // Shuffles within the 128-bit halves first, then puts the 64-bit quarters into order.
            let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
            let odd = _mm256_shuffle_ps::<0b11_01_11_01>(a, b);
            [
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(
                    even,
                ))),
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(
                    odd,
                ))),
            ]
        }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_sub_epi32(a, b) }
    }
    #[inline(always)]
    fn above(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_cmpgt_epi32(a, b) }
    }
    #[inline(always)]
    fn look_up_8(self, table: &[u32; 8], at: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_permutevar8x32_epi32(_mm256_loadu_si256(table.as_ptr().cast()), at) }
    }
    #[inline(always)]
    fn look_up_16(self, table: &[u8; 16], at: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, at)
        }
    }
    #[inline(always)]
    fn look_up<const LEN: usize>(self, table: &[u32; LEN], at: Self::U) -> Self::U {
        const { assert!(LEN.is_power_of_two() && LEN <= 1 << 31) };
        let at = self.and(at, self.u(LEN as u32 - 1));
        // SAFETY: the instructions exist, and every index is below the length of the table.
        unsafe { _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), at) }
    }
    #[inline(always)]
    fn look_up_bytes(self, table: &ByteTable, at: &[u8]) -> [Self::U; 4] {
        // Eight loads take less time than a gather on an EPYC without AVX-512. Each is one operation with a blend: it
        // loads the four numbers around the entry that put it into its lane.
        let at = &at[..4 * Self::N];
        // A closure would be a function of its own, without these instructions.
        macro_rules! around {
            ($entries:ident, $i:expr) => {
                _mm_loadu_ps($entries.add(usize::from(at[$i])).sub($i % 4))
            };
        }
        macro_rules! half {
            ($entries:ident, $i:expr) => {{
                let two = _mm_blend_ps::<0b0010>(around!($entries, $i), around!($entries, $i + 1));
                let three = _mm_blend_ps::<0b0100>(two, around!($entries, $i + 2));
                _mm_blend_ps::<0b1000>(three, around!($entries, $i + 3))
            }};
        }
        macro_rules! vector {
            ($entries:ident, $i:expr) => {
                _mm256_castps_si256(_mm256_set_m128(
                    half!($entries, $i + 4),
                    half!($entries, $i),
                ))
            };
        }
        // SAFETY: the instructions exist. An entry has `PAD` entries before it and after it, and a lane is below four.
        unsafe {
            let entries: *const f32 = table.entries.as_ptr().add(PAD).cast();
            [
                vector!(entries, 0),
                vector!(entries, 8),
                vector!(entries, 16),
                vector!(entries, 24),
            ]
        }
    }
    #[inline(always)]
    fn store_bytes(self, to: &mut [u8], [a, b, c, d]: [Self::U; 4]) {
        assert!(to.len() >= 4 * Self::N);
        // SAFETY: the instructions exist, and the slice holds what is written.
        unsafe {
            let low = _mm256_set1_epi16(0xff);
            let ab = _mm256_and_si256(_mm256_packus_epi32(a, b), low);
            let cd = _mm256_and_si256(_mm256_packus_epi32(c, d), low);
            // Words of four bytes, by halves of the vectors.
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_min_epu32(a, b) }
    }
    #[inline(always)]
    fn abs(self, a: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_abs_epi32(a) }
    }
    #[inline(always)]
    fn negate(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm256_sign_epi32(a, b) }
    }
    #[inline(always)]
    fn largest(self, a: Self::U) -> u32 {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let a = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_max_epu32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            let a = _mm_max_epu32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a));
            _mm_cvtsi128_si32(a).cast_unsigned()
        }
    }
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        // SAFETY: a prefetch of any address has no effect but on caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
