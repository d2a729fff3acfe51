//! The whole model: its parameters, its batches and its forward pass.

use super::config::MiniCpmConfig;
use super::language::decoder;
use super::positions::position_ids;
use super::resampler::Resampler;
use super::vision::VisionTower;
use crate::autograd::{Tape, Var};
use crate::batch::{
    Batch, MiniCpmTables, Splice, VisionBatch, VisionTables, check_slices, pack, pack_next,
    pixel_values, starts_of, upload,
};
use crate::data::Slice;
use crate::error::{ModelError, Result};
use crate::generate::CacheShape;
use crate::init::{self, Init};
use crate::lora::LanguageModules;
use crate::nn::{Decoder, DecoderBlock, LmHead, Rotary, RotaryTable, rope_frequencies};
use crate::ops::Sequences;
use crate::options::ModelOptions;
use crate::params::ParamBuilder;
use crate::processor::Normalization;
use crate::{SampleInput, Tower, VisionLanguageModel};
use engine::{ModelSpec, ParamSpec};
use kernels::{Backend, RopeLayout, Tensor};

/// Where the decoder's modules are.
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

/// MiniCPM-V 2.6 or the vision + text path of MiniCPM-o 2.6. Holds handles, not weights.
#[derive(Debug)]
pub struct MiniCpm {
    config: MiniCpmConfig,
    normalization: Normalization,
    options: ModelOptions,
    spec: ModelSpec,
    vision: VisionTower,
    resampler: Resampler,
    language: Decoder<DecoderBlock>,
}

impl MiniCpm {
    /// Declares the model.
    ///
    /// # Errors
    /// When the embedding is tied to the head, or adapter targets or a selection do not fit.
    pub fn new(
        config: MiniCpmConfig,
        normalization: Normalization,
        options: ModelOptions,
    ) -> Result<Self> {
        options.refuse_ptuning()?;
        if config.language.tie_word_embeddings {
            return Err(ModelError::Config {
                field: "tie_word_embeddings",
                value: "true".into(),
                reason: "the family's checkpoints keep the head apart from the embedding",
            });
        }
        let trains = |name: &str| options.trains(name, tower(name));
        let mut params = ParamBuilder::new(&trains, options.lora.as_ref(), &LANGUAGE)?;
        let vision = VisionTower::new(&mut params, &config.vision);
        let resampler = Resampler::new(&mut params, &config);
        let language = decoder(&mut params, &config.language)?;
        let spec = params.finish()?;
        options.check(&spec)?;
        Ok(Self {
            config,
            normalization,
            options,
            spec,
            vision,
            resampler,
            language,
        })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &MiniCpmConfig {
        &self.config
    }

    /// Angles of `positions` for the decoder's heads.
    fn rotary(&self, positions: &[i32], backend: &dyn Backend) -> Result<Rotary> {
        let language = &self.config.language;
        let table = RotaryTable {
            frequencies: rope_frequencies(language.head_dim, language.rope_theta as f32),
            layout: RopeLayout::HalfSplit,
        };
        table.rotary(positions, self.options.dtype, backend)
    }

    /// The pictures of the batch; `None` when no token row is replaced.
    fn vision_batch(
        &self,
        samples: &[SampleInput<'_>],
        starts: &[usize],
        backend: &dyn Backend,
    ) -> Result<Option<VisionBatch>> {
        let q = self.config.query_num;
        let (mut splice_rows, mut splice_sources) = (Vec::new(), Vec::new());
        let mut slices: Vec<&Slice> = Vec::new();
        for (i, sample) in samples.iter().enumerate() {
            self.check_pictures(i, sample)?;
            for (k, (start, end)) in sample.image_bounds.iter().enumerate() {
                let source = (slices.len() + k) * q;
                splice_rows.extend((starts[i] + start..starts[i] + end).map(|r| r as i32));
                splice_sources.extend((source..source + q).map(|r| r as i32));
            }
            slices.extend(sample.slices);
        }
        if splice_rows.is_empty() {
            return Ok(None);
        }
        let patches = pixel_values(
            &slices,
            self.config.vision.patch_size,
            &self.normalization,
            self.options.dtype,
            backend,
        )?;
        let grids: Vec<[usize; 2]> = slices.iter().map(|s| [s.rows, s.cols]).collect();
        let patch_starts = starts_of(grids.iter().map(|[r, c]| r * c));
        let side = self.config.vision.grid_side;
        let ids: Vec<i32> = grids
            .iter()
            .flat_map(|[rows, cols]| position_ids(*rows, *cols, side))
            .collect();
        let coords = |axis: usize| -> Result<Tensor> {
            let all: Vec<i32> = grids.iter().flat_map(|g| axis_coords(*g, axis)).collect();
            upload(backend, &all, &[all.len()])
        };
        let query_index: Vec<i32> = (0..slices.len()).flat_map(|_| 0..q as i32).collect();
        let largest = |axis: usize| grids.iter().map(|g| g[axis]).max().unwrap_or(1);
        let tables = MiniCpmTables {
            position_ids: upload(backend, &ids, &[ids.len()])?,
            patch_coords: [coords(0)?, coords(1)?],
            grid: [largest(0), largest(1)],
            resample: Sequences {
                q_starts: starts_of(slices.iter().map(|_| q)),
                k_starts: patch_starts.clone(),
                causal: false,
            },
            query_index: upload(backend, &query_index, &[query_index.len()])?,
        };
        Ok(Some(VisionBatch {
            patches,
            sequences: Sequences::own(patch_starts, false),
            splice: Splice {
                rows: upload(backend, &splice_rows, &[splice_rows.len()])?,
                sources: upload(backend, &splice_sources, &[splice_sources.len()])?,
            },
            tables: VisionTables::MiniCpm(tables),
        }))
    }

    fn check_pictures(&self, index: usize, sample: &SampleInput<'_>) -> Result<()> {
        let fail = |reason: String| {
            Err(ModelError::Sample {
                sample: index,
                reason,
            })
        };
        let (tokens, q) = (sample.input_ids.len(), self.config.query_num);
        if sample.image_bounds.len() > sample.slices.len() {
            let (bounds, slices) = (sample.image_bounds.len(), sample.slices.len());
            return fail(format!("{bounds} image positions, {slices} slices"));
        }
        let fits = |(start, end): &(usize, usize)| start + q == *end && *end <= tokens;
        if let Some((start, end)) = sample.image_bounds.iter().find(|b| !fits(b)) {
            return fail(format!(
                "picture at {start}..{end}, expected {q} of {tokens} tokens"
            ));
        }
        check_slices(index, sample, self.config.vision.patch_size)
    }
}

impl VisionLanguageModel for MiniCpm {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn tower_of(&self, name: &str) -> Tower {
        tower(name)
    }

    fn options(&self) -> &ModelOptions {
        &self.options
    }

    fn collate(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch> {
        let starts = starts_of(samples.iter().map(|s| s.input_ids.len()));
        let positions: Vec<i32> = samples
            .iter()
            .flat_map(|s| 0..s.input_ids.len() as i32)
            .collect();
        let rotary = self.rotary(&positions, backend)?;
        let vision = self.vision_batch(samples, &starts, backend)?;
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

    /// As the reference implementations draw.
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

/// Row (axis 0) or column (axis 1) of every patch of a slice, row-major.
fn axis_coords([rows, cols]: [usize; 2], axis: usize) -> impl Iterator<Item = i32> {
    (0..rows * cols).map(move |i| (if axis == 0 { i / cols } else { i % cols }) as i32)
}
