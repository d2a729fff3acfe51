//! Vectors as plain arrays, which the compiler maps to the target's baseline SIMD instructions.

use half::bf16;

use super::{ByteTable, Lanes, PAD};

/// The baseline instruction set; needs no detection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

const N: usize = 8;

#[inline(always)]
fn each<A: Copy, B>(a: [A; N], f: impl Fn(A) -> B) -> [B; N] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn both<A: Copy, B>(a: [A; N], b: [A; N], f: impl Fn(A, A) -> B) -> [B; N] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Lanes for Portable {
    const N: usize = N;
    const PERMUTES: bool = false;
    type F = [f32; N];
    type U = [u32; N];

    #[inline(always)]
    fn f(self, x: f32) -> Self::F {
        [x; N]
    }
    #[inline(always)]
    fn u(self, x: u32) -> Self::U {
        [x; N]
    }
    #[inline(always)]
    fn iota(self) -> Self::U {
        std::array::from_fn(|i| i as u32)
    }
    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::U {
        each(x, f32::to_bits)
    }
    #[inline(always)]
    fn float(self, x: Self::U) -> Self::F {
        each(x, f32::from_bits)
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn sqrt(self, a: Self::F) -> Self::F {
        each(a, f32::sqrt)
    }
    #[inline(always)]
    fn square_error(self, a: Self::F, square: Self::F) -> Self::F {
        both(a, square, |a, square| {
            if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                return a.mul_add(a, -square);
            }
            // In f64 the square is exact, and so is the difference if `square` is the rounded one.
            let wide = f64::from(a);
            (wide * wide - f64::from(square)) as f32
        })
    }
    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, u32::wrapping_mul)
    }
    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, |a, b| a ^ b)
    }
    #[inline(always)]
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, u32::max)
    }
    #[inline(always)]
    fn shr<const BITS: u32>(self, a: Self::U) -> Self::U {
        each(a, |a| a >> BITS)
    }
    #[inline(always)]
    fn shl<const BITS: u32>(self, a: Self::U) -> Self::U {
        each(a, |a| a << BITS)
    }
    #[inline(always)]
    fn all_below(self, a: Self::U, limit: u32) -> bool {
        a.iter().fold(0, |max, &a| max.max(a)) < limit
    }
    #[inline(always)]
    fn max_halves(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, |a, b| {
            (a & 0xffff).max(b & 0xffff) | (a & !0xffff).max(b & !0xffff)
        })
    }
    #[inline(always)]
    fn all_halves_below(self, a: Self::U, limit: u16) -> bool {
        let largest = a.iter().fold(0, |max, &a| max.max(a & 0xffff).max(a >> 16));
        largest < limit.into()
    }
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        let from = &from[..N];
        std::array::from_fn(|i| from[i])
    }
    #[inline(always)]
    fn store(self, to: &mut [f32], x: Self::F) {
        to[..N].copy_from_slice(&x);
    }
    #[inline(always)]
    fn load_halves(self, from: &[bf16]) -> Self::U {
        let from = &from[..2 * N];
        std::array::from_fn(|i| {
            let [low, high] = [from[2 * i], from[2 * i + 1]].map(|x| u32::from(x.to_bits()));
            low | high << 16
        })
    }
    #[inline(always)]
    fn store_halves(self, to: &mut [bf16], x: Self::U) {
        let to = &mut to[..2 * N];
        for i in 0..N {
            to[2 * i] = bf16::from_bits(x[i] as u16);
            to[2 * i + 1] = bf16::from_bits((x[i] >> 16) as u16);
        }
    }
    #[inline(always)]
    fn widen(self, x: Self::U) -> [Self::U; 2] {
        let half = |i: usize| x[i / 2] >> (16 * (i % 2)) & 0xffff;
        [
            std::array::from_fn(half),
            std::array::from_fn(|i| half(N + i)),
        ]
    }
    #[inline(always)]
    fn narrow(self, [a, b]: [Self::U; 2]) -> Self::U {
        let number = |i: usize| if i < N { a[i] } else { b[i - N] };
        std::array::from_fn(|i| number(2 * i) | number(2 * i + 1) << 16)
    }
    #[inline(always)]
    fn high_halves(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, |a, b| a >> 16 | (b & 0xffff_0000))
    }
    #[inline(always)]
    fn even_odd(self, a: Self::F, b: Self::F) -> [Self::F; 2] {
        let number = |i: usize| if i < N { a[i] } else { b[i - N] };
        [
            std::array::from_fn(|i| number(2 * i)),
            std::array::from_fn(|i| number(2 * i + 1)),
        ]
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, u32::wrapping_sub)
    }
    #[inline(always)]
    fn above(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, |a, b| {
            u32::from(a.cast_signed() > b.cast_signed()).wrapping_neg()
        })
    }
    #[inline(always)]
    fn look_up_8(self, table: &[u32; 8], at: Self::U) -> Self::U {
        each(at, |at| table[at as usize & 7])
    }
    #[inline(always)]
    fn look_up_16(self, table: &[u8; 16], at: Self::U) -> Self::U {
        each(at, |at| u32::from(table[at as usize & 15]))
    }
    #[inline(always)]
    fn look_up<const LEN: usize>(self, table: &[u32; LEN], at: Self::U) -> Self::U {
        const { assert!(LEN.is_power_of_two()) };
        each(at, |at| table[at as usize & (LEN - 1)])
    }
    #[inline(always)]
    fn look_up_bytes(self, table: &ByteTable, at: &[u8]) -> [Self::U; 4] {
        let at = &at[..4 * N];
        let entry = |i: usize| table.entries[PAD + usize::from(at[i])];
        std::array::from_fn(|vector| std::array::from_fn(|i| entry(vector * N + i)))
    }
    #[inline(always)]
    fn store_bytes(self, to: &mut [u8], x: [Self::U; 4]) {
        for (to, x) in to[..4 * N].iter_mut().zip(x.into_iter().flatten()) {
            *to = x.cast_signed().max(0) as u8;
        }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, Ord::min)
    }
    #[inline(always)]
    fn abs(self, a: Self::U) -> Self::U {
        each(a, |a| a.cast_signed().unsigned_abs())
    }
    #[inline(always)]
    fn negate(self, a: Self::U, b: Self::U) -> Self::U {
        both(a, b, |a, b| match b.cast_signed() < 0 {
            true => a.wrapping_neg(),
            false => a,
        })
    }
    #[inline(always)]
    fn largest(self, a: Self::U) -> u32 {
        a.into_iter().fold(0, Ord::max)
    }
    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
}
