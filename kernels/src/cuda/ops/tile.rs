//! Partition of a matrix product into blocks.

/// Configuration of a matrix-product kernel: the part of the result `y` that one thread block computes, its
/// division among warps, and the pipeline that loads the operands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tile {
    /// Number of rows of `y` that a thread block computes.
    pub m: u32,
    /// Number of columns of `y` that a thread block computes.
    pub n: u32,
    /// Number of elements along `k` that each step of the pipeline loads and multiplies.
    pub k: u32,
    /// Number of warps of a block along m, n and k.
    pub warps: [u32; 3],
    /// Number of stages of the pipeline: buffers in shared memory for parts of `a` and `b`.
    pub stages: u32,
    /// Number of thread blocks that fit on a multiprocessor, as limited by 100 KB of shared memory or by
    /// registers.
    pub blocks: u32,
}

const fn tile(m: u32, n: u32, k: u32, warps: [u32; 3], stages: u32, blocks: u32) -> Tile {
    Tile {
        m,
        n,
        k,
        warps,
        stages,
        blocks,
    }
}

impl Tile {
    /// General tiles, large to small, each with its time per element relative to the first. The times are cycles of
    /// shared memory per mma on sm_90 (lora_linear.cu), where these exceed the cycles of the mma. For the small tiles
    /// they are lower, because older GPUs have a slower mma.
    pub(super) const GENERAL: [(Self, u64); 4] = [
        (tile(128, 256, 32, [2, 4, 1], 4, 1), 100),
        (tile(128, 128, 32, [2, 2, 1], 3, 2), 109),
        (tile(64, 128, 32, [2, 2, 1], 4, 3), 150),
        (tile(64, 64, 32, [2, 2, 1], 4, 4), 200),
    ];
    /// Tiles for few columns. Four warps share the sum, so the operand with many rows is read once.
    pub(super) const NARROW: [Self; 6] = [
        tile(64, 16, 128, [1, 1, 4], 4, 2),
        tile(32, 16, 128, [1, 1, 4], 4, 4),
        tile(64, 32, 128, [1, 1, 4], 4, 2),
        tile(32, 32, 128, [1, 1, 4], 4, 3),
        tile(64, 64, 128, [1, 1, 4], 3, 2),
        tile(32, 64, 128, [1, 1, 4], 3, 2),
    ];
    /// Tiles for few rows and a long sum.
    pub(super) const WIDE: [Self; 3] = [
        tile(16, 64, 128, [1, 1, 4], 4, 3),
        tile(32, 64, 128, [1, 1, 4], 3, 2),
        tile(64, 64, 128, [1, 1, 4], 3, 2),
    ];

    /// The general tile for products that get one tile only.
    pub(super) const COMMON: Self = Self::GENERAL[1].0;
    /// The narrow and wide tile for products that get one tile only.
    pub(super) const COMMON_NARROW: Self = Self::NARROW[5];

    /// The tiles of [`Tile::GENERAL`] without their times.
    pub(super) fn general() -> impl Iterator<Item = Self> {
        Self::GENERAL.into_iter().map(|(tile, _)| tile)
    }

    /// Narrow tile for `n` columns, at most 64, and `m` rows. Tall tiles read `b` less often; short tiles keep every
    /// multiprocessor busy.
    pub(super) fn narrow(n: usize, m: usize, multiprocessors: usize) -> Self {
        let tall = m.div_ceil(64) * 4 >= multiprocessors * 3;
        let mut fitting = Self::NARROW.iter().filter(|tile| tile.n as usize >= n);
        *fitting.nth(usize::from(!tall)).unwrap_or(&Self::NARROW[5])
    }

    /// Every tile that a product on tensor cores may use, once each.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::general().chain(Self::NARROW).chain([Self::WIDE[0]])
    }

    /// Number of threads per thread block: 32 for each warp.
    #[must_use]
    pub const fn threads(self) -> u32 {
        32 * self.warps[0] * self.warps[1] * self.warps[2]
    }

    /// Shared memory per thread block in bytes.
    #[must_use]
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.k * (self.m + self.n) * 2
    }

    /// Number of tiles along m and n.
    pub(super) const fn grid(self, m: usize, n: usize) -> [usize; 2] {
        [m.div_ceil(self.m as usize), n.div_ceil(self.n as usize)]
    }

    /// Rows of tiles that are processed together, so that blocks running at the same time form a square of `y`.
    pub(super) fn group(self, multiprocessors: u32) -> usize {
        let running = u64::from(multiprocessors * self.blocks);
        let square = running * u64::from(self.n) / u64::from(self.m);
        square.isqrt().max(1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offset of a 16-byte chunk, as `chunk_offset` of lora_linear.cu.
    fn chunk_offset(chunks: usize, line: usize, chunk: usize) -> usize {
        let lines_per_128 = if chunks < 8 { 8 / chunks } else { 1 };
        let mask = chunks.min(8) - 1;
        (line * chunks + (chunk ^ ((line / lines_per_128) & mask))) * 16
    }

    /// Whether eight 16-byte accesses are conflict-free: one pass over the 32 banks, each access in a different
    /// eighth.
    fn free_of_conflicts(offsets: impl Iterator<Item = usize>) -> bool {
        let mut eighths: Vec<usize> = offsets.map(|at| at / 16 % 8).collect();
        eighths.sort_unstable();
        eighths == [0, 1, 2, 3, 4, 5, 6, 7]
    }

    #[test]
    fn tiles_are_copied_and_read_without_bank_conflicts() {
        for tile in Tile::all() {
            for chunks in [tile.k / 8, tile.m / 8, tile.n / 8] {
                let chunks = chunks as usize;
                for line in (0..64).step_by(8) {
                    for chunk in 0..chunks {
                        let rows = (line..line + 8).map(|l| chunk_offset(chunks, l, chunk));
                        assert!(free_of_conflicts(rows), "ldmatrix, {chunks} chunks");
                    }
                }
                for first in (0..64 * chunks).step_by(8) {
                    let row = first..first + 8;
                    let row = row.map(|i| chunk_offset(chunks, i / chunks, i % chunks));
                    assert!(free_of_conflicts(row), "copy, {chunks} chunks");
                }
            }
        }
    }

    #[test]
    fn tiles_fit_into_the_smallest_shared_memory() {
        for tile in Tile::all() {
            let resident = tile.blocks * (tile.shared_bytes() + 1024);
            assert!(tile.shared_bytes() <= 101_376, "{tile:?}");
            // Two blocks of the common tile share a multiprocessor with 100 KB.
            assert!(
                tile.m * tile.n != 128 * 128 || resident <= 102_400,
                "{tile:?}"
            );
        }
    }
}
