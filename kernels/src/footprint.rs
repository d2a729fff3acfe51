//! Memory that a process with a GPU takes beyond the pools, as counted by the memory plan. The numbers are
//! assumptions until a GPU has been measured (stage `probe` of `scripts/gpu-check.sh`).

/// Multiprocessors and assumed bytes of the GPU (H100) that [`device_bytes`] is scaled from. Reports name 0.6 to 0.8 GiB
/// for a CUDA process on it, and 0.4 GiB on an RTX 3090 with 82 multiprocessors, for which the scale gives 0.47 GiB.
const LARGE: (u64, u64) = (132, 768 << 20);
/// Least assumed bytes: driver structures and loaded kernels do not shrink with the GPU. No report gives it.
const LEAST_DEVICE_BYTES: u64 = 320 << 20;

/// Assumed GPU memory in bytes of one process outside its pool: CUDA context, loaded kernels, workspaces of libraries.
/// Memory plans count it for each process with a GPU. `multiprocessors` is the GPU's number: the context holds the
/// stacks of all threads that can be resident, and scratch memory per multiprocessor.
#[must_use]
pub const fn device_bytes(multiprocessors: u32) -> u64 {
    let bytes = LARGE.1 * multiprocessors as u64 / LARGE.0;
    if bytes < LEAST_DEVICE_BYTES {
        LEAST_DEVICE_BYTES
    } else {
        bytes
    }
}

/// Assumed GPU memory in bytes of NCCL's channels in one process. Memory plans count it if a run uses NCCL.
/// Stage `nccl` of `scripts/gpu-check.sh` measures it.
pub const NCCL_DEVICE_BYTES: u64 = 384 << 20;
/// Assumed host memory in bytes of one process with a GPU outside its pool: driver, kernel compiler, pinned
/// buffers for copies. Memory plans count it.
pub const HOST_BYTES: u64 = 512 << 20;

#[cfg(test)]
mod tests {
    use super::device_bytes;

    #[test]
    fn a_context_grows_with_the_multiprocessors() {
        let mib = |multiprocessors| device_bytes(multiprocessors) >> 20;
        assert_eq!([14, 82, 108, 132].map(mib), [320, 477, 628, 768]);
        assert!(device_bytes(148) > device_bytes(132));
    }
}
