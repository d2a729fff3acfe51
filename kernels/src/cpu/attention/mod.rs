//! Softmax attention over tiles of keys.
//!
//! A forward task is one tile of queries of one head. It stores the scores of one tile of keys, a running maximum and
//! sum per row, and the unnormalized output. A backward task is one key/value head of one sequence. Its gradients
//! accumulate in a fixed order over the query heads that share it and over their tiles. Tiles start at the first row
//! of a sequence, so a sequence gives the same bits in any batch.

mod backward;
mod forward;

use super::gemm::here_space;
use super::matrix::{Floats, Matrix};
use crate::backend::AttentionArgs;
use crate::check::AttentionSizes;

/// Number of query rows per tile.
const Q_TILE: usize = 128;
/// Number of key rows per tile.
const K_TILE: usize = 256;
/// Limit of the backward's scratch over all threads, in elements (48 MiB). One task may exceed it.
const BACKWARD_SCRATCH: usize = 12 << 20;

pub(crate) use backward::space as backward_space;
pub(crate) use forward::space;

/// Query rows and key rows of one sequence.
#[derive(Clone, Copy)]
struct Sequence {
    q_start: usize,
    queries: usize,
    k_start: usize,
    keys: usize,
}

fn sequences(args: &AttentionArgs<'_>) -> Vec<Sequence> {
    let starts = args.q_starts.windows(2).zip(args.k_starts.windows(2));
    starts
        .map(|(q, k)| Sequence {
            q_start: q[0],
            queries: q[1] - q[0],
            k_start: k[0],
            keys: k[1] - k[0],
        })
        .collect()
}

impl Sequence {
    /// Number of keys that query `i` of the sequence attends to.
    fn visible(&self, i: usize, causal: bool) -> usize {
        if causal {
            (i + 1 + self.keys).saturating_sub(self.queries)
        } else {
            self.keys
        }
    }
}

/// A tile of queries of one sequence against a tile of its keys.
#[derive(Clone, Copy)]
struct Tile {
    sequence: Sequence,
    causal: bool,
    /// First query of the tile (counted in its sequence) and number of queries.
    q: (usize, usize),
    /// First key of the tile (counted in its sequence) and number of keys.
    k: (usize, usize),
}

impl Tile {
    /// Number of the tile's keys that its row `i` attends to.
    #[inline(always)]
    fn visible(&self, i: usize) -> usize {
        self.sequence
            .visible(self.q.0 + i, self.causal)
            .saturating_sub(self.k.0)
            .min(self.k.1)
    }
}

/// One head of a tensor `[rows, heads, d]`.
#[derive(Clone, Copy)]
struct Head<'a> {
    data: Floats<'a>,
    heads: usize,
    head: usize,
    d: usize,
}

impl<'a> Head<'a> {
    fn rows(&self, start: usize, rows: usize) -> Matrix<'a> {
        let stride = self.heads * self.d;
        let data = self.data.from(start * stride + self.head * self.d);
        Matrix::strided(data, rows, self.d, stride)
    }
}

/// Workspace of a tile's products: those with query rows and, if `backward`, those with key rows.
fn products_space(queries: usize, keys: usize, d: usize, backward: bool) -> usize {
    let forward = here_space(queries, d.max(keys));
    if backward {
        forward.max(here_space(keys, queries))
    } else {
        forward
    }
}

/// Sizes of the largest tiles of a call: queries and keys.
fn tile_extents(args: &AttentionArgs<'_>) -> (usize, usize) {
    let all = sequences(args);
    let queries = all.iter().map(|s| s.queries).max().unwrap_or(0);
    let keys = all.iter().map(|s| s.keys).max().unwrap_or(0);
    (queries.min(Q_TILE), keys.min(K_TILE))
}

/// Floating-point operations of a call, for the choice of the number of threads.
fn flops(args: &AttentionArgs<'_>, s: AttentionSizes) -> usize {
    let pairs: usize = sequences(args).iter().map(|q| q.queries * q.keys).sum();
    4 * pairs * s.h * s.d
}
