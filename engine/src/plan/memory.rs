//! Memory of model states per rank, known before anything is allocated.

use super::{DeviceTransport, GroupKind, Plan, Stored, Tier, UnitPlan};
use crate::spec::ParamId;
use optim::StateSlot;
use serde::{Deserialize, Serialize};

/// Byte count for each memory tier (device, host and disk), e.g. of one kind of state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TierBytes {
    /// Bytes in device memory.
    pub device: u64,
    /// Bytes in host memory.
    pub host: u64,
    /// Bytes in spill files on disk.
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

/// Planned memory of one rank for model states: byte counts of stored states by tier, of gathered weights and
/// of gradient buckets. Activations are not included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Bytes of the weights that the rank stores between passes, by tier.
    pub parameters: TierBytes,
    /// Bytes of gradients accumulated over micro-batches, by tier.
    pub gradients: TierBytes,
    /// Bytes of master weights and optimizer states, by tier.
    pub optimizer: TierBytes,
    /// Largest number of bytes of whole weights that are gathered or copied to the device at once: those in
    /// use and those prefetched; and those of one unit that a lease dequantizes. 0 if the device stores all weights whole and
    /// none quantized.
    pub gathered: u64,
    /// Largest number of bytes of gradient buckets on the device at once. A bucket contains the f32 gradients
    /// of one unit until ranks have reduced them.
    pub communication: u64,
}

impl MemoryReport {
    /// Total bytes that the rank needs in device memory: stored states, gathered weights and gradient
    /// buckets.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.parameters.device
            + self.gradients.device
            + self.optimizer.device
            + self.gathered
            + self.communication
    }

    /// Total bytes that the rank needs in host memory: stored weights, gradients and optimizer states.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.parameters.host + self.gradients.host + self.optimizer.host
    }
}

impl Plan {
    /// Whether a unit's weights are copied or gathered into a buffer before use. False if the device stores
    /// whole weights, which are then used in place.
    #[must_use]
    pub fn leases_copy(&self) -> bool {
        self.config().offload.param != Tier::Device || self.gathers_parameters()
    }

    /// Whether ranks all-gather a unit's weights before use, because each stores only a shard of them (stage
    /// 3, more than one shard).
    #[must_use]
    pub fn gathers_parameters(&self) -> bool {
        self.config().stage.shards_parameters() && self.shards() > 1
    }

    /// Whether discrete devices gather weights and reduce gradients among themselves, by peer access or NCCL,
    /// instead of the communicator in host memory.
    #[must_use]
    pub fn devices_talk(&self) -> bool {
        let config = self.config();
        config.device_transport != DeviceTransport::Host
            && self.world_size() > 1
            && (self.gathers_parameters() || config.shards_gradients())
    }

    /// Whether weights of the next unit are copied or gathered to a discrete device while the current unit
    /// computes.
    #[must_use]
    pub fn prefetch_weights(&self) -> bool {
        let config = self.config();
        config.prefetch_weights && config.prefetch_units > 0 && self.leases_copy()
    }

    /// Whether the devices prefetch their gathers by one unit.
    #[must_use]
    pub(crate) fn prefetches_gathers(&self) -> bool {
        self.prefetch_weights() && self.devices_talk() && self.gathers_parameters()
    }

    /// Whether ranks exchange updated weights after each step, because every rank stores whole weights but
    /// updates only its shard (stages 1 and 2).
    #[must_use]
    pub fn shares_updates(&self) -> bool {
        let stage = self.config().stage;
        stage.shards_optimizer() && !stage.shards_parameters() && self.shards() > 1
    }

    /// Whether device memory stores the optimizer states of trainable parameters, so that a discrete device
    /// can run the optimizer step.
    #[must_use]
    pub fn steps_on_device(&self) -> bool {
        let trains = self.units().iter().any(|unit| !unit.trainable.is_empty());
        self.config().offload.optimizer == Tier::Device && trains
    }

    /// Size of the training state in a checkpoint, in bytes over all ranks. For each trainable element it
    /// contains the master weight (or the weight, without master weights) and the optimizer's states `slots`.
    #[must_use]
    pub fn checkpoint_bytes(&self, slots: &[StateSlot]) -> u64 {
        let weight = match self.config().precision.has_master() {
            true => 0,
            false => self.dtype_of(GroupKind::Trainable).size_bytes(),
        };
        let params = self.spec().params.iter().enumerate();
        let trained = params.filter(|(_, param)| param.trainable);
        let bytes = trained.map(|(id, param)| {
            let states = self.state_tensors(ParamId(id as u32), slots);
            let states = states
                .map(|(_, dtype, shape)| dtype.size_bytes() * shape.iter().product::<usize>());
            param.shape.elems() * weight + states.sum::<usize>()
        });
        bytes.sum::<usize>() as u64
    }

    /// Bytes of the weights that a lease of `unit` dequantizes.
    fn dequantized_bytes(&self, unit: &UnitPlan) -> u64 {
        let size = self.config().precision.weight_dtype().size_bytes();
        let params = unit.quantized.slots.iter().map(|slot| slot.param.index());
        let elems = params.map(|param| self.spec().params[param].shape.elems());
        (elems.sum::<usize>() * size) as u64
    }

    /// Planned memory of one rank for model states. `slots` are the states that the optimizer stores per
    /// element, e.g. `exp_avg`. It is the same on each rank, since shards have equal padded sizes.
    #[must_use]
    pub fn memory(&self, slots: &[StateSlot]) -> MemoryReport {
        let mut report = MemoryReport::default();
        for row in self.inventory(0, slots) {
            let part = match row.what {
                Stored::Weights(_) => &mut report.parameters,
                Stored::Gradients | Stored::Waiting => &mut report.gradients,
                Stored::State(_) => &mut report.optimizer,
            };
            part.add(row.tier, row.bytes());
        }
        let config = self.config();
        let dequantized = self.units().iter().map(|unit| self.dequantized_bytes(unit));
        report.gathered = dequantized.max().unwrap_or(0);
        if self.leases_copy() {
            let gathered = self.units().iter().map(|unit| {
                let groups = GroupKind::ALL.into_iter();
                let bytes = groups
                    .map(|kind| unit.group(kind).padded_elems * self.dtype_of(kind).size_bytes());
                bytes.sum::<usize>() as u64
            });
            let gathered: Vec<u64> = gathered.collect();
            let at_once = 1 + config.prefetch_units;
            report.gathered += gathered
                .windows(at_once.min(gathered.len()).max(1))
                .map(|units| units.iter().sum())
                .max()
                .unwrap_or(0);
        }
        let buckets = self.units().iter().map(|unit| unit.trainable.padded_elems);
        let largest = 4 * buckets.max().unwrap_or(0) as u64;
        report.communication = largest * (1 + config.buckets_in_flight as u64);
        report
    }
}
