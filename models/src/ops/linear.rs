//! Matrix products with weights.

use crate::autograd::{Scope, Sweep, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{DType, MatmulArgs, Tensor, Transpose};
use std::ops::Range;

/// The parameters of a linear layer, `x W^T + bias`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinearParams {
    /// Id of the layer's weight `W`, `[n, k]`. Further axes (of a convolution kernel) are folded into `k`.
    pub weight: ParamId,
    /// Id of the layer's bias, `[n]`, if it has one.
    pub bias: Option<ParamId>,
    /// Rows of weight and bias to use, e.g. one third of a fused query-key-value weight. `None` means all.
    pub rows: Option<Range<usize>>,
}

impl LinearParams {
    /// Linear layer that uses all rows of `weight` and `bias`.
    #[must_use]
    pub fn new(weight: ParamId, bias: Option<ParamId>) -> Self {
        Self {
            weight,
            bias,
            rows: None,
        }
    }

    /// Restricts the layer to the rows `rows` of its weight and bias, so that it has `rows.len()` outputs.
    #[must_use]
    pub fn with_rows(mut self, rows: Range<usize>) -> Self {
        self.rows = Some(rows);
        self
    }

    /// View of a parameter's rows in use.
    pub(super) fn select(&self, weight: &Tensor) -> Result<Tensor> {
        Ok(match &self.rows {
            Some(rows) => weight.narrow(rows.start, rows.len())?,
            None => weight.clone(),
        })
    }

    /// Adds a sum over rows, the number `key` of the operation, to the gradient of the parameter `id`.
    pub(super) fn add_sum(
        &self,
        sweep: &mut Sweep<'_>,
        key: usize,
        id: ParamId,
        sum: Tensor,
    ) -> Result<()> {
        sweep.row_sum(key, id, self.rows.clone(), sum)
    }

    /// The parameters: weight, and bias if there is one.
    pub(super) fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        [Some(self.weight), self.bias].into_iter().flatten()
    }

    pub(super) fn add_grad(&self, sweep: &mut Sweep<'_>, id: ParamId, grad: Tensor) -> Result<()> {
        match &self.rows {
            Some(rows) => sweep.param_rows(id, rows.clone(), grad),
            None => sweep.param(id, grad),
        }
    }
}

/// View of a weight as a matrix `[n, k]`.
pub(super) fn matrix(weight: &Tensor) -> Result<Tensor> {
    let n = weight.shape().dims().first().copied().unwrap_or(1);
    Ok(weight.reshape([n, weight.elems() / n.max(1)])?)
}

/// View of `a` with its leading axes folded into rows.
pub(super) fn rows(a: &Tensor) -> Result<Tensor> {
    Ok(a.reshape([a.shape().rows(), a.shape().last()])?)
}

/// Matrix product `op(a) @ op(b)` with dtype `out`.
pub(super) fn product(
    sweep: &Sweep<'_>,
    (a, transpose_a): (&Tensor, Transpose),
    (b, transpose_b): (&Tensor, Transpose),
    out: DType,
) -> Result<Tensor> {
    Ok(sweep.backend().matmul(MatmulArgs {
        a,
        transpose_a,
        b,
        transpose_b,
        bias: None,
        out,
    })?)
}

impl Scope<'_> {
    /// Linear layer `x W^T + bias`: `[t, k]` to `[t, n]`, in the dtype of `x`.
    ///
    /// # Errors
    /// When shapes do not fit, the parameter is not in the unit whose weights are gathered, or memory runs out.
    pub fn linear(&self, x: &Var, params: &LinearParams) -> Result<Var> {
        let input = rows(x.value())?;
        let weight = matrix(&params.select(self.weight(params.weight)?)?)?;
        let bias = params
            .bias
            .map(|id| params.select(self.weight(id)?))
            .transpose()?;
        let value = self.backend().matmul(MatmulArgs {
            a: &input,
            transpose_a: Transpose::No,
            b: &weight,
            transpose_b: Transpose::Yes,
            bias: bias.as_ref(),
            out: x.dtype(),
        })?;
        let (slot, shape, dtype) = (x.slot(), x.shape(), x.dtype());
        let weight_id = params.weight;
        let bias_id = params.bias.filter(|id| self.trains(*id));
        // The input is stored only if the weight needs it for its gradient.
        let kept = self.trains(weight_id).then_some(input);
        let used: Vec<ParamId> = params.ids().collect();
        let params = params.clone();
        self.record("linear", value, &[x], &used, move |sweep, dy| {
            if let Some(id) = bias_id {
                let d_bias = sweep.column_sum(0, &dy)?;
                params.add_sum(sweep, 0, id, d_bias)?;
            }
            if let Some(input) = kept {
                let d_weight = sweep.weight_gradient(1, &dy, &input)?;
                params.add_sum(sweep, 1, weight_id, d_weight)?;
            }
            if slot.is_some() {
                let weight = matrix(&params.select(sweep.weight(weight_id)?)?)?;
                let dx = product(sweep, (&dy, Transpose::No), (&weight, Transpose::No), dtype)?;
                sweep.add(slot, dx.reshape(shape)?)?;
            }
            Ok(())
        })
    }

    /// Matrix product `x @ W` with a parameter `W [k, n]`, used without transposition.
    ///
    /// # Errors
    /// As [`Scope::linear`].
    pub fn matmul(&self, x: &Var, weight: ParamId) -> Result<Var> {
        let input = rows(x.value())?;
        let value = self.backend().matmul(MatmulArgs {
            a: &input,
            transpose_a: Transpose::No,
            b: self.weight(weight)?,
            transpose_b: Transpose::No,
            bias: None,
            out: x.dtype(),
        })?;
        let (slot, shape, dtype) = (x.slot(), x.shape(), x.dtype());
        let kept = self.trains(weight).then_some(input);
        self.record("matmul", value, &[x], &[weight], move |sweep, dy| {
            if let Some(input) = kept {
                let d_weight = product(
                    sweep,
                    (&input, Transpose::Yes),
                    (&dy, Transpose::No),
                    DType::F32,
                )?;
                sweep.param(weight, d_weight)?;
            }
            if slot.is_some() {
                let w = sweep.weight(weight)?;
                let dx = product(sweep, (&dy, Transpose::No), (w, Transpose::Yes), dtype)?;
                sweep.add(slot, dx.reshape(shape)?)?;
            }
            Ok(())
        })
    }
}
