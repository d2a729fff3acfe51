//! Index tables of one or two vision towers.

use super::cross_vision::CrossImages;
use crate::batch::{VisionBatch, VisionTables};
use crate::error::Result;
use crate::eva::EvaTables;
use kernels::Tensor;

/// Index tables of a batch of images for CogAgent's two vision towers.
#[derive(Clone, Debug)]
pub struct CogAgentTables {
    /// Index tables for the EVA tower, which is the first.
    pub eva: EvaTables,
    /// For each patch, the row of the learned position embedding that is added to it after the first tower,
    /// i32 `[N * p]`.
    pub position_ids: Tensor,
    /// Inputs and index tables of the same images for the second tower, which cross-attention reads.
    pub cross: CrossImages,
}

impl VisionTables for CogAgentTables {
    fn tower() -> &'static str {
        "CogAgent"
    }
}

/// The tables of the EVA tower, which is CogAgent's first.
///
/// # Errors
/// [`ModelError::ForeignBatch`](crate::ModelError::ForeignBatch) for those of another tower.
pub(super) fn eva_tables(batch: &VisionBatch) -> Result<&EvaTables> {
    match batch.tables::<CogAgentTables>() {
        Ok(tables) => Ok(&tables.eva),
        Err(_) => batch.tables(),
    }
}
