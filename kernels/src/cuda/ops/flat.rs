//! Common grid arithmetic of kernels over flat arrays: eight elements per thread, from the first index at which all
//! operands are aligned.

use crate::DType;
use crate::cuda::launch::Address;

/// Number of threads per block of these kernels.
pub(super) const THREADS: u32 = 256;
/// Elements per thread and iteration.
const WIDTH: u64 = 8;
/// Alignment of a vector access in bytes.
const VECTOR_BYTES: u64 = 16;

/// Number of elements before the first index at which all operands are aligned to vectors. `n` if no such index
/// exists.
pub(super) fn head(operands: &[(Address, DType)], n: u64) -> u64 {
    let aligned = |head: u64| {
        operands.iter().all(|(Address(address), dtype)| {
            (address + head * dtype.size_bytes() as u64).is_multiple_of(VECTOR_BYTES)
        })
    };
    (0..WIDTH)
        .find(|head| aligned(*head))
        .map_or(n, |head| head.min(n))
}

/// Blocks of a grid over `n` elements, at most `most`.
pub(super) fn blocks(n: u64, most: u64) -> u32 {
    let rounds = n.div_ceil(WIDTH * u64::from(THREADS));
    rounds.clamp(1, most) as u32
}
