//! Element types of tensors.

use half::{bf16, f16};

/// Element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16: the exponent range of `F32`, 8 significant bits.
    BF16,
    /// IEEE half precision.
    F16,
    /// IEEE double precision, for sums and norms. No tensor operation supports it.
    F64,
    /// 32-bit integers: token ids, positions, row indices, and labels (`-100` is ignored by the loss).
    I32,
    /// Raw bytes.
    U8,
    /// Signed bytes: codes of quantized weights in files. No tensor operation supports them.
    I8,
}

impl DType {
    /// Size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::U8 | Self::I8 => 1,
        }
    }

    /// Whether the type is floating point.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::BF16 | Self::F16 | Self::F64)
    }

    /// Name of the dtype in safetensors headers, e.g. `BF16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::BF16 => "BF16",
            Self::F16 => "F16",
            Self::F64 => "F64",
            Self::I32 => "I32",
            Self::U8 => "U8",
            Self::I8 => "I8",
        }
    }

    /// Dtype with this safetensors name, as [`DType::name`] returns it. `None` for an unknown name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [
            Self::F32,
            Self::BF16,
            Self::F16,
            Self::F64,
            Self::I32,
            Self::U8,
            Self::I8,
        ]
        .into_iter()
        .find(|d| d.name() == name)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name().to_ascii_lowercase())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Rust type that can be the element type of a tensor: `f32`, `bf16`, `f16`, `f64`, `i32` or `u8`.
pub trait Element:
    sealed::Sealed + bytemuck::Pod + Send + Sync + std::fmt::Debug + PartialEq
{
    /// Dtype of tensors whose elements have this Rust type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),* $(,)?) => {
        $(impl sealed::Sealed for $ty {}
          impl Element for $ty { const DTYPE: DType = DType::$dtype; })*
    };
}
element!(f32 => F32, bf16 => BF16, f16 => F16, f64 => F64, i32 => I32, u8 => U8);

/// Rust type of floating-point elements: `f32`, `bf16` or `f16`. Operations compute in `f32` and round to
/// nearest even on store.
pub trait Float: Element {
    /// Converts the element to `f32`. The conversion is exact.
    fn to_f32(self) -> f32;
    /// Converts `value` to this type, rounded to nearest even.
    fn from_f32(value: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        // Branch-free except for NaN, so loops over it vectorize.
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        let quiet_nan = ((bits >> 16) | 0x40) as u16;
        Self::from_bits(if value.is_nan() { quiet_nan } else { rounded })
    }
}

impl Float for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_equals_the_reference_crate_on_every_class_of_value() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((u32::from(high) << 16) | low);
                let ours = <bf16 as Float>::from_f32(value);
                let reference = bf16::from_f32(value);
                if value.is_nan() {
                    assert!(ours.is_nan());
                } else {
                    assert_eq!(ours.to_bits(), reference.to_bits(), "{value}");
                }
            }
        }
    }

    #[test]
    fn names_round_trip() {
        for d in [
            DType::F32,
            DType::BF16,
            DType::F16,
            DType::F64,
            DType::I32,
            DType::U8,
        ] {
            assert_eq!(DType::from_name(d.name()), Some(d));
        }
        assert_eq!(DType::from_name("F8"), None);
    }
}
