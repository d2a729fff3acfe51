//! How gradients leave the tape: deposited, collected in a unit's bucket, reduced, and taken to their sum.

use super::{Result, Store};
use crate::access::Phase;
use crate::comm::{Buffer, Collective, CollectiveKind, Tag as CommTag, Ticket};
use crate::device_comm::Produced;
use crate::error::EngineError;
use crate::gradients::{Accumulator, Moment};
use crate::parallel;
use crate::plan::{Entry, Plan};
use crate::spec::{ParamId, UnitId};
use crate::trace::Lane;
use kernels::{DType, Fetch, Reservation, Tag, Tensor};

/// A unit's gradients of one micro-batch.
pub(super) struct Bucket {
    /// Where they are collected; nowhere when each is added to its sum at once.
    buffer: Option<(Buffer, Reservation)>,
    deposited: Vec<bool>,
    /// Places of gradients on a device apart, and the gradients.
    fetches: Vec<(std::ops::Range<usize>, Fetch)>,
    /// Gradients that the devices will add up, by slot, and a mark behind them.
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

/// The sum of a unit's gradients, of which this rank takes its shard.
enum Sum {
    /// Of the communicator, with the count of its buffer.
    InWindow(Ticket, Reservation),
    /// Of the devices, the shard only, in parts.
    OnDevice(Vec<Fetch>),
}

pub(super) struct PendingReduce {
    unit: UnitId,
    sum: Sum,
}

impl Store {
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
        let Some(index) = group.slots.iter().position(|s| s.param == id) else {
            return refuse("the parameter is frozen");
        };
        if self.units[unit.index()].bucket.is_none() {
            let buffer = if self.apart {
                None
            } else {
                self.bucket_buffer(unit)?
            };
            self.units[unit.index()].bucket = Some(Bucket {
                buffer,
                ..Bucket::new(group.slots.len())
            });
        }
        let range = group.slots[index].range();
        let adds_on_device = self.adds_on_device(unit);
        if let Some(bucket) = &mut self.units[unit.index()].bucket {
            if std::mem::replace(&mut bucket.deposited[index], true) {
                return refuse("it was deposited already in this micro-batch");
            }
            if self.device.is_some() && plan.config().shards_gradients() {
                bucket.on_device[index] = Some(grad.clone());
                return Ok(());
            }
            if adds_on_device {
                return self.accumulate(unit, |gradients, plan, moment| {
                    gradients.add_on_device(group, plan, moment, range, grad)
                });
            }
            if self.apart {
                bucket.fetches.push((range, grad.fetch()?));
                return Ok(());
            }
            if let Some((buffer, _)) = &mut bucket.buffer {
                let values = grad.host_f32()?;
                parallel::copy(&values, &mut buffer.as_mut_slice::<f32>()[range]);
                return Ok(());
            }
        }
        let values = grad.host_f32()?;
        self.accumulate(unit, |gradients, plan, moment| {
            gradients.add_part(group, plan, moment, range, &values)
        })
    }

    /// Whether gradients of `unit` are added where they are computed, because their sums rest there and nobody else has a
    /// part of them yet.
    fn adds_on_device(&self, unit: UnitId) -> bool {
        self.tiers.are_resident() && self.plan.adds_where_computed(unit)
    }

    /// Where a micro-batch's gradients of `unit` are collected before they are reduced or added to their sum.
    fn bucket_buffer(&self, unit: UnitId) -> Result<Option<(Buffer, Reservation)>> {
        if !self.plan.buckets_gradients(unit) {
            return Ok(None);
        }
        let bytes = self.unit_plan(unit).trainable.padded_elems * 4;
        let counted = self
            .tiers
            .device
            .reserve(bytes as u64, Tag::Communication)?;
        Ok(Some((self.comm.alloc(bytes)?, counted)))
    }

    /// Ends a unit's backward: what was not deposited is zero; the bucket is reduced (stages 2, 3)
    /// or added to the local sum (stages 0, 1), if that has not happened yet.
    pub(super) fn close_bucket(&mut self, unit: UnitId) -> Result<()> {
        let plan = self.plan.clone();
        let group = &plan.unit(unit).trainable;
        if group.is_empty() {
            return Ok(());
        }
        // Units whose weights a pass did not need may be at the thread still.
        self.await_update(unit)?;
        let mut bucket = match self.units[unit.index()].bucket.take() {
            Some(bucket) => bucket,
            None => Bucket::new(group.slots.len()),
        };
        if let Some(device) = &mut self.device
            && plan.config().shards_gradients()
        {
            let produced = Produced {
                slots: &bucket.on_device,
                mark: bucket.produced,
            };
            let sums = device.reduce(unit, group, produced)?;
            drop(bucket);
            if self.tiers.are_resident() && plan.sums_on_device(unit) {
                self.accumulate(unit, |gradients, plan, moment| {
                    gradients.add_all_on_device(group, plan, moment, &sums)
                })?;
                return self.step_early(unit);
            }
            let fetches = sums.into_iter().map(|sum| sum.fetch());
            let sum = Sum::OnDevice(fetches.collect::<Result<_, _>>()?);
            self.drain(plan.config().buckets_in_flight.saturating_sub(1))?;
            self.pending.push_back(PendingReduce { unit, sum });
            return Ok(());
        }
        if bucket.buffer.is_none() && !self.adds_on_device(unit) {
            bucket.buffer = self.bucket_buffer(unit)?;
        }
        for (range, fetch) in std::mem::take(&mut bucket.fetches) {
            if let Some((buffer, _)) = &mut bucket.buffer {
                fetch.f32_into(&mut buffer.as_mut_slice::<f32>()[range])?;
                continue;
            }
            let values = fetch.f32()?;
            self.accumulate(unit, |gradients, plan, moment| {
                gradients.add_part(group, plan, moment, range, &values)
            })?;
        }
        let slots = group.slots.iter().zip(&bucket.deposited);
        let missing = slots.filter(|(_, deposited)| !**deposited);
        let zeros = missing.map(|(slot, _)| slot.range()).chain(group.gaps());
        let Some((mut buffer, counted)) = bucket.buffer else {
            self.accumulate(unit, |gradients, _, _| gradients.complete(zeros))?;
            return self.step_early(unit);
        };
        let values = buffer.as_mut_slice::<f32>();
        zeros.for_each(|range| values[range].fill(0.0));
        if !plan.config().shards_gradients() {
            return self.take_sum(unit, buffer.as_slice());
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

    /// Ends what the device computes for the gradients of `unit`, so that other devices may read them behind that.
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
                    self.take_sum(unit, &buffer.as_slice::<f32>()[shard])?;
                }
                Sum::OnDevice(fetches) => {
                    let mut shard = vec![0.0; self.unit_plan(unit).trainable.shard_elems];
                    let mut rest = &mut shard[..];
                    for fetch in fetches {
                        let (part, behind) = rest.split_at_mut(fetch.elems());
                        fetch.f32_into(part)?;
                        rest = behind;
                    }
                    trace.end(started, Lane::Communication, name);
                    self.take_sum(unit, &shard)?;
                }
            }
        }
        Ok(())
    }

    /// Takes a micro-batch's gradients of what this rank sums of `unit`.
    fn take_sum(&mut self, unit: UnitId, values: &[f32]) -> Result<()> {
        if self.plan.consumes_gradients(unit) {
            return self.consume(unit, values);
        }
        self.accumulate(unit, |gradients, plan, moment| {
            gradients.add(&plan.unit(unit).trainable, plan, moment, values)
        })?;
        self.step_early(unit)
    }

    fn accumulate(
        &mut self,
        unit: UnitId,
        add: impl FnOnce(&mut Accumulator, &Plan, Moment) -> Result<()>,
    ) -> Result<()> {
        let Some(gradients) = &mut self.units[unit.index()].gradients else {
            return Ok(());
        };
        let (plan, moment) = (&self.plan, self.moment);
        self.copies
            .time(gradients.tier(), || add(gradients, plan, moment))
    }
}
