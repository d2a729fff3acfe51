//! The resampler: learned queries read the patches of each block, one slice or frames of a video, by one
//! cross-attention.
//!
//! Shapes: `P` patches of all slices, `N` blocks, `Q` queries, `D` width of the language model.

use super::config::{MiniCpmConfig, RESAMPLER_HEAD_DIM};
use super::tables::MiniCpmTables;
use crate::autograd::{Scope, Tape, Var};
use crate::batch::VisionBatch;
use crate::error::Result;
use crate::nn::LayerNorm;
use crate::ops::LinearParams;
use crate::params::ParamBuilder;
use engine::{ParamId, UnitId};
use kernels::{Backend, DType, Shape, Tag, Tensor};

/// Epsilon of the resampler's norms, added to the variance.
const EPS: f32 = 1e-6;

/// The vision tower's final norm and the resampler, one unit.
#[derive(Debug)]
pub(super) struct Resampler {
    unit: UnitId,
    post_norm: LayerNorm,
    query: ParamId,
    kv_proj: LinearParams,
    /// Rows of the packed projection that yield the queries; `k` and `v` are the other two thirds.
    q: LinearParams,
    k: LinearParams,
    v: LinearParams,
    out: LinearParams,
    ln_q: LayerNorm,
    ln_kv: LayerNorm,
    ln_post: LayerNorm,
    proj: ParamId,
    width: usize,
}

impl Resampler {
    pub(super) fn new(params: &mut ParamBuilder<'_>, config: &MiniCpmConfig) -> Self {
        let d = config.language.hidden_size;
        let (c, eps) = (config.vision.hidden_size, config.vision.layer_norm_eps);
        let mut unit = params.unit("resampler");
        let id = unit.id();
        let post_norm = LayerNorm::new(&mut unit.at("vpm"), "post_layernorm", c, eps as f32);
        let mut scope = unit.at("resampler");
        let query = scope.param("query", [config.query_num, d]);
        let kv_proj = scope.at("kv_proj").param("weight", [d, c]);
        let mut attn = scope.at("attn");
        let in_weight = attn.param("in_proj_weight", [3 * d, d]);
        let in_bias = attn.param("in_proj_bias", [3 * d]);
        let mut out = attn.at("out_proj");
        let out_weight = out.param("weight", [d, d]);
        let out_bias = out.param("bias", [d]);
        let third =
            |i: usize| LinearParams::new(in_weight, Some(in_bias)).with_rows(i * d..(i + 1) * d);
        Self {
            unit: id,
            post_norm,
            query,
            kv_proj: LinearParams::new(kv_proj, None),
            q: third(0),
            k: third(1),
            v: third(2),
            out: LinearParams::new(out_weight, Some(out_bias)),
            ln_q: LayerNorm::new(&mut scope, "ln_q", d, EPS),
            ln_kv: LayerNorm::new(&mut scope, "ln_kv", d, EPS),
            ln_post: LayerNorm::new(&mut scope, "ln_post", d, EPS),
            proj: scope.param("proj", [d, d]),
            width: d,
        }
    }

    /// Runs the norm and the resampler: `[P, c]` from the vision tower to `[N * Q, D]`.
    pub(super) fn forward<'m>(
        &'m self,
        tape: &Tape<'_, 'm>,
        x: &Var,
        batch: &'m VisionBatch,
    ) -> Result<Var> {
        let batch = batch.tables::<MiniCpmTables>()?;
        let [features] = tape.segment(self.unit, [x], move |scope, [x]| {
            let x = self.post_norm.forward(scope, x)?;
            scope.observe("vision.post_layernorm", &x);
            Ok([self.resample(scope, &x, batch)?])
        })?;
        tape.observe("vision_features", &features);
        Ok(features)
    }

    fn resample(&self, scope: &Scope<'_>, x: &Var, batch: &MiniCpmTables) -> Result<Var> {
        let x = scope.linear(x, &self.kv_proj)?;
        let x = self.ln_kv.forward(scope, &x)?;
        let keys = scope.constant(self.positions(scope.backend(), batch, x.dtype())?);
        let keys = scope.add(&x, &keys)?;
        let query = self.ln_q.forward(scope, &scope.parameter(self.query)?)?;
        let query = scope.linear(&query, &self.q)?;
        let query = scope.gather_rows(&query, &batch.query_index)?;
        let (heads, d) = (self.width / RESAMPLER_HEAD_DIM, RESAMPLER_HEAD_DIM);
        let split = |x: &Var| scope.reshape(x, [x.shape().rows(), heads, d]);
        let mixed = scope.attention(
            &split(&query)?,
            &split(&scope.linear(&keys, &self.k)?)?,
            &split(&scope.linear(&x, &self.v)?)?,
            &batch.resample,
            (d as f32).powf(-0.5),
        )?;
        let mixed = scope.reshape(&mixed, [query.shape().rows(), self.width])?;
        let out = scope.linear(&mixed, &self.out)?;
        let out = self.ln_post.forward(scope, &out)?;
        scope.matmul(&out, self.proj)
    }

    /// Two-dimensional sine and cosine positions of all patches, `[P, D]`: the column's half
    /// first, then the row's. Gathered from one table per axis, so that only small tables are
    /// computed.
    fn positions(
        &self,
        backend: &dyn Backend,
        batch: &MiniCpmTables,
        dtype: DType,
    ) -> Result<Tensor> {
        let half = |axis: usize| -> Result<Tensor> {
            let table = axis_table(batch.grid[axis], self.width, axis);
            let shape = Shape::new(&[batch.grid[axis], self.width]);
            let bytes = bytemuck::cast_slice(&table);
            let table = backend.upload(bytes, shape, DType::F32, Tag::Workspace)?;
            let table = backend.cast(&table, dtype)?;
            Ok(backend.gather_rows(&table, &batch.patch_coords[axis])?)
        };
        // Each half is zero where the other is not, so the sum is exact in any dtype.
        let places = backend.add(&half(0)?, &half(1)?)?;
        let Some((stamps, slice_of)) = &batch.times else {
            return Ok(places);
        };
        let table: Vec<f32> = stamps
            .iter()
            .flat_map(|stamp| time_row(*stamp, self.width))
            .collect();
        let shape = Shape::new(&[stamps.len(), self.width]);
        let bytes = bytemuck::cast_slice(&table);
        let table = backend.upload(bytes, shape, DType::F32, Tag::Workspace)?;
        let table = backend.cast(&table, dtype)?;
        Ok(backend.add(&places, &backend.gather_rows(&table, slice_of)?)?)
    }
}

/// Position of a time in tenths of seconds, `[width]`: `sin(t w), cos(t w)` with `w_j = 10000^(-j / (width / 2))`, in
/// f32; zero without a time.
fn time_row(stamp: Option<u32>, width: usize) -> Vec<f32> {
    let Some(tenths) = stamp else {
        return vec![0.0; width];
    };
    let half = width / 2;
    let angles = (0..half).map(|j| {
        let omega = 1.0 / 10000f32.powf(j as f32 / half as f32);
        tenths as f32 * omega
    });
    let sines = angles.clone().map(f32::sin);
    sines.chain(angles.map(f32::cos)).collect()
}

/// `[count, width]` of one axis (0 rows, 1 columns), zero in the other axis' half:
/// `sin(i w), cos(i w)` with `w_j = 10000^(-j / (width / 4))`, in f32.
fn axis_table(count: usize, width: usize, axis: usize) -> Vec<f32> {
    let quarter = width / 4;
    let start = if axis == 1 { 0 } else { 2 * quarter };
    let mut table = vec![0.0; count * width];
    for (i, row) in table.chunks_exact_mut(width).enumerate() {
        for j in 0..quarter {
            let omega = 1.0 / 10000f32.powf(j as f32 / quarter as f32);
            let (sin, cos) = (i as f32 * omega).sin_cos();
            row[start + j] = sin;
            row[start + quarter + j] = cos;
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_position_table_has_columns_before_rows() {
        let (rows, cols) = (axis_table(3, 8, 0), axis_table(3, 8, 1));
        let (sin, cos) = 2f32.sin_cos();
        let (sin2, cos2) = 0.02f32.sin_cos();
        let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-7);
        assert!(close(&cols[16..], &[sin, sin2, cos, cos2, 0., 0., 0., 0.]));
        assert!(close(&rows[16..], &[0., 0., 0., 0., sin, sin2, cos, cos2]));
    }
}
