//! What one pass computes on: packed samples, without padding.
//!
//! Shapes: `T` tokens of all samples, `P` patches of all slices, `N` slices, `Q` features per
//! slice, `M` spliced rows.

use crate::generate::CachePass;
use crate::nn::Rotary;
use crate::ops::Sequences;
use kernels::Tensor;
use std::sync::Arc;

/// Pictures of a batch: the slices of all samples, one behind the other.
#[derive(Clone, Debug)]
pub struct VisionBatch {
    /// `[P, 3 * patch * patch]` in the compute dtype: channel, pixel row, pixel column.
    pub patches: Tensor,
    /// i32 `[P]`: row of the learned position table.
    pub position_ids: Tensor,
    /// i32 `[P]`: patch row and patch column inside the slice.
    pub patch_coords: [Tensor; 2],
    /// Largest patch row and column plus one.
    pub grid: [usize; 2],
    /// The patches of a slice attend to each other.
    pub sequences: Sequences,
    /// The queries of a slice attend to its patches.
    pub resample: Sequences,
    /// i32 `[N * Q]`: `0..Q` for every slice.
    pub query_index: Tensor,
    /// i32 `[M]`: token rows that features replace.
    pub splice_rows: Tensor,
    /// i32 `[M]`: the features that replace them.
    pub splice_sources: Tensor,
}

/// One pass: the tokens of all samples, one sample behind the other.
#[derive(Clone, Debug)]
pub struct Batch {
    /// i32 `[T]`.
    pub input_ids: Tensor,
    /// i32 `[T]`, already shifted.
    pub labels: Tensor,
    /// Number of supervised rows.
    pub supervised: usize,
    /// Positions of the tokens within their samples.
    pub positions: Arc<[i32]>,
    /// Their angles.
    pub rotary: Rotary,
    /// Samples, causal.
    pub sequences: Sequences,
    /// i32, one per sample: its last row.
    pub last_rows: Tensor,
    /// Absent when no row is replaced by a feature.
    pub vision: Option<VisionBatch>,
    /// Where the decoder keeps keys and values, while generating.
    pub cache: Option<CachePass>,
}

impl Batch {
    /// Tokens of all samples.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// Rows of sample `i`: `starts[i]..starts[i + 1]`.
    #[must_use]
    pub fn starts(&self) -> &[usize] {
        &self.sequences.q_starts
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.starts().len() - 1
    }
}
