//! The whole model: its parameters and its forward pass.

use super::config::MiniCpmConfig;
use super::language::decoder;
use super::projector::Resampler;
use super::vision::VisionTower;
use crate::autograd::{Tape, Var};
use crate::batch::{Batch, pack_next};
use crate::error::{ModelError, Result};
use crate::generate::CacheShape;
use crate::init::{self, Init};
use crate::lora::LanguageModules;
use crate::nn::{Decoder, DecoderBlock, LmHead};
use crate::options::ModelOptions;
use crate::processor::Normalization;
use crate::{Declared, SampleInput, Tower, VisionLanguageModel};
use engine::ParamSpec;
use kernels::Backend;

/// Modules of the decoder.
const LANGUAGE: LanguageModules = LanguageModules {
    prefix: "llm.",
    attention: &["q_proj", "k_proj", "v_proj", "o_proj"],
    mlp: &["gate_proj", "up_proj", "down_proj"],
};

/// The part of the model that a unit or parameter called `name` belongs to.
fn tower(name: &str) -> Tower {
    match name.split('.').next() {
        Some("vpm") => Tower::Vision,
        Some("llm") => Tower::Language,
        _ => Tower::Resampler,
    }
}

/// MiniCPM-V 2.6 or 4.5, or the vision and text parts of MiniCPM-o 2.6 or 4.5: configuration, parameter ids and forward
/// pass. It holds no weights.
#[derive(Debug)]
pub struct MiniCpm {
    config: MiniCpmConfig,
    pub(super) normalization: Normalization,
    declared: Declared,
    vision: VisionTower,
    resampler: Resampler,
    language: Decoder<DecoderBlock>,
}

impl MiniCpm {
    /// Builds the model and declares its parameters in units (parameters gathered together, usually one
    /// layer). No weights are read.
    ///
    /// # Errors
    /// When the embedding is tied to the head, adapter targets do not fit the model, `train` or `freeze`
    /// match nothing, or the options ask for learned keys and values (p-tuning).
    pub fn new(
        config: MiniCpmConfig,
        normalization: Normalization,
        options: ModelOptions,
    ) -> Result<Self> {
        options.refuse_ptuning()?;
        if config.tie_word_embeddings {
            return Err(ModelError::Config {
                field: "tie_word_embeddings",
                value: "true".into(),
                reason: "the family's checkpoints keep the head apart from the embedding",
            });
        }
        let (declared, (vision, resampler, language)) =
            Declared::new(options, tower, &LANGUAGE, |params| {
                let vision = VisionTower::new(params, &config.vision);
                let resampler = Resampler::new(params, &config);
                let language = Decoder::new(params, &decoder(&config))?;
                Ok((vision, resampler, language))
            })?;
        Ok(Self {
            config,
            normalization,
            declared,
            vision,
            resampler,
            language,
        })
    }

    /// The configuration that the model was built from.
    #[must_use]
    pub fn config(&self) -> &MiniCpmConfig {
        &self.config
    }
}

impl VisionLanguageModel for MiniCpm {
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
                let patches = self.vision.forward(tape, vision)?;
                Some(self.resampler.forward(tape, &patches, vision)?)
            }
            None => None,
        };
        self.language.hidden(tape, batch, features.as_ref())
    }

    fn head(&self) -> &LmHead {
        &self.language.head
    }

    /// Distributions of the reference implementations.
    fn start_values(&self, param: &ParamSpec) -> Init {
        let (fan_in, fan_out) = init::fans(param);
        let xavier = Init::xavier(fan_in, fan_out);
        match param.name.as_str() {
            "resampler.proj" => Init::Normal((fan_in as f32).powf(-0.5)),
            "resampler.attn.in_proj_weight" => xavier,
            "vpm.embeddings.position_embedding.weight"
            | "vpm.embeddings.patch_embedding.weight" => Init::Normal((fan_in as f32).powf(-0.5)),
            name if name.starts_with("vpm.") => xavier,
            // The resampler's own code writes 0.02, which is the default of the range.
            _ => Init::Normal(self.config.language.initializer_range as f32),
        }
    }
}
