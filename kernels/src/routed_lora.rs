//! Grouped LoRA: two linear layers with adapters over a partition of the rows. These functions define the results,
//! and serve devices without a kernel for them.

use crate::backend::{AdapterDropout, LoraArgs, MatmulArgs, Transpose};
use crate::check;
use crate::error::Result;
use crate::pool::Tag;
use crate::routed::{RoutedArgs, RoutedGroup, partition};
use crate::{Backend, Tensor};

/// LoRA adapter of a layer `[n, k]`.
#[derive(Clone, Copy, Debug)]
pub struct AdapterArgs<'a> {
    /// `[r, k]`.
    pub lora_a: &'a Tensor,
    /// `[n, r]`.
    pub lora_b: &'a Tensor,
    /// `alpha / r`.
    pub scale: f32,
    /// Dropout of the adapter's input, if any. Its row identities cover all rows of `x`.
    pub dropout: Option<AdapterDropout<'a>>,
}

/// One layer of a grouped LoRA product and its rows.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedGroup<'a> {
    /// Row numbers, i32 `[m]`. May be empty.
    pub rows: &'a Tensor,
    /// Base weight `[n, k]`.
    pub weight: &'a Tensor,
    /// `[n]`.
    pub bias: Option<&'a Tensor>,
    /// Adapter, if the layer has one. The two layers may differ in adapter rank.
    pub adapter: Option<AdapterArgs<'a>>,
}

impl<'a> AdaptedGroup<'a> {
    /// The layer for the whole input `x`, if it has an adapter.
    fn adapted<'o>(&self, x: &'o Tensor) -> Option<LoraArgs<'o>>
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

    /// Row identities of its own rows, if its adapter has dropout.
    fn own_names<B: Backend + ?Sized>(&self, on: &B) -> Result<Option<Tensor>> {
        let dropout = self.adapter.and_then(|adapter| adapter.dropout);
        dropout
            .map(|dropout| on.gather_rows(dropout.rows, self.rows))
            .transpose()
    }

    /// The layer for its own rows `x` of the input, with their row identities `names`.
    fn adapted_rows<'o>(&self, x: &'o Tensor, names: Option<&'o Tensor>) -> Option<LoraArgs<'o>>
    where
        'a: 'o,
    {
        let adapted = self.adapted(x)?;
        let dropout = adapted.dropout.zip(names);
        let dropout = dropout.map(|(dropout, rows)| AdapterDropout { rows, ..dropout });
        Some(LoraArgs { dropout, ..adapted })
    }
}

/// Operands of [`Backend::routed_lora`]: two layers of one shape with one input. Each row goes through the layer that
/// names it.
#[derive(Clone, Copy, Debug)]
pub struct RoutedLoraArgs<'a> {
    /// `[t, k]`.
    pub x: &'a Tensor,
    /// The two layers with their rows. Together they name every row of `x` once.
    pub groups: [AdaptedGroup<'a>; 2],
}

/// Results of [`Backend::routed_lora`].
#[derive(Debug)]
pub struct RoutedLora {
    /// `[t, n]`.
    pub y: Tensor,
    /// Adapters' intermediate results for the backward call, in a format private to the device. `None` if the device
    /// saves nothing.
    pub inner: Option<Tensor>,
}

/// Gradients of [`RoutedLoraArgs`].
#[derive(Debug)]
pub struct RoutedLoraGrads {
    /// `[t, k]` in the dtype of the input, if requested.
    pub dx: Option<Tensor>,
    /// `[r, k]` and `[n, r]` f32 for each adapter.
    pub adapters: [Option<[Tensor; 2]>; 2],
}

/// Extents of [`RoutedLoraArgs`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    pub(crate) t: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Rank of each adapter.
    pub(crate) r: [Option<usize>; 2],
}

/// Checks that both layers have one shape and that the rows are a partition. Returns the sizes.
pub(crate) fn check(args: &RoutedLoraArgs<'_>) -> Result<Sizes> {
    let x = args.x;
    let bases = RoutedArgs {
        a: x,
        groups: args.groups.map(|group| RoutedGroup {
            rows: group.rows,
            b: group.weight,
            bias: group.bias,
        }),
        transpose_b: Transpose::Yes,
    };
    let n = check::routed(&bases)?.last();
    let [t, k] = [x.dim(0), x.dim(1)];
    partition(&bases, t)?;
    let mut r = [None; 2];
    for (group, r) in args.groups.iter().zip(&mut r) {
        if let Some(adapted) = group.adapted(x) {
            *r = Some(check::lora(&adapted)?.r);
        }
    }
    Ok(Sizes { t, n, k, r })
}

/// [`Backend::routed_lora`] as one layer per row list on gathered rows.
pub(crate) fn forward<B: Backend + ?Sized>(
    on: &B,
    args: &RoutedLoraArgs<'_>,
) -> Result<RoutedLora> {
    let sizes = check(args)?;
    let mut y = on.zeros([sizes.t, sizes.n].into(), args.x.dtype(), Tag::Activations)?;
    for group in &args.groups {
        let own = on.gather_rows(args.x, group.rows)?;
        let names = group.own_names(on)?;
        let part = match group.adapted_rows(&own, names.as_ref()) {
            Some(adapted) => on.lora_linear(adapted)?,
            None => on.matmul(MatmulArgs {
                a: &own,
                transpose_a: Transpose::No,
                b: group.weight,
                transpose_b: Transpose::Yes,
                bias: group.bias,
                out: own.dtype(),
            })?,
        };
        y = on.write_rows(y, group.rows, &part)?;
    }
    Ok(RoutedLora { y, inner: None })
}

/// [`Backend::routed_lora_backward`] as one layer per row list on gathered rows.
pub(crate) fn backward<B: Backend + ?Sized>(
    on: &B,
    args: &RoutedLoraArgs<'_>,
    dy: &Tensor,
    need_dx: bool,
) -> Result<RoutedLoraGrads> {
    let sizes = check(args)?;
    let x = args.x;
    let mut dx = match need_dx {
        true => Some(on.zeros([sizes.t, sizes.k].into(), x.dtype(), Tag::Activations)?),
        false => None,
    };
    let mut adapters = [None, None];
    for (group, to) in args.groups.iter().zip(&mut adapters) {
        let own = on.gather_rows(x, group.rows)?;
        let own_dy = on.gather_rows(dy, group.rows)?;
        let names = group.own_names(on)?;
        let part = match group.adapted_rows(&own, names.as_ref()) {
            Some(adapted) => {
                let grads = on.lora_linear_backward(adapted, &own_dy, need_dx)?;
                *to = Some([grads.d_lora_a, grads.d_lora_b]);
                grads.dx
            }
            None if need_dx => Some(on.matmul(MatmulArgs {
                a: &own_dy,
                transpose_a: Transpose::No,
                b: group.weight,
                transpose_b: Transpose::No,
                bias: None,
                out: x.dtype(),
            })?),
            None => None,
        };
        dx = match (dx, part) {
            (Some(all), Some(part)) => Some(on.write_rows(all, group.rows, &part)?),
            (dx, _) => dx,
        };
    }
    Ok(RoutedLoraGrads { dx, adapters })
}
