//! Choice of the kernel family for a call, and tiling of its sequences.

use crate::DType;
use crate::cuda::device_kind::AttentionBackward;

/// Largest head dim of both families.
const MAX_HEAD_DIM: u32 = 128;
/// Keys per block of the tensor-core family's `gradient_kv`.
const KEY_ROWS: u32 = 64;
/// Keys per block of its `gradients`.
const FUSED_KEY_ROWS: u32 = 128;
/// Shared memory that CUDA reserves in each block, in bytes.
const RESERVED_SHARED_BYTES: u32 = 1024;
/// Queries or keys per block of the plain family.
const PLAIN_ROWS: u32 = 16;

/// Sizes and options of an attention call, without the addresses of its tensors.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    /// Dtype of `q`, `k`, `v`, `out` and all gradients.
    pub dtype: DType,
    /// Number of query heads `h`, a multiple of `kv_heads`.
    pub heads: u32,
    /// Number of key/value heads `g`.
    pub kv_heads: u32,
    /// Elements per head `d`, from 1 to 128.
    pub head_dim: u32,
    /// Query row at which each sequence starts, then the total `t` (`cu_seqlens` in FlashAttention):
    /// ascending, first 0, last `t`.
    pub q_starts: &'a [usize],
    /// Key row at which each sequence starts, then the total `s` (`cu_seqlens` in FlashAttention): ascending,
    /// first 0, last `s`. It is as long as `q_starts`.
    pub k_starts: &'a [usize],
    /// Whether attention is causal: query `i` of a sequence with `n` queries attends to keys
    /// `0..=i + (keys - n)` of the sequence.
    pub causal: bool,
    /// Factor on the scores `q k^T` before the softmax, e.g. `1 / sqrt(d)`.
    pub scale: f32,
    /// Number of multiprocessors of the GPU. It affects the tile height, not results.
    pub multiprocessors: u32,
    /// Shared memory of a multiprocessor in bytes. It affects the tile height, not results.
    pub shared_bytes: u32,
    /// Kernels of the backward.
    pub backward: AttentionBackward,
}

/// Tiles of one side (queries or keys): pairs (sequence, tile of `rows` rows) in the table, in order of decreasing
/// work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tiles {
    /// Index of the first pair in the table.
    pub(super) offset: usize,
    pub(super) count: usize,
    pub(super) rows: u32,
}

/// Tiles of an attention call, for blocks that process queries and for blocks that process keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Tiling {
    /// Whether the kernels without tensor cores compute the call.
    pub(super) plain: bool,
    /// Table for the kernels: the starts of queries and of keys, then the tiles.
    pub(super) table: Vec<i32>,
    pub(super) queries: Tiles,
    pub(super) keys: Tiles,
}

impl Tiling {
    /// Tiles a call. `None` as for [`super::Plan::new`].
    pub(super) fn new(problem: &Problem<'_>) -> Option<Self> {
        let Problem {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *problem;
        let divides = heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads);
        if !divides || !(1..=MAX_HEAD_DIM).contains(&head_dim) {
            return None;
        }
        let mut table = checked_starts(problem.q_starts)?;
        table.extend(checked_starts(problem.k_starts)?);
        if problem.q_starts.len() != problem.k_starts.len() {
            return None;
        }
        let plain = !fits_tensor_cores(problem);
        let [query_rows, key_rows] = match (plain, problem.backward) {
            (true, _) => [PLAIN_ROWS; 2],
            (false, AttentionBackward::Split) => [tile_rows(problem), KEY_ROWS],
            (false, AttentionBackward::Fused) => [tile_rows(problem), FUSED_KEY_ROWS],
        };
        let mut add = |side, rows| {
            let offset = table.len();
            table.extend(tiles(problem, side, rows).as_flattened());
            let count = (table.len() - offset) / 2;
            Tiles {
                offset,
                count,
                rows,
            }
        };
        let queries = add(Side::Queries, query_rows);
        let keys = add(Side::Keys, key_rows);
        Some(Self {
            plain,
            table,
            queries,
            keys,
        })
    }
}

/// Whether the tensor-core family supports a call. It loads rows in pieces of 16 bytes, takes the maximum of the
/// scores before scaling them, and counts the elements of a tensor in u32.
fn fits_tensor_cores(problem: &Problem<'_>) -> bool {
    let width = u64::from(problem.head_dim);
    let q_elements = last(problem.q_starts) * u64::from(problem.heads) * width;
    let k_elements = last(problem.k_starts) * u64::from(problem.kv_heads) * width;
    matches!(problem.dtype, DType::BF16 | DType::F16)
        && problem.head_dim.is_multiple_of(8)
        && problem.scale.is_normal()
        && problem.scale > 0.0
        && q_elements.max(k_elements) < 1 << 32
}

/// Queries per block. 128 make the best use of keys in shared memory, but need at least two such blocks per
/// multiprocessor, both of them resident; else 64. One block of four warps would leave the tensor cores idle during
/// each softmax.
fn tile_rows(problem: &Problem<'_>) -> u32 {
    let tiles: usize = lengths(problem)
        .map(|(queries, _)| queries.div_ceil(128))
        .sum();
    let blocks = tiles as u64 * u64::from(problem.heads);
    let resident = 2 * (gradient_q_bytes(problem.head_dim, 128) + RESERVED_SHARED_BYTES);
    if blocks >= 2 * u64::from(problem.multiprocessors) && resident <= problem.shared_bytes {
        128
    } else {
        64
    }
}

/// Shared memory of `rows` rows, as `place` of attention.cu lays them out: swizzled, or an odd number of 16-byte pieces
/// apart.
pub(super) const fn rows_bytes(head_dim: u32, rows: u32) -> u32 {
    let pieces = head_dim / 8;
    rows * 16
        * if pieces.is_multiple_of(8) {
            pieces
        } else {
            pieces | 1
        }
}

/// Shared memory of the tensor-core family's forward: queries, a tile of keys and one of values.
pub(super) const fn forward_bytes(head_dim: u32, rows: u32) -> u32 {
    rows_bytes(head_dim, rows + 2 * 64)
}

/// Shared memory of `gradient_q`: queries and gradients of outputs, a tile of keys and one of values. It is the largest
/// of the kernels with this tile.
pub(super) const fn gradient_q_bytes(head_dim: u32, rows: u32) -> u32 {
    rows_bytes(head_dim, 2 * rows + 2 * 32)
}

#[derive(Clone, Copy)]
enum Side {
    Queries,
    Keys,
}

/// (sequence, tile) of every tile of one side. Tiles with the most rows of the other side come first. Tiles of keys of one
/// sequence ascend: the turns of `gradients` need it.
fn tiles(problem: &Problem<'_>, side: Side, rows: u32) -> Vec<[i32; 2]> {
    let rows = rows as usize;
    let mut all = Vec::new();
    for (sequence, (queries, keys)) in lengths(problem).enumerate() {
        let mine = match side {
            Side::Queries => queries,
            Side::Keys => keys,
        };
        for tile in 0..mine.div_ceil(rows) {
            let work = match (side, problem.causal) {
                (Side::Queries, false) => keys,
                (Side::Queries, true) => {
                    (queries.min((tile + 1) * rows) + keys).saturating_sub(queries)
                }
                (Side::Keys, false) => queries,
                // Queries from `tile * rows + queries - keys` on attend to a key of the tile.
                (Side::Keys, true) => queries.min(keys - tile * rows),
            };
            all.push((work, [as_i32(sequence), as_i32(tile)]));
        }
    }
    all.sort_by_key(|(work, _)| std::cmp::Reverse(*work));
    all.into_iter().map(|(_, tile)| tile).collect()
}

/// Number of queries and keys of each sequence.
pub(super) fn lengths(problem: &Problem<'_>) -> impl Iterator<Item = (usize, usize)> {
    let starts = problem.q_starts.windows(2).zip(problem.k_starts.windows(2));
    starts.map(|(q, k)| (q[1] - q[0], k[1] - k[0]))
}

fn checked_starts(starts: &[usize]) -> Option<Vec<i32>> {
    let ascending = starts.first() == Some(&0) && starts.is_sorted();
    let all = starts.iter().map(|start| i32::try_from(*start).ok());
    all.collect::<Option<_>>().filter(|_| ascending)
}

pub(super) fn last(starts: &[usize]) -> u64 {
    starts.last().map_or(0, |last| *last as u64)
}

/// Converts an index to `i32`. It fits, because there are no more sequences and tiles than rows.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "see above"
)]
fn as_i32(index: usize) -> i32 {
    index as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_tall_where_two_blocks_stay_resident() {
        let starts = [0, 4096];
        for (head_dim, kib, want) in [
            (72, 100, 128),
            (80, 100, 64),
            (128, 100, 64),
            (128, 164, 128),
            (128, 228, 128),
        ] {
            let problem = Problem {
                dtype: DType::BF16,
                heads: 16,
                kv_heads: 16,
                head_dim,
                q_starts: &starts,
                k_starts: &starts,
                causal: true,
                scale: 0.1,
                multiprocessors: 64,
                shared_bytes: kib << 10,
                backward: AttentionBackward::Split,
            };
            assert_eq!(tile_rows(&problem), want, "head dim {head_dim}, {kib} KB");
        }
        // Shared memory of the largest kernel at head dim 128: swizzled rows of 256 bytes.
        assert_eq!(gradient_q_bytes(128, 128), 81_920);
        assert_eq!(forward_bytes(80, 64), 192 * 176);
    }

    #[test]
    fn tiles_of_keys_ascend_within_a_sequence() {
        for causal in [true, false] {
            let problem = Problem {
                dtype: DType::BF16,
                heads: 1,
                kv_heads: 1,
                head_dim: 64,
                q_starts: &[0, 700, 710, 1_200],
                k_starts: &[0, 700, 1_400, 1_500],
                causal,
                scale: 0.1,
                multiprocessors: 64,
                shared_bytes: 100 << 10,
                backward: AttentionBackward::Fused,
            };
            let all = tiles(&problem, Side::Keys, FUSED_KEY_ROWS);
            for sequence in 0..3 {
                let own = all.iter().filter(|[of, _]| *of == sequence);
                assert!(own.map(|[_, tile]| tile).is_sorted(), "{all:?}");
            }
        }
    }
}
