//! What the choice of kernels for a GPU depends on. Results of our kernels depend on [`AttentionBackward`] only.

use super::matmul::LibraryUse;

/// Kind of GPU: properties that decide tiles, and which products a library computes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DeviceKind {
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// CUDA compute capability as (major, minor), if known.
    pub compute_capability: Option<(u32, u32)>,
    /// Whether a library for matrix products is present and chosen.
    pub has_library: bool,
    /// Kernels of attention's backward.
    pub attention_backward: AttentionBackward,
}

/// Kernels of attention's backward on tensor cores. Both give the same bits in every run, but not the bits of each other:
/// they add in another order. Calls without tensor cores always take [`AttentionBackward::Split`].
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AttentionBackward {
    /// A kernel for `dq` and a kernel for `dk` and `dv`. Both compute the weights: seven matrix products.
    #[default]
    Split,
    /// One kernel with five matrix products, as in FlashAttention-2. Its blocks take turns to add to `dq`, in f32.
    Fused,
}

impl DeviceKind {
    /// Products that the library computes.
    #[must_use]
    pub const fn library(self) -> LibraryUse {
        match self.has_library {
            true => LibraryUse::on(self.compute_capability),
            false => LibraryUse::Nothing,
        }
    }

    /// Shared memory of a multiprocessor in bytes (CUDA C++ Programming Guide, "Technical specifications per compute
    /// capability"). The smallest of all supported GPUs if the compute capability is unknown.
    #[must_use]
    pub const fn shared_bytes(self) -> u32 {
        match self.compute_capability {
            Some((8, 0 | 7)) => 164 << 10,
            Some((9 | 10, _)) => 228 << 10,
            _ => 100 << 10,
        }
    }
}
