//! Storage of `AdamW`'s weights and moments in pure `bf16`, and the state slots that follow from it.

use std::str::FromStr;

use kernels::DType;
use serde::{Deserialize, Serialize};

use super::BLOCK_ELEMS;
use crate::OptimError;
use crate::optimizer::{Coverage, Precision, StateSlot};

/// Rounding of `bf16` weights without a master copy, after an update that is computed in `f32`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bf16Storage {
    /// Stochastic rounding: up or down at random, unbiased. Updates smaller than the spacing of `bf16` numbers count
    /// on average.
    #[default]
    Stochastic,
    /// Rounding to nearest with Kahan compensation: a third `bf16` slot stores the rounding error, and the next
    /// update adds it back. Weight and error together have 17 significant bits.
    Kahan,
    /// Rounding to nearest. Updates below half the spacing of `bf16` numbers are lost, so training stalls. For
    /// comparisons only.
    Nearest,
}

impl Bf16Storage {
    /// All ways of rounding.
    pub const ALL: [Self; 3] = [Self::Stochastic, Self::Kahan, Self::Nearest];

    /// Name of the rounding on command lines and in configuration files, e.g. `kahan`.
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

/// Element type of Adam's moments in pure `bf16` precision.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MomentDtype {
    /// `bf16` with stochastic rounding, or rounding to nearest with [`Bf16Storage::Nearest`].
    #[default]
    Bf16,
    /// `f32`.
    F32,
}

impl MomentDtype {
    /// All element types of moments.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::F32];

    /// Name of the element type on command lines and in configuration files: `bf16` or `f32`.
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

/// Storage options of pure `bf16` precision, which has no master weights. Other precisions ignore them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PureBf16 {
    /// Rounding of the weights to `bf16`.
    pub weights: Bf16Storage,
    /// Element type of both Adam moments.
    pub moments: MomentDtype,
}

impl PureBf16 {
    /// All options: each rounding of weights with each element type of moments.
    pub fn all() -> impl Iterator<Item = Self> {
        Bf16Storage::ALL.into_iter().flat_map(|weights| {
            MomentDtype::ALL
                .into_iter()
                .map(move |moments| Self { weights, moments })
        })
    }

    /// State slots of AdamW in `precision`: both moments, then the Kahan compensation if it is used.
    pub(super) fn slots(self, precision: Precision) -> &'static [StateSlot] {
        // The compensation is the last slot, so the first two have the same index with and without it.
        let slots: &'static [StateSlot; 3] = match (precision, self.moments) {
            (Precision::PureBf16, MomentDtype::Bf16) => &NARROW,
            _ => &WIDE,
        };
        match (precision, self.weights) {
            (Precision::PureBf16, Bf16Storage::Kahan) => slots,
            _ => &slots[..2],
        }
    }

    /// State slots of AdamW in `precision` with moments of 8 bits: codes and absmax of both moments, then both moments
    /// of the parameters that keep `f32`, then the Kahan compensation if it is used.
    pub(super) fn block_slots(self, precision: Precision) -> &'static [StateSlot] {
        match (precision, self.weights) {
            (Precision::PureBf16, Bf16Storage::Kahan) => &BLOCKS,
            _ => &BLOCKS[..6],
        }
    }
}

/// Names of the states: both moments, then the Kahan compensation.
pub(super) const NAMES: [&str; 3] = ["exp_avg", "exp_avg_sq", "compensation"];

const fn three(moment: DType) -> [StateSlot; 3] {
    [
        StateSlot::new(NAMES[0], moment),
        StateSlot::new(NAMES[1], moment),
        StateSlot::new(NAMES[2], DType::BF16),
    ]
}

/// Codes of a moment and their absmax per block, in this order.
const fn coded(name: &'static str, absmax: &'static str) -> [StateSlot; 2] {
    [
        StateSlot {
            coverage: Coverage::Blocks,
            ..StateSlot::new(name, DType::U8)
        },
        StateSlot {
            coverage: Coverage::Blocks,
            per: BLOCK_ELEMS,
            ..StateSlot::new(absmax, DType::F32)
        },
    ]
}

const fn elementwise(name: &'static str) -> StateSlot {
    StateSlot {
        coverage: Coverage::Elements,
        ..StateSlot::new(name, DType::F32)
    }
}

static BLOCKS: [StateSlot; 7] = {
    let [m, m_absmax] = coded(NAMES[0], "exp_avg_absmax");
    let [v, v_absmax] = coded(NAMES[1], "exp_avg_sq_absmax");
    let (wide_m, wide_v) = (elementwise(NAMES[0]), elementwise(NAMES[1]));
    let error = StateSlot::new(NAMES[2], DType::BF16);
    [m, m_absmax, v, v_absmax, wide_m, wide_v, error]
};
static WIDE: [StateSlot; 3] = three(DType::F32);
static NARROW: [StateSlot; 3] = three(DType::BF16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdamW, Optimizer};

    #[test]
    fn optimizer_slots_depend_on_the_options_only_in_pure_bf16() {
        // Bytes per element: rows without and with compensation, columns by the width of the moments.
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
        // A configuration written before the option existed.
        let old: AdamW = serde_json::from_str(r#"{"beta1":0.9,"beta2":0.99,"eps":1e-8}"#).unwrap();
        assert_eq!(old.pure_bf16, PureBf16::default());
    }
}
