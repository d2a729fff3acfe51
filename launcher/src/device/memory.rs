//! Memory of the GPUs of a run: what counts it, what there is, and what a rank takes of it.

use std::sync::Arc;

use kernels::Backend;

use super::ranks_per_gpu;
#[cfg(feature = "cuda")]
use crate::config::Products;
use crate::config::RunConfig;

/// Where there is room, an arena has this share more than its plan, and this much at least: evaluation places its
/// tensors as they come.
const SLACK_SHARE: u64 = 16;
const SLACK_BYTES: u64 = 16 << 20;

/// The devices that stand for the GPUs of `config` in its plan: one for each number of multiprocessors and each way to
/// multiply. None on the CPU.
#[cfg(feature = "cuda")]
pub(crate) fn counting(config: &RunConfig) -> Vec<Arc<dyn Backend>> {
    let kind =
        |gpu: &crate::config::RunGpu| (gpu.multiprocessors, gpu.products == Products::CublasLt);
    let kinds: std::collections::BTreeMap<(u32, bool), &crate::config::RunGpu> =
        config.gpus.iter().map(|gpu| (kind(gpu), gpu)).collect();
    kinds.into_values().filter_map(counting_of).collect()
}

/// A device that stands for `gpu`.
#[cfg(feature = "cuda")]
pub(crate) fn counting_of(gpu: &crate::config::RunGpu) -> Option<Arc<dyn Backend>> {
    let multiplies = gpu.products == Products::CublasLt;
    let counting = kernels::cuda::CudaBackend::counting;
    Some(Arc::new(counting(gpu.multiprocessors, multiplies)))
}

/// Without CUDA nothing stands for a GPU.
#[cfg(not(feature = "cuda"))]
pub(crate) fn counting_of(_gpu: &crate::config::RunGpu) -> Option<Arc<dyn Backend>> {
    None
}

/// Without CUDA no run has GPUs.
#[cfg(not(feature = "cuda"))]
pub(crate) fn counting(_config: &RunConfig) -> Vec<Arc<dyn Backend>> {
    Vec::new()
}

/// Bytes of the GPU with the least that each rank on it may take; `None` on the CPU.
pub(crate) fn free_bytes(config: &RunConfig) -> Option<u64> {
    let least = config.gpus.iter().map(|gpu| gpu.free_bytes).min()?;
    Some(least / ranks_per_gpu(config) as u64)
}

/// The arena of a rank whose plan needs `planned` bytes where `most` can be had.
pub(crate) fn arena_bytes(planned: u64, most: Option<u64>) -> u64 {
    let wanted = planned + (planned / SLACK_SHARE).max(SLACK_BYTES);
    wanted.min(most.unwrap_or(u64::MAX)).max(planned)
}
