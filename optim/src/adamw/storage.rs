//! How `AdamW` keeps weights and moments where nothing is wider than `bf16`, and the state slots that follow from it.

use std::str::FromStr;

use kernels::DType;
use serde::{Deserialize, Serialize};

use crate::OptimError;
use crate::optimizer::{Precision, StateSlot};

/// How `bf16` weights without a master are stored after an update in `f32`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bf16Storage {
    /// Rounded up or down at random, in the mean to the exact value: updates smaller than the spacing of `bf16`
    /// numbers are not lost.
    #[default]
    Stochastic,
    /// Rounded to the nearest, with the rounding error in a third `bf16` slot that the next update adds back. The
    /// pair has 17 significant bits.
    Kahan,
    /// Rounded to the nearest: updates below half the spacing are lost and training stalls. For comparisons.
    Nearest,
}

impl Bf16Storage {
    /// Every way.
    pub const ALL: [Self; 3] = [Self::Stochastic, Self::Kahan, Self::Nearest];

    /// The word used on command lines and in configuration files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stochastic => "stochastic",
            Self::Kahan => "kahan",
            Self::Nearest => "nearest",
        }
    }
}

impl FromStr for Bf16Storage {
    type Err = OptimError;

    fn from_str(word: &str) -> Result<Self, OptimError> {
        let found = Self::ALL.into_iter().find(|way| way.name() == word);
        found.ok_or_else(|| OptimError::UnknownWord {
            what: "storage of bf16 weights",
            got: word.into(),
            expected: "stochastic, kahan, nearest",
        })
    }
}

/// Element type of the moments beside `bf16` weights without a master.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MomentDtype {
    /// `bf16`, stored with stochastic rounding (to the nearest with [`Bf16Storage::Nearest`]).
    #[default]
    Bf16,
    /// `f32`.
    F32,
}

impl MomentDtype {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::F32];

    /// The word used on command lines and in configuration files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

impl FromStr for MomentDtype {
    type Err = OptimError;

    fn from_str(word: &str) -> Result<Self, OptimError> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == word);
        found.ok_or_else(|| OptimError::UnknownWord {
            what: "dtype of the moments",
            got: word.into(),
            expected: "bf16, f32",
        })
    }
}

/// What pure `bf16` keeps per element; the other precisions do not look at it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PureBf16 {
    /// How weights are stored.
    pub weights: Bf16Storage,
    /// Element type of the moments.
    pub moments: MomentDtype,
}

impl PureBf16 {
    /// Every combination.
    pub fn all() -> impl Iterator<Item = Self> {
        Bf16Storage::ALL.into_iter().flat_map(|weights| {
            MomentDtype::ALL
                .into_iter()
                .map(move |moments| Self { weights, moments })
        })
    }

    /// The state slots of a precision.
    pub(super) fn slots(self, precision: Precision) -> &'static [StateSlot] {
        // The compensation is the last slot, so that the others keep their place.
        let slots: &'static [StateSlot; 3] = match (precision, self.moments) {
            (Precision::PureBf16, MomentDtype::Bf16) => &NARROW,
            _ => &WIDE,
        };
        match (precision, self.weights) {
            (Precision::PureBf16, Bf16Storage::Kahan) => slots,
            _ => &slots[..2],
        }
    }
}

const fn three(moment: DType) -> [StateSlot; 3] {
    [
        StateSlot {
            name: "exp_avg",
            dtype: moment,
        },
        StateSlot {
            name: "exp_avg_sq",
            dtype: moment,
        },
        StateSlot {
            name: "compensation",
            dtype: DType::BF16,
        },
    ]
}

static WIDE: [StateSlot; 3] = three(DType::F32);
static NARROW: [StateSlot; 3] = three(DType::BF16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdamW, Optimizer};

    #[test]
    fn optimizer_slots_depend_on_the_options_only_in_pure_bf16() {
        // By the width of the moments and without or with the compensation.
        let expected = [[4, 6], [8, 10]];
        for options in PureBf16::all() {
            let rule = AdamW {
                pure_bf16: options,
                ..AdamW::default()
            };
            let wide = usize::from(options.moments == MomentDtype::F32);
            let kahan = usize::from(options.weights == Bf16Storage::Kahan);
            let bytes = rule.state_bytes_per_elem(Precision::PureBf16);
            assert_eq!(bytes, expected[wide][kahan], "{options:?}");
            assert_eq!(rule.slots(Precision::PureBf16).len(), 2 + kahan);
            assert_eq!(rule.state_bytes_per_elem(Precision::F32), 8);
            for mixed in [Precision::Bf16, Precision::Fp16] {
                assert_eq!(rule.slots(mixed), rule.slots(Precision::F32));
                assert_eq!(rule.state_bytes_per_elem(mixed), 12);
            }
        }
    }

    #[test]
    fn storage_options_parse_what_they_print() {
        for options in PureBf16::all() {
            assert_eq!(
                options.weights.name().parse::<Bf16Storage>().unwrap(),
                options.weights
            );
            assert_eq!(
                options.moments.name().parse::<MomentDtype>().unwrap(),
                options.moments
            );
            let json = serde_json::to_string(&options).unwrap();
            assert!(
                json.contains(&format!("\"{}\"", options.weights.name())),
                "{json}"
            );
            assert_eq!(serde_json::from_str::<PureBf16>(&json).unwrap(), options);
        }
        assert!("kahn".parse::<Bf16Storage>().is_err());
        assert!("f16".parse::<MomentDtype>().is_err());
        // Configurations written before the option existed.
        let old: AdamW = serde_json::from_str(r#"{"beta1":0.9,"beta2":0.99,"eps":1e-8}"#).unwrap();
        assert_eq!(old.pure_bf16, PureBf16::default());
    }
}
