//! What one rank will occupy: by phase, tier and kind, and what the operating system will see.

use crate::memory::{Kinds, Phase};
use engine::comm::WindowBytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes by kind on each tier, at the moment of a phase when each tier holds most.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhaseBytes {
    /// Device memory.
    pub device: Kinds,
    /// Host memory.
    pub host: Kinds,
    /// Spill files.
    pub nvme: Kinds,
}

impl PhaseBytes {
    /// All kinds of a tier together.
    #[must_use]
    pub fn total(kinds: &Kinds) -> u64 {
        kinds.values().sum()
    }

    /// Keeps the higher of two moments, tier by tier.
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

/// The highest of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankPeak {
    /// Device memory that exists at once: what a device must have.
    pub device: u64,
    /// Host memory beside that of the device: states, the process itself, samples, buffers.
    pub host: u64,
    /// Spill files.
    pub nvme: u64,
    /// Pages of the communicator's window that belong to this rank.
    pub window: u64,
    /// What the kernel calls the process's high-water mark: of the rank with most.
    pub resident: u64,
    /// Of that, pages of the window: those of the rank and those it reads of the others.
    pub resident_window: u64,
}

/// The memory of one rank, equal on all but for what rank 0 does alone.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankMemory {
    /// By phase.
    pub phases: BTreeMap<Phase, PhaseBytes>,
    /// Over the whole run.
    pub peak: RankPeak,
    /// [`RankPeak::resident`] of every rank.
    pub resident_by_rank: Vec<u64>,
}

/// What a dry run has touched, from which the peaks follow.
#[derive(Debug, Clone)]
pub(crate) struct Footprint {
    /// Bytes that blocks of the device pool occupy in host memory: none of a GPU.
    pub(crate) touched: u64,
    /// Device memory: those blocks, with what is reserved beside them.
    pub(crate) held: u64,
    /// Host tier: maps in whole pages, and blocks.
    pub(crate) host: u64,
    /// Spill files.
    pub(crate) nvme: u64,
    /// Host memory beside the tier, at its highest.
    pub(crate) beside: u64,
    /// The window.
    pub(crate) window: WindowBytes,
    /// Bytes of a rank's region of the window.
    pub(crate) region: u64,
}

impl RankMemory {
    /// From the phases and what they touched.
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

    /// Pages of the window in the process's high-water mark.
    #[must_use]
    pub fn mapped_window(&self) -> u64 {
        self.peak.resident_window
    }

    /// Most bytes of a kind on the device and on the host.
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

    /// Bytes of the device in the phases `phases`.
    #[must_use]
    pub fn device_in(&self, phases: &[Phase]) -> u64 {
        let of = |phase: &Phase| self.phases.get(phase).map(|p| PhaseBytes::total(&p.device));
        phases.iter().filter_map(of).max().unwrap_or(0)
    }
}
