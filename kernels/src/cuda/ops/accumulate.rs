//! Sums of gradients in `bf16`, bit-equal to `optim::accumulate`.

use super::window::{blocks, head};
use crate::DType;
use crate::cuda::launch::{Address, Arg, Launch};
use crate::cuda::module::{Family, Module};

pub use crate::resident::Place;

/// Blocks of the grid at most: enough for several waves of any GPU.
const MAX_BLOCKS: u64 = 132 * 16;

fn module() -> Module {
    Module::new(Family::Accumulate, [], &["accumulate"])
}

/// The one there is.
#[must_use]
pub fn modules() -> Vec<Module> {
    vec![module()]
}

/// Key and time of a place, as the kernel reads them from device memory.
#[must_use]
pub const fn when(place: Place) -> [u32; 4] {
    let Place { key, time, .. } = place;
    [key[0], key[1], time as u32, (time >> 32) as u32]
}

/// `sums[i] += values[i]` for `n` elements, rounded stochastically; sums that are `fresh` are taken as zero and not
/// read. Both addresses are aligned to their elements. The sums begin at the run's element `first_element`; `when` is
/// the address of [`when`]'s words. Moves 8 bytes per element, or 6.
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
        threads: super::window::THREADS,
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
