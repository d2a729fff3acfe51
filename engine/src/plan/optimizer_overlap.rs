//! Which units are updated while backward still runs, and what becomes of their gradients.
//!
//! Such a unit keeps its optimizer state and its part of the weights twice. The update reads one copy and writes the
//! other; they change places when the global norm is known and nothing contradicts, so that a step that clips or skips
//! has lost nothing, and every result has the bits of an update behind the pass.

use super::{DeviceTransport, Plan, Tier, UnitPlan, ZeroConfig};
use crate::spec::UnitId;
use serde::{Deserialize, Serialize};

/// Units at the thread of updates in backward: one is updated, one waits.
pub(crate) const JOBS: usize = 2;

/// Updates that begin while backward runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OptimizerInBackward {
    /// Most elements of a rank that are updated early. Units nearest to the loss, whose gradients come first, are
    /// chosen first.
    pub most_elems: u64,
    /// Whether every update has one micro-batch.
    pub single_micro_batch: bool,
}

/// By unit, whether it is updated early: where a rank has the final sum of what it updates before the pass ends.
pub(super) fn chosen(config: &ZeroConfig, world_size: usize, units: &[UnitPlan]) -> Vec<bool> {
    let mut chosen = vec![false; units.len()];
    let Some(early) = config.optimizer_in_backward else {
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

/// Whether a rank has the final sums of what it updates before a pass ends.
fn sums_in_the_pass(config: &ZeroConfig, world_size: usize) -> bool {
    world_size == 1 || config.shards_gradients() && config.stage.shards_optimizer()
}

impl Plan {
    /// Elements of a rank that are updated early where [`OptimizerInBackward::most_elems`] bounds nothing; 0 where none can be.
    #[must_use]
    pub fn most_elems_in_backward(&self) -> u64 {
        if !sums_in_the_pass(self.config(), self.world_size()) {
            return 0;
        }
        let units = self.units().iter();
        units.map(|unit| unit.trainable.shard_elems as u64).sum()
    }

    /// Whether `unit` is updated while backward runs, in the last micro-batch of an update.
    #[must_use]
    pub fn updates_in_backward(&self, unit: UnitId) -> bool {
        self.early[unit.index()]
    }

    /// Whether any unit is.
    #[must_use]
    pub fn any_updates_in_backward(&self) -> bool {
        self.early.contains(&true)
    }

    /// Whether the gradients of `unit` go into its update as they come and are kept nowhere: with one micro-batch there
    /// is nothing to add, and without clipping nothing can ask for another factor.
    #[must_use]
    pub fn consumes_gradients(&self, unit: UnitId) -> bool {
        let config = self.config();
        let single = config
            .optimizer_in_backward
            .is_some_and(|early| early.single_micro_batch);
        self.updates_in_backward(unit) && single && config.max_grad_norm.is_none()
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

    /// Buffers in which gradients wait to be consumed: for each unit at the thread that does so, and for each on its way
    /// from the devices that added them up.
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

    /// Whether updates may go on beside the next pass. A disk has its own queue, and ranks that share what they updated
    /// do so behind the update.
    #[must_use]
    pub fn updates_in_forward(&self) -> bool {
        let config = self.config();
        let on_disk = [config.offload.param, config.offload.optimizer].contains(&Tier::Nvme);
        config.optimizer_in_forward
            && !on_disk
            && !self.shares_updates()
            && !self.gathers_gradients()
    }

    /// Whether every rank updates everything with sums that are sharded (stage 0 in pure bf16).
    pub(crate) fn gathers_gradients(&self) -> bool {
        let config = self.config();
        config.shards_gradients() && !config.stage.shards_optimizer()
    }
}
