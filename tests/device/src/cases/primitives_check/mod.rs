//! Every primitive on its own, compared with the definition of the PTX ISA, written again in Rust. The cases run on the
//! emulator and on GPUs, so they calibrate the emulator.

mod format;
mod matrices;
mod memory;
mod numbers;
mod warps;

use anyhow::{Result, ensure};
use kernels::cuda::launch::Arg;
use kernels::cuda::ops::primitives_check;

use super::{Case, Effort};
use crate::machine::{Buffer, Machine};

/// The cases of all primitives. Sizes are the same for every machine.
#[must_use]
pub fn cases(_effort: Effort) -> Vec<Case> {
    [
        numbers::cases(),
        warps::cases(),
        memory::cases(),
        matrices::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn case(name: &str, check: fn(&mut dyn Machine) -> Result<()>) -> Case {
    Case::new(format!("primitives: {name}"), check)
}

/// Blocks, threads per block, bytes of shared memory.
type Size = [u32; 3];

/// Enough blocks of 256 threads for one thread per element.
fn elementwise(n: usize) -> Size {
    [n.div_ceil(256) as u32, 256, 0]
}

/// A launch with pointers first, then optionally a number of elements.
fn launch(
    machine: &mut dyn Machine,
    kernel: &str,
    [blocks, threads, shared_bytes]: Size,
    buffers: &[Buffer],
    n: Option<usize>,
) -> Result<()> {
    let addresses = buffers.iter().map(|buffer| Arg::Address(buffer.address));
    let args = addresses.chain(n.map(|n| Arg::I32(n as i32))).collect();
    let launch = primitives_check::launch(kernel, blocks, threads, shared_bytes, args);
    machine.launch(&launch.expect("a known kernel"))
}

/// Fails at the first element where two slices differ.
fn equal<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], want: &[T]) -> Result<()> {
    ensure!(
        got.len() == want.len(),
        "{what}: another number of elements"
    );
    let differs = got.iter().zip(want).position(|(got, want)| got != want);
    if let Some(at) = differs {
        anyhow::bail!(
            "{what}, element {at}: {:?} instead of {:?}",
            got[at],
            want[at]
        );
    }
    Ok(())
}
