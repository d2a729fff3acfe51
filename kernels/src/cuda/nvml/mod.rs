//! Facts about the machine's GPUs from the NVIDIA Management Library (NVML): driver, processes, interconnect, memory
//! errors.
//!
//! The library is opened at run time. Nothing fails as a whole or panics: a value that cannot be read is an
//! [`NvmlError`]. NVML sees every GPU of the machine, including those that `CUDA_VISIBLE_DEVICES` hides from CUDA.

mod session;

use std::path::PathBuf;

use super::library::Attempt;
use session::Session;

/// File name of the NVML library (NVIDIA Management Library).
pub const FILE_NAME: &str = "libnvidia-ml.so.1";
/// Directory of the library on Windows' Linux guests (WSL).
const WSL: &str = "/usr/lib/wsl/lib";
/// Directory of the library in container runtimes that do not configure the dynamic linker.
const CONTAINER: &str = "/usr/local/nvidia/lib64";

/// Why a value could not be read from NVML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// The NVML library was not found or could not be opened.
    #[error("libnvidia-ml.so.1 was not found")]
    NotFound,
    /// The NVML library does not have the function.
    #[error("{function} is not in this library")]
    Missing {
        /// Name of the function.
        function: &'static str,
    },
    /// A call of an NVML function failed.
    #[error("{function} failed with {code}: {text}")]
    Failed {
        /// Name of the function.
        function: &'static str,
        /// NVML's error code.
        code: u32,
        /// NVML's error text.
        text: String,
    },
}

impl NvmlError {
    /// Whether NVML failed because the kernel module and the libraries have different versions, as after a
    /// driver update without a restart.
    #[must_use]
    pub const fn is_version_mismatch(&self) -> bool {
        matches!(self, Self::Failed { code: 18, .. })
    }
}

/// Value read from NVML, or why it could not be read.
pub type Reading<T> = Result<T, NvmlError>;

/// What NVML reports about the driver and every GPU of the machine.
#[derive(Debug)]
pub struct NvmlReport {
    /// Path of the opened NVML library, or `None` if none was opened.
    pub path: Option<PathBuf>,
    /// Every place where the search looked for the NVML library, in order.
    pub attempts: Vec<Attempt>,
    /// Version of the installed driver, e.g. `580.65.06`.
    pub driver_version: Reading<String>,
    /// All GPUs of the machine, or why none can be read.
    pub gpus: Reading<Vec<NvmlGpu>>,
}

/// What NVML reports about one GPU. Each value can fail to be read on its own.
#[derive(Debug, Clone)]
pub struct NvmlGpu {
    /// Number of the GPU in NVML, in PCI bus order. CUDA's ordinal can differ.
    pub index: u32,
    /// Product name of the GPU, e.g. `NVIDIA GeForce RTX 3090`.
    pub name: Reading<String>,
    /// Unique id of the GPU, as text that begins with `GPU-`.
    pub uuid: Reading<String>,
    /// PCI bus id of the GPU, e.g. `00000000:01:00.0`.
    pub pci_bus_id: Reading<String>,
    /// Major and minor compute capability, e.g. `(8, 6)`.
    pub compute_capability: Reading<(u32, u32)>,
    /// Total, used and free memory of the GPU in bytes.
    pub memory: Reading<GpuMemory>,
    /// Processes that have a compute context on the GPU.
    pub processes: Reading<Vec<GpuProcess>>,
    /// State of the GPU's PCI Express link.
    pub pcie: PcieLink,
    /// Number of active NVLink connections of the GPU.
    pub active_nvlinks: Reading<u32>,
    /// Percentage of the last sampling period (up to one second) in which a kernel ran on the GPU.
    pub utilization_percent: Reading<u32>,
    /// Number of uncorrected memory errors (ECC) of the GPU since the driver was loaded.
    pub uncorrected_ecc_errors: Reading<u64>,
    /// Rows of the GPU's memory that were replaced by spare rows after errors.
    pub remapped_rows: Reading<RemappedRows>,
}

/// Memory of one GPU when NVML was asked: total, used and free, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Total device memory in bytes.
    pub total_bytes: u64,
    /// Bytes of device memory in use by processes and by the driver itself.
    pub used_bytes: u64,
    /// Bytes of device memory that are not in use.
    pub free_bytes: u64,
}

/// Process that has a compute context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// Process id, as the driver sees it.
    pub pid: u32,
    /// GPU memory that the process uses, in bytes. `None` if the driver does not report it, as in some
    /// containers.
    pub used_bytes: Option<u64>,
}

/// State of a GPU's PCI Express link. The generation drops while the GPU is idle; the width does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcieLink {
    /// Current PCI Express generation of the link.
    pub generation: Reading<u32>,
    /// Highest PCI Express generation that GPU and slot support.
    pub max_generation: Reading<u32>,
    /// Current number of PCI Express lanes.
    pub width: Reading<u32>,
    /// Highest number of PCI Express lanes that GPU and slot support.
    pub max_width: Reading<u32>,
}

/// How many faulty rows of a GPU's memory were replaced by spare rows, and whether a replacement is pending
/// or failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemappedRows {
    /// Number of memory rows replaced after uncorrected errors.
    pub uncorrected: u32,
    /// Whether the replacement of a memory row takes effect only at the GPU's next reset.
    pub is_pending: bool,
    /// Whether the replacement of a memory row failed because no spare row was left.
    pub has_failed: bool,
}

/// Reads all values of the report. Searches for the NVML library in `directories`, then with the dynamic
/// linker, then in the directories of WSL and containers.
#[must_use]
pub fn read(directories: &[PathBuf]) -> NvmlReport {
    let mut attempts = Vec::new();
    let places = directories
        .iter()
        .map(|directory| directory.join(FILE_NAME))
        .chain([PathBuf::from(FILE_NAME), PathBuf::from(WSL).join(FILE_NAME)])
        .chain([PathBuf::from(CONTAINER).join(FILE_NAME)]);
    for path in places {
        let by_name = path.as_os_str() == FILE_NAME;
        let place = if by_name {
            format!("dynamic linker: {FILE_NAME}")
        } else {
            path.display().to_string()
        };
        let opened = if by_name || path.exists() {
            Session::open(&path)
        } else {
            Err("no such file".to_owned())
        };
        match opened {
            Ok(session) => {
                let outcome = "opened".to_owned();
                attempts.push(Attempt { place, outcome });
                let started = session.start();
                return NvmlReport {
                    path: Some(session.file().unwrap_or(path)),
                    attempts,
                    driver_version: started.clone().and_then(|()| session.driver_version()),
                    gpus: started.and_then(|()| session.gpus()),
                };
            }
            Err(outcome) => attempts.push(Attempt { place, outcome }),
        }
    }
    NvmlReport {
        path: None,
        attempts,
        driver_version: Err(NvmlError::NotFound),
        gpus: Err(NvmlError::NotFound),
    }
}
