//! Two adapted linear layers over a partition of rows: what a device computes that has no kernel for them, which is also
//! what the results are defined as.

use crate::backend::LoraArgs;
use crate::check;
use crate::error::{Result, shape_error};
use crate::pool::Tag;
use crate::routed::partition_of;
use crate::{Backend, Tensor};

/// Two layers of one input; every row goes through the one of its group.
#[derive(Clone, Copy, Debug)]
pub struct RoutedLoraArgs<'a> {
    /// i32 `[m]` of each group, which may be empty; together they name every row of `x` once.
    pub rows: [&'a Tensor; 2],
    /// The layers, with the same `x [t, k]`, shapes and scale.
    pub layers: [LoraArgs<'a>; 2],
}

/// Results of [`Backend::routed_lora`].
#[derive(Debug)]
pub struct RoutedLora {
    /// `[t, n]`.
    pub y: Tensor,
    /// What the adapters made of the input, for the backward call; in a form that only the device knows, and only where it
    /// keeps any.
    pub inner: Option<Tensor>,
}

/// Gradients of [`RoutedLoraArgs`].
#[derive(Debug)]
pub struct RoutedLoraGrads {
    /// `[t, k]` in the dtype of the input, when asked for.
    pub dx: Option<Tensor>,
    /// `[r, k]` and `[n, r]` f32 of each layer.
    pub adapters: [[Tensor; 2]; 2],
}

/// That both layers have one input, shape and scale, and that the groups are a partition; its sizes.
pub(crate) fn check(args: &RoutedLoraArgs<'_>) -> Result<check::LoraSizes> {
    const OP: &str = "routed_lora";
    let [first, second] = args.layers;
    let sizes = check::lora(&first)?;
    if check::lora(&second)? != sizes
        || (first.x.shape(), first.x.dtype()) != (second.x.shape(), second.x.dtype())
        || first.scale.to_bits() != second.scale.to_bits()
    {
        return shape_error(OP, "two layers of unlike shapes, inputs or factors");
    }
    check::groups(OP, args.rows, sizes.t)?;
    partition_of(OP, args.rows, sizes.t)?;
    Ok(sizes)
}

/// [`Backend::routed_lora`] by a layer per group on gathered rows.
pub(crate) fn forward<B: Backend + ?Sized>(
    on: &B,
    args: &RoutedLoraArgs<'_>,
) -> Result<RoutedLora> {
    let sizes = check(args)?;
    let dtype = args.layers[0].x.dtype();
    let mut y = on.zeros([sizes.t, sizes.n].into(), dtype, Tag::Activations)?;
    for (layer, rows) in args.layers.iter().zip(args.rows) {
        let own = on.gather_rows(layer.x, rows)?;
        let part = on.lora_linear(LoraArgs { x: &own, ..*layer })?;
        y = on.write_rows(y, rows, &part)?;
    }
    Ok(RoutedLora { y, inner: None })
}

/// [`Backend::routed_lora_backward`] by a layer per group on gathered rows.
pub(crate) fn backward<B: Backend + ?Sized>(
    on: &B,
    args: &RoutedLoraArgs<'_>,
    dy: &Tensor,
    need_dx: bool,
) -> Result<RoutedLoraGrads> {
    let sizes = check(args)?;
    let x = args.layers[0].x;
    let mut dx = match need_dx {
        true => Some(on.zeros([sizes.t, sizes.k].into(), x.dtype(), Tag::Activations)?),
        false => None,
    };
    let mut adapters = Vec::with_capacity(2);
    for (layer, rows) in args.layers.iter().zip(args.rows) {
        let own = on.gather_rows(x, rows)?;
        let own_dy = on.gather_rows(dy, rows)?;
        let grads = on.lora_linear_backward(LoraArgs { x: &own, ..*layer }, &own_dy, need_dx)?;
        dx = match (dx, grads.dx) {
            (Some(all), Some(part)) => Some(on.write_rows(all, rows, &part)?),
            (dx, _) => dx,
        };
        adapters.push([grads.d_lora_a, grads.d_lora_b]);
    }
    let adapters = adapters.try_into().expect("two layers");
    Ok(RoutedLoraGrads { dx, adapters })
}
