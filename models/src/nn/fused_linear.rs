//! Several linear layers of one input with one weight tensor.

use super::Layer;
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::{LinearParams, LoraParams};
use std::ops::Range;

/// Projections of one input whose weights the checkpoint concatenates along the rows, such as q, k and v. Each is
/// computed by its own product, so the outputs are separate tensors.
#[derive(Clone, PartialEq, Debug)]
pub struct FusedLinear {
    /// Concatenated weight and bias.
    pub base: LinearParams,
    /// The adapter of the whole layer, or the concatenated adapters of the projections.
    pub adapter: Option<LoraParams>,
    /// Rows of each projection.
    pub parts: Vec<Range<usize>>,
    /// Whether each projection has its own adapter.
    pub own_adapters: bool,
}

impl FusedLinear {
    /// The projections as separate layers, for operations over several layers.
    #[must_use]
    pub fn layers(&self) -> Vec<Layer> {
        let layer = |(i, rows): (usize, &Range<usize>)| {
            let adapter = self.adapted(i).map(|(_, adapter)| adapter);
            (self.base.clone().with_rows(rows.clone()), adapter)
        };
        self.parts.iter().enumerate().map(layer).collect()
    }

    /// Projection `i`: `[t, k]` to `[t, rows of the part]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn part(&self, scope: &Scope<'_>, x: &Var, i: usize) -> Result<Var> {
        match self.adapted(i) {
            Some((base, adapter)) => scope.lora_linear(x, &base, adapter),
            None => scope.linear(x, &self.base.clone().with_rows(self.parts[i].clone())),
        }
    }

    /// Weight and adapter of projection `i`, if it has an adapter.
    fn adapted(&self, i: usize) -> Option<(LinearParams, LoraParams)> {
        let base = self.base.clone().with_rows(self.parts[i].clone());
        let adapter = match self.adapter? {
            adapter if self.own_adapters => adapter.with_part(i),
            adapter => adapter,
        };
        Some((base, adapter))
    }

    /// All projections, in order.
    ///
    /// # Errors
    /// As [`FusedLinear::part`].
    pub fn forward<const N: usize>(&self, scope: &Scope<'_>, x: &Var) -> Result<[Var; N]> {
        debug_assert_eq!(N, self.parts.len());
        let adapted = (0..N).map(|i| self.adapted(i)).collect::<Option<Vec<_>>>();
        let parts = match adapted {
            Some(adapted) => scope.shared_lora(x, &adapted)?,
            None => {
                let each = (0..N).map(|i| self.part(scope, x, i));
                each.collect::<Result<_>>()?
            }
        };
        Ok(parts.try_into().expect("one value per part"))
    }
}
