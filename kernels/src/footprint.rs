//! What a process that uses a GPU takes beside what it asks for: a plan counts it, and stage `probe` of
//! `scripts/gpu-check.sh` measures it. All are assumed until a GPU has been measured.

/// Bytes of a GPU's memory: context, loaded kernels, workspace of libraries.
pub const DEVICE_BYTES: u64 = 768 << 20;
/// Bytes of a GPU's memory that NCCL takes for its channels, where a run exchanges through it; stage `nccl` measures them.
pub const NCCL_DEVICE_BYTES: u64 = 384 << 20;
/// Bytes of host memory: the driver's pages, the compiler of kernels, pinned chunks.
pub const HOST_BYTES: u64 = 512 << 20;
