//! What kernels over windows of elements share: eight elements a thread, behind the first at which all operands are
//! aligned.

use crate::DType;
use crate::cuda::launch::Address;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Elements a thread handles at a time.
const WIDTH: u64 = 8;
/// What a vector access is aligned to.
const VECTOR_BYTES: u64 = 16;

/// Elements of `n` in front of the first one at which all operands are aligned to vectors; all of them when there is
/// none.
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

/// Blocks of a grid over `n` elements.
pub(super) fn blocks(n: u64, most: u64) -> u32 {
    let rounds = n.div_ceil(WIDTH * u64::from(THREADS));
    rounds.clamp(1, most) as u32
}
