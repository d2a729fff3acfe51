//! Gradient norm with the bits of `optim::clip`, and the clip factor, without a round trip to the host.

use bytemuck::{Pod, Zeroable};

use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

/// Elements per block in the definition of the sum.
const BLOCK_ELEMS: u64 = 4096;
/// Blocks of the definition that one thread block sums, one per warp.
const BLOCKS_PER_GRID_BLOCK: u64 = 8;
/// Interleaved sums over blocks, one per thread of `total`.
const BLOCK_LANES: u32 = 1024;

/// Kernels of the f32 module. Only it has `clip`, because sums of 16-bit gradients end in the same clip factor.
const KERNELS: &[&str] = &["block_sums", "total", "clip"];

/// Clip block: gradient norm, mean loss and clip factor of one optimizer step, in device memory. [`clip`]
/// writes it; the optimizer's launches read it, and the host reads it for the report.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
pub struct Clip {
    /// Global L2 norm of the gradient averaged over supervised tokens, before clipping.
    pub norm: f64,
    /// Mean loss per supervised token of the step, over all ranks.
    pub loss: f64,
    /// Factor on each gradient (a sum over tokens) in the optimizer:
    /// `min(1, max_norm / (norm + 1e-6)) / tokens`. It is 0 for a skipped step.
    pub factor: f32,
    /// 1 when norm or loss is not finite, so the optimizer must change nothing; otherwise 0.
    pub skip: u32,
}

/// Sums of one rank for one optimizer step, in device memory: squares of gradients, losses, and tokens.
/// [`clip`] adds them over all ranks.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
pub struct SquareSums {
    /// Sum of squares of the gradient elements that the rank owns (its shard), before they are divided by the
    /// number of tokens.
    pub squares: f64,
    /// Sum of the losses of the rank's supervised tokens in the step.
    pub loss: f64,
    /// Number of the rank's supervised tokens in the step.
    pub tokens: f64,
}

fn module(grad: DType) -> Option<Module> {
    let defines = [("GRAD", element_type(grad)?)];
    let kernels = if grad == DType::F32 {
        KERNELS
    } else {
        &KERNELS[..2]
    };
    Some(Module::new(Family::GradNorm, defines, kernels))
}

/// Kernel modules of the gradient norm for gradients in f32, bf16 and f16.
#[must_use]
pub fn modules() -> Vec<Module> {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    dtypes.into_iter().filter_map(module).collect()
}

/// Size in bytes of the workspace that [`square_sum`] needs for `n` elements: one f64 sum per 4096 elements.
#[must_use]
pub const fn workspace_bytes(n: u64) -> u64 {
    n.div_ceil(BLOCK_ELEMS) * 8
}

/// Launches, in order, that write the sum of squares of the `n` elements at `x` to the f64 at `sum`. With
/// `accumulate` the sum is added to the old value of `sum`, so several arrays can be summed in turn, as on
/// the CPU. `workspace` has [`workspace_bytes`] bytes. `x` is aligned to its elements; alignment to 16 bytes
/// is faster. `None` when the dtype is not a float, or `n` exceeds a grid's size (2^46 elements).
#[must_use]
pub fn square_sum(
    dtype: DType,
    x: Address,
    n: u64,
    workspace: Address,
    sum: Address,
    accumulate: bool,
) -> Option<[Launch; 2]> {
    let module = module(dtype)?;
    let blocks = n.div_ceil(BLOCK_ELEMS);
    let grid = u32::try_from(blocks.div_ceil(BLOCKS_PER_GRID_BLOCK)).ok()?;
    let block_sums = Launch {
        module: module.clone(),
        kernel: "block_sums",
        grid: [grid.max(1), 1, 1],
        threads: 256,
        shared_bytes: 0,
        args: vec![Arg::Address(x), Arg::Address(workspace), Arg::U64(n)],
    };
    let total = Launch {
        module,
        kernel: "total",
        grid: [1, 1, 1],
        threads: BLOCK_LANES,
        shared_bytes: BLOCK_LANES * 8,
        args: vec![
            Arg::Address(workspace),
            Arg::U64(blocks),
            Arg::Address(sum),
            Arg::I32(accumulate.into()),
        ],
    };
    Some([block_sums, total])
}

/// Launch that adds the `ranks` consecutive [`SquareSums`] at `sums`, in rank order, and writes the resulting
/// [`Clip`] to `out`, as `optim::clip::GradientScale` on the CPU. With a `max_norm` of `None` the gradient is
/// not clipped. Less than one token in total counts as one. `None` when the number of ranks exceeds `int`.
#[must_use]
pub fn clip(sums: Address, ranks: usize, max_norm: Option<f32>, out: Address) -> Option<Launch> {
    Some(Launch {
        module: module(DType::F32)?,
        kernel: "clip",
        grid: [1, 1, 1],
        threads: 32,
        shared_bytes: 0,
        args: vec![
            Arg::Address(sums),
            Arg::I32(i32::try_from(ranks).ok()?),
            Arg::F32(max_norm.unwrap_or(f32::INFINITY)),
            Arg::Address(out),
        ],
    })
}
