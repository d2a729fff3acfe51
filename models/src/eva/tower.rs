//! The EVA2-CLIP-E tower.
//!
//! Norms are on the branches (`x += norm(f(x))`); no norm precedes the first block or follows the last.

use super::config::EvaConfig;
use super::tables::EvaTables;
use crate::autograd::{Rows, Scope, Tape, Var};
use crate::error::Result;
use crate::nn::{FusedLinear, GeluMlp, LayerNorm, Linear};
use crate::ops::{LinearParams, Sequences};
use crate::params::{ParamBuilder, ParamScope};
use engine::{ParamId, UnitId};
use kernels::{Gelu, Tensor};

/// Patch embedding with a class row and learned positions, and the blocks.
#[derive(Debug)]
pub(crate) struct EvaTower {
    embed_unit: UnitId,
    patch: LinearParams,
    class: ParamId,
    position: ParamId,
    blocks: Vec<(UnitId, EvaBlock)>,
}

impl EvaTower {
    /// Declares the tower below `prefix`, such as `model.vision`.
    pub(crate) fn new(params: &mut ParamBuilder<'_>, prefix: &str, config: &EvaConfig) -> Self {
        let (c, side) = (config.width, config.patch_size);
        let mut unit = params.unit(&format!("{prefix}.patch_embedding"));
        let embed_unit = unit.id();
        let mut embed = unit.at(&format!("{prefix}.patch_embedding"));
        let mut conv = embed.at("proj");
        let kernel = conv.param("weight", [c, 3, side, side]);
        let bias = conv.param("bias", [c]);
        let class = embed.param("cls_embedding", [1, c]);
        let rows = config.patches() + 1;
        let position = embed.at("position_embedding").param("weight", [rows, c]);
        let blocks = (0..config.layers)
            .map(|i| {
                let mut unit = params.unit(&format!("{prefix}.transformer.layers.{i}"));
                let mut scope = unit.at(&format!("{prefix}.transformer.layers.{i}"));
                (scope.id(), EvaBlock::new(&mut scope, config))
            })
            .collect();
        Self {
            embed_unit,
            patch: LinearParams::new(kernel, Some(bias)),
            class,
            position,
            blocks,
        }
    }

    /// `[N * (p + 1), c]`: the output of the last block: each image's class row, then its patches.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub(crate) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        patches: &'m Tensor,
        sequences: &'m Sequences,
        tables: &'m EvaTables,
    ) -> Result<Var> {
        let [mut x] = tape.segment(self.embed_unit, [], move |scope, []| {
            let patches = scope.linear(&scope.constant(patches.clone()), &self.patch)?;
            let class = scope.embedding(self.class, &tables.zeros)?;
            let parts = [(&class, &tables.class_rows), (&patches, &tables.patch_rows)];
            let x = scope.merge_rows(&parts, tables.position_ids.elems())?;
            let positions = scope.embedding(self.position, &tables.position_ids)?;
            Ok([scope.add(&x, &positions)?])
        })?;
        for (unit, block) in &self.blocks {
            [x] = tape.segment(*unit, [&x], move |scope, [x]| {
                let out = scope.with_rows(Rows::Patches, &tables.row_names, || {
                    block.forward(scope, x, sequences)
                })?;
                Ok([out])
            })?;
        }
        Ok(x)
    }
}

/// `x += norm(attention(x)); x += norm(mlp(x))`, bidirectional, all layers with biases.
#[derive(Clone, PartialEq, Debug)]
struct EvaBlock {
    qkv: FusedLinear,
    out: Linear,
    attention_norm: LayerNorm,
    mlp: GeluMlp,
    mlp_norm: LayerNorm,
    heads: usize,
    head_dim: usize,
}

impl EvaBlock {
    fn new(params: &mut ParamScope<'_, '_>, config: &EvaConfig) -> Self {
        let (c, eps) = (config.width, config.eps as f32);
        let mut attention = params.at("attention");
        let qkv = attention.fused_linear("query_key_value", &[c; 3], c, true);
        let out = attention.linear("dense", [c, c], true);
        Self {
            qkv,
            out,
            attention_norm: LayerNorm::new(params, "input_layernorm", c, eps),
            mlp: GeluMlp::new(params, "mlp", c, config.inner, Gelu::Erf),
            mlp_norm: LayerNorm::new(params, "post_attention_layernorm", c, eps),
            heads: config.heads,
            head_dim: config.head_dim,
        }
    }

    fn forward(&self, scope: &Scope<'_>, x: &Var, sequences: &Sequences) -> Result<Var> {
        let (t, c) = (x.shape().rows(), x.shape().last());
        let split = |x: &Var| scope.reshape(x, [t, self.heads, self.head_dim]);
        let [q, k, v] = self.qkv.forward(scope, x)?;
        let scale = (self.head_dim as f32).powf(-0.5);
        let mixed = scope.attention(&split(&q)?, &split(&k)?, &split(&v)?, sequences, scale)?;
        let mixed = self.out.forward(scope, &scope.reshape(&mixed, [t, c])?)?;
        let x = scope.add(x, &self.attention_norm.forward(scope, &mixed)?)?;
        let inner = self.mlp.forward(scope, &x)?;
        scope.add(&x, &self.mlp_norm.forward(scope, &inner)?)
    }
}
