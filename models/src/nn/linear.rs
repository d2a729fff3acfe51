//! The linear layer, with or without an adapter.

use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::LinearLayer;

/// Linear layer that may have a low-rank adapter (LoRA).
pub type Linear = LinearLayer;

impl Linear {
    /// Applies the layer to `x`: `[t, k]` to `[t, n]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        let [y] = Self::forward_all([self], scope, x)?;
        Ok(y)
    }

    /// Applies each of `layers` to the same input `x`, `[t, k]`, and returns a `[t, n]` for each, in order.
    /// If all have adapters, they run as one operation.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward_all<const N: usize>(
        layers: [&Self; N],
        scope: &Scope<'_>,
        x: &Var,
    ) -> Result<[Var; N]> {
        let projections = |layers: &[&Self]| -> Vec<Vec<Self>> {
            let own = layers.iter();
            own.map(|layer| vec![(*layer).clone()]).collect()
        };
        let all = if layers.iter().all(|layer| layer.adapter.is_some()) {
            scope.adapted_linear(x, None, &projections(&layers))?
        } else {
            let each = layers.iter().map(|layer| match layer.adapter {
                Some(_) => Self::forward_all([*layer], scope, x).map(|[y]| y),
                None => scope.linear(x, &layer.base),
            });
            each.collect::<Result<_>>()?
        };
        Ok(all.try_into().expect("one value per layer"))
    }
}
