//! Attention over packed sequences, forward and backward: choice of kernels, tiles and launches.
//!
//! Symbols: `t` queries and `s` keys of all sequences together, `h` query heads, `g` key/value heads, `d` head dim.
//! Semantics are those of [`AttentionArgs`](crate::AttentionArgs).

mod fused;
mod tiles;

use self::fused::Fused;
pub use self::tiles::Problem;
use self::tiles::{Tiles, Tiling, forward_bytes, gradient_q_bytes, last, rows_bytes};
use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

const THREADS: u32 = 128;
/// Maximum blocks along y. Longer tile lists become several launches.
const MAX_TILES: usize = 65_535;
/// Query heads whose gradients one block of the tensor-core family sums. If more query heads share a key/value head,
/// they are split into parts, so a model with few key/value heads still fills a GPU. It is a constant, because the
/// split determines the order of a sum, which must not depend on the rest of the batch.
const HEADS_OF_A_PART: u32 = 3;
/// Rows of the other operand that a block of the plain family holds in shared memory.
const PLAIN_TILE: u32 = 32;

/// Head dims of the tested and built-in modules: those of the supported checkpoints, and 16, 32 and 48, which tiny models
/// of tests have. No checkpoint has 96, and no family takes more than 128.
pub const HEAD_DIMS: [u32; 8] = [16, 32, 48, 64, 72, 80, 112, 128];

const KERNELS: &[&str] = &[
    "forward_128",
    "forward_64",
    "output_products",
    "gradient_q_128",
    "gradient_q_64",
    "gradient_kv",
    "sum_parts",
    "clear_words",
    "gradients",
];
const PLAIN_KERNELS: &[&str] = &["forward", "output_products", "gradient_q", "gradient_kv"];

/// Kernel modules of attention on tensor cores that are tested: both 16-bit dtypes, with the head dims of
/// supported checkpoints and of tiny models. Any multiple of 8 up to 128 compiles.
#[must_use]
pub fn modules() -> Vec<Module> {
    let pairs = [DType::BF16, DType::F16].into_iter();
    let pairs = pairs.flat_map(|dtype| HEAD_DIMS.map(|head_dim| (dtype, head_dim)));
    pairs
        .filter_map(|(dtype, head_dim)| module(dtype, head_dim))
        .collect()
}

/// Kernel modules of attention without tensor cores: one per float dtype, for head dims up to 128.
#[must_use]
pub fn plain_modules() -> Vec<Module> {
    let dtypes = [DType::F32, DType::BF16, DType::F16].into_iter();
    dtypes.filter_map(plain_module).collect()
}

fn module(dtype: DType, head_dim: u32) -> Option<Module> {
    let defines = [("TYPE", element_type(dtype)?), ("HEAD_DIM", head_dim)];
    Some(Module::new(Family::Attention, defines, KERNELS))
}

fn plain_module(dtype: DType) -> Option<Module> {
    let defines = [("TYPE", element_type(dtype)?)];
    Some(Module::new(Family::AttentionPlain, defines, PLAIN_KERNELS))
}

/// Device addresses of the operands of attention, forward and backward, all aligned to 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// Queries of all sequences, `[t, h, d]`.
    pub q: Address,
    /// Keys of all sequences, `[s, g, d]`.
    pub k: Address,
    /// Values of all sequences, `[s, g, d]`.
    pub v: Address,
    /// Copy of [`Plan::table`] in device memory.
    pub table: Address,
}

/// Device addresses to which the forward writes its results. The backward reads them.
#[derive(Clone, Copy, Debug)]
pub struct Outputs {
    /// Attention output of all queries, `[t, h, d]`.
    pub out: Address,
    /// Log-sum-exp of the scaled scores of each query and head, f32 `[t, h]`.
    pub lse: Address,
}

/// Device addresses of the output gradient that the backward reads, and of the gradients that it writes.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// Gradient of the attention output, `[t, h, d]`. It is read.
    pub dout: Address,
    /// Gradient of the queries, `[t, h, d]`. It is written, like `dk` and `dv`.
    pub dq: Address,
    /// Gradient of the keys, `[s, g, d]`. It is written.
    pub dk: Address,
    /// Gradient of the values, `[s, g, d]`. It is written.
    pub dv: Address,
    /// Scratch memory of [`Plan::workspace_bytes`] bytes, aligned to 16 bytes.
    pub workspace: Address,
}

/// Partition of an attention call into thread blocks. It makes the call's launches and knows the size of
/// their workspace.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    module: Module,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    queries: u64,
    keys: u64,
    sequences: usize,
    causal: bool,
    scale: f32,
    tiling: Tiling,
    /// Whether one kernel computes the backward.
    fused: Option<Fused>,
}

impl Plan {
    /// Partitions an attention call into tiles. `None` when the dtype is not a float, a size is zero, the
    /// head dim is above 128, or `heads` is not a multiple of `kv_heads`. Also `None` when the starts are not
    /// ascending, differ in number, or exceed `i32`.
    #[must_use]
    pub fn new(problem: &Problem<'_>) -> Option<Self> {
        let tiling = Tiling::new(problem)?;
        let module = match tiling.plain {
            true => plain_module(problem.dtype)?,
            false => module(problem.dtype, problem.head_dim)?,
        };
        Some(Self {
            module,
            heads: problem.heads,
            kv_heads: problem.kv_heads,
            head_dim: problem.head_dim,
            queries: last(problem.q_starts),
            keys: last(problem.k_starts),
            sequences: problem.q_starts.len() - 1,
            causal: problem.causal,
            scale: problem.scale,
            fused: Fused::new(problem, &tiling),
            tiling,
        })
    }

    /// Table that the kernels read from device memory: starts of the sequences, and lists of tiles. It
    /// depends on starts, mask, heads and dtype only, so the layers of a model share one table.
    #[must_use]
    pub fn table(&self) -> &[i32] {
        &self.tiling.table
    }

    /// Whether the attention call runs on tensor cores.
    #[must_use]
    pub const fn uses_tensor_cores(&self) -> bool {
        !self.tiling.plain
    }

    /// Launches of the attention forward, in order. Empty if there are no queries.
    #[must_use]
    pub fn forward(&self, inputs: Inputs, outputs: Outputs) -> Vec<Launch> {
        let rows = self.tiling.queries.rows;
        let (kernel, shared_bytes) = match (self.tiling.plain, rows) {
            (true, _) => ("forward", self.plain_rows_bytes(rows + PLAIN_TILE * 2)),
            (false, 64) => ("forward_64", forward_bytes(self.head_dim, rows)),
            (false, _) => ("forward_128", forward_bytes(self.head_dim, rows)),
        };
        self.tiled(
            kernel,
            self.tiling.queries,
            self.heads,
            shared_bytes,
            |tiles| {
                let mut args = addresses([inputs.q, inputs.k, inputs.v, outputs.out, outputs.lse]);
                args.extend(self.sequences(inputs.table, tiles));
                args
            },
        )
    }

    /// Size in bytes of [`Gradients::workspace`]: `delta [t, h]` f32; if query heads are split into parts, each part's
    /// `dk` and `dv` in f32; for the fused kernel its turns and, unless every sequence has one tile of keys, `dq` in f32.
    #[must_use]
    pub const fn workspace_bytes(&self) -> u64 {
        self.split_bytes() + self.fused_bytes()
    }

    const fn split_bytes(&self) -> u64 {
        let parts = self.parts() as u64;
        let gradients = if parts > 1 {
            2 * parts * self.part_elements() * 4
        } else {
            0
        };
        self.delta_bytes() + gradients
    }

    /// Launches of the attention backward, in order. They write the gradients of queries, keys and values;
    /// `outputs` are those of the forward.
    #[must_use]
    pub fn backward(&self, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> Vec<Launch> {
        if let Some(fused) = self.fused {
            return self.fused_backward(fused, inputs, outputs, gradients);
        }
        let mut launches = Vec::from_iter(self.output_products(outputs, gradients));
        launches.extend(self.gradient_kv(inputs, outputs, gradients));
        launches.extend(self.sum_parts(gradients));
        launches.extend(self.gradient_q(inputs, outputs, gradients));
        launches
    }

    /// `delta = sum over d of out * dout`. Reads `2 t h d` elements.
    fn output_products(&self, outputs: Outputs, gradients: Gradients) -> Option<Launch> {
        let rows = self.queries * u64::from(self.heads);
        let pieces = self.head_dim / 8;
        let rows_of_a_block = match self.tiling.plain {
            true => THREADS / 32,
            false => THREADS / pieces.next_power_of_two().clamp(2, 16),
        };
        let mut args = addresses([outputs.out, gradients.dout, gradients.workspace]);
        args.push(Arg::U64(rows));
        if self.tiling.plain {
            args.push(int(self.head_dim));
        }
        let blocks = u32::try_from(rows.div_ceil(u64::from(rows_of_a_block))).ok()?;
        (blocks > 0).then(|| self.launch("output_products", [blocks, 1, 1], 0, args))
    }

    /// `dk` and `dv`: two products recompute the weights, two give the gradients.
    fn gradient_kv(&self, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> Vec<Launch> {
        let rows = self.tiling.keys.rows;
        let shared_bytes = match self.tiling.plain {
            true => self.plain_rows_bytes(2 * (rows + PLAIN_TILE)),
            // Keys and values, two stages of queries and gradients, weights, two stages of lse and delta.
            false => {
                rows_bytes(self.head_dim, 2 * rows + 2 * 2 * 32) + rows * 32 * 4 + 2 * 2 * 32 * 4
            }
        };
        let blocks = self.kv_heads * self.parts();
        self.tiled(
            "gradient_kv",
            self.tiling.keys,
            blocks,
            shared_bytes,
            |tiles| {
                let mut args = self.backward_args(inputs, outputs, gradients);
                args.extend(addresses([gradients.dk, gradients.dv]));
                if !self.tiling.plain {
                    args.extend(addresses(self.part_addresses(gradients)));
                    args.push(Arg::U64(self.part_elements()));
                }
                args.extend(self.sequences(inputs.table, tiles));
                if !self.tiling.plain {
                    args.push(int(self.parts()));
                }
                args
            },
        )
    }

    /// Launch that adds the partial sums of `dk` and `dv`.
    fn sum_parts(&self, gradients: Gradients) -> Option<Launch> {
        let [dk_parts, dv_parts] = self.part_addresses(gradients);
        let mut args = addresses([dk_parts, dv_parts, gradients.dk, gradients.dv]);
        args.extend([int(self.parts()), Arg::U64(self.part_elements())]);
        let blocks = u32::try_from(self.part_elements().div_ceil(u64::from(THREADS) * 4)).ok()?;
        (self.parts() > 1 && blocks > 0).then(|| self.launch("sum_parts", [blocks, 2, 1], 0, args))
    }

    /// `dq`: two products recompute the weights, one gives the gradient.
    fn gradient_q(&self, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> Vec<Launch> {
        let rows = self.tiling.queries.rows;
        let (kernel, shared_bytes) = match (self.tiling.plain, rows) {
            (true, _) => ("gradient_q", self.plain_rows_bytes(2 * (rows + PLAIN_TILE))),
            (false, 64) => ("gradient_q_64", gradient_q_bytes(self.head_dim, rows)),
            (false, _) => ("gradient_q_128", gradient_q_bytes(self.head_dim, rows)),
        };
        self.tiled(
            kernel,
            self.tiling.queries,
            self.heads,
            shared_bytes,
            |tiles| {
                let mut args = self.backward_args(inputs, outputs, gradients);
                args.push(Arg::Address(gradients.dq));
                args.extend(self.sequences(inputs.table, tiles));
                args
            },
        )
    }

    fn backward_args(&self, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> Vec<Arg> {
        let Inputs { q, k, v, .. } = inputs;
        addresses([q, k, v, gradients.dout, outputs.lse, gradients.workspace])
    }

    /// The kernels' `Sequences`, with the tiles from `first` on, and what f32 kernels want behind them: the head dim.
    fn sequences(&self, table: Address, first: usize) -> Vec<Arg> {
        let at = |index: usize| Address(table.0 + 4 * index as u64);
        let mut args = addresses([table, at(self.sequences + 1), at(first)]);
        args.extend([self.heads, self.kv_heads, self.causal.into()].map(int));
        args.push(Arg::F32(self.scale));
        if self.tiling.plain {
            args.push(int(self.head_dim));
        }
        args
    }

    /// Launches with `x` blocks for every tile. `args` gets the index of the first tile's pair.
    fn tiled(
        &self,
        kernel: &'static str,
        tiles: Tiles,
        x: u32,
        shared_bytes: u32,
        args: impl Fn(usize) -> Vec<Arg>,
    ) -> Vec<Launch> {
        let chunks = (0..tiles.count).step_by(MAX_TILES);
        chunks
            .map(|first| {
                #[expect(clippy::cast_possible_truncation, reason = "at most MAX_TILES")]
                let y = MAX_TILES.min(tiles.count - first) as u32;
                self.launch(
                    kernel,
                    [x, y, 1],
                    shared_bytes,
                    args(tiles.offset + 2 * first),
                )
            })
            .collect()
    }

    fn launch(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        shared_bytes: u32,
        args: Vec<Arg>,
    ) -> Launch {
        Launch {
            module: self.module.clone(),
            kernel,
            grid,
            threads: THREADS,
            shared_bytes,
            args,
        }
    }

    /// Shared memory of `rows` rows in the plain family, each an odd number of floats.
    const fn plain_rows_bytes(&self, rows: u32) -> u32 {
        rows * (self.head_dim | 1) * 4
    }

    /// Parts into which the query heads of one key/value head are split. The parts of `dk` and `dv` are summed at the
    /// end.
    const fn parts(&self) -> u32 {
        if self.tiling.plain {
            1
        } else {
            parts(self.heads, self.kv_heads)
        }
    }

    /// Number of elements of one partial sum of `dk` or `dv`: `s g d`.
    const fn part_elements(&self) -> u64 {
        self.keys * self.kv_heads as u64 * self.head_dim as u64
    }

    const fn delta_bytes(&self) -> u64 {
        (self.queries * self.heads as u64 * 4).next_multiple_of(16)
    }

    /// Addresses of the parts of `dk` and of `dv`.
    fn part_addresses(&self, gradients: Gradients) -> [Address; 2] {
        if self.parts() == 1 {
            return [Address::NULL; 2];
        }
        let first = gradients.workspace.0 + self.delta_bytes();
        let size = u64::from(self.parts()) * self.part_elements() * 4;
        [Address(first), Address(first + size)]
    }
}

const fn parts(heads: u32, kv_heads: u32) -> u32 {
    (heads / kv_heads).div_ceil(HEADS_OF_A_PART)
}

fn addresses<const N: usize>(all: [Address; N]) -> Vec<Arg> {
    all.into_iter().map(Arg::Address).collect()
}

const fn int(x: u32) -> Arg {
    Arg::I32(x.cast_signed())
}
