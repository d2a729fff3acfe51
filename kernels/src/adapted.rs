//! Linear layers of one input with low-rank adapters (LoRA, Hu et al. 2021): operands, results, and a reference
//! implementation. The reference computes one layer after the other. It defines the results, and serves devices
//! without a kernel for several layers.

use crate::backend::{DropoutArgs, MatmulArgs, SumPart, Transpose};
use crate::check;
use crate::error::{Result, shape_error};
use crate::grouped::partition;
use crate::pool::Tag;
use crate::{Backend, Shape, Tensor};

/// Dropout applied to the input of a LoRA adapter, as [`Backend::dropout`] does; the base layer's input has
/// none.
#[derive(Clone, Copy, Debug)]
pub struct AdapterDropout<'a> {
    /// Row identities for the dropout, i32 `[t, 2]`: two words per row of the input, as in [`DropoutArgs`].
    /// They cover the rows of all groups.
    pub rows: &'a Tensor,
    /// Key of the dropout's random stream, e.g. (seed, layer). Calls with equal key, row identities and
    /// probability drop the same elements.
    pub key: [u32; 2],
    /// Dropout probability, with which an element becomes zero: `0 <= p < 1`.
    pub p: f32,
}

impl<'a> AdapterDropout<'a> {
    /// Operands for [`Backend::dropout`] that apply this dropout to the input `x`.
    #[must_use]
    pub const fn of(&self, x: &'a Tensor) -> DropoutArgs<'a> {
        DropoutArgs {
            x,
            rows: self.rows,
            key: self.key,
            p: self.p,
        }
    }
}

/// Low-rank adapter (LoRA) of a linear layer with a weight `[n, k]`: the two matrices, their scale and the
/// dropout.
#[derive(Clone, Copy, Debug)]
pub struct AdapterArgs<'a> {
    /// Matrix A of the adapter, `[r, k]`. It maps the `k` inputs to `r` intermediate values. The rank `r` may
    /// differ between adapters of one call.
    pub lora_a: &'a Tensor,
    /// Matrix B of the adapter, `[n, r]`. It maps the `r` intermediate values to the `n` outputs.
    pub lora_b: &'a Tensor,
    /// Factor on the adapter's output, `alpha / r` in LoRA.
    pub scale: f32,
    /// Dropout of the adapter's input, or `None`. The mask is not stored; the backward recomputes it.
    pub dropout: Option<AdapterDropout<'a>>,
}

/// Linear layer with an optional LoRA adapter: `x W^T + bias + scale * (dropout(x) A^T) B^T`. Without an
/// adapter the last term is absent.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedLayer<'a> {
    /// Weight of the base layer, `[n, k]`.
    pub weight: &'a Tensor,
    /// Bias of the base layer, `[n]`, or `None` if the layer has no bias.
    pub bias: Option<&'a Tensor>,
    /// Low-rank adapter that is added to the base layer. `None` for the base layer alone.
    pub adapter: Option<AdapterArgs<'a>>,
}

/// Operands of [`Backend::adapted_linear`]: projections of one input, such as queries, keys and values. A projection
/// has one layer, or one layer per row group, e.g. per expert.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedLinearArgs<'a> {
    /// Input of all projections, `[t, k]`: `t` tokens with `k` features.
    pub x: &'a Tensor,
    /// Row numbers of two groups of tokens, each i32 `[m]` and possibly empty. Every row of `x` is in exactly
    /// one group. `None` if all rows form one group.
    pub row_groups: Option<[&'a Tensor; 2]>,
    /// Layers of each projection: the outer index is the projection, the inner index the row group. The
    /// layers of a projection have equal shapes.
    pub projections: &'a [Vec<AdaptedLayer<'a>>],
}

/// Results of [`Backend::adapted_linear`]: the output of each projection, and values that its backward can reuse.
#[derive(Debug)]
pub struct AdaptedLinear {
    /// Output of each projection, `[t, n]`, in the order of [`AdaptedLinearArgs::projections`].
    pub y: Vec<Tensor>,
    /// Outputs of the adapters' A matrices (the rank-`r` activations), saved for
    /// [`AdaptedLinearGradArgs::inner`]. The layout depends on the backend. Empty if the backend saves none.
    pub inner: Vec<Tensor>,
}

/// Operands of [`Backend::adapted_linear_backward`]: those of the forward, the output gradients, and saved
/// activations.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedLinearGradArgs<'a> {
    /// Operands that were passed to [`Backend::adapted_linear`] in the forward.
    pub forward: AdaptedLinearArgs<'a>,
    /// Gradient of each projection's output, `[t, n]`, in the order of the projections.
    pub dy: &'a [&'a Tensor],
    /// [`AdaptedLinear::inner`] that the forward call with the same operands returned. If empty, the backward
    /// recomputes it.
    pub inner: &'a [Tensor],
    /// Whether to compute [`AdaptedLinearGrads::dx`], the gradient of the input.
    pub need_dx: bool,
}

/// Gradients of one adapter's matrices A `[r, k]` and B `[n, r]`, in this order, as f32.
pub type AdapterGrads = [Tensor; 2];

/// Gradients of the adapters of all projections: the outer index is the projection, the inner index the row group.
/// `None` for a layer without an adapter.
pub type AdapterSums = Vec<Vec<Option<AdapterGrads>>>;

/// Results of [`Backend::adapted_linear_backward`]: gradients of the input and of the adapters. The base
/// weights are frozen.
#[derive(Debug)]
pub struct AdaptedLinearGrads {
    /// Gradient of the input, `[t, k]` in the input's dtype. `None` unless [`AdaptedLinearGradArgs::need_dx`]
    /// is set. The gradients of the projections are rounded, then added from the last projection to the
    /// first, with rounding after each addition. With dropout, the parts of base layer and adapter are also
    /// rounded before they are added.
    pub dx: Option<Tensor>,
    /// Gradients of the adapters.
    pub adapters: AdapterSums,
}

/// Operands of one layer with an adapter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoraArgs<'a> {
    /// Input of the layer, `[t, k]`.
    pub(crate) x: &'a Tensor,
    /// Weight of the base layer, `[n, k]`.
    pub(crate) weight: &'a Tensor,
    /// Bias of the base layer, `[n]`, if it has one.
    pub(crate) bias: Option<&'a Tensor>,
    /// Matrix A of the adapter, `[r, k]`.
    pub(crate) lora_a: &'a Tensor,
    /// Matrix B of the adapter, `[n, r]`.
    pub(crate) lora_b: &'a Tensor,
    /// Factor on the adapter's output, `alpha / r`.
    pub(crate) scale: f32,
    /// Dropout of the adapter's input, or `None` for no dropout. The base layer's input has none.
    pub(crate) dropout: Option<AdapterDropout<'a>>,
}

/// Gradients of one layer with an adapter, whose operands are [`LoraArgs`].
#[derive(Debug)]
pub(crate) struct LoraGrads {
    /// Gradient of `x`, `[t, k]` in its dtype, if requested.
    pub(crate) dx: Option<Tensor>,
    /// Gradient of A, `[r, k]` f32.
    pub(crate) d_lora_a: Tensor,
    /// Gradient of B, `[n, r]` f32.
    pub(crate) d_lora_b: Tensor,
}

impl<'a> AdaptedLayer<'a> {
    /// Operands of the layer on rows `x`. `None` without an adapter.
    pub(crate) fn adapted<'o>(&self, x: &'o Tensor) -> Option<LoraArgs<'o>>
    where
        'a: 'o,
    {
        self.adapter.map(|adapter| LoraArgs {
            x,
            weight: self.weight,
            bias: self.bias,
            lora_a: adapter.lora_a,
            lora_b: adapter.lora_b,
            scale: adapter.scale,
            dropout: adapter.dropout,
        })
    }

    /// Operands of the base layer's product on rows `x`, without the adapter.
    pub(crate) fn base<'o>(&self, x: &'o Tensor) -> MatmulArgs<'o>
    where
        'a: 'o,
    {
        MatmulArgs {
            a: x,
            transpose_a: Transpose::No,
            b: self.weight,
            transpose_b: Transpose::Yes,
            bias: self.bias,
            out: x.dtype(),
        }
    }

    /// The layer without its bias, which the gradients do not depend on.
    #[cfg(feature = "cuda")]
    pub(crate) fn unbiased(self) -> Self {
        Self { bias: None, ..self }
    }
}

/// Operands of one projection with two row groups: the input, the row numbers of each group, and the layer that each
/// group uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedLayers<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) rows: [&'a Tensor; 2],
    pub(crate) layers: [AdaptedLayer<'a>; 2],
}

impl<'a> AdaptedLinearArgs<'a> {
    /// Number of layers of each projection: one per row group.
    fn groups(&self) -> usize {
        self.row_groups.map_or(1, |rows| rows.len())
    }

    /// The projection `layers` with its row groups. `None` if all rows form one group.
    pub(crate) fn grouped(&self, layers: &[AdaptedLayer<'a>]) -> Option<GroupedLayers<'a>> {
        let (rows, &[first, second]) = (self.row_groups?, layers) else {
            return None;
        };
        Some(GroupedLayers {
            x: self.x,
            rows,
            layers: [first, second],
        })
    }
}

/// Checks that the operands fit. Returns the output width `n` of each projection.
pub(crate) fn check(op: &'static str, args: &AdaptedLinearArgs<'_>) -> Result<Vec<usize>> {
    let (x, groups) = (args.x, args.groups());
    if args.projections.is_empty() {
        return shape_error(op, "no projection".to_owned());
    }
    if let Some(rows) = args.row_groups {
        check::groups(op, x, rows)?;
        partition(op, rows, x.dim(0))?;
    }
    let width = |layers: &Vec<AdaptedLayer<'_>>| {
        let widths = layers.iter().map(|layer| check::adapted_layer(x, layer));
        let widths: Vec<usize> = widths.collect::<Result<_>>()?;
        match widths[..] {
            [n] if groups == 1 => Ok(n),
            [n, other] if groups == 2 && n == other => Ok(n),
            _ => shape_error(op, format!("layers of {widths:?} columns, {groups} groups")),
        }
    };
    args.projections.iter().map(width).collect()
}

/// Checks the operands and gradients of the backward call.
pub(crate) fn check_backward(op: &'static str, args: &AdaptedLinearGradArgs<'_>) -> Result<()> {
    let widths = check(op, &args.forward)?;
    let (t, layers, dy) = (args.forward.x.shape().rows(), widths.len(), args.dy.len());
    if dy != layers {
        return shape_error(op, format!("{dy} gradients of {layers} layers"));
    }
    for (dy, n) in args.dy.iter().zip(widths) {
        check::float(op, dy)?;
        if (dy.shape().rows(), dy.shape().last()) != (t, n) {
            return shape_error(op, format!("dy {} for [{t}, {n}]", dy.shape()));
        }
    }
    Ok(())
}

/// Parts of the operation that each device implements.
pub(crate) trait AdaptedRows: Backend {
    /// Output of one layer with an adapter, `[t, n]`.
    fn layer(&self, args: &LoraArgs<'_>) -> Result<Tensor>;

    /// Gradients of [`AdaptedRows::layer`] for `dy [t, n]`. The base weight is frozen.
    fn layer_backward(&self, args: &LoraArgs<'_>, dy: &Tensor, need_dx: bool) -> Result<LoraGrads>;

    /// Forward of a projection with row groups: `[t, n]`, and the outputs of the adapters' A if the device stores
    /// them.
    fn grouped(&self, args: &GroupedLayers<'_>) -> Result<(Tensor, Option<Tensor>)> {
        Ok((gathered(self, args)?, None))
    }

    /// Gradients of [`AdaptedRows::grouped`] for `dy [t, n]`: of the input, if requested, and of the adapters.
    fn grouped_backward(
        &self,
        args: &GroupedLayers<'_>,
        dy: &Tensor,
        _inner: Option<&Tensor>,
        need_dx: bool,
    ) -> Result<(Option<Tensor>, Vec<Option<AdapterGrads>>)> {
        gathered_backward(self, args, dy, need_dx)
    }
}

/// Devices that continue the sums of a layer's gradients over parts of the rows.
pub(crate) trait AdaptedParts: AdaptedRows {
    /// As [`AdaptedRows::layer_backward`] for a part of the rows. The adapter's gradients are added to `sum`, which the
    /// previous part returned; `None` for the first.
    fn layer_backward_part(
        &self,
        args: &LoraArgs<'_>,
        dy: &Tensor,
        need_dx: bool,
        sum: Option<AdapterGrads>,
        part: SumPart,
    ) -> Result<LoraGrads>;
}

/// Reference implementation of [`Backend::adapted_linear`], one projection after the other.
pub(crate) fn forward<B: AdaptedRows + ?Sized>(
    on: &B,
    args: &AdaptedLinearArgs<'_>,
) -> Result<AdaptedLinear> {
    let mut all = AdaptedLinear {
        y: Vec::with_capacity(args.projections.len()),
        inner: Vec::new(),
    };
    for layers in args.projections {
        all.y.push(match args.grouped(layers) {
            Some(grouped) => {
                let (y, inner) = on.grouped(&grouped)?;
                all.inner.extend(inner);
                y
            }
            None => rows(on, &layers[0], args.x, None)?,
        });
    }
    // An incomplete list is useless, since backward could not assign its entries to projections.
    if all.inner.len() != all.y.len() {
        all.inner.clear();
    }
    Ok(all)
}

/// Reference implementation of [`Backend::adapted_linear_backward`], one projection after the other from the last to
/// the first.
pub(crate) fn backward<B: AdaptedRows + ?Sized>(
    on: &B,
    args: &AdaptedLinearGradArgs<'_>,
) -> Result<AdaptedLinearGrads> {
    let projections = args.forward.projections;
    let inner = (args.inner.len() == projections.len()).then_some(args.inner);
    let mut dx: Option<Tensor> = None;
    let mut adapters = Vec::with_capacity(projections.len());
    for (i, (layers, dy)) in projections.iter().zip(args.dy).enumerate().rev() {
        let (own, grads) = match args.forward.grouped(layers) {
            Some(grouped) => {
                let inner = inner.map(|inner| &inner[i]);
                on.grouped_backward(&grouped, dy, inner, args.need_dx)?
            }
            None => {
                let (dx, grads) =
                    rows_backward(on, &layers[0], [args.forward.x, dy], None, args.need_dx)?;
                (dx, vec![grads])
            }
        };
        dx = match (dx, own) {
            (Some(sum), Some(own)) => Some(on.add(&sum, &own)?),
            (sum, own) => sum.or(own),
        };
        adapters.push(grads);
    }
    adapters.reverse();
    Ok(AdaptedLinearGrads { dx, adapters })
}

/// Implementation of [`Backend::adapted_linear_backward_part`] one projection after the other, as [`backward`].
pub(crate) fn backward_part<B: AdaptedParts + ?Sized>(
    on: &B,
    args: &AdaptedLinearGradArgs<'_>,
    mut sums: AdapterSums,
    part: SumPart,
) -> Result<AdaptedLinearGrads> {
    const OP: &str = "adapted_linear_backward_part";
    let AdaptedLinearArgs {
        x,
        row_groups,
        projections,
    } = args.forward;
    if row_groups.is_some() {
        return shape_error(OP, "row groups".to_owned());
    }
    let mut dx: Option<Tensor> = None;
    let mut adapters = Vec::with_capacity(projections.len());
    for (layers, dy) in projections.iter().zip(args.dy).rev() {
        let sum = sums.pop().and_then(|mut own| own.pop()).flatten();
        let (own, grads) = match layers[0].adapted(x) {
            Some(adapted) => {
                let grads = on.layer_backward_part(&adapted, dy, args.need_dx, sum, part)?;
                (grads.dx, Some([grads.d_lora_a, grads.d_lora_b]))
            }
            None => rows_backward(on, &layers[0], [x, dy], None, args.need_dx)?,
        };
        dx = match (dx, own) {
            (Some(sum), Some(own)) => Some(on.add(&sum, &own)?),
            (sum, own) => sum.or(own),
        };
        adapters.push(vec![grads]);
    }
    adapters.reverse();
    Ok(AdaptedLinearGrads { dx, adapters })
}

/// `grads` with `sums`, if there are any, added to those of the adapters.
pub(crate) fn plus<B: Backend + ?Sized>(
    on: &B,
    grads: AdaptedLinearGrads,
    sums: AdapterSums,
) -> Result<AdaptedLinearGrads> {
    let mut sums = sums.into_iter().flatten();
    let mut added = |own: Option<AdapterGrads>| match (sums.next().flatten(), own) {
        (Some([a, b]), Some([own_a, own_b])) => {
            Ok(Some([on.add(&a, &own_a)?, on.add(&b, &own_b)?]))
        }
        (_, own) => Ok(own),
    };
    let adapters = grads.adapters.into_iter();
    let adapters = adapters.map(|own| own.into_iter().map(&mut added).collect());
    Ok(AdaptedLinearGrads {
        dx: grads.dx,
        adapters: adapters.collect::<Result<_>>()?,
    })
}

/// Forward of a layer on rows `x`. `words` are their row words for dropout, if `x` is a subset of the rows.
fn rows<B: AdaptedRows + ?Sized>(
    on: &B,
    layer: &AdaptedLayer<'_>,
    x: &Tensor,
    words: Option<&Tensor>,
) -> Result<Tensor> {
    match with_words(layer.adapted(x), words) {
        Some(adapted) => on.layer(&adapted),
        None => on.matmul(layer.base(x)),
    }
}

/// Gradients of [`rows`], of the input `x` if requested, and of the adapter if there is one.
fn rows_backward<B: AdaptedRows + ?Sized>(
    on: &B,
    layer: &AdaptedLayer<'_>,
    [x, dy]: [&Tensor; 2],
    words: Option<&Tensor>,
    need_dx: bool,
) -> Result<(Option<Tensor>, Option<AdapterGrads>)> {
    if let Some(adapted) = with_words(layer.adapted(x), words) {
        let grads = on.layer_backward(&adapted, dy, need_dx)?;
        return Ok((grads.dx, Some([grads.d_lora_a, grads.d_lora_b])));
    }
    let product = MatmulArgs {
        a: dy,
        transpose_b: Transpose::No,
        bias: None,
        out: x.dtype(),
        ..layer.base(x)
    };
    let dx = need_dx.then(|| on.matmul(product)).transpose()?;
    Ok((dx, None))
}

fn with_words<'o>(
    adapted: Option<LoraArgs<'o>>,
    words: Option<&'o Tensor>,
) -> Option<LoraArgs<'o>> {
    let adapted = adapted?;
    let dropout = adapted.dropout.map(|dropout| AdapterDropout {
        rows: words.unwrap_or(dropout.rows),
        ..dropout
    });
    Some(LoraArgs { dropout, ..adapted })
}

/// Row words for dropout of the rows `rows`. `None` without dropout.
fn own_words<B: Backend + ?Sized>(
    on: &B,
    layer: &AdaptedLayer<'_>,
    rows: &Tensor,
) -> Result<Option<Tensor>> {
    let dropout = layer.adapter.and_then(|adapter| adapter.dropout);
    dropout
        .map(|dropout| on.gather_rows(dropout.rows, rows))
        .transpose()
}

/// Forward of a projection with row groups, one layer per group on gathered rows.
pub(crate) fn gathered<B: AdaptedRows + ?Sized>(
    on: &B,
    args: &GroupedLayers<'_>,
) -> Result<Tensor> {
    let GroupedLayers { x, layers, .. } = args;
    let shape = Shape::new(&[x.dim(0), layers[0].weight.dim(0)]);
    let mut y = on.zeros(shape, x.dtype(), Tag::Activations)?;
    for (layer, index) in layers.iter().zip(args.rows) {
        let own = on.gather_rows(x, index)?;
        let words = own_words(on, layer, index)?;
        let part = rows(on, layer, &own, words.as_ref())?;
        y = on.write_rows(y, index, &part)?;
    }
    Ok(y)
}

/// Backward of [`gathered`]: the gradient of the input (if `need_dx`) and of each group's adapter (if it has one).
pub(crate) fn gathered_backward<B: AdaptedRows + ?Sized>(
    on: &B,
    args: &GroupedLayers<'_>,
    dy: &Tensor,
    need_dx: bool,
) -> Result<(Option<Tensor>, Vec<Option<AdapterGrads>>)> {
    let x = args.x;
    let mut dx = match need_dx {
        true => Some(on.zeros(x.shape(), x.dtype(), Tag::Activations)?),
        false => None,
    };
    let mut adapters = Vec::with_capacity(2);
    for (layer, index) in args.layers.iter().zip(args.rows) {
        let own = on.gather_rows(x, index)?;
        let own_dy = on.gather_rows(dy, index)?;
        let words = own_words(on, layer, index)?;
        let (part, grads) = rows_backward(on, layer, [&own, &own_dy], words.as_ref(), need_dx)?;
        dx = match (dx, part) {
            (Some(all), Some(part)) => Some(on.write_rows(all, index, &part)?),
            (dx, _) => dx,
        };
        adapters.push(grads);
    }
    Ok((dx, adapters))
}
