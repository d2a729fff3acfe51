//! AVX-512: vectors of 512 bits.
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

/// Proof that the processor has AVX-512 F, BW, DQ and VL, and with `VBMI` also that extension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const VBMI: bool = false>(());

impl<const VBMI: bool> Avx512<VBMI> {
    /// Returns the proof if the processor has the instructions, otherwise `None`.
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && (!VBMI || is_x86_feature_detected!("avx512vbmi")))
        .then_some(Self(()))
    }
}

impl<const VBMI: bool> Avx512<VBMI> {
    /// Lowest bytes of four vectors, in order. The numbers are below 2^16; negative numbers become 0.
    #[inline(always)]
    fn bytes(self, [a, b, c, d]: [__m512i; 4]) -> __m512i {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let low = _mm512_set1_epi16(0xff);
            let ab = _mm512_and_si512(_mm512_packus_epi32(a, b), low);
            let cd = _mm512_and_si512(_mm512_packus_epi32(c, d), low);
            self.by_halves(_mm512_packus_epi16(ab, cd))
        }
    }

    /// Puts words of four bytes into order that two packing steps by 128 bits mixed.
    #[inline(always)]
    fn by_halves(self, bytes: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, bytes)
        }
    }
}

impl Avx512 {
    /// Runs a loop compiled with AVX-512.
    pub(crate) fn run(self, work: impl Loop) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn compiled<W: Loop>(lanes: Avx512, work: W) {
            work.run(lanes);
        }
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { compiled(self, work) }
    }
}

impl Avx512<true> {
    /// Runs a loop compiled with AVX-512, and with VBMI if the loop looks up bytes.
    pub(crate) fn run_some<W: Loop>(self, work: W) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
        fn compiled<W: Loop>(lanes: Avx512<true>, work: W) {
            work.run(lanes);
        }
        if W::BYTES {
            // SAFETY: `self` exists only where the instructions were detected.
            unsafe { compiled(self, work) }
        } else {
            Avx512::<false>(()).run(work);
        }
    }

    /// Entries of a table at 64 bytes, byte by byte of the entries.
    #[inline(always)]
    fn look_up_planes(self, table: &ByteTable, at: &[u8]) -> [__m512i; 4] {
        assert!(at.len() >= 64);
        // SAFETY: the instructions exist, and the slices hold what is read.
        unsafe {
            // The shuffles below collect the words 0, 4, 8, 12 first, so those are the first words of the bytes.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let at = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(at.as_ptr().cast()));
            let upper = _mm512_movepi8_mask(at);
            // A closure would be a function of its own, without these instructions.
            macro_rules! plane {
                ($byte:literal) => {{
                    let part: *const __m512i = table.planes[$byte].as_ptr().cast();
                    let [a, b] = [_mm512_loadu_si512(part), _mm512_loadu_si512(part.add(1))];
                    let [c, d] = [
                        _mm512_loadu_si512(part.add(2)),
                        _mm512_loadu_si512(part.add(3)),
                    ];
                    let low = _mm512_permutex2var_epi8(a, at, b);
                    _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(c, at, d))
                }};
            }
            let [a, b, c, d] = [plane!(0), plane!(1), plane!(2), plane!(3)];
            let [low, high] = [_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d)];
            let [low_after, high_after] = [_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d)];
            [
                _mm512_unpacklo_epi16(low, high),
                _mm512_unpackhi_epi16(low, high),
                _mm512_unpacklo_epi16(low_after, high_after),
                _mm512_unpackhi_epi16(low_after, high_after),
            ]
        }
    }
}

impl<const VBMI: bool> Lanes for Avx512<VBMI> {
    const N: usize = 16;
    const PERMUTES: bool = true;
    const PERMUTES_32: bool = true;
    type F = __m512;
    type U = __m512i;

    #[inline(always)]
    fn f(self, x: f32) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn u(self, x: u32) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_set1_epi32(x.cast_signed()) }
    }
    #[inline(always)]
    fn iota(self) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) }
    }
    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_castps_si512(x) }
    }
    #[inline(always)]
    fn float(self, x: Self::U) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_castsi512_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    fn square_error(self, a: Self::F, square: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_fmsub_ps(a, a, square) }
    }
    #[inline(always)]
    fn near_mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_mullo_epi32(a, b) }
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_max_epu32(a, b) }
    }
    #[inline(always)]
    fn shr<const BITS: u32>(self, a: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_srl_epi32(a, _mm_cvtsi32_si128(BITS.cast_signed())) }
    }
    #[inline(always)]
    fn shl<const BITS: u32>(self, a: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_sll_epi32(a, _mm_cvtsi32_si128(BITS.cast_signed())) }
    }
    #[inline(always)]
    fn all_below(self, a: Self::U, limit: u32) -> bool {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_cmplt_epu32_mask(a, _mm512_set1_epi32(limit.cast_signed())) == 0xffff }
    }
    #[inline(always)]
    fn max_halves(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_max_epu16(a, b) }
    }
    #[inline(always)]
    fn all_halves_below(self, a: Self::U, limit: u16) -> bool {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_cmplt_epu16_mask(a, _mm512_set1_epi16(limit.cast_signed())) == !0 }
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        assert!(from.len() >= Self::N);
        // SAFETY: the instructions exist, and the slice holds what is read.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32], x: Self::F) {
        assert!(to.len() >= Self::N);
        // SAFETY: the instructions exist, and the slice holds what is written.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn load_halves(self, from: &[bf16]) -> Self::U {
        assert!(from.len() >= Self::ITEM);
        // SAFETY: the instructions exist, and the slice holds what is read.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store_halves(self, to: &mut [bf16], x: Self::U) {
        assert!(to.len() >= Self::ITEM);
        // SAFETY: the instructions exist, and the slice holds what is written.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) }
    }
    #[inline(always)]
    fn widen(self, x: Self::U) -> [Self::U; 2] {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            [
                _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)),
                _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(x)),
            ]
        }
    }
    #[inline(always)]
    fn narrow(self, [a, b]: [Self::U; 2]) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            _mm512_inserti64x4::<1>(
                _mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)),
                _mm512_cvtepi32_epi16(b),
            )
        }
    }
    #[inline(always)]
    fn high_halves(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            // Low bits of the first, high bits of the second. The compiler's own choice is a shuffle of 16-bit
            // numbers, which costs three operations instead of one.
            let high = _mm512_set1_epi32(0xffff_0000u32.cast_signed());
            _mm512_ternarylogic_epi32::<0xf8>(self.shr::<16>(a), b, high)
        }
    }
    #[inline(always)]
    fn even_odd(self, a: Self::F, b: Self::F) -> [Self::F; 2] {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            [
                _mm512_permutex2var_ps(a, even, b),
                _mm512_permutex2var_ps(a, odd, b),
            ]
        }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    fn above(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_movm_epi32(_mm512_cmpgt_epi32_mask(a, b)) }
    }
    #[inline(always)]
    fn look_up_8(self, table: &[u32; 8], at: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let half = _mm256_loadu_si256(table.as_ptr().cast());
            let at = _mm512_and_si512(at, _mm512_set1_epi32(7));
            _mm512_permutexvar_epi32(at, _mm512_castsi256_si512(half))
        }
    }
    #[inline(always)]
    fn look_up_32(self, table: &[u32; 32], at: Self::U) -> Self::U {
        // SAFETY: the instructions exist, and the table holds what is read. The instruction uses five bits of an index.
        unsafe {
            let table: *const __m512i = table.as_ptr().cast();
            let (low, high) = (_mm512_loadu_si512(table), _mm512_loadu_si512(table.add(1)));
            _mm512_permutex2var_epi32(low, at, high)
        }
    }
    #[inline(always)]
    fn look_up_16(self, table: &[u8; 16], at: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, at)
        }
    }
    #[inline(always)]
    fn look_up<const LEN: usize>(self, table: &[u32; LEN], at: Self::U) -> Self::U {
        const { assert!(LEN.is_power_of_two() && LEN <= 1 << 31) };
        let at = self.and(at, self.u(LEN as u32 - 1));
        // SAFETY: the instructions exist, and every index is below the length of the table.
        unsafe { _mm512_i32gather_epi32::<4>(at, table.as_ptr().cast()) }
    }
    #[inline(always)]
    fn look_up_bytes(self, table: &ByteTable, at: &[u8]) -> [Self::U; 4] {
        if VBMI {
            return Avx512::<true>(()).look_up_planes(table, at);
        }
        assert!(at.len() >= 4 * Self::N);
        macro_rules! gather {
            ($vector:literal) => {{
                // SAFETY: the instructions exist, the slice holds what is read, and the table has an entry for every byte.
                unsafe {
                    let at = at.as_ptr().add($vector * Self::N);
                    let at = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
                    _mm512_i32gather_epi32::<4>(at, table.entries.as_ptr().add(PAD).cast())
                }
            }};
        }
        [gather!(0), gather!(1), gather!(2), gather!(3)]
    }
    #[inline(always)]
    fn store_bytes(self, to: &mut [u8], x: [Self::U; 4]) {
        assert!(to.len() >= 4 * Self::N);
        // SAFETY: the instructions exist, and the slice holds what is written.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), self.bytes(x)) }
    }
    #[inline(always)]
    fn store_signed_bytes(
        self,
        to: &mut [u8],
        x: [Self::U; 4],
        [a, b, c, d]: [Self::F; 4],
        zero: u8,
    ) {
        assert!(to.len() >= 4 * Self::N);
        let zero = zero.cast_signed();
        // SAFETY: the instructions exist, and the slice holds what is written.
        unsafe {
            let bytes = self.bytes(x);
            // Saturation keeps signs.
            let ab = _mm512_packs_epi32(self.bits(a), self.bits(b));
            let cd = _mm512_packs_epi32(self.bits(c), self.bits(d));
            let signs = self.by_halves(_mm512_packs_epi16(ab, cd));
            let below = _mm512_subs_epu8(bytes, _mm512_set1_epi8(1));
            let above = _mm512_add_epi8(bytes, _mm512_set1_epi8(zero));
            let negative = _mm512_movepi8_mask(signs);
            let least = _mm512_set1_epi8(zero.wrapping_sub(1));
            let codes = _mm512_mask_subs_epu8(above, negative, least, below);
            _mm512_storeu_si512(to.as_mut_ptr().cast(), codes);
        }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_min_epu32(a, b) }
    }
    #[inline(always)]
    fn abs(self, a: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_abs_epi32(a) }
    }
    #[inline(always)]
    fn negate(self, a: Self::U, b: Self::U) -> Self::U {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe {
            let negative = _mm512_cmplt_epi32_mask(b, _mm512_setzero_si512());
            _mm512_mask_sub_epi32(a, negative, _mm512_setzero_si512(), a)
        }
    }
    #[inline(always)]
    fn largest(self, a: Self::U) -> u32 {
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { _mm512_reduce_max_epu32(a) }
    }
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        // SAFETY: a prefetch of any address has no effect but on caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
