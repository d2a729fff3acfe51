//! Two linear layers over a partition of rows, with adapters.

use super::linear::{LinearParams, rows as rows_of};
use super::lora::{Adapter, Base, LoraParams};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{AdaptedGroup, AdapterArgs, RoutedLora, RoutedLoraArgs, Tensor};

/// One of the layers as its backward needs it.
struct Part {
    base: Base,
    adapter: Option<Adapter>,
}

/// The rows in use of its parameters.
struct PartTensors {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<([Tensor; 2], f32)>,
}

impl Part {
    fn tensors<'w>(
        &self,
        weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
        with_bias: bool,
    ) -> Result<PartTensors> {
        let (base, bias) = self.base.tensors(weight, with_bias)?;
        let adapter = match &self.adapter {
            Some(adapter) => Some((adapter.tensors(weight)?, adapter.scale())),
            None => None,
        };
        Ok(PartTensors {
            weight: base,
            bias,
            adapter,
        })
    }
}

impl Scope<'_> {
    /// Whether [`Scope::routed_lora_linear`] of layers with these adapters, or without, is possible, and quicker than
    /// taking their rows apart: not where an adapter drops some of its inputs.
    #[must_use]
    pub fn routes_adapters(&self, adapters: [Option<&LoraParams>; 2]) -> bool {
        let drops = |adapter: &LoraParams| adapter.dropout > 0.0;
        let dropped = self.dropout_state().is_some() && adapters.into_iter().flatten().any(drops);
        !dropped && self.backend().routes_adapters()
    }

    /// `x[row] W^T + bias + scale * (x[row] A^T) B^T` with the parameters of the row's group, whose layer need not have an
    /// adapter: `[t, k]` to `[t, n]`. Each group's `rows` are i32; together they name every row once. The results are those
    /// of [`Scope::lora_linear`] and [`Scope::linear`] on the rows of each group, up to the order of sums.
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
        let [first, second] = layers.map(|(base, adapter)| -> Result<Part> {
            let adapter = adapter.map(|params| Adapter::new(self, base, params));
            Ok(Part {
                base: Base::new(self, base),
                adapter: adapter.transpose()?,
            })
        });
        let parts = [first?, second?];
        let held = each(&parts, |part| part.tensors(&|id| self.weight(id), true))?;
        let RoutedLora { y, inner } = self.backend().routed_lora(args(&held, &input, rows))?;
        let (slot, shape) = (x.slot(), x.shape());
        let params = |part: &Part| -> Vec<ParamId> {
            let adapter = part.adapter.iter().flat_map(Adapter::params);
            adapter.chain(part.base.params()).collect()
        };
        let used: Vec<_> = parts.iter().flat_map(params).collect();
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
                if let (Some(adapter), Some(grads)) = (&part.adapter, grads) {
                    adapter.add_grads(sweep, grads)?;
                }
                part.base.add_grads(sweep, &input, &dy, Some(rows))?;
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
        let PartTensors {
            weight,
            bias,
            adapter,
        } = &held[i];
        AdaptedGroup {
            rows: rows[i],
            weight,
            bias: bias.as_ref(),
            adapter: adapter
                .as_ref()
                .map(|([lora_a, lora_b], scale)| AdapterArgs {
                    lora_a,
                    lora_b,
                    scale: *scale,
                }),
        }
    };
    RoutedLoraArgs {
        x,
        groups: [group(0), group(1)],
    }
}
