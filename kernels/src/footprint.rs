//! Memory that a process with a GPU takes beyond the pools, as counted by the memory plan. The numbers are
//! assumptions until a GPU has been measured (stage `probe` of `scripts/gpu-check.sh`).

/// Assumed GPU memory in bytes of one process outside its pool: CUDA context, loaded kernels, workspaces of
/// libraries. Memory plans count it for each process with a GPU.
pub const DEVICE_BYTES: u64 = 768 << 20;
/// Assumed GPU memory in bytes of NCCL's channels in one process. Memory plans count it if a run uses NCCL.
/// Stage `nccl` of `scripts/gpu-check.sh` measures it.
pub const NCCL_DEVICE_BYTES: u64 = 384 << 20;
/// Assumed host memory in bytes of one process with a GPU outside its pool: driver, kernel compiler, pinned
/// buffers for copies. Memory plans count it.
pub const HOST_BYTES: u64 = 512 << 20;
