//! Several linear layers of one input whose weights are one tensor.

use super::Linear;
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::{LinearParams, LoraParams};
use std::ops::Range;

/// Projections of one input that a checkpoint stores one above the other, such as queries, keys and values. Each is a
/// product of its own, so that no output has to be split.
#[derive(Clone, PartialEq, Debug)]
pub struct FusedLinear {
    /// The weight that holds all projections one above the other, and the bias, if any.
    pub base: LinearParams,
    /// The one adapter of all projections, or the stack of their own adapters.
    pub adapter: Option<LoraParams>,
    /// For each projection, its rows of the weight.
    pub parts: Vec<Range<usize>>,
    /// Whether each projection has an adapter of its own, instead of one for all.
    pub own_adapters: bool,
}

impl FusedLinear {
    /// Returns each projection as a layer of its own; `N` must be the number of `parts`.
    #[must_use]
    pub fn layers<const N: usize>(&self) -> [Linear; N] {
        debug_assert_eq!(N, self.parts.len());
        std::array::from_fn(|i| Linear {
            base: self.base.clone().with_rows(self.parts[i].clone()),
            adapter: self.adapter.map(|adapter| match self.own_adapters {
                true => adapter.with_part(i),
                false => adapter,
            }),
        })
    }

    /// Applies all projections to `x` `[t, k]`: the results are `[t, n]`, in the order of `parts`, with `n` the rows
    /// of the part.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward<const N: usize>(&self, scope: &Scope<'_>, x: &Var) -> Result<[Var; N]> {
        let layers = self.layers::<N>();
        Linear::forward_all(layers.each_ref(), scope, x)
    }
}
