//! Parts of projectors from the tower to the width of the language model.

use super::tables::EvaTables;
use crate::autograd::{Rows, Scope, Var};
use crate::error::Result;
use crate::nn::{LayerNorm, Linear};
use crate::ops::LinearParams;
use crate::params::ParamScope;
use engine::ParamId;
use kernels::Gelu;

/// Epsilon of the projector's norm; it does not depend on the tower's.
const NORM_EPS: f32 = 1e-5;

/// The convolution of kernel and stride 2, as a product over the four patches under the kernel.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Fold {
    kernel: LinearParams,
}

impl Fold {
    /// Declares the parameters of the convolution `conv`, from width `c` to width `n`.
    pub(crate) fn new(params: &mut ParamScope<'_, '_>, c: usize, n: usize) -> Self {
        let mut conv = params.at("conv");
        let kernel = conv.param("weight", [n, c, 2, 2]);
        let bias = conv.param("bias", [n]);
        Self {
            kernel: LinearParams::new(kernel, Some(bias)),
        }
    }

    /// `[N * p, c]` to `[N * p / 4, n]`: cells row-major as the patches are.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(crate) fn forward(&self, scope: &Scope<'_>, x: &Var, tables: &EvaTables) -> Result<Var> {
        let (p, c) = (x.shape().rows(), x.shape().last());
        let cells = scope.gather_rows(x, &tables.fold_rows)?;
        let cells = scope.reshape(&cells, [p / 4, 4, c])?;
        // The kernel's axes are channel, row, column.
        let cells = scope.transpose_each(&cells)?;
        let cells = scope.reshape(&cells, [p / 4, 4 * c])?;
        scope.linear(&cells, &self.kernel)
    }
}

/// `down(silu(gate(y)) * up(y))` of `y = gelu(norm(linear(x)))`, without biases.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct GluProjector {
    linear: Linear,
    norm: LayerNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl GluProjector {
    /// Declares `linear_proj`: from width `c` to `d`, with `inner` gated elements.
    pub(crate) fn new(params: &mut ParamScope<'_, '_>, c: usize, d: usize, inner: usize) -> Self {
        let mut scope = params.at("linear_proj");
        Self {
            linear: scope.linear("linear_proj", [d, c], false),
            norm: LayerNorm::new(&mut scope, "norm1", d, NORM_EPS),
            gate: scope.linear("gate_proj", [inner, d], false),
            up: scope.linear("dense_h_to_4h", [inner, d], false),
            down: scope.linear("dense_4h_to_h", [d, inner], false),
        }
    }

    /// Applies the projector to the features `x`: `[M, c]` to `[M, d]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(crate) fn forward(&self, scope: &Scope<'_>, x: &Var, tables: &EvaTables) -> Result<Var> {
        scope.with_rows(Rows::Patches, &tables.feature_names, || {
            let x = self.linear.forward(scope, x)?;
            let x = scope.gelu(&self.norm.forward(scope, &x)?, Gelu::Erf)?;
            let layers = [&self.gate, &self.up, &self.down];
            let ids: Vec<ParamId> = layers.into_iter().flat_map(Linear::ids).collect();
            let [gate, up, down] = layers.map(Linear::clone);
            scope.in_tiles(&x, &ids, move |scope, x| {
                let (gate, up) = (gate.forward(scope, x)?, up.forward(scope, x)?);
                down.forward(scope, &scope.swiglu(&gate, &up)?)
            })
        })
    }
}

/// Learned rows before and after the features of every image.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Frame {
    begin: ParamId,
    end: ParamId,
}

impl Frame {
    /// Declares the learned rows `boi` (before) and `eoi` (after), of width `d`.
    pub(crate) fn new(params: &mut ParamScope<'_, '_>, d: usize) -> Self {
        let mut row = |name| params.param(name, [1, 1, d]);
        Self {
            begin: row("boi"),
            end: row("eoi"),
        }
    }

    /// Adds the learned rows before and after each image's features: `[N * m, d]` to `[N * (m + 2), d]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(crate) fn forward(&self, scope: &Scope<'_>, x: &Var, tables: &EvaTables) -> Result<Var> {
        let row = |id: ParamId| -> Result<Var> {
            let one = scope.reshape(&scope.parameter(id)?, [1, x.shape().last()])?;
            scope.gather_rows(&one, &tables.zeros)
        };
        let (begin, end) = (row(self.begin)?, row(self.end)?);
        let parts = [
            (&begin, &tables.begin_rows),
            (x, &tables.feature_rows),
            (&end, &tables.end_rows),
        ];
        let rows = x.shape().rows() + 2 * tables.zeros.elems();
        scope.merge_rows(&parts, rows)
    }
}
