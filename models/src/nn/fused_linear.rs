//! Several linear layers of one input whose weights lie in one tensor.

use super::Layer;
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::{LinearParams, LoraParams};
use std::ops::Range;

/// Projections of one input that a checkpoint keeps one above the other, such as queries, keys and values. Each is
/// computed as a product of its own, so that nothing has to be taken apart afterwards.
#[derive(Clone, PartialEq, Debug)]
pub struct FusedLinear {
    /// Weight and bias of all.
    pub base: LinearParams,
    /// The adapter of all, or one per projection.
    pub adapter: Option<LoraParams>,
    /// Rows of each projection.
    pub parts: Vec<Range<usize>>,
    /// Whether each projection has an adapter of its own.
    pub own_adapters: bool,
}

impl FusedLinear {
    /// Each projection as a layer of its own, for operations over several layers.
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

    /// Projection `i` and its adapter, where it has one.
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
