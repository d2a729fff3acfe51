//! Where CUDA's libraries lie.

use std::path::PathBuf;

/// A library that is opened at run time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Library {
    /// The driver.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Collectives.
    Nccl,
}

impl Library {
    /// Every library.
    pub const ALL: [Self; 4] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl];

    /// Its file name without version.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so",
            Self::Nvrtc => "libnvrtc.so",
            Self::CublasLt => "libcublasLt.so",
            Self::Nccl => "libnccl.so",
        }
    }
}

/// Where to look, in this order: directories, the dynamic linker, `cuda_home/lib64`,
/// `/usr/local/cuda/lib64`, `nvidia/*/lib` of the Python packages.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Folders named by the user.
    pub directories: Vec<PathBuf>,
    /// An installed toolkit.
    pub cuda_home: Option<PathBuf>,
    /// Folders of Python packages.
    pub python_packages: Vec<PathBuf>,
}

/// One place that was looked at.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The path or the linker's name.
    pub place: String,
    /// What came of it.
    pub outcome: String,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which library.
    pub library: Library,
    /// Where it lies.
    pub path: Option<PathBuf>,
    /// Its version, where it tells.
    pub version: Option<String>,
    /// Every place looked at.
    pub attempts: Vec<Attempt>,
}
