//! The inner recorder: differentiable operations under a lease.

use super::dropout::{Dropout, Rows};
use super::sweep::{Grad, Node, Sweep};
use super::tape::Observers;
use super::tiles::TileSums;
use super::var::{RecorderId, Var};
use crate::error::{ModelError, Result};
use engine::{Lease, ParamAccess, ParamId};
use kernels::{Backend, Tensor};
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::num::NonZeroUsize;
use std::ops::Range;

/// What a run of a segment's body keeps for the backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// Result values only; nothing is kept for backward.
    Forward,
    /// First run of a segment that backward does not run again: values and backward operations, which outlive the
    /// lease.
    Store,
    /// Second run of a segment, in backward: values and backward operations, which are used under the same lease.
    Recompute,
}

/// Recorder of the operations inside a segment, the part of a pass that uses one unit's parameters. It has
/// every differentiable operation, and is the only reader of weights. It exists only while the unit is leased
/// (gathered).
pub struct Scope<'s> {
    access: &'s dyn ParamAccess,
    lease: &'s Lease<'s>,
    observers: Observers<'s>,
    dropout: Option<&'s Dropout>,
    mode: Mode,
    loss_factor: f32,
    id: RecorderId,
    nodes: RefCell<Vec<Node>>,
    slots: Cell<usize>,
    elided: Cell<bool>,
    /// Sample key and row number of each row, i32 `[t, 2]`, inside [`Scope::with_rows`]; otherwise `None`.
    row_names: RefCell<Option<Tensor>>,
    /// Rows of the values of this scope, if it is that of a tile; row names are those of all rows.
    tile: Option<Range<usize>>,
    /// Rows of a tile of the feed-forward layers; `None` to compute all rows at once.
    tiling: Option<NonZeroUsize>,
    /// Whether operations are those of a feed-forward layer.
    feed_forward: Cell<bool>,
}

impl std::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope")
            .field("unit", &self.lease.unit())
            .field("mode", &self.mode)
            .field("nodes", &self.nodes.borrow().len())
            .finish_non_exhaustive()
    }
}

impl<'s> Scope<'s> {
    pub(super) fn new(
        access: &'s dyn ParamAccess,
        lease: &'s Lease<'s>,
        observers: Observers<'s>,
        dropout: Option<&'s Dropout>,
        mode: Mode,
        loss_factor: f32,
    ) -> Self {
        Self {
            access,
            lease,
            observers,
            dropout,
            mode,
            loss_factor,
            id: RecorderId::fresh(),
            nodes: RefCell::default(),
            slots: Cell::new(0),
            elided: Cell::new(false),
            row_names: RefCell::default(),
            tile: None,
            tiling: None,
            feed_forward: Cell::new(false),
        }
    }

    /// Computes feed-forward layers in tiles of so many rows.
    pub(super) fn with_tiling(self, tiling: Option<NonZeroUsize>) -> Self {
        Self { tiling, ..self }
    }

    pub(super) fn tiling(&self) -> Option<NonZeroUsize> {
        self.tiling
    }

    /// A scope for the rows `tile` of a feed-forward layer's values whose rows have these names.
    pub(super) fn of_rows(self, names: Option<Tensor>, tile: Range<usize>) -> Self {
        Self {
            row_names: RefCell::new(names),
            tile: Some(tile),
            feed_forward: Cell::new(true),
            ..self
        }
    }

    /// A scope under the same lease that records nothing.
    pub(super) fn plain(&self) -> Self {
        let (observers, dropout) = (Observers::default(), self.dropout);
        Self::new(
            self.access,
            self.lease,
            observers,
            dropout,
            Mode::Forward,
            self.loss_factor,
        )
    }

    pub(super) fn row_names(&self) -> Option<Tensor> {
        self.row_names.borrow().clone()
    }

    /// The device that this scope's operations run on.
    #[must_use]
    pub fn backend(&self) -> &'s dyn Backend {
        device_of(self.access, self.feed_forward.get())
    }

    /// Runs `body`, whose operations are those of a feed-forward layer.
    pub(super) fn in_feed_forward<T>(&self, body: impl FnOnce() -> T) -> T {
        let outer = self.feed_forward.replace(true);
        let result = body();
        self.feed_forward.set(outer);
        result
    }

    /// The random state of a training pass.
    pub(crate) fn dropout_state(&self) -> Option<&'s Dropout> {
        self.dropout
    }

    /// The sample keys and row numbers, i32 `[t, 2]`, from which dropout draws the mask of a value with such rows.
    ///
    /// # Errors
    /// When a tile has rows that the batch does not have.
    pub(crate) fn dropout_rows(&self, state: &Dropout, rows: Rows) -> Result<Tensor> {
        let names = self.row_names.borrow();
        let names = names.as_ref().unwrap_or_else(|| state.rows(rows));
        Ok(match &self.tile {
            Some(tile) => names.narrow(tile.start, tile.len())?,
            None => names.clone(),
        })
    }

    /// Runs `body` on values whose row `i` stands for the token `index[i]` (i32) of the batch, or for the
    /// patch, if `rows` is [`Rows::Patches`]. Adapters in `body` use the dropout masks of these rows. An
    /// index may occur several times.
    ///
    /// # Errors
    /// When `body` fails or memory runs out.
    pub fn with_rows<T>(
        &self,
        rows: Rows,
        index: &Tensor,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let names = self
            .dropout
            .map(|state| self.backend().gather_rows(state.rows(rows), index))
            .transpose()?;
        let outer = self.row_names.replace(names);
        let result = body();
        self.row_names.replace(outer);
        result
    }

    /// Makes `value` a constant of the segment, without gradient: a mask, a table, an additive term.
    #[must_use]
    pub fn constant(&self, value: Tensor) -> Var {
        Var::new(value, self.id, None, false)
    }

    /// Passes `var` under `name` to the tape's observer, on the first run of the segment only.
    pub fn observe(&self, name: impl Display, var: &Var) {
        if let Some(observer) = self.observers.values {
            observer(&name.to_string(), var.value());
        }
    }

    /// Makes `value` an input of the segment, with a slot for its gradient if it wants one.
    pub(super) fn enter(&self, value: Tensor, requires_grad: bool) -> Var {
        let slot = (requires_grad && self.mode != Mode::Forward).then(|| self.new_slot());
        Var::new(value, self.id, slot, requires_grad)
    }

    /// A weight of the leased unit.
    pub(crate) fn weight(&self, id: ParamId) -> Result<&'s Tensor> {
        Ok(self.lease.param(id)?)
    }

    /// A copy of a weight, for uses in which the weight itself would outlive its lease.
    pub(crate) fn weight_value(&self, id: ParamId) -> Result<Tensor> {
        let weight = self.weight(id)?;
        Ok(match self.mode {
            Mode::Store => self.backend().scale(weight, 1.0)?,
            Mode::Forward | Mode::Recompute => weight.clone(),
        })
    }

    /// Whether the parameter is trainable, so that its gradient is wanted.
    pub(crate) fn trains(&self, id: ParamId) -> bool {
        self.access.is_trainable(id)
    }

    /// Whether this run may leave out loss values: true in the recompute, which only needs gradients.
    pub(crate) fn elide_value(&self) -> bool {
        let recompute = self.mode == Mode::Recompute;
        self.elided.set(self.elided.get() || recompute);
        recompute
    }

    /// The factor that backward will apply to the loss, if this run may already compute the gradient.
    pub(crate) fn stored_loss_factor(&self) -> Option<f32> {
        (self.mode == Mode::Store).then_some(self.loss_factor)
    }

    pub(super) fn has_elided(&self) -> bool {
        self.elided.get()
    }

    /// Makes `value` a result of `inputs` and `params`. `backward` receives the value's gradient,
    /// in the value's shape and dtype, and adds to the gradients of inputs and parameters; it is
    /// kept only while recording and only when one of them wants a gradient.
    pub(crate) fn record(
        &self,
        op: &'static str,
        value: Tensor,
        inputs: &[&Var],
        params: &[ParamId],
        backward: impl FnOnce(&mut Sweep<'_>, Tensor) -> Result<()> + 'static,
    ) -> Result<Var> {
        let (shape, dtype) = (value.shape(), value.dtype());
        self.record_grad(op, value, inputs, params, move |sweep, grad| {
            let dense = sweep.dense(grad, shape, dtype)?;
            backward(sweep, dense)
        })
    }

    /// As [`Scope::record`], but `backward` receives the gradient as it is: a tensor, or one number that stands for
    /// all elements.
    pub(crate) fn record_grad(
        &self,
        op: &'static str,
        value: Tensor,
        inputs: &[&Var],
        params: &[ParamId],
        backward: impl FnOnce(&mut Sweep<'_>, Grad) -> Result<()> + 'static,
    ) -> Result<Var> {
        if inputs
            .iter()
            .any(|v| v.requires_grad() && v.recorder() != self.id)
        {
            return Err(ModelError::ForeignVar { op });
        }
        if let Some(observer) = self.observers.ops {
            observer(op, params, &value);
        }
        let trained: Vec<ParamId> = params.iter().copied().filter(|p| self.trains(*p)).collect();
        let requires_grad = !trained.is_empty() || inputs.iter().any(|v| v.requires_grad());
        if !requires_grad || self.mode == Mode::Forward {
            return Ok(Var::new(value, self.id, None, requires_grad));
        }
        let slot = self.new_slot();
        self.nodes.borrow_mut().push(Node {
            outs: vec![slot],
            params: trained,
            feed_forward: self.feed_forward.get(),
            backward: Box::new(
                move |sweep, grads| match grads.into_iter().flatten().next() {
                    Some(grad) => backward(sweep, grad),
                    None => Ok(()),
                },
            ),
        });
        Ok(Var::new(value, self.id, Some(slot), true))
    }

    /// As [`Scope::record`], for an operation with several results that are computed from one `input`. `values` holds
    /// each result with the parameters that it depends on. `backward` receives the gradients of all results, each in
    /// its result's shape and dtype; `None` for a result that got no gradient.
    pub(crate) fn record_all(
        &self,
        op: &'static str,
        values: Vec<(Tensor, Vec<ParamId>)>,
        input: &Var,
        backward: impl FnOnce(&mut Sweep<'_>, Vec<Option<Tensor>>) -> Result<()> + 'static,
    ) -> Result<Vec<Var>> {
        if input.requires_grad() && input.recorder() != self.id {
            return Err(ModelError::ForeignVar { op });
        }
        let mut trained = Vec::new();
        for (value, params) in &values {
            if let Some(observer) = self.observers.ops {
                observer(op, params, value);
            }
            trained.extend(params.iter().copied().filter(|p| self.trains(*p)));
        }
        let requires_grad = !trained.is_empty() || input.requires_grad();
        let is_kept = requires_grad && self.mode != Mode::Forward;
        let forms = values
            .iter()
            .map(|(value, _)| (value.shape(), value.dtype()));
        let forms: Vec<_> = forms.collect();
        let vars: Vec<Var> = values
            .into_iter()
            .map(|(value, _)| {
                let slot = is_kept.then(|| self.new_slot());
                Var::new(value, self.id, slot, requires_grad)
            })
            .collect();
        if is_kept {
            self.nodes.borrow_mut().push(Node {
                outs: vars.iter().filter_map(Var::slot).collect(),
                params: trained,
                feed_forward: self.feed_forward.get(),
                backward: Box::new(move |sweep, grads| {
                    let dense = grads.into_iter().zip(forms).map(|(grad, (shape, dtype))| {
                        grad.map(|grad| sweep.dense(grad, shape, dtype)).transpose()
                    });
                    let dense = dense.collect::<Result<_>>()?;
                    backward(sweep, dense)
                }),
            });
        }
        Ok(vars)
    }

    fn new_slot(&self) -> usize {
        let slot = self.slots.get();
        self.slots.set(slot + 1);
        slot
    }

    /// Ends the scope and returns the operations that it recorded for the backward pass.
    pub(super) fn into_record(self) -> Record {
        Record {
            nodes: self.nodes.into_inner(),
            slots: self.slots.get(),
        }
    }

    pub(super) fn owns(&self, var: &Var) -> bool {
        var.recorder() == self.id
    }
}

/// The device, or what computes feed-forward layers there.
pub(super) fn device_of(access: &dyn ParamAccess, feed_forward: bool) -> &dyn Backend {
    let device = &**access.backend();
    let special = feed_forward.then(|| device.feed_forward());
    special.flatten().unwrap_or(device)
}

/// The operations of one run of a segment.
pub(super) struct Record {
    nodes: Vec<Node>,
    slots: usize,
}

impl Record {
    /// Sweeps from `seeds` (slot, gradient) back and returns the gradients of the first `inputs` slots. Parameter
    /// gradients are deposited on the way.
    pub(super) fn sweep(
        self,
        access: &dyn ParamAccess,
        lease: &Lease<'_>,
        seeds: Vec<(usize, Grad)>,
        inputs: usize,
    ) -> Result<Vec<Option<Grad>>> {
        let mut sweep = Sweep::new(access, lease, self.slots, &self.nodes);
        for (slot, grad) in seeds {
            sweep.accumulate(slot, grad)?;
        }
        sweep.run(self.nodes)?;
        Ok(sweep.into_gradients(inputs))
    }

    /// Sweeps a tile from `seed` back, as [`Record::sweep`]. Sums over rows continue `sums`.
    pub(super) fn sweep_tile(
        self,
        (access, lease): (&dyn ParamAccess, &Lease<'_>),
        seed: Option<(usize, Grad)>,
        inputs: usize,
        sums: &mut TileSums,
    ) -> Result<Vec<Option<Grad>>> {
        let mut sweep = Sweep::of_tile(access, lease, self.slots, sums);
        if let Some((slot, grad)) = seed {
            sweep.accumulate(slot, grad)?;
        }
        sweep.run(self.nodes)?;
        Ok(sweep.into_gradients(inputs))
    }
}
