//! The whole model: its parameters and its forward pass.

use super::config::Glm4vConfig;
use super::language::decoder;
use super::projector::Projector;
use crate::autograd::{Tape, Var};
use crate::batch::{Batch, pack_next};
use crate::error::Result;
use crate::eva::EvaTower;
use crate::generate::CacheShape;
use crate::init::Init;
use crate::lora::LanguageModules;
use crate::nn::{Decoder, DecoderBlock, LmHead};
use crate::options::ModelOptions;
use crate::{Declared, SampleInput, Tower, VisionLanguageModel};
use engine::ParamSpec;
use kernels::Backend;

/// Modules of the decoder.
const LANGUAGE: LanguageModules = LanguageModules {
    prefix: "transformer.encoder.layers.",
    attention: &["query_key_value", "dense"],
    mlp: &["dense_h_to_4h", "dense_4h_to_h"],
};

/// Standard deviation of random start values; `config.json` has none.
const INIT_RANGE: f32 = 0.02;

/// The part of the model that a unit or parameter called `name` belongs to.
fn tower(name: &str) -> Tower {
    let Some(module) = name.strip_prefix("transformer.vision.") else {
        return Tower::Language;
    };
    match module.split('.').next() {
        Some("patch_embedding" | "transformer") => Tower::Vision,
        _ => Tower::Resampler,
    }
}

/// GLM-4V: its configuration, parameter ids and forward pass. It holds no weights.
#[derive(Debug)]
pub struct Glm4v {
    config: Glm4vConfig,
    declared: Declared,
    vision: EvaTower,
    projector: Projector,
    language: Decoder<DecoderBlock>,
}

impl Glm4v {
    /// Builds the model and declares its parameters in units (parameters gathered together, usually one
    /// layer). No weights are read.
    ///
    /// # Errors
    /// When adapter targets do not fit the model, `train` or `freeze` match nothing, or the options ask for
    /// learned keys and values (p-tuning).
    pub fn new(config: Glm4vConfig, options: ModelOptions) -> Result<Self> {
        options.refuse_ptuning()?;
        let (declared, (vision, projector, language)) =
            Declared::new(options, tower, &LANGUAGE, |params| {
                let vision = EvaTower::new(params, "transformer.vision", &config.vision);
                let projector = Projector::new(params, &config);
                let language = Decoder::new(params, &decoder(&config))?;
                Ok((vision, projector, language))
            })?;
        Ok(Self {
            config,
            declared,
            vision,
            projector,
            language,
        })
    }

    /// The configuration that the model was built from.
    #[must_use]
    pub fn config(&self) -> &Glm4vConfig {
        &self.config
    }
}

impl VisionLanguageModel for Glm4v {
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
        pack_next(tokens, positions, self.rotary(positions, backend)?, backend)
    }

    fn cache_shape(&self) -> CacheShape {
        decoder(&self.config).cache_shape(self.dtype())
    }

    fn hidden<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Var> {
        let features = match &batch.vision {
            Some(vision) => {
                let tables = vision.tables()?;
                let (pixels, sequences) = (&vision.patches, &vision.sequences);
                let rows = self.vision.forward(tape, pixels, sequences, tables)?;
                tape.observe("vision.tower", &rows);
                Some(self.projector.forward(tape, &rows, vision)?)
            }
            None => None,
        };
        self.language.hidden(tape, batch, features.as_ref())
    }

    fn head(&self) -> &LmHead {
        &self.language.head
    }

    fn start_values(&self, _: &ParamSpec) -> Init {
        Init::Normal(INIT_RANGE)
    }
}
