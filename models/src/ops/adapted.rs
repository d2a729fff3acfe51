//! Linear layers of one input with low-rank adapters (LoRA, Hu et al. 2021), as one operation. It computes several
//! projections, each with one layer or one layer per row group.

use super::grouped::RowGroups;
use super::linear::{LinearParams, matrix, rows};
use crate::autograd::{Rows, Scope, Sweep, Var};
use crate::error::{ModelError, Result};
use engine::ParamId;
use kernels::{
    AdaptedLayer, AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs, AdapterArgs,
    AdapterDropout, AdapterGrads, Tensor,
};

/// The parameters and settings of a low-rank adapter (LoRA) of a linear layer with weight `[n, k]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LoraParams {
    /// Id of the adapter's matrix A, `[r, k]`, which is applied to the layer's input.
    pub lora_a: ParamId,
    /// Id of the adapter's matrix B, `[n, r]`, which is applied to the output of A.
    pub lora_b: ParamId,
    /// Factor on the adapter's output, `alpha / r`.
    pub scale: f32,
    /// Dropout probability of the adapter's input while training.
    pub dropout: f32,
    /// Whether the rows of the layer's input are tokens or patches. Dropout draws its mask per token or per
    /// patch.
    pub rows: Rows,
    /// Index of this adapter in a stack of several, whose A matrices of `r` rows each are the one parameter
    /// `lora_a`; `None` if `lora_a` is the A of this adapter alone.
    pub part: Option<usize>,
}

impl LoraParams {
    /// Selects adapter `i` of a fused layer, in which each projection has its own adapter.
    #[must_use]
    pub fn with_part(mut self, i: usize) -> Self {
        self.part = Some(i);
        self
    }
}

/// Linear layer with an optional adapter: `x W^T + bias`, plus the adapter's output.
#[derive(Clone, PartialEq, Debug)]
pub struct LinearLayer {
    /// Weight and bias of the base layer.
    pub base: LinearParams,
    /// Parameters of the layer's low-rank adapter, if it has one.
    pub adapter: Option<LoraParams>,
}

impl LinearLayer {
    /// The parameters of the layer and of its adapter.
    pub(crate) fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        let adapter = self.adapter.map(|own| [own.lora_a, own.lora_b]);
        self.base.ids().chain(adapter.into_iter().flatten())
    }
}

/// Dropout mask of an adapter's input, stored as the rows' numbers and the adapter's key, from which backward
/// computes the mask again.
#[derive(Clone)]
struct Mask {
    words: Tensor,
    key: [u32; 2],
    p: f32,
}

/// Adapter of a layer for backward, with its row ranges of A and B.
struct Adapter {
    a: LinearParams,
    b: LinearParams,
    scale: f32,
    mask: Option<Mask>,
}

impl Adapter {
    /// The adapter `params` of a layer `base`, with the same rows of its outputs.
    fn new(scope: &Scope<'_>, base: &LinearParams, params: LoraParams) -> Result<Self> {
        let rank = scope.weight(params.lora_b)?.shape().last();
        let half = |id, rows| LinearParams {
            rows,
            ..LinearParams::new(id, None)
        };
        let own = params.part.map(|i| i * rank..(i + 1) * rank);
        let state = scope.dropout_state().filter(|_| params.dropout > 0.0);
        let mask = state.map(|state| {
            Ok::<_, ModelError>(Mask {
                words: scope.dropout_rows(state, params.rows)?,
                key: state.key(params.lora_a.0),
                p: params.dropout,
            })
        });
        Ok(Self {
            a: half(params.lora_a, own),
            b: half(params.lora_b, base.rows.clone()),
            scale: params.scale,
            mask: mask.transpose()?,
        })
    }
}

/// What backward needs of a layer: its weights, which of them train, and its adapter.
struct Part {
    base: LinearParams,
    train_weight: bool,
    train_bias: Option<ParamId>,
    adapter: Option<Adapter>,
}

/// Weight tensors of a layer, narrowed to the rows in use.
struct PartTensors {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<([Tensor; 2], f32, Option<Mask>)>,
}

impl PartTensors {
    fn layer(&self) -> AdaptedLayer<'_> {
        AdaptedLayer {
            weight: &self.weight,
            bias: self.bias.as_ref(),
            adapter: self
                .adapter
                .as_ref()
                .map(|([a, b], scale, mask)| AdapterArgs {
                    lora_a: a,
                    lora_b: b,
                    scale: *scale,
                    dropout: mask.as_ref().map(|mask| AdapterDropout {
                        rows: &mask.words,
                        key: mask.key,
                        p: mask.p,
                    }),
                }),
        }
    }
}

impl Part {
    fn new(scope: &Scope<'_>, layer: &LinearLayer) -> Result<Self> {
        let LinearLayer { base, adapter } = layer;
        let adapter = adapter.map(|params| Adapter::new(scope, base, params));
        Ok(Self {
            base: base.clone(),
            train_weight: scope.trains(base.weight),
            train_bias: base.bias.filter(|id| scope.trains(*id)),
            adapter: adapter.transpose()?,
        })
    }

    /// Tensors of the layer's parameters, looked up by `weight`. The bias is included if `with_bias`.
    fn tensors<'w>(
        &self,
        weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
        with_bias: bool,
    ) -> Result<PartTensors> {
        let own = |params: &LinearParams| params.select(weight(params.weight)?);
        let bias = self.base.bias.filter(|_| with_bias);
        Ok(PartTensors {
            weight: matrix(&own(&self.base)?)?,
            bias: bias.map(|id| self.base.select(weight(id)?)).transpose()?,
            adapter: match &self.adapter {
                Some(Adapter { a, b, scale, mask }) => {
                    Some(([own(a)?, own(b)?], *scale, mask.clone()))
                }
                None => None,
            },
        })
    }

    fn params(&self) -> Vec<ParamId> {
        let adapter = self.adapter.iter();
        let adapter = adapter.flat_map(|own| [own.a.weight, own.b.weight]);
        let LinearParams { weight, bias, .. } = self.base;
        adapter.chain([weight]).chain(bias).collect()
    }

    /// Adds the gradients of the adapter, and those of base weight and bias if they train. `group` has the layer's
    /// rows of `input` and `dy`; `None` means all rows. `keys` are the numbers of the sums of A, B, bias and weight.
    fn add_grads(
        &self,
        sweep: &mut Sweep<'_>,
        adapter: Option<AdapterGrads>,
        [input, dy]: [&Tensor; 2],
        group: Option<&Tensor>,
        keys: [usize; 4],
    ) -> Result<()> {
        if let (Some(Adapter { a, b, .. }), Some([d_a, d_b])) = (&self.adapter, adapter) {
            a.add_sum(sweep, keys[0], a.weight, d_a)?;
            b.add_sum(sweep, keys[1], b.weight, d_b)?;
        }
        if let Some(id) = self.train_bias {
            let d_bias = match group {
                Some(rows) => sweep.backend().column_sum_of_rows(dy, rows)?,
                None => sweep.column_sum(keys[2], dy)?,
            };
            self.base.add_sum(sweep, keys[2], id, d_bias)?;
        }
        if self.train_weight {
            let d_weight = match group {
                Some(rows) => sweep.backend().matmul_of_rows(dy, input, rows)?,
                None => sweep.weight_gradient(keys[3], dy, input)?,
            };
            self.base
                .add_sum(sweep, keys[3], self.base.weight, d_weight)?;
        }
        Ok(())
    }
}

/// Tensors of the layers of all projections.
fn tensors<'w, 'p>(
    projections: impl Iterator<Item = &'p Vec<Part>>,
    weight: &dyn Fn(ParamId) -> Result<&'w Tensor>,
    with_bias: bool,
) -> Result<Vec<Vec<PartTensors>>> {
    let own = |parts: &Vec<Part>| {
        let own = parts.iter();
        own.map(|part| part.tensors(weight, with_bias)).collect()
    };
    projections.map(own).collect()
}

fn layers(held: &[Vec<PartTensors>]) -> Vec<Vec<AdaptedLayer<'_>>> {
    let all = held.iter();
    all.map(|own| own.iter().map(PartTensors::layer).collect())
        .collect()
}

impl Scope<'_> {
    /// Applies several linear layers with optional LoRA adapters to one input, as one operation.
    ///
    /// A layer computes `x W^T + bias + scale * (dropout(x) A^T) B^T`; its input `x` is `[t, k]`, its result
    /// `[t, n]`. The results are in the order of `projections`. A projection has one layer for all rows, or
    /// one per group of `row_groups`.
    ///
    /// The tape determines the dropout mask. Base weights may train as well. The gradients of `x` are added
    /// from the last projection to the first. The outputs of the A matrices are stored for backward on
    /// backends that return them; otherwise backward recomputes them.
    ///
    /// # Errors
    /// As [`Scope::linear`], or when the row groups are not a partition of the rows.
    pub fn adapted_linear(
        &self,
        x: &Var,
        row_groups: Option<&RowGroups>,
        projections: &[Vec<LinearLayer>],
    ) -> Result<Vec<Var>> {
        if projections.is_empty() {
            return Ok(Vec::new());
        }
        let input = rows(x.value())?;
        let parts = projections.iter();
        let parts = parts.map(|own| own.iter().map(|layer| Part::new(self, layer)).collect());
        let parts: Vec<Vec<Part>> = parts.collect::<Result<_>>()?;
        let row_groups = row_groups.cloned();
        let held = tensors(parts.iter(), &|id| self.weight(id), true)?;
        let AdaptedLinear { y, inner } = self.backend().adapted_linear(AdaptedLinearArgs {
            x: &input,
            row_groups: row_groups.as_ref().map(RowGroups::rows),
            projections: &layers(&held),
        })?;
        let (slot, shape) = (x.slot(), x.shape());
        let values = y.into_iter().zip(&parts);
        let values = values.map(|(y, own)| (y, own.iter().flat_map(Part::params).collect()));
        let values = values.collect();
        self.record_all("adapted_linear", values, x, move |sweep, dy| {
            // `inner` is usable only if every projection has a gradient.
            let whole = dy.iter().all(Option::is_some);
            let inner = if whole { inner } else { Vec::new() };
            let used: Vec<(&Vec<Part>, &Tensor)> = parts
                .iter()
                .zip(&dy)
                .filter_map(|(own, dy)| Some((own, dy.as_ref()?)))
                .collect();
            let held = used.iter().map(|(own, _)| *own);
            let held = tensors(held, &|id| sweep.weight(id), false)?;
            let dy: Vec<&Tensor> = used.iter().map(|(_, dy)| *dy).collect();
            let grads = sweep.adapted_gradients(AdaptedLinearGradArgs {
                forward: AdaptedLinearArgs {
                    x: &input,
                    row_groups: row_groups.as_ref().map(RowGroups::rows),
                    projections: &layers(&held),
                },
                dy: &dy,
                inner: &inner,
                need_dx: slot.is_some(),
            })?;
            if let Some(dx) = grads.dx {
                sweep.add(slot, dx.reshape(shape)?)?;
            }
            // Gradients are added in the order of separate operations, because layers may share a parameter.
            let count = used.len();
            for (p, ((own, dy), grads)) in used.into_iter().zip(grads.adapters).enumerate().rev() {
                let keys = [2 * p, 2 * p + 1, 2 * (count + p), 2 * (count + p) + 1];
                for (i, (part, grads)) in own.iter().zip(grads).enumerate() {
                    let group = row_groups.as_ref().map(|groups| groups.rows()[i]);
                    part.add_grads(sweep, grads, [&input, dy], group, keys)?;
                }
            }
            Ok(())
        })
    }
}
