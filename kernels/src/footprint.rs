//! What a process that uses a GPU takes beside what it asks for: a plan counts it, and stage `probe` of
//! `scripts/gpu-check.sh` measures it. Both are assumed until a GPU has been measured.

/// Bytes of a GPU's memory: context, loaded kernels, workspace of libraries.
pub const DEVICE_BYTES: u64 = 768 << 20;
/// Bytes of host memory: the driver's pages, the compiler of kernels, pinned chunks.
pub const HOST_BYTES: u64 = 512 << 20;
