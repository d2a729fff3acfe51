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
    /// Which of the adapters that `lora_a` holds one above the other, `r` rows each, belongs to the rows in use of
    /// the base; the only one when absent.
    pub part: Option<usize>,
}

impl LoraParams {
    /// The adapter of part `i` of a layer whose projections have adapters of their own.
    #[must_use]
    pub fn with_part(mut self, i: usize) -> Self {
        self.part = Some(i);
        self
    }
}

/// The rows in use of an adapter's halves.
#[derive(Clone)]
struct Halves {
    a: LinearParams,
    b: LinearParams,
}

impl Halves {
    /// For the rows in use of `base`; an adapter has `rank` rows of A.
    fn new(base: &LinearParams, adapter: LoraParams, rank: usize) -> Self {
        let mut a = LinearParams::new(adapter.lora_a, None);
        a.rows = adapter.part.map(|i| i * rank..(i + 1) * rank);
        let mut b = LinearParams::new(adapter.lora_b, None);
        b.rows = base.rows.clone();
        Self { a, b }
    }
}

impl Scope<'_> {
    /// `x W^T + bias + scale * (x A^T) B^T`: `[t, k]` to `[t, n]`. The base may train as well.
    ///
    /// # Errors
    /// As [`Scope::linear`].
    pub fn lora_linear(&self, x: &Var, base: &LinearParams, adapter: LoraParams) -> Result<Var> {
        if let Some(state) = self.dropout_state().filter(|_| adapter.dropout > 0.0) {
            return self.lora_linear_with_dropout(x, base, adapter, state);
        }
        let input = rows(x.value())?;
        let halves = Halves::new(base, adapter, self.weight(adapter.lora_b)?.shape().last());
        let bias = base
            .bias
            .map(|id| base.select(self.weight(id)?))
            .transpose()?;
        let weight = matrix(&base.select(self.weight(base.weight)?)?)?;
        let value = self.backend().lora_linear(LoraArgs {
            x: &input,
            weight: &weight,
            bias: bias.as_ref(),
            lora_a: &halves.a.select(self.weight(adapter.lora_a)?)?,
            lora_b: &halves.b.select(self.weight(adapter.lora_b)?)?,
            scale: adapter.scale,
        })?;
        let (slot, shape) = (x.slot(), x.shape());
        let weight_id = base.weight;
        let train_weight = self.trains(weight_id);
        let train_bias = base.bias.filter(|id| self.trains(*id));
        let mut used = vec![adapter.lora_a, adapter.lora_b, weight_id];
        used.extend(base.bias);
        let base = base.clone();
        self.record(
            "lora_linear",
            value,
            &[x],
            &used,
            move |sweep, dy: Tensor| {
                let backend = sweep.backend();
                let weight = matrix(&base.select(sweep.weight(weight_id)?)?)?;
                let args = LoraArgs {
                    x: &input,
                    weight: &weight,
                    bias: None,
                    lora_a: &halves.a.select(sweep.weight(adapter.lora_a)?)?,
                    lora_b: &halves.b.select(sweep.weight(adapter.lora_b)?)?,
                    scale: adapter.scale,
                };
                let grads = backend.lora_linear_backward(args, &dy, slot.is_some())?;
                if let Some(dx) = grads.dx {
                    sweep.add(slot, dx.reshape(shape)?)?;
                }
                halves.a.add_grad(sweep, adapter.lora_a, grads.d_lora_a)?;
                halves.b.add_grad(sweep, adapter.lora_b, grads.d_lora_b)?;
                if let Some(id) = train_bias {
                    base.add_grad(sweep, id, backend.column_sum(&dy)?)?;
                }
                if train_weight {
                    let d_weight = product(
                        sweep,
                        (&dy, Transpose::Yes),
                        (&input, Transpose::No),
                        DType::F32,
                    )?;
                    base.add_grad(sweep, weight_id, d_weight)?;
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
        let names = self.dropout_rows(state, adapter.rows);
        let seen = self.dropout(x, &names, key, adapter.dropout)?;
        let halves = Halves::new(base, adapter, self.weight(adapter.lora_b)?.shape().last());
        let low = self.linear(&seen, &halves.a)?;
        let delta = self.linear(&low, &halves.b)?;
        self.add(&y, &self.scale(&delta, adapter.scale)?)
    }
}
