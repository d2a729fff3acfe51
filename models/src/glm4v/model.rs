//! The whole model: its parameters, its batches and its forward pass.

use super::config::Glm4vConfig;
use super::language::{Block, decoder};
use super::positions::token_positions;
use super::projector::Projector;
use crate::autograd::{Tape, Var};
use crate::batch::{
    Batch, Splice, VisionBatch, VisionTables, check_slices, pack, pack_next, starts_of, upload,
};
use crate::data::Slice;
use crate::error::{ModelError, Result};
use crate::eva::{EvaTower, eva_pictures};
use crate::generate::CacheShape;
use crate::init::Init;
use crate::lora::LanguageModules;
use crate::nn::{Decoder, LmHead, Rotary, RotaryTable, rope_frequencies};
use crate::options::ModelOptions;
use crate::params::{ParamBuilder, SplitAdapters};
use crate::processor::Normalization;
use crate::{SampleInput, Tower, VisionLanguageModel};
use engine::{ModelSpec, ParamSpec};
use kernels::{Backend, RopeLayout};

/// Where the decoder's modules are.
const LANGUAGE: LanguageModules = LanguageModules {
    prefix: "transformer.encoder.layers.",
    attention: &["query_key_value", "dense"],
    mlp: &["dense_h_to_4h", "dense_4h_to_h"],
};

/// Standard deviation of random start values; the configuration names none.
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

/// GLM-4V. Holds handles, not weights.
#[derive(Debug)]
pub struct Glm4v {
    config: Glm4vConfig,
    options: ModelOptions,
    spec: ModelSpec,
    split_adapters: SplitAdapters,
    vision: EvaTower,
    projector: Projector,
    language: Decoder<Block>,
}

impl Glm4v {
    /// Declares the model.
    ///
    /// # Errors
    /// When adapter targets or a selection do not fit, or learned keys and values are asked for.
    pub fn new(config: Glm4vConfig, options: ModelOptions) -> Result<Self> {
        options.refuse_ptuning()?;
        let trains = |name: &str| options.trains(name, tower(name));
        let mut params = ParamBuilder::new(&trains, options.lora.as_ref(), &LANGUAGE)?;
        let vision = EvaTower::new(&mut params, "transformer.vision", &config.vision);
        let projector = Projector::new(&mut params, &config);
        let language = decoder(&mut params, &config.language)?;
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

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Glm4vConfig {
        &self.config
    }

    /// Angles of `positions` for the decoder's heads.
    fn rotary(&self, positions: &[i32], backend: &dyn Backend) -> Result<Rotary> {
        let language = &self.config.language;
        let table = RotaryTable {
            frequencies: rope_frequencies(language.rotary_dim(), language.rope_theta as f32),
            layout: RopeLayout::Interleaved,
        };
        table.rotary(positions, self.options.rotary_dtype(), backend)
    }

    /// The pictures of the batch; `None` when there are none.
    fn vision_batch(
        &self,
        samples: &[SampleInput<'_>],
        starts: &[usize],
        backend: &dyn Backend,
    ) -> Result<Option<VisionBatch>> {
        let mut rows: Vec<i32> = Vec::new();
        for (sample, first) in samples.iter().zip(starts) {
            let bounds = sample.image_bounds.iter();
            rows.extend(
                bounds
                    .flat_map(|(s, e)| first + s..first + e)
                    .map(|r| r as i32),
            );
        }
        if rows.is_empty() {
            return Ok(None);
        }
        let (config, dtype) = (&self.config.vision, self.options.dtype);
        let slices = samples.iter().flat_map(|s| s.slices).enumerate();
        let pictures: Vec<(&Slice, usize)> = slices
            .map(|(i, slice)| (slice, i * config.patches()))
            .collect();
        let normalization = Normalization::clip();
        let eva = eva_pictures(config, true, &pictures, &normalization, dtype, backend)?;
        // Features stand in the order of their tokens.
        let sources: Vec<i32> = (0..rows.len() as i32).collect();
        Ok(Some(VisionBatch {
            patches: eva.patches,
            sequences: eva.sequences,
            splice: Splice {
                rows: upload(backend, &rows, &[rows.len()])?,
                sources: upload(backend, &sources, &[sources.len()])?,
            },
            tables: VisionTables::Eva(Box::new(eva.tables)),
        }))
    }

    fn check_pictures(&self, index: usize, sample: &SampleInput<'_>) -> Result<()> {
        let fail = |reason: String| {
            Err(ModelError::Sample {
                sample: index,
                reason,
            })
        };
        let (bounds, slices) = (sample.image_bounds, sample.slices);
        if bounds.len() != slices.len() {
            let (bounds, slices) = (bounds.len(), slices.len());
            return fail(format!("{bounds} image positions, {slices} images"));
        }
        let grid = self.config.vision.grid();
        let features = self.config.features() + 2;
        let mut end_before = 0;
        for ((start, end), slice) in bounds.iter().zip(slices) {
            let [rows, cols] = [slice.rows, slice.cols];
            if [rows, cols] != [grid; 2] {
                return fail(format!(
                    "a picture of {rows} x {cols} patches, expected {grid} x {grid}"
                ));
            }
            let inside = end_before <= *start && *end <= sample.input_ids.len();
            if start + features != *end || !inside {
                let tokens = sample.input_ids.len();
                return fail(format!(
                    "picture at {start}..{end}, expected {features} of {tokens} tokens"
                ));
            }
            end_before = *end;
        }
        check_slices(index, sample, self.config.vision.patch_size)
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
        let mut positions = Vec::new();
        for (i, sample) in samples.iter().enumerate() {
            self.check_pictures(i, sample)?;
            let tokens = sample.input_ids.len();
            positions.extend(token_positions(tokens, sample.image_bounds));
        }
        let starts = starts_of(samples.iter().map(|s| s.input_ids.len()));
        let vision = self.vision_batch(samples, &starts, backend)?;
        let rotary = self.rotary(&positions, backend)?;
        pack(samples, positions, rotary, vision, backend)
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
                let tables = vision.tables.eva()?;
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
