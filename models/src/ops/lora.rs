//! The linear layer with a low-rank adapter, as one operation.

use super::linear::{LinearParams, matrix, product, rows};
use crate::autograd::{Dropout, Rows, Scope, Sweep, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{DType, LoraArgs, SharedLora, SharedLoraGradArgs, Tensor, Transpose};

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

/// A layer as its backward needs it, without its adapter.
pub(super) struct Base {
    layer: LinearParams,
    train_weight: bool,
    train_bias: Option<ParamId>,
}

impl Base {
    pub(super) fn new(scope: &Scope<'_>, layer: &LinearParams) -> Self {
        Self {
            layer: layer.clone(),
            train_weight: scope.trains(layer.weight),
            train_bias: layer.bias.filter(|id| scope.trains(*id)),
        }
    }

    /// The rows in use of its weight and, where that is wanted, of its bias.
    pub(super) fn tensors<'w>(
        &self,
        weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
        with_bias: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let bias = self.layer.bias.filter(|_| with_bias);
        Ok((
            matrix(&self.layer.select(weight(self.layer.weight)?)?)?,
            bias.map(|id| self.layer.select(weight(id)?)).transpose()?,
        ))
    }

    pub(super) fn params(&self) -> impl Iterator<Item = ParamId> {
        let LinearParams { weight, bias, .. } = self.layer;
        [Some(weight), bias].into_iter().flatten()
    }

    /// The gradients of its parameters, where they train. `named`: the rows that are its own.
    pub(super) fn add_grads(
        &self,
        sweep: &mut Sweep<'_>,
        input: &Tensor,
        dy: &Tensor,
        named: Option<&Tensor>,
    ) -> Result<()> {
        let Self { layer, .. } = self;
        if let Some(id) = self.train_bias {
            let backend = sweep.backend();
            let d_bias = match named {
                Some(rows) => backend.column_sum_of_rows(dy, rows)?,
                None => backend.column_sum(dy)?,
            };
            layer.add_grad(sweep, id, d_bias)?;
        }
        if self.train_weight {
            let d_weight = match named {
                Some(rows) => sweep.backend().matmul_of_rows(dy, input, rows)?,
                None => {
                    let (dy, input) = ((dy, Transpose::Yes), (input, Transpose::No));
                    product(sweep, dy, input, DType::F32)?
                }
            };
            layer.add_grad(sweep, layer.weight, d_weight)?;
        }
        Ok(())
    }
}

/// An adapter as its backward needs it.
pub(super) struct Adapter {
    halves: Halves,
    params: LoraParams,
}

impl Adapter {
    /// Of the layer `base`.
    pub(super) fn new(scope: &Scope<'_>, base: &LinearParams, params: LoraParams) -> Result<Self> {
        let rank = scope.weight(params.lora_b)?.shape().last();
        Ok(Self {
            halves: Halves::new(base, params, rank),
            params,
        })
    }

    pub(super) fn scale(&self) -> f32 {
        self.params.scale
    }

    /// The rows in use of `A` and `B`.
    pub(super) fn tensors<'w>(
        &self,
        weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
    ) -> Result<[Tensor; 2]> {
        Ok([
            self.halves.a.select(weight(self.params.lora_a)?)?,
            self.halves.b.select(weight(self.params.lora_b)?)?,
        ])
    }

    pub(super) fn params(&self) -> [ParamId; 2] {
        [self.params.lora_a, self.params.lora_b]
    }

    pub(super) fn add_grads(
        &self,
        sweep: &mut Sweep<'_>,
        [d_lora_a, d_lora_b]: [Tensor; 2],
    ) -> Result<()> {
        let Self { halves, params } = self;
        halves.a.add_grad(sweep, params.lora_a, d_lora_a)?;
        halves.b.add_grad(sweep, params.lora_b, d_lora_b)
    }
}

/// An adapted layer.
struct Part {
    base: Base,
    adapter: Adapter,
}

/// The rows in use of its parameters.
struct PartTensors {
    weight: Tensor,
    bias: Option<Tensor>,
    halves: [Tensor; 2],
    scale: f32,
}

impl PartTensors {
    fn args<'t>(&'t self, x: &'t Tensor) -> LoraArgs<'t> {
        let [lora_a, lora_b] = &self.halves;
        LoraArgs {
            x,
            weight: &self.weight,
            bias: self.bias.as_ref(),
            lora_a,
            lora_b,
            scale: self.scale,
        }
    }
}

impl Part {
    /// Its parameters by `weight`; the bias only where that is wanted.
    fn tensors<'w>(
        &self,
        weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
        with_bias: bool,
    ) -> Result<PartTensors> {
        let (base, bias) = self.base.tensors(weight, with_bias)?;
        Ok(PartTensors {
            weight: base,
            bias,
            halves: self.adapter.tensors(weight)?,
            scale: self.adapter.scale(),
        })
    }

    fn params(&self) -> Vec<ParamId> {
        let adapter = self.adapter.params().into_iter();
        adapter.chain(self.base.params()).collect()
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
        let layer = [(base.clone(), adapter)];
        let mut all = self.adapted_layers(x, &layer)?;
        Ok(all.pop().expect("one value of one layer"))
    }

    /// Adapted layers of one `x`, each as [`Scope::lora_linear`], in order. The gradients of `x` are added from the last
    /// layer to the first.
    ///
    /// # Errors
    /// As [`Scope::linear`].
    pub fn shared_lora(&self, x: &Var, layers: &[(LinearParams, LoraParams)]) -> Result<Vec<Var>> {
        let drops = |(_, adapter): &(LinearParams, LoraParams)| adapter.dropout > 0.0;
        if self.dropout_state().is_some() && layers.iter().any(drops) {
            let each = layers.iter();
            return each
                .map(|(base, adapter)| self.lora_linear(x, base, *adapter))
                .collect();
        }
        match layers {
            [] => Ok(Vec::new()),
            layers => self.adapted_layers(x, layers),
        }
    }

    /// Layers whose adapters see the input as it is. What these made of it is kept for backward, where the device keeps any.
    fn adapted_layers(&self, x: &Var, layers: &[(LinearParams, LoraParams)]) -> Result<Vec<Var>> {
        let input = rows(x.value())?;
        let parts = layers.iter();
        let parts = parts.map(|(base, adapter)| {
            Ok(Part {
                base: Base::new(self, base),
                adapter: Adapter::new(self, base, *adapter)?,
            })
        });
        let parts: Vec<Part> = parts.collect::<Result<_>>()?;
        let held = parts
            .iter()
            .map(|part| part.tensors(&|id| self.weight(id), true));
        let held: Vec<PartTensors> = held.collect::<Result<_>>()?;
        let args: Vec<LoraArgs<'_>> = held.iter().map(|part| part.args(&input)).collect();
        let SharedLora { y, inner } = self.backend().shared_lora(&args)?;
        let (slot, shape) = (x.slot(), x.shape());
        let values = y.into_iter().zip(&parts);
        let values = values.map(|(y, part)| (y, part.params())).collect();
        self.record_all("lora_linear", values, x, move |sweep, dy| {
            // The form of `inner` is that of all layers together.
            let inner = inner.filter(|_| dy.iter().all(Option::is_some));
            let both = parts.iter().zip(&dy);
            let used: Vec<(&Part, &Tensor)> = both
                .filter_map(|(part, dy)| Some((part, dy.as_ref()?)))
                .collect();
            let held = used
                .iter()
                .map(|(part, _)| part.tensors(&|id| sweep.weight(id), false));
            let held: Vec<PartTensors> = held.collect::<Result<_>>()?;
            let args: Vec<LoraArgs<'_>> = held.iter().map(|part| part.args(&input)).collect();
            let dy: Vec<&Tensor> = used.iter().map(|(_, dy)| *dy).collect();
            let backend = sweep.backend();
            let grads = backend.shared_lora_backward(SharedLoraGradArgs {
                layers: &args,
                dy: &dy,
                inner: inner.as_ref(),
                need_dx: slot.is_some(),
            })?;
            if let Some(dx) = grads.dx {
                sweep.add(slot, dx.reshape(shape)?)?;
            }
            // In the order of layers that stand for themselves: a gradient may be that of several.
            for ((part, dy), grads) in used.into_iter().zip(grads.adapters).rev() {
                part.adapter.add_grads(sweep, grads)?;
                part.base.add_grads(sweep, &input, dy, None)?;
            }
            Ok(())
        })
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
