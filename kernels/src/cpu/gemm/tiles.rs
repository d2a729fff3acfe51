//! Sums of [`CpuMath::Amx`](crate::CpuMath::Amx) in f32 arithmetic, and the layout of tiles.
//!
//! A chain is cut into groups of 32 `k`. A group has two chains of fused multiply-adds that start at zero, one over its
//! even and one over its odd `k`. Their sum is added to the chain. This is what `TDPBF16PS` computes (Intel,
//! "Architecture Instruction Set Extensions Programming Reference"), except that the instruction takes subnormal numbers
//! as zeros. So it is used where none can arise ([`Least`](super::kernel::Least)). An f32 operand is rounded to bf16
//! when it is packed.
//!
//! A packed operand consists of panels of 16 lanes. A panel has a tile of 1 KiB for each group: 16 × 16 pairs of bf16,
//! the even `k` of a pair in the lower half.
//!
//! ```text
//!            left operand               right operand
//!        k 0,1  2,3  …  30,31          lane 0   1  …  15
//! lane 0   ·     ·   …    ·     k  0,1    ·     ·  …   ·
//! lane 1   ·     ·   …    ·     k  2,3    ·     ·  …   ·
//!   …                             …
//! ```

use super::kernel::TileIo;
#[cfg(target_arch = "x86_64")]
use super::x86::amx;
use super::{portable, stretches};
use crate::DType;
use half::bf16;

/// Consecutive `k` of a group.
pub(super) const GROUP: usize = 32;
/// Pairs of consecutive `k` of a group.
pub(super) const PAIRS: usize = GROUP / 2;
/// Lanes of a panel.
pub(super) const SIDE: usize = 16;
/// 32-bit words of a tile: one for each lane and pair.
#[cfg(target_arch = "x86_64")]
pub(super) const WORDS: usize = SIDE * PAIRS;
/// Most rows that a function for tiles multiplies: two panels.
pub(super) const ROWS: usize = 2 * SIDE;
/// Least length of `k` for which tiles are used. The last group is filled up with zeros, so a shorter operand could need
/// more memory in tiles than in f32, for which the workspace is planned.
pub(super) const LEAST_DEPTH: usize = 2 * GROUP;

/// Instructions for products of tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tiles {
    /// No tiles: operands are packed as f32.
    None,
    /// Multiply-adds of f32 vectors on operands in tiles.
    #[cfg_attr(
        not(test),
        allow(dead_code, reason = "tests compare it with the definition")
    )]
    Software,
    /// `TDPBF16PS`.
    Amx,
}

/// Whether [`CpuMath::Amx`](crate::CpuMath::Amx) changes the sums of products of these types: one operand is bf16, the other
/// bf16 or f32.
pub(super) fn defines(dtypes: [DType; 2]) -> bool {
    dtypes.contains(&DType::BF16) && !dtypes.contains(&DType::F16)
}

/// Rounds operands of f32 to bf16.
pub(super) fn round(values: &mut [f32]) {
    for value in values {
        *value = bf16::from_f32(*value).to_f32();
    }
}

/// The fastest instructions of this processor whose bits are those of the definition.
pub(super) fn fastest() -> Tiles {
    #[cfg(target_arch = "x86_64")]
    if amx::is_usable() {
        return Tiles::Amx;
    }
    Tiles::None
}

/// Tile of operands of f32 in plain Rust.
///
/// # Safety
/// As [`super::kernel::Kernel::column`] for at most one panel of rows.
pub(super) unsafe fn grouped(
    rows: usize,
    cols: usize,
    depth: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    const ROWS: usize = portable::ROWS;
    // SAFETY: by the contract the panels have depth `depth`.
    let (a, b) = unsafe {
        (
            std::slice::from_raw_parts(a, ROWS * depth),
            std::slice::from_raw_parts(b, portable::COLS * depth),
        )
    };
    for i in 0..rows {
        let mut sum = [0.0f32; portable::COLS];
        for (first, len) in stretches(depth, GROUP) {
            // Those of the even and of the odd `k`.
            let mut halves = [[0.0f32; portable::COLS]; 2];
            for k in first..first + len {
                let right = &b[k * portable::COLS..][..portable::COLS];
                for (half, right) in halves[k % 2].iter_mut().zip(right) {
                    *half = a[k * ROWS + i].mul_add(*right, *half);
                }
            }
            for (j, sum) in sum.iter_mut().enumerate() {
                *sum += halves[0][j] + halves[1][j];
            }
        }
        for (j, sum) in sum.into_iter().enumerate().take(cols) {
            let place = place.at(i, j);
            // SAFETY: by the contract the rows have `cols` elements.
            unsafe { *place.to = factor.mul_add(sum, *place.from) };
        }
    }
}
