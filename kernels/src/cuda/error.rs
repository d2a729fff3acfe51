//! Errors of the CUDA layer.

use std::path::PathBuf;
use std::time::Duration;

use cudarc::driver::sys::CUresult;

use super::driver::DriverError;

/// Error of the CUDA layer, e.g. a missing library, a failed driver call, or a kernel that does not compile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library was not found.
    #[error("{library} was not found; tried {tried}")]
    LibraryMissing {
        /// Name of the library.
        library: &'static str,
        /// Places where the library was searched for, with the result of each.
        tried: String,
    },
    /// The file of a library lacks a function.
    #[error("{library} in {} lacks the function {function}", path.display())]
    FunctionMissing {
        /// Name of the library.
        library: &'static str,
        /// Path of the opened file.
        path: PathBuf,
        /// Name of the function.
        function: &'static str,
    },
    /// No usable GPU.
    #[error("no GPU can be used: {reason}")]
    NoDevice {
        /// Why no GPU is usable, and what the user can do.
        reason: String,
    },
    /// A kernel does not compile.
    #[error("module {module} does not compile for {arch}:\n{log}")]
    Compile {
        /// Name of the module.
        module: String,
        /// Architecture, e.g. `sm_86`.
        arch: String,
        /// Output of the compiler.
        log: String,
    },
    /// No compiler was found and the module has no built-in PTX.
    #[error(
        "module {module} is not among the built-in PTX and NVRTC was not found ({nvrtc}); \
         install it (Python package nvidia-cuda-nvrtc) or name its directory in TESSERA_CUDA_LIBS"
    )]
    NoImage {
        /// Name of the module.
        module: String,
        /// Result of the search for NVRTC.
        nvrtc: String,
    },
    /// A call of the CUDA driver failed.
    #[error("{call} failed: {code}")]
    Driver {
        /// Description of the call.
        call: String,
        /// Name of the driver's error.
        code: String,
    },
    /// Not all ranks joined the NCCL communicator in time.
    #[error(
        "NCCL had not joined rank {rank} with all {world} ranks after {} s: a rank did not come, or cannot be reached",
        waited.as_secs_f64()
    )]
    NotJoined {
        /// Number of the rank that waited.
        rank: u32,
        /// Number of ranks of the communicator.
        world: u32,
        /// Time that it waited before it gave up.
        waited: Duration,
    },
    /// The cache of compiled kernels cannot be written.
    #[error("{}: {error}", path.display())]
    Cache {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
}

/// Name of a driver's error, with the remedy where the name does not tell it.
fn described(error: &DriverError) -> String {
    match error.is(CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND) {
        // The driver looks for its translator of PTX by bare name, so a driver that was opened by its path may miss it.
        true => format!(
            "{error}: the driver's libnvidia-ptxjitcompiler.so.1 translates the built-in kernels and is not where the \
             linker looks; add the directory of libcuda.so.1 to LD_LIBRARY_PATH, or install NVRTC, whose kernels need \
             no translation"
        ),
        false => error.to_string(),
    }
}

/// Result of a CUDA operation, with [`CudaError`] as its error.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Adds the name of the call to a driver's error.
pub(crate) trait DriverResult<T> {
    fn during(self, call: impl Into<String>) -> Result<T>;

    /// As [`DriverResult::during`], for calls so frequent that the text is made only for an error.
    fn during_call(self, call: impl FnOnce() -> String) -> Result<T>;
}

impl<T> DriverResult<T> for std::result::Result<T, DriverError> {
    fn during(self, call: impl Into<String>) -> Result<T> {
        self.map_err(|error| CudaError::Driver {
            call: call.into(),
            code: described(&error),
        })
    }

    fn during_call(self, call: impl FnOnce() -> String) -> Result<T> {
        self.or_else(|error| Err(error).during(call()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_translator_of_ptx_is_named_with_its_remedy() {
        let failed = |result: CUresult| {
            let (code, name) = (result as u32, format!("{result:?}"));
            Err::<(), _>(DriverError { code, name }).during("loading cast")
        };
        let error = failed(CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND).expect_err("fails");
        let text = error.to_string();
        for words in [
            "loading cast",
            "libnvidia-ptxjitcompiler.so.1",
            "LD_LIBRARY_PATH",
            "NVRTC",
        ] {
            assert!(text.contains(words), "{text}");
        }
        let error = failed(CUresult::CUDA_ERROR_OUT_OF_MEMORY).expect_err("fails");
        assert_eq!(
            error.to_string(),
            "loading cast failed: CUDA_ERROR_OUT_OF_MEMORY"
        );
    }
}
