//! Loss of the language model. The logits never exist as a whole.

use crate::autograd::{Grad, Scope, Var};
use crate::error::{ModelError, Result};
use engine::ParamId;
use kernels::{Backend, DType, LossGrads, LossNeeds, Shape, Tag, Tensor};

const OP: &str = "linear_cross_entropy";

impl Scope<'_> {
    /// Cross entropy of every token row, computed from hidden states and the weight of the output head,
    /// without whole logits.
    ///
    /// The logits of each row of `hidden [t, c]` are its product with the head `weight [v, c]`. They are
    /// compared with `labels` (i32 `[t]`, already shifted). The result is f32 `[t]`, zero where the label is
    /// ignored.
    ///
    /// The gradient of the result must be one factor for all rows, as [`crate::autograd::Tape::backward`]
    /// provides it. The first run of a segment that stores its values computes the gradients together with
    /// the losses, for the factor that the tape expects. A recompute returns zeros as values, since only
    /// their gradient is used.
    ///
    /// # Errors
    /// When shapes do not fit, a label lies outside the vocabulary, or memory runs out.
    pub fn linear_cross_entropy(
        &self,
        hidden: &Var,
        weight: ParamId,
        labels: &Tensor,
    ) -> Result<Var> {
        let need = LossNeeds {
            hidden: hidden.requires_grad(),
            weight: self.trains(weight),
        };
        let gradients_of =
            move |backend: &dyn Backend, x: &Tensor, w: &Tensor, y: &Tensor, factor| {
                backend.linear_cross_entropy_backward(x, w, y, factor, need)
            };
        let mut known: Option<(f32, LossGrads)> = None;
        let value = if self.elide_value() {
            let rows = Shape::new(&[labels.elems()]);
            self.backend().zeros(rows, DType::F32, Tag::Activations)?
        } else {
            let (w, backend) = (self.weight(weight)?, self.backend());
            match self.stored_loss_factor() {
                Some(factor) if need.hidden || need.weight => {
                    let grads = gradients_of(backend, hidden.value(), w, labels, factor)?;
                    let losses = grads.losses.clone();
                    known = Some((factor, grads));
                    losses
                }
                _ => backend.linear_cross_entropy(hidden.value(), w, labels)?,
            }
        };
        let (slot, kept, labels) = (hidden.slot(), hidden.value().clone(), labels.clone());
        self.record_grad(OP, value, &[hidden], &[weight], move |sweep, grad| {
            let Grad::Uniform(factor) = grad else {
                return Err(ModelError::LossGradient { op: OP });
            };
            let grads = match known.filter(|(expected, _)| *expected == factor) {
                Some((_, grads)) => grads,
                None => {
                    let w = sweep.weight(weight)?;
                    gradients_of(sweep.backend(), &kept, w, &labels, factor)?
                }
            };
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
