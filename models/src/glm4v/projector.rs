//! Projector of GLM-4V: from the tower's patches to rows of the language model.
//!
//! Shapes: `N` images, with `p` patches and `m = p / 4` features each, `c` width of the tower, `D` width of the
//! language model.

use super::config::Glm4vConfig;
use crate::autograd::{Tape, Var};
use crate::batch::VisionBatch;
use crate::error::Result;
use crate::eva::{EvaTables, Fold, Frame, GluProjector};
use crate::params::ParamBuilder;
use engine::UnitId;

/// Convolution over 2 x 2 patches, gated projector, and learned rows around each image. One unit.
#[derive(Debug)]
pub(super) struct Projector {
    unit: UnitId,
    fold: Fold,
    projector: GluProjector,
    frame: Frame,
    scale: f32,
}

impl Projector {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &Glm4vConfig) -> Self {
        let language = &config.language;
        let (c, d) = (config.vision.width, language.hidden_size);
        let mut unit = params.unit("transformer.vision.linear_proj");
        let id = unit.id();
        let mut vision = unit.at("transformer.vision");
        Self {
            unit: id,
            fold: Fold::new(&mut vision, c, d),
            projector: GluProjector::new(&mut vision, d, d, language.intermediate_size),
            frame: Frame::new(&mut vision, d),
            scale: (1.0 / config.scaling_factor) as f32,
        }
    }

    /// `[N * (p + 1), c]`, class rows included, to `[N * (m + 2), D]`.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        x: &Var,
        batch: &'m VisionBatch,
    ) -> Result<Var> {
        let tables = batch.tables::<EvaTables>()?;
        let [features] = tape.segment(self.unit, [x], move |scope, [x]| {
            let patches = scope.gather_rows(x, &tables.patch_rows)?;
            let folded = self.fold.forward(scope, &patches, tables)?;
            scope.observe("vision.conv", &folded);
            let features = self.projector.forward(scope, &folded, tables)?;
            let framed = self.frame.forward(scope, &features, tables)?;
            Ok([scope.scale(&framed, self.scale)?])
        })?;
        tape.observe("vision_features", &features);
        Ok(features)
    }
}
