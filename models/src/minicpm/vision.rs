//! The SigLIP vision tower over packed slices.
//!
//! Shapes: `P` patches of all slices, `c` width.

use super::config::VisionConfig;
use super::tables::MiniCpmTables;
use crate::autograd::{Tape, Var};
use crate::batch::VisionBatch;
use crate::error::Result;
use crate::nn::{SelfAttentionConfig, VisionBlock, VisionBlockConfig, VisionBlockKind};
use crate::ops::LinearParams;
use crate::params::ParamBuilder;
use engine::{ParamId, UnitId};
use kernels::Gelu;

/// Patch embedding, learned positions and transformer blocks, without the final norm.
#[derive(Debug)]
pub(super) struct VisionTower {
    embed_unit: UnitId,
    patch: LinearParams,
    position: ParamId,
    blocks: Vec<(UnitId, VisionBlock)>,
}

impl VisionTower {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &VisionConfig) -> Self {
        let (c, side) = (config.hidden_size, config.patch_size);
        let mut unit = params.unit("vpm.embeddings");
        let embed_unit = unit.id();
        let mut embed = unit.at("vpm.embeddings");
        let mut conv = embed.at("patch_embedding");
        let kernel = conv.param("weight", [c, 3, side, side]);
        let bias = conv.param("bias", [c]);
        let position = embed
            .at("position_embedding")
            .param("weight", [config.grid_side * config.grid_side, c]);
        let block = VisionBlockConfig {
            attention: SelfAttentionConfig {
                width: c,
                heads: config.num_heads,
                kv_heads: config.num_heads,
                head_dim: config.head_dim,
                fused: None,
                qkv_bias: true,
                out_bias: true,
                out_name: "out_proj",
                head_norms: None,
            },
            names: ["layer_norm1", "self_attn", "layer_norm2"],
            inner: config.intermediate_size,
            eps: config.layer_norm_eps as f32,
            kind: VisionBlockKind::Gelu(Gelu::Tanh),
        };
        let blocks = (0..config.num_layers)
            .map(|i| {
                let mut unit = params.unit(&format!("vpm.layers.{i}"));
                let mut scope = unit.at(&format!("vpm.encoder.layers.{i}"));
                (scope.id(), VisionBlock::new(&mut scope, &block))
            })
            .collect();
        Self {
            embed_unit,
            patch: LinearParams::new(kernel, Some(bias)),
            position,
            blocks,
        }
    }

    /// Runs the tower; returns a row per patch, `[P, c]`, before the final norm.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m VisionBatch,
    ) -> Result<Var> {
        let tables = batch.tables::<MiniCpmTables>()?;
        let [mut x] = tape.segment(self.embed_unit, [], move |scope, []| {
            let patches = scope.constant(batch.patches.clone());
            let x = scope.linear(&patches, &self.patch)?;
            let positions = scope.embedding(self.position, &tables.position_ids)?;
            Ok([scope.add(&x, &positions)?])
        })?;
        tape.observe("vision.embed", &x);
        for (i, (unit, block)) in self.blocks.iter().enumerate() {
            [x] = tape.segment(*unit, [&x], move |scope, [x]| {
                Ok([block.forward(scope, x, &batch.sequences, None)?])
            })?;
            tape.observe(format_args!("vision.block.{i}"), &x);
        }
        Ok(x)
    }
}
