//! Random operands.

use optim::rng::RandomStream;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

/// Named, counter-based random operands, the same on every machine.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    seed: u64,
}

impl Operands {
    /// Operands of one case.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Standard normal numbers times `scale`.
    #[must_use]
    pub fn normal(self, name: &str, n: usize, scale: f32) -> Vec<f32> {
        let stream = RandomStream::new(self.seed, name);
        let numbers = (0..n as u64).into_par_iter();
        numbers.map(|i| stream.normal(i) * scale).collect()
    }

    /// Uniform numbers below `limit`.
    #[must_use]
    pub fn below(self, name: &str, n: usize, limit: usize) -> Vec<usize> {
        let stream = RandomStream::new(self.seed, name);
        (0..n as u64)
            .map(|i| (stream.bits(0, i) % limit as u64) as usize)
            .collect()
    }
}
