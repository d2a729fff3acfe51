//! From patches to features of the language model's width.
//!
//! Shapes: `P` patches in blocks of 2 x 2, `N = P / 4` features, `c` width of the tower, `D` of the language model.

use super::config::VisionConfig;
use super::tables::Glm41vTables;
use crate::autograd::{Rows, Scope, Tape, Var};
use crate::batch::VisionBatch;
use crate::error::Result;
use crate::nn::{GatedMlp, LayerNorm, Linear, RmsNorm};
use crate::ops::LinearParams;
use crate::params::ParamBuilder;
use engine::UnitId;
use kernels::Gelu;

/// Epsilon of the merger's norm, whatever the tower's is.
const NORM_EPS: f32 = 1e-5;

/// The tower's final norm, the convolution over 2 x 2 patches and a gated MLP, one unit.
#[derive(Debug)]
pub(super) struct Merger {
    unit: UnitId,
    post_norm: RmsNorm,
    kernel: LinearParams,
    proj: Linear,
    norm: LayerNorm,
    mlp: GatedMlp,
}

impl Merger {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &VisionConfig) -> Self {
        let (c, d) = (config.hidden_size, config.out_hidden_size);
        let mut unit = params.unit("model.visual.merger");
        let id = unit.id();
        let mut visual = unit.at("model.visual");
        let eps = config.rms_norm_eps as f32;
        let post_norm = RmsNorm::new(&mut visual, "post_layernorm", c, eps);
        let mut conv = visual.at("downsample");
        let kernel = conv.param("weight", [d, c, 2, 2]);
        let bias = conv.param("bias", [d]);
        let mut merger = visual.at("merger");
        let proj = merger.linear("proj", [d, d], false);
        let norm = LayerNorm::new(&mut merger, "post_projection_norm", d, NORM_EPS);
        Self {
            unit: id,
            post_norm,
            kernel: LinearParams::new(kernel, Some(bias)),
            proj,
            norm,
            mlp: GatedMlp::new(&mut visual, "merger", d, config.merger_inner, false),
        }
    }

    /// `[P, c]` from the tower to `[N, D]`.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        x: &Var,
        batch: &'m VisionBatch,
    ) -> Result<Var> {
        let tables = batch.tables::<Glm41vTables>()?;
        let [features] = tape.segment(self.unit, [x], move |scope, [x]| {
            let x = self.post_norm.forward(scope, x)?;
            scope.observe("vision.post_layernorm", &x);
            let x = self.downsample(scope, &x)?;
            scope.observe("vision.conv", &x);
            // A feature is called after its first patch.
            let features = scope.with_rows(Rows::Patches, &tables.block_rows, || {
                let x = self.proj.forward(scope, &x)?;
                let x = scope.gelu(&self.norm.forward(scope, &x)?, Gelu::Erf)?;
                self.mlp.forward(scope, &x)
            })?;
            Ok([features])
        })?;
        tape.observe("vision_features", &features);
        Ok(features)
    }

    /// The convolution of kernel and stride 2 as a product: `[P, c]` to `[N, D]`.
    fn downsample(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let (n, c) = (x.shape().rows() / 4, x.shape().last());
        let blocks = scope.reshape(x, [n, 4, c])?;
        // The kernel's axes are channel, row, column.
        let blocks = scope.transpose_each(&blocks)?;
        scope.linear(&scope.reshape(&blocks, [n, 4 * c])?, &self.kernel)
    }
}
