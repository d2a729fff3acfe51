//! Choice of the units that are updated in backward or in forward, and of the gradients that an update consumes.
//!
//! A unit that is updated in backward has two copies of its optimizer state and of this rank's weights. The update
//! reads one copy and writes the other. The copies are swapped when the global norm is known and needs no clipping or
//! skip. Otherwise the first copy is unchanged. Every result has the same bits as an update after the pass.

use super::{DeviceTransport, Plan, Tier, UnitPlan, ZeroConfig};
use crate::spec::UnitId;
use serde::{Deserialize, Serialize};

/// Maximal number of units at the thread of the optimizer in backward: one is updated, one waits.
pub(crate) const JOBS: usize = 2;

/// Settings of the optimizer in backward, which updates units while backward still runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OptimizerInBackward {
    /// Maximal number of elements that each rank updates during backward. Units nearest to the loss are
    /// chosen first, because their gradients are complete first.
    pub most_elems: u64,
    /// Whether every optimizer update has exactly one micro-batch, i.e. no gradient accumulation.
    pub single_micro_batch: bool,
}

/// By unit, whether it is updated in backward. No unit is, unless final sums are known before the pass ends.
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

/// Whether a rank has the final sums of the elements it updates before a pass ends.
fn sums_in_the_pass(config: &ZeroConfig, world_size: usize) -> bool {
    world_size == 1 || config.shards_gradients() && config.stage.shards_optimizer()
}

impl Plan {
    /// Upper bound of [`OptimizerInBackward::most_elems`]: number of elements that each rank updates in a
    /// step; 0 if no unit can be updated in backward.
    #[must_use]
    pub fn most_elems_in_backward(&self) -> u64 {
        if !sums_in_the_pass(self.config(), self.world_size()) {
            return 0;
        }
        let units = self.units().iter();
        units.map(|unit| unit.trainable.shard_elems as u64).sum()
    }

    /// Whether the optimizer updates `unit` while backward still runs, in the last micro-batch of an update.
    #[must_use]
    pub fn updates_in_backward(&self, unit: UnitId) -> bool {
        self.early[unit.index()]
    }

    /// Whether the optimizer updates any unit while backward still runs.
    #[must_use]
    pub fn any_updates_in_backward(&self) -> bool {
        self.early.contains(&true)
    }

    /// Whether the update of `unit` uses its gradients as soon as they are reduced, in backward, so that no
    /// gradient sum is stored. That needs a single micro-batch per update, and no clipping, because a clip
    /// factor is known only after the pass.
    #[must_use]
    pub fn consumes_gradients(&self, unit: UnitId) -> bool {
        let config = self.config();
        let single = config
            .optimizer_in_backward
            .is_some_and(|early| early.single_micro_batch);
        self.updates_in_backward(unit) && single && config.max_grad_norm.is_none()
    }

    /// Number of elements of each buffer of consumed gradients; 0 if no gradients are consumed.
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

    /// Number of buffers of consumed gradients: one for each unit at the update thread, and one for each reduction of
    /// devices in flight.
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

    /// Whether optimizer updates may run during the next forward pass. They may not if weights or optimizer
    /// state are on disk, whose queue already overlaps reads, updates and writes, or if ranks exchange
    /// weights or gradients during the update.
    #[must_use]
    pub fn updates_in_forward(&self) -> bool {
        let config = self.config();
        let on_disk = [config.offload.param, config.offload.optimizer].contains(&Tier::Nvme);
        config.optimizer_in_forward
            && !on_disk
            && !self.shares_updates()
            && !self.gathers_gradients()
    }

    /// Whether ranks gather sharded gradient sums, because every rank updates all elements (stage 0 with bf16 sums).
    pub(crate) fn gathers_gradients(&self) -> bool {
        let config = self.config();
        config.shards_gradients() && !config.stage.shards_optimizer()
    }
}
