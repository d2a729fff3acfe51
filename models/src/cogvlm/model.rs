//! The whole model: its parameters and its forward pass.

use super::config::{CogConfig, Edition};
use super::cross_vision::CrossVision;
use super::language::Language;
use super::projector::Projector;
use super::tables::{CogAgentTables, eva_tables};
use crate::autograd::{Tape, Var};
use crate::batch::Batch;
use crate::error::Result;
use crate::eva::EvaTower;
use crate::generate::{CacheShape, CrossCacheShape};
use crate::init::Init;
use crate::lora::LanguageModules;
use crate::nn::LmHead;
use crate::options::ModelOptions;
use crate::processor::Normalization;
use crate::{Declared, SampleInput, Tower, VisionLanguageModel};
use engine::ParamSpec;
use kernels::Backend;

const ATTENTION: &[&str] = &[
    "language_expert_query_key_value",
    "language_expert_dense",
    "vision_expert_query_key_value",
    "vision_expert_dense",
];

/// Names of the linear layers of CogAgent's attention: those of `ATTENTION` and those of cross-attention.
const AGENT_ATTENTION: &[&str] = &[
    "language_expert_query_key_value",
    "language_expert_dense",
    "vision_expert_query_key_value",
    "vision_expert_dense",
    "cross_attn.query",
    "cross_attn.key_value",
    "cross_attn.dense",
];

/// Names of the decoder's linear layers, for adapters.
fn language_modules(edition: Edition) -> LanguageModules {
    LanguageModules {
        prefix: "model.layers.",
        attention: match edition {
            Edition::CogAgent => AGENT_ATTENTION,
            Edition::CogVlm | Edition::CogVlm2 => ATTENTION,
        },
        mlp: &["gate_proj", "up_proj", "down_proj"],
    }
}

/// The part of the model that a unit or parameter called `name` belongs to.
fn tower(name: &str) -> Tower {
    let tower = ["model.vision.transformer.", "model.vision.patch_embedding"];
    if tower.iter().any(|prefix| name.starts_with(prefix)) {
        return Tower::Vision;
    }
    match name {
        "model.cross_vision.pos_embed" => Tower::Resampler,
        _ if name.starts_with("model.cross_vision.") => Tower::Vision,
        _ if name.starts_with("model.vision.") => Tower::Resampler,
        _ => Tower::Language,
    }
}

/// CogVLM, CogAgent or CogVLM2: its configuration, parameter ids and forward pass. It holds no weights.
#[derive(Debug)]
pub struct CogVlm {
    config: CogConfig,
    pub(super) normalization: Normalization,
    declared: Declared,
    vision: EvaTower,
    projector: Projector,
    cross_vision: Option<CrossVision>,
    language: Language,
}

impl CogVlm {
    /// Builds the model and declares its parameters in units (parameters gathered together, usually one
    /// layer). No weights are read.
    ///
    /// # Errors
    /// When adapter targets do not fit the model, or `train` or `freeze` match nothing.
    pub fn new(config: CogConfig, options: ModelOptions) -> Result<Self> {
        let modules = language_modules(config.edition);
        let prefix = options.ptuning_tokens;
        let (declared, (vision, projector, cross_vision, language)) =
            Declared::new(options, tower, &modules, |params| {
                let vision = EvaTower::new(params, "model.vision", &config.vision);
                let projector = Projector::new(params, &config);
                let cross = config.cross.as_ref();
                let cross = cross.map(|cross| CrossVision::new(params, cross));
                let language = Language::new(params, &config, prefix)?;
                Ok((vision, projector, cross, language))
            })?;
        Ok(Self {
            config,
            normalization: Normalization::clip(),
            declared,
            vision,
            projector,
            cross_vision,
            language,
        })
    }

    /// The configuration that the model was built from.
    #[must_use]
    pub fn config(&self) -> &CogConfig {
        &self.config
    }
}

impl VisionLanguageModel for CogVlm {
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
        self.pack_next(tokens, positions, backend)
    }

    fn cache_shape(&self) -> CacheShape {
        let language = &self.config.language;
        CacheShape {
            layers: language.num_layers,
            kv_heads: language.num_kv_heads,
            head_dim: language.head_dim,
            dtype: self.dtype(),
            prefix_tokens: self.options().ptuning_tokens,
            cross: self.config.cross.as_ref().map(|cross| CrossCacheShape {
                features: cross.patches(),
                width: cross.width,
            }),
        }
    }

    fn hidden<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Var> {
        let Some(vision) = &batch.vision else {
            return self.language.hidden(tape, batch, None, None);
        };
        let (pixels, sequences) = (&vision.patches, &vision.sequences);
        let rows = self
            .vision
            .forward(tape, pixels, sequences, eva_tables(vision)?)?;
        let features = self.projector.forward(tape, &rows, vision)?;
        let cross = match &self.cross_vision {
            Some(tower) => {
                let tables = vision.tables::<CogAgentTables>()?;
                Some(tower.forward(tape, &tables.cross)?)
            }
            None => None,
        };
        self.language
            .hidden(tape, batch, Some(&features), cross.as_ref())
    }

    fn head(&self) -> &LmHead {
        &self.language.head
    }

    /// Distributions of the published code. Rows around and positions after an image begin at zero.
    fn start_values(&self, param: &ParamSpec) -> Init {
        match param.name.rsplit('.').next() {
            Some("boi" | "eoi" | "cls_embedding" | "cls_token") => Init::Constant(0.0),
            Some("prefix") => Init::Normal(0.01),
            _ => Init::Normal(self.config.language.initializer_range as f32),
        }
    }
}
