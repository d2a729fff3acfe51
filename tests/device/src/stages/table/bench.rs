//! Devices that prepare and time rows: a GPU, or the emulated one of the tests. The emulated one ensures that a row
//! works at its first use on a GPU.

use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kernels::DType;
use kernels::cuda::backend::Executor;
use kernels::cuda::gpu::{Gpu, Memory};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::{CublasLt, LibraryUse, Multiply};
use kernels::cuda::ops::workspace::Workspace;
use optim::rng::RandomStream;

use super::BUDGET;
use crate::stages::{Setting, median_milliseconds, queue};

/// Operations that rows need of a device.
pub(super) trait Bench {
    /// Number of multiprocessors that launches are sized for.
    fn multiprocessors(&self) -> u32;

    /// Shared memory of a multiprocessor in bytes.
    fn shared_bytes(&self) -> u32 {
        228 << 10
    }

    /// Products that a run gives to the library on such a device.
    fn library(&self) -> LibraryUse {
        LibraryUse::Products
    }

    /// Memory filled with copies of `pattern`, valid until [`Bench::clear`].
    fn filled(&mut self, bytes: usize, pattern: &[u8]) -> Result<Address>;

    /// Executes a launch without timing it.
    fn launch(&mut self, launch: &Launch) -> Result<()>;

    /// Milliseconds of one set of launches. The sets alternate.
    fn time(&mut self, sets: &[Vec<Launch>]) -> Result<f64>;

    /// Milliseconds of a library product with its scratch memory.
    fn time_product(&mut self, product: &Multiply, workspace: (Address, u64)) -> Result<f64>;

    /// Frees all memory.
    fn clear(&mut self) -> Result<()>;
}

/// A GPU.
pub(super) struct OnGpu<'g> {
    gpu: &'g Gpu,
    /// The library, or the reason for its absence.
    library: Result<CublasLt, String>,
    memory: Vec<Memory>,
    /// Time for the repetitions of a row.
    budget: Duration,
}

impl<'g> OnGpu<'g> {
    pub(super) fn new(gpu: &'g Gpu, library: Result<CublasLt, String>, setting: &Setting) -> Self {
        Self {
            gpu,
            library,
            memory: Vec::new(),
            budget: match setting.small {
                true => Duration::ZERO,
                false => BUDGET,
            },
        }
    }
}

impl Bench for OnGpu<'_> {
    fn multiprocessors(&self) -> u32 {
        self.gpu.facts().multiprocessors
    }

    fn shared_bytes(&self) -> u32 {
        self.gpu.kind().shared_bytes()
    }

    fn library(&self) -> LibraryUse {
        LibraryUse::on(Some(self.gpu.facts().compute_capability))
    }

    fn filled(&mut self, bytes: usize, pattern: &[u8]) -> Result<Address> {
        let memory = self.gpu.allocate(bytes)?;
        if let [value] = pattern {
            self.gpu.fill(&memory, *value)?;
        } else {
            let mut filled = pattern.len().min(bytes);
            self.gpu.write(&memory, 0, &pattern[..filled])?;
            while filled < bytes {
                let n = filled.min(bytes - filled);
                queue::repeat(self.gpu, &memory, filled, n)?;
                filled += n;
            }
        }
        let address = memory.address();
        self.memory.push(memory);
        Ok(address)
    }

    fn launch(&mut self, launch: &Launch) -> Result<()> {
        queue::launch(self.gpu, launch)
    }

    fn time(&mut self, sets: &[Vec<Launch>]) -> Result<f64> {
        median_milliseconds(self.gpu, self.budget, |round| {
            let set = &sets[round % sets.len()];
            let mut launches = set.iter();
            launches.try_for_each(|launch| queue::launch(self.gpu, launch))
        })
    }

    fn time_product(&mut self, product: &Multiply, workspace: (Address, u64)) -> Result<f64> {
        let library = match &self.library {
            Ok(library) => library,
            Err(problem) => bail!("{problem}"),
        };
        median_milliseconds(self.gpu, self.budget, |_| {
            queue::multiply(self.gpu, library, product, workspace)
        })
    }

    fn clear(&mut self) -> Result<()> {
        self.memory.clear();
        Ok(())
    }
}

/// Scale of the operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Scale {
    /// Divisor of the model sizes.
    pub(super) divisor: usize,
    /// Elements in the rows of the optimizer.
    pub(super) params: u64,
}

impl Scale {
    /// The size used for `n`: `n` itself, or a small multiple of 8.
    pub(super) fn of(self, n: usize) -> usize {
        match self.divisor {
            1 => n,
            divisor => (n / divisor).max(8).next_multiple_of(8),
        }
    }
}

/// Device memory for one row.
pub(super) struct Operands<'b> {
    pub(super) bench: &'b mut dyn Bench,
    pub(super) scale: Scale,
    /// Bytes of all operands so far.
    pub(super) held: u64,
}

impl<'b> Operands<'b> {
    pub(super) fn new(bench: &'b mut dyn Bench, scale: Scale) -> Self {
        Self {
            bench,
            scale,
            held: 0,
        }
    }

    /// [`Scale::of`].
    pub(super) fn of(&self, n: usize) -> usize {
        self.scale.of(n)
    }

    fn filled(&mut self, bytes: usize, pattern: &[u8]) -> Result<Address> {
        self.held += bytes as u64;
        self.bench.filled(bytes, pattern)
    }

    /// `n` standard normal values times `scale` in a float dtype. A pattern of a million values repeats.
    pub(super) fn normal(&mut self, dtype: DType, n: usize, scale: f32) -> Result<Address> {
        let values = &patterns()[..n.min(PATTERN)];
        let values = values.iter().map(|x| x * scale);
        let pattern: Vec<u8> = match dtype {
            DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
            DType::BF16 => values
                .flat_map(|x| half::bf16::from_f32(x).to_le_bytes())
                .collect(),
            DType::F16 => values
                .flat_map(|x| half::f16::from_f32(x).to_le_bytes())
                .collect(),
            other => bail!("{other} is no float"),
        };
        self.filled(n * dtype.size_bytes(), &pattern)
    }

    /// Memory for a result.
    pub(super) fn output(&mut self, bytes: usize) -> Result<Address> {
        self.filled(bytes, &[0xff])
    }

    /// Memory of zeros.
    pub(super) fn zeros(&mut self, bytes: usize) -> Result<Address> {
        self.filled(bytes, &[0])
    }

    /// Memory with these values.
    pub(super) fn values<T: bytemuck::Pod>(&mut self, values: &[T]) -> Result<Address> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.filled(bytes.len(), bytes)
    }

    /// The launches of `build` for the GPU's multiprocessors, with scratch memory of the size they need.
    pub(super) fn with_scratch(
        &mut self,
        build: impl Fn(u32, &mut Workspace) -> Option<Vec<Launch>>,
    ) -> Result<Vec<Launch>> {
        let multiprocessors = self.bench.multiprocessors();
        let mut count = Workspace::new(Address::NULL);
        build(multiprocessors, &mut count).context("no kernel")?;
        let scratch = self.output(count.bytes().max(256) as usize)?;
        build(multiprocessors, &mut Workspace::new(scratch)).context("no kernel")
    }
}

/// Number of values in the pattern.
const PATTERN: usize = 1 << 20;

/// Standard normal values, drawn once, since rows have hundreds of operands.
fn patterns() -> &'static [f32] {
    static VALUES: OnceLock<Vec<f32>> = OnceLock::new();
    VALUES.get_or_init(|| {
        let stream = RandomStream::new(2, "normal");
        (0..PATTERN as u64).map(|i| stream.normal(i)).collect()
    })
}
