//! Several linear layers of one input whose weights lie in one tensor.

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
    /// Weight and bias of each projection, where they are all of the layer.
    #[must_use]
    pub fn plain(&self) -> Option<Vec<LinearParams>> {
        let part = |rows: &Range<usize>| self.base.clone().with_rows(rows.clone());
        self.adapter
            .is_none()
            .then(|| self.parts.iter().map(part).collect())
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
