//! The whole model: its parameters, its batches and its forward pass.

use super::config::{Glm41vConfig, MERGE};
use super::language::{Block, decoder};
use super::merger::Merger;
use super::positions::{TokenPositions, mrope_angles};
use super::tables::{Glm41vTables, pixel_rows};
use super::vision::VisionTower;
use crate::autograd::{Tape, Var};
use crate::batch::{
    Batch, Splice, VisionBatch, VisionTables, check_slices, pack, pack_next, starts_of, upload,
};
use crate::data::Slice;
use crate::error::{ModelError, Result};
use crate::generate::CacheShape;
use crate::init::Init;
use crate::lora::LanguageModules;
use crate::nn::{Decoder, LmHead, Rotary, rope_frequencies, rotary_of};
use crate::ops::Sequences;
use crate::options::ModelOptions;
use crate::params::{ParamBuilder, SplitAdapters};
use crate::processor::Normalization;
use crate::{SampleInput, Tower, VisionLanguageModel};
use engine::{ModelSpec, ParamSpec};
use kernels::{Backend, RopeLayout};

/// Where the decoder's modules are.
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

/// GLM-4.1V. Holds handles, not weights.
#[derive(Debug)]
pub struct Glm41v {
    config: Glm41vConfig,
    normalization: Normalization,
    options: ModelOptions,
    spec: ModelSpec,
    split_adapters: SplitAdapters,
    vision: VisionTower,
    merger: Merger,
    language: Decoder<Block>,
}

impl Glm41v {
    /// Declares the model.
    ///
    /// # Errors
    /// When adapter targets or a selection do not fit, or learned keys and values are asked for.
    pub fn new(
        config: Glm41vConfig,
        normalization: Normalization,
        options: ModelOptions,
    ) -> Result<Self> {
        options.refuse_ptuning()?;
        let trains = |name: &str| options.trains(name, tower(name));
        let mut params = ParamBuilder::new(&trains, options.lora.as_ref(), &LANGUAGE)?;
        let vision = VisionTower::new(&mut params, &config.vision);
        let merger = Merger::new(&mut params, &config.vision);
        let language = decoder(&mut params, &config.language)?;
        let (spec, split_adapters) = params.finish_with_split()?;
        options.check(&spec)?;
        Ok(Self {
            config,
            normalization,
            options,
            spec,
            split_adapters,
            vision,
            merger,
            language,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Glm41vConfig {
        &self.config
    }

    /// Angles of tokens for the decoder's heads.
    fn rotary(&self, positions: &[Vec<i32>; 3], backend: &dyn Backend) -> Result<Rotary> {
        let language = &self.config.language;
        let frequencies = rope_frequencies(language.rotary_dim, language.rope_theta as f32);
        let angles = mrope_angles(positions, &frequencies, &language.mrope_section);
        let dtype = self.options.rotary_dtype();
        let layout = RopeLayout::Interleaved;
        rotary_of(angles, frequencies.len(), layout, dtype, backend)
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
        let slices: Vec<&Slice> = samples.iter().flat_map(|s| s.slices).collect();
        let grids: Vec<[usize; 2]> = slices.iter().map(|s| [s.rows, s.cols]).collect();
        let (vision, dtype) = (&self.config.vision, self.options.dtype);
        let patch_starts = starts_of(grids.iter().map(|[r, c]| r * c));
        // Features stand in the order of their tokens.
        let sources: Vec<i32> = (0..rows.len() as i32).collect();
        Ok(Some(VisionBatch {
            patches: pixel_rows(&slices, vision, &self.normalization, dtype, backend)?,
            sequences: Sequences::own(patch_starts, false),
            splice: Splice {
                rows: upload(backend, &rows, &[rows.len()])?,
                sources: upload(backend, &sources, &[sources.len()])?,
            },
            tables: VisionTables::Glm41v(Glm41vTables::new(vision, &grids, backend)?),
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
        let mut end_before = 0;
        for ((start, end), slice) in bounds.iter().zip(slices) {
            let [rows, cols] = [slice.rows, slice.cols];
            if rows % MERGE != 0 || cols % MERGE != 0 {
                return fail(format!("a picture of {rows} x {cols} patches"));
            }
            let features = rows * cols / (MERGE * MERGE);
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

/// Positions of a sample whose pictures were checked.
fn positions(sample: &SampleInput<'_>) -> TokenPositions {
    let pictures: Vec<(usize, [usize; 2])> = sample
        .image_bounds
        .iter()
        .zip(sample.slices)
        .map(|((start, _), slice)| (*start, [slice.rows / MERGE, slice.cols / MERGE]))
        .collect();
    TokenPositions::new(sample.input_ids.len(), &pictures)
}

impl VisionLanguageModel for Glm41v {
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
        let mut all = TokenPositions::default();
        for (i, sample) in samples.iter().enumerate() {
            self.check_pictures(i, sample)?;
            all.append(&positions(sample));
        }
        let starts = starts_of(samples.iter().map(|s| s.input_ids.len()));
        let vision = self.vision_batch(samples, &starts, backend)?;
        let rotary = self.rotary(&all.rows, backend)?;
        // A sample ends with text, whose three coordinates are one.
        let [time, ..] = all.rows;
        pack(samples, time, rotary, vision, backend)
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
