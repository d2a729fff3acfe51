//! What can go wrong between us and a GPU.

use std::path::PathBuf;
use std::time::Duration;

use cudarc::driver::result::DriverError;

/// Failures of the CUDA layer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library is not there.
    #[error("{library} was not found; tried {tried}")]
    LibraryMissing {
        /// Its name.
        library: &'static str,
        /// The places, with what happened there.
        tried: String,
    },
    /// No GPU can be used.
    #[error("no GPU can be used: {reason}")]
    NoDevice {
        /// Why, with the next step.
        reason: String,
    },
    /// A kernel does not compile.
    #[error("module {module} does not compile for {arch}:\n{log}")]
    Compile {
        /// The module's name.
        module: String,
        /// For example `sm_86`.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// There is neither a compiler nor built-in PTX for a module.
    #[error(
        "module {module} is not among the built-in PTX and NVRTC was not found ({nvrtc}); \
         install it (Python package nvidia-cuda-nvrtc) or name its directory in TESSERA_CUDA_LIBS"
    )]
    NoImage {
        /// The module's name.
        module: String,
        /// What the search for NVRTC gave.
        nvrtc: String,
    },
    /// The driver refused a call.
    #[error("{call} failed: {code}")]
    Driver {
        /// What was asked for.
        call: String,
        /// The driver's name of the error.
        code: String,
    },
    /// A group of ranks did not come together in time.
    #[error(
        "NCCL had not joined rank {rank} with all {world} ranks after {} s: a rank did not come, or cannot be reached",
        waited.as_secs_f64()
    )]
    NotJoined {
        /// The rank that waited.
        rank: u32,
        /// Ranks of the group.
        world: u32,
        /// How long it waited.
        waited: Duration,
    },
    /// A file of the cache of compiled kernels cannot be written.
    #[error("{}: {error}", path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
}

/// Result of a CUDA operation.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Names the call in the error.
pub(crate) trait DriverResult<T> {
    fn during(self, call: impl Into<String>) -> Result<T>;
}

impl<T> DriverResult<T> for std::result::Result<T, DriverError> {
    fn during(self, call: impl Into<String>) -> Result<T> {
        self.map_err(|error| CudaError::Driver {
            call: call.into(),
            code: format!("{:?}", error.0),
        })
    }
}
