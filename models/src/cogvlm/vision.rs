//! From pixels to the rows that stand for a picture among the tokens.

use super::config::{CogConfig, Edition};
use super::cross_vision::CrossPictures;
use crate::autograd::{Tape, Var};
use crate::batch::VisionBatch;
use crate::error::Result;
use crate::eva::{EvaTables, EvaTower, Fold, Frame, GluProjector};
use crate::params::ParamBuilder;
use engine::{ParamId, UnitId};
use kernels::Tensor;

const PREFIX: &str = "model.vision";

/// Tables of CogAgent's two towers.
#[derive(Clone, Debug)]
pub struct CogAgentTables {
    /// Of the first.
    pub eva: EvaTables,
    /// i32 `[N * p]`: rows of the positions added behind the first tower.
    pub position_ids: Tensor,
    /// The same pictures for the second.
    pub cross: CrossPictures,
}

/// The tower, CogVLM2's folding of patches or CogAgent's second positions, the projector, and learned rows around.
#[derive(Debug)]
pub(super) struct Vision {
    tower: EvaTower,
    unit: UnitId,
    fold: Option<Fold>,
    positions: Option<ParamId>,
    projector: GluProjector,
    frame: Frame,
}

impl Vision {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &CogConfig) -> Self {
        let (c, d) = (config.vision.width, config.language.hidden_size);
        let tower = EvaTower::new(params, PREFIX, &config.vision);
        let mut unit = params.unit("model.vision.linear_proj");
        let mut scope = unit.at(PREFIX);
        let patches = config.vision.patches();
        Self {
            tower,
            unit: scope.id(),
            fold: (config.edition == Edition::CogVlm2).then(|| Fold::new(&mut scope, c, c)),
            positions: (config.edition == Edition::CogAgent)
                .then(|| scope.param("pos_embed", [patches, c])),
            projector: GluProjector::new(&mut scope, c, d, config.language.intermediate_size),
            frame: Frame::new(&mut scope, d),
        }
    }

    /// `[N * (m + 2), d]` of `N` pictures with `m` features.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m VisionBatch,
    ) -> Result<Var> {
        let tables = batch.tables.eva()?;
        let (patches, sequences) = (&batch.patches, &batch.sequences);
        let x = self.tower.forward(tape, patches, sequences, tables)?;
        let [features] = tape.segment(self.unit, [&x], move |scope, [x]| {
            let mut x = scope.gather_rows(x, &tables.patch_rows)?;
            scope.observe("vit_hidden", &x);
            if let Some(positions) = self.positions {
                let ids = &batch.tables.cogagent()?.position_ids;
                x = scope.add(&x, &scope.embedding(positions, ids)?)?;
            }
            if let Some(fold) = &self.fold {
                x = fold.forward(scope, &x, tables)?;
            }
            let x = self.projector.forward(scope, &x, tables)?;
            Ok([self.frame.forward(scope, &x, tables)?])
        })?;
        tape.observe("vision_features", &features);
        Ok(features)
    }
}
