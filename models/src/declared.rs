//! What every model declares: its units and parameters under the settings of a run.

use crate::Tower;
use crate::error::Result;
use crate::lora::LanguageModules;
use crate::options::ModelOptions;
use crate::params::{ParamBuilder, SplitAdapters, is_added};
use engine::ModelSpec;

/// Units and parameters of a model, the settings of the run, and the part of the model that each name belongs to.
#[derive(Debug)]
pub struct Declared {
    pub(crate) options: ModelOptions,
    pub(crate) spec: ModelSpec,
    pub(crate) split_adapters: SplitAdapters,
    pub(crate) tower: fn(&str) -> Tower,
}

impl Declared {
    /// Declares a model's parameters by `layers`, whose result is returned beside them. `modules` names the linear
    /// layers of the decoder, and `tower` the part that a parameter or unit belongs to.
    ///
    /// # Errors
    /// Those of `layers`. When adapter targets do not fit the model, or `train` or `freeze` match nothing.
    pub(crate) fn new<T>(
        options: ModelOptions,
        tower: fn(&str) -> Tower,
        modules: &LanguageModules,
        layers: impl FnOnce(&mut ParamBuilder<'_>) -> Result<T>,
    ) -> Result<(Self, T)> {
        let trains = |name: &str| is_added(name) || options.trains(name, tower(name));
        let quantization = |name: &str| options.quantized.of(name, tower(name));
        let builder = ParamBuilder::new(&trains, options.lora.as_ref(), modules)?;
        let mut params = builder.quantization(&quantization);
        let layers = layers(&mut params)?;
        let (spec, split_adapters) = params.finish_with_split()?;
        options.check(&spec)?;
        let declared = Self {
            options,
            spec,
            split_adapters,
            tower,
        };
        Ok((declared, layers))
    }
}
