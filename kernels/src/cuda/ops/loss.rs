//! Cross entropy over tiles of logits: statistics, losses, gradients of logits. The products around them are
//! [`product`](super::product)'s.

use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

const THREADS: u32 = 256;
/// Bytes of the statistics of one row.
pub const RUNNING_BYTES: u64 = 16;
/// Sums of eight stretches and the largest logits of eight warps.
const SHARED_BYTES: u32 = 8 * 8 + 8 * 4;

/// Only the gradients depend on a dtype: one module has the rest.
const KERNELS: &[&str] = &["gradients", "statistics", "losses"];

fn module(out: DType) -> Option<Module> {
    let defines = [("OUT", element_type(out)?)];
    let kernels = if out == DType::F32 {
        KERNELS
    } else {
        &KERNELS[..1]
    };
    Some(Module::new(Family::Loss, defines, kernels))
}

/// Every dtype of the gradients of logits.
#[must_use]
pub fn modules() -> Vec<Module> {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    dtypes.into_iter().filter_map(module).collect()
}

/// A tile of logits of some rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// f32 `[rows, cols]`.
    pub logits: Address,
    /// i32 `[rows]`, each inside the vocabulary.
    pub labels: Address,
    /// [`RUNNING_BYTES`] a row.
    pub running: Address,
    /// Rows.
    pub rows: u32,
    /// Columns of the tile.
    pub cols: u32,
    /// The vocabulary's number of the first column.
    pub first: u32,
}

/// Takes a tile into the statistics of its rows; the first tile starts them. Reads the logits once (they stay in the
/// second-level cache for the second look). `None` for extents beyond `int`, here and below.
#[must_use]
pub fn statistics(tile: &Tile) -> Option<Launch> {
    Some(Launch {
        module: module(DType::F32)?,
        kernel: "statistics",
        grid: [tile.rows.max(1), 1, 1],
        threads: THREADS,
        shared_bytes: SHARED_BYTES,
        args: vec![
            Arg::Address(tile.logits),
            Arg::Address(tile.labels),
            Arg::Address(tile.running),
            Arg::I32(tile.cols.try_into().ok()?),
            Arg::I32(tile.first.try_into().ok()?),
            Arg::I32((tile.first == 0).into()),
        ],
    })
}

/// `losses[rows_of[i]] = -log softmax(logits of row i)[label]` in f32, from statistics over the whole vocabulary;
/// `rows_of` is i32 `[rows]`.
#[must_use]
pub fn losses(running: Address, rows_of: Address, losses: Address, rows: u32) -> Option<Launch> {
    Some(Launch {
        module: module(DType::F32)?,
        kernel: "losses",
        grid: [rows.div_ceil(THREADS).max(1), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(running),
            Arg::Address(rows_of),
            Arg::Address(losses),
            Arg::I32(rows.try_into().ok()?),
        ],
    })
}

/// Gradients of `factor * sum(losses)` in `out [rows, line]`, of which the columns behind the tile's become zero. `out`
/// may be the logits themselves in f32, with lines as long.
#[must_use]
pub fn gradients(
    tile: &Tile,
    dtype: DType,
    out: Address,
    line: u32,
    factor: f32,
) -> Option<Launch> {
    Some(Launch {
        module: module(dtype)?,
        kernel: "gradients",
        grid: [tile.rows.max(1), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(tile.logits),
            Arg::Address(tile.labels),
            Arg::Address(tile.running),
            Arg::Address(out),
            Arg::I32(tile.cols.try_into().ok()?),
            Arg::I32(line.try_into().ok()?),
            Arg::I32(tile.first.try_into().ok()?),
            Arg::F32(factor),
        ],
    })
}
