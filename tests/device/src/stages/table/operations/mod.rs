//! The rows of the table. A row has the same name as PyTorch's in `scripts/gpu_peers.py`.

use anyhow::Result;
use kernels::cuda::gpu::Gpu;
use kernels::cuda::launch::Launch;

use super::bench::Operands;
use crate::stages::Target;

mod attention;
mod linear;
mod loss;
mod norm;
mod optim;
mod pointwise;
mod rows;

/// Minimum amount of data or computation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Amount {
    /// Bytes read and written.
    Bytes(f64),
    /// Floating-point operations on tensor cores.
    Flops(f64),
    /// Floating-point operations without tensor cores. No ceiling is measured for them.
    PlainFlops(f64),
}

/// A prepared row: its amount, and its launches on one or more sets of operands.
pub(super) type Prepared = (Amount, Vec<Vec<Launch>>);
/// Prepares the operands of a row.
type Prepare = Box<dyn Fn(&mut Operands<'_>) -> Result<Prepared>>;

/// Targets of a row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Targets {
    /// Share of the measured copy rate.
    pub(super) copy: Option<Target>,
    /// Share of PyTorch's speed.
    pub(super) torch: Option<Target>,
}

/// Share of the measured copy rate for kernels that move more than they compute.
const OF_COPY: Target = Target::AtLeast(0.85);
/// Share of PyTorch's speed if PyTorch has one kernel for the same operation.
const AS_TORCH: Target = Target::AtLeast(1.0);

/// Thread instructions that an A100, an H100 and an H200 execute while their copy moves a byte. An H100 has 128 (A100:
/// 64) per clock and multiprocessor, 30e12 (10e12) per second, against 2.6e12 to 4.2e12 (1.4e12) bytes. Consumer GPUs
/// have ten times as many per byte.
const INSTRUCTIONS_PER_BYTE: f64 = 7.0;

impl Targets {
    /// No target.
    const NONE: Self = Self {
        copy: None,
        torch: None,
    };
    /// Target of a row bound by memory.
    const COPY: Self = Self {
        copy: Some(OF_COPY),
        torch: None,
    };
    /// Targets of a row bound by memory for which PyTorch has a kernel.
    const COPY_AND_TORCH: Self = Self {
        copy: Some(OF_COPY),
        torch: Some(AS_TORCH),
    };

    /// Target of a kernel with so many instructions for so many bytes, counted in its PTX with ten for a division. If a
    /// GPU executes fewer instructions while it moves the bytes, instructions are the bound, with the same share.
    fn computed(bytes: usize, instructions: usize) -> Self {
        let share = INSTRUCTIONS_PER_BYTE * bytes as f64 / instructions as f64;
        // Printed with two digits.
        let least = (85.0 * share.min(1.0)).round() / 100.0;
        Self {
            copy: Some(Target::AtLeast(least)),
            torch: None,
        }
    }
}

/// One row of the table.
pub(super) struct Row {
    pub(super) name: String,
    pub(super) targets: Targets,
    pub(super) prepare: Prepare,
}

/// The list of rows under construction.
#[derive(Default)]
struct Rows(Vec<Row>);

impl Rows {
    fn add(
        &mut self,
        name: impl Into<String>,
        targets: Targets,
        prepare: impl Fn(&mut Operands<'_>) -> Result<Prepared> + 'static,
    ) {
        self.0.push(Row {
            name: name.into(),
            targets,
            prepare: Box::new(prepare),
        });
    }
}

/// Forward and backward, with the words for them.
const DIRECTIONS: [(bool, &str); 2] = [(false, "forward"), (true, "backward")];

/// Parameters in the rows of the optimizer: 256 Mi if memory allows.
pub(super) fn params(gpu: &Gpu) -> u64 {
    let free = gpu.memory_info().map_or(0, |(free, _)| free as u64);
    (free / 64).clamp(1 << 20, 1 << 28) & !0xfff
}

/// Every row.
pub(super) fn all() -> Vec<Row> {
    let mut rows = Rows::default();
    optim::add(&mut rows);
    norm::add(&mut rows);
    attention::add(&mut rows);
    linear::add(&mut rows);
    pointwise::add(&mut rows);
    rows::add(&mut rows);
    loss::add(&mut rows);
    rows.0
}
