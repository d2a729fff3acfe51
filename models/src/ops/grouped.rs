//! Grouped linear layer (grouped GEMM): two layers over a partition of rows.

use super::linear::{LinearParams, matrix};
use crate::autograd::{Scope, Sweep, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{GroupedMatmulArgs, MatmulGroup, Tensor, Transpose};

/// Partition of a batch's token rows into two groups, e.g. by expert. Each group is a non-empty i32 tensor of
/// row indices.
#[derive(Clone, Debug)]
pub struct RowGroups(pub [Tensor; 2]);

impl RowGroups {
    /// The row indices of the two groups, i32 each.
    #[must_use]
    pub fn rows(&self) -> [&Tensor; 2] {
        self.0.each_ref()
    }
}

/// One group of rows and the linear layer that is applied to it.
#[derive(Clone, Debug)]
struct Group {
    params: LinearParams,
    /// Indices of the rows in the group, i32.
    rows: Tensor,
}

impl Group {
    /// Adds the gradients of bias and weight, as far as they train.
    fn add_grads(
        &self,
        sweep: &mut Sweep<'_>,
        dy: &Tensor,
        input: Option<&Tensor>,
        bias: Option<ParamId>,
    ) -> Result<()> {
        if let Some(id) = bias {
            let d_bias = sweep.backend().column_sum_of_rows(dy, &self.rows)?;
            self.params.add_grad(sweep, id, d_bias)?;
        }
        if let Some(input) = input {
            let d_weight = sweep.backend().matmul_of_rows(dy, input, &self.rows)?;
            self.params.add_grad(sweep, self.params.weight, d_weight)?;
        }
        Ok(())
    }
}

impl Scope<'_> {
    /// Linear layer per row group: `x[row] W^T + bias` with weight and bias of the row's group.
    ///
    /// `x [t, k]` gives `[t, n]` in the dtype of `x`. The `rows` of each group are i32; together they name every row
    /// once. The results are those of [`Scope::linear`] on the rows of each group.
    ///
    /// # Errors
    /// As [`Scope::linear`], or when the groups are not a partition.
    pub fn grouped_linear(
        &self,
        x: &Var,
        params: [&LinearParams; 2],
        rows: &RowGroups,
    ) -> Result<Var> {
        let rows = rows.rows();
        let input = super::linear::rows(x.value())?;
        let mut weights = Vec::with_capacity(2);
        let mut biases = Vec::with_capacity(2);
        for layer in params {
            weights.push(matrix(&layer.select(self.weight(layer.weight)?)?)?);
            let bias = layer.bias.map(|id| layer.select(self.weight(id)?));
            biases.push(bias.transpose()?);
        }
        let groups = [0, 1].map(|i| MatmulGroup {
            rows: rows[i],
            b: &weights[i],
            bias: biases[i].as_ref(),
        });
        let value = self.backend().grouped_matmul(GroupedMatmulArgs {
            a: &input,
            groups,
            transpose_b: Transpose::Yes,
        })?;
        let (slot, shape) = (x.slot(), x.shape());
        let trained = params.map(|layer| {
            let bias = layer.bias.filter(|id| self.trains(*id));
            (self.trains(layer.weight), bias)
        });
        // The input is stored only if a weight needs it for its gradient.
        let kept = trained.iter().any(|(weight, _)| *weight).then_some(input);
        let used: Vec<ParamId> = params
            .iter()
            .flat_map(|layer| [Some(layer.weight), layer.bias])
            .flatten()
            .collect();
        let groups = [0, 1].map(|i| Group {
            params: params[i].clone(),
            rows: rows[i].clone(),
        });
        self.record("grouped_linear", value, &[x], &used, move |sweep, dy| {
            for (group, (weight, bias)) in groups.iter().zip(trained) {
                let input = kept.as_ref().filter(|_| weight);
                group.add_grads(sweep, &dy, input, bias)?;
            }
            drop(kept);
            if slot.is_none() {
                return Ok(());
            }
            let mut weights = Vec::with_capacity(2);
            for Group { params, .. } in &groups {
                weights.push(matrix(&params.select(sweep.weight(params.weight)?)?)?);
            }
            let dx = sweep.backend().grouped_matmul(GroupedMatmulArgs {
                a: &dy,
                groups: [0, 1].map(|i| MatmulGroup {
                    rows: &groups[i].rows,
                    b: &weights[i],
                    bias: None,
                }),
                transpose_b: Transpose::No,
            })?;
            sweep.add(slot, dx.reshape(shape)?)
        })
    }
}
