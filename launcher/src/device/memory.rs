//! Memory of a run's GPUs: meta devices for dry runs, free memory, and the arena of a rank.

use std::sync::Arc;

use kernels::Backend;

use crate::config::RunConfig;

/// An arena is larger than its plan by this share (one part in 16), and by at least `SLACK_BYTES`, if the memory is
/// free. Evaluation allocates in an order of its own: where smaller blocks take the hole of a freed one, the next of its
/// size needs as much again. The largest of these is the library's scratch memory, 32 MiB and its alignment.
const SLACK_SHARE: u64 = 16;
const SLACK_BYTES: u64 = 33 << 20;

/// Meta devices that stand for the GPUs of `config` in a dry run: one per kind. Empty on the CPU.
#[cfg(feature = "cuda")]
pub(crate) fn counting(config: &RunConfig) -> Vec<Arc<dyn Backend>> {
    let kind = |gpu: &crate::config::RunGpu| gpu.kind();
    let kinds: std::collections::BTreeMap<_, &crate::config::RunGpu> =
        config.gpus.iter().map(|gpu| (kind(gpu), gpu)).collect();
    kinds.into_values().filter_map(counting_of).collect()
}

/// Meta device that stands for `gpu`.
#[cfg(feature = "cuda")]
pub(crate) fn counting_of(gpu: &crate::config::RunGpu) -> Option<Arc<dyn Backend>> {
    let counting = kernels::cuda::CudaBackend::counting;
    Some(Arc::new(counting(gpu.kind())))
}

/// A build without CUDA has no meta device for GPUs.
#[cfg(not(feature = "cuda"))]
pub(crate) fn counting_of(_gpu: &crate::config::RunGpu) -> Option<Arc<dyn Backend>> {
    None
}

/// A build without CUDA has no runs on GPUs.
#[cfg(not(feature = "cuda"))]
pub(crate) fn counting(_config: &RunConfig) -> Vec<Arc<dyn Backend>> {
    Vec::new()
}

/// Bytes that each rank may use on the GPU with the least free memory; `None` on the CPU.
pub(crate) fn free_bytes(config: &RunConfig) -> Option<u64> {
    let least = config.gpus.iter().map(|gpu| gpu.free_bytes).min()?;
    Some(least / config.ranks_per_gpu() as u64)
}

/// Bytes of the arena of a rank whose plan needs `planned` bytes, when at most `most` are free.
pub(crate) fn arena_bytes(planned: u64, most: Option<u64>) -> u64 {
    let wanted = planned + (planned / SLACK_SHARE).max(SLACK_BYTES);
    wanted.min(most.unwrap_or(u64::MAX)).max(planned)
}
