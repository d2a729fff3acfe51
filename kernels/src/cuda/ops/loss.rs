//! Cross entropy over tiles of logits: statistics, losses and gradients of logits. The products before and after are
//! in [`product`](super::product).

use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

const THREADS: u32 = 256;
/// Size in bytes of the running softmax statistics of one row of logits: maximum, sum of exponentials, logit
/// of the label.
pub const RUNNING_BYTES: u64 = 16;
/// Shared memory for the sums of eight stretches and the largest logits of eight warps.
const SHARED_BYTES: u32 = 8 * 8 + 8 * 4;

/// Kernels of the f32 module. Only the gradients depend on a dtype, so only this module has the others.
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

/// Kernel modules of the loss, for logit gradients in f32, bf16 and f16.
#[must_use]
pub fn modules() -> Vec<Module> {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    dtypes.into_iter().filter_map(module).collect()
}

/// Tile of logits: some rows (tokens), and consecutive columns of the vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// Logits of the tile, f32 `[rows, cols]`.
    pub logits: Address,
    /// Label of each row, i32 `[rows]`: an index into the whole vocabulary. Rows whose label is ignored
    /// (-100) must not be in a tile.
    pub labels: Address,
    /// Softmax statistics of the rows over the tiles so far, [`RUNNING_BYTES`] bytes per row.
    pub running: Address,
    /// Number of rows (tokens) of the tile.
    pub rows: u32,
    /// Number of columns (vocabulary entries) of the tile.
    pub cols: u32,
    /// Index of the tile's first column in the vocabulary.
    pub first: u32,
}

/// Launch that adds a tile of logits to the softmax statistics of its rows. A tile that begins at column 0 of
/// the vocabulary initializes the statistics, so it must come before the other tiles of its rows. Reads the
/// logits from memory once (they stay in the L2 cache for the second read). `None` if an extent exceeds
/// `int`.
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

/// Launch that writes the f32 loss of each of the `rows` rows, whose statistics must cover the whole
/// vocabulary: `losses[rows_of[i]] = -log softmax(logits of row i)[label]`. `rows_of`, i32 `[rows]`, are the
/// positions to write to. `None` if `rows` exceeds `int`.
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

/// Launch that writes the gradients of `factor * sum(losses)` with respect to the tile's logits to
/// `out [rows, line]`, in `dtype`. The statistics must cover the whole vocabulary. `line` is at least `cols`;
/// columns from `cols` on become zero. `out` may be the f32 logits themselves, if `line` is `cols`. `None` if
/// an extent exceeds `int` or `dtype` is not a float.
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
