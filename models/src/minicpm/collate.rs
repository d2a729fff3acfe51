//! Samples to a batch: positions, rotary angles, and image slices with the token rows of their features.

use super::model::MiniCpm;
use super::tables::{MiniCpmTables, joins};
use crate::batch::{
    Batch, Splice, VisionBatch, check_slices, pack, pixel_values, starts_of, upload,
};
use crate::data::Slice;
use crate::error::{ModelError, Result};
use crate::nn::{Rotary, RotaryTable, rope_frequencies};
use crate::ops::Sequences;
use crate::{SampleInput, VisionLanguageModel};
use kernels::{Backend, RopeLayout};
use std::sync::Arc;

impl MiniCpm {
    pub(super) fn pack(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch> {
        let positions: Vec<i32> = samples
            .iter()
            .flat_map(|s| 0..s.input_ids.len() as i32)
            .collect();
        let rotary = self.rotary(&positions, backend)?;
        let vision = self.vision_batch(samples, backend)?;
        pack(samples, positions, rotary, vision, backend)
    }

    /// Cosines and sines of the decoder's rotary position embedding for tokens at `positions`.
    pub(super) fn rotary(&self, positions: &[i32], backend: &dyn Backend) -> Result<Rotary> {
        let (config, language) = (self.config(), &self.config().language);
        let mut frequencies = rope_frequencies(language.head_dim, language.rope_theta as f32);
        if let Some(long) = &config.long_rope {
            let tokens = positions.iter().max().map_or(0, |last| *last as usize + 1);
            if long.most_tokens.is_some_and(|most| tokens > most) {
                return Err(ModelError::Config {
                    field: "rope_scaling.original_max_position_embeddings",
                    value: long.most_tokens.unwrap_or_default().to_string(),
                    reason: "a sample has more tokens, and its positions would have other factors (long_factor)",
                });
            }
            for (frequency, factor) in frequencies.iter_mut().zip(&long.factors) {
                *frequency /= *factor as f32;
            }
        }
        let table = RotaryTable {
            frequencies,
            layout: RopeLayout::HalfSplit,
        };
        table.rotary(positions, self.options().dtype, backend)
    }

    /// Packs the images of the batch; `None` when no token row is replaced.
    fn vision_batch(
        &self,
        samples: &[SampleInput<'_>],
        backend: &dyn Backend,
    ) -> Result<Option<VisionBatch>> {
        let config = self.config();
        let q = config.query_num;
        let starts = starts_of(samples.iter().map(|s| s.input_ids.len()));
        let (mut splice_rows, mut splice_sources) = (Vec::new(), Vec::new());
        let mut slices: Vec<&Slice> = Vec::new();
        let mut blocks = 0;
        for (i, sample) in samples.iter().enumerate() {
            self.check_images(i, sample)?;
            for (k, (start, end)) in sample.image_bounds.iter().enumerate() {
                let source = (blocks + k) * q;
                splice_rows.extend((starts[i] + start..starts[i] + end).map(|r| r as i32));
                splice_sources.extend((source..source + q).map(|r| r as i32));
            }
            slices.extend(sample.slices);
            blocks += block_count(sample);
        }
        if splice_rows.is_empty() {
            return Ok(None);
        }
        let patches = pixel_values(
            &slices,
            config.vision.patch_size,
            &self.normalization,
            self.options().dtype,
            backend,
        )?;
        let tables = MiniCpmTables::new(config, &slices, backend)?;
        let patch_starts = starts_of(slices.iter().map(|s| s.rows * s.cols));
        Ok(Some(VisionBatch {
            patches,
            sequences: Sequences::own(patch_starts, false),
            splice: Splice {
                rows: upload(backend, &splice_rows, &[splice_rows.len()])?,
                sources: upload(backend, &splice_sources, &[splice_sources.len()])?,
            },
            tables: Arc::new(tables),
        }))
    }

    fn check_images(&self, index: usize, sample: &SampleInput<'_>) -> Result<()> {
        let fail = |reason: String| {
            Err(ModelError::Sample {
                sample: index,
                reason,
            })
        };
        let (tokens, q) = (sample.input_ids.len(), self.config().query_num);
        let (bounds, blocks) = (sample.image_bounds.len(), block_count(sample));
        if bounds > blocks {
            return fail(format!("{bounds} image positions, {blocks} slices"));
        }
        let fits = |(start, end): &(usize, usize)| start + q == *end && *end <= tokens;
        if let Some((start, end)) = sample.image_bounds.iter().find(|b| !fits(b)) {
            return fail(format!(
                "picture at {start}..{end}, expected {q} of {tokens} tokens"
            ));
        }
        check_slices(index, sample, self.config().vision.patch_size)
    }
}

/// Number of blocks of features of a sample's slices.
fn block_count(sample: &SampleInput<'_>) -> usize {
    sample.slices.iter().filter(|slice| !joins(slice)).count()
}
