//! The GPUs of a run, as its configuration lists them.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A GPU of a run, as it was when the run was resolved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunGpu {
    /// CUDA's number among those that are visible.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its identity, where the driver tells.
    pub uuid: Option<String>,
    /// Streaming multiprocessors: work is cut for them.
    pub multiprocessors: u32,
    /// All of its memory.
    pub memory_bytes: u64,
    /// What nobody used.
    pub free_bytes: u64,
    /// CUDA's numbers of the GPUs whose memory it reads directly.
    #[serde(default)]
    pub peers: Vec<u32>,
    /// What multiplies matrices on it.
    #[serde(default)]
    pub products: Products,
}

/// What multiplies matrices on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Products {
    /// Our own kernels.
    #[default]
    Own,
    /// NVIDIA's library, except for what it does not take.
    CublasLt,
}

impl fmt::Display for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "own kernels",
            Self::CublasLt => "cuBLASLt",
        })
    }
}
