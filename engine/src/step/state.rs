//! Master weights and optimizer state of one unit on one rank.

use crate::error::EngineError;
use crate::offload::spill::PendingRead;
use crate::offload::tier::{Access, Region, Tiers, Window};
use crate::plan::{Plan, StateKind, UnitPlan};
use kernels::{DType, Tag};
use optim::{Optimizer, StateSlot};
use std::ops::Range;

/// State of the elements `start..` of a unit's trainable group.
#[derive(Debug)]
pub(crate) struct UnitState {
    range: Range<usize>,
    master: Option<Region>,
    slots: Vec<(&'static StateSlot, Region)>,
    spare: Option<Spare>,
}

/// What an early update writes: the state and the weights of the same elements once more.
#[derive(Debug)]
struct Spare {
    master: Option<Region>,
    slots: Vec<Region>,
    weights: Region,
}

impl UnitState {
    pub(crate) fn new(
        unit: &UnitPlan,
        plan: &Plan,
        rule: &dyn Optimizer,
        rank: usize,
        tiers: &Tiers,
    ) -> Result<Option<Self>, EngineError> {
        let group = &unit.trainable;
        if group.is_empty() {
            return Ok(None);
        }
        let config = plan.config();
        let range = if config.stage.shards_optimizer() {
            group.shard(rank)
        } else {
            0..group.padded_elems
        };
        let place = (StateKind::Optimizer, config.offload.optimizer);
        let allocate = |dtype| tiers.allocate(place, range.clone(), dtype, Tag::Optimizer);
        let master = || {
            let has = config.precision.has_master();
            has.then(|| allocate(DType::F32)).transpose()
        };
        let slots = || {
            let slots = rule.slots(config.precision).iter();
            slots.map(|slot| Ok((slot, allocate(slot.dtype)?)))
        };
        let (master_now, slots_now) = (master()?, slots().collect::<Result<_, EngineError>>()?);
        let spare = if plan.steps_early(unit.id) {
            let (master, slots) = (master()?, slots().map(|slot| Ok(slot?.1)));
            let slots = slots.collect::<Result<_, EngineError>>()?;
            let (place, dtype) = (
                (StateKind::Param, config.offload.param),
                config.precision.weight_dtype(),
            );
            let weights = tiers.allocate(place, range.clone(), dtype, Tag::Parameters)?;
            Some(Spare {
                master,
                slots,
                weights,
            })
        } else {
            None
        };
        Ok(Some(Self {
            range,
            master: master_now,
            slots: slots_now,
            spare,
        }))
    }

    /// Copies the f32 values of `part` (elements of the group) that this rank keeps a master of.
    pub(crate) fn set_master(
        &mut self,
        part: Range<usize>,
        values: &[f32],
    ) -> Result<(), EngineError> {
        let Some(master) = &mut self.master else {
            return Ok(());
        };
        let kept = part.start.max(self.range.start)..part.end.min(self.range.end);
        if kept.start >= kept.end {
            return Ok(());
        }
        let values = &values[kept.start - part.start..kept.end - part.start];
        master.write_rounded(DType::F32, self.range.start, kept, values)
    }

    /// Elements of the group that are kept here.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Name, dtype and memory of the master weights and every slot.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = (&'static str, DType, &Region)> {
        let master = self.master.iter().map(|m| ("master", DType::F32, m));
        let slots = self.slots.iter().map(|(s, r)| (s.name, s.dtype, r));
        master.chain(slots)
    }

    /// As [`UnitState::kinds`], writable.
    pub(crate) fn kinds_mut(&mut self) -> impl Iterator<Item = (&'static str, DType, &mut Region)> {
        let master = self.master.iter_mut().map(|m| ("master", DType::F32, m));
        let slots = self.slots.iter_mut().map(|(s, r)| (s.name, s.dtype, r));
        master.chain(slots)
    }

    /// Windows of an early update of the elements `range`: that of the weights, then of master and slots. They hold
    /// what is kept, and what is written to them goes to the spare; `weights` begin at the group's element `start` and
    /// are read only if `reads_weights`. `ahead` gives the reads under way, in this order.
    pub(crate) fn early_windows(
        &mut self,
        range: &Range<usize>,
        dtype: DType,
        (weights, start): (&Region, usize),
        reads_weights: bool,
        ahead: &mut dyn FnMut() -> Option<PendingRead>,
    ) -> Result<Option<(Window<'_>, Vec<(DType, Window<'_>)>)>, EngineError> {
        let first = self.range.start;
        let bytes = |start: usize, dtype: DType| {
            let size = dtype.size_bytes();
            (range.start - start) * size..(range.end - start) * size
        };
        let Some(spare) = &mut self.spare else {
            return Ok(None);
        };
        let (own, of_weights) = (bytes(first, dtype), ahead());
        let weight_window = if reads_weights {
            let from = bytes(start, dtype);
            spare.weights.window_from(own, weights, from, of_weights)?
        } else {
            spare.weights.window(own, Access::Write, of_weights)?
        };
        let master = self.master.iter().zip(&mut spare.master);
        let master = master.map(|(kept, spare)| (DType::F32, kept, spare));
        let slots = self.slots.iter().zip(&mut spare.slots);
        let slots = slots.map(|((slot, kept), spare)| (slot.dtype, kept, spare));
        let mut windows = Vec::new();
        for (dtype, kept, spare) in master.chain(slots) {
            let own = bytes(first, dtype);
            windows.push((dtype, spare.window_from(own.clone(), kept, own, ahead())?));
        }
        Ok(Some((weight_window, windows)))
    }

    /// What an early update writes.
    pub(crate) fn spare_mut(&mut self) -> impl Iterator<Item = &mut Region> {
        let spare = self.spare.iter_mut();
        spare.flat_map(|spare| {
            let states = spare.master.iter_mut().chain(&mut spare.slots);
            states.chain([&mut spare.weights])
        })
    }

    /// Makes what an early update wrote the state, and `weights` (which begin at the group's element `start`) its weights.
    pub(crate) fn commit(
        &mut self,
        weights: &mut Region,
        start: usize,
        dtype: DType,
    ) -> Result<(), EngineError> {
        let Some(spare) = &mut self.spare else {
            return Ok(());
        };
        std::mem::swap(&mut self.master, &mut spare.master);
        for ((_, kept), spare) in self.slots.iter_mut().zip(&mut spare.slots) {
            std::mem::swap(kept, spare);
        }
        if weights.len() == spare.weights.len() {
            std::mem::swap(weights, &mut spare.weights);
            return Ok(());
        }
        // Stages 1 and 2: this rank's part of weights that everybody keeps whole.
        let (first, range) = (self.range.start, self.range.clone());
        let size = dtype.size_bytes();
        let target = weights;
        spare.weights.for_each_window::<u16>(
            first * size / 2,
            range.start * size / 2..range.end * size / 2,
            Access::Read,
            |part, values| {
                target.write(part.start * 2 - start * size, bytemuck::cast_slice(values))
            },
        )
    }
}
