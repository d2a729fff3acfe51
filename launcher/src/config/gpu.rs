//! The GPUs of a run, as its configuration lists them.

#[cfg(feature = "cuda")]
use kernels::cuda::device_kind::{AttentionBackward, DeviceKind};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One GPU of a run, as found when the configuration was resolved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunGpu {
    /// CUDA device ordinal among the visible GPUs.
    pub ordinal: u32,
    /// Product name of the GPU, as CUDA or NVML reports it.
    pub name: String,
    /// UUID of the GPU, if the driver reports one.
    pub uuid: Option<String>,
    /// Number of streaming multiprocessors. Kernels split their work accordingly.
    pub multiprocessors: u32,
    /// CUDA compute capability as (major, minor), if known. Tiles and the use of cuBLASLt depend on it.
    #[serde(default)]
    pub compute_capability: Option<(u32, u32)>,
    /// Total memory of the GPU in bytes.
    pub memory_bytes: u64,
    /// Memory of the GPU in bytes that was free when the configuration was resolved; the total if unknown.
    pub free_bytes: u64,
    /// CUDA ordinals of the GPUs whose memory this GPU can access directly (peer access).
    #[serde(default)]
    pub peers: Vec<u32>,
    /// Implementation of matrix products (GEMM) on this GPU.
    #[serde(default)]
    pub products: Products,
    /// Whether one kernel computes attention's backward on this GPU.
    #[serde(default)]
    pub fused_attention_backward: bool,
}

#[cfg(feature = "cuda")]
impl RunGpu {
    /// What the choice of kernels depends on.
    pub(crate) fn kind(&self) -> DeviceKind {
        DeviceKind {
            multiprocessors: self.multiprocessors,
            compute_capability: self.compute_capability,
            has_library: self.products == Products::CublasLt,
            attention_backward: match self.fused_attention_backward {
                true => AttentionBackward::Fused,
                false => AttentionBackward::Split,
            },
        }
    }
}

/// Implementation of matrix products (GEMM) on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Products {
    /// The kernels of this project.
    #[default]
    Own,
    /// cuBLASLt. Products that it does not support use the own kernels.
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
