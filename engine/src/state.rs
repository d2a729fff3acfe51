//! Master weights and optimizer state of one unit on one rank.

use crate::error::EngineError;
use crate::plan::{UnitPlan, ZeroConfig};
use crate::tier::{Region, Tiers};
use kernels::{DType, Tag};
use optim::{GradWindow, Optimizer, Precision, StateSlot, StateWindow, StepArgs, WeightWindow};
use std::ops::Range;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    pub(crate) step: u64,
    pub(crate) lr: f32,
    pub(crate) weight_decay: f32,
    pub(crate) grad_scale: f32,
    pub(crate) seed: u64,
    pub(crate) first_element: u64,
}

/// State of the elements `start..` of a unit's trainable group.
#[derive(Debug)]
pub(crate) struct UnitState {
    start: usize,
    precision: Precision,
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
        let allocate = |dtype: DType| {
            let bytes = range.len() * dtype.size_bytes();
            tiers.allocate(config.offload.optimizer, bytes, Tag::Optimizer)
        };
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
            start: range.start,
            precision: config.precision,
            master,
            slots,
        }))
    }

    /// Copies the f32 values of `part` (elements of the group) that this rank keeps a master of.
    pub(crate) fn set_master(&mut self, part: Range<usize>, values: &[f32]) {
        let Some(region) = &mut self.master else {
            return;
        };
        let master = region.as_mut_slice::<f32>();
        let kept = part.start.max(self.start)..part.end.min(self.start + master.len());
        if kept.start < kept.end {
            master[kept.start - self.start..kept.end - self.start]
                .copy_from_slice(&values[kept.start - part.start..kept.end - part.start]);
        }
    }

    /// Updates the elements `part` of the group; `target` is their place in `weights`.
    pub(crate) fn update(
        &mut self,
        rule: &dyn Optimizer,
        scalars: Scalars,
        part: Range<usize>,
        grad: &[f32],
        weights: &mut Region,
        target: Range<usize>,
    ) -> Result<(), EngineError> {
        let own = part.start - self.start..part.end - self.start;
        let master = self
            .master
            .as_mut()
            .map(|m| &mut m.as_mut_slice::<f32>()[own.clone()]);
        let weight = match (self.precision, master) {
            (Precision::Bf16, Some(master)) => WeightWindow::Mixed {
                master,
                weight: &mut weights.as_mut_slice()[target],
            },
            (Precision::Fp16, Some(master)) => WeightWindow::MixedF16 {
                master,
                weight: &mut weights.as_mut_slice()[target],
            },
            (Precision::PureBf16, _) => WeightWindow::PureBf16(&mut weights.as_mut_slice()[target]),
            _ => WeightWindow::F32(&mut weights.as_mut_slice()[target]),
        };
        let state: Vec<StateWindow<'_>> = self
            .slots
            .iter_mut()
            .map(|(slot, region)| match slot.dtype {
                DType::BF16 => StateWindow::Bf16(&mut region.as_mut_slice()[own.clone()]),
                _ => StateWindow::F32(&mut region.as_mut_slice()[own.clone()]),
            })
            .collect();
        let Scalars {
            step,
            lr,
            weight_decay,
            grad_scale,
            seed,
            first_element,
        } = scalars;
        rule.step(StepArgs {
            step,
            lr,
            weight_decay,
            grad_scale,
            seed,
            first_element,
            grad: GradWindow::F32(grad),
            weight,
            state,
        })?;
        Ok(())
    }

    /// First element of the group that is kept here.
    pub(crate) fn start(&self) -> usize {
        self.start
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
