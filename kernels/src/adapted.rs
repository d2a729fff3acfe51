//! Linear layers of one input with low-rank adapters: operands, results, and what the results are defined as. A device
//! with no kernel for several layers computes them by that definition, one layer after the other.

use crate::backend::{DropoutArgs, MatmulArgs, Transpose};
use crate::check;
use crate::error::{Result, shape_error};
use crate::grouped::partition;
use crate::pool::Tag;
use crate::{Backend, Shape, Tensor};

/// Dropout of an adapter's input: [`Backend::dropout`] on the rows of `x`.
#[derive(Clone, Copy, Debug)]
pub struct AdapterDropout<'a> {
    /// As in [`DropoutArgs`]: i32 `[t, 2]`, for the rows of all groups.
    pub rows: &'a Tensor,
    /// Key of the random stream for one use, e.g. (seed, layer).
    pub key: [u32; 2],
    /// Probability of zero, `0 <= p < 1`.
    pub p: f32,
}

impl<'a> AdapterDropout<'a> {
    /// The dropout of `x`.
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

/// A low-rank adapter of a layer `[n, k]`.
#[derive(Clone, Copy, Debug)]
pub struct AdapterArgs<'a> {
    /// `[r, k]`; any rank.
    pub lora_a: &'a Tensor,
    /// `[n, r]`.
    pub lora_b: &'a Tensor,
    /// `alpha / r`.
    pub scale: f32,
    /// Dropout of its input, drawn again in backward.
    pub dropout: Option<AdapterDropout<'a>>,
}

/// `x W^T + bias + scale * (dropout(x) A^T) B^T`, the last term only with an adapter.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedLayer<'a> {
    /// `[n, k]`.
    pub weight: &'a Tensor,
    /// `[n]`.
    pub bias: Option<&'a Tensor>,
    /// The adapter, if any.
    pub adapter: Option<AdapterArgs<'a>>,
}

/// Operands of [`Backend::adapted_linear`]: projections of one input, such as queries, keys and values. Each projection
/// has one layer, or one for each row group, such as the experts of a decoder layer.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedLinearArgs<'a> {
    /// `[t, k]`.
    pub x: &'a Tensor,
    /// i32 `[m]` each, which may be empty; together they name every row once. Without them all rows are one group.
    pub row_groups: Option<[&'a Tensor; 2]>,
    /// The layers of each projection, one a group. Layers of one projection have the same shape.
    pub projections: &'a [Vec<AdaptedLayer<'a>>],
}

/// Results of [`Backend::adapted_linear`].
#[derive(Debug)]
pub struct AdaptedLinear {
    /// `[t, n]` of each projection.
    pub y: Vec<Tensor>,
    /// Outputs of the adapters' A, for [`AdaptedLinearGradArgs::inner`]. Their form is the device's own; empty where the
    /// device stores none.
    pub inner: Vec<Tensor>,
}

/// Operands of [`Backend::adapted_linear_backward`].
#[derive(Clone, Copy, Debug)]
pub struct AdaptedLinearGradArgs<'a> {
    /// Operands of the forward call.
    pub forward: AdaptedLinearArgs<'a>,
    /// `[t, n]` of each projection.
    pub dy: &'a [&'a Tensor],
    /// [`AdaptedLinear::inner`] of the same projections, or nothing.
    pub inner: &'a [Tensor],
    /// Whether to compute the input's gradient.
    pub need_dx: bool,
}

/// Gradients of an adapter: `[r, k]` and `[n, r]`, f32.
pub type AdapterGrads = [Tensor; 2];

/// Gradients of [`AdaptedLinearGradArgs`].
#[derive(Debug)]
pub struct AdaptedLinearGrads {
    /// `[t, k]` in the dtype of the input, if requested: the projections' gradients, each rounded, summed from the last
    /// to the first with a rounding each time. With dropout the base's and the adapter's part are rounded each, too.
    pub dx: Option<Tensor>,
    /// Of each projection and row group.
    pub adapters: Vec<Vec<Option<AdapterGrads>>>,
}

/// One adapted layer on rows `x`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoraArgs<'a> {
    /// `[t, k]`.
    pub(crate) x: &'a Tensor,
    /// `[n, k]`.
    pub(crate) weight: &'a Tensor,
    /// `[n]`.
    pub(crate) bias: Option<&'a Tensor>,
    /// `[r, k]`.
    pub(crate) lora_a: &'a Tensor,
    /// `[n, r]`.
    pub(crate) lora_b: &'a Tensor,
    /// `alpha / r`.
    pub(crate) scale: f32,
    /// Dropout of the adapter's input.
    pub(crate) dropout: Option<AdapterDropout<'a>>,
}

/// Gradients of [`LoraArgs`].
#[derive(Debug)]
pub(crate) struct LoraGrads {
    /// `[t, k]` in the dtype of `x`, if requested.
    pub(crate) dx: Option<Tensor>,
    /// `[r, k]` f32.
    pub(crate) d_lora_a: Tensor,
    /// `[n, r]` f32.
    pub(crate) d_lora_b: Tensor,
}

impl<'a> AdaptedLayer<'a> {
    /// The layer on rows `x`, if it has an adapter.
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

    /// The product of rows `x` with the weight, without the adapter.
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

    /// The layer without its bias, which has no part in the gradients.
    pub(crate) fn unbiased(self) -> Self {
        Self { bias: None, ..self }
    }
}

/// One projection over row groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedLayers<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) rows: [&'a Tensor; 2],
    pub(crate) layers: [AdaptedLayer<'a>; 2],
}

impl<'a> AdaptedLinearArgs<'a> {
    /// Layers of a projection.
    fn groups(&self) -> usize {
        self.row_groups.map_or(1, |rows| rows.len())
    }

    /// The layers `layers` of a projection with their rows; `None` if all rows are one group.
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

/// Outputs of the layers of each projection: that the operands fit.
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

/// As [`check`], with the gradients.
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

/// The parts of the operation that each device computes in its own way.
pub(crate) trait AdaptedRows: Backend {
    /// An adapted layer.
    fn layer(&self, args: &LoraArgs<'_>) -> Result<Tensor>;

    /// Its gradients for `dy [t, n]`; the base weight is frozen.
    fn layer_backward(&self, args: &LoraArgs<'_>, dy: &Tensor, need_dx: bool) -> Result<LoraGrads>;

    /// A projection over row groups, and the adapters' inner outputs if the device stores them.
    fn grouped(&self, args: &GroupedLayers<'_>) -> Result<(Tensor, Option<Tensor>)> {
        Ok((gathered(self, args)?, None))
    }

    /// Its gradients for `dy [t, n]`: of the input, if requested, and of the adapters.
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

/// [`Backend::adapted_linear`] by one projection after the other.
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
    // The backward call could not tell which projections a part of them belongs to.
    if all.inner.len() != all.y.len() {
        all.inner.clear();
    }
    Ok(all)
}

/// [`Backend::adapted_linear_backward`] by one projection after the other, the last first.
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

/// A layer on rows `x`, whose dropout has these row words if they are not those of all rows.
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

/// The gradients of [`rows`] for rows `x` and `dy`.
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

/// Row words of the rows `rows` of an adapter's dropout, if it has one.
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

/// A projection over row groups, by a layer for each group on gathered rows.
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

/// The gradients of [`gathered`].
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
