//! Matrix products of f32 operands: a [`Product`](super::product::Product) without tensor cores, in full f32.

use super::grouped;
use super::product::Variant;
use super::tile::Tile;
use crate::DType;
use crate::cuda::module::{Family, Module};

/// Square tiles, each with its time per element relative to the first. The smaller tile loads twice as much from
/// shared memory per product.
pub(super) const TILES: [(Tile, u64); 2] = [(square(128), 100), (square(64), 150)];

/// Tile of 256 threads, with two buffers of 8 elements of k.
const fn square(edge: u32) -> Tile {
    Tile {
        m: edge,
        n: edge,
        k: 8,
        warps: [8, 1, 1],
        stages: 2,
        blocks: 2,
    }
}

/// Padding after each line of a tile in shared memory, in elements. Lines then start at different banks.
const PADDING: u32 = 4;

/// Kernel module of a product of f32 operands, for one tile and one choice of transposed operands.
#[must_use]
pub fn module([transpose_a, transpose_b]: [bool; 2], tile: Tile) -> Module {
    let defines = defines([transpose_a, transpose_b], tile);
    Module::new(Family::MatmulPlain, defines, &["matmul_plain"])
}

/// Preprocessor defines of [`module`], as name and value.
pub(super) fn defines(
    [transpose_a, transpose_b]: [bool; 2],
    tile: Tile,
) -> Vec<(&'static str, u32)> {
    vec![
        ("TRANSPOSE_A", u32::from(transpose_a)),
        ("TRANSPOSE_B", u32::from(transpose_b)),
        ("BLOCK", tile.m),
    ]
}

/// Every kernel variant of products of f32 operands: both tiles, with `a` and `b` transposed or not.
#[must_use]
pub fn variants() -> Vec<Variant> {
    let orientations = [[false, false], [false, true], [true, false], [true, true]];
    let all = orientations
        .into_iter()
        .flat_map(|transpose| TILES.map(|(tile, _)| (DType::F32, DType::F32, transpose, tile)));
    all.collect()
}

/// Kernel modules of products of f32 operands: one for each of [`variants`], and those of the grouped
/// products.
#[must_use]
pub fn modules() -> Vec<Module> {
    let all = variants().into_iter();
    all.map(|(_, _, transpose, tile)| module(transpose, tile))
        .chain(grouped::plain_modules())
        .collect()
}

/// Shared memory per block in bytes.
pub(super) const fn shared_bytes(tile: Tile) -> u32 {
    tile.stages * tile.k * (tile.m + tile.n + 2 * PADDING) * 4
}
