//! Two linear layers over a partition of rows, with adapters.

use super::linear::{LinearParams, rows as rows_of};
use super::lora::{LoraParams, Part, PartTensors};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use kernels::{AdaptedGroup, RoutedLora, RoutedLoraArgs, Tensor};

impl Scope<'_> {
    /// Whether [`Scope::routed_lora_linear`] is quicker than taking the rows of adapted layers apart.
    #[must_use]
    pub fn routes_adapters(&self) -> bool {
        self.backend().routes_adapters()
    }

    /// `x[row] W^T + bias + scale * (seen[row] A^T) B^T` with the parameters of the row's group, `seen` being what
    /// [`Scope::lora_linear`] has; a layer need not have an adapter: `[t, k]` to `[t, n]`. Each group's `rows` are i32;
    /// together they name every row once. The results are those of [`Scope::lora_linear`] and [`Scope::linear`] on the rows
    /// of each group, up to the order of sums.
    ///
    /// # Errors
    /// As [`Scope::linear`], or when the groups are no partition.
    pub fn routed_lora_linear(
        &self,
        x: &Var,
        layers: [(&LinearParams, Option<LoraParams>); 2],
        rows: [&Tensor; 2],
    ) -> Result<Var> {
        let input = rows_of(x.value())?;
        let [first, second] = layers.map(|(base, adapter)| Part::new(self, base, adapter));
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
                part.add_grads(sweep, grads, [&input, &dy], Some(rows))?;
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
    x: &'t Tensor,
    rows: [&'t Tensor; 2],
) -> RoutedLoraArgs<'t> {
    let group = |i: usize| -> AdaptedGroup<'t> {
        AdaptedGroup {
            rows: rows[i],
            weight: &held[i].weight,
            bias: held[i].bias.as_ref(),
            adapter: held[i].adapter(),
        }
    };
    RoutedLoraArgs {
        x,
        groups: [group(0), group(1)],
    }
}
