//! The linear layer with a low-rank adapter, as one operation.

use super::linear::{LinearParams, matrix, product, rows};
use crate::autograd::{Dropout, Rows, Scope, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{DType, LoraArgs, Tensor, Transpose};

/// The parameters of a low-rank adapter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LoraParams {
    /// `[r, k]`.
    pub lora_a: ParamId,
    /// `[n, r]`.
    pub lora_b: ParamId,
    /// `alpha / r`.
    pub scale: f32,
    /// Share of the adapter's inputs that training sets to zero.
    pub dropout: f32,
    /// What the layer's rows are.
    pub rows: Rows,
}

impl Scope<'_> {
    /// `x W^T + bias + scale * (x A^T) B^T`: `[t, k]` to `[t, n]`. The base may train as well.
    ///
    /// # Errors
    /// As [`Scope::linear`]; a range of rows is not supported here and is an error of shapes.
    pub fn lora_linear(&self, x: &Var, base: &LinearParams, adapter: LoraParams) -> Result<Var> {
        if let Some(state) = self.dropout_state().filter(|_| adapter.dropout > 0.0) {
            return self.lora_linear_with_dropout(x, base, adapter, state);
        }
        let input = rows(x.value())?;
        let bias = base.bias.map(|id| self.weight(id)).transpose()?;
        let weight = matrix(self.weight(base.weight)?)?;
        let value = self.backend().lora_linear(LoraArgs {
            x: &input,
            weight: &weight,
            bias,
            lora_a: self.weight(adapter.lora_a)?,
            lora_b: self.weight(adapter.lora_b)?,
            scale: adapter.scale,
        })?;
        let (slot, shape) = (x.slot(), x.shape());
        let weight_id = base.weight;
        let train_weight = self.trains(weight_id);
        let train_bias = base.bias.filter(|id| self.trains(*id));
        let mut used = vec![adapter.lora_a, adapter.lora_b, weight_id];
        used.extend(base.bias);
        self.record(
            "lora_linear",
            value,
            &[x],
            &used,
            move |sweep, dy: Tensor| {
                let backend = sweep.backend();
                let weight = matrix(sweep.weight(weight_id)?)?;
                let args = LoraArgs {
                    x: &input,
                    weight: &weight,
                    bias: None,
                    lora_a: sweep.weight(adapter.lora_a)?,
                    lora_b: sweep.weight(adapter.lora_b)?,
                    scale: adapter.scale,
                };
                let grads = backend.lora_linear_backward(args, &dy, slot.is_some())?;
                if let Some(dx) = grads.dx {
                    sweep.add(slot, dx.reshape(shape)?)?;
                }
                sweep.param(adapter.lora_a, grads.d_lora_a)?;
                sweep.param(adapter.lora_b, grads.d_lora_b)?;
                if let Some(id) = train_bias {
                    sweep.param(id, backend.column_sum(&dy)?)?;
                }
                if train_weight {
                    let d_weight = product(
                        sweep,
                        (&dy, Transpose::Yes),
                        (&input, Transpose::No),
                        DType::F32,
                    )?;
                    sweep.param(weight_id, d_weight)?;
                }
                Ok(())
            },
        )
    }

    /// The adapter sees other inputs than the base, so its two products stand for themselves.
    fn lora_linear_with_dropout(
        &self,
        x: &Var,
        base: &LinearParams,
        adapter: LoraParams,
        state: &Dropout,
    ) -> Result<Var> {
        let y = self.linear(x, base)?;
        let key = state.key(adapter.lora_a.0);
        let seen = self.dropout(x, state.rows(adapter.rows), key, adapter.dropout)?;
        let low = self.linear(&seen, &LinearParams::new(adapter.lora_a, None))?;
        let delta = self.linear(&low, &LinearParams::new(adapter.lora_b, None))?;
        self.add(&y, &self.scale(&delta, adapter.scale)?)
    }
}
