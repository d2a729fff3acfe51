//! Portable SIMD vectors: one notation for loops over AVX-512, AVX2 and plain arrays, with the same bits on each.
//!
//! Every operation rounds once, to nearest even. A value of a type that implements [`Lanes`] proves that the processor
//! has the instructions.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use half::bf16;

use crate::rounding::{PageKey, SHARED};

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

/// Entries before and after those of [`ByteTable::entries`], which vectors around an entry may include.
pub(crate) const PAD: usize = 4;

/// Table with an entry for each byte.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct ByteTable {
    /// The lowest bytes of all entries, then the second, third and highest ones.
    pub(crate) planes: [[u8; 256]; 4],
    /// The entries, from [`PAD`] on.
    pub(crate) entries: [u32; 256 + 2 * PAD],
}

impl ByteTable {
    /// The table of 256 entries.
    pub(crate) fn new(of: &[u32; 256]) -> Self {
        let mut entries = [0; 256 + 2 * PAD];
        entries[PAD..PAD + 256].copy_from_slice(of);
        let planes = std::array::from_fn(|byte| of.map(|entry| entry.to_le_bytes()[byte]));
        Self { entries, planes }
    }
}

/// Instruction set with vectors of [`Lanes::N`] numbers. Slices passed in have at least `N` elements, or
/// [`Lanes::ITEM`] elements of 16 bits.
pub(crate) trait Lanes: Copy {
    /// Number of `f32` or `u32` numbers in a vector.
    const N: usize;
    /// Elements per loop iteration: two vectors of 32-bit numbers, or one of 16-bit numbers.
    const ITEM: usize = 2 * Self::N;
    /// Whether look-ups in tables of eight entries are one instruction.
    const PERMUTES: bool;
    /// Whether look-ups in tables of 32 entries are one instruction.
    const PERMUTES_32: bool = false;
    /// Type of a vector of `f32` numbers.
    type F: Copy;
    /// Type of a vector of `u32` numbers.
    type U: Copy;

    fn f(self, x: f32) -> Self::F;
    fn u(self, x: u32) -> Self::U;
    /// The vector of the numbers 0, 1, 2, …
    fn iota(self) -> Self::U;
    fn bits(self, x: Self::F) -> Self::U;
    fn float(self, x: Self::U) -> Self::F;

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `a * a - square`, rounded once. Where `square` is `a * a` rounded and at least 2^-100, it is the exact error.
    fn square_error(self, a: Self::F, square: Self::F) -> Self::F;

    /// `a * b + c` for estimates: rounded once or twice, so the last bits depend on the instruction set.
    #[inline(always)]
    fn near_mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.add(self.mul(a, b), c)
    }

    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The largest number.
    fn largest(self, a: Self::U) -> u32;

    fn add_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn mul_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn and(self, a: Self::U, b: Self::U) -> Self::U;
    fn xor(self, a: Self::U, b: Self::U) -> Self::U;
    fn max_u(self, a: Self::U, b: Self::U) -> Self::U;
    fn min_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// Magnitudes of numbers in two's complement.
    fn abs(self, a: Self::U) -> Self::U;
    /// Numbers of `a`, negated where `b` is negative in two's complement. The numbers must be 0 where `b` is 0.
    fn negate(self, a: Self::U, b: Self::U) -> Self::U;
    fn shr<const BITS: u32>(self, a: Self::U) -> Self::U;
    fn shl<const BITS: u32>(self, a: Self::U) -> Self::U;
    /// All bits where a number of `a` is above that of `b` in two's complement, else none.
    fn above(self, a: Self::U, b: Self::U) -> Self::U;
    /// Whether every number is below `limit`. The numbers and `limit` must be below 2^31.
    fn all_below(self, a: Self::U, limit: u32) -> bool;

    /// Whether every number is `limit` or more. The numbers and `limit` must be below 2^31.
    #[inline(always)]
    fn all_at_least(self, a: Self::U, limit: u32) -> bool {
        let below = self.above(self.u(limit), a);
        self.all_below(self.and(below, self.u(1)), 1)
    }

    /// Elementwise maximum of the 16-bit numbers.
    fn max_halves(self, a: Self::U, b: Self::U) -> Self::U;
    /// Whether every 16-bit number is below `limit`. The numbers and `limit` must be below 2^15.
    fn all_halves_below(self, a: Self::U, limit: u16) -> bool;

    fn load(self, from: &[f32]) -> Self::F;
    fn store(self, to: &mut [f32], x: Self::F);
    /// Loads 16-bit numbers, two per word, the first one in the low half.
    fn load_halves(self, from: &[bf16]) -> Self::U;
    fn store_halves(self, to: &mut [bf16], x: Self::U);
    /// Zero-extends the 16-bit numbers to `u32`, in order.
    fn widen(self, x: Self::U) -> [Self::U; 2];
    /// Inverse of [`Lanes::widen`]. The numbers must be below 2^16.
    fn narrow(self, x: [Self::U; 2]) -> Self::U;
    /// Combines high halves of words: those of `a` become the low halves, those of `b` the high halves.
    fn high_halves(self, a: Self::U, b: Self::U) -> Self::U;
    /// Splits the elements of two consecutive vectors into those at even and those at odd indices.
    fn even_odd(self, a: Self::F, b: Self::F) -> [Self::F; 2];
    /// Entries of a table at the given indices, modulo 8.
    fn look_up_8(self, table: &[u32; 8], at: Self::U) -> Self::U;
    /// Entries of a table at the given indices below 128, modulo 16. The first entry must be 0.
    fn look_up_16(self, table: &[u8; 16], at: Self::U) -> Self::U;
    /// Entries of a table at the given indices, modulo 32.
    #[inline(always)]
    fn look_up_32(self, table: &[u32; 32], at: Self::U) -> Self::U {
        self.look_up(table, at)
    }
    /// Entries of a table at the given indices, modulo its length, a power of two.
    fn look_up<const LEN: usize>(self, table: &[u32; LEN], at: Self::U) -> Self::U;
    /// Entries of a table at the first `4 * N` bytes of a slice, in order.
    fn look_up_bytes(self, table: &ByteTable, at: &[u8]) -> [Self::U; 4];
    /// Stores four vectors as bytes: the lowest ones of numbers below 2^16, and 0 for negative numbers.
    fn store_bytes(self, to: &mut [u8], x: [Self::U; 4]);
    /// Stores four vectors as bytes: `zero` plus the lowest byte of a number where its `sign` is positive, else `zero` minus
    /// that byte or 1, whichever is larger, and at least 0. The numbers must be below 2^16, with a lowest byte up to 128,
    /// which is 0 where the sign is +0.
    #[inline(always)]
    fn store_signed_bytes(
        self,
        to: &mut [u8],
        [a, b, c, d]: [Self::U; 4],
        sign: [Self::F; 4],
        zero: u8,
    ) {
        let a = self.signed_byte(a, sign[0], zero);
        let b = self.signed_byte(b, sign[1], zero);
        let c = self.signed_byte(c, sign[2], zero);
        let d = self.signed_byte(d, sign[3], zero);
        self.store_bytes(to, [a, b, c, d]);
    }

    /// One vector of [`Lanes::store_signed_bytes`].
    #[inline(always)]
    fn signed_byte(self, number: Self::U, sign: Self::F, zero: u8) -> Self::U {
        let sign = self.bits(sign);
        let byte = self.and(number, self.u(0xff));
        let signed = self.negate(self.max_u(byte, self.shr::<31>(sign)), sign);
        self.add_u(signed, self.u(zero.into()))
    }

    /// Prefetches the cache line of an address, which may be invalid.
    fn prefetch<T>(self, at: *const T);

    /// Xor-shift: `x ^ (x >> BITS)`.
    #[inline(always)]
    fn fold<const BITS: u32>(self, x: Self::U) -> Self::U {
        self.xor(x, self.shr::<BITS>(x))
    }

    /// Part of the hash that the three words of a pair share, for the pairs from `pair` on. See [`crate::rounding`].
    #[inline(always)]
    fn pairs(self, key: PageKey, pair: u32) -> Self::U {
        let x = self.add_u(self.iota(), self.u(pair.wrapping_add(key.first())));
        let x = self.mul_u(self.fold::<16>(x), self.u(SHARED[0]));
        let x = self.mul_u(self.fold::<15>(x), self.u(SHARED[1]));
        self.fold::<16>(x)
    }

    /// Word `word` of each pair, from the shared part.
    #[inline(always)]
    fn word(self, key: PageKey, word: usize, pairs: Self::U) -> Self::U {
        let (add, multiplier) = key.word(word);
        self.fold::<17>(self.mul_u(self.add_u(pairs, self.u(add)), self.u(multiplier)))
    }
}

/// Instruction set that this machine has. Only [`Simd::detect`] and [`Simd::available`] make values other than
/// `Portable`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Simd {
    /// Instructions that the compilation target guarantees: SSE2 on x86-64, NEON on aarch64.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// AVX-512 with VBMI, for loops that look up bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512Vbmi(Avx512<true>),
}

impl Simd {
    /// The widest instruction set that this machine supports.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(lanes) = Avx512::<true>::detect() {
                return Self::Avx512Vbmi(lanes);
            }
            if let Some(lanes) = Avx512::detect() {
                return Self::Avx512(lanes);
            }
            if let Some(lanes) = Avx2::detect() {
                return Self::Avx2(lanes);
            }
        }
        Self::Portable
    }

    /// Every set of this machine, for tests that compare them.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Self> {
        let mut sets = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(Avx2::detect().map(Self::Avx2));
            sets.extend(Avx512::detect().map(Self::Avx512));
            sets.extend(Avx512::<true>::detect().map(Self::Avx512Vbmi));
        }
        sets
    }
}

/// Loop over elements that [`Simd::run`] compiles once per instruction set.
pub(crate) trait Loop {
    /// Whether the loop looks up bytes, which AVX-512 does faster with VBMI.
    const BYTES: bool = false;
    /// Runs the loop. Implementations must be `#[inline(always)]`.
    fn run<L: Lanes>(self, lanes: L);
}

impl Simd {
    /// Runs a loop with this instruction set.
    pub(crate) fn run(self, work: impl Loop) {
        match self {
            Self::Portable => work.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(lanes) => lanes.run(work),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(lanes) => lanes.run(work),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vbmi(lanes) => lanes.run_some(work),
        }
    }
}

#[cfg(test)]
mod tests;
