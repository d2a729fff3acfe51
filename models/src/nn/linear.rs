//! The linear layer, with or without an adapter.

use crate::autograd::{Scope, Var};
use crate::error::Result;
use crate::ops::{LinearParams, LoraParams};

/// Weight and bias of a layer, and its adapter if it has one.
pub type Layer = (LinearParams, Option<LoraParams>);

/// `x W^T + bias`, plus a low-rank adapter if the layer is a target.
#[derive(Clone, PartialEq, Debug)]
pub struct Linear {
    /// Weight and bias.
    pub base: LinearParams,
    /// The adapter, if any.
    pub adapter: Option<LoraParams>,
}

impl Linear {
    /// The layer's parameters, for operations over several layers.
    #[must_use]
    pub fn layer(&self) -> Layer {
        (self.base.clone(), self.adapter)
    }

    /// Layers of one input, in order: `[t, k]` to `[t, n]` for each. If all have adapters, they share the reads of
    /// `x`.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward_all<const N: usize>(
        layers: [&Self; N],
        scope: &Scope<'_>,
        x: &Var,
    ) -> Result<[Var; N]> {
        let adapted = layers
            .iter()
            .map(|layer| Some((layer.base.clone(), layer.adapter?)));
        let all = match adapted.collect::<Option<Vec<_>>>() {
            Some(adapted) => scope.shared_lora(x, &adapted)?,
            None => {
                let each = layers.iter().map(|layer| layer.forward(scope, x));
                each.collect::<Result<_>>()?
            }
        };
        Ok(all.try_into().expect("one value per layer"))
    }

    /// `[t, k]` to `[t, n]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub fn forward(&self, scope: &Scope<'_>, x: &Var) -> Result<Var> {
        match self.adapter {
            Some(adapter) => scope.lora_linear(x, &self.base, adapter),
            None => scope.linear(x, &self.base),
        }
    }
}
