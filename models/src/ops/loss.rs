//! The language model's loss, logits never materialised.

use crate::autograd::{Grad, Scope, Var};
use crate::error::{ModelError, Result};
use engine::ParamId;
use kernels::{DType, LossNeeds, Shape, Tag, Tensor};

const OP: &str = "linear_cross_entropy";

impl Scope<'_> {
    /// Cross entropy of each row of `hidden [t, c]` through the head `weight [v, c]` against
    /// `labels` (i32 `[t]`, already shifted): f32 `[t]`, zero where nothing is supervised.
    ///
    /// Its gradient must be one factor for all rows, as [`crate::autograd::Tape::backward`] seeds.
    /// In a replay the values are left out (zeros): only their gradient is wanted, which spares a
    /// third product with the vocabulary.
    ///
    /// # Errors
    /// When shapes do not fit, a label lies outside the vocabulary, or memory runs out.
    pub fn linear_cross_entropy(
        &self,
        hidden: &Var,
        weight: ParamId,
        labels: &Tensor,
    ) -> Result<Var> {
        let value = if self.elide_value() {
            let rows = Shape::new(&[labels.elems()]);
            self.backend().zeros(rows, DType::F32, Tag::Activations)?
        } else {
            let w = self.weight(weight)?;
            self.backend()
                .linear_cross_entropy(hidden.value(), w, labels)?
        };
        let (slot, kept, labels) = (hidden.slot(), hidden.value().clone(), labels.clone());
        let need = LossNeeds {
            hidden: slot.is_some(),
            weight: self.trains(weight),
        };
        self.record_grad(OP, value, &[hidden], &[weight], move |sweep, grad| {
            let Grad::Uniform(factor) = grad else {
                return Err(ModelError::LossGradient { op: OP });
            };
            let w = sweep.weight(weight)?;
            let grads = sweep
                .backend()
                .linear_cross_entropy_backward(&kept, w, &labels, factor, need)?;
            if let Some(d_hidden) = grads.d_hidden {
                sweep.add(slot, d_hidden)?;
            }
            match grads.d_weight {
                Some(d_weight) => sweep.param(weight, d_weight),
                None => Ok(()),
            }
        })
    }
}
