//! From the tower's patches to the rows that replace an image's tokens.

use super::config::{CogConfig, Edition};
use super::tables::{CogAgentTables, eva_tables};
use crate::autograd::{Tape, Var};
use crate::batch::VisionBatch;
use crate::error::Result;
use crate::eva::{Fold, Frame, GluProjector};
use crate::params::ParamBuilder;
use engine::{ParamId, UnitId};

/// CogVLM2's folding of patches or CogAgent's second positions, the gated projector and the learned rows around each
/// image, one unit.
#[derive(Debug)]
pub(super) struct Projector {
    unit: UnitId,
    fold: Option<Fold>,
    positions: Option<ParamId>,
    projector: GluProjector,
    frame: Frame,
}

impl Projector {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &CogConfig) -> Self {
        let (c, d) = (config.vision.width, config.language.hidden_size);
        let mut unit = params.unit("model.vision.linear_proj");
        let mut scope = unit.at("model.vision");
        let patches = config.vision.patches();
        Self {
            unit: scope.id(),
            fold: (config.edition == Edition::CogVlm2).then(|| Fold::new(&mut scope, c, c)),
            positions: (config.edition == Edition::CogAgent)
                .then(|| scope.param("pos_embed", [patches, c])),
            projector: GluProjector::new(&mut scope, c, d, config.language.intermediate_size),
            frame: Frame::new(&mut scope, d),
        }
    }

    /// `[N * (p + 1), c]` of `N` images with `p` patches, class rows included, to `[N * (m + 2), d]` with `m` features
    /// per image.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        x: &Var,
        batch: &'m VisionBatch,
    ) -> Result<Var> {
        let tables = eva_tables(batch)?;
        let [features] = tape.segment(self.unit, [x], move |scope, [x]| {
            let mut x = scope.gather_rows(x, &tables.patch_rows)?;
            scope.observe("vit_hidden", &x);
            if let Some(positions) = self.positions {
                let ids = &batch.tables::<CogAgentTables>()?.position_ids;
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
