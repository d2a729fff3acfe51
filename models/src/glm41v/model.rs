//! The whole model: its parameters and its forward pass.

use super::config::Glm41vConfig;
use super::language::decoder;
use super::projector::Merger;
use super::vision::VisionTower;
use crate::autograd::{Tape, Var};
use crate::batch::{Batch, pack_next};
use crate::error::Result;
use crate::generate::CacheShape;
use crate::init::Init;
use crate::lora::LanguageModules;
use crate::nn::{Decoder, DecoderBlock, LmHead};
use crate::options::ModelOptions;
use crate::processor::Normalization;
use crate::{Declared, SampleInput, Tower, VisionLanguageModel};
use engine::ParamSpec;
use kernels::Backend;

/// Modules of the decoder.
const LANGUAGE: LanguageModules = LanguageModules {
    prefix: "model.language_model.layers.",
    attention: &["q_proj", "k_proj", "v_proj", "o_proj"],
    mlp: &["gate_up_proj", "down_proj"],
};

/// The part of the model that a unit or parameter called `name` belongs to.
fn tower(name: &str) -> Tower {
    let Some(module) = name.strip_prefix("model.visual.") else {
        return Tower::Language;
    };
    match module.split('.').next() {
        Some("downsample" | "merger") => Tower::Resampler,
        _ => Tower::Vision,
    }
}

/// GLM-4.1V: its configuration, parameter ids and forward pass. It holds no weights.
#[derive(Debug)]
pub struct Glm41v {
    config: Glm41vConfig,
    pub(super) normalization: Normalization,
    declared: Declared,
    vision: VisionTower,
    merger: Merger,
    language: Decoder<DecoderBlock>,
}

impl Glm41v {
    /// Builds the model and declares its parameters in units (parameters gathered together, usually one
    /// layer). No weights are read.
    ///
    /// # Errors
    /// When adapter targets do not fit the model, `train` or `freeze` match nothing, or the options ask for
    /// learned keys and values (p-tuning).
    pub fn new(
        config: Glm41vConfig,
        normalization: Normalization,
        options: ModelOptions,
    ) -> Result<Self> {
        options.refuse_ptuning()?;
        let (declared, (vision, merger, language)) =
            Declared::new(options, tower, &LANGUAGE, |params| {
                let vision = VisionTower::new(params, &config.vision);
                let merger = Merger::new(params, &config.vision);
                let language = Decoder::new(params, &decoder(&config))?;
                Ok((vision, merger, language))
            })?;
        Ok(Self {
            config,
            normalization,
            declared,
            vision,
            merger,
            language,
        })
    }

    /// The configuration that the model was built from.
    #[must_use]
    pub fn config(&self) -> &Glm41vConfig {
        &self.config
    }
}

impl VisionLanguageModel for Glm41v {
    fn declared(&self) -> &Declared {
        &self.declared
    }

    fn collate(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch> {
        self.pack(samples, backend)
    }

    fn collate_next(
        &self,
        tokens: &[i32],
        positions: &[i32],
        backend: &dyn Backend,
    ) -> Result<Batch> {
        let rows = [(); 3].map(|()| positions.to_vec());
        pack_next(tokens, positions, self.rotary(&rows, backend)?, backend)
    }

    fn cache_shape(&self) -> CacheShape {
        decoder(&self.config).cache_shape(self.dtype())
    }

    fn hidden<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Var> {
        let features = match &batch.vision {
            Some(vision) => {
                let patches = self.vision.forward(tape, vision)?;
                Some(self.merger.forward(tape, &patches, vision)?)
            }
            None => None,
        };
        self.language.hidden(tape, batch, features.as_ref())
    }

    fn head(&self) -> &LmHead {
        &self.language.head
    }

    fn start_values(&self, _: &ParamSpec) -> Init {
        Init::Normal(self.config.language.initializer_range as f32)
    }
}
