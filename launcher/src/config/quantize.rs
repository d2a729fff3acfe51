//! Packed base weights: `--quantize` and what belongs to it.

use clap::ValueEnum;
use kernels::{Codebook, Packing};
use serde::{Deserialize, Serialize};

/// `--quantize`: number format of frozen linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QuantizeFormat {
    /// 4 bits, quantiles of the normal distribution.
    Nf4,
    /// 4 bits, floating point.
    Fp4,
    /// 8 bits, a scale per row.
    Int8,
    /// The run's number format, also for weights that the files pack.
    None,
}

/// `export --merge-base`: base weights that adapters are merged into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MergeBase {
    /// The values that the packed weights of the run stand for.
    Trained,
    /// The weights before they were packed.
    Original,
}

/// How a run packs its base weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantize {
    /// Number format.
    pub format: QuantizeFormat,
    /// Whether the scales of 4-bit weights are packed too.
    pub double: bool,
    /// Parts whose linear layers are packed, as the user wrote them; `None` for the language model.
    pub modules: Option<String>,
}

impl Quantize {
    /// Packing of the selected weights; `None` for plain weights.
    #[must_use]
    pub fn packing(&self) -> Option<Packing> {
        Some(match self.format {
            QuantizeFormat::Nf4 => Packing::four_bit(Codebook::Nf4, self.double),
            QuantizeFormat::Fp4 => Packing::four_bit(Codebook::Fp4, self.double),
            QuantizeFormat::Int8 => Packing::Int8,
            QuantizeFormat::None => return None,
        })
    }
}
