//! Loops compiled for several instruction sets, selected at run time.

use std::sync::OnceLock;

/// Instruction set that loops are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub(crate) enum Level {
    /// Baseline of the target architecture.
    Portable,
    /// x86-64-v3: AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    V3,
    /// x86-64-v4: AVX-512 F, BW, DQ, VL.
    #[cfg(target_arch = "x86_64")]
    V4,
    /// x86-64-v4 and AVX512-BF16. Only matrix products differ from [`Level::V4`].
    #[cfg(target_arch = "x86_64")]
    V4Bf16,
}

/// The highest level that this processor supports.
#[cfg(target_arch = "x86_64")]
pub(crate) fn supported() -> Level {
    let v3 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let v4 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (v3, v4) {
        (true, true) if is_x86_feature_detected!("avx512bf16") => Level::V4Bf16,
        (true, true) => Level::V4,
        (true, false) => Level::V3,
        _ => Level::Portable,
    }
}

/// The highest level that this processor supports.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn supported() -> Level {
    Level::Portable
}

/// The fastest level on this processor. The bits of results do not depend on it.
#[inline]
pub(crate) fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| match supported() {
        #[cfg(target_arch = "x86_64")]
        Level::V4Bf16 if !fast_dot_products() => Level::V4,
        level => level,
    })
}

/// Whether dot products of bf16 take less time than fused multiply-adds of f32 for the same sums.
///
/// An instruction of either kind starts as often on AMD's Zen 5, and a dot product does twice the work. On Intel's
/// Sapphire Rapids a dot product starts at a quarter of the rate (docs/results.md).
#[cfg(target_arch = "x86_64")]
fn fast_dot_products() -> bool {
    #[allow(unsafe_code, unused_unsafe, reason = "unsafe in older compilers")]
    // SAFETY: every x86-64 has the instruction and its leaf 0.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    vendor.as_flattened() == b"AuthenticAMD"
}

/// Prefetches the cache line of an address, which may be invalid.
#[inline(always)]
#[allow(unsafe_code, reason = "an intrinsic")]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of every x86-64; it changes caches only and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Defines a function whose body is compiled once per [`Level`]. Functions that it calls must be `#[inline(always)]`
/// to be compiled with that level.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident : $bound:path),+>)? (
        $($arg:ident : $ty:ty),* $(,)?
    ) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code, reason = "calls what was compiled for a detected instruction set")]
        $vis fn $name $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn v4 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body$(::<$($g),+>)?($($arg),*) }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn v3 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? { body$(::<$($g),+>)?($($arg),*) }
                match $crate::cpu::simd::level() {
                    $crate::cpu::simd::Level::V4 | $crate::cpu::simd::Level::V4Bf16 => {
                        // SAFETY: the processor has every feature the function was compiled for.
                        return unsafe { v4$(::<$($g),+>)?($($arg),*) };
                    }
                    // SAFETY: as above.
                    $crate::cpu::simd::Level::V3 => return unsafe { v3$(::<$($g),+>)?($($arg),*) },
                    $crate::cpu::simd::Level::Portable => {}
                }
            }
            body$(::<$($g),+>)?($($arg),*)
        }
    };
}
pub(crate) use multiversion;
