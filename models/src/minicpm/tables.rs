//! Index tables of vision tower and resampler.
//!
//! Shapes: `P` patches of all slices, `N` slices, `Q` queries of the resampler.

use super::config::MiniCpmConfig;
use super::positions::position_ids;
use crate::batch::{VisionTables, starts_of, upload};
use crate::error::Result;
use crate::ops::Sequences;
use kernels::{Backend, Tensor};

/// Index tables of a batch of `N` slices with `P` patches, for MiniCPM's vision tower and its resampler of `Q`
/// queries.
#[derive(Clone, Debug)]
pub struct MiniCpmTables {
    /// For each patch, its row in the table of learned position embeddings, i32 `[P]`.
    pub position_ids: Tensor,
    /// Row and column of every patch inside its slice, i32 `[P]` each.
    pub patch_coords: [Tensor; 2],
    /// Largest number of patch rows, and of patch columns, among the slices of the batch.
    pub grid: [usize; 2],
    /// Query and key ranges of the resampler's attention: the `Q` queries of a slice attend to the patches of
    /// the same slice.
    pub resample: Sequences,
    /// Index of the learned query of each row of the resampler, i32 `[N * Q]`: `0..Q` for every slice.
    pub query_index: Tensor,
}

impl VisionTables for MiniCpmTables {
    fn tower() -> &'static str {
        "MiniCPM"
    }
}

impl MiniCpmTables {
    /// Builds the tables of slices of `grids` (patches per column, per row).
    ///
    /// # Errors
    /// When memory runs out.
    pub(super) fn new(
        config: &MiniCpmConfig,
        grids: &[[usize; 2]],
        backend: &dyn Backend,
    ) -> Result<Self> {
        let (q, side) = (config.query_num, config.vision.grid_side);
        let ids: Vec<i32> = grids
            .iter()
            .flat_map(|[rows, cols]| position_ids(*rows, *cols, side))
            .collect();
        let coords = |axis: usize| -> Result<Tensor> {
            let all: Vec<i32> = grids.iter().flat_map(|g| axis_coords(*g, axis)).collect();
            upload(backend, &all, &[all.len()])
        };
        let query_index: Vec<i32> = (0..grids.len()).flat_map(|_| 0..q as i32).collect();
        let largest = |axis: usize| grids.iter().map(|g| g[axis]).max().unwrap_or(1);
        Ok(Self {
            position_ids: upload(backend, &ids, &[ids.len()])?,
            patch_coords: [coords(0)?, coords(1)?],
            grid: [largest(0), largest(1)],
            resample: Sequences {
                q_starts: starts_of(grids.iter().map(|_| q)),
                k_starts: starts_of(grids.iter().map(|[r, c]| r * c)),
                causal: false,
            },
            query_index: upload(backend, &query_index, &[query_index.len()])?,
        })
    }
}

/// Row (axis 0) or column (axis 1) of every patch of a slice, row-major.
fn axis_coords([rows, cols]: [usize; 2], axis: usize) -> impl Iterator<Item = i32> {
    (0..rows * cols).map(move |i| (if axis == 0 { i / cols } else { i % cols }) as i32)
}
