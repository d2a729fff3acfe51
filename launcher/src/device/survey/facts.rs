//! What was found, as it stands in the JSON report. The keys are a promise to scripts.

use std::path::PathBuf;

use serde::{Serialize, Serializer};

use super::environment::Variable;

/// Everything that was found, without judgement.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    /// This program.
    pub program: Program,
    /// The operating system.
    pub system: System,
    /// The processor.
    pub cpu: Cpu,
    /// Host memory.
    pub memory: Memory,
    /// Limits of this process.
    pub limits: Limits,
    /// Folders that runs write to.
    pub storage: Vec<Storage>,
    /// How this process was started.
    pub launch: Launch,
    /// The NVIDIA driver and libraries.
    pub cuda: Cuda,
    /// GPUs: first those that CUDA shows, by ordinal, then those hidden from it.
    pub gpus: Vec<Gpu>,
    /// Environment variables.
    pub environment: Vec<Variable>,
}

/// This program.
#[derive(Debug, Clone, Serialize)]
pub struct Program {
    /// Its version.
    pub version: &'static str,
    /// Whether it was built with optimisation.
    pub is_release: bool,
    /// Whether support of CUDA was built in.
    pub has_cuda: bool,
}

/// The operating system.
#[derive(Debug, Clone, Serialize)]
pub struct System {
    /// Its name.
    pub name: Option<String>,
    /// Release of the kernel.
    pub kernel: Option<String>,
    /// Architecture of the processor.
    pub architecture: &'static str,
    /// The C library with its version.
    pub libc: Option<String>,
    /// The kind of container around this process, where it leaves a mark.
    pub container: Option<&'static str>,
}

/// The processor.
#[derive(Debug, Clone, Serialize)]
pub struct Cpu {
    /// Its name.
    pub model: Option<String>,
    /// Cores that are switched on, hyper-threads counted.
    pub cores: usize,
    /// Cores this process may use, by affinity and quota.
    pub usable_cores: usize,
    /// Instruction sets that matter here.
    pub instruction_sets: Vec<&'static str>,
}

/// Host memory in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// The machine's memory.
    pub total_bytes: u64,
    /// What the machine has available.
    pub available_bytes: u64,
    /// Swap space.
    pub swap_bytes: u64,
    /// The cgroup that bounds this process most.
    pub cgroup: Option<CgroupFacts>,
    /// What a run may take now: available, and below every limit.
    pub usable_bytes: u64,
}

/// A memory cgroup.
#[derive(Debug, Clone, Serialize)]
pub struct CgroupFacts {
    /// 1 or 2.
    pub version: u32,
    /// Its limit.
    pub limit_bytes: Option<u64>,
    /// What its processes use.
    pub used_bytes: u64,
}

/// Limits of this process.
#[derive(Debug, Clone, Serialize)]
pub struct Limits {
    /// Bytes that may be locked in memory.
    pub locked_memory_bytes: Limit,
    /// Files that may be open.
    pub open_files: Limit,
}

/// One limit; none means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// What holds.
    pub soft: Option<u64>,
    /// What the process may raise it to.
    pub hard: Option<u64>,
}

/// A folder that runs write to.
#[derive(Debug, Clone, Serialize)]
pub struct Storage {
    /// What lies there.
    pub role: Role,
    /// The folder.
    pub path: PathBuf,
    /// Type of its file system.
    pub file_system: Option<String>,
    /// Size of its file system.
    pub total_bytes: Option<u64>,
    /// What may still be written.
    pub free_bytes: Option<u64>,
    /// Whether this process may write there.
    pub is_writable: bool,
}

/// What lies in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Run folders, unless `--output` says otherwise.
    Runs,
    /// Private files of jobs.
    Temporary,
    /// The windows through which ranks exchange.
    SharedMemory,
}

/// How this process was started, as the environment says.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Launch {
    /// This process's rank, where another launcher started it.
    pub rank: Option<usize>,
    /// The number of ranks, likewise.
    pub world_size: Option<usize>,
    /// Why a run would be refused.
    pub problem: Option<String>,
    /// What to do about it.
    pub next: Vec<String>,
    /// Tasks of a scheduler of which this process is none.
    pub scheduler_tasks: Option<SchedulerTasks>,
}

/// Tasks of a scheduler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SchedulerTasks {
    /// The variable that counts them.
    pub variable: &'static str,
    /// How many there are.
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
    /// Why the management library (NVML) tells nothing.
    pub management_problem: Option<String>,
    /// Kernel module and libraries are of different versions.
    pub is_mismatched: bool,
    /// Where libraries were looked for, beside the dynamic linker and `/usr/local/cuda/lib64`.
    pub search: SearchFacts,
    /// The libraries.
    pub libraries: Vec<LibraryFacts>,
}

/// Where libraries were looked for.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SearchFacts {
    /// Folders of `TESSERA_CUDA_LIBS`.
    pub directories: Vec<PathBuf>,
    /// `CUDA_HOME` or `CUDA_PATH`.
    pub cuda_home: Option<PathBuf>,
    /// Folders of Python packages that hold an `nvidia` folder.
    pub python_packages: Vec<PathBuf>,
}

/// One library.
#[derive(Debug, Clone, Serialize)]
pub struct LibraryFacts {
    /// Which one.
    pub kind: LibraryKind,
    /// Its name.
    pub name: String,
    /// Where it lies.
    pub path: Option<PathBuf>,
    /// Its version, where it tells.
    pub version: Option<String>,
    /// Every place looked at.
    pub attempts: Vec<AttemptFacts>,
}

/// Which library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LibraryKind {
    /// The CUDA driver.
    Driver,
    /// The management library.
    Nvml,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Collectives.
    Nccl,
}

/// One place that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptFacts {
    /// The place.
    pub place: String,
    /// What came of it.
    pub outcome: String,
}

/// One GPU. What could not be read is absent, and told in `unread`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Gpu {
    /// CUDA's number; absent where CUDA does not show it.
    pub ordinal: Option<u32>,
    /// Number in the order of the PCI bus, as `nvidia-smi` shows it.
    pub index: Option<u32>,
    /// Its name.
    pub name: Option<String>,
    /// Its identity.
    pub uuid: Option<String>,
    /// Its place on the bus.
    pub pci_bus_id: Option<String>,
    /// Generation of its instructions.
    #[serde(serialize_with = "dotted")]
    pub compute_capability: Option<(u32, u32)>,
    /// Streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// All of its memory.
    pub memory_bytes: Option<u64>,
    /// In use by processes and driver.
    pub used_bytes: Option<u64>,
    /// Not in use.
    pub free_bytes: Option<u64>,
    /// Processes of others that compute on it.
    pub processes: Option<Vec<GpuProcess>>,
    /// Share of the last second in which it computed.
    pub utilization_percent: Option<u32>,
    /// Its PCI Express link.
    pub pcie: Pcie,
    /// Links to other GPUs that are up.
    pub nvlinks: Option<u32>,
    /// Ordinals whose memory it can reach.
    pub peers: Option<Vec<u32>>,
    /// Uncorrected memory errors since the driver was loaded.
    pub uncorrected_ecc_errors: Option<u64>,
    /// A row of memory waits for the next reset to be replaced.
    pub is_row_remap_pending: Option<bool>,
    /// A row of memory could not be replaced.
    pub has_row_remap_failed: Option<bool>,
    /// What could not be read and why.
    pub unread: Vec<String>,
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GpuProcess {
    /// Its number, as the driver sees it.
    pub pid: u32,
    /// Memory it holds, where the driver tells.
    pub used_bytes: Option<u64>,
}

/// A PCI Express link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Pcie {
    /// Generation now; it falls while the GPU rests.
    pub generation: Option<u32>,
    /// Highest generation.
    pub max_generation: Option<u32>,
    /// Lanes now.
    pub width: Option<u32>,
    /// Most lanes.
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
    /// How people tell it from others: CUDA's number, or the bus number where CUDA hides it.
    pub(crate) fn label(&self) -> String {
        match (self.ordinal, self.index) {
            (Some(ordinal), _) => format!("GPU {ordinal}"),
            (None, Some(index)) => format!("GPU {index} of nvidia-smi"),
            (None, None) => "a GPU".to_string(),
        }
    }
}
