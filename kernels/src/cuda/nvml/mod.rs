//! What the NVIDIA management library tells of the machine's GPUs: the driver, who uses their
//! memory, how they are connected, whether their memory is sound.
//!
//! The library is opened at run time. Nothing here fails as a whole or panics: what cannot be read
//! is an [`NvmlError`] in its place. NVML sees every GPU of the machine, also those that
//! `CUDA_VISIBLE_DEVICES` hides from CUDA.

mod session;

use std::path::PathBuf;

use super::library::Attempt;
use session::Session;

/// File name of the library.
pub const FILE_NAME: &str = "libnvidia-ml.so.1";
/// Where Windows puts the library for its Linux guests.
const WSL: &str = "/usr/lib/wsl/lib";
/// Where container runtimes put it that do not tell the dynamic linker.
const CONTAINER: &str = "/usr/local/nvidia/lib64";

/// Why something could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvmlError {
    /// No library could be opened.
    #[error("libnvidia-ml.so.1 was not found")]
    NotFound,
    /// The library lacks the function.
    #[error("{function} is not in this library")]
    Missing {
        /// The function's name.
        function: &'static str,
    },
    /// A call failed.
    #[error("{function} failed with {code}: {text}")]
    Failed {
        /// The function's name.
        function: &'static str,
        /// NVML's code.
        code: u32,
        /// NVML's words for it.
        text: String,
    },
}

impl NvmlError {
    /// Whether the kernel module and the libraries are of different versions, as after an update
    /// without a restart.
    #[must_use]
    pub const fn is_version_mismatch(&self) -> bool {
        matches!(self, Self::Failed { code: 18, .. })
    }
}

/// A value or why there is none.
pub type Reading<T> = Result<T, NvmlError>;

/// Everything that was read.
#[derive(Debug)]
pub struct NvmlReport {
    /// The library that was opened.
    pub path: Option<PathBuf>,
    /// Every place looked at.
    pub attempts: Vec<Attempt>,
    /// Version of the installed driver, `580.65.06`.
    pub driver_version: Reading<String>,
    /// Every GPU of the machine, or why none can be read.
    pub gpus: Reading<Vec<NvmlGpu>>,
}

/// One GPU.
#[derive(Debug, Clone)]
pub struct NvmlGpu {
    /// NVML's number, in the order of the PCI bus.
    pub index: u32,
    /// Its name.
    pub name: Reading<String>,
    /// `GPU-…`.
    pub uuid: Reading<String>,
    /// `00000000:01:00.0`.
    pub pci_bus_id: Reading<String>,
    /// Major and minor compute capability.
    pub compute_capability: Reading<(u32, u32)>,
    /// Its memory.
    pub memory: Reading<GpuMemory>,
    /// Processes that compute on it.
    pub processes: Reading<Vec<GpuProcess>>,
    /// Its PCI Express link.
    pub pcie: PcieLink,
    /// Links to other GPUs that are up.
    pub active_nvlinks: Reading<u32>,
    /// Share of the last second in which it computed.
    pub utilization_percent: Reading<u32>,
    /// Uncorrected memory errors since the driver was loaded.
    pub uncorrected_ecc_errors: Reading<u64>,
    /// Rows of memory that were replaced by spare ones.
    pub remapped_rows: Reading<RemappedRows>,
}

/// Memory of one GPU in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// All of it.
    pub total_bytes: u64,
    /// In use by processes and by the driver itself.
    pub used_bytes: u64,
    /// Neither.
    pub free_bytes: u64,
}

/// A process that computes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its number, as the driver sees it.
    pub pid: u32,
    /// Memory it holds; unknown where the driver does not tell, as in some containers.
    pub used_bytes: Option<u64>,
}

/// A PCI Express link. The generation falls while the GPU rests; the width does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcieLink {
    /// Generation now.
    pub generation: Reading<u32>,
    /// Highest generation of GPU and slot.
    pub max_generation: Reading<u32>,
    /// Lanes now.
    pub width: Reading<u32>,
    /// Most lanes of GPU and slot.
    pub max_width: Reading<u32>,
}

/// Rows of memory that were replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemappedRows {
    /// After uncorrected errors.
    pub uncorrected: u32,
    /// A replacement waits for the next reset.
    pub is_pending: bool,
    /// There was no spare row.
    pub has_failed: bool,
}

/// Reads everything. Looks for the library in `directories`, then through the dynamic linker.
#[must_use]
pub fn read(directories: &[PathBuf]) -> NvmlReport {
    let mut attempts = Vec::new();
    let places = directories
        .iter()
        .map(|folder| folder.join(FILE_NAME))
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
                    path: Some(path),
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
