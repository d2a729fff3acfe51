//! The rows of the table. Names equal those of `scripts/gpu_peers.py`, where PyTorch does the same.

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

/// What a piece of work must do at least.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Amount {
    /// Bytes read and written.
    Bytes(f64),
    /// Floating-point operations on tensor cores.
    Flops(f64),
    /// Floating-point operations without them: no ceiling is measured.
    PlainFlops(f64),
}

/// What a row is made of: how much it does, and its launches on one or more sets of operands.
pub(super) type Prepared = (Amount, Vec<Vec<Launch>>);
/// Makes a row's operands.
type Prepare = Box<dyn Fn(&mut Operands<'_>) -> Result<Prepared>>;

/// What a row is judged by.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Targets {
    /// Of the rate of the measured copy.
    pub(super) copy: Option<Target>,
    /// Of PyTorch's speed.
    pub(super) torch: Option<Target>,
}

/// Of the measured copy's rate, where a kernel has less to compute than to move.
const OF_COPY: Target = Target::AtLeast(0.85);
/// Of PyTorch's speed, where PyTorch has one kernel for the same work.
const AS_TORCH: Target = Target::AtLeast(1.0);

/// What an A100, an H100 and an H200 execute of a thread's instructions while their copy moves a byte: 128 (64) a clock
/// and multiprocessor, 30e12 (10e12) a second, against 2.6e12 to 4.2e12 (1.4e12) bytes. Consumer GPUs have ten times that.
const INSTRUCTIONS_PER_BYTE: f64 = 7.0;

impl Targets {
    /// Nothing judges the row.
    const NONE: Self = Self {
        copy: None,
        torch: None,
    };
    /// The row is bound by memory.
    const COPY: Self = Self {
        copy: Some(OF_COPY),
        torch: None,
    };
    /// And PyTorch has a kernel for it.
    const COPY_AND_TORCH: Self = Self {
        copy: Some(OF_COPY),
        torch: Some(AS_TORCH),
    };

    /// So many bytes take so many instructions, by the kernel's PTX with ten for a division: where that is more than a GPU
    /// executes while it moves them, instructions are the bound, and as much is asked of them as of memory.
    fn computed(bytes: usize, instructions: usize) -> Self {
        let share = INSTRUCTIONS_PER_BYTE * bytes as f64 / instructions as f64;
        // Shown with two digits.
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

/// Rows that are being listed.
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

/// Parameters of the optimizer's rows: 256 Mi where the memory allows.
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
