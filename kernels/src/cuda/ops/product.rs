//! Matrix products: operands, choice of a tile, and launches. 16-bit operands use tensor cores, f32 operands do not.

use super::matmul_plain;
use super::tile::Tile;
use super::workspace::Workspace;
use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

/// Term `a b^T` of a [`Product`]: two matrices whose product is a sum over `k`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Term {
    /// Left operand, `[m, k]`, or `[k, m]` when `transpose_a`; 16-byte aligned (f32: 4).
    pub a: Address,
    /// Leading dimension of `a`: elements from the start of one stored row to the next.
    pub a_line: usize,
    /// Right operand, `[n, k]`, or `[k, n]` when `transpose_b`; 16-byte aligned (f32: 4).
    pub b: Address,
    /// Leading dimension of `b`: elements from the start of one stored row to the next.
    pub b_line: usize,
    /// Length of the sum (inner dimension of the product). If stored rows run along k, with a leading
    /// dimension that is a multiple of 8, and `k` is not one, the elements from `k` to the next multiple of 8
    /// must be zero.
    pub k: usize,
}

/// Operands of `y[m, n] = scale * (sum of a b^T over all terms) + bias[n]`, with sums in f32.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Product {
    /// Dtype of the operands and the bias: bf16, f16 or f32.
    pub dtype: DType,
    /// Dtype of the result `y`: `dtype` or f32.
    pub out: DType,
    /// Whether `a` of each term is stored as `[k, m]` instead of `[m, k]`.
    pub transpose_a: bool,
    /// Whether `b` of each term is stored as `[k, n]` instead of `[n, k]`. The weight `[n, k]` of a linear
    /// layer is *not* transposed.
    pub transpose_b: bool,
    /// Number of rows of `y`.
    pub m: usize,
    /// Number of columns of `y`.
    pub n: usize,
    /// Number of columns of `y` that `b` provides. The columns from there to `n` count as sums of zero.
    pub b_rows: usize,
    /// Terms `a b^T`, one or two, whose products are added. A LoRA layer has two: base weight and adapter.
    pub terms: [Option<Term>; 2],
    /// Bias, `[n]` in `dtype`, or [`Address::NULL`] for none.
    pub bias: Address,
    /// Factor on the sum of all terms, applied before the bias is added.
    pub scale: f32,
    /// Result, `[m, n]` in the dtype `out`.
    pub y: Address,
    /// Leading dimension of `y`: elements from the start of one row to the next.
    pub y_line: usize,
}

/// Division of a product among thread blocks: the tile of each block, and split-K.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Tile of `y` that one block computes, and how it does so.
    pub tile: Tile,
    /// Number of blocks that share a tile of `y`, each with a part of the sum (split-K).
    pub parts: u32,
}

/// Parameters of one compiled product kernel: dtype of the operands, dtype of the result, whether `a` and `b` are
/// transposed, and the tile.
pub type Variant = (DType, DType, [bool; 2], Tile);

/// Orientation of `y = x W^T`: whether `a` and `b` are transposed.
pub(super) const FORWARD: [bool; 2] = [false, false];
/// Orientation of `dx = dy W`: whether `a` and `b` are transposed.
pub(super) const INPUT_GRADIENT: [bool; 2] = [false, true];
/// Orientation of `dW = dy^T x`: whether `a` and `b` are transposed.
pub(super) const WEIGHT_GRADIENT: [bool; 2] = [true, true];

/// Whether layers use products of this kind. Other kinds get one tile each, so less needs to be compiled.
fn made_by_layers(out: DType, transpose: [bool; 2]) -> bool {
    match transpose {
        FORWARD | INPUT_GRADIENT => true,
        WEIGHT_GRADIENT => out == DType::F32,
        _ => false,
    }
}

/// Every kernel variant of products that [`Product::choose`] may select for 16-bit operands, once each.
#[must_use]
pub fn choosable() -> Vec<Variant> {
    let mut all = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for out in [dtype, DType::F32] {
            for transpose in [FORWARD, INPUT_GRADIENT, [true, false], WEIGHT_GRADIENT] {
                let mut tiles = vec![Tile::COMMON, Tile::COMMON_NARROW];
                if made_by_layers(out, transpose) {
                    let wide = Tile::WIDE[..1].iter().filter(|_| transpose[0]);
                    tiles = Tile::general().chain(Tile::NARROW).collect();
                    tiles.extend(wide);
                }
                all.extend(tiles.into_iter().map(|tile| (dtype, out, transpose, tile)));
            }
        }
    }
    all
}

/// Kernel module of a product with 16-bit operands `dtype` and a result `out`. `None` for a combination of
/// dtypes without a kernel.
#[must_use]
pub fn module(
    dtype: DType,
    out: DType,
    [transpose_a, transpose_b]: [bool; 2],
    tile: Tile,
) -> Option<Module> {
    let defines = defines(dtype, out, [transpose_a, transpose_b], tile)?;
    Some(Module::new(Family::LoraLinear, defines, &["linear"]))
}

/// Preprocessor defines of [`module`], as name and value. `None` for a combination of dtypes without a kernel.
pub(super) fn defines(
    dtype: DType,
    out: DType,
    [transpose_a, transpose_b]: [bool; 2],
    tile: Tile,
) -> Option<Vec<(&'static str, u32)>> {
    Some(vec![
        ("TYPE", element_type(dtype).filter(|_| dtype != DType::F32)?),
        (
            "OUT",
            element_type(out).filter(|_| out == dtype || out == DType::F32)?,
        ),
        ("TRANSPOSE_A", u32::from(transpose_a)),
        ("TRANSPOSE_B", u32::from(transpose_b)),
        ("BLOCK_M", tile.m),
        ("BLOCK_N", tile.n),
        ("BLOCK_K", tile.k),
        ("WARPS_M", tile.warps[0]),
        ("WARPS_N", tile.warps[1]),
        ("WARPS_K", tile.warps[2]),
        ("STAGES", tile.stages),
        ("BLOCKS", tile.blocks),
    ])
}

impl Product {
    /// Total length `k` of all terms.
    fn depth(&self) -> usize {
        self.terms.iter().flatten().map(|term| term.k).sum()
    }

    /// Chooses the tile, which depends on the GPU, and the number of parts of the sum (split-K), which does
    /// not. All tiles possible for a shape add in the same order, so results do not depend on the GPU.
    #[must_use]
    pub fn choose(&self, multiprocessors: u32) -> Choice {
        let sms = multiprocessors.max(1) as usize;
        if self.dtype == DType::F32 {
            let parts = self.parts(self.m.div_ceil(64) * self.n.div_ceil(64), 1024);
            return Choice {
                tile: self.quickest(matmul_plain::TILES, sms, parts),
                parts,
            };
        }
        let (tile, common, parts) = if self.n <= 64 {
            let parts = self.parts(self.m.div_ceil(32), 512);
            let tile = Tile::narrow(self.n, self.m, sms);
            (tile, Tile::COMMON_NARROW, parts)
        } else if self.m <= 64 && self.transpose_a && self.transpose_b {
            let parts = self.parts(self.n.div_ceil(64), 512);
            let high_enough = |tile: &Tile| tile.m as usize >= self.m;
            let tile = Tile::WIDE.into_iter().find(high_enough);
            (tile.unwrap_or(Tile::WIDE[2]), Tile::COMMON_NARROW, parts)
        } else {
            let parts = self.parts(self.m.div_ceil(64) * self.n.div_ceil(64), 1024);
            let tile = self.quickest(Tile::GENERAL, sms, parts);
            (tile, Tile::COMMON, parts)
        };
        // Parts are f32 sums.
        let out = if parts > 1 { DType::F32 } else { self.out };
        let transpose = [self.transpose_a, self.transpose_b];
        Choice {
            tile: match made_by_layers(out, transpose) {
                true => tile,
                false => common,
            },
            parts,
        }
    }

    /// The tile with the lowest estimated time on this number of multiprocessors.
    fn quickest<const N: usize>(&self, tiles: [(Tile, u64); N], sms: usize, parts: u32) -> Tile {
        let time = |(tile, weight): &(Tile, u64)| {
            let [m, n] = tile.grid(self.m, self.n);
            let rounds = (m * n * parts as usize).div_ceil(sms) as u64;
            rounds * u64::from(tile.m * tile.n) * weight
        };
        let best = tiles.into_iter().min_by_key(time);
        best.unwrap_or(tiles[0]).0
    }

    /// Number of parts, each at least `shortest` long, that gives about 128 blocks.
    fn parts(&self, blocks: usize, shortest: usize) -> u32 {
        let wanted = 128usize.div_ceil(blocks.max(1));
        wanted.min(self.depth() / shortest).clamp(1, 16) as u32
    }

    /// Launches that compute the product, in order: copies of 16-bit operands to rows of 16-byte multiples if
    /// needed, the product, and with split-K the sum of the parts. `None` when the dtypes have no kernel or
    /// an extent exceeds 2^31.
    #[must_use]
    pub fn launches(
        &self,
        choice: Choice,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let mut launches = Vec::new();
        if self.m == 0 || self.n == 0 {
            return Some(launches);
        }
        let mark = workspace.mark();
        let mut aligned = *self;
        let narrow = self.dtype != DType::F32;
        for term in aligned.terms.iter_mut().flatten().filter(|_| narrow) {
            let a_lines = if self.transpose_a { term.k } else { self.m };
            let b_lines = if self.transpose_b {
                term.k
            } else {
                self.b_rows
            };
            align(
                &mut launches,
                &mut term.a,
                &mut term.a_line,
                a_lines,
                workspace,
            )?;
            align(
                &mut launches,
                &mut term.b,
                &mut term.b_line,
                b_lines,
                workspace,
            )?;
        }
        if choice.parts > 1 {
            let bytes = choice.parts as usize * self.m * self.n * 4;
            let partial = workspace.take(bytes as u64);
            let sums = Self {
                out: DType::F32,
                bias: Address::NULL,
                scale: 1.0,
                y: partial,
                y_line: self.n,
                ..aligned
            };
            let parts = sums.push(choice, multiprocessors, &mut launches)?;
            launches.push(self.sum(partial, parts)?);
        } else {
            aligned.push(choice, multiprocessors, &mut launches)?;
        }
        workspace.release(mark);
        Some(launches)
    }

    /// Size in bytes of the workspace that [`Product::launches`] needs for this choice. 0 if it returns
    /// `None`.
    #[must_use]
    pub fn workspace_bytes(&self, choice: Choice) -> u64 {
        let mut space = Workspace::new(Address::NULL);
        self.launches(choice, 1, &mut space)
            .map_or(0, |_| space.bytes())
    }

    /// Adds the main launch. Returns the number of parts that are not empty.
    fn push(&self, choice: Choice, sms: u32, launches: &mut Vec<Launch>) -> Option<u32> {
        let tile = choice.tile;
        let steps: usize = self
            .terms
            .iter()
            .flatten()
            .map(|t| t.k.div_ceil(tile.k as usize))
            .sum();
        let steps_per_part = steps.div_ceil(choice.parts as usize).max(1);
        let parts = u32::try_from(steps.div_ceil(steps_per_part).max(1)).ok()?;
        let [rows, columns] = tile.grid(self.m, self.n);
        let mut args = Vec::with_capacity(19);
        for term in self.terms {
            let term = term.unwrap_or(Term {
                a: Address::NULL,
                a_line: 0,
                b: Address::NULL,
                b_line: 0,
                k: 0,
            });
            args.extend([
                Arg::Address(term.a),
                Arg::U64(term.a_line as u64),
                Arg::Address(term.b),
                Arg::U64(term.b_line as u64),
                int(term.k)?,
            ]);
        }
        args.extend([
            Arg::Address(self.bias),
            Arg::Address(self.y),
            Arg::U64(self.y_line as u64),
            int(self.m)?,
            int(self.n)?,
            int(self.b_rows)?,
            Arg::F32(self.scale),
            int(tile.group(sms).min(rows))?,
            int(steps_per_part)?,
        ]);
        let transpose = [self.transpose_a, self.transpose_b];
        let plain = self.dtype == DType::F32 && self.out == DType::F32;
        let (module, shared_bytes) = if plain {
            (
                matmul_plain::module(transpose, tile),
                matmul_plain::shared_bytes(tile),
            )
        } else {
            (
                module(self.dtype, self.out, transpose, tile)?,
                tile.shared_bytes(),
            )
        };
        launches.push(Launch {
            kernel: module.kernels()[0],
            module,
            grid: [u32::try_from(rows * columns).ok()?, 1, parts],
            threads: tile.threads(),
            shared_bytes,
            args,
        });
        Some(parts)
    }

    /// Launch that adds the `parts` partial sums in `partial` and writes `y`.
    pub(super) fn sum(&self, partial: Address, parts: u32) -> Option<Launch> {
        self.sum_to_rows(partial, parts, Address::NULL)
    }

    /// Launch as [`Product::sum`] makes, which stores row `i` of the result in row `rows[i]` of `y`; `rows` is i32
    /// `[m]`.
    pub(super) fn sum_to_rows(
        &self,
        partial: Address,
        parts: u32,
        rows: Address,
    ) -> Option<Launch> {
        Some(Launch {
            module: parts_module(self.dtype, self.out)?,
            kernel: "sum_parts",
            grid: [blocks(self.m * self.n), 1, 1],
            threads: PARTS_THREADS,
            shared_bytes: 0,
            args: vec![
                Arg::Address(partial),
                int(parts as usize)?,
                Arg::U64(self.m as u64),
                Arg::U64(self.n as u64),
                Arg::Address(self.bias),
                Arg::F32(self.scale),
                Arg::Address(self.y),
                Arg::U64(self.y_line as u64),
                Arg::Address(rows),
            ],
        })
    }
}

const PARTS_THREADS: u32 = 256;

/// Kernel module that adds the parts of a split sum (split-K). The one for bf16 also copies operands of
/// either 16-bit type to aligned rows. `None` when a dtype is not a float.
#[must_use]
pub fn parts_module(dtype: DType, out: DType) -> Option<Module> {
    let defines = [("TYPE", element_type(dtype)?), ("OUT", element_type(out)?)];
    let kernels: &[_] = match (dtype, out) {
        (DType::BF16, DType::BF16) => &["pad_lines", "sum_parts"],
        _ => &["sum_parts"],
    };
    Some(Module::new(Family::LinearParts, defines, kernels))
}

/// Copies an operand to lines that start at multiples of 16 bytes, if they do not already.
pub(super) fn align(
    launches: &mut Vec<Launch>,
    address: &mut Address,
    line: &mut usize,
    lines: usize,
    workspace: &mut Workspace,
) -> Option<()> {
    let padded = line.next_multiple_of(8);
    if padded != *line {
        let copy = workspace.take((lines * padded * 2) as u64);
        launches.push(Launch {
            module: parts_module(DType::BF16, DType::BF16)?,
            kernel: "pad_lines",
            grid: [blocks(lines * padded / 8), 1, 1],
            threads: PARTS_THREADS,
            shared_bytes: 0,
            args: vec![
                Arg::Address(*address),
                Arg::Address(copy),
                Arg::U64(lines as u64),
                int(*line)?,
                int(padded)?,
            ],
        });
        (*address, *line) = (copy, padded);
    }
    Some(())
}

pub(super) fn int(x: usize) -> Option<Arg> {
    i32::try_from(x).ok().map(Arg::I32)
}

/// Blocks for `n` items, one per thread and iteration. Enough for several waves on any GPU.
fn blocks(n: usize) -> u32 {
    n.div_ceil(PARTS_THREADS as usize).clamp(1, 132 * 16) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Variants that products of many sizes select, on small and large GPUs.
    fn chosen() -> HashSet<Variant> {
        const SIZES: [usize; 14] = [
            1, 7, 16, 24, 32, 40, 64, 100, 200, 512, 1000, 4040, 9000, 130_000,
        ];
        let mut all = HashSet::new();
        for dtype in [DType::BF16, DType::F16] {
            for (out, transpose) in [dtype, DType::F32].into_iter().flat_map(|out| {
                let both = [false, true];
                both.map(|a| both.map(|b| (out, [a, b])))
                    .into_iter()
                    .flatten()
            }) {
                for (m, n) in SIZES.into_iter().flat_map(|m| SIZES.map(|n| (m, n))) {
                    for (k, sms) in [(64, 16), (8192, 16), (64, 132), (8192, 46), (8192, 132)] {
                        let term = Term {
                            a: Address::NULL,
                            a_line: 0,
                            b: Address::NULL,
                            b_line: 0,
                            k,
                        };
                        let product = Product {
                            dtype,
                            out,
                            transpose_a: transpose[0],
                            transpose_b: transpose[1],
                            m,
                            n,
                            b_rows: n,
                            terms: [Some(term), None],
                            bias: Address::NULL,
                            scale: 1.0,
                            y: Address::NULL,
                            y_line: n,
                        };
                        let Choice { tile, parts } = product.choose(sms);
                        let out = if parts > 1 { DType::F32 } else { out };
                        all.insert((dtype, out, transpose, tile));
                    }
                }
            }
        }
        all
    }

    #[test]
    fn the_built_in_variants_are_exactly_those_that_are_chosen() {
        let listed = choosable();
        let unlike: HashSet<Variant> = listed.iter().copied().collect();
        assert_eq!(unlike.len(), listed.len(), "one is listed twice");
        let chosen = chosen();
        let missing: Vec<_> = chosen.difference(&unlike).collect();
        assert!(missing.is_empty(), "chosen but not listed: {missing:?}");
        let useless: Vec<_> = unlike.difference(&chosen).collect();
        assert!(useless.is_empty(), "listed but never chosen: {useless:?}");
    }
}
