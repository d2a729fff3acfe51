//! Choice of the units that are updated during backward (optimizer in backward), and of what happens to their
//! gradients.
//!
//! Such a unit has its optimizer state and its part of the weights twice. The update reads one copy and writes the
//! other. The copies swap when the global norm is known and no rank clips or skips. A step that clips or skips has
//! therefore lost nothing, and every result has the same bits as an update after backward.

use super::{DeviceTransport, Plan, Tier, UnitPlan, ZeroConfig};
use crate::spec::UnitId;
use serde::{Deserialize, Serialize};

/// Units that the update thread holds at a time: one is updated, one waits.
pub(crate) const JOBS: usize = 2;

/// Settings of the optimizer in backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EarlyStep {
    /// Maximal number of elements per rank to update during backward. Units closest to the loss are chosen first,
    /// since their gradients are complete first.
    pub most_elems: u64,
    /// Whether every optimizer step has exactly one micro-batch.
    pub single_micro_batch: bool,
}

/// For each unit, whether it is updated during backward. None is if a rank lacks final gradient sums before backward
/// ends.
pub(super) fn chosen(config: &ZeroConfig, world_size: usize, units: &[UnitPlan]) -> Vec<bool> {
    let mut chosen = vec![false; units.len()];
    let Some(early) = config.early_step else {
        return chosen;
    };
    if !sums_in_the_pass(config, world_size) {
        return chosen;
    }
    let mut left = early.most_elems;
    for unit in units.iter().rev() {
        let elems = unit.trainable.shard_elems as u64;
        if unit.trainable.is_empty() {
            continue;
        }
        if elems > left {
            break;
        }
        left -= elems;
        chosen[unit.id.index()] = true;
    }
    chosen
}

/// Whether a rank has the final gradient sums of the elements that it updates before backward ends.
fn sums_in_the_pass(config: &ZeroConfig, world_size: usize) -> bool {
    world_size == 1 || config.shards_gradients() && config.stage.shards_optimizer()
}

impl Plan {
    /// Elements per rank that could be updated during backward without the limit [`EarlyStep::most_elems`]; 0 if none
    /// can.
    #[must_use]
    pub fn most_early_elems(&self) -> u64 {
        if !sums_in_the_pass(self.config(), self.world_size()) {
            return 0;
        }
        let units = self.units().iter();
        units.map(|unit| unit.trainable.shard_elems as u64).sum()
    }

    /// Whether `unit` is updated during backward, in the last micro-batch of an optimizer step.
    #[must_use]
    pub fn steps_early(&self, unit: UnitId) -> bool {
        self.early[unit.index()]
    }

    /// Whether any unit is updated during backward.
    #[must_use]
    pub fn any_steps_early(&self) -> bool {
        self.early.contains(&true)
    }

    /// Whether the gradients of `unit` go straight into its update and are never stored. This needs one micro-batch,
    /// so that there is nothing to add, and no clipping, so that the factor is known in advance.
    #[must_use]
    pub fn consumes_gradients(&self, unit: UnitId) -> bool {
        let config = self.config();
        let single = config
            .early_step
            .is_some_and(|early| early.single_micro_batch);
        self.steps_early(unit) && single && config.max_grad_norm.is_none()
    }

    /// Most elements whose gradients wait to be consumed at once, for each of the buffers they wait in; 0 where none are.
    #[must_use]
    pub(crate) fn waiting_elems(&self) -> usize {
        let consumed = self
            .units()
            .iter()
            .filter(|u| self.consumes_gradients(u.id));
        consumed
            .map(|unit| self.updated_range(unit.id, 0).len())
            .max()
            .unwrap_or(0)
    }

    /// Number of buffers for gradients that wait to be consumed: one per unit at the update thread, and one per unit
    /// on its way from devices that reduced its gradients.
    #[must_use]
    pub(crate) fn waiting_buffers(&self) -> usize {
        let config = self.config();
        let from_devices = config.device_transport != DeviceTransport::Host;
        match (self.waiting_elems(), from_devices) {
            (0, _) => 0,
            (_, false) => JOBS,
            (_, true) => JOBS + config.buckets_in_flight.max(1),
        }
    }

    /// Whether updates may overlap with the next forward pass (optimizer in forward). They may not if states are on
    /// disk, which has its own queue, or if ranks exchange updated weights, which happens after the update.
    #[must_use]
    pub fn steps_late(&self) -> bool {
        let config = self.config();
        let on_disk = [config.offload.param, config.offload.optimizer].contains(&Tier::Nvme);
        config.late_step && !on_disk && !self.shares_updates() && !self.gathers_gradients()
    }

    /// Whether gradient sums are sharded although every rank updates everything (stage 0 in pure bf16).
    pub(crate) fn gathers_gradients(&self) -> bool {
        let config = self.config();
        config.shards_gradients() && !config.stage.shards_optimizer()
    }
}
