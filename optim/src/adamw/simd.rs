//! The instruction set, chosen at run time: the same loops compiled for each set.
#![expect(
    unsafe_code,
    reason = "calling functions compiled for instructions found at run time"
)]

use half::{bf16, f16};

use super::Coefficients;
use super::update::{self, Rounding};

/// An instruction set that this machine has. Values other than `Portable` come from [`Simd::available`] only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Simd {
    /// What the target guarantees: SSE2 on x86-64, NEON on aarch64.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(Proof),
    #[cfg(target_arch = "x86_64")]
    Avx512(Proof),
}

/// Exists only where the instruction set was detected.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Proof(());

impl Simd {
    /// The best set of this machine.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Self::Avx512(Proof(()));
            }
            if is_x86_feature_detected!("avx2") {
                return Self::Avx2(Proof(()));
            }
        }
        Self::Portable
    }

    /// Every set of this machine, for tests that compare them.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        let mut sets = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                sets.push(Self::Avx2(Proof(())));
            }
            if let best @ Self::Avx512(_) = Self::detect() {
                sets.push(best);
            }
        }
        sets
    }
}

macro_rules! multiversion {
    ($name:ident, $avx2:ident, $avx512:ident, ($($arg:ident: $ty:ty),* $(,)?)) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn $avx2($($arg: $ty),*) {
            update::$name($($arg),*);
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn $avx512($($arg: $ty),*) {
            update::$name($($arg),*);
        }

        impl Simd {
            pub(super) fn $name(self, $($arg: $ty),*) {
                match self {
                    Self::Portable => update::$name($($arg),*),
                    // SAFETY: a `Proof` exists only after the features were detected.
                    #[cfg(target_arch = "x86_64")]
                    Self::Avx2(Proof(())) => unsafe { $avx2($($arg),*) },
                    // SAFETY: a `Proof` exists only after the features were detected.
                    #[cfg(target_arch = "x86_64")]
                    Self::Avx512(Proof(())) => unsafe { $avx512($($arg),*) },
                }
            }
        }
    };
}

multiversion!(f32, f32_avx2, f32_avx512, (
    c: &Coefficients, grad: &[f32], weight: &mut [f32], m: &mut [f32], v: &mut [f32],
));
multiversion!(mixed_bf16, mixed_bf16_avx2, mixed_bf16_avx512, (
    c: &Coefficients, grad: &[f32], master: &mut [f32], weight: &mut [bf16],
    m: &mut [f32], v: &mut [f32],
));
multiversion!(mixed_f16, mixed_f16_avx2, mixed_f16_avx512, (
    c: &Coefficients, grad: &[f32], master: &mut [f32], weight: &mut [f16],
    m: &mut [f32], v: &mut [f32],
));
multiversion!(pure_bf16, pure_bf16_avx2, pure_bf16_avx512, (
    c: &Coefficients, rounding: Rounding, grad: &[f32], weight: &mut [bf16],
    m: &mut [bf16], v: &mut [bf16],
));
multiversion!(rounded_bf16, rounded_bf16_avx2, rounded_bf16_avx512, (
    c: &Coefficients, rounding: Rounding, grad: &[f32], weight: &mut [bf16],
    m: &mut [f32], v: &mut [f32],
));
