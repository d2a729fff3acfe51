//! Memory of one rank: by phase, tier and kind, and as the operating system counts it.

use crate::memory::{Kinds, Phase};
use engine::comm::WindowBytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of one rank by kind on each tier, at the time in a phase when that tier uses most.
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
    /// Sum of the bytes of all kinds of a tier.
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

/// Peak bytes of one rank over the whole run, on each tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankPeak {
    /// Peak bytes of device memory: what a device must have.
    pub device: u64,
    /// Peak bytes of host memory that is not the device's: states, the process itself, samples, buffers.
    pub host: u64,
    /// Peak bytes of spill files on NVMe.
    pub nvme: u64,
    /// Bytes of this rank's part of the communicator's window.
    pub window: u64,
    /// Highest resident bytes of the process (`VmHWM`), of the rank with the largest.
    pub resident: u64,
    /// Bytes of `resident` that are in the window: pages of this rank, and pages of others that it reads.
    pub resident_window: u64,
}

/// Planned memory of one rank, from a dry run. It is equal on all ranks except for what rank 0 alone does.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankMemory {
    /// Peak bytes by kind, for each phase.
    pub phases: BTreeMap<Phase, PhaseBytes>,
    /// Peak bytes of the whole run, on each tier.
    pub peak: RankPeak,
    /// [`RankPeak::resident`] for each rank, indexed by rank.
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

    /// Bytes of the window in the process's high-water mark.
    #[must_use]
    pub fn mapped_chunk(&self) -> u64 {
        self.peak.resident_window
    }

    /// Peak bytes of some kinds on the device and on the host.
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

    /// Peak bytes of the device in some phases.
    #[must_use]
    pub fn device_in(&self, phases: &[Phase]) -> u64 {
        let of = |phase: &Phase| self.phases.get(phase).map(|p| PhaseBytes::total(&p.device));
        phases.iter().filter_map(of).max().unwrap_or(0)
    }
}
