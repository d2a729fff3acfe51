//! CogAgent's second tower, EVA2-CLIP-L at high resolution: norms before the branches and inside them, and rotary
//! positions in two dimensions.
//!
//! Shapes: `N` images, `p` patches of an image, `c` width.

use super::config::CrossConfig;
use crate::autograd::{Rows, Scope, Tape, Var};
use crate::batch::upload;
use crate::data::Slice;
use crate::error::Result;
use crate::eva::{EvaImages, EvaTables, images};
use crate::nn::{LayerNorm, Linear, Rotary, rotary_of};
use crate::ops::{LinearParams, Sequences};
use crate::params::{ParamBuilder, ParamScope};
use crate::processor::Normalization;
use engine::{ParamId, UnitId};
use kernels::{Backend, DType, RopeLayout, Tensor};

const PREFIX: &str = "model.cross_vision";
const EPS: f32 = 1e-6;
/// Base (theta) of the rotary position embedding's frequencies.
const THETA: f32 = 10_000.0;

/// A batch of `N` images with `p` patches each, as inputs of CogAgent's second vision tower.
#[derive(Clone, Debug)]
pub struct CrossImages {
    /// Pixel values of all patches in the compute dtype, `[N * p, 3 * patch * patch]`.
    pub patches: Tensor,
    /// Row range of each image, which has one class row and a row per patch: rows attend to all rows of their
    /// own image.
    pub sequences: Sequences,
    /// Index tables by which class rows and patch rows are put together and taken apart.
    pub tables: EvaTables,
    /// For each patch, the row of the learned position embedding that is added to it after the tower,
    /// i32 `[N * p]`.
    pub position_ids: Tensor,
    /// Cosines and sines of the rotary position embedding, one row per class row and patch; class rows do not
    /// rotate.
    pub rotary: Rotary,
}

impl CrossImages {
    /// Prepares `slices`, each with the number of patches before it in its batch; the second dtype is that of angles.
    ///
    /// # Errors
    /// When memory runs out.
    pub(super) fn new(
        config: &CrossConfig,
        slices: &[(&Slice, usize)],
        normalization: &Normalization,
        (dtype, rotary_dtype): (DType, DType),
        backend: &dyn Backend,
    ) -> Result<Self> {
        let (grid, side) = (config.grid(), config.patch_size);
        let EvaImages {
            patches,
            sequences,
            tables,
        } = images((grid, side), false, slices, normalization, dtype, backend)?;
        let one = angles(config);
        let all = (0..slices.len()).flat_map(|_| one.iter().copied());
        let width = config.head_dim / 2;
        let rotary = rotary_of(all, width, RopeLayout::Interleaved, rotary_dtype, backend)?;
        let ids: Vec<i32> = (0..slices.len())
            .flat_map(|_| 0..config.patches() as i32)
            .collect();
        Ok(Self {
            patches,
            sequences,
            tables,
            position_ids: upload(backend, &ids, &[ids.len()])?,
            rotary,
        })
    }
}

/// Angles of an image's rows, `[p + 1, head_dim / 2]`: one half of the pairs rotates by the patch's row, the other by
/// its column, both scaled to a grid of `rope_side`.
fn angles(config: &CrossConfig) -> Vec<f32> {
    let (grid, half) = (config.grid(), config.head_dim / 2);
    let frequencies: Vec<f32> = (0..half / 2)
        .map(|j| 1.0 / THETA.powf((2 * j) as f32 / half as f32))
        .collect();
    let scaled = |i: usize| i as f32 / grid as f32 * config.rope_side as f32;
    let mut all = vec![0.0; half];
    for patch in 0..grid * grid {
        for coordinate in [patch / grid, patch % grid] {
            all.extend(frequencies.iter().map(|w| scaled(coordinate) * w));
        }
    }
    all
}

/// Patch embedding, the computed blocks, and the positions added after them.
#[derive(Debug)]
pub(super) struct CrossVision {
    embed_unit: UnitId,
    patch: LinearParams,
    class: ParamId,
    position: ParamId,
    blocks: Vec<(UnitId, CrossBlock)>,
    end_unit: UnitId,
    end_position: ParamId,
}

impl CrossVision {
    /// Declares the tower, including the unused tensors of a checkpoint: the last block, norm and head.
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &CrossConfig) -> Self {
        let (c, side, p) = (config.width, config.patch_size, config.patches());
        let vit = format!("{PREFIX}.vit.model");
        let mut unit = params.unit(&format!("{vit}.patch_embed"));
        let embed_unit = unit.id();
        let mut scope = unit.at(&vit);
        let mut conv = scope.at("patch_embed.proj");
        let kernel = conv.param("weight", [c, 3, side, side]);
        let bias = conv.param("bias", [c]);
        let class = scope.param("cls_token", [1, 1, c]);
        let position = scope.param("pos_embed", [1, p + 1, c]);
        let mut blocks: Vec<(UnitId, CrossBlock)> = (0..config.layers)
            .map(|i| {
                let name = format!("{vit}.blocks.{i}");
                let mut unit = params.unit(&name);
                (unit.id(), CrossBlock::new(&mut unit.at(&name), config))
            })
            .collect();
        blocks.pop();
        let mut unit = params.unit(&format!("{vit}.head"));
        let mut scope = unit.at(&vit);
        LayerNorm::new(&mut scope, "norm", c, EPS);
        let mut head = scope.at("head");
        head.param("weight", [config.embed_dim, c]);
        head.param("bias", [config.embed_dim]);
        let mut unit = params.unit(&format!("{PREFIX}.pos_embed"));
        let end_unit = unit.id();
        let end_position = unit.at(PREFIX).param("pos_embed", [p, c]);
        Self {
            embed_unit,
            patch: LinearParams::new(kernel, Some(bias)),
            class,
            position,
            blocks,
            end_unit,
            end_position,
        }
    }

    /// Runs the tower and adds the second positions; returns the features of all images, `[N * p, c]`.
    ///
    /// # Errors
    /// When the engine or the device fails.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        batch: &'m CrossImages,
    ) -> Result<Var> {
        let tables = &batch.tables;
        let [mut x] = tape.segment(self.embed_unit, [], move |scope, []| {
            let patches = scope.linear(&scope.constant(batch.patches.clone()), &self.patch)?;
            let c = patches.shape().last();
            // Both tables carry an axis of one in front.
            let rows = |id: ParamId, index: &Tensor| -> Result<Var> {
                let table = scope.parameter(id)?;
                let table = scope.reshape(&table, [table.value().elems() / c, c])?;
                scope.gather_rows(&table, index)
            };
            let class = rows(self.class, &tables.zeros)?;
            let parts = [(&class, &tables.class_rows), (&patches, &tables.patch_rows)];
            let x = scope.merge_rows(&parts, tables.position_ids.elems())?;
            Ok([scope.add(&x, &rows(self.position, &tables.position_ids)?)?])
        })?;
        for (unit, block) in &self.blocks {
            [x] = tape.segment(*unit, [&x], move |scope, [x]| {
                let out = scope.with_rows(Rows::Patches, &tables.row_names, || {
                    block.forward(scope, x, &batch.sequences, &batch.rotary)
                })?;
                Ok([out])
            })?;
        }
        let [features] = tape.segment(self.end_unit, [&x], move |scope, [x]| {
            let x = scope.gather_rows(x, &tables.patch_rows)?;
            let positions = scope.embedding(self.end_position, &batch.position_ids)?;
            Ok([scope.add(&x, &positions)?])
        })?;
        tape.observe("cross_features", &features);
        Ok(features)
    }
}

/// `x += proj(norm(attention(norm(x)))); x += w3(norm(silu(w1 y) * w2 y))` of `y = norm(x)`.
#[derive(Clone, PartialEq, Debug)]
struct CrossBlock {
    attention_norm: LayerNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    inner_norm: LayerNorm,
    out: Linear,
    mlp_norm: LayerNorm,
    gate: Linear,
    up: Linear,
    ffn_norm: LayerNorm,
    down: Linear,
    head_dim: usize,
}

impl CrossBlock {
    fn new(params: &mut ParamScope<'_, '_>, config: &CrossConfig) -> Self {
        let (c, inner) = (config.width, config.inner);
        let attention_norm = LayerNorm::new(params, "norm1", c, EPS);
        let mut attention = params.at("attn");
        let mut project = |name: &str| attention.linear(name, [c, c], false);
        let (mut q, k, mut v) = (project("q_proj"), project("k_proj"), project("v_proj"));
        // Stored beside the projections instead of in them; keys have none.
        q.base.bias = Some(attention.param("q_bias", [c]));
        v.base.bias = Some(attention.param("v_bias", [c]));
        let inner_norm = LayerNorm::new(&mut attention, "inner_attn_ln", c, EPS);
        let out = attention.linear("proj", [c, c], true);
        let mlp_norm = LayerNorm::new(params, "norm2", c, EPS);
        let mut mlp = params.at("mlp");
        Self {
            attention_norm,
            q,
            k,
            v,
            inner_norm,
            out,
            mlp_norm,
            gate: mlp.linear("w1", [inner, c], true),
            up: mlp.linear("w2", [inner, c], true),
            ffn_norm: LayerNorm::new(&mut mlp, "ffn_ln", inner, EPS),
            down: mlp.linear("w3", [c, inner], true),
            head_dim: config.head_dim,
        }
    }

    fn forward(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        sequences: &Sequences,
        rotary: &Rotary,
    ) -> Result<Var> {
        let (t, c, d) = (x.shape().rows(), x.shape().last(), self.head_dim);
        let y = self.attention_norm.forward(scope, x)?;
        let split = |layer: &Linear| scope.reshape(&layer.forward(scope, &y)?, [t, c / d, d]);
        let rotate = |x: &Var| scope.rope(x, &rotary.cos, &rotary.sin, rotary.layout);
        let (q, k) = (rotate(&split(&self.q)?)?, rotate(&split(&self.k)?)?);
        let scale = (d as f32).powf(-0.5);
        let mixed = scope.attention(&q, &k, &split(&self.v)?, sequences, scale)?;
        let mixed = scope.reshape(&mixed, [t, c])?;
        let mixed = self.inner_norm.forward(scope, &mixed)?;
        let x = scope.add(x, &self.out.forward(scope, &mixed)?)?;
        let y = self.mlp_norm.forward(scope, &x)?;
        scope.add(&x, &self.feed_forward(scope, &y)?)
    }

    /// The feed-forward layers of `y`. They run in tiles unless their norm trains: its gradient sums over rows.
    fn feed_forward(&self, scope: &Scope<'_>, y: &Var) -> Result<Var> {
        let (gate, up, norm, down) = (
            self.gate.clone(),
            self.up.clone(),
            self.ffn_norm,
            self.down.clone(),
        );
        let ids: Vec<ParamId> = [&gate, &up, &down]
            .into_iter()
            .flat_map(Linear::ids)
            .collect();
        let run = move |scope: &Scope<'_>, y: &Var| {
            let (gate, up) = (gate.forward(scope, y)?, up.forward(scope, y)?);
            let inner = norm.forward(scope, &scope.swiglu(&gate, &up)?)?;
            down.forward(scope, &inner)
        };
        match scope.trains(norm.weight) || scope.trains(norm.bias) {
            true => run(scope, y),
            false => scope.in_tiles(y, &ids, run),
        }
    }
}
