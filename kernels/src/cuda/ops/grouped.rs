//! Grouped product: two linear layers over a partition of the rows, such as CogVLM's experts for text and images. One
//! launch reads each row in place, multiplies it by the weight of its expert, and writes the result in place.
//!
//! | result | launches | bytes read and written, 16-bit |
//! |---|---|---|
//! | `y[row] = x[row] W_g^T + bias_g` | one | `2 (t k + 2 n k + t n) + 4 t` |
//! | `dx[row] = dy[row] W_g` | one | `2 (t n + 2 n k + t k) + 4 t` |
//! | `dW_g = dy[rows_g]^T x[rows_g]` | one each | `2 t_g (n + k) + 4 n k + 4 t_g` |
//!
//! An adapter's term extends the sum as in [`super::lora_linear`]:
//! `y[row] = [x[row] | s[row]] [W_g | B_g]^T + bias_g`. Each expert has its own adapter rank, or no adapter.
//!
//! Gathering and scattering around separate products would read and write `x` and `y` once more: `4 t (k + n)` bytes.
//! A row has the same bits as in a product of its expert's rows alone without split-K, because every tile of that
//! width adds in the same order.

use super::product::{self, FORWARD, INPUT_GRADIENT, Product, WEIGHT_GRADIENT, align, int};
use super::tile::Tile;
use super::workspace::Workspace;
use super::{matmul_plain, product::Variant};
use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module};

/// One of the two experts in a [`Grouped`] product: its rows, weight, adapter and bias.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Group {
    /// Row numbers in `a` and `y` of the expert's rows, i32 `[m]`. The two experts must not share a row.
    pub rows: Address,
    /// Number of rows of the expert; may be 0.
    pub m: usize,
    /// Right operand of the expert (its weight), `[b_rows, k]`, or `[k, b_rows]` when `transpose_b`.
    pub b: Address,
    /// Number of output columns that `b` provides. Columns of `y` from there to `n` count as sums of zero.
    pub b_rows: usize,
    /// Right operand of the expert's adapter term (e.g. LoRA's matrix B), `[b_rows, r]`, or `[r, b_rows]`
    /// when `transpose_b`.
    pub low_b: Address,
    /// Rank of the expert's adapter, or 0 for none: number of columns of `s` that are read. Columns up to the
    /// next multiple of 8 must be zero.
    pub r: usize,
    /// Bias of the expert, `[n]`, or [`Address::NULL`] for none.
    pub bias: Address,
    /// Factor on the expert's sums, base weight and adapter together, applied before the bias is added.
    pub scale: f32,
}

impl Group {
    /// Expert without rows, with null operands.
    pub const EMPTY: Self = Self {
        rows: Address::NULL,
        m: 0,
        b: Address::NULL,
        b_rows: 0,
        low_b: Address::NULL,
        r: 0,
        bias: Address::NULL,
        scale: 1.0,
    };
}

/// Operands of `y[row] = scale_g * (a[row] b_g^T + s[row] low_b_g^T) + bias_g`, where `g` is the expert of
/// the row. Addresses are aligned to 16 bytes. All operands but `s` and `y` are dense.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Grouped {
    /// Dtype of all operands and the result.
    pub dtype: DType,
    /// Whether `b` of both experts is stored as `[k, n]` instead of `[n, k]`, as for `dx = dy W` of a layer.
    pub transpose_b: bool,
    /// Number of rows of `a` and `y`.
    pub t: usize,
    /// Number of columns of `y`.
    pub n: usize,
    /// Number of columns of `a`, over which each product is summed.
    pub k: usize,
    /// Left operand of both experts, `[t, k]`.
    pub a: Address,
    /// Left operand of the adapter term, `[t, s_line]`: the output of LoRA's matrix A, or in the backward its
    /// gradient. Not read without adapters.
    pub s: Address,
    /// Leading dimension of `s`: elements from the start of one row to the next. It must be a multiple of 8
    /// for 16-bit dtypes.
    pub s_line: usize,
    /// The two experts, each with its rows and right operands.
    pub groups: [Group; 2],
    /// Result, `[t, n]` with rows `y_line` elements apart.
    pub y: Address,
    /// Leading dimension of `y`: elements from the start of one row to the next.
    pub y_line: usize,
}

/// Operands of `y = a[rows]^T b[rows]` in f32, which is the weight gradient of one expert:
/// `y[m, n] = sum over i < k of a[rows[i], m] b[rows[i], n]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OfRows {
    /// Dtype of `a` and `b`. The result is f32.
    pub dtype: DType,
    /// Number of rows of `a` and `b`, of which `rows` selects some.
    pub t: usize,
    /// Number of columns of `a`, which are the rows of `y`.
    pub m: usize,
    /// Number of columns of `b`, which are the columns of `y`.
    pub n: usize,
    /// Row numbers in `a` and `b` of the rows to sum over, i32 `[k]`.
    pub rows: Address,
    /// Number of entries in `rows`, over which the product is summed; may be 0.
    pub k: usize,
    /// Left operand, `[t, m]` with rows `a_line` elements apart.
    pub a: Address,
    /// Leading dimension of `a`: elements from the start of one row to the next.
    pub a_line: usize,
    /// Right operand, `[t, n]` with rows `b_line` elements apart.
    pub b: Address,
    /// Leading dimension of `b`: elements from the start of one row to the next.
    pub b_line: usize,
    /// Result, dense f32 `[m, n]`.
    pub y: Address,
}

/// Every kernel variant (dtypes, orientation, tile) of grouped products that may be chosen for 16-bit
/// operands.
#[must_use]
pub fn choosable() -> Vec<Variant> {
    let mut all = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for transpose in [FORWARD, INPUT_GRADIENT] {
            let tiles = Tile::general().chain(Tile::NARROW);
            all.extend(tiles.map(|tile| (dtype, dtype, transpose, tile)));
        }
        all.extend(Tile::general().map(|tile| (dtype, DType::F32, WEIGHT_GRADIENT, tile)));
    }
    all
}

/// Every kernel variant of grouped products for f32 operands: both tiles in each orientation.
#[must_use]
pub fn plain_variants() -> Vec<Variant> {
    let uses = [FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT];
    let all = uses
        .into_iter()
        .flat_map(|transpose| matmul_plain::TILES.map(|(tile, _)| (transpose, tile)));
    all.map(|(transpose, tile)| (DType::F32, DType::F32, transpose, tile))
        .collect()
}

/// Kernel modules of grouped products with 16-bit operands: one for each variant in [`choosable`].
#[must_use]
pub fn modules() -> Vec<Module> {
    choosable().into_iter().filter_map(module).collect()
}

/// Kernel modules of grouped products with f32 operands: one for each variant in [`plain_variants`].
#[must_use]
pub fn plain_modules() -> Vec<Module> {
    plain_variants().into_iter().filter_map(module).collect()
}

/// Kernel module of one variant of grouped product. `None` when there is no kernel for its dtypes.
#[must_use]
pub fn module((dtype, out, transpose, tile): Variant) -> Option<Module> {
    let sum_of_rows = transpose == WEIGHT_GRADIENT;
    let grouped = ("ROUTED", 1 + u32::from(sum_of_rows));
    let (family, mut defines, kernels): (_, _, [&'static [&'static str]; 2]) =
        if dtype == DType::F32 {
            let defines = matmul_plain::defines(transpose, tile);
            let kernels: [&'static [&'static str]; 2] = [&["matmul_routed"], &["matmul_of_rows"]];
            (Family::MatmulPlain, defines, kernels)
        } else {
            let defines = product::defines(dtype, out, transpose, tile)?;
            let kernels: [&'static [&'static str]; 2] = [&["linear_routed"], &["linear_of_rows"]];
            (Family::LoraLinear, defines, kernels)
        };
    defines.push(grouped);
    Some(Module::new(
        family,
        defines,
        kernels[usize::from(sum_of_rows)],
    ))
}

fn tiles(dtype: DType) -> Vec<(Tile, u64)> {
    match dtype {
        DType::F32 => matmul_plain::TILES.to_vec(),
        _ => Tile::GENERAL.to_vec(),
    }
}

fn shared_bytes(dtype: DType, tile: Tile) -> u32 {
    match dtype {
        DType::F32 => matmul_plain::shared_bytes(tile),
        _ => tile.shared_bytes(),
    }
}

/// Whether the kernels' 32-bit line offsets reach the whole table.
fn reachable(t: usize, line: usize) -> bool {
    t.checked_mul(line)
        .is_some_and(|elements| elements < 1 << 35)
}

impl Grouped {
    /// Number of row tiles of both experts.
    fn tile_rows(&self, tile: Tile) -> usize {
        let tiles = self.groups.map(|group| group.m.div_ceil(tile.m as usize));
        tiles[0] + tiles[1]
    }

    /// Tile with the lowest estimated time on a GPU with this number of multiprocessors. All tiles give the
    /// same bits.
    #[must_use]
    pub fn choose(&self, multiprocessors: u32) -> Tile {
        let sms = multiprocessors.max(1) as usize;
        if self.dtype != DType::F32 && self.n <= 64 {
            return Tile::narrow(self.n, self.t, sms);
        }
        let tiles = tiles(self.dtype);
        let time = |(tile, weight): &(Tile, u64)| {
            let blocks = self.tile_rows(*tile) * self.n.div_ceil(tile.n as usize);
            blocks.div_ceil(sms) as u64 * u64::from(tile.m * tile.n) * weight
        };
        let best = tiles.iter().min_by_key(|tile| time(tile));
        best.unwrap_or(&tiles[0]).0
    }

    /// Launches of the grouped product, in order: copies of operands whose rows are not multiples of 16
    /// bytes, if any, then one launch for the product. Empty if the experts have no rows. `None` when the
    /// dtype has no kernel or an extent exceeds a grid's size.
    #[must_use]
    pub fn launches(
        &self,
        tile: Tile,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let mut launches = Vec::new();
        let rows = self.tile_rows(tile);
        if rows == 0 || self.n == 0 {
            return Some(launches);
        }
        let mark = workspace.mark();
        let (mut a, mut a_line) = (self.a, self.k);
        let tensor_cores = self.dtype != DType::F32;
        if tensor_cores {
            align(&mut launches, &mut a, &mut a_line, self.t, workspace)?;
        }
        if !reachable(self.t, a_line.max(self.s_line)) {
            return None;
        }
        let variant = (self.dtype, self.dtype, [false, self.transpose_b], tile);
        let module = module(variant)?;
        let columns = self.n.div_ceil(tile.n as usize);
        let mut args = vec![
            Arg::Address(a),
            Arg::U64(a_line as u64),
            Arg::Address(self.s),
            Arg::U64(self.s_line as u64),
            Arg::Address(self.y),
            Arg::U64(self.y_line as u64),
        ];
        for group in self.groups {
            // Number and length of an operand's lines, for a sum of `k` elements.
            let lines = |k: usize| match self.transpose_b {
                true => (k, group.b_rows),
                false => (group.b_rows, k),
            };
            let Group {
                mut b, mut low_b, ..
            } = group;
            let (b_lines, mut b_line) = lines(self.k);
            let (low_lines, mut low_line) = lines(group.r);
            if tensor_cores && group.m > 0 {
                align(&mut launches, &mut b, &mut b_line, b_lines, workspace)?;
                if group.r > 0 {
                    align(
                        &mut launches,
                        &mut low_b,
                        &mut low_line,
                        low_lines,
                        workspace,
                    )?;
                }
            }
            args.extend([
                Arg::Address(group.rows),
                Arg::Address(b),
                Arg::U64(b_line as u64),
                Arg::Address(low_b),
                Arg::U64(low_line as u64),
                Arg::Address(group.bias),
                int(group.m)?,
                int(group.b_rows)?,
                int(group.r)?,
                Arg::F32(group.scale),
            ]);
        }
        let in_group = tile.group(multiprocessors).min(rows);
        args.extend([int(self.n)?, int(self.k)?, int(in_group)?]);
        launches.push(Launch {
            kernel: module.kernels()[0],
            module,
            grid: [u32::try_from(rows * columns).ok()?, 1, 1],
            threads: tile.threads(),
            shared_bytes: shared_bytes(self.dtype, tile),
            args,
        });
        workspace.release(mark);
        Some(launches)
    }

    /// Size in bytes of the workspace that [`Grouped::launches`] needs, the same on every GPU. 0 if it
    /// returns `None`.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        let mut space = Workspace::new(Address::NULL);
        self.launches(self.choose(1), 1, &mut space)
            .map_or(0, |_| space.bytes())
    }
}

impl OfRows {
    /// Dense product with the same tile, parts and summation.
    fn dense(&self, y: Address) -> Product {
        Product {
            dtype: self.dtype,
            out: DType::F32,
            transpose_a: true,
            transpose_b: true,
            m: self.m,
            n: self.n,
            b_rows: self.n,
            terms: [None; 2],
            bias: Address::NULL,
            scale: 1.0,
            y,
            y_line: self.n,
        }
    }

    /// Chooses the tile, which depends on the GPU, and the number of parts that the sum is split into
    /// (split-K), which does not.
    #[must_use]
    pub fn choose(&self, multiprocessors: u32) -> product::Choice {
        let sms = multiprocessors.max(1) as usize;
        let blocks = self.m.div_ceil(64) * self.n.div_ceil(64);
        let wanted = 128usize.div_ceil(blocks.max(1));
        let parts = wanted.min(self.k / 1024).clamp(1, 16) as u32;
        let tiles = tiles(self.dtype);
        let time = |(tile, weight): &(Tile, u64)| {
            let [m, n] = tile.grid(self.m, self.n);
            let rounds = (m * n * parts as usize).div_ceil(sms) as u64;
            rounds * u64::from(tile.m * tile.n) * weight
        };
        let best = tiles.iter().min_by_key(|tile| time(tile));
        product::Choice {
            tile: best.unwrap_or(&tiles[0]).0,
            parts,
        }
    }

    /// Launches, in order: copies of operands whose rows are not multiples of 16 bytes, the product, and with
    /// split-K the sum of the parts. `None` when the dtype has no kernel or an extent exceeds a grid's size.
    #[must_use]
    pub fn launches(
        &self,
        choice: product::Choice,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let mut launches = Vec::new();
        if self.m == 0 || self.n == 0 {
            return Some(launches);
        }
        let mark = workspace.mark();
        let (mut a, mut a_line) = (self.a, self.a_line);
        let (mut b, mut b_line) = (self.b, self.b_line);
        if self.dtype != DType::F32 {
            align(&mut launches, &mut a, &mut a_line, self.t, workspace)?;
            align(&mut launches, &mut b, &mut b_line, self.t, workspace)?;
        }
        if !reachable(self.t, a_line.max(b_line)) {
            return None;
        }
        let tile = choice.tile;
        let steps = self.k.div_ceil(tile.k as usize);
        let steps_per_part = steps.div_ceil(choice.parts as usize).max(1);
        let parts = u32::try_from(steps.div_ceil(steps_per_part).max(1)).ok()?;
        let y = match parts {
            1 => self.y,
            _ => workspace.take((parts as usize * self.m * self.n * 4) as u64),
        };
        let [rows, columns] = tile.grid(self.m, self.n);
        let module = module((self.dtype, DType::F32, WEIGHT_GRADIENT, tile))?;
        launches.push(Launch {
            kernel: module.kernels()[0],
            module,
            grid: [u32::try_from(rows * columns).ok()?, 1, parts],
            threads: tile.threads(),
            shared_bytes: shared_bytes(self.dtype, tile),
            args: vec![
                Arg::Address(a),
                Arg::U64(a_line as u64),
                Arg::Address(b),
                Arg::U64(b_line as u64),
                Arg::Address(self.rows),
                Arg::Address(y),
                Arg::U64(self.n as u64),
                int(self.m)?,
                int(self.n)?,
                int(self.k)?,
                int(tile.group(multiprocessors).min(rows))?,
                int(steps_per_part)?,
            ],
        });
        if parts > 1 {
            launches.push(self.dense(self.y).sum(y, parts)?);
        }
        workspace.release(mark);
        Some(launches)
    }

    /// Size in bytes of the workspace that [`OfRows::launches`] needs, the same on every GPU. 0 if it returns
    /// `None`.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        let mut space = Workspace::new(Address::NULL);
        self.launches(self.choose(1), 1, &mut space)
            .map_or(0, |_| space.bytes())
    }
}
