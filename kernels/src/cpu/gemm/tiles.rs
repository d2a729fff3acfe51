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
use super::x86::{amx, avx2, avx512};
use super::{portable, stretches};
use crate::DType;
use half::bf16;

/// Length of a group of `k`.
pub(super) const GROUP: usize = 32;
/// Pairs of a group.
pub(super) const PAIRS: usize = GROUP / 2;
/// Lanes of a panel.
pub(super) const SIDE: usize = 16;
/// Words of a tile.
#[cfg(target_arch = "x86_64")]
pub(super) const WORDS: usize = SIDE * PAIRS;
/// Most rows that a function for tiles multiplies: two panels.
pub(super) const ROWS: usize = 2 * SIDE;
/// Depth from which tiles are used. Below, an operand whose groups are filled up could need more memory than one of f32.
pub(super) const LEAST_DEPTH: usize = 2 * GROUP;

/// Instructions for products of tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tiles {
    /// None: operands are packed as f32.
    None,
    /// f32 arithmetic.
    #[cfg_attr(
        not(test),
        allow(dead_code, reason = "tests compare it with the definition")
    )]
    Software,
    Amx,
}

/// Whether products of these types have the sums of AMX: those with an operand of bf16, and the other one not of f16.
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

/// The sums of `N` columns over this many pairs, for one row.
#[inline(always)]
fn sums<const N: usize>(
    pairs: usize,
    left: impl Fn(usize) -> [f32; 2],
    right: impl Fn(usize) -> [[f32; N]; 2],
) -> [f32; N] {
    let mut sum = [0.0f32; N];
    for (first, len) in stretches(pairs, PAIRS) {
        let (mut even, mut odd) = ([0.0f32; N], [0.0f32; N]);
        for pair in first..first + len {
            let (left, right) = (left(pair), right(pair));
            for j in 0..N {
                even[j] = left[0].mul_add(right[0][j], even[j]);
                odd[j] = left[1].mul_add(right[1][j], odd[j]);
            }
        }
        for j in 0..N {
            sum[j] += even[j] + odd[j];
        }
    }
    sum
}

/// `to = from + factor * sums` for up to `N` columns of one row.
///
/// # Safety
/// The row exists and has `cols` columns from `col` on.
#[inline(always)]
unsafe fn add<const N: usize>(sums: [f32; N], factor: f32, place: TileIo, cols: usize) {
    for (j, sum) in sums.into_iter().enumerate().take(cols) {
        // SAFETY: the caller's promise.
        unsafe {
            let from = *place.from.add(j);
            *place.to.add(j) = factor.mul_add(sum, from);
        }
    }
}

/// Tile of operands of f32, in panels of `R` rows and `C` columns.
///
/// # Safety
/// As [`super::kernel::Kernel::column`] for at most one panel of rows.
#[inline(always)]
unsafe fn grouped_of<const R: usize, const C: usize>(
    (rows, cols): (usize, usize),
    depth: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    // SAFETY: by the contract the panels have depth `depth`.
    let (a, b) = unsafe {
        (
            std::slice::from_raw_parts(a, R * depth),
            std::slice::from_raw_parts(b, C * depth),
        )
    };
    for i in 0..rows {
        for col in (0..cols).step_by(SIDE) {
            let left = |pair: usize| {
                [2 * pair, 2 * pair + 1].map(|k| if k < depth { a[k * R + i] } else { 0.0 })
            };
            let right = |pair: usize| {
                let mut both = [[0.0; SIDE]; 2];
                for (k, right) in (2 * pair..depth).zip(&mut both) {
                    right.copy_from_slice(&b[k * C + col..][..SIDE]);
                }
                both
            };
            let sums = sums::<SIDE>(depth.div_ceil(2), left, right);
            // SAFETY: by the contract the rows have `cols` elements.
            unsafe { add(sums, factor, place.at(i, col), (cols - col).min(SIDE)) };
        }
    }
}

/// Defines a function that a kernel calls for a tile, compiled for an instruction set.
macro_rules! compiled {
    ($(#[$meta:meta])* $name:ident, $($features:literal)?, $rows:expr, $cols:expr) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// As [`super::kernel::Kernel::column`] for at most one panel of rows.
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn $name(
            rows: usize,
            cols: usize,
            depth: usize,
            a: *const f32,
            b: *const f32,
            factor: f32,
            place: TileIo,
        ) {
            // SAFETY: the caller's promises.
            unsafe { grouped_of::<{ $rows }, { $cols }>((rows, cols), depth, a, b, factor, place) }
        }
    };
}

compiled! {
    /// Tile of f32 for any processor.
    grouped, , portable::ROWS, portable::COLS
}
#[cfg(target_arch = "x86_64")]
compiled! {
    /// Tile of f32 for AVX2.
    grouped_v3, "avx2,fma", avx2::ROWS, avx2::COLS
}
#[cfg(target_arch = "x86_64")]
compiled! {
    /// Tile of f32 for AVX-512.
    grouped_v4, "avx512f,avx512bw,avx512dq,avx512vl", avx512::ROWS, avx512::COLS
}

/// Up to 32 rows and 48 columns of operands in tiles.
///
/// # Safety
/// As [`super::kernel::Kernel::column`] for at most two panels of rows, on a processor with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn tile(
    rows: usize,
    cols: usize,
    steps: usize,
    a: *const f32,
    b: *const f32,
    factor: f32,
    place: TileIo,
) {
    let both = |word: u32| [word << 16, word & 0xffff_0000].map(f32::from_bits);
    for i in 0..rows {
        // SAFETY: by the contract the panels of these lanes have `steps` words a lane.
        let a: &[u32] = unsafe {
            let panel = a.add(i / SIDE * SIDE * steps);
            std::slice::from_raw_parts(panel.cast(), SIDE * steps)
        };
        for col in (0..cols).step_by(SIDE) {
            // SAFETY: as above.
            let b: &[u32] =
                unsafe { std::slice::from_raw_parts(b.add(col * steps).cast(), SIDE * steps) };
            let left =
                |pair: usize| both(a[pair / PAIRS * WORDS + i % SIDE * PAIRS + pair % PAIRS]);
            let right = |pair: usize| {
                let words = &b[pair * SIDE..][..SIDE];
                let mut halves = [[0.0; SIDE]; 2];
                for (j, word) in words.iter().enumerate() {
                    let [even, odd] = both(*word);
                    (halves[0][j], halves[1][j]) = (even, odd);
                }
                halves
            };
            let sums = sums::<SIDE>(steps, left, right);
            // SAFETY: by the contract the rows have `cols` elements.
            unsafe { add(sums, factor, place.at(i, col), (cols - col).min(SIDE)) };
        }
    }
}
