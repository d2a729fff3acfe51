//! The optimizer step over all gradients deposited since the last step.

use super::update::Update;
use super::{Result, StepReport, Totals, Zero};
use crate::comm::{Collective, CollectiveKind, Communicator, ReadBuffer, Tag as CommTag};
use crate::error::EngineError;
use crate::offload::tier::access;
use crate::plan::{GroupKind, Plan, Tier};
use crate::spec::{ParamId, UnitId};
use crate::step::update::{Rule, Scalars, chunks};
use crate::store::Store;
use crate::timing::CopyClock;
use kernels::DType;
use optim::clip::GradientScale;
use std::ops::Range;

/// Collectives of an optimizer step, resolved once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange {
    /// Whether gradient sums are reduced in the step, because micro-batches do not reduce them (stages 0 and 1).
    reduces_sums: bool,
    /// Whether sharded gradient sums are gathered, because every rank updates all elements (stage 0 with bf16 sums).
    gathers_sums: bool,
    /// Whether ranks exchange updated weights, because each updates a shard of whole weights (stages 1 and 2).
    shares_weights: bool,
}

impl Exchange {
    pub(super) fn new(plan: &Plan) -> Self {
        Self {
            // With one rank, local sums are final.
            reduces_sums: !plan.config().shards_gradients() && plan.world_size() > 1,
            gathers_sums: plan.gathers_gradients(),
            shares_weights: plan.shares_updates(),
        }
    }
}

impl Zero {
    /// Announces an update before its last micro-batch, so that units planned for the optimizer in backward
    /// can be updated while that micro-batch's backward runs. Does nothing if the plan has no such unit. All
    /// ranks must call it.
    ///
    /// `lr` is the learning rate, `loss_scale` the factor on losses ([`Zero::step_scaled`]). `supervised` is
    /// the number of supervised tokens of this rank in that micro-batch. [`Zero::step_scaled`] keeps the
    /// updates made in backward if its learning rate and gradient factor equal the announced ones, and
    /// otherwise drops them, e.g. when it clips. Every result has the same bits as without the announcement.
    ///
    /// # Errors
    /// When communication fails or the thread cannot start.
    pub fn announce_update(&mut self, lr: f64, loss_scale: f64, supervised: u64) -> Result<()> {
        if !self.plan.any_updates_in_backward() {
            return Ok(());
        }
        let own = [(self.totals.supervised + supervised) as f64];
        let all = self
            .comm
            .all_gather_f64(&own, CommTag::new("announce", 0))?;
        let tokens: u64 = all.iter().map(|r| r[0] as u64).sum();
        let divisor = tokens.max(1) as f64 * loss_scale;
        let scalars = Scalars {
            step: self.step + 1,
            lr,
            grad_scale: GradientScale::new(0.0, divisor, None).factor,
        };
        let optimizer = &self.optimizer;
        self.store.get_mut().begin_in_backward(optimizer, scalars)
    }

    /// Runs the optimizer step with learning rate `lr`, over all gradients that backward has deposited since
    /// the last step. Gradients are divided by the number of supervised tokens over all ranks and
    /// micro-batches, then clipped by their global norm. If the loss or a gradient is not finite, gradients
    /// are dropped and no state changes. All ranks must call it.
    ///
    /// # Errors
    /// When communication, memory or an update fails. [`EngineError::Consumed`] if an announced update has
    /// already consumed gradients, and its numbers differ from those of this step.
    pub fn step(&mut self, lr: f64) -> Result<StepReport> {
        self.step_scaled(lr, 1.0)
    }

    /// Runs [`Zero::step`] for gradients of losses that were multiplied by `loss_scale`. It divides gradients
    /// by that factor, and the report contains unscaled numbers.
    ///
    /// # Errors
    /// As [`Zero::step`].
    pub fn step_scaled(&mut self, lr: f64, loss_scale: f64) -> Result<StepReport> {
        // Waits for units that the pass did not lease.
        self.finish_updates()?;
        self.transfers.get_mut().wait()?;
        let announced = self.store.get_mut().end_in_backward()?;
        self.reduce_accumulated()?;
        let totals = self.sum_totals()?;
        let tokens = totals.supervised.max(1) as f64;
        let max_norm = self.plan.config().max_grad_norm;
        let scale = GradientScale::new(self.sum_of_squares()?, tokens * loss_scale, max_norm);
        // The host has the norm, so a discrete device is idle, and reading its clocks waits for nothing.
        self.read_device()?;
        let mut report = StepReport {
            step: self.step,
            loss: totals.loss_sum / tokens,
            supervised_tokens: totals.supervised,
            grad_norm: scale.norm,
            applied: scale.norm.is_finite() && totals.loss_sum.is_finite(),
        };
        if report.applied {
            let scalars = Scalars {
                step: self.step + 1,
                lr,
                grad_scale: scale.factor,
            };
            let kept = self.keep_in_backward(announced == Some(scalars))?;
            self.step += 1;
            report.step = self.step;
            self.update(scalars, &kept)?;
            self.share_updated_weights()?;
        }
        self.store.get_mut().clear_gradients(self.step);
        self.totals = Totals::default();
        Ok(report)
    }

    /// Index of this rank's shard in its shard group.
    pub(crate) fn shard(&self) -> usize {
        self.plan.shard_of(self.comm.world().rank)
    }

    /// Range of elements of a trainable group that this rank updates.
    fn updated(&self, unit: UnitId) -> Range<usize> {
        self.plan.updated_range(unit, self.comm.world().rank)
    }

    fn trainable_units(&self) -> Vec<UnitId> {
        self.plan
            .units()
            .iter()
            .filter(|u| !u.trainable.is_empty())
            .map(|u| u.id)
            .collect()
    }

    /// Reduces the local gradient sums over ranks, unless gradients are sharded (stages 0 and 1).
    fn reduce_accumulated(&mut self) -> Result<()> {
        let config = self.plan.config().clone();
        if !self.exchange.reduces_sums {
            return Ok(());
        }
        let own = self.shard();
        for unit in self.trainable_units() {
            let Some(gradients) = self.store.get_mut().gradients_mut(unit)? else {
                continue;
            };
            let region = gradients.region_mut();
            let mut buffer = self.comm.alloc(region.len())?;
            region.read(0, buffer.as_bytes_mut())?;
            let start = |kind, name, buffer| {
                let op = Collective::new(kind, DType::F32, CommTag::new(name, unit.0))
                    .in_groups(config.shard_group);
                self.comm.start(op, buffer)?.wait()
            };
            let mut buffer = start(CollectiveKind::ReduceScatter, "reduce", buffer)?;
            let mut valid = self.plan.unit(unit).trainable.shard(own);
            if !config.stage.shards_optimizer() {
                buffer = start(CollectiveKind::AllGather, "gather-grads", buffer)?;
                valid = 0..region.len() / 4;
            }
            region.write(valid.start * 4, buffer.part(valid.start * 4..valid.end * 4))?;
        }
        Ok(())
    }

    fn sum_totals(&self) -> Result<Totals> {
        let own = [self.totals.loss_sum, self.totals.supervised as f64];
        let world = self.mesh.world();
        let all = world.all_gather_f64(&own, CommTag::new("totals", 0))?;
        Ok(Totals {
            loss_sum: all.iter().map(|r| r[0]).sum(),
            supervised: all.iter().map(|r| r[1] as u64).sum(),
        })
    }

    /// Sum of squares of the summed gradients over all ranks, in f64: over fixed blocks of each unit's shard,
    /// then over units and ranks in order. It is equal at every stage, on every tier and in every bucket order.
    fn sum_of_squares(&mut self) -> Result<f64> {
        let rank = self.shard();
        let mut all = Vec::new();
        let mut there = Vec::new();
        for unit in self.trainable_units() {
            let shard = self.plan.unit(unit).trainable.shard(rank);
            let store = self.store.get_mut();
            let squares = match store.consumed_squares(unit) {
                Some(squares) => squares,
                None => match store.gradients_mut(unit)? {
                    Some(gradients) => match gradients.on_device(shard.clone())? {
                        Some(sums) => {
                            there.push((all.len(), sums));
                            0.0
                        }
                        None => gradients.sum_of_squares(shard)?,
                    },
                    None => continue,
                },
            };
            all.push((unit, squares));
        }
        // Sums on a device are read in one batch, so the host waits for the device once.
        if !there.is_empty() {
            let (places, sums): (Vec<usize>, Vec<_>) = there.into_iter().unzip();
            let squares = access(&self.backend)?.square_sums(&sums)?;
            for (place, squares) in places.into_iter().zip(squares) {
                all[place].1 = squares;
            }
        }
        let non_finite = all.iter().rfind(|(_, squares)| !squares.is_finite());
        self.non_finite = non_finite.map(|(unit, _)| *unit);
        if self.mesh.coordinates().stages > 1 {
            return self.sum_over_stages(&all);
        }
        let own: f64 = all.iter().fold(0.0, |sum, (_, squares)| sum + squares);
        let all = self.comm.all_gather_f64(&[own], CommTag::new("norm", 0))?;
        // Other shard groups have the same sums.
        let shards = all.iter().take(self.plan.shards());
        Ok(shards.map(|r| r[0]).sum())
    }

    /// Commits the units that were updated in backward, if the announced numbers are those of this step (`rightly`).
    /// Returns these units. All other units are unchanged.
    fn keep_in_backward(&mut self, rightly: bool) -> Result<Vec<UnitId>> {
        let units = self.trainable_units();
        if !rightly {
            let lost = units
                .iter()
                .find(|unit| self.plan.consumes_gradients(**unit));
            return match lost {
                None => Ok(Vec::new()),
                Some(unit) => Err(EngineError::Consumed {
                    unit: self.unit_name(*unit).to_owned(),
                    reason: "the update is not the one that was announced",
                }),
            };
        }
        let store = self.store.get_mut();
        let stepped: Vec<_> = units
            .into_iter()
            .filter(|u| store.stepped_in_backward(*u))
            .collect();
        for unit in &stepped {
            store.commit_in_backward(*unit)?;
        }
        Ok(stepped)
    }

    /// Updates all units except those in `done`.
    fn update(&mut self, scalars: Scalars, done: &[UnitId]) -> Result<()> {
        let plan = self.plan.clone();
        let config = plan.config();
        let on_disk = [config.offload.param, config.offload.optimizer].contains(&Tier::Nvme);
        let mut units = self.trainable_units();
        units.retain(|unit| !done.contains(unit));
        if self.updates_in_forward {
            let store = self.store.get_mut();
            return store.step_in_forward(units.into_iter(), &self.optimizer, scalars);
        }
        let ranges = units.into_iter().map(|unit| (unit, self.updated(unit)));
        let chunks = chunks(
            ranges,
            |unit| plan.unit(unit).trainable.elementwise_elems,
            config.sub_group_elems,
            on_disk,
        );
        let (comm, gathers) = (self.comm.clone(), self.exchange.gathers_sums);
        let rule = Rule {
            plan: &plan,
            optimizer: &self.optimizer,
            scalars,
        };
        let steps_there = match &mut self.device_step {
            Some(device) => device.begin(&rule)?,
            None => false,
        };
        let update = Update {
            rule,
            store: self.store.get_mut(),
            device: self.device_step.as_ref().filter(|_| steps_there),
            trace: self.tiers.trace(),
        };
        update.run(&chunks, &mut |store, unit| match gathers {
            true => gathered_gradients(&plan, &*comm, store, unit).map(Some),
            false => Ok(None),
        })?;
        self.tiers.flush()
    }

    /// Exchanges updated weights: every rank receives the shards of the others (stages 1 and 2).
    fn share_updated_weights(&mut self) -> Result<()> {
        if !self.exchange.shares_weights {
            return Ok(());
        }
        let rank = self.shard();
        let dtype = self.plan.dtype_of(GroupKind::Trainable);
        let mut copies = CopyClock::default();
        for unit in self.trainable_units() {
            let shard = self.plan.unit(unit).trainable.shard(rank);
            let bytes = shard.start * dtype.size_bytes()..shard.end * dtype.size_bytes();
            let weights = self
                .store
                .get_mut()
                .weights_mut(unit, GroupKind::Trainable)?;
            let tier = weights.tier();
            let mut buffer = self.comm.alloc(weights.len())?;
            let own = buffer.part_mut(bytes.clone());
            copies.time(tier, || weights.read(bytes.start, own))?;
            let op = Collective::new(
                CollectiveKind::AllGather,
                dtype,
                CommTag::new("update", unit.0),
            )
            .in_groups(self.plan.config().shard_group);
            let buffer = self.comm.start(op, buffer)?.wait_read()?;
            copies.time(tier, || weights.write(0, buffer.as_bytes()))?;
        }
        self.store.get_mut().count_copies(&copies);
        Ok(())
    }

    /// Gradient of every trainable parameter, as f32 values: summed over all ranks and over the micro-batches
    /// since the last step, not yet divided by tokens. For tests and inspection, before [`Zero::step`]. All
    /// ranks must call it.
    ///
    /// # Errors
    /// When communication fails.
    pub fn gradients(&mut self) -> Result<Vec<(ParamId, Vec<f32>)>> {
        self.finish_updates()?;
        let sharded = self.plan.config().shards_gradients();
        let plan = self.plan.clone();
        let mut out = Vec::new();
        for unit in self.trainable_units() {
            let group = &plan.unit(unit).trainable;
            let shard = group.shard(self.shard());
            let Some(gradients) = self.store.get_mut().gradients_mut(unit)? else {
                continue;
            };
            let mut buffer = self.comm.alloc(group.padded_elems * 4)?;
            let (kind, groups, own) = if sharded {
                let groups = plan.config().shard_group;
                (CollectiveKind::AllGather, groups, shard)
            } else {
                (CollectiveKind::AllReduce, None, 0..group.padded_elems)
            };
            gradients.read_f32(own.clone(), &mut buffer.as_mut_slice::<f32>()[own])?;
            let tag = CommTag::new("inspect", unit.0);
            let op = Collective::new(kind, DType::F32, tag).in_groups(groups);
            let buffer = self.comm.start(op, buffer)?.wait_read()?;
            let values = buffer.as_slice::<f32>();
            out.extend(
                group
                    .slots
                    .iter()
                    .map(|s| (s.param, values[s.range()].to_vec())),
            );
        }
        Ok(out)
    }
}

/// Gathers all gradient sums of a unit, for ranks that shard sums but update all elements (stage 0 with bf16 sums).
fn gathered_gradients(
    plan: &Plan,
    comm: &dyn Communicator,
    store: &mut Store,
    unit: UnitId,
) -> Result<ReadBuffer> {
    let config = plan.config();
    let dtype = config.grad_dtype();
    let group = &plan.unit(unit).trainable;
    let shard = group.shard(plan.shard_of(comm.world().rank));
    let mut buffer = comm.alloc(group.padded_elems * dtype.size_bytes())?;
    let own = shard.start * dtype.size_bytes()..shard.end * dtype.size_bytes();
    if let Some(gradients) = store.gradients_mut(unit)? {
        gradients.region().read(0, buffer.part_mut(own))?;
    }
    let tag = CommTag::new("gather-grads", unit.0);
    let op = Collective::new(CollectiveKind::AllGather, dtype, tag);
    Ok(comm.start(op, buffer)?.wait_read()?)
}
