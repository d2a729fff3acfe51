//! The linear layer with a low-rank adapter, as one operation.

use super::linear::{LinearParams, matrix, product, rows};
use crate::autograd::{Rows, Scope, Sweep, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{
    AdapterArgs, AdapterDropout, DType, LoraArgs, SharedLora, SharedLoraGradArgs, Tensor, Transpose,
};

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
struct Base {
    layer: LinearParams,
    train_weight: bool,
    train_bias: Option<ParamId>,
}

impl Base {
    fn new(scope: &Scope<'_>, layer: &LinearParams) -> Self {
        Self {
            layer: layer.clone(),
            train_weight: scope.trains(layer.weight),
            train_bias: layer.bias.filter(|id| scope.trains(*id)),
        }
    }

    /// The rows in use of its weight and, where that is wanted, of its bias.
    fn tensors<'w>(
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

    fn params(&self) -> impl Iterator<Item = ParamId> {
        let LinearParams { weight, bias, .. } = self.layer;
        [Some(weight), bias].into_iter().flatten()
    }

    /// The gradients of its parameters, where they train. `named`: the rows that are its own.
    fn add_grads(
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

/// What an adapter does not see of its input: never kept, as the names of rows and a key tell all of it.
#[derive(Clone)]
struct Mask {
    names: Tensor,
    key: [u32; 2],
    p: f32,
}

impl Mask {
    fn args(&self) -> AdapterDropout<'_> {
        AdapterDropout {
            rows: &self.names,
            key: self.key,
            p: self.p,
        }
    }
}

/// An adapter as its backward needs it.
struct Adapter {
    halves: Halves,
    params: LoraParams,
    mask: Option<Mask>,
}

impl Adapter {
    /// Of the layer `base`.
    fn new(scope: &Scope<'_>, base: &LinearParams, params: LoraParams) -> Result<Self> {
        let rank = scope.weight(params.lora_b)?.shape().last();
        let state = scope.dropout_state().filter(|_| params.dropout > 0.0);
        Ok(Self {
            halves: Halves::new(base, params, rank),
            params,
            mask: state.map(|state| Mask {
                names: scope.dropout_rows(state, params.rows),
                key: state.key(params.lora_a.0),
                p: params.dropout,
            }),
        })
    }

    fn tensors<'w>(
        &self,
        weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
    ) -> Result<AdapterTensors> {
        Ok(AdapterTensors {
            lora_a: self.halves.a.select(weight(self.params.lora_a)?)?,
            lora_b: self.halves.b.select(weight(self.params.lora_b)?)?,
            scale: self.params.scale,
            mask: self.mask.clone(),
        })
    }

    fn params(&self) -> [ParamId; 2] {
        [self.params.lora_a, self.params.lora_b]
    }

    fn add_grads(&self, sweep: &mut Sweep<'_>, [d_lora_a, d_lora_b]: [Tensor; 2]) -> Result<()> {
        let Self { halves, params, .. } = self;
        halves.a.add_grad(sweep, params.lora_a, d_lora_a)?;
        halves.b.add_grad(sweep, params.lora_b, d_lora_b)
    }
}

/// The rows in use of an adapter's halves, and its mask.
struct AdapterTensors {
    lora_a: Tensor,
    lora_b: Tensor,
    scale: f32,
    mask: Option<Mask>,
}

impl AdapterTensors {
    fn args(&self) -> AdapterArgs<'_> {
        AdapterArgs {
            lora_a: &self.lora_a,
            lora_b: &self.lora_b,
            scale: self.scale,
            dropout: self.mask.as_ref().map(Mask::args),
        }
    }
}

/// A layer that may have an adapter, as its backward needs it.
pub(super) struct Part {
    base: Base,
    adapter: Option<Adapter>,
}

/// The rows in use of its parameters.
pub(super) struct PartTensors {
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    adapter: Option<AdapterTensors>,
}

impl PartTensors {
    pub(super) fn adapter(&self) -> Option<AdapterArgs<'_>> {
        self.adapter.as_ref().map(AdapterTensors::args)
    }

    /// The layer on `x`, where it is adapted.
    fn adapted<'t>(&'t self, x: &'t Tensor) -> Option<LoraArgs<'t>> {
        let adapter = self.adapter()?;
        Some(LoraArgs {
            x,
            weight: &self.weight,
            bias: self.bias.as_ref(),
            lora_a: adapter.lora_a,
            lora_b: adapter.lora_b,
            scale: adapter.scale,
            dropout: adapter.dropout,
        })
    }
}

impl Part {
    pub(super) fn new(
        scope: &Scope<'_>,
        base: &LinearParams,
        adapter: Option<LoraParams>,
    ) -> Result<Self> {
        let adapter = adapter.map(|params| Adapter::new(scope, base, params));
        Ok(Self {
            base: Base::new(scope, base),
            adapter: adapter.transpose()?,
        })
    }

    /// Its parameters by `weight`; the bias only where that is wanted.
    pub(super) fn tensors<'w>(
        &self,
        weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
        with_bias: bool,
    ) -> Result<PartTensors> {
        let (base, bias) = self.base.tensors(weight, with_bias)?;
        let adapter = self.adapter.as_ref();
        Ok(PartTensors {
            weight: base,
            bias,
            adapter: adapter.map(|adapter| adapter.tensors(weight)).transpose()?,
        })
    }

    pub(super) fn params(&self) -> Vec<ParamId> {
        let adapter = self.adapter.iter().flat_map(Adapter::params);
        adapter.chain(self.base.params()).collect()
    }

    /// The gradients of its adapter, and those of its base where that trains. `named`: the rows that are its own.
    pub(super) fn add_grads(
        &self,
        sweep: &mut Sweep<'_>,
        adapter: Option<[Tensor; 2]>,
        [input, dy]: [&Tensor; 2],
        named: Option<&Tensor>,
    ) -> Result<()> {
        if let (Some(own), Some(grads)) = (&self.adapter, adapter) {
            own.add_grads(sweep, grads)?;
        }
        self.base.add_grads(sweep, input, dy, named)
    }
}

/// All layers on one input; all are adapted.
fn adapted<'t>(held: &'t [PartTensors], x: &'t Tensor) -> Vec<LoraArgs<'t>> {
    let all = held.iter();
    all.filter_map(|part| part.adapted(x)).collect()
}

impl Scope<'_> {
    /// `x W^T + bias + scale * (seen A^T) B^T`: `[t, k]` to `[t, n]`, `seen` being the dropout of `x` where the tape drops
    /// inputs of adapters, otherwise `x`. The base may train as well.
    ///
    /// # Errors
    /// As [`Scope::linear`].
    pub fn lora_linear(&self, x: &Var, base: &LinearParams, adapter: LoraParams) -> Result<Var> {
        let mut all = self.shared_lora(x, &[(base.clone(), adapter)])?;
        Ok(all.pop().expect("one value of one layer"))
    }

    /// Adapted layers of one `x`, each as [`Scope::lora_linear`], in order. The gradients of `x` are added from the last
    /// layer to the first. What the adapters made of their inputs is kept for backward, where the device keeps any.
    ///
    /// # Errors
    /// As [`Scope::linear`].
    pub fn shared_lora(&self, x: &Var, layers: &[(LinearParams, LoraParams)]) -> Result<Vec<Var>> {
        if layers.is_empty() {
            return Ok(Vec::new());
        }
        let input = rows(x.value())?;
        let parts = layers.iter();
        let parts = parts.map(|(base, adapter)| Part::new(self, base, Some(*adapter)));
        let parts: Vec<Part> = parts.collect::<Result<_>>()?;
        let held = parts
            .iter()
            .map(|part| part.tensors(&|id| self.weight(id), true));
        let held: Vec<PartTensors> = held.collect::<Result<_>>()?;
        let SharedLora { y, inner } = self.backend().shared_lora(&adapted(&held, &input))?;
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
            let dy: Vec<&Tensor> = used.iter().map(|(_, dy)| *dy).collect();
            let backend = sweep.backend();
            let grads = backend.shared_lora_backward(SharedLoraGradArgs {
                layers: &adapted(&held, &input),
                dy: &dy,
                inner: inner.as_ref(),
                need_dx: slot.is_some(),
            })?;
            if let Some(dx) = grads.dx {
                sweep.add(slot, dx.reshape(shape)?)?;
            }
            // In the order of layers that stand for themselves: a gradient may be that of several.
            for ((part, dy), grads) in used.into_iter().zip(grads.adapters).rev() {
                part.add_grads(sweep, Some(grads), [&input, dy], None)?;
            }
            Ok(())
        })
    }
}
