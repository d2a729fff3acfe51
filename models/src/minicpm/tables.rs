//! Index tables of vision tower and resampler.
//!
//! Shapes: `P` patches of all slices, `N` slices, `Q` queries of the resampler.

use super::config::MiniCpmConfig;
use super::positions::position_ids;
use crate::batch::{VisionTables, starts_of, upload};
use crate::data::{Slice, Stamp};
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
    /// Query and key ranges of the resampler's attention: the `Q` queries of a block of features attend to the
    /// patches of the block's slices.
    pub resample: Sequences,
    /// Index of the learned query of each row of the resampler, i32 `[N * Q]`: `0..Q` for every block.
    pub query_index: Tensor,
    /// Time of each slice in tenths of seconds, and for each patch the index of its slice, i32 `[P]`; `None` without
    /// a video.
    pub times: Option<(Vec<Option<u32>>, Tensor)>,
}

impl VisionTables for MiniCpmTables {
    fn tower() -> &'static str {
        "MiniCPM"
    }
}

impl MiniCpmTables {
    /// Builds the tables of `slices`.
    ///
    /// # Errors
    /// When memory runs out.
    pub(super) fn new(
        config: &MiniCpmConfig,
        slices: &[&Slice],
        backend: &dyn Backend,
    ) -> Result<Self> {
        let grids: Vec<[usize; 2]> = slices.iter().map(|s| [s.rows, s.cols]).collect();
        let (q, side) = (config.query_num, config.vision.grid_side);
        let ids: Vec<i32> = grids
            .iter()
            .flat_map(|[rows, cols]| position_ids(*rows, *cols, side))
            .collect();
        let coords = |axis: usize| -> Result<Tensor> {
            let all: Vec<i32> = grids.iter().flat_map(|g| axis_coords(*g, axis)).collect();
            upload(backend, &all, &[all.len()])
        };
        // A slice that joins the one before it adds its patches to the keys of that block.
        let mut keys: Vec<usize> = Vec::new();
        for slice in slices {
            let patches = slice.rows * slice.cols;
            match keys.last_mut() {
                Some(last) if joins(slice) => *last += patches,
                _ => keys.push(patches),
            }
        }
        let query_index: Vec<i32> = keys.iter().flat_map(|_| 0..q as i32).collect();
        let largest = |axis: usize| grids.iter().map(|g| g[axis]).max().unwrap_or(1);
        Ok(Self {
            position_ids: upload(backend, &ids, &[ids.len()])?,
            patch_coords: [coords(0)?, coords(1)?],
            grid: [largest(0), largest(1)],
            resample: Sequences {
                q_starts: starts_of(keys.iter().map(|_| q)),
                k_starts: starts_of(keys.iter().copied()),
                causal: false,
            },
            query_index: upload(backend, &query_index, &[query_index.len()])?,
            times: times(slices, backend)?,
        })
    }
}

/// Whether the features of `slice` are those of the slice before it.
pub(super) fn joins(slice: &Slice) -> bool {
    slice.stamp.is_some_and(|stamp| stamp.joins)
}

fn times(slices: &[&Slice], backend: &dyn Backend) -> Result<Option<(Vec<Option<u32>>, Tensor)>> {
    if slices.iter().all(|slice| slice.stamp.is_none()) {
        return Ok(None);
    }
    let tenths = |stamp: Stamp| stamp.tenths;
    let stamps = slices.iter().map(|slice| slice.stamp.and_then(tenths));
    let stamps = stamps.collect();
    let index = slices.iter().enumerate();
    let index = index.flat_map(|(i, s)| std::iter::repeat_n(i as i32, s.rows * s.cols));
    let index: Vec<i32> = index.collect();
    Ok(Some((stamps, upload(backend, &index, &[index.len()])?)))
}

/// Row (axis 0) or column (axis 1) of every patch of a slice, row-major.
fn axis_coords([rows, cols]: [usize; 2], axis: usize) -> impl Iterator<Item = i32> {
    (0..rows * cols).map(move |i| (if axis == 0 { i / cols } else { i % cols }) as i32)
}
