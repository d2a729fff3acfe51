//! Master weights and optimizer state of one unit on one rank.

use crate::error::EngineError;
use crate::plan::{StateKind, UnitPlan, ZeroConfig};
use crate::tier::{Region, Tiers};
use kernels::{DType, Tag};
use optim::{Optimizer, StateSlot};
use std::ops::Range;

/// State of the elements `start..` of a unit's trainable group.
#[derive(Debug)]
pub(crate) struct UnitState {
    range: Range<usize>,
    master: Option<Region>,
    slots: Vec<(&'static StateSlot, Region)>,
}

impl UnitState {
    pub(crate) fn new(
        unit: &UnitPlan,
        config: &ZeroConfig,
        rule: &dyn Optimizer,
        rank: usize,
        tiers: &Tiers,
    ) -> Result<Option<Self>, EngineError> {
        let group = &unit.trainable;
        if group.is_empty() {
            return Ok(None);
        }
        let range = if config.stage.shards_optimizer() {
            group.shard(rank)
        } else {
            0..group.padded_elems
        };
        let place = (StateKind::Optimizer, config.offload.optimizer);
        let allocate = |dtype| tiers.allocate(place, range.clone(), dtype, Tag::Optimizer);
        let master = config
            .precision
            .has_master()
            .then(|| allocate(DType::F32))
            .transpose()?;
        let slots = rule
            .slots(config.precision)
            .iter()
            .map(|slot| Ok((slot, allocate(slot.dtype)?)))
            .collect::<Result<_, EngineError>>()?;
        Ok(Some(Self {
            range,
            master,
            slots,
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
}
