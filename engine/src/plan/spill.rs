//! Bytes of spill files and of their buffers, known before anything is allocated.

use super::blocks::{BLOCK_BYTES, SEGMENT_BYTES, WINDOW_ALIGN, buffer_segments, extent_bytes};
use super::{GroupKind, Plan, StateKind, Tier};
use kernels::DType;
use optim::StateSlot;
use std::ops::Range;

/// Maximal bytes of buffers for prefetched weights.
const READ_AHEAD_BYTES: u64 = 256 << 20;

impl Plan {
    /// Bytes of `rank`'s spill file for one kind of model state, header included; 0 if the kind is not on disk.
    /// `slots` are the optimizer's states. Activations depend on the batch and are not counted.
    #[must_use]
    pub fn spill_file_bytes(&self, rank: usize, kind: StateKind, slots: &[StateSlot]) -> u64 {
        let config = self.config();
        if config.offload.tier(kind) != Tier::Nvme {
            return 0;
        }
        let part = |sharded: bool, group: &super::GroupLayout| {
            if sharded {
                group.shard(self.shard_of(rank))
            } else {
                0..group.padded_elems
            }
        };
        let mut bytes = BLOCK_BYTES;
        for unit in self.units() {
            for group in GroupKind::ALL {
                let layout = unit.group(group);
                if layout.is_empty() {
                    continue;
                }
                let mut add = |range: &Range<usize>, dtype: DType| {
                    let size = dtype.size_bytes();
                    let phase = range.start % WINDOW_ALIGN * size;
                    bytes += extent_bytes((range.len() * size) as u64, phase as u64);
                };
                match kind {
                    StateKind::Param => {
                        let dtype = config.precision.weight_dtype();
                        add(&part(config.stage.shards_parameters(), layout), dtype);
                        if group == GroupKind::Trainable && self.steps_early(unit.id) {
                            add(&part(config.stage.shards_optimizer(), layout), dtype);
                        }
                    }
                    StateKind::Optimizer if group == GroupKind::Trainable => {
                        if !self.consumes_gradients(unit.id) {
                            let summed = part(config.shards_gradients(), layout);
                            add(&summed, config.grad_dtype());
                        }
                        let own = part(config.stage.shards_optimizer(), layout);
                        for _copy in 0..1 + usize::from(self.steps_early(unit.id)) {
                            if config.precision.has_master() {
                                add(&own, DType::F32);
                            }
                            for slot in slots {
                                add(&own, slot.dtype);
                            }
                        }
                    }
                    StateKind::Optimizer | StateKind::Activation => {}
                }
            }
        }
        bytes
    }

    /// Bytes of host memory for the buffers of a rank's spill files: the weights of one unit, within bounds; 0
    /// without spill files.
    #[must_use]
    pub fn spill_buffer_bytes(&self) -> u64 {
        let offload = self.config().offload;
        if !StateKind::ALL
            .into_iter()
            .any(|kind| offload.tier(kind) == Tier::Nvme)
        {
            return 0;
        }
        let size = self.config().precision.weight_dtype().size_bytes() as u64;
        let resting = self.units().iter().map(|unit| {
            let groups = GroupKind::ALL.map(|kind| {
                let group = unit.group(kind);
                if self.config().stage.shards_parameters() {
                    group.shard_elems
                } else {
                    group.padded_elems
                }
            });
            groups.iter().sum::<usize>() as u64 * size
        });
        let ahead = match offload.param {
            Tier::Nvme => resting.max().unwrap_or(0).min(READ_AHEAD_BYTES),
            Tier::Device | Tier::Host => 0,
        };
        (buffer_segments(ahead + 16 * SEGMENT_BYTES as u64) * SEGMENT_BYTES) as u64
    }
}
