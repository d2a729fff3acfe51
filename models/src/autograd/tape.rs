//! The outer recorder: segments only.

use super::boundary::Boundary;
use super::dropout::Dropout;
use super::scope::{Mode, Record, Scope};
use super::sweep::{Grad, sum};
use super::var::{RecorderId, Slot, Var};
use crate::error::{ModelError, Result};
use engine::{BoundaryTensor, Lease, ParamAccess, ParamId, Phase, Saved, UnitId};
use kernels::{Backend, Fetch, Tensor};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::rc::Rc;

/// Callback that receives each named intermediate value of a forward pass: its name and its tensor.
pub type Observer<'o> = &'o dyn Fn(&str, &Tensor);

/// Callback that receives each operation inside the segments of a forward pass: its name, the parameters it
/// reads and its result.
pub type OpObserver<'o> = &'o dyn Fn(&'static str, &[ParamId], &Tensor);

/// Callbacks of a forward pass: `values` sees values under a name, `ops` sees the result of each recorded operation.
#[derive(Clone, Copy, Default)]
pub(super) struct Observers<'o> {
    pub(super) values: Option<Observer<'o>>,
    pub(super) ops: Option<OpObserver<'o>>,
}

type Body<'m> = Box<dyn Fn(&Scope<'_>, &[Var]) -> Result<Vec<Var>> + 'm>;

/// Cross entropy of every token of one forward pass, not yet summed.
#[derive(Clone, Debug)]
pub struct Loss {
    /// f32 `[t]`: cross entropy of each row, zero where nothing is supervised.
    pub rows: Var,
    /// Number of rows (tokens) that have a label and so enter the loss.
    pub supervised: usize,
}

impl Loss {
    /// Sum of the losses of all rows, in f64 and in row order, on the host.
    ///
    /// # Errors
    /// On the meta device, which has no values.
    pub fn sum(&self) -> Result<f64> {
        let rows = self.rows.value().to_f32_vec()?;
        Ok(rows.iter().map(|x| f64::from(*x)).sum())
    }

    /// Returns a handle that computes [`Loss::sum`] later, so that the host can queue backward before the
    /// forward pass has finished.
    ///
    /// # Errors
    /// When the device fails.
    pub fn fetch(&self) -> Result<LossFetch> {
        Ok(LossFetch(self.rows.value().fetch()?))
    }
}

/// Deferred sum of the losses of a pass; holds the losses' device memory until it is dropped.
#[derive(Debug)]
pub struct LossFetch(Fetch);

impl LossFetch {
    /// The sum of the losses of all rows, as [`Loss::sum`]; waits until the device has computed them.
    ///
    /// # Errors
    /// As [`Loss::sum`].
    pub fn sum(&self) -> Result<f64> {
        let mut sum = 0.0;
        self.0.for_each_f32(|piece| -> Result<()> {
            for x in piece {
                sum += f64::from(*x);
            }
            Ok(())
        })?;
        Ok(sum)
    }
}

/// What backward needs of one segment: the slots of its outputs, and how to compute the gradients of its inputs.
struct CheckpointedSegment<'m> {
    unit: UnitId,
    outputs: Range<Slot>,
    work: Work<'m>,
}

/// Where backward finds an input of a segment that it runs again.
enum Input {
    /// Stored on the device.
    Here(Tensor),
    /// Kept by the engine, which may move it off the device; segments that share the input share the copy.
    Away(Rc<Saved>),
    /// Recomputed: this output of the previous segment.
    Recomputed(usize),
}

/// How backward computes a segment's gradients.
enum Work<'m> {
    /// By recomputing its body.
    Recompute {
        body: Body<'m>,
        inputs: Vec<(Input, Option<Slot>)>,
        /// Checksums of the outputs of the first run; empty if recomputes are not checked.
        sums: Vec<u64>,
    },
    /// From the operations that its first run recorded.
    Stored {
        record: Record,
        /// Slots on the tape of the inputs that want a gradient.
        inputs: Vec<Slot>,
        /// Slots of the segment's outputs in `record`; `None` for an output without gradient.
        outputs: Vec<Option<Slot>>,
    },
}

/// Recorder of a forward pass for backward: a list of segments in execution order, each the part of the pass
/// that uses one unit's parameters. It cannot read a weight:
///
/// ```compile_fail
/// fn peek(tape: &models::autograd::Tape<'_, '_>, id: engine::ParamId) {
///     tape.weight(id); // only a `Scope`, under a lease, reads weights
/// }
/// ```
///
/// A body may run twice, so it cannot carry values out by itself:
///
/// ```compile_fail
/// use models::autograd::{Tape, Var};
/// fn leak(tape: &Tape<'_, '_>, unit: engine::UnitId, x: &Var) {
///     let mut kept: Option<Var> = None;
///     tape.segment(unit, [x], |_, [x]| {
///         kept = Some(x.clone()); // a body is `Fn`
///         Ok([x.clone()])
///     });
/// }
/// ```
///
/// Nor can it keep what dies before the tape:
///
/// ```compile_fail
/// use models::autograd::{Tape, Var};
/// fn dangle<'m>(tape: &Tape<'_, 'm>, unit: engine::UnitId, x: &Var) {
///     let factor = 2.0;
///     let _ = tape.segment(unit, [x], |scope, [x]| Ok([scope.scale(x, *&factor)?]));
/// }
/// ```
pub struct Tape<'e, 'm> {
    access: &'e dyn ParamAccess,
    observers: Observers<'e>,
    dropout: Option<Dropout>,
    stored: Option<&'e dyn Fn(UnitId) -> bool>,
    recording: bool,
    check_recompute: bool,
    loss_factor: f32,
    tiling: Option<NonZeroUsize>,
    id: RecorderId,
    slots: Cell<usize>,
    last_unit: Cell<Option<UnitId>>,
    /// Number of outputs of all segments so far, those of other pipeline stages included.
    outputs: Cell<u32>,
    /// Values that cross the boundaries of this pipeline stage; `None` if it has all units.
    boundary: Option<RefCell<Boundary>>,
    segments: RefCell<Vec<CheckpointedSegment<'m>>>,
    away: RefCell<HashMap<Slot, Rc<Saved>>>,
}

impl std::fmt::Debug for Tape<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tape")
            .field("recording", &self.recording)
            .field("segments", &self.segments.borrow().len())
            .finish_non_exhaustive()
    }
}

impl<'e, 'm> Tape<'e, 'm> {
    /// A tape for one forward and backward pass, which records what backward needs.
    #[must_use]
    pub fn training(access: &'e dyn ParamAccess) -> Self {
        Self::new(access, true)
    }

    /// A tape for a forward pass without backward, which stores nothing.
    #[must_use]
    pub fn inference(access: &'e dyn ParamAccess) -> Self {
        Self::new(access, false)
    }

    fn new(access: &'e dyn ParamAccess, recording: bool) -> Self {
        Self {
            access,
            observers: Observers::default(),
            dropout: None,
            stored: None,
            recording,
            check_recompute: cfg!(debug_assertions),
            loss_factor: 1.0,
            tiling: None,
            id: RecorderId::fresh(),
            slots: Cell::new(0),
            last_unit: Cell::new(None),
            outputs: Cell::new(0),
            boundary: access.own_units().map(Boundary::new),
            segments: RefCell::default(),
            away: RefCell::default(),
        }
    }

    /// Gives the tape the values that the previous pipeline stage sent ([`Tape::sent`]). The segments of earlier stages
    /// return them instead of running.
    #[must_use]
    pub fn with_received(self, values: Vec<BoundaryTensor>) -> Self {
        if let Some(boundary) = &self.boundary {
            for passed in values {
                let var = match passed.wants_gradient {
                    true => self.leaf(passed.value),
                    false => self.input(passed.value),
                };
                let var = var.with_output(passed.index);
                boundary.borrow_mut().received.insert(passed.index, var);
            }
        }
        self
    }

    /// Values that later pipeline stages read, after the forward pass: outputs of this stage's segments, and received
    /// values. Empty if this stage is the last.
    #[must_use]
    pub fn sent(&self) -> Vec<Var> {
        let boundary = self.boundary.as_ref();
        boundary.map_or_else(Vec::new, |boundary| boundary.borrow().sent())
    }

    /// Calls `observer` for each named value that the forward pass shows with [`Tape::observe`] or
    /// [`Scope::observe`].
    #[must_use]
    pub fn with_observer(mut self, observer: Observer<'e>) -> Self {
        self.observers.values = Some(observer);
        self
    }

    /// Calls `observer` for each operation inside the segments of the forward pass.
    #[must_use]
    pub fn with_op_observer(mut self, observer: OpObserver<'e>) -> Self {
        self.observers.ops = Some(observer);
        self
    }

    /// Turns on the dropout of adapters' inputs, with the masks of `dropout`; a tape for inference ignores it.
    #[must_use]
    pub fn with_dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout).filter(|_| self.recording);
        self
    }

    /// Stores the activations inside the segments of the units for which `stored` is true, instead of
    /// recomputing them in backward. The gradients are bit for bit the same either way.
    #[must_use]
    pub fn with_stored(mut self, stored: &'e dyn Fn(UnitId) -> bool) -> Self {
        self.stored = Some(stored);
        self
    }

    /// Computes feed-forward layers in tiles of `rows` tokens or patches, so that their inner values exist for one tile
    /// only; `None` for all rows at once. A tile has more rows where [`Backend::part_step`] asks for it. All
    /// values and gradients are bit for bit the same either way.
    #[must_use]
    pub fn with_mlp_tiles(mut self, rows: Option<NonZeroUsize>) -> Self {
        self.tiling = rows;
        self
    }

    /// Sets whether backward compares each recomputed output with the first one; the default is on in debug builds
    /// only.
    #[must_use]
    pub fn with_recompute_check(mut self, check: bool) -> Self {
        self.check_recompute = check;
        self
    }

    /// Announces the factor that [`Tape::backward`] will be called with; the default is 1. A
    /// [`Tape::last_segment`] computes the gradient of its loss for this factor during forward.
    #[must_use]
    pub fn with_loss_factor(mut self, factor: f32) -> Self {
        self.loss_factor = factor;
        self
    }

    /// The device that the tape's operations run on.
    #[must_use]
    pub fn backend(&self) -> &'e dyn Backend {
        &**self.access.backend()
    }

    /// Puts `value` on the tape as a constant: it gets no gradient.
    #[must_use]
    pub fn input(&self, value: Tensor) -> Var {
        Var::new(value, self.id, None, false)
    }

    /// Puts `value` on the tape as a leaf: [`Tape::backward_from`] returns its gradient.
    #[must_use]
    pub fn leaf(&self, value: Tensor) -> Var {
        let slot = self.recording.then(|| self.new_slots(1).start);
        Var::new(value, self.id, slot, self.recording)
    }

    /// Passes `var` under `name` to the tape's observer, if it has one.
    pub fn observe(&self, name: impl Display, var: &Var) {
        if let Some(observer) = self.observers.values {
            observer(&name.to_string(), var.value());
        }
    }

    /// Number of elements stored on the device for backward as inputs of checkpointed segments; not those
    /// that the engine keeps or that backward recomputes.
    #[must_use]
    pub fn saved_elems(&self) -> usize {
        let segments = self.segments.borrow();
        let inputs = segments.iter().flat_map(|segment| match &segment.work {
            Work::Recompute { inputs, .. } => &inputs[..],
            Work::Stored { .. } => &[],
        });
        let here = inputs.map(|(input, _)| match input {
            Input::Here(value) => value.elems(),
            Input::Away(_) | Input::Recomputed(_) => 0,
        });
        here.sum()
    }

    /// Runs `body` as one checkpointed segment: the parameters of `unit` are readable meanwhile, and only
    /// `inputs` are stored for backward; [`Tape::with_stored`] makes exceptions.
    ///
    /// `body` runs once here. Backward runs it once more if a gradient passes through, and twice if the next
    /// unit's input is recomputed ([`ParamAccess::recomputes_input`]). All runs must compute the same. `body`
    /// captures values without gradient (masks, positions). Units are used in the order of the model, each at
    /// most once per tape.
    ///
    /// # Errors
    /// When the unit is out of order, an input belongs to another tape, or `body` or the engine
    /// fails.
    pub fn segment<const I: usize, const O: usize>(
        &self,
        unit: UnitId,
        inputs: [&Var; I],
        body: impl Fn(&Scope<'_>, [&Var; I]) -> Result<[Var; O]> + 'm,
    ) -> Result<[Var; O]> {
        let stored = self.stored.is_some_and(|stored| stored(unit));
        self.segment_in(unit, inputs, body, stored)
    }

    /// As [`Tape::segment`], for the last segment of a model, with which backward begins. The values inside it are
    /// stored, since backward needs them at once, instead of being recomputed.
    ///
    /// # Errors
    /// As [`Tape::segment`].
    pub fn last_segment<const I: usize, const O: usize>(
        &self,
        unit: UnitId,
        inputs: [&Var; I],
        body: impl Fn(&Scope<'_>, [&Var; I]) -> Result<[Var; O]> + 'm,
    ) -> Result<[Var; O]> {
        self.segment_in(unit, inputs, body, true)
    }

    fn segment_in<const I: usize, const O: usize>(
        &self,
        unit: UnitId,
        inputs: [&Var; I],
        body: impl Fn(&Scope<'_>, [&Var; I]) -> Result<[Var; O]> + 'm,
        stored: bool,
    ) -> Result<[Var; O]> {
        self.check(unit, &inputs)?;
        let first_output = self.outputs.get();
        self.outputs.set(first_output + O as u32);
        if let Some(boundary) = &self.boundary {
            let mut boundary = boundary.borrow_mut();
            if !boundary.has(unit) {
                return boundary.skip(unit, &inputs, first_output, self);
            }
            boundary.check(unit, &inputs)?;
        }
        let body: Body<'m> =
            Box::new(move |scope, vars| Ok(body(scope, std::array::from_fn(|i| &vars[i]))?.into()));
        let visited = self.recording && self.access.needs_backward(unit);
        let mode = match visited && stored {
            true => Mode::Store,
            false => Mode::Forward,
        };
        let (outputs, record) = self.first_run(unit, &inputs, &body, mode)?;
        let wanted = visited && outputs.iter().any(Var::requires_grad);
        let first = self.slots.get();
        if wanted {
            let work = match mode {
                Mode::Store => Work::Stored {
                    record,
                    inputs: inputs.iter().filter_map(|v| v.slot()).collect(),
                    outputs: outputs.iter().map(Var::slot).collect(),
                },
                _ => Work::Recompute {
                    body,
                    inputs: self.keep_all(unit, &inputs)?,
                    sums: self.sums(&outputs),
                },
            };
            let outputs = self.new_slots(O);
            self.segments.borrow_mut().push(CheckpointedSegment {
                unit,
                outputs,
                work,
            });
        }
        let mut outputs = outputs.into_iter();
        Ok(std::array::from_fn(|i| {
            let out = outputs.next().expect("a body returns O values");
            let tracked = wanted && out.requires_grad();
            let slot = tracked.then_some(first + i);
            let var = Var::new(out.into_value(), self.id, slot, tracked);
            var.with_output(first_output + i as u32)
        }))
    }

    /// The inputs for the recompute.
    fn keep_all(&self, unit: UnitId, inputs: &[&Var]) -> Result<Vec<(Input, Option<Slot>)>> {
        let again = match self.segments.borrow().last() {
            Some(front) if self.access.recomputes_input(unit) => match front.work {
                Work::Recompute { .. } => front.outputs.clone(),
                Work::Stored { .. } => 0..0,
            },
            _ => 0..0,
        };
        let input = |input: &&Var| match input.slot() {
            Some(slot) if again.contains(&slot) => {
                Ok((Input::Recomputed(slot - again.start), Some(slot)))
            }
            _ => self.keep(input),
        };
        inputs.iter().map(input).collect()
    }

    /// An input for the recompute. Values with a gradient go to the engine's tier for activations.
    fn keep(&self, input: &Var) -> Result<(Input, Option<Slot>)> {
        let (Some(tier), Some(slot)) = (self.access.activations(), input.slot()) else {
            return Ok((Input::Here(input.value().clone()), input.slot()));
        };
        let mut away = self.away.borrow_mut();
        let saved = match away.get(&slot) {
            Some(saved) => saved.clone(),
            None => {
                let saved = Rc::new(tier.save(input.value())?);
                away.insert(slot, saved.clone());
                saved
            }
        };
        Ok((Input::Away(saved), Some(slot)))
    }

    fn check(&self, unit: UnitId, inputs: &[&Var]) -> Result<()> {
        if inputs
            .iter()
            .any(|v| v.requires_grad() && v.recorder() != self.id)
        {
            return Err(ModelError::ForeignVar { op: "segment" });
        }
        match self.last_unit.replace(Some(unit)) {
            Some(after) if unit <= after => Err(ModelError::UnitOrder { unit, after }),
            _ => Ok(()),
        }
    }

    fn first_run(
        &self,
        unit: UnitId,
        inputs: &[&Var],
        body: &Body<'m>,
        mode: Mode,
    ) -> Result<(Vec<Var>, Record)> {
        let lease = self.access.lease(unit, Phase::Forward)?;
        let outputs = {
            let dropout = self.dropout.as_ref();
            let (access, factor) = (self.access, self.loss_factor);
            let scope = Scope::new(access, &lease, self.observers, dropout, mode, factor)
                .with_tiling(self.tiling);
            let vars: Vec<Var> = inputs
                .iter()
                .map(|v| scope.enter(v.value().clone(), v.requires_grad()))
                .collect();
            let outputs = body(&scope, &vars)?;
            if mode == Mode::Store && outputs.iter().any(|v| v.requires_grad() && !scope.owns(v)) {
                return Err(ModelError::ForeignVar { op: "segment" });
            }
            (outputs, scope.into_record())
        };
        lease.end()?;
        Ok(outputs)
    }

    fn new_slots(&self, count: usize) -> Range<Slot> {
        let first = self.slots.get();
        self.slots.set(first + count);
        first..first + count
    }

    fn sums(&self, outputs: &[Var]) -> Vec<u64> {
        if !self.check_recompute {
            return Vec::new();
        }
        outputs.iter().map(|v| checksum(v.value())).collect()
    }

    /// Backpropagates `factor * sum(loss.rows)` through the tape. The engine receives the gradient of each
    /// parameter once, in f32. Stored inputs are freed as backward passes their segments.
    ///
    /// # Errors
    /// When a segment differs from its first run, or the engine or the device fails.
    pub fn backward(self, loss: &Loss, factor: f32) -> Result<()> {
        match loss.rows.slot() {
            Some(slot) => self.run(vec![(slot, Grad::Uniform(factor))]).map(drop),
            None => Ok(()),
        }
    }

    /// As [`Tape::backward`], but starts from the values in `seeds`, each with its gradient (same shape and dtype),
    /// instead of from a loss. Returns the gradients of the leaves of the tape.
    ///
    /// # Errors
    /// As [`Tape::backward`], and when a value in `seeds` depends on no trainable parameter and no leaf.
    pub fn backward_from(self, seeds: &[(&Var, Tensor)]) -> Result<Gradients> {
        let seeds = seeds
            .iter()
            .map(|(var, grad)| match var.slot() {
                Some(slot) if var.recorder() == self.id => Ok((slot, Grad::Tensor(grad.clone()))),
                Some(_) => Err(ModelError::ForeignVar {
                    op: "backward_from",
                }),
                None => Err(ModelError::NoGradient),
            })
            .collect::<Result<Vec<_>>>()?;
        let id = self.id;
        let grads = self.run(seeds)?;
        Ok(Gradients {
            recorder: id,
            grads,
        })
    }

    /// Backward of one pipeline stage: from the loss and its factor if it is the last stage, else from `gradients` of the
    /// values that it sent. Returns the gradients of the values that it received; a value that no gradient reached is left
    /// out.
    ///
    /// # Errors
    /// As [`Tape::backward`], and when a gradient belongs to no value that was sent.
    pub fn backward_stage(
        self,
        loss: Option<(&Loss, f32)>,
        gradients: Vec<BoundaryTensor>,
    ) -> Result<Vec<BoundaryTensor>> {
        let mut seeds = Vec::new();
        if let Some((loss, factor)) = loss {
            let slot = loss.rows.slot();
            seeds.extend(slot.map(|slot| (slot, Grad::Uniform(factor))));
        }
        let sent = self.sent();
        for passed in gradients {
            let var = sent.iter().find(|var| var.output() == Some(passed.index));
            let slot = var.and_then(Var::slot).ok_or(ModelError::NoGradient)?;
            seeds.push((slot, Grad::Tensor(passed.value)));
        }
        let received = match &self.boundary {
            Some(boundary) => std::mem::take(&mut boundary.borrow_mut().received),
            None => BTreeMap::new(),
        };
        drop(sent);
        let slots: Vec<_> = received
            .into_iter()
            .filter_map(|(index, var)| Some((index, var.slot()?)))
            .collect();
        let mut grads = self.run(seeds)?;
        let of = |(index, slot): (u32, Slot)| match grads[slot].take() {
            Some(Grad::Tensor(value)) => Some(BoundaryTensor {
                index,
                wants_gradient: false,
                value,
            }),
            _ => None,
        };
        Ok(slots.into_iter().filter_map(of).collect())
    }

    fn run(self, seeds: Vec<(Slot, Grad)>) -> Result<Vec<Option<Grad>>> {
        let Self {
            access,
            segments,
            slots,
            check_recompute: check,
            dropout,
            tiling,
            away,
            ..
        } = self;
        let again = Again {
            dropout: dropout.as_ref(),
            check,
            tiling,
        };
        let backend: &dyn Backend = &**access.backend();
        let mut grads: Vec<Option<Grad>> = vec![None; slots.get()];
        for (slot, grad) in seeds {
            add(backend, &mut grads, slot, grad)?;
        }
        // From here on a kept value lives as long as the last segment that wants it.
        drop(away);
        let mut segments = segments.into_inner();
        while let Some(mut segment) = segments.pop() {
            let seeds: Vec<Option<Grad>> = grads[segment.outputs.clone()]
                .iter_mut()
                .map(Option::take)
                .collect();
            let wanted = seeds.iter().any(Option::is_some);
            if wanted && segment.lacks_input() {
                recompute(access, &mut segments, &mut segment, again)?;
            }
            // A group that is computed again begins with its first.
            let next = segments.iter().rfind(|segment| !segment.lacks_input());
            if let Some(next) = next.filter(|_| !segment.lacks_input()) {
                prefetch(access, next)?;
            }
            if !wanted {
                continue;
            }
            for (slot, grad) in sweep_segment(access, segment, seeds, again)? {
                add(backend, &mut grads, slot, grad)?;
            }
        }
        Ok(grads)
    }
}

/// How backward runs a body again: as the first time.
#[derive(Clone, Copy)]
struct Again<'d> {
    dropout: Option<&'d Dropout>,
    /// Whether recomputed outputs are compared with the first.
    check: bool,
    tiling: Option<NonZeroUsize>,
}

impl Again<'_> {
    /// Scope of a further run. The factor of the loss comes with the gradient.
    fn scope<'s>(
        &'s self,
        access: &'s dyn ParamAccess,
        lease: &'s Lease<'s>,
        mode: Mode,
    ) -> Scope<'s> {
        let scope = Scope::new(access, lease, Observers::default(), self.dropout, mode, 1.0);
        scope.with_tiling(self.tiling)
    }
}

/// Leases the segment's unit, recomputes its body unless the first run was recorded, and sweeps. Returns the
/// gradients of its inputs by their slot on the tape.
fn sweep_segment(
    access: &dyn ParamAccess,
    segment: CheckpointedSegment<'_>,
    seeds: Vec<Option<Grad>>,
    again: Again<'_>,
) -> Result<Vec<(Slot, Grad)>> {
    let unit = segment.unit;
    let lease = access.lease(unit, Phase::Backward)?;
    let (slots, grads) = match segment.work {
        Work::Stored {
            record,
            inputs,
            outputs,
        } => {
            let inner = outputs.into_iter().zip(seeds);
            let inner = inner.filter_map(|(slot, grad)| Some((slot?, grad?)));
            let grads = record.sweep(access, &lease, inner.collect(), inputs.len())?;
            (inputs, grads)
        }
        Work::Recompute { body, inputs, sums } => {
            let slots: Vec<Slot> = inputs.iter().filter_map(|(_, slot)| *slot).collect();
            let scope = again.scope(access, &lease, Mode::Recompute);
            let mut vars = Vec::with_capacity(inputs.len());
            for (input, slot) in inputs {
                let value = match input {
                    Input::Here(value) => value,
                    Input::Away(saved) => load(access, &saved)?,
                    Input::Recomputed(_) => return Err(ModelError::NotRecomputed { unit }),
                };
                vars.push(scope.enter(value, slot.is_some()));
            }
            let outputs = body(&scope, &vars)?;
            drop(vars);
            if again.check && !scope.has_elided() {
                compare(unit, &outputs, &sums)?;
            }
            let inner = inner_seeds(&scope, outputs, seeds)?;
            let record = scope.into_record();
            let grads = record.sweep(access, &lease, inner, slots.len())?;
            (slots, grads)
        }
    };
    lease.end()?;
    let pairs = slots.into_iter().zip(grads);
    Ok(pairs
        .filter_map(|(slot, grad)| grad.map(|g| (slot, g)))
        .collect())
}

impl CheckpointedSegment<'_> {
    /// Whether an input of the segment must first be recomputed by the previous segment.
    fn lacks_input(&self) -> bool {
        let Work::Recompute { inputs, .. } = &self.work else {
            return false;
        };
        let mut inputs = inputs.iter();
        inputs.any(|(input, _)| matches!(input, Input::Recomputed(_)))
    }

    /// Takes missing inputs from the outputs of the previous segment.
    fn complete(&mut self, front: &[Tensor]) {
        if let Work::Recompute { inputs, .. } = &mut self.work {
            for (input, _) in inputs {
                if let Input::Recomputed(output) = *input {
                    *input = Input::Here(front[output].clone());
                }
            }
        }
    }
}

/// Recomputes the inputs that a group did not store: runs its segments before `last` forward, and gives every
/// segment of the group its inputs. Inputs on another tier are fetched once.
fn recompute(
    access: &dyn ParamAccess,
    segments: &mut [CheckpointedSegment<'_>],
    last: &mut CheckpointedSegment<'_>,
    again: Again<'_>,
) -> Result<()> {
    let unit = last.unit;
    let first = segments.iter().rposition(|segment| !segment.lacks_input());
    let group = &mut segments[first.ok_or(ModelError::NotRecomputed { unit })?..];
    let mut back: Vec<(Rc<Saved>, Tensor)> = Vec::new();
    let mut front: Vec<Tensor> = Vec::new();
    for segment in group {
        segment.complete(&front);
        let unit = segment.unit;
        let Work::Recompute { body, inputs, sums } = &mut segment.work else {
            return Err(ModelError::NotRecomputed { unit });
        };
        let lease = access.lease(unit, Phase::Recompute)?;
        let scope = again.scope(access, &lease, Mode::Forward);
        let mut vars = Vec::with_capacity(inputs.len());
        for (input, slot) in inputs.iter_mut() {
            let value = match input {
                Input::Here(value) => value.clone(),
                Input::Away(saved) => match back.iter().find(|(of, _)| Rc::ptr_eq(of, saved)) {
                    Some((_, value)) => value.clone(),
                    None => {
                        let value = load(access, saved)?;
                        back.push((saved.clone(), value.clone()));
                        value
                    }
                },
                Input::Recomputed(_) => return Err(ModelError::NotRecomputed { unit }),
            };
            *input = Input::Here(value.clone());
            vars.push(scope.enter(value, slot.is_some()));
        }
        let outputs = body(&scope, &vars)?;
        if again.check {
            compare(unit, &outputs, sums)?;
        }
        front = outputs.into_iter().map(Var::into_value).collect();
        drop((vars, scope));
        lease.end()?;
    }
    last.complete(&front);
    Ok(())
}

/// Starts to fetch the inputs of a segment's recompute from another tier.
fn prefetch(access: &dyn ParamAccess, segment: &CheckpointedSegment<'_>) -> Result<()> {
    if let (Some(tier), Work::Recompute { inputs, .. }) = (access.activations(), &segment.work) {
        for (input, _) in inputs {
            if let Input::Away(saved) = input {
                tier.prefetch(saved, &**access.backend())?;
            }
        }
    }
    Ok(())
}

fn load(access: &dyn ParamAccess, saved: &Saved) -> Result<Tensor> {
    let tier = access.activations();
    let tier = tier.expect("a value is away only where there is a tier for it");
    Ok(tier.load(saved, &**access.backend())?)
}

/// The outputs' gradients by their slot in the inner record.
fn inner_seeds(
    scope: &Scope<'_>,
    outputs: Vec<Var>,
    seeds: Vec<Option<Grad>>,
) -> Result<Vec<(Slot, Grad)>> {
    let mut inner = Vec::new();
    for (out, seed) in outputs.into_iter().zip(seeds) {
        if !scope.owns(&out) && out.requires_grad() {
            return Err(ModelError::ForeignVar { op: "segment" });
        }
        if let (Some(slot), Some(grad)) = (out.slot(), seed) {
            inner.push((slot, grad));
        }
    }
    Ok(inner)
}

fn compare(unit: UnitId, outputs: &[Var], sums: &[u64]) -> Result<()> {
    match outputs
        .iter()
        .zip(sums)
        .position(|(out, sum)| checksum(out.value()) != *sum)
    {
        Some(output) => Err(ModelError::RecomputeDiffers { unit, output }),
        None => Ok(()),
    }
}

fn add(backend: &dyn Backend, grads: &mut [Option<Grad>], slot: Slot, grad: Grad) -> Result<()> {
    grads[slot] = Some(match grads[slot].take() {
        Some(old) => sum(backend, old, grad)?,
        None => grad,
    });
    Ok(())
}

/// FNV-1a over the bytes; 0 if there are none: on the meta device, and if the device fails, which its next operation
/// reports.
fn checksum(value: &Tensor) -> u64 {
    let hash = |bytes: &[u8]| {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    value.host_bytes().map_or(0, |bytes| hash(&bytes))
}

/// Gradients of the leaves of a tape ([`Tape::leaf`]), as [`Tape::backward_from`] returns them.
#[derive(Debug)]
pub struct Gradients {
    recorder: RecorderId,
    grads: Vec<Option<Grad>>,
}

impl Gradients {
    /// The gradient of `leaf`; `None` when no gradient reached it or it is not a leaf of the tape.
    #[must_use]
    pub fn get(&self, leaf: &Var) -> Option<&Tensor> {
        match leaf.slot().filter(|_| leaf.recorder() == self.recorder) {
            Some(slot) => match self.grads.get(slot)? {
                Some(Grad::Tensor(tensor)) => Some(tensor),
                _ => None,
            },
            None => None,
        }
    }
}
