//! Index tables and pixels of a batch's images for the vision tower.

use super::config::VisionConfig;
use super::positions::{block_order, position_weights};
use crate::batch::{VisionTables, upload, upload_as};
use crate::data::Slice;
use crate::error::Result;
use crate::nn::{Rotary, rope_frequencies, rotary_of};
use crate::processor::Normalization;
use kernels::{Backend, DType, RopeLayout, Tensor};

/// Index tables of GLM-4.1V's vision tower for the `P` patches of all images, which are ordered by blocks of
/// 2 x 2.
#[derive(Clone, Debug)]
pub struct Glm41vTables {
    /// Interpolation weights, f32 `[P, S]`: the share of each of the `S` learned position embeddings in each
    /// patch's position. `None` for a tower without them.
    pub position_weights: Option<Tensor>,
    /// Cosines and sines of the rotary position embedding, one row per patch: half of a head's pairs rotate
    /// by the patch's row in its image, half by its column.
    pub rotary: Rotary,
    /// Index of the first patch of each block of 2 x 2, i32 `[P / 4]`.
    pub block_rows: Tensor,
}

impl VisionTables for Glm41vTables {
    fn tower() -> &'static str {
        "GLM-4.1V"
    }
}

impl Glm41vTables {
    /// Builds the tables of images of `grids` (patches per column, per row).
    ///
    /// # Errors
    /// When memory runs out.
    pub(super) fn new(
        config: &VisionConfig,
        grids: &[[usize; 2]],
        backend: &dyn Backend,
    ) -> Result<Self> {
        // Half of the pairs of a head turn with the row, half with the column.
        let frequencies = rope_frequencies(config.head_dim / 2, 1e4);
        let angles =
            grids
                .iter()
                .flat_map(|grid| block_order(*grid))
                .flat_map(|coordinates: [usize; 2]| {
                    let frequencies = frequencies.clone();
                    coordinates.into_iter().flat_map(move |p| {
                        frequencies.clone().into_iter().map(move |w| p as f32 * w)
                    })
                });
        let patches: usize = grids.iter().map(|[rows, cols]| rows * cols).sum();
        let blocks: Vec<i32> = (0..patches as i32).step_by(4).collect();
        let position_weights = |side: usize| {
            let weights = grids.iter().flat_map(|grid| position_weights(*grid, side));
            let weights: Vec<f32> = weights.collect();
            upload(backend, &weights, &[patches, side * side])
        };
        Ok(Self {
            position_weights: config.grid_side.map(position_weights).transpose()?,
            // The reference keeps these angles in f32 whatever the weights are.
            rotary: rotary_of(
                angles,
                config.head_dim / 2,
                RopeLayout::HalfSplit,
                DType::F32,
                backend,
            )?,
            block_rows: upload(backend, &blocks, &[blocks.len()])?,
        })
    }
}

/// `[P, 3 * frames * patch * patch]` in `dtype`: channel, frame, pixel row, pixel column. An image fills all frames.
///
/// # Errors
/// When memory runs out.
pub(super) fn pixel_rows(
    slices: &[&Slice],
    config: &VisionConfig,
    normalization: &Normalization,
    dtype: DType,
    backend: &dyn Backend,
) -> Result<Tensor> {
    let plane = config.patch_size * config.patch_size;
    let mut values = Vec::new();
    for slice in slices {
        let count = slice.rows * slice.cols;
        for [row, col] in block_order([slice.rows, slice.cols]) {
            let patch = row * slice.cols + col;
            let frames = (0..slice.frames).map(|frame| {
                let bytes = &slice.patches[(frame * count + patch) * 3 * plane..][..3 * plane];
                normalization.normalize_patches(bytes, config.patch_size)
            });
            let frames: Vec<Vec<f32>> = frames.collect();
            for channel in 0..3 {
                for frame in 0..config.frames {
                    let pixels = &frames[frame.min(slice.frames - 1)];
                    values.extend_from_slice(&pixels[channel * plane..][..plane]);
                }
            }
        }
    }
    upload_as(backend, &values, 3 * config.frames * plane, dtype)
}
