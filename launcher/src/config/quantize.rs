//! Quantized base weights: `--quantize` and what belongs to it.

use clap::ValueEnum;
use kernels::{Codebook, Quantization};
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
    /// The run's number format, also for weights that the files quantize.
    None,
}

/// `export --merge-base`: base weights that adapters are merged into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MergeBase {
    /// The values that the quantized weights of the run stand for.
    Trained,
    /// The weights before they were quantized.
    Original,
}

/// How a run quantizes its base weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantize {
    /// Number format.
    pub format: QuantizeFormat,
    /// Whether the scales of 4-bit weights are quantized too.
    pub double: bool,
    /// Parts whose linear layers are quantized, as the user wrote them; `None` for the language model.
    pub modules: Option<String>,
}

impl Quantize {
    /// Quantization of the selected weights; `None` for plain weights.
    #[must_use]
    pub fn quantization(&self) -> Option<Quantization> {
        Some(match self.format {
            QuantizeFormat::Nf4 => Quantization::four_bit(Codebook::Nf4, self.double),
            QuantizeFormat::Fp4 => Quantization::four_bit(Codebook::Fp4, self.double),
            QuantizeFormat::Int8 => Quantization::Int8,
            QuantizeFormat::None => return None,
        })
    }
}
