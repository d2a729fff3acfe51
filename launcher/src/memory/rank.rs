//! Memory of one rank: by phase, tier and kind, and as the operating system counts it.

use crate::memory::{Kinds, Part, Phase};
use engine::comm::WindowBytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Planned peak memory of one rank in one phase: for each tier, its bytes by kind (parameters, gradients, …)
/// at the time when that tier uses most.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhaseBytes {
    /// Planned bytes of device memory by kind, at the peak of device memory in the phase.
    pub device: Kinds,
    /// Planned bytes of host memory by kind, at the peak of host memory in the phase.
    pub host: Kinds,
    /// Planned bytes of spill files on NVMe by kind, at the peak of the spill files in the phase.
    pub nvme: Kinds,
}

impl PhaseBytes {
    /// Total planned bytes of one tier: the sum over all kinds. `kinds` is one of the fields of
    /// [`PhaseBytes`].
    #[must_use]
    pub fn total(kinds: &Kinds) -> u64 {
        kinds.values().sum()
    }

    /// Keeps, for each tier, whichever of `self` and `other` has the larger total.
    pub(crate) fn raise(&mut self, other: Self) {
        for (own, other) in [
            (&mut self.device, other.device),
            (&mut self.host, other.host),
            (&mut self.nvme, other.nvme),
        ] {
            if Self::total(&other) > Self::total(own) {
                *own = other;
            }
        }
    }
}

/// Planned peak bytes of one rank over the whole run, for each memory tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankPeak {
    /// Planned peak bytes of device memory that one rank needs.
    pub device: u64,
    /// Planned peak bytes of host memory of one rank: model states, the process itself, samples, buffers.
    /// Memory of the device does not count here, even if the device is the CPU.
    pub host: u64,
    /// Planned peak bytes of one rank's spill files on NVMe.
    pub nvme: u64,
    /// Bytes of one rank's part of the communicator's window, the memory through which ranks exchange data.
    /// They count whether the rank touches them or not.
    pub window: u64,
    /// Planned peak resident bytes of a rank's process, which the kernel reports as `VmHWM`. Of all ranks, it
    /// is that of the rank with the most.
    pub resident: u64,
    /// Planned bytes of `resident` that are in the communicator's window: pages of this rank, and pages of
    /// other ranks that it reads.
    pub resident_window: u64,
    /// Planned bytes of `resident` that all ranks map: frozen weights, which exist once on the machine. `host` contains this
    /// rank's part of them.
    #[serde(default)]
    pub shared: u64,
}

/// Planned memory of one rank, counted by a dry run: peak bytes by phase, and over the whole run. All ranks
/// need the same, except for work that rank 0 alone does.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankMemory {
    /// Planned peak bytes of each phase, by tier and kind.
    pub phases: BTreeMap<Phase, PhaseBytes>,
    /// Planned peak bytes over the whole run, for each tier.
    pub peak: RankPeak,
    /// Planned peak resident bytes of each rank's process, indexed by rank.
    pub resident_by_rank: Vec<u64>,
    /// Most bytes that cross each boundary between pipeline stages at once, in one direction. Empty without stages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub boundary_bytes: Vec<u64>,
}

/// Memory in bytes that a dry run of one rank counted. The peaks of [`RankMemory`] are computed from it.
#[derive(Debug, Clone)]
pub(crate) struct Footprint {
    /// Host bytes that the device pool's blocks touched; 0 on a GPU.
    pub(crate) touched: u64,
    /// Bytes of device memory: the pool's blocks, and what is reserved in addition.
    pub(crate) held: u64,
    /// Bytes of the host tier that the rank alone uses: memory maps in whole pages, and blocks.
    pub(crate) host: u64,
    /// Bytes of frozen weights that all data-parallel ranks map, and the number of those ranks.
    pub(crate) shared: (u64, usize),
    /// Bytes of spill files on NVMe.
    pub(crate) nvme: u64,
    /// Peak bytes of host memory outside the host tier.
    pub(crate) beside: u64,
    /// Bytes of the communicator's window that a rank touches.
    pub(crate) window: WindowBytes,
    /// Bytes of a rank's part of the window, touched or not.
    pub(crate) region: u64,
}

impl RankMemory {
    /// Planned memory of a rank from its peaks in each phase and from the memory that its dry run counted.
    pub(crate) fn new(phases: BTreeMap<Phase, PhaseBytes>, footprint: Footprint) -> Self {
        let Footprint {
            touched,
            held,
            host,
            shared: (shared, ranks),
            nvme,
            beside,
            window,
            region,
        } = footprint;
        let host = host + beside;
        let mapped: Vec<u64> = window.peers.iter().map(|read| window.own + read).collect();
        let most_mapped = mapped.iter().copied().max().unwrap_or(window.own);
        Self {
            peak: RankPeak {
                device: held,
                host: host + shared / ranks as u64,
                nvme,
                window: region,
                resident: touched + host + most_mapped + shared,
                resident_window: most_mapped,
                shared,
            },
            resident_by_rank: mapped
                .into_iter()
                .map(|m| touched + host + m + shared)
                .collect(),
            phases,
            boundary_bytes: Vec::new(),
        }
    }

    /// Memory of a rank of a run with pipeline stages, from that of a rank of each stage: the figures of the stage that
    /// needs the most device and host memory. Rank numbers count stages first.
    pub(crate) fn of_stages(stages: Vec<Self>, boundary_bytes: Vec<u64>) -> Self {
        let data_ranks = stages
            .first()
            .map_or(0, |stage| stage.resident_by_rank.len());
        let ranks = (0..data_ranks).flat_map(|data| stages.iter().map(move |stage| (data, stage)));
        let resident_by_rank = ranks.map(|(data, stage)| stage.resident_by_rank[data]);
        let resident_by_rank = resident_by_rank.collect();
        let need = |stage: &Self| stage.peak.device + stage.peak.host;
        let most = stages.into_iter().max_by_key(need).unwrap_or_default();
        Self {
            resident_by_rank,
            boundary_bytes,
            ..most
        }
    }

    /// Planned bytes of a part of memory on the device, on the host and in spill files: for each tier, the highest sum
    /// of its kinds in any phase.
    pub(crate) fn of_part(&self, part: &Part) -> [u64; 3] {
        let most = |tier: fn(&PhaseBytes) -> &Kinds, kinds: &[&str]| {
            let of = |phase: &PhaseBytes| -> u64 {
                let found = kinds.iter().filter_map(|kind| tier(phase).get(*kind));
                found.sum()
            };
            self.phases.values().map(of).max().unwrap_or(0)
        };
        [
            most(|p| &p.device, part.device),
            most(|p| &p.host, part.host),
            most(|p| &p.nvme, part.host),
        ]
    }

    /// Highest planned peak of the rank's device memory in any of `phases`, in bytes; 0 if the plan has none
    /// of them.
    #[must_use]
    pub fn device_in(&self, phases: &[Phase]) -> u64 {
        let of = |phase: &Phase| self.phases.get(phase).map(|p| PhaseBytes::total(&p.device));
        phases.iter().filter_map(of).max().unwrap_or(0)
    }
}
