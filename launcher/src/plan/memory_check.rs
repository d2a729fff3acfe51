//! Memory check: whether a run fits a machine. Training and `launcher plan` share this rule.

use super::DECODING;
use super::machine::{Machine, window_rooms};
use super::rank_memory;
use crate::config::{Device, RunConfig};
use crate::device;
use crate::error::{ErrorCode, Failure};
use crate::memory::RankMemory;
use crate::units::bytes as format_bytes;
use engine::comm::control_bytes;

/// Divisor of the host memory that optional features leave free besides the machine's reserve: one tenth.
const SPARE_SHARE: u64 = 10;

/// Bytes that a run needs of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Device bytes that each rank needs.
    pub(crate) device: u64,
    /// Host bytes of all ranks together.
    pub(crate) host: u64,
    /// Spill-file bytes of all ranks together.
    pub(crate) nvme: u64,
    /// Bytes of the communicator's window, a file in shared memory; 0 for a single rank.
    pub(crate) window: u64,
}

/// Need of a run and the machine it is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryCheck {
    pub(crate) need: Need,
    pub(crate) machine: Machine,
    device_limit: Option<u64>,
    kept_spare: u64,
}

impl MemoryCheck {
    pub(crate) fn new(config: &RunConfig, memory: &RankMemory, machine: Machine) -> Self {
        let machine = machine.with_gpus(config);
        let ranks = config.ranks_here() as u64;
        let peak = memory.peak;
        // Ranks on real GPUs also exchange through shared memory. GPUs of a described machine may not need it.
        let meets_on_host = machine.device_bytes.is_none() || config.device == Device::Cuda;
        // Ranks on several machines each have their own copy of the window in private memory.
        let shares = ranks > 1 && config.ranks_here.is_none();
        let window = if meets_on_host && shares {
            control_bytes(config.world_size) + ranks * peak.window
        } else {
            0
        };
        let host = if meets_on_host {
            // Ranks on one machine map the same window, which counts once.
            let (own, all) = if shares {
                (peak.resident - peak.resident_window, window)
            } else {
                (peak.resident, 0)
            };
            ranks * own + all
        } else {
            ranks * peak.host
        };
        let limits = [config.device_memory_limit, machine.device_bytes];
        let whole_host = config.host_memory_limit.unwrap_or(u64::MAX);
        Self {
            need: Need {
                device: peak.device + machine.device_context_bytes(),
                host,
                nvme: ranks * peak.nvme,
                window,
            },
            machine: machine.limited(config),
            device_limit: limits.into_iter().flatten().min(),
            kept_spare: whole_host.min(machine.host_total_bytes) / SPARE_SHARE,
        }
    }

    /// Whether the run fits in the machine's device memory, host memory, spill disks and shared memory.
    pub(crate) fn fits(&self) -> bool {
        !self.exceeds_device()
            && !self.exceeds_host()
            && !self.exceeds_nvme()
            && !self.exceeds_window()
    }

    /// Whether the device memory is too small.
    pub(crate) fn exceeds_device(&self) -> bool {
        self.device_limit
            .is_some_and(|limit| self.need.device > limit)
    }

    /// Whether the host memory is too small.
    pub(crate) fn exceeds_host(&self) -> bool {
        self.need.host > self.machine.usable_host_bytes()
    }

    /// Host bytes that all ranks together leave usable, less what optional features keep free.
    pub(crate) fn spare_host(&self) -> u64 {
        let usable = self.machine.usable_host_bytes();
        usable.saturating_sub(self.need.host.saturating_add(self.kept_spare))
    }

    /// Bytes by which all ranks together exceed the usable host memory less what optional features keep free.
    pub(crate) fn host_overrun(&self) -> u64 {
        let taken = self.need.host.saturating_add(self.kept_spare);
        taken.saturating_sub(self.machine.usable_host_bytes())
    }

    /// Whether the disk is too small for the spill files.
    pub(crate) fn exceeds_nvme(&self) -> bool {
        let free = self.machine.nvme_free_bytes;
        free.is_some_and(|free| self.need.nvme > free)
    }

    fn exceeds_window(&self) -> bool {
        let free = self.machine.window_free_bytes;
        free.is_some_and(|free| self.need.window > free)
    }

    /// Bytes of a rank's GPU arena: the planned bytes plus slack, if the device has space for it.
    pub(crate) fn arena_bytes(&self, memory: &RankMemory) -> u64 {
        let context = self.machine.device_context_bytes();
        let most = self.device_limit.map(|limit| limit.saturating_sub(context));
        device::arena_bytes(memory.peak.device, most)
    }

    /// Device bytes that a rank may use, if limited.
    pub(crate) fn device_limit(&self) -> Option<u64> {
        self.device_limit
    }

    /// Text of the needs next to the available memory.
    pub(crate) fn needs(&self) -> String {
        let mut parts = Vec::new();
        if let Some(limit) = self.device_limit {
            parts.push(format!(
                "device {} of {} per rank",
                format_bytes(self.need.device),
                format_bytes(limit)
            ));
        }
        parts.push(format!(
            "host {} of {}",
            format_bytes(self.need.host),
            format_bytes(self.machine.usable_host_bytes())
        ));
        if self.need.nvme > 0 {
            let free = self.machine.nvme_free_bytes.map(format_bytes);
            parts.push(format!(
                "nvme {}{}",
                format_bytes(self.need.nvme),
                free.map_or(String::new(), |free| format!(" of {free}"))
            ));
        }
        parts.join(", ")
    }

    /// Refuses a run that does not fit, before anything is allocated.
    ///
    /// # Errors
    /// Device memory, host memory or disk are too small (exit 5), or shared memory is (exit 13).
    pub(crate) fn check(&self, config: &RunConfig, memory: &RankMemory) -> Result<(), Failure> {
        let Some(cause) = self.cause() else {
            return Ok(());
        };
        if !self.exceeds_device() && !self.exceeds_host() && !self.exceeds_nvme() {
            return Err(Failure::new(
                ErrorCode::SharedMemory,
                "the exchange between ranks does not fit into shared memory; no weight was read",
                cause,
            )
            .evidence_lines(window_rooms())
            .next("enlarge /dev/shm (docker run --shm-size), or use fewer ranks")
            .next("--nproc 1 needs no shared memory"));
        }
        let mut parts = rank_memory::parts(memory);
        parts.push(rank_memory::planned(memory, &DECODING));
        let used = parts
            .iter()
            .filter(|part| part.device_bytes + part.host_bytes > 0);
        let used: Vec<String> = used.map(ToString::to_string).collect();
        let mut failure = Failure::new(
            ErrorCode::Plan,
            "this run does not fit; no weight was read",
            cause,
        )
        .evidence(format!(
            "per rank: {}; {} ranks",
            used.join(" + "),
            config.world_size
        ));
        if self.exceeds_host() {
            failure = failure.evidence(self.machine.host_text());
        }
        if let Some(limit) = self.machine.cgroup_limit_bytes {
            failure = failure.evidence(format!("cgroup limit {}", format_bytes(limit)));
        }
        Err(failure.next(format!(
            "or use a machine with more memory: {}",
            self.wanted()
        )))
    }

    /// Text of a machine that has exactly the memory and disk that the run needs.
    fn wanted(&self) -> String {
        let device = self
            .device_limit
            .map(|_| format!("device {} per rank", format_bytes(self.need.device)));
        let host = self.need.host + self.machine.host_reserve_bytes;
        let nvme = (self.need.nvme > 0).then(|| format!("nvme {}", format_bytes(self.need.nvme)));
        let host = Some(format!("host {}", format_bytes(host)));
        let parts: Vec<String> = [device, host, nvme].into_iter().flatten().collect();
        parts.join(", ")
    }

    fn cause(&self) -> Option<String> {
        let text = |what: &str, need: u64, bound: &str, free: u64| {
            let (need, free) = (format_bytes(need), format_bytes(free));
            Some(format!("{what} {need} {bound} {free}"))
        };
        if let Some(limit) = self.device_limit.filter(|_| self.exceeds_device()) {
            let bound = "of device memory, the limit is";
            return text("each rank needs", self.need.device, bound, limit);
        }
        if self.exceeds_host() {
            return Some(format!(
                "the ranks need {} of host memory together, {} are available",
                format_bytes(self.need.host),
                format_bytes(self.machine.usable_host_bytes())
            ));
        }
        if self.exceeds_nvme() {
            let free = self.machine.nvme_free_bytes.unwrap_or(0);
            return text(
                "the spill files need",
                self.need.nvme,
                "of disk space, the disk has",
                free,
            );
        }
        if self.exceeds_window() {
            let free = self.machine.window_free_bytes.unwrap_or(0);
            let bound = "of shared memory, /dev/shm and /tmp have at most";
            return text(
                "the shared segment of the ranks needs",
                self.need.window,
                bound,
                free,
            );
        }
        None
    }
}
