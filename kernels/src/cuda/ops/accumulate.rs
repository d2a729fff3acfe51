//! Gradient accumulation in `bf16`, with the bits of `optim::accumulate`.

use super::flat::{blocks, head};
use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module};

pub use crate::resident::RoundingCounter;

/// Maximum blocks of the grid: enough for several waves on any GPU.
const MAX_BLOCKS: u64 = 132 * 16;

fn module() -> Module {
    Module::new(Family::Accumulate, [], &["accumulate"])
}

/// Kernel modules for gradient accumulation in bf16. There is only one.
#[must_use]
pub fn modules() -> Vec<Module> {
    vec![module()]
}

/// Key and addition number of a rounding position as the four words that [`launch`] reads from device memory:
/// two for the key, then the number, low word first.
#[must_use]
pub const fn when(place: RoundingCounter) -> [u32; 4] {
    let RoundingCounter { key, time, .. } = place;
    [key[0], key[1], time as u32, (time >> 32) as u32]
}

/// Launch that adds `n` f32 `values` to bf16 `sums`, `sums[i] += values[i]`, with stochastic rounding. If
/// `fresh`, the old sums count as zero and are not read. Both addresses are aligned to their elements.
/// `first_element` is the global index of the first element. The address `when` is that of a copy of the
/// words that the function [`when`] returns. Moves 8 bytes per element, or 6 if `fresh`.
#[must_use]
pub fn launch(
    sums: Address,
    values: Address,
    n: u64,
    (first_element, when): (u64, Address),
    fresh: bool,
) -> Launch {
    let head = head(&[(sums, DType::BF16), (values, DType::F32)], n);
    Launch {
        module: module(),
        kernel: "accumulate",
        grid: [blocks(n, MAX_BLOCKS), 1, 1],
        threads: super::flat::THREADS,
        shared_bytes: 0,
        args: vec![
            Arg::Address(sums),
            Arg::Address(values),
            Arg::U64(n),
            Arg::U64(first_element),
            Arg::U64(head),
            Arg::Address(when),
            Arg::I32(fresh.into()),
        ],
    }
}
