//! Memory of one rank: by phase, tier and kind, and as the operating system counts it.

use crate::memory::{Kinds, Phase};
use engine::comm::WindowBytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Peak memory of one rank in one phase: for each tier, its bytes by kind (parameters, gradients, …) at the
/// time when that tier uses most.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhaseBytes {
    /// Bytes in device memory by kind.
    pub device: Kinds,
    /// Bytes in host memory by kind.
    pub host: Kinds,
    /// Bytes in spill files on NVMe by kind.
    pub nvme: Kinds,
}

impl PhaseBytes {
    /// Sum of the bytes of all `kinds`.
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
    /// Peak bytes of device memory that the rank needs.
    pub device: u64,
    /// Peak bytes of host memory: model states, the process itself, samples, buffers. Memory of the device
    /// does not count here, even if the device is the CPU.
    pub host: u64,
    /// Peak bytes of spill files on NVMe.
    pub nvme: u64,
    /// Bytes of this rank's part of the communicator's window, the memory through which ranks exchange data.
    pub window: u64,
    /// Peak resident bytes of a rank's process (`VmHWM`), for the rank with the largest.
    pub resident: u64,
    /// Bytes of `resident` that are in the communicator's window: pages of this rank, and pages of other
    /// ranks that it reads.
    pub resident_window: u64,
}

/// Planned memory of one rank in bytes, counted by a dry run. All ranks need the same, except for work that
/// rank 0 alone does.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankMemory {
    /// Peak bytes of each phase, by tier and kind.
    pub phases: BTreeMap<Phase, PhaseBytes>,
    /// Peak bytes over the whole run, for each tier.
    pub peak: RankPeak,
    /// Peak resident bytes of each rank's process, indexed by rank.
    pub resident_by_rank: Vec<u64>,
}

/// Memory in bytes that a dry run of one rank counted. The peaks of [`RankMemory`] are computed from it.
#[derive(Debug, Clone)]
pub(crate) struct Footprint {
    /// Host bytes that the device pool's blocks touched; 0 on a GPU.
    pub(crate) touched: u64,
    /// Bytes of device memory: the pool's blocks, and what is reserved in addition.
    pub(crate) held: u64,
    /// Bytes of the host tier: memory maps in whole pages, and blocks.
    pub(crate) host: u64,
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
                host,
                nvme,
                window: region,
                resident: touched + host + most_mapped,
                resident_window: most_mapped,
            },
            resident_by_rank: mapped.into_iter().map(|m| touched + host + m).collect(),
            phases,
        }
    }

    /// Bytes of the communicator's window in the peak resident bytes of the process
    /// ([`RankPeak::resident_window`]).
    #[must_use]
    pub fn mapped_chunk(&self) -> u64 {
        self.peak.resident_window
    }

    /// Bytes of these `kinds` of memory together, as (on the device, on the host): for each tier, the highest
    /// sum in any phase.
    #[must_use]
    pub fn most(&self, kinds: &[&str]) -> (u64, u64) {
        let most = |tier: fn(&PhaseBytes) -> &Kinds| {
            let of = |phase: &PhaseBytes| -> u64 {
                let found = kinds.iter().filter_map(|kind| tier(phase).get(*kind));
                found.sum()
            };
            self.phases.values().map(of).max().unwrap_or(0)
        };
        (most(|p| &p.device), most(|p| &p.host))
    }

    /// Peak bytes of device memory over these `phases`; 0 if the plan has none of them.
    #[must_use]
    pub fn device_in(&self, phases: &[Phase]) -> u64 {
        let of = |phase: &Phase| self.phases.get(phase).map(|p| PhaseBytes::total(&p.device));
        phases.iter().filter_map(of).max().unwrap_or(0)
    }
}
