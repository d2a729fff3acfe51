//! Memory and disk of a machine: this one, or one described on the command line.

use crate::config::{Collectives, RunConfig};
use crate::lang::{Text, text};
use crate::units::bytes as format_bytes;
use crate::{device, memory};
use kernels::footprint;
use rustix::fs::Access;
use std::path::{Path, PathBuf};

/// Number of multiprocessors of described GPUs: that of an H100. Scratch memory differs little between kinds.
pub(crate) const DESCRIBED_MULTIPROCESSORS: u32 = 132;
/// Their compute capability. Adapted layers use a library there, which takes more scratch memory than our kernels.
pub(crate) const DESCRIBED_CAPABILITY: (u32, u32) = (9, 0);
/// Divisor of a machine's memory, and the bounds of the result: the bytes that a run leaves free if `--host-reserve` is
/// absent. The system, other programs and a plan that is a few percent short need them. So do pages of files: a page
/// that was read can be dropped at any time and is counted nowhere; a page that was written cannot until it is on the disk.
const RESERVE_SHARE: u64 = 20;
const LEAST_RESERVE: u64 = 256 << 20;
const MOST_RESERVE: u64 = 8 << 30;

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
pub(super) fn window_rooms() -> Vec<Text> {
    let line = |(dir, free): &(PathBuf, u64)| {
        text!(
            "{}: {} free",
            "{}：空闲 {}",
            dir.display(),
            format_bytes(*free)
        )
    };
    window_dirs().iter().map(line).collect()
}

/// Memory and disk space of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    /// Bytes per device. `None` on the CPU, where "device" memory is host memory.
    pub(crate) device_bytes: Option<u64>,
    /// Total host memory in bytes.
    pub(crate) host_total_bytes: u64,
    /// Free host memory in bytes.
    pub(crate) host_free_bytes: u64,
    /// Bytes of the free host memory that a run leaves to the system.
    pub(crate) host_reserve_bytes: u64,
    /// Most bytes of host memory that the run may take, if it has a limit of its own.
    pub(crate) host_limit_bytes: Option<u64>,
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
            host_reserve_bytes: reserve(host.total_bytes),
            host_limit_bytes: None,
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
            host_reserve_bytes: reserve(ram),
            host_limit_bytes: None,
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

    /// Bytes of host memory that a run may take: the free ones less the reserve, within the run's limit.
    pub(crate) fn usable_host_bytes(&self) -> u64 {
        let free = self.host_free_bytes.saturating_sub(self.host_reserve_bytes);
        free.min(self.host_limit_bytes.unwrap_or(u64::MAX))
    }

    /// Text of the free host memory, and of what a run may not take of it.
    pub(crate) fn host_text(&self) -> Text {
        let limit = self.host_limit_bytes.map(format_bytes);
        let limit = limit.map(|limit| {
            text!(
                ", --host-memory-limit {limit}",
                "，--host-memory-limit {limit}"
            )
        });
        let limit = limit.unwrap_or_default();
        text!(
            "host memory: {} free, of which {} stay for the system and for file pages (--host-reserve){limit}",
            "主机内存：空闲 {}，其中 {} 留给系统和文件页（--host-reserve）{limit}",
            format_bytes(self.host_free_bytes),
            format_bytes(self.host_reserve_bytes),
        )
    }

    /// Applies the memory limits and the reserve of `config`, and looks up the free space for its spill files.
    pub(crate) fn limited(mut self, config: &RunConfig) -> Self {
        self.host_limit_bytes = config.host_memory_limit;
        if let Some(reserve) = config.host_reserve {
            self.host_reserve_bytes = reserve;
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

/// Default reserve of a machine with `total` bytes of host memory.
fn reserve(total: u64) -> u64 {
    (total / RESERVE_SHARE).clamp(LEAST_RESERVE, MOST_RESERVE)
}
