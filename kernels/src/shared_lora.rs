//! LoRA layers that share one input, such as query, key and value projections. These functions define the results,
//! and serve devices without a kernel for them.

use crate::Tensor;
use crate::backend::{Backend, LoraArgs};
use crate::error::{Result, shape_error};

/// Results of [`Backend::shared_lora`].
#[derive(Debug)]
pub struct SharedLora {
    /// `[t, n]` of each layer.
    pub y: Vec<Tensor>,
    /// Adapters' intermediate results for [`SharedLoraGradArgs::inner`], in a format private to the device. `None` if
    /// the device saves nothing.
    pub inner: Option<Tensor>,
}

/// Operands of [`Backend::shared_lora_backward`].
#[derive(Clone, Copy, Debug)]
pub struct SharedLoraGradArgs<'a> {
    /// The layers of the forward call.
    pub layers: &'a [LoraArgs<'a>],
    /// Gradient `[t, n]` of each layer's output.
    pub dy: &'a [&'a Tensor],
    /// [`SharedLora::inner`] of the forward call of the same layers, or `None`.
    pub inner: Option<&'a Tensor>,
    /// Whether to compute the input's gradient.
    pub need_dx: bool,
}

/// Gradients of [`SharedLoraGradArgs`].
#[derive(Debug)]
pub struct SharedLoraGrads {
    /// `[t, k]` in the dtype of the input, if requested. It is the sum of the layers' gradients, each rounded. They
    /// are added from the last layer to the first, with a rounding after each addition.
    pub dx: Option<Tensor>,
    /// `[r, k]` and `[n, r]` f32 for each layer.
    pub adapters: Vec<[Tensor; 2]>,
}

/// Checks that all layers share one input.
pub(crate) fn check(layers: &[LoraArgs<'_>]) -> Result<()> {
    const OP: &str = "shared_lora";
    let Some(first) = layers.first() else {
        return shape_error(OP, "no layer".to_owned());
    };
    for layer in layers {
        let (own, x) = (layer.x, first.x);
        if (own.shape(), own.dtype()) != (x.shape(), x.dtype()) {
            return shape_error(OP, format!("inputs {own:?} and {x:?}"));
        }
    }
    Ok(())
}

/// Checks that each layer has an output gradient.
pub(crate) fn check_backward(args: &SharedLoraGradArgs<'_>) -> Result<()> {
    check(args.layers)?;
    match args.dy.len() == args.layers.len() {
        true => Ok(()),
        false => shape_error(
            "shared_lora_backward",
            format!(
                "{} gradients of {} layers",
                args.dy.len(),
                args.layers.len()
            ),
        ),
    }
}

/// [`Backend::shared_lora`] as one call per layer.
pub(crate) fn forward<B: Backend + ?Sized>(on: &B, layers: &[LoraArgs<'_>]) -> Result<SharedLora> {
    check(layers)?;
    let y = layers.iter().map(|layer| on.lora_linear(*layer));
    Ok(SharedLora {
        y: y.collect::<Result<_>>()?,
        inner: None,
    })
}

/// [`Backend::shared_lora_backward`] as one call per layer, the last layer first.
pub(crate) fn backward<B: Backend + ?Sized>(
    on: &B,
    args: &SharedLoraGradArgs<'_>,
) -> Result<SharedLoraGrads> {
    check_backward(args)?;
    let mut dx: Option<Tensor> = None;
    let mut adapters = Vec::with_capacity(args.layers.len());
    for (layer, dy) in args.layers.iter().zip(args.dy).rev() {
        let grads = on.lora_linear_backward(*layer, dy, args.need_dx)?;
        dx = match (dx, grads.dx) {
            (Some(sum), Some(own)) => Some(on.add(&sum, &own)?),
            (sum, own) => sum.or(own),
        };
        adapters.push([grads.d_lora_a, grads.d_lora_b]);
    }
    adapters.reverse();
    Ok(SharedLoraGrads { dx, adapters })
}
