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
use crate::params::{ParamBuilder, SplitAdapters};
use crate::{SampleInput, Tower, VisionLanguageModel};
use engine::{ModelSpec, ParamSpec};
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
    options: ModelOptions,
    spec: ModelSpec,
    split_adapters: SplitAdapters,
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
        let trains = |name: &str| options.trains(name, tower(name));
        let packing = |name: &str| options.packed.of(name, tower(name));
        let mut params =
            ParamBuilder::new(&trains, options.lora.as_ref(), &LANGUAGE)?.packing(&packing);
        let vision = EvaTower::new(&mut params, "transformer.vision", &config.vision);
        let projector = Projector::new(&mut params, &config);
        let language = Decoder::new(&mut params, &decoder(&config.language))?;
        let (spec, split_adapters) = params.finish_with_split()?;
        options.check(&spec)?;
        Ok(Self {
            config,
            options,
            spec,
            split_adapters,
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
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn tower_of(&self, name: &str) -> Tower {
        tower(name)
    }

    fn split_adapters(&self) -> &SplitAdapters {
        &self.split_adapters
    }

    fn options(&self) -> &ModelOptions {
        &self.options
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
        let language = &self.config.language;
        CacheShape {
            layers: language.num_layers,
            kv_heads: language.num_kv_heads,
            head_dim: language.head_dim,
            dtype: self.options.dtype,
            prefix_tokens: 0,
            cross: None,
        }
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
