//! Memory of the GPUs of a run: what counts it, what there is, and what a rank takes of it.

use std::sync::Arc;

use kernels::Backend;

#[cfg(feature = "cuda")]
use super::Products;
use super::ranks_per_gpu;
use crate::config::RunConfig;

/// Batches other than the planned ones place their tensors otherwise, and holes between them are lost: an arena has
/// this share more than its plan, and this much at least. At published sizes, 360 random batches of nine configurations, none
/// larger than the planned one, needed at most 5.1 % more (MiniCPM-V 2.6, all trained; most often batches without a picture).
const SLACK_SHARE: u64 = 16;
const SLACK_BYTES: u64 = 16 << 20;

/// The devices that stand for the GPUs of `config` in its plan: one for each number of multiprocessors and each way to
/// multiply. None on the CPU.
#[cfg(feature = "cuda")]
pub(crate) fn counting(config: &RunConfig) -> Vec<Arc<dyn Backend>> {
    let kind = |gpu: &super::RunGpu| (gpu.multiprocessors, gpu.products == Products::CublasLt);
    let kinds: std::collections::BTreeSet<(u32, bool)> = config.gpus.iter().map(kind).collect();
    let device = |(multiprocessors, multiplies)| -> Arc<dyn Backend> {
        let counting = kernels::cuda::CudaBackend::counting;
        Arc::new(counting(multiprocessors, multiplies))
    };
    kinds.into_iter().map(device).collect()
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
