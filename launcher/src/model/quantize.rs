//! Which base weights of a run are quantized, and how a checkpoint records it.

use crate::config::{Quantize, QuantizeFormat, RunConfig};
use crate::error::failures::unusable;
use crate::error::{ErrorCode, Failure, failures};
use crate::lang::{both, text};
use engine::ModelSpec;
use kernels::{Codebook, Quantization};
use models::selection::Selection;
use models::{QuantizedWeights, WeightError, WeightSource};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Entry of a checkpoint's manifest with the weights that were quantized.
pub(crate) const QUANTIZED: &str = "packed";
/// Word of `--quantize-modules` for every linear layer.
const ALL: &str = "all";

/// The weights that the run `config` quantizes: those that it selects, or those that its model directory has quantized.
///
/// # Errors
/// The directory is quantized in another way than the run asks for.
pub(super) fn quantized(config: &RunConfig) -> Result<QuantizedWeights, Failure> {
    let dir = config.model_dir();
    let declared = QuantizedWeights::declared(&dir);
    let declared = declared.map_err(|error| unusable(&dir, &error))?;
    let chosen = config.quantize.as_ref();
    Ok(match (chosen, declared) {
        (
            Some(Quantize {
                format: QuantizeFormat::None,
                ..
            }),
            _,
        )
        | (None, None) => QuantizedWeights::None,
        (chosen, Some(declared)) => {
            let stored = match WeightSource::open(&dir) {
                Ok(source) => QuantizedWeights::Stored(source.quantizations()),
                Err(WeightError::NoWeights { .. }) => declared,
                Err(error) => return Err(failures::weights(&error)),
            };
            if let Some(chosen) = chosen {
                agree(chosen, &stored)?;
            }
            stored
        }
        (Some(chosen), None) => by_flags(chosen)?,
    })
}

/// Quantization of the base weights of the run `config`, by its flags or its model directory; `None` for plain weights.
#[must_use]
pub(crate) fn quantization(config: &RunConfig) -> Option<Quantization> {
    if let Some(chosen) = &config.quantize {
        return chosen.quantization();
    }
    match QuantizedWeights::declared(&config.model_dir()) {
        Ok(Some(QuantizedWeights::Declared { quantization, .. })) => Some(quantization),
        _ => None,
    }
}

/// The weights that the flags `chosen` select.
///
/// # Errors
/// `--quantize-modules` is not valid.
pub(crate) fn by_flags(chosen: &Quantize) -> Result<QuantizedWeights, Failure> {
    let Some(quantization) = chosen.quantization() else {
        return Ok(QuantizedWeights::None);
    };
    let words = chosen.modules.as_deref().map(|words| match words {
        ALL => ".*",
        words => words,
    });
    let modules = words.map(Selection::parse).transpose();
    Ok(QuantizedWeights::Chosen {
        quantization,
        modules: modules.map_err(|error| failures::selection("--quantize-modules", &error))?,
    })
}

/// Refuses a quantization other than that of the model directory.
///
/// # Errors
/// They differ.
pub(crate) fn agree(chosen: &Quantize, stored: &QuantizedWeights) -> Result<(), Failure> {
    let wanted = chosen.quantization().map(Quantization::name);
    let other = match stored {
        QuantizedWeights::Stored(quantizations) => quantizations
            .values()
            .copied()
            .find(|p| Some(p.name()) != wanted),
        QuantizedWeights::Declared { quantization, .. } => {
            Some(*quantization).filter(|p| Some(p.name()) != wanted)
        }
        QuantizedWeights::None | QuantizedWeights::Chosen { .. } => None,
    };
    match other {
        Some(other) => Err(Failure::new(
            ErrorCode::Usage,
            both("the model is quantized in another format", "模型以另一种格式压缩存储"),
            text!(
                "its weights are {}, the run asks for {}",
                "它的权重是 {}，而运行要求 {}",
                other.name(),
                wanted.unwrap_or_default()
            ),
        )
        .next(text!(
            "use --quantize {0}, which leaves the weights as they are, or give --model the weights that are not quantized",
            "请使用 --quantize {0}，权重保持不变，或把未压缩存储的权重交给 --model",
            other.name()
        ))),
        None => Ok(()),
    }
}

/// Quantizations of the weights of `spec` that a run quantizes, by name.
pub(crate) fn quantizations(spec: &ModelSpec) -> BTreeMap<String, Quantization> {
    let params = spec.params.iter();
    let quantized =
        params.filter_map(|param| Some((param.name.clone(), param.stored_quantization()?)));
    quantized.collect()
}

/// What a checkpoint's manifest says of the quantized weights of `spec`; null if there are none.
pub(crate) fn record(spec: &ModelSpec) -> Value {
    let mut groups: Vec<(Quantization, Vec<String>)> = Vec::new();
    for (name, quantization) in quantizations(spec) {
        match groups.iter_mut().find(|(other, _)| *other == quantization) {
            Some((_, names)) => names.push(name),
            None => groups.push((quantization, vec![name])),
        }
    }
    let groups = groups.into_iter().map(|(quantization, tensors)| match quantization {
        Quantization::FourBit {
            codebook,
            block_elems,
            double,
        } => json!({
            "format": codebook.name(), "block": block_elems, "double": double, "tensors": tensors,
        }),
        Quantization::Int8 => json!({"format": quantization.name(), "tensors": tensors}),
    });
    let groups: Vec<Value> = groups.collect();
    if groups.is_empty() {
        Value::Null
    } else {
        groups.into()
    }
}

/// The quantized weights of a run by the `meta` data of its checkpoint, by name.
pub(crate) fn recorded(meta: &Value) -> BTreeMap<String, Quantization> {
    let groups = meta
        .get(QUANTIZED)
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let mut found = BTreeMap::new();
    for group in groups {
        let format = group["format"].as_str().unwrap_or_default();
        let codebook = [Codebook::Nf4, Codebook::Fp4]
            .into_iter()
            .find(|known| known.name() == format);
        let block = group["block"]
            .as_u64()
            .and_then(|block| u32::try_from(block).ok());
        let quantization = match (codebook, block) {
            (Some(codebook), Some(block_elems))
                if block_elems.is_power_of_two() && block_elems >= 32 =>
            {
                Quantization::FourBit {
                    codebook,
                    block_elems,
                    double: group["double"] == true,
                }
            }
            _ if format == Quantization::Int8.name() => Quantization::Int8,
            _ => continue,
        };
        let names = group["tensors"].as_array().into_iter().flatten();
        found.extend(names.filter_map(|name| Some((name.as_str()?.to_owned(), quantization))));
    }
    found
}
