//! Casts between float dtypes.

use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module, element_type};

const THREADS: u32 = 256;
/// Elements per thread and iteration.
const WIDTH: u64 = 8;
/// Maximum blocks of the grid: enough for several waves on any GPU.
const MAX_BLOCKS: u64 = 132 * 16;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn module(from: DType, to: DType) -> Option<Module> {
    let defines = [("FROM", element_type(from)?), ("TO", element_type(to)?)];
    Some(Module::new(Family::Cast, defines, &["cast"]))
}

/// Kernel modules of casts, for every pair of different float dtypes (f32, bf16, f16).
#[must_use]
pub fn modules() -> Vec<Module> {
    let pairs = DTYPES.iter().flat_map(|from| DTYPES.map(|to| (*from, to)));
    pairs
        .filter(|(from, to)| from != to)
        .filter_map(|(from, to)| module(from, to))
        .collect()
}

/// Launch that converts the `n` elements at `x` from dtype `from` to dtype `to` and writes them to `y`. Both
/// addresses are aligned to 16 bytes. `None` when a dtype is not a float.
#[must_use]
pub fn launch(from: DType, x: Address, to: DType, y: Address, n: u64) -> Option<Launch> {
    Some(Launch {
        module: module(from, to)?,
        kernel: "cast",
        grid: [blocks(n), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        args: vec![Arg::Address(x), Arg::Address(y), Arg::U64(n)],
    })
}

fn blocks(n: u64) -> u32 {
    let rounds = n.div_ceil(WIDTH * u64::from(THREADS));
    rounds.clamp(1, MAX_BLOCKS) as u32
}
