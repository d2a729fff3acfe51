//! Two linear layers over a partition of rows, with adapters; also several such pairs of one input.

use super::linear::{LinearParams, rows as rows_of};
use super::lora::{LoraParams, Part, PartTensors};
use crate::autograd::{Scope, Var};
use crate::error::Result;
use kernels::{AdaptedGroup, RoutedLoraArgs, SharedRoutedLora, SharedRoutedLoraGradArgs, Tensor};

/// A layer for each group of rows; a layer need not have an adapter.
pub type RoutedLayers<'l> = [(&'l LinearParams, Option<LoraParams>); 2];

impl Scope<'_> {
    /// Whether [`Scope::routed_lora_linear`] is quicker than taking the rows of adapted layers apart.
    #[must_use]
    pub fn routes_adapters(&self) -> bool {
        self.backend().routes_adapters()
    }

    /// `x[row] W^T + bias + scale * (seen[row] A^T) B^T` with the parameters of the row's group, `seen` being what
    /// [`Scope::lora_linear`] has: `[t, k]` to `[t, n]`. Each group's `rows` are i32; together they name every row once. The
    /// results are those of [`Scope::lora_linear`] and [`Scope::linear`] on the rows of each group, up to the order of sums.
    ///
    /// # Errors
    /// As [`Scope::linear`], or when the groups are no partition.
    pub fn routed_lora_linear(
        &self,
        x: &Var,
        layers: RoutedLayers<'_>,
        rows: [&Tensor; 2],
    ) -> Result<Var> {
        let mut all = self.shared_routed_lora(x, &[layers], rows)?;
        Ok(all.pop().expect("one value of one pair of layers"))
    }

    /// Pairs of layers of one `x`, each as [`Scope::routed_lora_linear`], in order. The gradients of `x` are added from the last
    /// pair to the first. What the adapters made of their inputs is kept for backward, where the device keeps any.
    ///
    /// # Errors
    /// As [`Scope::routed_lora_linear`].
    pub fn shared_routed_lora(
        &self,
        x: &Var,
        layers: &[RoutedLayers<'_>],
        rows: [&Tensor; 2],
    ) -> Result<Vec<Var>> {
        if layers.is_empty() {
            return Ok(Vec::new());
        }
        let input = rows_of(x.value())?;
        let part = |(base, adapter)| Part::new(self, base, adapter);
        let pairs = layers.iter().map(|[first, second]| {
            let pair: [Part; 2] = [part(*first)?, part(*second)?];
            Ok(pair)
        });
        let pairs: Vec<[Part; 2]> = pairs.collect::<Result<_>>()?;
        let held = pairs
            .iter()
            .map(|pair| each(pair, |part| part.tensors(&|id| self.weight(id), true)));
        let held: Vec<[PartTensors; 2]> = held.collect::<Result<_>>()?;
        let all: Vec<_> = held.iter().map(|held| args(held, &input, rows)).collect();
        let SharedRoutedLora { y, inner } = self.backend().shared_routed_lora(&all)?;
        let (slot, shape) = (x.slot(), x.shape());
        let values = y.into_iter().zip(&pairs);
        let values = values.map(|(y, pair)| (y, pair.iter().flat_map(Part::params).collect()));
        let values = values.collect();
        let rows = rows.map(Tensor::clone);
        self.record_all("routed_lora_linear", values, x, move |sweep, dy| {
            // The form of `inner` is that of all pairs together.
            let whole = dy.iter().all(Option::is_some);
            let inner = if whole { inner } else { Vec::new() };
            let both = pairs.iter().zip(&dy);
            let used: Vec<(&[Part; 2], &Tensor)> = both
                .filter_map(|(pair, dy)| Some((pair, dy.as_ref()?)))
                .collect();
            let held = used
                .iter()
                .map(|(pair, _)| each(pair, |part| part.tensors(&|id| sweep.weight(id), false)));
            let held: Vec<[PartTensors; 2]> = held.collect::<Result<_>>()?;
            let rows = [&rows[0], &rows[1]];
            let all: Vec<_> = held.iter().map(|held| args(held, &input, rows)).collect();
            let dy: Vec<&Tensor> = used.iter().map(|(_, dy)| *dy).collect();
            let backend = sweep.backend();
            let grads = backend.shared_routed_lora_backward(SharedRoutedLoraGradArgs {
                layers: &all,
                dy: &dy,
                inner: &inner,
                need_dx: slot.is_some(),
            })?;
            if let Some(dx) = grads.dx {
                sweep.add(slot, dx.reshape(shape)?)?;
            }
            // In the order of pairs that stand for themselves: a gradient may be that of several.
            for ((pair, dy), grads) in used.into_iter().zip(grads.adapters).rev() {
                for ((part, grads), rows) in pair.iter().zip(grads).zip(rows) {
                    part.add_grads(sweep, grads, [&input, dy], Some(rows))?;
                }
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
