//! Normalizations over the last axis.

use crate::autograd::{Scope, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{Direction, RopeLayout, Tensor};

impl Scope<'_> {
    /// Layer norm over the last axis: `(x - mean) / sqrt(var + eps) * weight + bias`.
    ///
    /// # Errors
    /// When shapes do not fit, a parameter is not in the unit whose weights are gathered, or memory runs out.
    pub fn layer_norm(&self, x: &Var, weight: ParamId, bias: ParamId, eps: f32) -> Result<Var> {
        let (w, b) = (self.weight(weight)?, self.weight(bias)?);
        let value = self.backend().layer_norm(x.value(), w, b, eps)?;
        let (slot, input) = (x.slot(), x.value().clone());
        let (train_w, train_b) = (self.trains(weight), self.trains(bias));
        self.record(
            "layer_norm",
            value,
            &[x],
            &[weight, bias],
            move |sweep, dy| {
                let w = sweep.weight(weight)?;
                let grads = sweep.backend().layer_norm_backward(&input, w, &dy, eps)?;
                sweep.add(slot, grads.dx)?;
                if train_w {
                    sweep.param(weight, grads.d_weight)?;
                }
                match grads.d_bias {
                    Some(d_bias) if train_b => sweep.param(bias, d_bias),
                    _ => Ok(()),
                }
            },
        )
    }

    /// RMS norm of every head of `x [t, h, d]`, and its rotation by the angles of `cos` and `sin` (f32 `[t, w]`), as
    /// [`Scope::rope`] of [`Scope::rms_norm`].
    ///
    /// # Errors
    /// As [`Scope::layer_norm`].
    pub fn rms_norm_rope(
        &self,
        x: &Var,
        weight: ParamId,
        eps: f32,
        [cos, sin]: [&Tensor; 2],
        layout: RopeLayout,
    ) -> Result<Var> {
        let w = self.weight(weight)?;
        let angles = [cos, sin];
        let value = self
            .backend()
            .rms_norm_rope(x.value(), w, eps, angles, layout)?;
        let (slot, input) = (x.slot(), x.value().clone());
        let (cos, sin) = (cos.clone(), sin.clone());
        let train = self.trains(weight);
        self.record("rms_norm_rope", value, &[x], &[weight], move |sweep, dy| {
            let backend = sweep.backend();
            let dy = backend.rope(&dy, &cos, &sin, layout, Direction::Inverse)?;
            let w = sweep.weight(weight)?;
            let grads = sweep.backend().rms_norm_backward(&input, w, &dy, eps)?;
            sweep.add(slot, grads.dx)?;
            if train {
                sweep.param(weight, grads.d_weight)?;
            }
            Ok(())
        })
    }

    /// RMS norm over the last axis: `x / sqrt(mean(x^2) + eps) * weight`.
    ///
    /// # Errors
    /// As [`Scope::layer_norm`].
    pub fn rms_norm(&self, x: &Var, weight: ParamId, eps: f32) -> Result<Var> {
        let value = self
            .backend()
            .rms_norm(x.value(), self.weight(weight)?, eps)?;
        let (slot, input) = (x.slot(), x.value().clone());
        let train = self.trains(weight);
        self.record("rms_norm", value, &[x], &[weight], move |sweep, dy| {
            let w = sweep.weight(weight)?;
            let grads = sweep.backend().rms_norm_backward(&input, w, &dy, eps)?;
            sweep.add(slot, grads.dx)?;
            if train {
                sweep.param(weight, grads.d_weight)?;
            }
            Ok(())
        })
    }
}
