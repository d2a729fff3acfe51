//! The reverse sweep over one segment's record.

use super::scope::device_of;
use super::tiles::TileSums;
use super::var::Slot;
use crate::error::{ModelError, Result};
use engine::{Lease, ParamAccess, ParamId};
use kernels::{
    AdaptedLinearGradArgs, AdaptedLinearGrads, AdapterSums, Backend, DType, MatmulArgs, Shape, Tag,
    Tensor, Transpose,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// Gradient of a value during the backward pass.
#[derive(Clone, Debug)]
pub(crate) enum Grad {
    /// One value for every element: what a loss seeds.
    Uniform(f32),
    /// One value per element.
    Tensor(Tensor),
}

/// Receives the gradient of each result; at least one is present.
type Backward = Box<dyn FnOnce(&mut Sweep<'_>, Vec<Option<Grad>>) -> Result<()>>;

/// One recorded operation of the forward pass with its backward. It refers to parameters by id.
pub(crate) struct Node {
    pub(super) outs: Vec<Slot>,
    /// The trainable parameters that the operation used.
    pub(super) params: Vec<ParamId>,
    /// Whether it is an operation of a feed-forward layer.
    pub(super) feed_forward: bool,
    pub(super) backward: Backward,
}

/// Gradient of one parameter while its uses are swept: a sum per range of rows.
#[derive(Default)]
struct Pending {
    uses: usize,
    parts: Vec<(Range<usize>, Tensor)>,
}

/// State of a sweep; an operation's backward adds its gradients here.
pub(crate) struct Sweep<'s> {
    access: &'s dyn ParamAccess,
    lease: &'s Lease<'s>,
    grads: Vec<Option<Grad>>,
    params: BTreeMap<ParamId, Pending>,
    /// Sums over rows that the sweep continues, if it sweeps a tile of rows.
    tile: Option<&'s mut TileSums>,
    /// Number of the node that is swept.
    node: usize,
    /// Whether this node is an operation of a feed-forward layer.
    feed_forward: bool,
}

impl<'s> Sweep<'s> {
    pub(super) fn new(
        access: &'s dyn ParamAccess,
        lease: &'s Lease<'s>,
        slots: usize,
        nodes: &[Node],
    ) -> Self {
        let mut params: BTreeMap<ParamId, Pending> = BTreeMap::new();
        for id in nodes.iter().flat_map(|n| &n.params) {
            params.entry(*id).or_default().uses += 1;
        }
        Self {
            access,
            lease,
            grads: vec![None; slots],
            params,
            tile: None,
            node: 0,
            feed_forward: false,
        }
    }

    /// A sweep over a tile of rows. It adds to the `sums` of the tiles before instead of to gradients of parameters.
    pub(super) fn of_tile(
        access: &'s dyn ParamAccess,
        lease: &'s Lease<'s>,
        slots: usize,
        sums: &'s mut TileSums,
    ) -> Self {
        Self {
            tile: Some(sums),
            ..Self::new(access, lease, slots, &[])
        }
    }

    /// The engine and the lease, for a recorder of a part of the operations.
    pub(super) fn under(&self) -> (&'s dyn ParamAccess, &'s Lease<'s>) {
        (self.access, self.lease)
    }

    /// The device that the backward operations run on.
    pub(crate) fn backend(&self) -> &'s dyn Backend {
        device_of(self.access, self.feed_forward)
    }

    /// A weight of the leased unit.
    pub(crate) fn weight(&self, id: ParamId) -> Result<&'s Tensor> {
        Ok(self.lease.param(id)?)
    }

    /// Adds `grad` to the gradient of the value with this `slot`; does nothing for `None`, a value without gradient.
    pub(crate) fn add(&mut self, slot: Option<Slot>, grad: Tensor) -> Result<()> {
        match slot {
            Some(slot) => self.accumulate(slot, Grad::Tensor(grad)),
            None => Ok(()),
        }
    }

    pub(super) fn accumulate(&mut self, slot: Slot, grad: Grad) -> Result<()> {
        let sum = match (self.grads[slot].take(), grad) {
            (None, grad) => grad,
            (Some(old), grad) => sum(self.backend(), old, grad)?,
        };
        self.grads[slot] = Some(sum);
        Ok(())
    }

    /// Adds `grad` (f32, of the parameter's shape) to the gradient of a parameter.
    pub(crate) fn param(&mut self, id: ParamId, grad: Tensor) -> Result<()> {
        let rows = outer(self.weight(id)?.shape());
        self.param_rows(id, 0..rows, grad)
    }

    /// Sum over the rows of `x`, `[n]` f32, as the sum number `key` of the operation. Inside a tile it continues that of
    /// the tile before.
    pub(crate) fn column_sum(&mut self, key: usize, x: &Tensor) -> Result<Tensor> {
        let (node, backend) = (self.node, self.backend());
        Ok(match &mut self.tile {
            None => backend.column_sum(x)?,
            Some(tile) => backend.column_sum_part(x, tile.take((node, key)), tile.part())?,
        })
    }

    /// Gradient `dy^T x` of a weight, f32, as the sum number `key` of the operation. Inside a tile it continues that of
    /// the tile before.
    pub(crate) fn weight_gradient(
        &mut self,
        key: usize,
        dy: &Tensor,
        x: &Tensor,
    ) -> Result<Tensor> {
        let args = MatmulArgs {
            a: dy,
            transpose_a: Transpose::Yes,
            b: x,
            transpose_b: Transpose::No,
            bias: None,
            out: DType::F32,
        };
        let (node, backend) = (self.node, self.backend());
        Ok(match &mut self.tile {
            None => backend.matmul(args)?,
            Some(tile) => backend.matmul_part(args, tile.take((node, key)), tile.part())?,
        })
    }

    /// Gradients of layers with adapters. The sums of projection `i` are those number `2 i` (A) and `2 i + 1` (B) of the
    /// operation. Inside a tile they continue those of the tile before.
    ///
    /// # Errors
    /// Inside a tile, when the layers have row groups.
    pub(crate) fn adapted_gradients(
        &mut self,
        args: AdaptedLinearGradArgs<'_>,
    ) -> Result<AdaptedLinearGrads> {
        let (node, backend) = (self.node, self.backend());
        let Some(tile) = &mut self.tile else {
            return Ok(backend.adapted_linear_backward(args)?);
        };
        if args.forward.row_groups.is_some() {
            return Err(ModelError::NotInTiles);
        }
        let own = |i: usize| {
            let sums = [2 * i, 2 * i + 1].map(|key| tile.take((node, key)));
            let [Some(a), Some(b)] = sums else {
                return vec![None];
            };
            vec![Some([a, b])]
        };
        let sums: AdapterSums = (0..args.forward.projections.len()).map(own).collect();
        let part = tile.part();
        Ok(backend.adapted_linear_backward_part(args, sums, part)?)
    }

    /// Adds a sum over rows to the gradient of a parameter, or of its rows `rows`. `key` is that of the sum.
    pub(crate) fn row_sum(
        &mut self,
        key: usize,
        id: ParamId,
        rows: Option<Range<usize>>,
        sum: Tensor,
    ) -> Result<()> {
        match (&mut self.tile, rows) {
            (Some(tile), rows) => tile.put((self.node, key), id, rows, sum),
            (None, Some(rows)) => return self.param_rows(id, rows, sum),
            (None, None) => return self.param(id, sum),
        }
        Ok(())
    }

    /// Adds `grad` (f32) to the gradient of some rows of a parameter.
    ///
    /// # Errors
    /// Inside a tile of rows, whose operations add sums by [`Sweep::row_sum`].
    pub(crate) fn param_rows(
        &mut self,
        id: ParamId,
        rows: Range<usize>,
        grad: Tensor,
    ) -> Result<()> {
        if self.tile.is_some() {
            return Err(ModelError::NotInTiles);
        }
        let backend = self.backend();
        let pending = self.params.entry(id).or_default();
        match pending.parts.iter_mut().find(|(range, _)| *range == rows) {
            Some((_, sum)) => *sum = backend.add(sum, &grad.reshape(sum.shape())?)?,
            None => pending.parts.push((rows, grad)),
        }
        Ok(())
    }

    /// Turns `grad` into a tensor of `shape` and `dtype`.
    pub(crate) fn dense(&self, grad: Grad, shape: Shape, dtype: DType) -> Result<Tensor> {
        dense(self.backend(), grad, shape, dtype)
    }

    /// Sweeps `nodes` from the last to the first; a node's stored values are dropped with it.
    pub(super) fn run(&mut self, mut nodes: Vec<Node>) -> Result<()> {
        while let Some(node) = nodes.pop() {
            (self.node, self.feed_forward) = (nodes.len(), node.feed_forward);
            let grads: Vec<_> = node
                .outs
                .iter()
                .map(|out| self.grads[*out].take())
                .collect();
            if grads.iter().any(Option::is_some) {
                (node.backward)(self, grads)?;
            }
            for id in node.params {
                self.used(id)?;
            }
        }
        Ok(())
    }

    /// Counts one use of a parameter as swept; after the last one its gradient is complete and goes to the engine.
    fn used(&mut self, id: ParamId) -> Result<()> {
        let Some(pending) = self.params.get_mut(&id) else {
            return Ok(());
        };
        pending.uses -= 1;
        if pending.uses == 0 {
            let parts = std::mem::take(&mut pending.parts);
            if let Some(grad) = self.assemble(id, parts)? {
                self.access.deposit(id, &grad)?;
            }
        }
        Ok(())
    }

    /// Joins the gradients of a parameter's ranges of rows to one tensor of its shape; `None` without any.
    fn assemble(&self, id: ParamId, parts: Vec<(Range<usize>, Tensor)>) -> Result<Option<Tensor>> {
        let shape = self.weight(id)?.shape();
        let (rows, backend) = (outer(shape), self.backend());
        let mut whole: Option<Tensor> = None;
        let mut covered: Vec<Range<usize>> = Vec::new();
        for (range, part) in parts {
            whole = Some(match whole {
                None if range == (0..rows) => part,
                base => {
                    let flat = part.reshape([range.len(), part.elems() / range.len().max(1)])?;
                    let apart = covered
                        .iter()
                        .all(|c| range.end <= c.start || c.end <= range.start);
                    place(backend, base, &range, &flat, rows, apart)?
                }
            });
            covered.push(range);
        }
        Ok(whole.map(|w| w.reshape(shape)).transpose()?)
    }

    /// Ends the sweep and returns the gradients of the first `count` slots.
    pub(super) fn into_gradients(mut self, count: usize) -> Vec<Option<Grad>> {
        self.grads.truncate(count);
        self.grads
    }
}

/// `base` (zeros when absent) with `part` put into its rows `range`, added where rows are taken.
fn place(
    backend: &dyn Backend,
    base: Option<Tensor>,
    range: &Range<usize>,
    part: &Tensor,
    rows: usize,
    apart: bool,
) -> Result<Tensor> {
    let index: Vec<i32> = range.clone().map(|r| r as i32).collect();
    let index = backend.upload(
        bytemuck::cast_slice(&index),
        Shape::new(&[index.len()]),
        DType::I32,
        Tag::Workspace,
    )?;
    Ok(match base {
        Some(base) => {
            let base = base.reshape([rows, part.dim(1)])?;
            if apart {
                backend.replace_rows(&base, &index, Some(part))?
            } else {
                backend.add(
                    &base,
                    &backend.scatter_add_rows(part, &index, rows, DType::F32)?,
                )?
            }
        }
        None => backend.scatter_add_rows(part, &index, rows, DType::F32)?,
    })
}

/// Extent of the outermost axis.
fn outer(shape: Shape) -> usize {
    shape.dims().first().copied().unwrap_or(1)
}

/// The sum of two gradients of the same value.
pub(super) fn sum(backend: &dyn Backend, a: Grad, b: Grad) -> Result<Grad> {
    Ok(match (a, b) {
        (Grad::Uniform(a), Grad::Uniform(b)) => Grad::Uniform(a + b),
        (Grad::Tensor(a), Grad::Tensor(b)) => Grad::Tensor(backend.add(&a, &b)?),
        (Grad::Tensor(a), b @ Grad::Uniform(_)) | (b @ Grad::Uniform(_), Grad::Tensor(a)) => {
            let b = dense(backend, b, a.shape(), a.dtype())?;
            Grad::Tensor(backend.add(&a, &b)?)
        }
    })
}

pub(super) fn dense(
    backend: &dyn Backend,
    grad: Grad,
    shape: Shape,
    dtype: DType,
) -> Result<Tensor> {
    match grad {
        Grad::Tensor(tensor) => Ok(tensor),
        Grad::Uniform(factor) => {
            let values = vec![factor; shape.elems()];
            let bytes = bytemuck::cast_slice(&values);
            let full = backend.upload(bytes, shape, DType::F32, Tag::Activations)?;
            Ok(if dtype == DType::F32 {
                full
            } else {
                backend.cast(&full, dtype)?
            })
        }
    }
}
