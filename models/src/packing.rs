//! Which weights of a model are packed: by the run, by the weight files, or by `config.json`.

use crate::config::{ConfigError, ConfigFile};
use crate::selection::Selection;
use crate::{ModelError, Result, Tower};
use engine::ModelSpec;
use kernels::Packing;
use regex::Regex;
use std::collections::BTreeMap;
use std::path::Path;

/// Choice of the weights that are packed. Only weights of linear layers that do not train are; embeddings, heads,
/// convolutions and the joint projections of attention in resamplers are none.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum PackedWeights {
    /// None.
    #[default]
    None,
    /// Those that the run selects.
    Chosen {
        /// How they are packed.
        packing: Packing,
        /// The selected parts; `None` for the language model.
        modules: Option<Selection>,
    },
    /// Those that are packed in the files, by name.
    Stored(BTreeMap<String, Packing>),
    /// Those that `config.json` says are packed, for a plan without weight files.
    Declared {
        /// How they are packed.
        packing: Packing,
        /// Modules that are not packed: ends of paths, or regular expressions for their beginnings.
        skip: Vec<String>,
    },
}

impl PackedWeights {
    /// The packed weights that `quantization_config` in the `config.json` at `dir` declares; `None` if it declares none.
    ///
    /// # Errors
    /// [`ConfigError`] if the file cannot be read, or packs weights in a way that is not supported.
    pub fn declared(dir: &Path) -> Result<Option<Self>, ConfigError> {
        ConfigFile::load(dir)?.fields().quantization()
    }

    /// Packing of the weight `name` of a linear layer in the part `tower` of the model, if it does not train.
    #[must_use]
    pub fn of(&self, name: &str, tower: Tower) -> Option<Packing> {
        match self {
            Self::None => None,
            Self::Chosen { packing, modules } => match modules {
                Some(modules) => modules.contains(name),
                None => tower == Tower::Language,
            }
            .then_some(*packing),
            Self::Stored(packings) => packings.get(name).copied(),
            Self::Declared { packing, skip } => {
                let module = name.strip_suffix(".weight").unwrap_or(name);
                let skipped = skip.iter().any(|pattern| skips(pattern, module));
                (!skipped).then_some(*packing)
            }
        }
    }

    /// Checks that no weight that is packed in the files trains in `spec`, and that a run packs what it selects.
    ///
    /// # Errors
    /// [`ModelError::PackedTrains`], [`ModelError::NothingPacked`] or [`ModelError::Selection`].
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        match self {
            Self::Stored(packings) => {
                let mut trained = spec.params.iter().filter(|param| param.trainable);
                match trained.find(|param| packings.contains_key(&param.name)) {
                    Some(param) => Err(ModelError::PackedTrains {
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
                    .any(|param| param.stored_packing().is_some())
                {
                    true => Ok(()),
                    false => Err(ModelError::NothingPacked),
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
        let declared = PackedWeights::Declared {
            packing: Packing::four_bit(Codebook::Nf4, true),
            skip: ["out_proj", "vpm", "model.visual"]
                .map(str::to_owned)
                .to_vec(),
        };
        let packed = |module: &str| {
            declared
                .of(&format!("{module}.weight"), Tower::Vision)
                .is_some()
        };
        assert!(packed("llm.layers.0.q_proj"));
        assert!(!packed("vpm.layers.0.q_proj"));
        assert!(!packed("resampler.attn.out_proj"));
        assert!(!packed("model.visual.blocks.0.qkv"));
        assert!(
            packed("llm.vpm.q_proj"),
            "an expression is for the beginning"
        );
    }
}
