//! Samples to a batch: positions, rotary angles, and images with the token rows of their features.

use super::model::Glm4v;
use super::positions::token_positions;
use crate::batch::{Batch, Splice, VisionBatch, check_images, check_slices, image_rows, pack};
use crate::data::Slice;
use crate::error::Result;
use crate::eva::eva_images;
use crate::nn::{Rotary, RotaryTable, rope_frequencies};
use crate::processor::Normalization;
use crate::{SampleInput, VisionLanguageModel};
use kernels::Backend;
use std::sync::Arc;

impl Glm4v {
    pub(super) fn pack(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch> {
        let mut positions = Vec::new();
        for (i, sample) in samples.iter().enumerate() {
            self.check_images(i, sample)?;
            let tokens = sample.input_ids.len();
            positions.extend(token_positions(tokens, sample.image_bounds));
        }
        let vision = self.vision_batch(samples, backend)?;
        let rotary = self.rotary(&positions, backend)?;
        pack(samples, positions, rotary, vision, backend)
    }

    /// Cosines and sines of the decoder's rotary position embedding for tokens at `positions`.
    pub(super) fn rotary(&self, positions: &[i32], backend: &dyn Backend) -> Result<Rotary> {
        let config = self.config();
        let table = RotaryTable {
            frequencies: rope_frequencies(config.rotary_dim(), config.language.rope_theta as f32),
            layout: config.rope_layout,
        };
        table.rotary(positions, self.options().rotary_dtype(), backend)
    }

    /// Packs the images of the batch; `None` if it has none.
    fn vision_batch(
        &self,
        samples: &[SampleInput<'_>],
        backend: &dyn Backend,
    ) -> Result<Option<VisionBatch>> {
        let rows = image_rows(samples);
        if rows.is_empty() {
            return Ok(None);
        }
        let (config, dtype) = (&self.config().vision, self.options().dtype);
        let slices = samples.iter().flat_map(|s| s.slices).enumerate();
        let images: Vec<(&Slice, usize)> = slices
            .map(|(i, slice)| (slice, i * config.patches()))
            .collect();
        let normalization = Normalization::clip();
        let eva = eva_images(config, true, &images, &normalization, dtype, backend)?;
        Ok(Some(VisionBatch {
            patches: eva.patches,
            sequences: eva.sequences,
            splice: Splice::in_order(&rows, backend)?,
            tables: Arc::new(eva.tables),
        }))
    }

    fn check_images(&self, index: usize, sample: &SampleInput<'_>) -> Result<()> {
        let config = self.config();
        let grid = config.vision.grid();
        check_images(index, sample, |slice| match [slice.rows, slice.cols] {
            [rows, cols] if [rows, cols] != [grid; 2] => Err(format!(
                "a picture of {rows} x {cols} patches, expected {grid} x {grid}"
            )),
            _ => Ok(config.features() + 2),
        })?;
        check_slices(index, sample, config.vision.patch_size)
    }
}
