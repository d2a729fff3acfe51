//! Memory check: whether a run fits a machine. Training and `launcher plan` share this rule.

use super::DECODING;
use super::machine::{Machine, window_rooms};
use super::rank_memory;
use crate::config::{Device, RunConfig};
use crate::device;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Both, Text, both, text};
use crate::memory::RankMemory;
use crate::ui::PlanPart;
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
            // Ranks on one machine map the same window, and those of a stage the same frozen weights: each counts once.
            let (own, all) = if shares {
                let mapped = peak.resident_window + peak.shared;
                let frozen = config.mp_size as u64 * peak.shared;
                (peak.resident - mapped, window + frozen)
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
    pub(crate) fn needs(&self) -> Text {
        let mut parts = Vec::new();
        if let Some(limit) = self.device_limit {
            parts.push(text!(
                "device {} of {} per rank",
                "每个 rank 设备内存 {}，共 {}",
                format_bytes(self.need.device),
                format_bytes(limit)
            ));
        }
        parts.push(text!(
            "host {} of {}",
            "主机内存 {}，共 {}",
            format_bytes(self.need.host),
            format_bytes(self.machine.usable_host_bytes())
        ));
        if self.need.nvme > 0 {
            let free = self.machine.nvme_free_bytes.map(format_bytes);
            let of = free.map(|free| text!(" of {free}", "，共 {free}"));
            let of = of.unwrap_or_default();
            parts.push(text!(
                "nvme {}{of}",
                "nvme {}{of}",
                format_bytes(self.need.nvme)
            ));
        }
        Text::join(&parts, ", ")
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
                both("the exchange between ranks does not fit into shared memory; no weight was read", "rank 之间的交换区在共享内存中放不下；没有读取任何权重"),
                cause,
            )
            .evidence_lines(window_rooms())
            .next(both("enlarge /dev/shm (docker run --shm-size), or use fewer ranks", "请扩大 /dev/shm（docker run --shm-size），或减少 rank"))
            .next(both("--nproc 1 needs no shared memory", "--nproc 1 不需要共享内存")));
        }
        let mut parts = rank_memory::parts(memory);
        parts.push(rank_memory::planned(memory, &DECODING));
        let used = parts
            .iter()
            .filter(|part| part.device_bytes + part.host_bytes > 0);
        let used: Vec<&PlanPart> = used.collect();
        let mut failure = Failure::new(
            ErrorCode::Plan,
            both(
                "this run does not fit; no weight was read",
                "本次运行放不下；没有读取任何权重",
            ),
            cause,
        )
        .evidence(text!(
            "per rank: {}; {} ranks",
            "每个 rank：{}；{} 个 rank",
            Text::join(&used, " + "),
            config.world_size
        ));
        if self.exceeds_host() {
            failure = failure.evidence(self.machine.host_text());
        }
        if let Some(limit) = self.machine.cgroup_limit_bytes {
            failure = failure.evidence(text!(
                "cgroup limit {}",
                "cgroup 上限 {}",
                format_bytes(limit)
            ));
        }
        let wanted = self.wanted();
        Err(failure.next(text!(
            "or use a machine with more memory: {wanted}",
            "或使用内存更大的机器：{wanted}"
        )))
    }

    /// Text of a machine that has exactly the memory and disk that the run needs.
    fn wanted(&self) -> Text {
        let device = self.device_limit.map(|_| {
            let need = format_bytes(self.need.device);
            text!("device {need} per rank", "每个 rank 设备内存 {need}")
        });
        let host = format_bytes(self.need.host + self.machine.host_reserve_bytes);
        let nvme = (self.need.nvme > 0).then(|| {
            let need = format_bytes(self.need.nvme);
            text!("nvme {need}", "nvme {need}")
        });
        let host = Some(text!("host {host}", "主机内存 {host}"));
        let parts: Vec<Text> = [device, host, nvme].into_iter().flatten().collect();
        Text::list(&parts)
    }

    fn cause(&self) -> Option<Text> {
        let text = |what: Both, need: u64, bound: Both, free: u64| {
            let (need, free) = (format_bytes(need), format_bytes(free));
            Some(text!(
                "{what} {need} {bound} {free}",
                "{what} {need} {bound} {free}"
            ))
        };
        if let Some(limit) = self.device_limit.filter(|_| self.exceeds_device()) {
            let bound = both("of device memory, the limit is", "设备内存，上限为");
            return text(
                both("each rank needs", "每个 rank 需要"),
                self.need.device,
                bound,
                limit,
            );
        }
        if self.exceeds_host() {
            return Some(text!(
                "the ranks need {} of host memory together, {} are available",
                "各 rank 共需要主机内存 {}，可用 {}",
                format_bytes(self.need.host),
                format_bytes(self.machine.usable_host_bytes())
            ));
        }
        if self.exceeds_nvme() {
            let free = self.machine.nvme_free_bytes.unwrap_or(0);
            return text(
                both("the spill files need", "溢出文件需要"),
                self.need.nvme,
                both("of disk space, the disk has", "磁盘空间，磁盘只有"),
                free,
            );
        }
        if self.exceeds_window() {
            let free = self.machine.window_free_bytes.unwrap_or(0);
            let bound = both(
                "of shared memory, /dev/shm and /tmp have at most",
                "共享内存，/dev/shm 和 /tmp 最多有",
            );
            return text(
                both(
                    "the shared segment of the ranks needs",
                    "各 rank 的共享内存段需要",
                ),
                self.need.window,
                bound,
                free,
            );
        }
        None
    }
}
