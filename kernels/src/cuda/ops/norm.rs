//! RMS norm and layer norm over the last axis of `[rows, c]`, with the semantics of [`Backend`](crate::Backend).

use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};
use crate::{DType, RopeLayout};

/// Elements per chunk, the unit of work of a thread.
const CHUNK: u32 = 8;
const WARP: u32 = 32;
/// Threads per block, unless a row needs more.
const BLOCK_THREADS: u32 = 256;
/// Maximum number of threads that share a row.
const MAX_ROW_THREADS: u32 = 512;
/// Chunks that a thread holds in registers.
const FORWARD_CHUNKS: u32 = 4;
const BACKWARD_CHUNKS: u32 = 2;
const WIDE_BACKWARD_CHUNKS: u32 = 4;
/// Maximum blocks of the backward: two per multiprocessor of an H100. It bounds the partial sums. It is part of the
/// result's definition, so it is never read from the device; other GPUs lose 5 to 10 % of this kernel.
const BACKWARD_BLOCKS: u64 = 264;
/// Block of `sum_partials`: columns, and threads.
const SUM_COLUMNS: u32 = 32;
const SUM_THREADS: u32 = 1024;

/// Formula of a normalization: RMS norm or layer norm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// RMS norm: `round(x / sqrt(mean(x^2) + eps)) * weight`.
    Rms,
    /// Layer norm: `(x - mean) / sqrt(var + eps) * weight + bias`.
    Layer,
}

/// Parameters of a normalization: its kind, dtypes, extents and epsilon.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shape {
    /// Kind of the normalization: RMS norm or layer norm.
    pub kind: Kind,
    /// Dtype of the activations and of their gradients.
    pub dtype: DType,
    /// Dtype of weight and bias: that of the activations, or f32.
    pub weight_dtype: DType,
    /// Number of rows of the input, each normalized on its own.
    pub rows: u64,
    /// Number of elements per row (channels).
    pub c: u32,
    /// Small number that is added to the mean square (RMS norm) or the variance (layer norm).
    pub eps: f32,
}

/// Device addresses of the operands and results of [`forward`]. Tensors are `[rows, c]` unless stated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forward {
    /// Input to normalize. If `residual` is given, it is added first.
    pub x: Address,
    /// Residual that is added to `x`: `sum = round(x + residual)` is then written and normalized. Null for
    /// none.
    pub residual: Address,
    /// Destination of the sum `x + residual`. Null if and only if `residual` is null.
    pub sum: Address,
    /// Weight of the norm, `[c]`.
    pub weight: Address,
    /// Bias of the layer norm, `[c]`; null for RMS norm.
    pub bias: Address,
    /// Destination of the normalized output.
    pub y: Address,
}

/// Device addresses of the operands and results of [`backward`]. Tensors are `[rows, c]` unless stated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backward {
    /// Values that the forward normalized: its input, or the sum if a residual was added.
    pub x: Address,
    /// Weight of the norm, `[c]`.
    pub weight: Address,
    /// Gradient of the norm's output `y`, which is read.
    pub dy: Address,
    /// Gradient that reaches `x` on another path than through the norm (the residual's). It is added to `dx`
    /// in f32, before rounding. Null for none.
    pub d_sum: Address,
    /// Destination of the gradient of `x`.
    pub dx: Address,
    /// Destination of the weight's gradient, f32 `[c]`.
    pub d_weight: Address,
    /// Destination of the bias's gradient, f32 `[c]`; null for RMS norm.
    pub d_bias: Address,
    /// Scratch memory of [`workspace_bytes`] bytes, aligned to 16 bytes.
    pub workspace: Address,
}

/// Distribution of rows over threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Plan {
    kernel: &'static str,
    row_threads: u32,
    rows_per_block: u32,
}

impl Plan {
    /// Plan with rows in registers, `chunks` per thread. `None` if a row does not fit.
    fn held(kernel: &'static str, c: u32, chunks: u32) -> Option<Self> {
        let row_threads = c.div_ceil(CHUNK * chunks).next_multiple_of(WARP);
        (c.is_multiple_of(CHUNK) && row_threads <= MAX_ROW_THREADS).then(|| Self {
            kernel,
            row_threads,
            rows_per_block: (BLOCK_THREADS / row_threads).max(1),
        })
    }

    const fn any(kernel: &'static str) -> Self {
        Self {
            kernel,
            row_threads: BLOCK_THREADS,
            rows_per_block: 1,
        }
    }

    const fn threads(self) -> u32 {
        self.row_threads * self.rows_per_block
    }

    /// Shared memory for two rounds of two sums per warp, in bytes.
    const fn shared_bytes(self) -> u32 {
        self.threads() / WARP * 16
    }
}

impl Shape {
    /// Shape with the dtypes and kind of a module, for any rows, `c` and `eps`.
    const fn new(kind: Kind, dtype: DType, weight_dtype: DType) -> Self {
        Self {
            kind,
            dtype,
            weight_dtype,
            rows: 0,
            c: 0,
            eps: 0.0,
        }
    }

    fn module(&self) -> Option<Module> {
        const ALL: [&str; 7] = [
            "forward",
            "forward_any",
            "backward",
            "backward_any",
            "sum_partials",
            "forward_rotated",
            "backward_wide",
        ];
        let kernels = match (self.kind, self.has_wide()) {
            (Kind::Layer, _) => &ALL[..5],
            (Kind::Rms, false) => &ALL[..6],
            (Kind::Rms, true) => &ALL[..],
        };
        let defines = [
            ("NORM", self.kind as u32),
            ("X", element_type(self.dtype)?),
            ("W", element_type(self.weight_dtype)?),
        ];
        let fits = self.weight_dtype == self.dtype || self.weight_dtype == DType::F32;
        fits.then(|| Module::new(Family::Norm, defines, kernels))
    }

    /// Whether registers suffice for four chunks per thread.
    fn has_wide(&self) -> bool {
        self.kind == Kind::Rms && self.dtype != DType::F32
    }

    const fn params(&self) -> u64 {
        match self.kind {
            Kind::Rms => 1,
            Kind::Layer => 2,
        }
    }

    fn forward_plan(&self, addresses: &[Address]) -> Plan {
        let held = Plan::held("forward", self.c, FORWARD_CHUNKS);
        held.filter(|_| aligned(addresses))
            .unwrap_or(Plan::any("forward_any"))
    }

    /// Plan of the backward. It is the same for all aligned addresses, and so is the order of the sums.
    fn backward_plan(&self, addresses: &[Address]) -> Plan {
        let wide = || {
            let plan = Plan::held("backward_wide", self.c, WIDE_BACKWARD_CHUNKS);
            plan.filter(|_| self.has_wide())
        };
        let held = Plan::held("backward", self.c, BACKWARD_CHUNKS).or_else(wide);
        held.filter(|_| aligned(addresses))
            .unwrap_or(Plan::any("backward_any"))
    }

    fn backward_blocks(&self, plan: Plan) -> u64 {
        let blocks = self.rows.div_ceil(plan.rows_per_block.into());
        blocks.clamp(1, BACKWARD_BLOCKS)
    }
}

fn aligned(addresses: &[Address]) -> bool {
    addresses.iter().all(|Address(a)| a.is_multiple_of(16))
}

/// Kernel modules of both kinds of norm, for every dtype, with weights in the same dtype and in f32.
#[must_use]
pub fn modules() -> Vec<Module> {
    let dtypes = [
        (DType::F32, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
        (DType::F16, DType::F32),
    ];
    let kinds = [Kind::Rms, Kind::Layer].into_iter();
    let shapes = kinds.flat_map(|kind| dtypes.map(|(x, w)| Shape::new(kind, x, w)));
    shapes.filter_map(|shape| shape.module()).collect()
}

/// Launch of the normalization. Reads and writes two elements per element of `x`, four with a residual. It is
/// fast for `c` a multiple of 8 up to 16384 and addresses aligned to 16 bytes, and correct for all others.
/// `None` when the dtypes are not supported together, or the rows exceed a grid's size.
#[must_use]
pub fn forward(shape: &Shape, at: &Forward) -> Option<Launch> {
    let plan = shape.forward_plan(&[at.x, at.residual, at.sum, at.weight, at.bias, at.y]);
    let blocks = shape.rows.div_ceil(plan.rows_per_block.into());
    Some(Launch {
        module: shape.module()?,
        kernel: plan.kernel,
        grid: [grid(blocks)?, 1, 1],
        threads: plan.threads(),
        shared_bytes: plan.shared_bytes(),
        args: vec![
            Arg::Address(at.x),
            Arg::Address(at.residual),
            Arg::Address(at.sum),
            Arg::Address(at.weight),
            Arg::Address(at.bias),
            Arg::Address(at.y),
            Arg::U64(shape.rows),
            Arg::I32(shape.c.try_into().ok()?),
            Arg::F32(shape.eps),
            Arg::I32(plan.row_threads.try_into().ok()?),
        ],
    })
}

/// Device addresses of the operands and of the result of [`rotated`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rotated {
    /// Input to normalize, `[tokens, heads, c]`.
    pub x: Address,
    /// Weight of the norm, `[c]`.
    pub weight: Address,
    /// Cosines of the angles, f32 `[tokens, w]`.
    pub cos: Address,
    /// Sines of the angles, f32 `[tokens, w]`.
    pub sin: Address,
    /// Destination of the normalized and rotated heads.
    pub y: Address,
}

/// Launch that normalizes each head (RMS norm) and rotates its first `2 * w` elements (rotary embedding). A row of `x` is one
/// of the `heads` heads of a token. The bits are those of [`forward`], then [`rope`](super::pointwise::rope). It reads and
/// writes every element of `x` once. `None` where it has no kernel: heads that are no multiple of 8 elements or longer than 256, other
/// addresses than multiples of 16 bytes, and as for [`forward`].
#[must_use]
pub fn rotated(
    shape: &Shape,
    at: &Rotated,
    [heads, w]: [u32; 2],
    layout: RopeLayout,
) -> Option<Launch> {
    let fits = shape.kind == Kind::Rms
        && shape.c.is_multiple_of(CHUNK)
        && shape.c <= CHUNK * WARP
        && aligned(&[at.x, at.weight, at.y]);
    if !fits {
        return None;
    }
    let warps = BLOCK_THREADS / WARP;
    Some(Launch {
        module: shape.module()?,
        kernel: "forward_rotated",
        grid: [grid(shape.rows.div_ceil(warps.into()))?, 1, 1],
        threads: BLOCK_THREADS,
        shared_bytes: warps * shape.c * 4,
        args: vec![
            Arg::Address(at.x),
            Arg::Address(at.weight),
            Arg::Address(at.cos),
            Arg::Address(at.sin),
            Arg::Address(at.y),
            Arg::U64(shape.rows),
            Arg::I32(heads.try_into().ok()?),
            Arg::I32(shape.c.try_into().ok()?),
            Arg::I32(w.try_into().ok()?),
            Arg::F32(shape.eps),
            Arg::I32((layout == RopeLayout::HalfSplit).into()),
        ],
    })
}

/// Size in bytes of the workspace of [`backward`]: f32 partial sums of the gradients of weight and bias.
#[must_use]
pub fn workspace_bytes(shape: &Shape) -> u64 {
    let plans = [shape.backward_plan(&[]), Plan::any("backward_any")];
    let groups = plans.map(|p| shape.backward_blocks(p) * u64::from(p.rows_per_block));
    groups[0].max(groups[1]) * shape.params() * u64::from(shape.c) * 4
}

/// Launches of the norm's backward, in order. They read and write three elements per element of `x`, four
/// with `d_sum`, plus the workspace twice. The order of the sums of parameter gradients depends on rows, `c`,
/// dtypes and alignment only. It is fast for `c` a multiple of 8 up to 8192 (16384 for RMS norm of 16-bit
/// activations) and addresses aligned to 16 bytes. `None` as for [`forward`].
#[must_use]
pub fn backward(shape: &Shape, at: &Backward) -> Option<[Launch; 2]> {
    let plan = shape.backward_plan(&[at.x, at.weight, at.dy, at.d_sum, at.dx, at.workspace]);
    let module = shape.module()?;
    let blocks = shape.backward_blocks(plan);
    let groups = blocks * u64::from(plan.rows_per_block);
    let c = i32::try_from(shape.c).ok()?;
    let rows = Launch {
        module: module.clone(),
        kernel: plan.kernel,
        grid: [grid(blocks)?, 1, 1],
        threads: plan.threads(),
        shared_bytes: plan.shared_bytes(),
        args: vec![
            Arg::Address(at.x),
            Arg::Address(at.weight),
            Arg::Address(at.dy),
            Arg::Address(at.d_sum),
            Arg::Address(at.dx),
            Arg::Address(at.workspace),
            Arg::U64(shape.rows),
            Arg::I32(c),
            Arg::F32(shape.eps),
            Arg::I32(plan.row_threads.try_into().ok()?),
        ],
    };
    let width = shape.params() * u64::from(shape.c);
    let sums = Launch {
        module,
        kernel: "sum_partials",
        grid: [grid(width.div_ceil(SUM_COLUMNS.into()))?, 1, 1],
        threads: SUM_THREADS,
        shared_bytes: SUM_THREADS * 4,
        args: vec![
            Arg::Address(at.workspace),
            Arg::I32(i32::try_from(groups).ok()?),
            Arg::I32(c),
            Arg::Address(at.d_weight),
            Arg::Address(at.d_bias),
        ],
    };
    Some([rows, sums])
}

/// Blocks along x. `None` if there are 2^31 or more.
fn grid(blocks: u64) -> Option<u32> {
    i32::try_from(blocks.max(1)).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kind: Kind, dtype: DType, rows: u64, c: u32) -> Shape {
        Shape {
            rows,
            c,
            ..Shape::new(kind, dtype, dtype)
        }
    }

    #[test]
    fn rows_are_held_in_registers_where_they_fit() {
        let plan = |kind, dtype, c| shape(kind, dtype, 8, c).backward_plan(&[]);
        let small = plan(Kind::Rms, DType::BF16, 1024);
        assert_eq!((small.row_threads, small.rows_per_block), (64, 4));
        assert_eq!(plan(Kind::Layer, DType::F32, 8192).row_threads, 512);
        assert_eq!(plan(Kind::Rms, DType::BF16, 16384).kernel, "backward_wide");
        assert_eq!(plan(Kind::Layer, DType::BF16, 16384).kernel, "backward_any");
        assert_eq!(plan(Kind::Rms, DType::BF16, 1001).kernel, "backward_any");
        let forward = |c, a: u64| shape(Kind::Layer, DType::F32, 8, c).forward_plan(&[Address(a)]);
        assert_eq!(forward(16384, 32).kernel, "forward");
        assert_eq!(forward(16384, 8).kernel, "forward_any");
        assert_eq!(forward(16392, 0).kernel, "forward_any");
    }

    #[test]
    fn the_workspace_fits_the_partial_sums_of_every_plan() {
        for (rows, c) in [(1, 8), (100, 64), (5000, 100), (5000, 4096)] {
            let shape = shape(Kind::Layer, DType::BF16, rows, c);
            let bytes = |groups: u64| groups * 2 * u64::from(c) * 4;
            assert!(workspace_bytes(&shape) >= bytes(rows.min(BACKWARD_BLOCKS)));
            let plan = shape.backward_plan(&[]);
            let groups = shape.backward_blocks(plan) * u64::from(plan.rows_per_block);
            assert!(workspace_bytes(&shape) >= bytes(groups));
        }
    }
}
