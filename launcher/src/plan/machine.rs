//! Memory and disk of a machine: this one, or one described on the command line.

use crate::config::{Collectives, RunConfig};
use crate::units::bytes as format_bytes;
use crate::{device, memory};
use kernels::footprint;
use rustix::fs::Access;
use std::path::{Path, PathBuf};

/// Number of multiprocessors of described GPUs: that of an H100. Scratch memory differs little between kinds.
pub(crate) const DESCRIBED_MULTIPROCESSORS: u32 = 132;

/// Directories that may hold the window file of ranks on one machine, with the bytes free in each; none where it cannot
/// be written.
fn window_dirs() -> Vec<(PathBuf, u64)> {
    let mut dirs = vec!["/dev/shm".into(), std::env::temp_dir(), "/tmp".into()];
    dirs.dedup();
    let free = |dir: PathBuf| {
        let writable = rustix::fs::access(&dir, Access::WRITE_OK | Access::EXEC_OK).is_ok();
        let free = memory::disk_free_bytes(&dir).unwrap_or(0);
        (dir, if writable { free } else { 0 })
    };
    dirs.into_iter().map(free).collect()
}

/// One line of text with the free space for each directory that may hold the ranks' window file.
pub(super) fn window_rooms() -> Vec<String> {
    let line =
        |(dir, free): &(PathBuf, u64)| format!("{}: {} free", dir.display(), format_bytes(*free));
    window_dirs().iter().map(line).collect()
}

/// Memory and disk space of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    /// Bytes per device. `None` on the CPU, where "device" memory is host memory.
    pub(crate) device_bytes: Option<u64>,
    /// Total host memory in bytes.
    pub(crate) host_total_bytes: u64,
    /// Host memory in bytes that the run may take.
    pub(crate) host_free_bytes: u64,
    /// Smallest cgroup limit in bytes, if any.
    pub(crate) cgroup_limit_bytes: Option<u64>,
    /// Free bytes for spill files. `None` if unknown.
    pub(crate) nvme_free_bytes: Option<u64>,
    /// Largest free space among the directories for the window. `None` for a described machine.
    pub(crate) window_free_bytes: Option<u64>,
    /// Multiprocessors of the largest GPU. CUDA's context takes memory accordingly.
    pub(crate) multiprocessors: u32,
    /// Bytes that the collectives library (NCCL) takes of each device.
    pub(crate) library_bytes: u64,
}

impl Machine {
    /// Memory and free disk space of the machine on which this process runs. Devices are not looked up.
    pub(crate) fn here() -> Self {
        let host = memory::host();
        let room = window_dirs().into_iter().map(|(_, free)| free);
        Self {
            device_bytes: None,
            host_total_bytes: host.total_bytes,
            host_free_bytes: host.free_bytes,
            cgroup_limit_bytes: host.cgroup_limit_bytes,
            nvme_free_bytes: None,
            window_free_bytes: room.max(),
            multiprocessors: DESCRIBED_MULTIPROCESSORS,
            library_bytes: 0,
        }
    }

    /// A described machine: bytes per device, if any, of host memory, and for spill files.
    pub(crate) fn described(device: Option<u64>, ram: u64, nvme: Option<u64>) -> Self {
        Self {
            device_bytes: device,
            host_total_bytes: ram,
            host_free_bytes: ram,
            cgroup_limit_bytes: None,
            nvme_free_bytes: nvme,
            window_free_bytes: None,
            multiprocessors: DESCRIBED_MULTIPROCESSORS,
            library_bytes: 0,
        }
    }

    /// Whether this is the local machine. The disks of a described machine are unknown.
    pub(crate) const fn is_here(&self) -> bool {
        self.window_free_bytes.is_some()
    }

    /// Adds the GPUs of `config`: the device memory that each rank may take.
    pub(super) fn with_gpus(mut self, config: &RunConfig) -> Self {
        if self.device_bytes.is_none() {
            self.device_bytes = device::free_bytes(config);
        }
        let gpus = config.gpus.iter().map(|gpu| gpu.multiprocessors);
        self.multiprocessors = gpus.max().unwrap_or(self.multiprocessors);
        if config.world_size > 1 && config.resolved_collectives() == Collectives::Nccl {
            self.library_bytes = footprint::NCCL_DEVICE_BYTES;
        }
        self
    }

    /// Applies the memory limits of `config`, and looks up the free space for its spill files.
    pub(crate) fn limited(mut self, config: &RunConfig) -> Self {
        if let Some(limit) = config.host_memory_limit {
            self.host_free_bytes = self.host_free_bytes.min(limit);
        }
        if self.nvme_free_bytes.is_none() && self.is_here() {
            let free = |directory: &&Path| memory::disk_free_bytes(directory).ok();
            self.nvme_free_bytes = config.offload.directories().iter().filter_map(free).min();
        }
        self
    }

    /// Device bytes that CUDA and the collectives library take besides the run's memory.
    pub(crate) fn device_context_bytes(&self) -> u64 {
        self.device_bytes.map_or(0, |_| {
            footprint::device_bytes(self.multiprocessors) + self.library_bytes
        })
    }
}
