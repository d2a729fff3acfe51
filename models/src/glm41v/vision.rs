//! The vision tower over packed images.
//!
//! Shapes: `P` patches of all images in blocks of 2 x 2, `c` width.

use super::config::VisionConfig;
use super::tables::Glm41vTables;
use crate::autograd::{Tape, Var};
use crate::batch::VisionBatch;
use crate::error::Result;
use crate::nn::{RmsNorm, SelfAttentionConfig, VisionBlock, VisionBlockConfig, VisionBlockKind};
use crate::ops::LinearParams;
use crate::params::ParamBuilder;
use engine::{ParamId, UnitId};

/// Patch embedding, interpolated positions if the tower has them, and transformer blocks, without the final norm.
#[derive(Debug)]
pub(super) struct VisionTower {
    embed_unit: UnitId,
    patch: LinearParams,
    /// Norm after the patch embedding, and the learned positions.
    learned: Option<(RmsNorm, ParamId)>,
    blocks: Vec<(UnitId, VisionBlock)>,
}

impl VisionTower {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &VisionConfig) -> Self {
        let (c, side) = (config.hidden_size, config.patch_size);
        let mut unit = params.unit("model.visual.embeddings");
        let embed_unit = unit.id();
        let mut visual = unit.at("model.visual");
        let mut conv = visual.at("patch_embed.proj");
        let kernel = conv.param("weight", [c, 3, config.frames, side, side]);
        let bias = conv.param("bias", [c]);
        let eps = config.rms_norm_eps as f32;
        let learned = config.grid_side.map(|side| {
            let norm = RmsNorm::new(&mut visual, "post_conv_layernorm", c, eps);
            let mut position = visual.at("embeddings.position_embedding");
            (norm, position.param("weight", [side * side, c]))
        });
        let block = VisionBlockConfig {
            attention: SelfAttentionConfig {
                width: c,
                heads: config.num_heads,
                kv_heads: config.num_heads,
                head_dim: config.head_dim,
                fused: Some("qkv"),
                qkv_bias: config.bias,
                out_bias: config.bias,
                out_name: "proj",
                head_norms: config.head_norms.then_some(eps),
            },
            names: ["norm1", "attn", "norm2"],
            inner: config.inner,
            eps,
            kind: VisionBlockKind::Gated { bias: config.bias },
        };
        let blocks = (0..config.num_layers)
            .map(|i| {
                let path = format!("model.visual.blocks.{i}");
                let mut unit = params.unit(&path);
                let mut scope = unit.at(&path);
                (scope.id(), VisionBlock::new(&mut scope, &block))
            })
            .collect();
        Self {
            embed_unit,
            patch: LinearParams::new(kernel, Some(bias)),
            learned,
            blocks,
        }
    }

    /// Runs the tower; returns a row per patch, `[P, c]`, before the final norm.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m VisionBatch,
    ) -> Result<Var> {
        let tables = batch.tables::<Glm41vTables>()?;
        let [mut x] = tape.segment(self.embed_unit, [], move |scope, []| {
            let patches = scope.constant(batch.patches.clone());
            let x = scope.linear(&patches, &self.patch)?;
            scope.observe("vision.patch_embed", &x);
            let (Some((norm, position)), Some(weights)) = (&self.learned, &tables.position_weights)
            else {
                return Ok([x]);
            };
            let x = norm.forward(scope, &x)?;
            let weights = scope.constant(weights.clone());
            let positions = scope.matmul(&weights, *position)?;
            Ok([scope.add(&x, &scope.cast(&positions, x.dtype())?)?])
        })?;
        tape.observe("vision.embed", &x);
        for (i, (unit, block)) in self.blocks.iter().enumerate() {
            [x] = tape.segment(*unit, [&x], move |scope, [x]| {
                let rotary = Some(&tables.rotary);
                Ok([block.forward(scope, x, &batch.sequences, rotary)?])
            })?;
            tape.observe(format_args!("vision.block.{i}"), &x);
        }
        Ok(x)
    }
}
