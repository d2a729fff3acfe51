//! Samples to a batch: images with the token rows of their features, row groups of the experts, and rows that attend to
//! features.

use super::config::CogConfig;
use super::cross_vision::CrossImages;
use super::model::CogVlm;
use super::positions::{position_ids, token_types, vision_rows};
use super::rope::rotary;
use super::tables::CogAgentTables;
use crate::batch::{
    Batch, CrossRows, Splice, VisionBatch, VisionTables, check_slices, image_rows, pack, pack_next,
    upload,
};
use crate::data::Slice;
use crate::error::{ModelError, Result};
use crate::eva::{EvaImages, eva_images};
use crate::nn::{PrefixTables, Rotary};
use crate::ops::RowGroups;
use crate::{SampleInput, VisionLanguageModel, cogvlm::config::Edition};
use kernels::{Backend, Tensor};
use std::sync::Arc;

/// An image's slices, each with the number of patches before it in the batch.
type Image<'a> = Vec<(&'a Slice, usize)>;

impl CogVlm {
    pub(super) fn pack(&self, samples: &[SampleInput<'_>], backend: &dyn Backend) -> Result<Batch> {
        let config = self.config();
        for (i, sample) in samples.iter().enumerate() {
            check_images(config, i, sample)?;
        }
        let types: Vec<Vec<bool>> = samples
            .iter()
            .map(|s| token_types(s.input_ids.len(), s.image_bounds))
            .collect();
        let positions: Vec<i32> = types.iter().flat_map(|t| position_ids(t)).collect();
        let rotary = self.rotary(&positions, backend)?;
        let vision = self.vision_batch(samples, backend)?;
        let mut batch = pack(samples, positions, rotary, vision, backend)?;
        let vision = vision_rows(&types);
        if vision.contains(&true) {
            batch.experts = Some(RowGroups(backend.partition_rows(&vision)?));
        }
        let tokens = samples.iter().flat_map(|s| s.input_ids);
        let text = types.iter().flatten().map(|image| !image);
        batch.padding_rows = self.padding_rows(tokens.copied().zip(text), backend)?;
        batch.prefix = self.prefix_tables(&batch, backend)?;
        if let Some(cross) = &config.cross {
            let mut features = 0;
            let attends = samples.iter().map(|s| {
                let start = features;
                features += s.image_bounds.len() * cross.patches();
                (s.input_ids.len(), start..features)
            });
            let attends: Vec<_> = attends.collect();
            batch.cross = CrossRows::new(&attends, features, backend)?;
        }
        Ok(batch)
    }

    pub(super) fn pack_next(
        &self,
        tokens: &[i32],
        positions: &[i32],
        backend: &dyn Backend,
    ) -> Result<Batch> {
        pack_next(tokens, positions, self.rotary(positions, backend)?, backend)
    }

    fn rotary(&self, positions: &[i32], backend: &dyn Backend) -> Result<Rotary> {
        let (language, options) = (&self.config().language, self.options());
        let (d, theta) = (language.head_dim, language.rope_theta as f32);
        rotary(positions, d, theta, options.rotary_dtype(), backend)
    }

    fn prefix_tables(&self, batch: &Batch, backend: &dyn Backend) -> Result<Option<PrefixTables>> {
        let (tokens, heads) = (
            self.options().ptuning_tokens,
            self.config().language.num_kv_heads,
        );
        (tokens > 0)
            .then(|| PrefixTables::new(batch.starts(), tokens, heads, backend))
            .transpose()
    }

    /// Rows of padding tokens in the text. Placeholders of features are padding tokens, too, and are left out.
    fn padding_rows(
        &self,
        tokens: impl Iterator<Item = (i32, bool)>,
        backend: &dyn Backend,
    ) -> Result<Option<Tensor>> {
        let pad = self.config().pad;
        let rows = tokens.enumerate();
        let rows = rows.filter(|(_, (id, text))| *id == pad && *text);
        let rows: Vec<i32> = rows.map(|(row, _)| row as i32).collect();
        (!rows.is_empty())
            .then(|| upload(backend, &rows, &[rows.len()]))
            .transpose()
    }

    /// Packs the images of the batch; `None` if it has none.
    fn vision_batch(
        &self,
        samples: &[SampleInput<'_>],
        backend: &dyn Backend,
    ) -> Result<Option<VisionBatch>> {
        let config = self.config();
        let images = images(config, samples);
        if images.is_empty() {
            return Ok(None);
        }
        let options = self.options();
        let first: Image<'_> = images.iter().map(|p| p[0]).collect();
        let EvaImages {
            patches,
            sequences,
            tables,
        } = eva_images(
            &config.vision,
            config.edition == Edition::CogVlm2,
            &first,
            &self.normalization,
            options.dtype,
            backend,
        )?;
        let tables: Arc<dyn VisionTables> = match &config.cross {
            None => Arc::new(tables),
            Some(cross) => {
                let second: Image<'_> = images.iter().map(|p| p[1]).collect();
                let dtypes = (options.dtype, options.rotary_dtype());
                let norm = &self.normalization;
                let patches = 0..config.vision.patches() as i32;
                let ids: Vec<i32> = first.iter().flat_map(|_| patches.clone()).collect();
                Arc::new(CogAgentTables {
                    eva: tables,
                    position_ids: upload(backend, &ids, &[ids.len()])?,
                    cross: CrossImages::new(cross, &second, norm, dtypes, backend)?,
                })
            }
        };
        Ok(Some(VisionBatch {
            patches,
            sequences,
            splice: Splice::in_order(&image_rows(samples), backend)?,
            tables,
        }))
    }
}

/// Slices of each image that has a place in the text.
fn images<'a>(config: &CogConfig, samples: &[SampleInput<'a>]) -> Vec<Image<'a>> {
    let (per_image, mut patches) = (config.slices_per_image(), 0);
    let mut all = Vec::new();
    for sample in samples {
        let mut slices: Image<'a> = Vec::with_capacity(sample.slices.len());
        for slice in sample.slices {
            slices.push((slice, patches));
            patches += slice.rows * slice.cols;
        }
        let shown = slices.chunks(per_image).take(sample.image_bounds.len());
        all.extend(shown.map(<[_]>::to_vec));
    }
    all
}

fn check_images(config: &CogConfig, index: usize, sample: &SampleInput<'_>) -> Result<()> {
    let fail = |reason: String| {
        Err(ModelError::Sample {
            sample: index,
            reason,
        })
    };
    let (tokens, rows) = (sample.input_ids.len(), config.features() + 2);
    let (places, slices) = (sample.image_bounds.len(), sample.slices.len());
    let per_image = config.slices_per_image();
    if places * per_image > slices {
        return fail(format!("{places} image positions, {slices} slices"));
    }
    let mut end_before = 0;
    for &(start, end) in sample.image_bounds {
        if start < end_before || start + rows != end || end > tokens {
            return fail(format!(
                "picture at {start}..{end}, expected {rows} of {tokens} tokens"
            ));
        }
        end_before = end;
    }
    let vision = &config.vision;
    let towers = std::iter::once((vision.grid(), vision.patch_size))
        .chain(config.cross.iter().map(|c| (c.grid(), c.patch_size)));
    for (tower, (grid, side)) in towers.enumerate() {
        let own = sample.slices.iter().skip(tower).step_by(per_image);
        if let Some(slice) = own.clone().find(|s| (s.rows, s.cols) != (grid, grid)) {
            let (rows, cols) = (slice.rows, slice.cols);
            return fail(format!(
                "a slice of {rows} x {cols} patches, expected {grid} x {grid}"
            ));
        }
        for slice in own {
            let one = SampleInput {
                slices: std::slice::from_ref(slice),
                ..*sample
            };
            check_slices(index, &one, side)?;
        }
    }
    Ok(())
}
