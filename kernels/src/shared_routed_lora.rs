//! Grouped LoRA layers that share one input and one partition of rows, such as query, key and value projections of
//! two experts. These functions define the results, and serve devices without a kernel for them.

use crate::Tensor;
use crate::backend::Backend;
use crate::error::{Result, shape_error};
use crate::routed_lora::RoutedLoraArgs;

/// Results of [`Backend::shared_routed_lora`].
#[derive(Debug)]
pub struct SharedRoutedLora {
    /// `[t, n]` of each pair of layers.
    pub y: Vec<Tensor>,
    /// Adapters' intermediate results for [`SharedRoutedLoraGradArgs::inner`], in a format private to the device.
    /// Empty if the device saves nothing.
    pub inner: Vec<Tensor>,
}

/// Operands of [`Backend::shared_routed_lora_backward`].
#[derive(Clone, Copy, Debug)]
pub struct SharedRoutedLoraGradArgs<'a> {
    /// The layers of the forward call.
    pub layers: &'a [RoutedLoraArgs<'a>],
    /// Gradient `[t, n]` of the output of each pair of layers.
    pub dy: &'a [&'a Tensor],
    /// [`SharedRoutedLora::inner`] of the forward call of the same layers, or empty.
    pub inner: &'a [Tensor],
    /// Whether to compute the input's gradient.
    pub need_dx: bool,
}

/// Gradients of [`SharedRoutedLoraGradArgs`].
#[derive(Debug)]
pub struct SharedRoutedLoraGrads {
    /// `[t, k]` in the dtype of the input, if requested. It is the sum of the pairs' gradients, each rounded. They
    /// are added from the last pair to the first, with a rounding after each addition.
    pub dx: Option<Tensor>,
    /// `[r, k]` and `[n, r]` f32 for each adapter.
    pub adapters: Vec<[Option<[Tensor; 2]>; 2]>,
}

/// Checks that all layers share one input and that their row lists have equal lengths.
pub(crate) fn check(layers: &[RoutedLoraArgs<'_>]) -> Result<()> {
    const OP: &str = "shared_routed_lora";
    let Some(first) = layers.first() else {
        return shape_error(OP, "no layer".to_owned());
    };
    for layer in layers {
        let (own, x) = (layer.x, first.x);
        if (own.shape(), own.dtype()) != (x.shape(), x.dtype()) {
            return shape_error(OP, format!("inputs {own:?} and {x:?}"));
        }
        for (own, group) in layer.groups.iter().zip(&first.groups) {
            let (own, rows) = (own.rows, group.rows);
            if own.shape() != rows.shape() {
                return shape_error(OP, format!("rows {own:?} and {rows:?}"));
            }
        }
    }
    Ok(())
}

/// Checks that each pair of layers has an output gradient.
pub(crate) fn check_backward(args: &SharedRoutedLoraGradArgs<'_>) -> Result<()> {
    check(args.layers)?;
    let [layers, dy] = [args.layers.len(), args.dy.len()];
    match dy == layers {
        true => Ok(()),
        false => shape_error(
            "shared_routed_lora_backward",
            format!("{dy} gradients of {layers} layers"),
        ),
    }
}

/// [`Backend::shared_routed_lora`] as one call per pair of layers.
pub(crate) fn forward<B: Backend + ?Sized>(
    on: &B,
    layers: &[RoutedLoraArgs<'_>],
) -> Result<SharedRoutedLora> {
    check(layers)?;
    let mut all = SharedRoutedLora {
        y: Vec::with_capacity(layers.len()),
        inner: Vec::new(),
    };
    for layer in layers {
        let own = on.routed_lora(*layer)?;
        all.y.push(own.y);
        all.inner.extend(own.inner);
    }
    // Entries for some layers only could not be matched to their layers.
    if all.inner.len() != layers.len() {
        all.inner.clear();
    }
    Ok(all)
}

/// [`Backend::shared_routed_lora_backward`] as one call per pair of layers, the last pair first.
pub(crate) fn backward<B: Backend + ?Sized>(
    on: &B,
    args: &SharedRoutedLoraGradArgs<'_>,
) -> Result<SharedRoutedLoraGrads> {
    check_backward(args)?;
    let mut dx: Option<Tensor> = None;
    let mut adapters = Vec::with_capacity(args.layers.len());
    let inner = (args.inner.len() == args.layers.len()).then_some(args.inner);
    for (i, (layer, dy)) in args.layers.iter().zip(args.dy).enumerate().rev() {
        let inner = inner.map(|inner| &inner[i]);
        let grads = on.routed_lora_backward(*layer, dy, inner, args.need_dx)?;
        dx = match (dx, grads.dx) {
            (Some(sum), Some(own)) => Some(on.add(&sum, &own)?),
            (sum, own) => sum.or(own),
        };
        adapters.push(grads.adapters);
    }
    adapters.reverse();
    Ok(SharedRoutedLoraGrads { dx, adapters })
}
