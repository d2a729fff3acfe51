//! Frozen weights that ranks of one machine store once.
//!
//! On the host tier every rank maps the same memory and leases read it in place. On disk each rank stores a shard, and
//! leases gather it. Trainable weights are never shared, since their ranks update them at different times. Leases may also
//! read frozen weights of the host tier in the maps of their files, without any copy.

use super::{DeviceTransport, GroupKind, Plan, Slot, Tier};
use crate::spec::{ParamId, UnitId};
use std::ops::Range;

/// Alignment of a parameter group in the shared mapping: memory is mapped in pages.
const PAGE_BYTES: u64 = 4096;

/// Parameter groups that can be shared.
const FROZEN: [GroupKind; 2] = [GroupKind::Frozen, GroupKind::Quantized];

impl Plan {
    /// Whether the ranks, all on one machine, store one copy of the frozen weights together. Without it, each rank stores
    /// a copy in stages 0 to 2. Ranks whose devices gather weights do not need it: each stores a shard.
    #[must_use]
    pub fn shares_frozen(&self) -> bool {
        let config = self.config();
        let by_host = config.device_transport == DeviceTransport::Host;
        let is_one_group = self.shards() > 1 && self.shards() == self.world_size();
        let tier_shares = match config.offload.param {
            Tier::Device => false,
            Tier::Host => by_host || !config.stage.shards_parameters(),
            Tier::Nvme => by_host,
        };
        let frozen = FROZEN.into_iter();
        let has = |kind| self.units().iter().any(|unit| !unit.group(kind).is_empty());
        config.shares_host_memory && is_one_group && tier_shares && frozen.into_iter().any(has)
    }

    /// Lets leases read frozen weights in the maps of their files. `is_mappable` tells which parameters a file has in the
    /// plan's dtype, `discrete` whether the device copies weights from host memory. A unit's weights are read there if leases
    /// read them in place and all of them are mappable. Planned bytes stay the same: the pages of the files are counted
    /// instead. Ranks whose plans differ in this have other hashes.
    #[must_use]
    pub fn with_mapped_files(
        mut self,
        discrete: bool,
        is_mappable: impl Fn(ParamId) -> bool,
    ) -> Self {
        let params = (0..self.spec().params.len() as u32).map(ParamId);
        self.in_files = params.map(is_mappable).collect();
        self.reads_host_in_place = discrete;
        // Of all parameters, also of other pipeline stages, whose plans have the same hash.
        let files = self.in_files.iter().map(|is_mapped| u8::from(*is_mapped));
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.hash.as_bytes());
        hasher.update(&files.chain([u8::from(discrete)]).collect::<Vec<u8>>());
        self.hash = hasher.finalize().to_hex()[..16].to_string();
        self
    }

    /// Whether leases read a parameter group in the maps of its files.
    pub(crate) fn maps_files(&self, unit: UnitId, kind: GroupKind) -> bool {
        let slots = &self.unit(unit).group(kind).slots;
        let is_mapped = |slot: &Slot| self.in_files.get(slot.param.index()) == Some(&true);
        let is_plain = kind == GroupKind::Frozen && !slots.is_empty();
        is_plain && slots.iter().all(is_mapped) && self.reads_in_place(kind)
    }

    /// Whether leases read the host tier's weights of a frozen parameter group where they are stored.
    fn reads_in_place(&self, kind: GroupKind) -> bool {
        let is_on_host = self.config().offload.param == Tier::Host;
        is_on_host && !self.gathers(kind) && (self.reads_host_in_place || self.shares_frozen())
    }

    /// Parameters that leases read in the maps of their files, unit by unit.
    pub fn mapped_params(&self) -> impl Iterator<Item = ParamId> {
        let units = self.units().iter();
        let units = units.filter(|unit| self.maps_files(unit.id, GroupKind::Frozen));
        units.flat_map(|unit| unit.frozen.slots.iter().map(|slot| slot.param))
    }

    /// Whether leases read a parameter group where all ranks map it.
    pub(crate) fn maps_shared(&self, kind: GroupKind) -> bool {
        let is_on_host = self.config().offload.param == Tier::Host;
        kind != GroupKind::Trainable && is_on_host && self.shares_frozen()
    }

    /// Whether each rank stores a shard of a parameter group's weights.
    pub(crate) fn shards_weights(&self, kind: GroupKind) -> bool {
        let shares = kind != GroupKind::Trainable && self.shares_frozen();
        self.config().stage.shards_parameters() || shares
    }

    /// Whether leases gather a parameter group from the ranks' shards.
    pub(crate) fn gathers(&self, kind: GroupKind) -> bool {
        self.shards() > 1 && self.shards_weights(kind) && !self.maps_shared(kind)
    }

    /// Parameter groups in the shared mapping, in the order of units, and the bytes of each, without padding to pages.
    /// Empty if nothing is shared there.
    pub(crate) fn shared_groups(&self) -> Vec<(UnitId, GroupKind, Range<u64>)> {
        let mut end = 0;
        let mut groups = Vec::new();
        for unit in self.units() {
            for kind in FROZEN {
                let group = unit.group(kind);
                let is_elsewhere = self.maps_files(unit.id, kind);
                if group.is_empty() || is_elsewhere || !self.maps_shared(kind) {
                    continue;
                }
                let bytes = (group.padded_elems * self.dtype_of(kind).size_bytes()) as u64;
                groups.push((unit.id, kind, end..end + bytes));
                end = (end + bytes).next_multiple_of(PAGE_BYTES);
            }
        }
        groups
    }

    /// Bytes of the memory that all ranks of the machine map; 0 if the plan shares none. Each rank's inventory contains its
    /// shard.
    #[must_use]
    pub fn shared_bytes(&self) -> u64 {
        let last = self.shared_groups().pop();
        last.map_or(0, |(_, _, bytes)| bytes.end.next_multiple_of(PAGE_BYTES))
    }
}
