//! Path of gradients: deposited, collected in a unit's bucket, reduced, and added to their sum.
//!
//! A thread ([`GradientAccumulator`](super::gradient_worker::GradientAccumulator)) fetches the gradients of a discrete
//! device. For consecutive units A, B and C of backward:
//!
//! 1. The store sends A's gradients to the thread after B's backward is queued.
//! 2. It queues the weights of C, so both directions of the bus are busy at once.
//! 3. It receives A's gradients before it queues the work of C.
//!
//! The device therefore stores the gradients of at most two units, unless the devices reduce them.

use super::device_comm::Produced;
use super::gradient_worker::{AccumulateJob, Destination};
use super::route::{GradientRoute, Gradients};
use super::{Result, Store};
use crate::comm::{Buffer, Collective, CollectiveKind, Tag as CommTag, Ticket};
use crate::error::EngineError;
use crate::offload::parallel;
use crate::plan::{Entry, Phase, Plan, Tier};
use crate::spec::{ParamId, UnitId};
use crate::step::gradients::{Accumulator, RoundingKey};
use crate::trace::Lane;
use kernels::{DType, Fetch, Reservation, Tag, Tensor};
use std::ops::Range;
use std::time::Instant;

/// One unit's gradients of one micro-batch, collected for a reduction.
pub(super) struct Bucket {
    /// Buffer that collects the gradients, with its memory reservation. `None` if gradients are added to their sum at
    /// once, or are still on a device.
    buffer: Option<(Buffer, Reservation)>,
    deposited: Vec<bool>,
    /// Gradients on a discrete device, with their ranges of elements in the parameter group.
    fetches: Vec<(Range<usize>, Fetch)>,
    /// Gradients that the devices reduce, by slot. `produced` is the event after their last write.
    on_device: Vec<Option<Tensor>>,
    produced: u64,
}

impl Bucket {
    fn new(slots: usize) -> Self {
        Self {
            buffer: None,
            deposited: vec![false; slots],
            fetches: Vec::new(),
            on_device: vec![None; slots],
            produced: 0,
        }
    }
}

/// A unit's reduction in flight, of which this rank receives its shard.
enum Sum {
    /// Reduction by the communicator, with the memory reservation of its buffer.
    InWindow(Ticket, Reservation),
    /// Reduction by the devices; the thread fetches the shard.
    OnDevice,
}

/// A reduction in flight, with its unit.
pub(super) struct PendingReduce {
    unit: UnitId,
    sum: Sum,
}

impl Store {
    /// Accepts one parameter's gradient; see [`ParamAccess::deposit`](crate::ParamAccess::deposit).
    pub(crate) fn deposit(&mut self, id: ParamId, grad: &Tensor) -> Result<()> {
        let spec = &self.plan.spec().params[id.index()];
        let refuse = |reason| {
            Err(EngineError::UnexpectedGradient {
                param: spec.name.clone(),
                reason,
            })
        };
        let unit = spec.unit;
        if self.entry_at_cursor()
            != Some(Entry {
                unit,
                phase: Phase::Backward,
            })
        {
            return refuse("its unit is not leased for backward");
        }
        if grad.dtype() != DType::F32 || grad.elems() != spec.shape.elems() {
            return refuse("it must be f32 and have the parameter's shape");
        }
        let plan = self.plan.clone();
        let group = &plan.unit(unit).trainable;
        let index = group.slots.iter().position(|s| s.param == id);
        let (Some(index), Some(gradients)) = (index, self.gradient_route(unit)) else {
            return refuse("the parameter is frozen");
        };
        let route = gradients.route;
        if self.units[unit.index()].bucket.is_none() {
            let buffer = match route {
                GradientRoute::Bucketed => Some(self.bucket_buffer(unit)?),
                _ => None,
            };
            self.units[unit.index()].bucket = Some(Bucket {
                buffer,
                ..Bucket::new(group.slots.len())
            });
        }
        let range = group.slots[index].range();
        let Some(bucket) = &mut self.units[unit.index()].bucket else {
            return Ok(());
        };
        if std::mem::replace(&mut bucket.deposited[index], true) {
            return refuse("it was deposited already in this micro-batch");
        }
        match (route, &mut bucket.buffer) {
            (GradientRoute::ReducedOnDevice { .. }, _) => {
                bucket.on_device[index] = Some(grad.clone());
                Ok(())
            }
            (GradientRoute::AddedOnDevice, _) => {
                self.accumulate(unit, |gradients, plan, rounding_key| {
                    gradients.add_on_device(group, plan, rounding_key, range, grad)
                })
            }
            (GradientRoute::Fetched { .. }, _) => {
                bucket.fetches.push((range, grad.fetch()?));
                Ok(())
            }
            (GradientRoute::Bucketed, Some((buffer, _))) => {
                let values = self.tiers.values(grad)?;
                parallel::copy(&values, buffer.part_mut(range));
                Ok(())
            }
            (GradientRoute::Bucketed | GradientRoute::Added, _) => {
                let values = self.tiers.values(grad)?;
                self.accumulate(unit, |gradients, plan, rounding_key| {
                    gradients.add_part(group, plan, rounding_key, range, &values)
                })
            }
        }
    }

    /// Buffer that collects one micro-batch's gradients of `unit` (f32, whole parameter group).
    fn bucket_buffer(&self, unit: UnitId) -> Result<(Buffer, Reservation)> {
        let bytes = self.unit_plan(unit).trainable.padded_elems * 4;
        let device = &self.tiers.device;
        let counted = device.reserve(bytes as u64, Tag::Communication)?;
        Ok((self.comm.alloc(bytes)?, counted))
    }

    /// Ends a unit's backward. Gradients that were not deposited are zero. A bucket is reduced if gradients are
    /// sharded, and otherwise added to the local sum, if that has not happened yet.
    pub(super) fn close_bucket(&mut self, unit: UnitId) -> Result<()> {
        let plan = self.plan.clone();
        let group = &plan.unit(unit).trainable;
        let Some(Gradients { route, .. }) = self.gradient_route(unit) else {
            return Ok(());
        };
        self.take_sums()?;
        // A unit that the pass did not lease may still be at the update thread.
        self.await_update(unit)?;
        let mut bucket = match self.units[unit.index()].bucket.take() {
            Some(bucket) => bucket,
            None => Bucket::new(group.slots.len()),
        };
        if let Some(device) = &mut self.device
            && let GradientRoute::ReducedOnDevice { stays } = route
        {
            let produced = Produced {
                slots: &bucket.on_device,
                mark: bucket.produced,
            };
            let sums = device.reduce(unit, group, produced)?;
            if stays {
                self.accumulate(unit, |gradients, plan, rounding_key| {
                    gradients.add_all_on_device(group, plan, rounding_key, &sums)
                })?;
                return self.step_in_backward(unit);
            }
            let mut end = group
                .shard(self.plan.shard_of(self.comm.world().rank))
                .start;
            let mut in_order = |sum: &Tensor| {
                let start = end;
                end += sum.elems();
                Ok((start..end, sum.fetch()?))
            };
            let fetches = sums.iter().map(&mut in_order).collect::<Result<_>>()?;
            drop(sums);
            self.drain(plan.config().buckets_in_flight.saturating_sub(1))?;
            let destination = self.destination(unit)?;
            self.bring(unit, fetches, Vec::new(), destination)?;
            let sum = Sum::OnDevice;
            self.pending.push_back(PendingReduce { unit, sum });
            return Ok(());
        }
        if let GradientRoute::Bucketed | GradientRoute::Fetched { bucketed: true } = route
            && bucket.buffer.is_none()
        {
            bucket.buffer = Some(self.bucket_buffer(unit)?);
        }
        let slots = group.slots.iter().zip(&bucket.deposited);
        let missing = slots.filter(|(_, deposited)| !**deposited);
        let missing = missing.map(|(slot, _)| slot.range()).chain(group.gaps());
        let missing: Vec<_> = missing.collect();
        // Without fetches too: ranks must start the reduction at the same entry, even if only some have gradients.
        let GradientRoute::Fetched { .. } = route else {
            return self.end_bucket(unit, bucket.buffer, missing);
        };
        let destination = match bucket.buffer {
            Some((buffer, counted)) => Destination::Bucket(buffer, counted),
            None => match self.units[unit.index()].gradients.take() {
                Some(sum) => Destination::Sum(sum),
                None => return Ok(()),
            },
        };
        self.bring(unit, bucket.fetches, missing, destination)
    }

    /// Ends a unit's backward whose gradients are in their sum or in `buffer`. The ranges `missing` received no
    /// gradient.
    fn end_bucket(
        &mut self,
        unit: UnitId,
        buffer: Option<(Buffer, Reservation)>,
        missing: Vec<Range<usize>>,
    ) -> Result<()> {
        let plan = self.plan.clone();
        let Some((mut buffer, counted)) = buffer else {
            let missing = missing.into_iter();
            self.accumulate(unit, |gradients, _, _| gradients.complete(missing))?;
            return self.step_in_backward(unit);
        };
        let clear = |range: Range<usize>| buffer.part_mut::<f32>(range).fill(0.0);
        missing.into_iter().for_each(clear);
        if self
            .gradient_route(unit)
            .is_some_and(|route| !route.reduced)
        {
            let all = 0..buffer.len() / 4;
            return self.take_sum(unit, buffer.part(all));
        }
        self.drain(plan.config().buckets_in_flight.saturating_sub(1))?;
        let op = Collective::new(
            CollectiveKind::ReduceScatter,
            DType::F32,
            CommTag::new("reduce", unit.0),
        )
        .in_groups(plan.config().shard_group);
        let sum = Sum::InWindow(self.comm.start(op, buffer)?, counted);
        self.pending.push_back(PendingReduce { unit, sum });
        Ok(())
    }

    /// Records an event after the work that computes the gradients of `unit`; other devices read them after it.
    pub(super) fn mark_produced(&mut self, unit: UnitId) -> Result<()> {
        let Some(device) = &self.device else {
            return Ok(());
        };
        if let Some(bucket) = &mut self.units[unit.index()].bucket {
            bucket.produced = device.produced()?;
        }
        Ok(())
    }

    /// Waits until at most `keep` reductions are in flight.
    pub(super) fn drain(&mut self, keep: usize) -> Result<()> {
        let rank = self.plan.shard_of(self.comm.world().rank);
        while self.pending.len() > keep {
            let Some(PendingReduce { unit, sum }) = self.pending.pop_front() else {
                break;
            };
            let trace = self.tiers.trace();
            let started = trace.now();
            let name = || format!("reduce {}", self.unit_name(unit));
            match sum {
                Sum::InWindow(ticket, _counted) => {
                    let buffer = ticket.wait_read()?;
                    trace.end(started, Lane::Communication, name);
                    let shard = self.unit_plan(unit).trainable.shard(rank);
                    self.take_sum(unit, buffer.part(shard))?;
                }
                Sum::OnDevice => self.take_brought()?,
            }
        }
        Ok(())
    }

    // ---- from a discrete device ------------------------------------------------------------------

    /// Where the thread writes this rank's shard of a unit's gradients that the devices reduced.
    fn destination(&mut self, unit: UnitId) -> Result<Destination> {
        if self.consumes(unit) {
            self.may_consume(unit)?;
            let region = self.waiting.pop().ok_or(EngineError::BackwardThread)?;
            return Ok(Destination::Waiting(region));
        }
        let elems = match self.tiers.counters() {
            Some(_) => 0,
            None => self.unit_plan(unit).trainable.shard_elems,
        };
        let sum = &mut self.units[unit.index()].gradients;
        // Sums on disk are added by this thread, through the disk queue.
        let in_memory = sum.take_if(|sum| sum.tier() != Tier::Nvme);
        Ok(match in_memory {
            Some(sum) => Destination::Sum(sum),
            None => Destination::Plain(vec![0.0; elems]),
        })
    }

    /// Sends a unit's gradients to the thread that fetches them.
    fn bring(
        &mut self,
        unit: UnitId,
        fetches: Vec<(Range<usize>, Fetch)>,
        missing: Vec<Range<usize>>,
        destination: Destination,
    ) -> Result<()> {
        let sums = self.sums.as_mut().ok_or(EngineError::BackwardThread)?;
        sums.send(AccumulateJob {
            unit,
            fetches,
            destination,
            missing,
            at: self.rounding_key,
            outcome: Ok(()),
        })
    }

    /// Receives all gradients that the thread has, unless they are device reductions in flight. This frees their device
    /// memory for the next unit.
    pub(crate) fn take_sums(&mut self) -> Result<()> {
        while !self.flow.reduces_on_device && self.sums.as_ref().is_some_and(|sums| sums.open() > 0)
        {
            self.take_brought()?;
        }
        Ok(())
    }

    /// Waits for the oldest gradients at the thread.
    fn take_brought(&mut self) -> Result<()> {
        let started = Instant::now();
        let sums = self.sums.as_mut().ok_or(EngineError::BackwardThread)?;
        let job = sums.receive()?;
        self.copies.count(started.elapsed());
        let trace = self.tiers.trace();
        let waited = trace.now().map(|_| started);
        trace.end(waited, Lane::Offload, || "wait for gradients".into());
        let unit = job.unit;
        let (outcome, missing) = (job.outcome, job.missing);
        drop(job.fetches);
        match job.destination {
            Destination::Sum(sum) => {
                self.units[unit.index()].gradients = Some(sum);
                outcome?;
                self.end_bucket(unit, None, missing)
            }
            Destination::Bucket(buffer, counted) => {
                outcome?;
                self.end_bucket(unit, Some((buffer, counted)), missing)
            }
            Destination::Waiting(region) => match outcome.and_then(|()| self.wait_for_thread()) {
                Ok(()) => self.consume_region(unit, region, job.at),
                Err(error) => {
                    self.waiting.push(region);
                    Err(error)
                }
            },
            Destination::Plain(values) => {
                outcome?;
                self.take_sum(unit, &values)
            }
        }
    }

    /// Receives everything from the thread and drops the gradients.
    pub(super) fn abandon_sums(&mut self) {
        while let Some(sums) = &mut self.sums
            && sums.open() > 0
        {
            let Ok(job) = sums.receive() else {
                self.sums = None;
                return;
            };
            match job.destination {
                Destination::Sum(sum) => self.units[job.unit.index()].gradients = Some(sum),
                Destination::Waiting(region) => self.waiting.push(region),
                Destination::Bucket(..) | Destination::Plain(_) => {}
            }
        }
    }

    fn consumes(&self, unit: UnitId) -> bool {
        self.gradient_route(unit)
            .is_some_and(|route| route.consumed)
    }

    /// Adds one micro-batch's gradients to this rank's sum of `unit`, or consumes them.
    fn take_sum(&mut self, unit: UnitId, values: &[f32]) -> Result<()> {
        if self.consumes(unit) {
            return self.consume(unit, values);
        }
        self.accumulate(unit, |gradients, plan, rounding_key| {
            gradients.add(&plan.unit(unit).trainable, plan, rounding_key, values)
        })?;
        self.step_in_backward(unit)
    }

    fn accumulate(
        &mut self,
        unit: UnitId,
        add: impl FnOnce(&mut Accumulator, &Plan, RoundingKey) -> Result<()>,
    ) -> Result<()> {
        let name = || self.plan.spec().units[unit.index()].name.clone();
        let Some(gradients) = &mut self.units[unit.index()].gradients else {
            return Err(EngineError::SumsAway { unit: name() });
        };
        let (plan, rounding_key) = (&self.plan, self.rounding_key);
        self.copies
            .time(gradients.tier(), || add(gradients, plan, rounding_key))
    }
}
