//! The whole model: its parameters, its batches and its forward pass.

use super::config::MiniCpmConfig;
use super::init;
use super::language::Language;
use super::positions::position_ids;
use super::processor::Normalization;
use super::resampler::Resampler;
use super::slicing::Slice;
use super::vision::VisionTower;
use crate::autograd::{Loss, Tape, Var};
use crate::batch::{Batch, VisionBatch};
use crate::error::{ModelError, Result};
use crate::generate::CacheShape;
use crate::lora::LoraConfig;
use crate::nn::Rotary;
use crate::ops::Sequences;
use crate::params::{ADAPTER_PREFIX, ParamBuilder};
use crate::selection::Selection;
use crate::{SampleInput, Tower, VisionLanguageModel};
use engine::{ModelSpec, ParamId, UnitId};
use kernels::{Backend, DType, Float, IGNORED_LABEL, RopeLayout, Shape, Tag, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// How a model is set up for a run.
#[derive(Clone, PartialEq, Debug)]
pub struct MiniCpmOptions {
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// Whether the vision tower trains. The resampler always does, except in an adapter run that
    /// does not name it.
    pub tune_vision: bool,
    /// Whether the language model trains, embeddings and head included.
    pub tune_llm: bool,
    /// Exactly what trains beside adapters, instead of the switches above.
    pub train: Option<Selection>,
    /// What stays frozen whatever else says that it trains, adapters excepted.
    pub freeze: Option<Selection>,
    /// Adapters.
    pub lora: Option<LoraConfig>,
    /// Bytes to pixel values.
    pub normalization: Normalization,
}

impl MiniCpmOptions {
    /// A full fine-tune in `dtype`.
    #[must_use]
    pub fn new(dtype: DType, normalization: Normalization) -> Self {
        Self {
            dtype,
            tune_vision: true,
            tune_llm: true,
            train: None,
            freeze: None,
            lora: None,
            normalization,
        }
    }

    /// Whether a parameter of the base trains; adapters always do.
    fn trains(&self, name: &str) -> bool {
        let chosen = match (&self.train, name.split('.').next()) {
            (Some(train), _) => train.contains(name),
            (None, Some("vpm")) => self.tune_vision,
            (None, Some("llm")) => self.tune_llm,
            (None, _) => self.lora.is_none(),
        };
        let saved = self.lora.as_ref().is_some_and(|lora| lora.saves(name));
        let frozen = self
            .freeze
            .as_ref()
            .is_some_and(|freeze| freeze.contains(name));
        (chosen || saved) && !frozen
    }
}

/// MiniCPM-V 2.6 or the vision + text path of MiniCPM-o 2.6. Holds handles, not weights.
#[derive(Debug)]
pub struct MiniCpm {
    config: MiniCpmConfig,
    options: MiniCpmOptions,
    spec: ModelSpec,
    vision: VisionTower,
    resampler: Resampler,
    language: Language,
}

impl MiniCpm {
    /// Declares the model.
    ///
    /// # Errors
    /// When the embedding is tied to the head, or adapter targets or a selection do not fit.
    pub fn new(config: MiniCpmConfig, options: MiniCpmOptions) -> Result<Self> {
        if config.language.tie_word_embeddings {
            return Err(ModelError::Config {
                field: "tie_word_embeddings",
                value: "true".into(),
                reason: "the family's checkpoints keep the head apart from the embedding",
            });
        }
        let trains = |name: &str| options.trains(name);
        let mut params = ParamBuilder::new(&trains, options.lora.as_ref(), "llm.")?;
        let vision = VisionTower::new(&mut params, &config.vision);
        let resampler = Resampler::new(&mut params, &config);
        let language = Language::new(&mut params, &config.language)?;
        let spec = params.finish()?;
        let base = spec.params.iter().map(|param| &*param.name);
        let base = base.filter(|name| !name.starts_with(ADAPTER_PREFIX));
        for selection in [&options.train, &options.freeze].into_iter().flatten() {
            selection.check(base.clone())?;
        }
        Ok(Self {
            config,
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

    /// The run's settings.
    #[must_use]
    pub fn options(&self) -> &MiniCpmOptions {
        &self.options
    }

    /// f32 logits of all rows, `[T, v]`. For comparisons on small models: training never makes them.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub fn full_logits<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        self.language.logits(tape, &hidden, None)
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

    /// Angles of `positions` for the decoder's heads.
    fn rotary(&self, positions: &[i32], backend: &dyn Backend) -> Result<Rotary> {
        let (d, theta) = (
            self.config.language.head_dim,
            self.config.language.rope_theta as f32,
        );
        let frequencies: Vec<f32> = (0..d / 2)
            .map(|i| 1.0 / theta.powf((2 * i) as f32 / d as f32))
            .collect();
        let table = |f: fn(f32) -> f32| -> Result<Tensor> {
            let angle = |p: &i32| *p as f32;
            let values: Vec<f32> = positions
                .iter()
                .flat_map(|p| frequencies.iter().map(move |w| f(angle(p) * w)))
                .map(|x| round(x, self.options.dtype))
                .collect();
            upload(backend, &values, &[positions.len(), d / 2])
        };
        Ok(Rotary {
            cos: table(f32::cos)?,
            sin: table(f32::sin)?,
            layout: RopeLayout::HalfSplit,
        })
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
        let patches = self.patches(&slices, backend)?;
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
        Ok(Some(VisionBatch {
            patches,
            position_ids: upload(backend, &ids, &[ids.len()])?,
            patch_coords: [coords(0)?, coords(1)?],
            grid: [largest(0), largest(1)],
            resample: Sequences {
                q_starts: starts_of(slices.iter().map(|_| q)),
                k_starts: patch_starts.clone(),
                causal: false,
            },
            sequences: Sequences::own(patch_starts, false),
            query_index: upload(backend, &query_index, &[query_index.len()])?,
            splice_rows: upload(backend, &splice_rows, &[splice_rows.len()])?,
            splice_sources: upload(backend, &splice_sources, &[splice_sources.len()])?,
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
            return fail(format!("{bounds} places for pictures, {slices} slices"));
        }
        let fits = |(start, end): &(usize, usize)| start + q == *end && *end <= tokens;
        if let Some((start, end)) = sample.image_bounds.iter().find(|b| !fits(b)) {
            return fail(format!(
                "picture at {start}..{end}, expected {q} of {tokens} tokens"
            ));
        }
        let side = self.config.vision.patch_size;
        let whole = |s: &&Slice| {
            s.rows * s.cols > 0 && s.patches.len() == s.rows * s.cols * 3 * side * side
        };
        match sample.slices.iter().find(|s| !whole(s)) {
            Some(s) => fail(format!(
                "a slice of {} x {} patches has {} bytes",
                s.rows,
                s.cols,
                s.patches.len()
            )),
            None => Ok(()),
        }
    }

    fn patches(&self, slices: &[&Slice], backend: &dyn Backend) -> Result<Tensor> {
        let side = self.config.vision.patch_size;
        let values: Vec<f32> = slices
            .iter()
            .flat_map(|s| {
                self.options
                    .normalization
                    .normalize_patches(&s.patches, side)
            })
            .collect();
        let inner = 3 * side * side;
        let wide = upload(backend, &values, &[values.len() / inner, inner])?;
        if self.options.dtype == DType::F32 {
            return Ok(wide);
        }
        Ok(backend.cast(&wide, self.options.dtype)?)
    }
}

impl VisionLanguageModel for MiniCpm {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn tower(&self, unit: UnitId) -> Tower {
        match self.spec.units[unit.index()].name.split('.').next() {
            Some("vpm") => Tower::Vision,
            Some("resampler") => Tower::Resampler,
            _ => Tower::Language,
        }
    }

    fn dtype(&self) -> DType {
        self.options.dtype
    }

    fn collate(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch> {
        let starts = starts_of(samples.iter().map(|s| s.input_ids.len()));
        for (i, s) in samples.iter().enumerate() {
            let labelled = s.labels.is_empty() || s.labels.len() == s.input_ids.len();
            if s.input_ids.is_empty() || !labelled {
                let (ids, labels) = (s.input_ids.len(), s.labels.len());
                return Err(ModelError::Sample {
                    sample: i,
                    reason: format!("{ids} tokens, {labels} labels"),
                });
            }
        }
        let tokens = starts.last().copied().unwrap_or(0);
        let input_ids: Vec<i32> = samples.iter().flat_map(|s| s.input_ids).copied().collect();
        let labels: Vec<i32> = samples.iter().flat_map(labels).collect();
        let positions: Vec<i32> = samples
            .iter()
            .flat_map(|s| 0..s.input_ids.len() as i32)
            .collect();
        let last_rows: Vec<i32> = starts[1..].iter().map(|end| *end as i32 - 1).collect();
        Ok(Batch {
            input_ids: upload(backend, &input_ids, &[tokens])?,
            labels: upload(backend, &labels, &[tokens])?,
            supervised: labels.iter().filter(|l| **l != IGNORED_LABEL).count(),
            rotary: self.rotary(&positions, backend)?,
            positions: positions.into(),
            last_rows: upload(backend, &last_rows, &[last_rows.len()])?,
            vision: self.vision_batch(samples, &starts, backend)?,
            sequences: Sequences::own(starts, true),
            cache: None,
        })
    }

    fn collate_next(
        &self,
        tokens: &[i32],
        positions: &[i32],
        backend: &dyn Backend,
    ) -> Result<Batch> {
        let count = tokens.len();
        let rows: Vec<i32> = (0..count as i32).collect();
        Ok(Batch {
            input_ids: upload(backend, tokens, &[count])?,
            labels: upload(backend, &vec![IGNORED_LABEL; count], &[count])?,
            supervised: 0,
            rotary: self.rotary(positions, backend)?,
            positions: positions.into(),
            last_rows: upload(backend, &rows, &[count])?,
            vision: None,
            sequences: Sequences::own((0..=count).collect(), true),
            cache: None,
        })
    }

    fn cache_shape(&self) -> CacheShape {
        let language = &self.config.language;
        CacheShape {
            layers: language.num_layers,
            kv_heads: language.num_kv_heads,
            head_dim: language.head_dim,
            dtype: self.options.dtype,
        }
    }

    fn forward<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Loss> {
        let hidden = self.hidden(tape, batch)?;
        self.language.loss(tape, batch, &hidden)
    }

    fn next_token_logits<'m>(&'m self, tape: &Tape<'_, 'm>, batch: &'m Batch) -> Result<Tensor> {
        let hidden = self.hidden(tape, batch)?;
        self.language.logits(tape, &hidden, Some(&batch.last_rows))
    }

    fn init(&self, id: ParamId, seed: u64, elements: Range<usize>, out: &mut [f32]) {
        let param = &self.spec.params[id.index()];
        let std = self.config.language.initializer_range as f32;
        init::fill(param, std, seed, elements, out);
    }
}

/// `0`, then the running sum of `lengths`.
fn starts_of(lengths: impl Iterator<Item = usize>) -> Arc<[usize]> {
    let mut sum = 0;
    let running = lengths.map(|n| {
        sum += n;
        sum
    });
    std::iter::once(0).chain(running).collect()
}

/// The labels of a sample, all ignored when it has none.
fn labels<'a>(sample: &SampleInput<'a>) -> impl Iterator<Item = i32> + use<'a> {
    let missing = sample.input_ids.len() - sample.labels.len();
    let none = std::iter::repeat_n(IGNORED_LABEL, missing);
    sample.labels.iter().copied().chain(none)
}

/// Row (axis 0) or column (axis 1) of every patch of a slice, row-major.
fn axis_coords([rows, cols]: [usize; 2], axis: usize) -> impl Iterator<Item = i32> {
    (0..rows * cols).map(move |i| (if axis == 0 { i / cols } else { i % cols }) as i32)
}

/// `x` as the compute dtype represents it.
fn round(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => Float::to_f32(<half::bf16 as Float>::from_f32(x)),
        DType::F16 => Float::to_f32(<half::f16 as Float>::from_f32(x)),
        _ => x,
    }
}

fn upload<T: kernels::Element>(
    backend: &dyn Backend,
    values: &[T],
    shape: &[usize],
) -> Result<Tensor> {
    let bytes = bytemuck::cast_slice(values);
    Ok(backend.upload(bytes, Shape::new(shape), T::DTYPE, Tag::Activations)?)
}
