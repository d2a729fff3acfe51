//! Samples to a batch: positions in three axes, rotary angles, and images with the token rows of their features.

use super::config::MERGE;
use super::model::Glm41v;
use super::positions::{TokenPositions, mrope_angles};
use super::tables::{Glm41vTables, pixel_rows};
use crate::batch::{
    Batch, Splice, VisionBatch, check_images, check_slices, image_rows, pack, starts_of,
};
use crate::data::Slice;
use crate::error::Result;
use crate::nn::{Rotary, rope_frequencies, rotary_of};
use crate::ops::Sequences;
use crate::{SampleInput, VisionLanguageModel};
use kernels::{Backend, RopeLayout};
use std::sync::Arc;

impl Glm41v {
    pub(super) fn pack(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch> {
        let mut all = TokenPositions::default();
        for (i, sample) in samples.iter().enumerate() {
            self.check_images(i, sample)?;
            all.append(&positions(sample));
        }
        let vision = self.vision_batch(samples, backend)?;
        let rotary = self.rotary(&all.rows, backend)?;
        // A sample ends with text, whose three coordinates are one.
        let [time, ..] = all.rows;
        pack(samples, time, rotary, vision, backend)
    }

    /// Cosines and sines of the decoder's rotary position embedding for tokens at `positions` (time, row, column).
    pub(super) fn rotary(
        &self,
        positions: &[Vec<i32>; 3],
        backend: &dyn Backend,
    ) -> Result<Rotary> {
        let config = self.config();
        let frequencies = rope_frequencies(config.rotary_dim, config.language.rope_theta as f32);
        let angles = mrope_angles(positions, &frequencies, &config.mrope_section);
        let dtype = self.options().rotary_dtype();
        let layout = RopeLayout::Interleaved;
        rotary_of(angles, frequencies.len(), layout, dtype, backend)
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
        let slices: Vec<&Slice> = samples.iter().flat_map(|s| s.slices).collect();
        let grids: Vec<[usize; 2]> = slices.iter().map(|s| [s.rows, s.cols]).collect();
        let (vision, dtype) = (&self.config().vision, self.options().dtype);
        let patch_starts = starts_of(grids.iter().map(|[r, c]| r * c));
        Ok(Some(VisionBatch {
            patches: pixel_rows(&slices, vision, &self.normalization, dtype, backend)?,
            sequences: Sequences::own(patch_starts, false),
            splice: Splice::in_order(&rows, backend)?,
            tables: Arc::new(Glm41vTables::new(vision, &grids, backend)?),
        }))
    }

    fn check_images(&self, index: usize, sample: &SampleInput<'_>) -> Result<()> {
        check_images(index, sample, |slice| {
            let [rows, cols] = [slice.rows, slice.cols];
            match rows % MERGE == 0 && cols % MERGE == 0 {
                true => Ok(rows * cols / (MERGE * MERGE)),
                false => Err(format!("a picture of {rows} x {cols} patches")),
            }
        })?;
        check_slices(index, sample, self.config().vision.patch_size)
    }
}

/// Positions of a sample whose images were checked.
fn positions(sample: &SampleInput<'_>) -> TokenPositions {
    let images: Vec<(usize, [usize; 2])> = sample
        .image_bounds
        .iter()
        .zip(sample.slices)
        .map(|((start, _), slice)| (*start, [slice.rows / MERGE, slice.cols / MERGE]))
        .collect();
    TokenPositions::new(sample.input_ids.len(), &images)
}
