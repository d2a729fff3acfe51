//! Sizes of spill files and of their buffers, known before anything is allocated.

use super::blocks::{BLOCK_BYTES, SEGMENT_BYTES, extent_bytes, io_buffers};
use super::{GroupKind, Plan, StateKind, Tier};
use optim::StateSlot;

/// Maximal bytes of buffers for prefetched weights.
const READ_AHEAD_BYTES: u64 = 256 << 20;

impl Plan {
    /// Size in bytes of `rank`'s spill file for one kind of state, header included; 0 if that kind is not on
    /// disk. `slots` are the states that the optimizer stores per element, e.g. `exp_avg`. Activations depend
    /// on the batch and are not counted.
    #[must_use]
    pub fn spill_file_bytes(&self, rank: usize, kind: StateKind, slots: &[StateSlot]) -> u64 {
        if self.config().offload.tier(kind) != Tier::Nvme {
            return 0;
        }
        let rows = self.inventory(rank, slots).into_iter();
        let rows = rows.filter(|row| row.kind() == kind && row.tier == Tier::Nvme);
        let extents = rows.map(|row| extent_bytes(row.bytes(), row.phase()));
        BLOCK_BYTES + extents.sum::<u64>()
    }

    /// Bytes of host memory for the disk buffers of one rank; 0 if no state is on disk. Without weights on
    /// disk it is 16 MiB. With them it is at least 16 MiB, and 8 MiB more than the stored weights of the
    /// largest unit, of which at most 256 MiB count.
    #[must_use]
    pub fn spill_buffer_bytes(&self) -> u64 {
        let offload = self.config().offload;
        if !StateKind::ALL
            .into_iter()
            .any(|kind| offload.tier(kind) == Tier::Nvme)
        {
            return 0;
        }
        let weights = self.units().iter().map(|unit| {
            let groups = GroupKind::ALL.into_iter();
            let elems = |kind| self.stored_range(unit.id, kind, 0).len();
            let bytes = groups.map(|kind| elems(kind) * self.dtype_of(kind).size_bytes());
            bytes.sum::<usize>() as u64
        });
        let ahead = match offload.param {
            Tier::Nvme => weights.max().unwrap_or(0).min(READ_AHEAD_BYTES),
            Tier::Device | Tier::Host => 0,
        };
        (io_buffers(ahead + 16 * SEGMENT_BYTES as u64) * SEGMENT_BYTES) as u64
    }
}
