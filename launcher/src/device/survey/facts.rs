//! Facts in the JSON report. Scripts rely on the keys, so they must not change.

use std::path::PathBuf;

use serde::{Serialize, Serializer};

use super::environment::Variable;
use crate::lang::{Text, both, text};

/// Facts about this machine and process that `launcher doctor` reports, without the findings drawn from them.
#[derive(Debug, Clone, Serialize)]
pub struct Facts {
    /// Version and build options of this program.
    pub program: Program,
    /// Operating system, kernel, C library and container.
    pub system: System,
    /// Name, cores and instruction sets of the processor.
    pub cpu: Cpu,
    /// Host memory: sizes of the machine's memory, and the limit of this process's cgroup.
    pub memory: Memory,
    /// Resource limits of this process (`ulimit`).
    pub limits: Limits,
    /// Directories that training runs write to, with their free space.
    pub storage: Vec<Storage>,
    /// How this process was started, according to environment variables of launchers and schedulers.
    pub launch: Launch,
    /// NVIDIA driver: its versions and problems, and the search for NVIDIA's libraries.
    pub cuda: Cuda,
    /// GPUs: first those visible to CUDA, by ordinal, then those hidden from it.
    pub gpus: Vec<Gpu>,
    /// Environment variables that affect this program, its libraries or other trainers.
    pub environment: Vec<Variable>,
}

/// Version and build options of this program.
#[derive(Debug, Clone, Serialize)]
pub struct Program {
    /// Version of this program, as in `Cargo.toml`.
    pub version: &'static str,
    /// Whether this program was built as a release build, without debug assertions.
    pub is_release: bool,
    /// Whether this program was built with CUDA support.
    pub has_cuda: bool,
}

/// Operating system, kernel, C library and container.
#[derive(Debug, Clone, Serialize)]
pub struct System {
    /// Name and version of the Linux distribution, from `os-release`.
    pub name: Option<String>,
    /// Release of the Linux kernel.
    pub kernel: Option<String>,
    /// Processor architecture that this program was built for, such as `x86_64`.
    pub architecture: &'static str,
    /// Name and version of the C library that this program is linked to, such as `glibc 2.36`.
    pub libc: Option<String>,
    /// Kind of container that this process runs in, if it can be recognized.
    pub container: Option<&'static str>,
}

/// Name, cores and instruction sets of the processor.
#[derive(Debug, Clone, Serialize)]
pub struct Cpu {
    /// Model name of the processor, from `/proc/cpuinfo`.
    pub model: Option<String>,
    /// Logical cores (hyper-threads) that are online.
    pub cores: usize,
    /// Logical cores that this process may use, by affinity and quota.
    pub usable_cores: usize,
    /// Supported instruction sets that this program can use.
    pub instruction_sets: Vec<&'static str>,
}

/// Sizes of the host memory in bytes: of the whole machine, available now, and the limit of this process's
/// cgroup.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// Total host memory of the machine in bytes.
    pub total_bytes: u64,
    /// Bytes of host memory that are available without swapping (`MemAvailable`).
    pub available_bytes: u64,
    /// Total swap space of the machine in bytes.
    pub swap_bytes: u64,
    /// Memory cgroup with the smallest limit for this process; `None` if no cgroup reports its use.
    pub cgroup: Option<CgroupFacts>,
    /// Bytes of host memory that a run may use now: available and within every cgroup limit.
    pub usable_bytes: u64,
}

/// Memory limit and use of a Linux control group (cgroup).
#[derive(Debug, Clone, Serialize)]
pub struct CgroupFacts {
    /// Version of the cgroup interface, 1 or 2.
    pub version: u32,
    /// Memory limit of the cgroup in bytes; `None` means unlimited.
    pub limit_bytes: Option<u64>,
    /// Bytes that the processes of the cgroup use, without reclaimable page cache.
    pub used_bytes: u64,
}

/// Resource limits of this process (`ulimit`).
#[derive(Debug, Clone, Serialize)]
pub struct Limits {
    /// Maximum bytes of memory that this process may lock (`ulimit -l`).
    pub locked_memory_bytes: Limit,
    /// Maximum number of files that this process may have open (`ulimit -n`).
    pub open_files: Limit,
    /// Maximum number of threads and processes of this user (`ulimit -u`), or of the cgroup if that is less.
    pub processes: Limit,
}

/// One resource limit of this process, in the unit of its field of [`Limits`] (bytes or files). `None` means
/// unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// Soft limit: the value in effect.
    pub soft: Option<u64>,
    /// Hard limit: maximum to which the process may raise the soft limit.
    pub hard: Option<u64>,
}

/// Directory that training runs write to, and its file system.
#[derive(Debug, Clone, Serialize)]
pub struct Storage {
    /// Purpose for which runs use the directory.
    pub role: Role,
    /// Path of the directory, absolute if it exists.
    pub path: PathBuf,
    /// Type of the file system that contains the directory, such as `ext4`.
    pub file_system: Option<String>,
    /// Size of the file system that contains the directory, in bytes.
    pub total_bytes: Option<u64>,
    /// Free bytes of that file system for an unprivileged user.
    pub free_bytes: Option<u64>,
    /// Whether this process may write to the directory.
    pub is_writable: bool,
}

/// Purpose for which runs use a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Parent of run directories, unless `--output` is given.
    Runs,
    /// Temporary files of the system (`TMPDIR` or `/tmp`).
    Temporary,
    /// Shared segments through which ranks communicate.
    SharedMemory,
}

/// How this process was started, according to the environment.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Launch {
    /// Rank of this process over all machines, if another launcher such as `torchrun` started it.
    pub rank: Option<usize>,
    /// Number of ranks, if another launcher started this process.
    pub world_size: Option<usize>,
    /// Why a run with these environment variables would be refused. `None` if it would not.
    #[serde(serialize_with = "english")]
    pub problem: Option<Text>,
    /// Advice on how to solve `problem`.
    #[serde(serialize_with = "Text::english_list")]
    pub next: Vec<Text>,
    /// Tasks that a scheduler such as Slurm has allotted, if this process is not one of them.
    pub scheduler_tasks: Option<SchedulerTasks>,
}

/// Number of tasks of a job scheduler, and the variable that contains it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SchedulerTasks {
    /// Environment variable that contains the number of tasks.
    pub variable: &'static str,
    /// Number of tasks of the job, above 1.
    pub tasks: usize,
}

/// NVIDIA driver: its versions and problems, and the search for NVIDIA's libraries.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Cuda {
    /// Number of NVIDIA graphics devices on the PCI bus.
    pub pci_devices: usize,
    /// Version of the driver's loaded kernel module.
    pub kernel_module: Option<String>,
    /// Version of the installed driver libraries.
    pub driver: Option<String>,
    /// Highest CUDA version that the driver supports, as (major, minor).
    #[serde(serialize_with = "dotted")]
    pub cuda_version: Option<(u32, u32)>,
    /// Lowest CUDA version that this program's kernels need, as (major, minor). `None` if this program was
    /// built without CUDA support.
    #[serde(serialize_with = "dotted")]
    pub minimum_cuda_version: Option<(u32, u32)>,
    /// Why CUDA shows no GPU. `None` if it shows one.
    pub problem: Option<String>,
    /// Why NVML (NVIDIA Management Library) reports no GPUs. `None` if it works, or if this program was built
    /// without CUDA support.
    pub management_problem: Option<String>,
    /// Whether the driver's kernel module and its libraries have different versions.
    pub is_mismatched: bool,
    /// Places searched for NVIDIA's libraries, besides those of the dynamic linker and `/usr/local/cuda/lib64`.
    pub search: SearchFacts,
    /// Libraries that were searched for, found or not.
    pub libraries: Vec<LibraryFacts>,
}

/// Places searched for NVIDIA's libraries, from environment variables and Python installations.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SearchFacts {
    /// Directories listed in the environment variable `TESSERA_CUDA_LIBS`, searched first.
    pub directories: Vec<PathBuf>,
    /// Directory of a CUDA toolkit, from the environment variable `CUDA_HOME` or `CUDA_PATH`.
    pub cuda_home: Option<PathBuf>,
    /// Directories of installed Python packages (`site-packages`) that contain an `nvidia` directory.
    pub python_packages: Vec<PathBuf>,
}

/// Result of the search for one of NVIDIA's libraries.
#[derive(Debug, Clone, Serialize)]
pub struct LibraryFacts {
    /// Which library was searched for.
    pub kind: LibraryKind,
    /// Name of the library, such as `NCCL`. For NVML it is the file name.
    pub name: String,
    /// Path of the loaded file. `None` if no file was loaded.
    pub path: Option<PathBuf>,
    /// Version of the library, if it reports one.
    pub version: Option<String>,
    /// Every path or name that was tried in the search for this library.
    pub attempts: Vec<AttemptFacts>,
}

/// Library of NVIDIA's that this program loads at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LibraryKind {
    /// CUDA driver (`libcuda`).
    Driver,
    /// NVIDIA Management Library.
    Nvml,
    /// NVRTC, the runtime compiler for CUDA kernels.
    Nvrtc,
    /// cuBLASLt, a library of matrix products.
    CublasLt,
    /// NCCL, a library of collectives between GPUs.
    Nccl,
}

/// One path or name that was tried in the search for a CUDA library, and the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptFacts {
    /// Path of the file, or name given to the dynamic linker.
    pub place: String,
    /// Result of the attempt: `opened`, `no such file`, or the error of the dynamic linker.
    pub outcome: String,
}

/// End of the dynamic linker's message about a library that does not exist.
const NO_LIBRARY: &str = ": cannot open shared object file: No such file or directory";

impl AttemptFacts {
    /// The result in words.
    pub(crate) fn result(&self) -> Text {
        match &*self.outcome {
            "opened" => both("opened", "已打开").into(),
            "no such file" => both("no such file", "没有这个文件").into(),
            other => match other.strip_suffix(NO_LIBRARY) {
                Some(name) => Text::new(other, format!("{name}：没有这个共享库")),
                None => Text::literal(other),
            },
        }
    }

    /// Place and result, for evidence.
    pub(crate) fn sentence(&self) -> Text {
        let place = &self.place;
        text!("{place} ({})", "{place}（{}）", self.result())
    }
}

/// Facts about one GPU. Values that could not be read are absent and listed in `unread`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Gpu {
    /// CUDA's number of the GPU (device ordinal). `None` if the GPU is hidden from CUDA.
    pub ordinal: Option<u32>,
    /// Index of the GPU in PCI bus order, as in `nvidia-smi`.
    pub index: Option<u32>,
    /// Product name of the GPU.
    pub name: Option<String>,
    /// UUID of the GPU.
    pub uuid: Option<String>,
    /// PCI bus id of the GPU.
    pub pci_bus_id: Option<String>,
    /// CUDA compute capability as (major, minor).
    #[serde(serialize_with = "dotted")]
    pub compute_capability: Option<(u32, u32)>,
    /// Number of streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// Total memory of the GPU in bytes.
    pub memory_bytes: Option<u64>,
    /// Memory of the GPU that is in use by processes and the driver, in bytes.
    pub used_bytes: Option<u64>,
    /// Free memory of the GPU in bytes.
    pub free_bytes: Option<u64>,
    /// Processes other than this one that compute on the GPU.
    pub processes: Option<Vec<GpuProcess>>,
    /// GPU utilization: percentage of the driver's last sampling period in which a kernel ran.
    pub utilization_percent: Option<u32>,
    /// PCI Express link between the GPU and the host.
    pub pcie: Pcie,
    /// Number of active NVLink connections of the GPU.
    pub nvlinks: Option<u32>,
    /// CUDA ordinals of the GPUs whose memory this GPU can access directly (peer access).
    pub peers: Option<Vec<u32>>,
    /// Number of uncorrected ECC errors in the GPU's memory since the driver was loaded.
    pub uncorrected_ecc_errors: Option<u64>,
    /// Whether the GPU will replace a faulty row of its memory (row remapping) at its next reset.
    pub is_row_remap_pending: Option<bool>,
    /// Whether the GPU failed to replace a faulty row of its memory (row remapping).
    pub has_row_remap_failed: Option<bool>,
    /// Errors of the values of this GPU that could not be read, one text each.
    pub unread: Vec<String>,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct GpuProcess {
    /// Process id, as the driver sees it.
    pub pid: u32,
    /// GPU memory that the process uses in bytes, if the driver reports it.
    pub used_bytes: Option<u64>,
}

/// Generation and width of the PCI Express link between a GPU and the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Pcie {
    /// Current PCI Express generation of the link. It drops while the GPU is idle.
    pub generation: Option<u32>,
    /// Highest PCI Express generation that the link supports.
    pub max_generation: Option<u32>,
    /// Current number of PCI Express lanes of the link.
    pub width: Option<u32>,
    /// Highest number of PCI Express lanes that the link supports.
    pub max_width: Option<u32>,
}

impl Cuda {
    /// Why CUDA shows no GPU, in words. Messages of the driver itself are English.
    pub(crate) fn problem_text(&self) -> Option<Text> {
        let problem = self.problem.as_deref()?;
        let whole = [
            (
                "the NVIDIA driver (libcuda.so.1) is not installed or not visible in this container",
                "没有安装 NVIDIA 驱动（libcuda.so.1），或它在此容器中不可见",
            ),
            (
                "the driver is installed but shows no GPU (CUDA_VISIBLE_DEVICES empty, or none in this container)",
                "已安装驱动，但它没有显示 GPU（CUDA_VISIBLE_DEVICES 为空，或此容器中没有 GPU）",
            ),
            (
                "libcuda.so.1 is the toolkit's stub, not the driver's; put the driver's folder first",
                "libcuda.so.1 是 toolkit 的桩库，而不是驱动的库；请把驱动的目录放在最前",
            ),
            ("this build has no CUDA support", "此构建不支持 CUDA"),
        ];
        let starts = [
            ("the driver does not start: ", "驱动无法启动："),
            (
                "the driver does not describe its GPUs: ",
                "驱动没有给出 GPU 的信息：",
            ),
        ];
        let whole = whole.iter().find(|(en, _)| *en == problem);
        let chinese = whole.map(|(_, zh)| (*zh).to_owned()).or_else(|| {
            let mut starts = starts.iter();
            starts.find_map(|(en, zh)| Some(format!("{zh}{}", problem.strip_prefix(en)?)))
        });
        Some(Text::new(
            problem,
            chinese.unwrap_or_else(|| problem.to_owned()),
        ))
    }
}

/// Formats a version (major, minor) as text, such as `13.0`.
pub(crate) fn version_text((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

fn english<S: Serializer>(text: &Option<Text>, serializer: S) -> Result<S::Ok, S::Error> {
    text.as_deref().serialize(serializer)
}

fn dotted<S: Serializer>(version: &Option<(u32, u32)>, serializer: S) -> Result<S::Ok, S::Error> {
    version.map(version_text).serialize(serializer)
}

impl Gpu {
    /// Label in messages: CUDA's ordinal, or the index in `nvidia-smi` for a GPU that is hidden from CUDA.
    pub(crate) fn label(&self) -> Text {
        match (self.ordinal, self.index) {
            (Some(ordinal), _) => Text::literal(format_args!("GPU {ordinal}")),
            (None, Some(index)) => text!("GPU {index} of nvidia-smi", "nvidia-smi 的 GPU {index}"),
            (None, None) => both("a GPU", "某块 GPU").into(),
        }
    }

    /// Product name in messages.
    pub(crate) fn product(&self) -> Text {
        match &self.name {
            Some(name) => Text::literal(name),
            None => both("unnamed", "（无名称）").into(),
        }
    }
}
