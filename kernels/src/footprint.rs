//! Memory that a process with a GPU takes beyond the pools, as counted by the memory plan. The numbers are
//! assumptions until a GPU has been measured (stage `probe` of `scripts/gpu-check.sh`).

/// Bytes of GPU memory for context, loaded kernels and the workspaces of libraries.
pub const DEVICE_BYTES: u64 = 768 << 20;
/// Bytes of GPU memory for NCCL's channels, if a run uses NCCL. Stage `nccl` of `scripts/gpu-check.sh` measures them.
pub const NCCL_DEVICE_BYTES: u64 = 384 << 20;
/// Bytes of host memory for the driver, the kernel compiler and pinned chunks.
pub const HOST_BYTES: u64 = 512 << 20;
