//! Bytes of model states per rank, known before anything is allocated.

use super::{DeviceTransport, GroupKind, Plan, Tier};
use crate::spec::UnitId;
use kernels::DType;
use optim::{Precision, StateSlot};
use serde::{Deserialize, Serialize};

/// Bytes by tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TierBytes {
    /// Device memory.
    pub device: u64,
    /// Host memory.
    pub host: u64,
    /// Spill files.
    pub nvme: u64,
}

impl TierBytes {
    fn add(&mut self, tier: Tier, bytes: u64) {
        match tier {
            Tier::Device => self.device += bytes,
            Tier::Host => self.host += bytes,
            Tier::Nvme => self.nvme += bytes,
        }
    }
}

/// Bytes one rank needs for model states.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Weights that this rank stores.
    pub parameters: TierBytes,
    /// Accumulated gradients.
    pub gradients: TierBytes,
    /// Master weights and moments.
    pub optimizer: TierBytes,
    /// Maximal bytes of weights gathered at once (device).
    pub gathered: u64,
    /// Maximal bytes of gradient buckets and other collectives in flight at once (device).
    pub communication: u64,
}

impl MemoryReport {
    /// Total on the device.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.parameters.device
            + self.gradients.device
            + self.optimizer.device
            + self.gathered
            + self.communication
    }

    /// Total in host memory.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.parameters.host + self.gradients.host + self.optimizer.host
    }
}

impl Plan {
    /// Whether a lease needs a buffer, because it cannot read the weights in their tier.
    #[must_use]
    pub fn leases_copy(&self) -> bool {
        self.config().offload.param != Tier::Device || self.gathers_parameters()
    }

    /// Whether weights are copied to a discrete device directly from their host tier, without an intermediate buffer.
    pub(crate) fn sends_from_rest(&self) -> bool {
        self.config().offload.param == Tier::Host && !self.gathers_parameters()
    }

    /// Whether a lease runs an all-gather.
    #[must_use]
    pub fn gathers_parameters(&self) -> bool {
        self.config().stage.shards_parameters() && self.shards() > 1
    }

    /// Whether devices gather weights and reduce gradients among themselves.
    #[must_use]
    pub fn devices_talk(&self) -> bool {
        let config = self.config();
        config.device_transport != DeviceTransport::Host
            && self.world_size() > 1
            && (self.gathers_parameters() || config.shards_gradients())
    }

    /// Whether weights are copied to a discrete device one unit before their use.
    #[must_use]
    pub fn uploads_ahead(&self) -> bool {
        let config = self.config();
        config.uploads_ahead && config.prefetch_units > 0 && self.leases_copy()
    }

    /// Whether devices gather weights one unit before their use.
    #[must_use]
    pub(crate) fn gathers_ahead(&self) -> bool {
        self.uploads_ahead() && self.devices_talk() && self.gathers_parameters()
    }

    /// Whether the gradients of a unit are collected in a bucket before they are added to their sum: they are reduced
    /// between ranks, the sum is on disk, or they are consumed without a sum.
    #[must_use]
    pub fn buckets_gradients(&self, unit: UnitId) -> bool {
        let config = self.config();
        config.shards_gradients()
            || config.offload.optimizer == Tier::Nvme
            || self.consumes_gradients(unit)
    }

    /// Whether the gradients of `unit` are summed in device memory.
    #[must_use]
    pub fn sums_on_device(&self, unit: UnitId) -> bool {
        self.config().offload.optimizer == Tier::Device && !self.consumes_gradients(unit)
    }

    /// Whether ranks exchange updated weights: every rank has whole weights but updates only its part.
    #[must_use]
    pub fn shares_updates(&self) -> bool {
        let stage = self.config().stage;
        stage.shards_optimizer() && !stage.shards_parameters() && self.shards() > 1
    }

    /// Whether a device with resident states stores everything that an optimizer step changes.
    #[must_use]
    pub fn steps_on_device(&self) -> bool {
        let trains = self.units().iter().any(|unit| !unit.trainable.is_empty());
        self.config().offload.optimizer == Tier::Device && trains
    }

    /// Whether a device with resident states adds the gradients of `unit` to their sums immediately. The sums must be
    /// on the device. Also, either there is nothing to reduce between ranks, or the reduction follows the last
    /// micro-batch.
    #[must_use]
    pub fn adds_where_computed(&self, unit: UnitId) -> bool {
        let reduced_at_once = self.world_size() > 1 && self.config().shards_gradients();
        self.sums_on_device(unit) && !reduced_at_once
    }

    /// Bytes of the training state in a checkpoint, over all ranks: for every trainable element its master weight (or
    /// its weight if there is no master) and the optimizer's states `slots`.
    #[must_use]
    pub fn checkpoint_bytes(&self, slots: &[StateSlot]) -> u64 {
        let precision = self.config().precision;
        let kept = if precision.has_master() {
            DType::F32
        } else {
            precision.weight_dtype()
        };
        let slots: usize = slots.iter().map(|slot| slot.dtype.size_bytes()).sum();
        let (_, trained) = self.spec().elems();
        trained as u64 * (kept.size_bytes() + slots) as u64
    }

    /// Bytes of model states on each rank (shards are padded to equal size).
    #[must_use]
    pub fn memory(&self) -> MemoryReport {
        let config = self.config();
        let weight_bytes = config.precision.weight_dtype().size_bytes() as u64;
        let state_bytes = match config.precision {
            Precision::F32 => 8,
            Precision::Bf16 | Precision::Fp16 => 12,
            Precision::PureBf16 => 4,
        };
        let mut report = MemoryReport::default();
        let mut gathered_units = Vec::new();
        let mut largest_bucket = 0;
        for unit in self.units() {
            let mut unit_bytes = 0;
            for kind in GroupKind::ALL {
                let group = unit.group(kind);
                let (full, shard) = (group.padded_elems as u64, group.shard_elems as u64);
                let part = |sharded: bool| if sharded { shard } else { full };
                let weights = part(config.stage.shards_parameters()) * weight_bytes;
                report.parameters.add(config.offload.param, weights);
                unit_bytes += full * weight_bytes;
                if kind == GroupKind::Trainable {
                    let updated = self.updated_elems(unit) as u64;
                    let mut copies = 1;
                    if self.steps_early(unit.id) {
                        copies = 2;
                        report
                            .parameters
                            .add(config.offload.param, updated * weight_bytes);
                    }
                    let state = updated * state_bytes * copies;
                    report.optimizer.add(config.offload.optimizer, state);
                    if !self.consumes_gradients(unit.id) {
                        let grad_bytes = config.grad_dtype().size_bytes() as u64;
                        let grads = part(config.shards_gradients()) * grad_bytes;
                        report.gradients.add(config.offload.optimizer, grads);
                    }
                    largest_bucket = largest_bucket.max(full * 4);
                }
            }
            gathered_units.push(unit_bytes);
        }
        if self.leases_copy() {
            let window = 1 + config.prefetch_units;
            report.gathered = gathered_units
                .windows(window.min(gathered_units.len()).max(1))
                .map(|w| w.iter().sum())
                .max()
                .unwrap_or(0);
        }
        report.gradients.add(
            Tier::Host,
            4 * (self.waiting_buffers() * self.waiting_elems()) as u64,
        );
        report.communication = largest_bucket * (1 + config.buckets_in_flight as u64);
        report
    }
}
