//! Two adapted linear layers over a partition of rows.

use super::linear::{LinearParams, rows as rows_of};
use super::lora::{LoraParams, Part, PartTensors};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use kernels::{RoutedLora, RoutedLoraArgs, Tensor};

impl Scope<'_> {
    /// Whether [`Scope::routed_lora_linear`] of layers with these adapters is possible, and quicker than taking their rows
    /// apart: not where an adapter drops some of its inputs, nor with unlike ranks or factors.
    ///
    /// # Errors
    /// When a weight is not there.
    pub fn routes_adapters(&self, [first, second]: [&LoraParams; 2]) -> Result<bool> {
        let drops = self.dropout_state().is_some() && first.dropout + second.dropout > 0.0;
        if drops || !self.backend().routes_adapters() || first.scale != second.scale {
            return Ok(false);
        }
        let rank = |adapter: &LoraParams| -> Result<usize> {
            Ok(self.weight(adapter.lora_b)?.shape().last())
        };
        Ok(rank(first)? == rank(second)?)
    }

    /// `x[row] W^T + bias + scale * (x[row] A^T) B^T` with the parameters of the row's group: `[t, k]` to `[t, n]`. Each
    /// group's `rows` are i32; together they name every row once. The results are those of [`Scope::lora_linear`] on the
    /// rows of each group, up to the order of sums.
    ///
    /// # Errors
    /// As [`Scope::linear`], or when the groups are no partition.
    pub fn routed_lora_linear(
        &self,
        x: &Var,
        layers: [(&LinearParams, LoraParams); 2],
        rows: [&Tensor; 2],
    ) -> Result<Var> {
        let input = rows_of(x.value())?;
        let [first, second] = layers.map(|(base, adapter)| self.part(base, adapter));
        let parts = [first?, second?];
        let held = each(&parts, |part| part.tensors(&|id| self.weight(id), true))?;
        let RoutedLora { y, inner } = self.backend().routed_lora(args(&held, &input, rows))?;
        let (slot, shape) = (x.slot(), x.shape());
        let used: Vec<_> = parts.iter().flat_map(Part::params).collect();
        let rows = rows.map(Tensor::clone);
        self.record("routed_lora_linear", y, &[x], &used, move |sweep, dy| {
            let rows = [&rows[0], &rows[1]];
            let held = each(&parts, |part| part.tensors(&|id| sweep.weight(id), false))?;
            let grads = sweep.backend().routed_lora_backward(
                args(&held, &input, rows),
                &dy,
                inner.as_ref(),
                slot.is_some(),
            )?;
            if let Some(dx) = grads.dx {
                sweep.add(slot, dx.reshape(shape)?)?;
            }
            for ((part, grads), rows) in parts.iter().zip(grads.adapters).zip(rows) {
                part.add_grads(sweep, &input, &dy, grads, Some(rows))?;
            }
            Ok(())
        })
    }
}

fn each(
    parts: &[Part; 2],
    tensors: impl Fn(&Part) -> Result<PartTensors>,
) -> Result<[PartTensors; 2]> {
    Ok([tensors(&parts[0])?, tensors(&parts[1])?])
}

fn args<'t>(
    held: &'t [PartTensors; 2],
    input: &'t Tensor,
    rows: [&'t Tensor; 2],
) -> RoutedLoraArgs<'t> {
    RoutedLoraArgs {
        rows,
        layers: [held[0].args(input), held[1].args(input)],
    }
}
