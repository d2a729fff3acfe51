//! Which weights of a model are quantized: by the run, by the weight files, or by `config.json`.

use crate::config::{ConfigError, ConfigFile};
use crate::selection::Selection;
use crate::{ModelError, Result, Tower};
use engine::ModelSpec;
use kernels::Quantization;
use regex::Regex;
use std::collections::BTreeMap;
use std::path::Path;

/// Choice of the weights that are quantized. Only weights of linear layers that do not train are; embeddings, heads,
/// convolutions and the joint projections of attention in resamplers are none.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum QuantizedWeights {
    /// None.
    #[default]
    None,
    /// Those that the run selects.
    Chosen {
        /// How they are quantized.
        quantization: Quantization,
        /// The selected parts; `None` for the language model.
        modules: Option<Selection>,
    },
    /// Those that are quantized in the files, by name.
    Stored(BTreeMap<String, Quantization>),
    /// Those that `config.json` says are quantized, for a plan without weight files.
    Declared {
        /// How they are quantized.
        quantization: Quantization,
        /// Modules that are not quantized: ends of paths, or regular expressions for their beginnings.
        skip: Vec<String>,
    },
}

impl QuantizedWeights {
    /// The quantized weights that `quantization_config` in the `config.json` at `dir` declares; `None` if it declares none.
    ///
    /// # Errors
    /// [`ConfigError`] if the file cannot be read, or quantizes weights in a way that is not supported.
    pub fn declared(dir: &Path) -> Result<Option<Self>, ConfigError> {
        ConfigFile::load(dir)?.fields().quantization()
    }

    /// Quantization of the weight `name` of a linear layer in the part `tower` of the model, if it does not train.
    #[must_use]
    pub fn of(&self, name: &str, tower: Tower) -> Option<Quantization> {
        match self {
            Self::None => None,
            Self::Chosen {
                quantization,
                modules,
            } => match modules {
                Some(modules) => modules.contains(name),
                None => tower == Tower::Language,
            }
            .then_some(*quantization),
            Self::Stored(quantizations) => quantizations.get(name).copied(),
            Self::Declared { quantization, skip } => {
                let module = name.strip_suffix(".weight").unwrap_or(name);
                let skipped = skip.iter().any(|pattern| skips(pattern, module));
                (!skipped).then_some(*quantization)
            }
        }
    }

    /// Checks that no weight that is quantized in the files trains in `spec`, and that a run quantizes what it selects.
    ///
    /// # Errors
    /// [`ModelError::QuantizedTrains`], [`ModelError::NothingQuantized`] or [`ModelError::Selection`].
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        match self {
            Self::Stored(quantizations) => {
                let mut trained = spec.params.iter().filter(|param| param.trainable);
                match trained.find(|param| quantizations.contains_key(&param.name)) {
                    Some(param) => Err(ModelError::QuantizedTrains {
                        name: param.name.clone(),
                    }),
                    None => Ok(()),
                }
            }
            Self::Chosen { modules, .. } => {
                if let Some(modules) = modules {
                    modules.check(spec.params.iter().map(|param| &*param.name))?;
                }
                match spec
                    .params
                    .iter()
                    .any(|param| param.stored_quantization().is_some())
                {
                    true => Ok(()),
                    false => Err(ModelError::NothingQuantized),
                }
            }
            Self::None | Self::Declared { .. } => Ok(()),
        }
    }
}

/// Whether a module is left out by an entry of `llm_int8_skip_modules`: an expression for the beginning of its path, or
/// the path's end.
fn skips(pattern: &str, module: &str) -> bool {
    let begins = Regex::new(&format!("^(?:{pattern})")).is_ok_and(|begin| begin.is_match(module));
    begins || module.ends_with(pattern)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::Codebook;

    #[test]
    fn modules_are_skipped_as_transformers_skips_them() {
        let declared = QuantizedWeights::Declared {
            quantization: Quantization::four_bit(Codebook::Nf4, true),
            skip: ["out_proj", "vpm", "model.visual"]
                .map(str::to_owned)
                .to_vec(),
        };
        let quantized = |module: &str| {
            declared
                .of(&format!("{module}.weight"), Tower::Vision)
                .is_some()
        };
        assert!(quantized("llm.layers.0.q_proj"));
        assert!(!quantized("vpm.layers.0.q_proj"));
        assert!(!quantized("resampler.attn.out_proj"));
        assert!(!quantized("model.visual.blocks.0.qkv"));
        assert!(
            quantized("llm.vpm.q_proj"),
            "an expression is for the beginning"
        );
    }
}
