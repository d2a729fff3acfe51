//! Facts in the JSON report. Scripts rely on the keys, so they must not change.

use std::path::PathBuf;

use serde::{Serialize, Serializer};

use super::environment::Variable;

/// All facts, without findings.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    /// This program.
    pub program: Program,
    /// The operating system.
    pub system: System,
    /// Processor.
    pub cpu: Cpu,
    /// Host memory.
    pub memory: Memory,
    /// Limits of this process.
    pub limits: Limits,
    /// Directories that runs write to.
    pub storage: Vec<Storage>,
    /// How this process was started.
    pub launch: Launch,
    /// The NVIDIA driver and libraries.
    pub cuda: Cuda,
    /// GPUs: first those visible to CUDA, by ordinal, then those hidden from it.
    pub gpus: Vec<Gpu>,
    /// Environment variables.
    pub environment: Vec<Variable>,
}

/// This program.
#[derive(Debug, Clone, Serialize)]
pub struct Program {
    /// Version.
    pub version: &'static str,
    /// Whether it was built with optimization.
    pub is_release: bool,
    /// Whether CUDA support was built in.
    pub has_cuda: bool,
}

/// The operating system.
#[derive(Debug, Clone, Serialize)]
pub struct System {
    /// Name of the distribution.
    pub name: Option<String>,
    /// Release of the kernel.
    pub kernel: Option<String>,
    /// Architecture of the processor.
    pub architecture: &'static str,
    /// The C library with its version.
    pub libc: Option<String>,
    /// Kind of container that this process runs in, if it can be recognized.
    pub container: Option<&'static str>,
}

/// Processor.
#[derive(Debug, Clone, Serialize)]
pub struct Cpu {
    /// Name.
    pub model: Option<String>,
    /// Logical cores (hyper-threads) that are online.
    pub cores: usize,
    /// Logical cores that this process may use, by affinity and quota.
    pub usable_cores: usize,
    /// Supported instruction sets that this program can use.
    pub instruction_sets: Vec<&'static str>,
}

/// Host memory in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// Total memory of the machine.
    pub total_bytes: u64,
    /// Available memory of the machine.
    pub available_bytes: u64,
    /// Swap space.
    pub swap_bytes: u64,
    /// Cgroup with the tightest limit for this process.
    pub cgroup: Option<CgroupFacts>,
    /// Memory that a run may use now: available and within every limit.
    pub usable_bytes: u64,
}

/// A memory cgroup.
#[derive(Debug, Clone, Serialize)]
pub struct CgroupFacts {
    /// Cgroup version, 1 or 2.
    pub version: u32,
    /// Memory limit.
    pub limit_bytes: Option<u64>,
    /// Memory that its processes use.
    pub used_bytes: u64,
}

/// Limits of this process.
#[derive(Debug, Clone, Serialize)]
pub struct Limits {
    /// Maximum bytes locked in memory.
    pub locked_memory_bytes: Limit,
    /// Maximum open files.
    pub open_files: Limit,
}

/// One limit; `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// Limit in effect.
    pub soft: Option<u64>,
    /// Maximum that the process may raise it to.
    pub hard: Option<u64>,
}

/// Directory that runs write to.
#[derive(Debug, Clone, Serialize)]
pub struct Storage {
    /// Use of the directory.
    pub role: Role,
    /// Path.
    pub path: PathBuf,
    /// Type of its file system.
    pub file_system: Option<String>,
    /// Size of its file system in bytes.
    pub total_bytes: Option<u64>,
    /// Free bytes for this user.
    pub free_bytes: Option<u64>,
    /// Whether this process may write to it.
    pub is_writable: bool,
}

/// Use of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Run directories, unless `--output` is given.
    Runs,
    /// Private files of jobs.
    Temporary,
    /// Shared segments through which ranks communicate.
    SharedMemory,
}

/// How this process was started, according to the environment.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Launch {
    /// Rank of this process, if another launcher started it.
    pub rank: Option<usize>,
    /// World size, if another launcher started it.
    pub world_size: Option<usize>,
    /// Why a run would be refused.
    pub problem: Option<String>,
    /// What to do about it.
    pub next: Vec<String>,
    /// Tasks of a scheduler if this process is not one of them.
    pub scheduler_tasks: Option<SchedulerTasks>,
}

/// Tasks of a scheduler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SchedulerTasks {
    /// Variable that contains their number.
    pub variable: &'static str,
    /// Number of tasks.
    pub tasks: usize,
}

/// The NVIDIA driver and the libraries.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Cuda {
    /// NVIDIA graphics devices on the PCI bus.
    pub pci_devices: usize,
    /// Version of the loaded kernel module.
    pub kernel_module: Option<String>,
    /// Version of the installed driver libraries.
    pub driver: Option<String>,
    /// The CUDA version that the driver supports.
    #[serde(serialize_with = "dotted")]
    pub cuda_version: Option<(u32, u32)>,
    /// The lowest CUDA version that kernels here need.
    #[serde(serialize_with = "dotted")]
    pub minimum_cuda_version: Option<(u32, u32)>,
    /// Why CUDA shows no GPU.
    pub problem: Option<String>,
    /// Why NVML reports nothing.
    pub management_problem: Option<String>,
    /// Whether kernel module and libraries have different versions.
    pub is_mismatched: bool,
    /// Where libraries were searched, besides the dynamic linker and `/usr/local/cuda/lib64`.
    pub search: SearchFacts,
    /// The libraries.
    pub libraries: Vec<LibraryFacts>,
}

/// Where libraries were searched.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SearchFacts {
    /// Directories of `TESSERA_CUDA_LIBS`.
    pub directories: Vec<PathBuf>,
    /// `CUDA_HOME` or `CUDA_PATH`.
    pub cuda_home: Option<PathBuf>,
    /// Directories of Python packages that contain an `nvidia` directory.
    pub python_packages: Vec<PathBuf>,
}

/// One library.
#[derive(Debug, Clone, Serialize)]
pub struct LibraryFacts {
    /// Kind of library.
    pub kind: LibraryKind,
    /// Name.
    pub name: String,
    /// Path of the loaded file.
    pub path: Option<PathBuf>,
    /// Version, if the library reports it.
    pub version: Option<String>,
    /// All places tried.
    pub attempts: Vec<AttemptFacts>,
}

/// Kind of library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LibraryKind {
    /// The CUDA driver.
    Driver,
    /// NVIDIA Management Library.
    Nvml,
    /// Kernel compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Collectives.
    Nccl,
}

/// One place tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptFacts {
    /// The place.
    pub place: String,
    /// Result.
    pub outcome: String,
}

/// One GPU. Values that could not be read are absent and listed in `unread`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Gpu {
    /// CUDA ordinal. `None` if the GPU is hidden from CUDA.
    pub ordinal: Option<u32>,
    /// Index in PCI bus order, as in `nvidia-smi`.
    pub index: Option<u32>,
    /// Name.
    pub name: Option<String>,
    /// UUID.
    pub uuid: Option<String>,
    /// PCI bus id.
    pub pci_bus_id: Option<String>,
    /// Major and minor compute capability.
    #[serde(serialize_with = "dotted")]
    pub compute_capability: Option<(u32, u32)>,
    /// Streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// Total memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Memory used by processes and driver, in bytes.
    pub used_bytes: Option<u64>,
    /// Free memory in bytes.
    pub free_bytes: Option<u64>,
    /// Other processes that compute on it.
    pub processes: Option<Vec<GpuProcess>>,
    /// Percentage of the last sampling period in which a kernel ran.
    pub utilization_percent: Option<u32>,
    /// PCI Express link.
    pub pcie: Pcie,
    /// Number of active NVLinks.
    pub nvlinks: Option<u32>,
    /// Ordinals of the GPUs to whose memory it has peer access.
    pub peers: Option<Vec<u32>>,
    /// Uncorrected memory errors since the driver was loaded.
    pub uncorrected_ecc_errors: Option<u64>,
    /// Whether replacement of a memory row takes effect at the next reset.
    pub is_row_remap_pending: Option<bool>,
    /// Whether replacement of a memory row failed.
    pub has_row_remap_failed: Option<bool>,
    /// Values that could not be read, with the reason.
    pub unread: Vec<String>,
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GpuProcess {
    /// Process id, as the driver sees it.
    pub pid: u32,
    /// GPU memory in bytes, if the driver reports it.
    pub used_bytes: Option<u64>,
}

/// A PCI Express link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Pcie {
    /// Current generation. It drops while the GPU is idle.
    pub generation: Option<u32>,
    /// Highest supported generation.
    pub max_generation: Option<u32>,
    /// Current number of lanes.
    pub width: Option<u32>,
    /// Highest supported number of lanes.
    pub max_width: Option<u32>,
}

/// A version as `13.0`.
pub(crate) fn version_text((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

fn dotted<S: Serializer>(version: &Option<(u32, u32)>, serializer: S) -> Result<S::Ok, S::Error> {
    version.map(version_text).serialize(serializer)
}

impl Gpu {
    /// Label for people: CUDA's ordinal, or the bus id of a GPU that is hidden from CUDA.
    pub(crate) fn label(&self) -> String {
        match (self.ordinal, self.index) {
            (Some(ordinal), _) => format!("GPU {ordinal}"),
            (None, Some(index)) => format!("GPU {index} of nvidia-smi"),
            (None, None) => "a GPU".to_string(),
        }
    }
}
