//! What there is: this machine, or one that the command line describes.

use crate::config::{Collectives, RunConfig};
use crate::units::bytes as format_bytes;
use crate::{device, memory};
use kernels::footprint;
use std::path::Path;

/// Where the window of ranks that share a machine may lie.
const WINDOW_DIRS: [&str; 2] = ["/dev/shm", "/tmp"];

/// The directories that a window may lie in, each with its room.
pub(super) fn window_rooms() -> Vec<String> {
    let room = |dir: &&str| memory::disk_free_bytes(Path::new(dir)).unwrap_or(0);
    let line = |dir: &&str| format!("{dir}: {} free", format_bytes(room(dir)));
    WINDOW_DIRS.iter().map(line).collect()
}

/// Memory of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    /// Memory of each device; `None` where the ranks compute on the CPU and "device" memory is host
    /// memory too.
    pub(crate) device_bytes: Option<u64>,
    /// Host memory.
    pub(crate) host_total_bytes: u64,
    /// Host memory that may be taken.
    pub(crate) host_free_bytes: u64,
    /// The smallest cgroup limit, where there is one.
    pub(crate) cgroup_limit_bytes: Option<u64>,
    /// Room for spill files; `None` where nobody knows.
    pub(crate) nvme_free_bytes: Option<u64>,
    /// The most room that a directory for the window has.
    pub(crate) window_free_bytes: Option<u64>,
    /// What a library of collectives takes of each device.
    pub(crate) library_bytes: u64,
}

impl Machine {
    /// The machine this runs on.
    pub(crate) fn here() -> Self {
        let host = memory::host();
        let free = |dir: &&str| memory::disk_free_bytes(Path::new(dir)).ok();
        let room = WINDOW_DIRS.iter().filter_map(free);
        Self {
            device_bytes: None,
            host_total_bytes: host.total_bytes,
            host_free_bytes: host.free_bytes,
            cgroup_limit_bytes: host.cgroup_limit_bytes,
            nvme_free_bytes: None,
            window_free_bytes: room.max(),
            library_bytes: 0,
        }
    }

    /// A machine that is described: devices, if any, host memory, room for spill files.
    pub(crate) fn described(device: Option<u64>, ram: u64, nvme: Option<u64>) -> Self {
        Self {
            device_bytes: device,
            host_total_bytes: ram,
            host_free_bytes: ram,
            cgroup_limit_bytes: None,
            nvme_free_bytes: nvme,
            window_free_bytes: None,
            library_bytes: 0,
        }
    }

    /// Whether this is the machine this runs on: of one that is described nobody knows the disks.
    pub(crate) const fn is_here(&self) -> bool {
        self.window_free_bytes.is_some()
    }

    /// With the GPUs of a run on them: what each rank may take of its own.
    pub(super) fn with_gpus(mut self, config: &RunConfig) -> Self {
        if self.device_bytes.is_none() {
            self.device_bytes = device::free_bytes(config);
        }
        if config.world_size > 1 && config.resolved_collectives() == Collectives::Nccl {
            self.library_bytes = footprint::NCCL_DEVICE_BYTES;
        }
        self
    }

    /// With the limits that a run is given.
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

    /// What the device itself needs beside the run's memory.
    pub(crate) fn device_context_bytes(&self) -> u64 {
        self.device_bytes
            .map_or(0, |_| footprint::DEVICE_BYTES + self.library_bytes)
    }
}
