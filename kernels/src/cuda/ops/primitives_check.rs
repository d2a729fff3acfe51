//! Kernels that run every primitive on its own, to compare a GPU with the emulator of the tests.

use crate::cuda::launch::{Arg, Launch};
use crate::cuda::module::{Family, Module};

const KERNELS: &[&str] = &[
    "narrowings",
    "widenings",
    "approximations",
    "arithmetic",
    "double_arithmetic",
    "high_products",
    "exchanges",
    "reversals",
    "last_block",
    "streams",
    "copies",
    "matrix_loads",
    "bf16_products",
    "f16_products",
];

fn module() -> Module {
    Module::new(Family::PrimitivesCheck, [], KERNELS)
}

/// Kernel modules that test the PTX wrappers (primitives) one by one. There is only one.
#[must_use]
pub fn modules() -> Vec<Module> {
    vec![module()]
}

/// Launch of the test kernel named `kernel` with `blocks` thread blocks. The CUDA source describes the
/// kernels and their parameters. `None` if no kernel has this name.
#[must_use]
pub fn launch(
    kernel: &str,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    args: Vec<Arg>,
) -> Option<Launch> {
    let kernel = KERNELS.iter().copied().find(|known| *known == kernel)?;
    Some(Launch {
        module: module(),
        kernel,
        grid: [blocks, 1, 1],
        threads,
        shared_bytes,
        args,
    })
}
