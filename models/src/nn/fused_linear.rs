//! Several linear layers of one input whose weights are one tensor.

use super::Linear;
use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::{LinearParams, LoraParams};
use std::ops::Range;

/// Linear layers of one input, such as q, k and v, whose weights are stacked by rows into one parameter. Each
/// is a matrix product of its own, so that no output has to be split.
#[derive(Clone, PartialEq, Debug)]
pub struct FusedLinear {
    /// Weight and optional bias that stack the rows of all projections.
    pub base: LinearParams,
    /// LoRA parameters, if the layer is a target: one adapter for all projections, or a stack with one per
    /// projection.
    pub adapter: Option<LoraParams>,
    /// Row range of each projection in the stacked weight.
    pub parts: Vec<Range<usize>>,
    /// Whether `adapter` is a stack with one adapter per projection, instead of one for all.
    pub own_adapters: bool,
}

impl FusedLinear {
    /// Returns each projection as a linear layer of its own; `N` must be the number of `parts`.
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

    /// Applies all projections to `x`, `[t, k]`. Returns one `[t, n]` per projection in the order of `parts`,
    /// where `n` is the number of the projection's rows.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward<const N: usize>(&self, scope: &Scope<'_>, x: &Var) -> Result<[Var; N]> {
        let layers = self.layers::<N>();
        Linear::forward_all(layers.each_ref(), scope, x)
    }
}
