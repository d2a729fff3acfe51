//! Benchmarks that print how much of the machine they use. [`Ceilings`] are measured in the same run, and [`measure`]
//! prints each result as a share of them.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing results is what this crate is for"
)]

pub mod adam;
mod ceilings;
mod decoder;
pub mod train;

pub use ceilings::Ceilings;
pub use decoder::decoder;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput};
use std::time::{Duration, Instant};

/// Result with an error of any layer.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Minimum work of one run of a benchmark.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Floating-point operations; a fused multiply-add counts as two.
    pub flops: f64,
    /// Bytes that must be read or written, each once.
    pub bytes: f64,
    /// What happens to the bytes.
    pub kind: Traffic,
}

/// Kind of memory traffic, which decides the ceiling.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Traffic {
    /// Bytes are read and other ones written.
    #[default]
    Copy,
    /// Bytes are read.
    Read,
    /// Bytes are read by one thread.
    ReadByOne,
    /// Bytes are read, changed and written where they were.
    Update,
}

impl Work {
    /// Work bound by arithmetic.
    #[must_use]
    pub fn flops(flops: f64) -> Self {
        Self {
            flops,
            ..Self::default()
        }
    }

    /// Work bound by memory.
    #[must_use]
    pub fn bytes(bytes: f64) -> Self {
        Self {
            bytes,
            ..Self::default()
        }
    }

    /// Work bound by reads.
    #[must_use]
    pub fn read(bytes: f64) -> Self {
        Self {
            kind: Traffic::Read,
            ..Self::bytes(bytes)
        }
    }

    /// Work of one thread bound by reads.
    #[must_use]
    pub fn read_by_one(bytes: f64) -> Self {
        Self {
            kind: Traffic::ReadByOne,
            ..Self::bytes(bytes)
        }
    }

    /// Work bound by updates in place.
    #[must_use]
    pub fn update(bytes: f64) -> Self {
        Self {
            kind: Traffic::Update,
            ..Self::bytes(bytes)
        }
    }
}

/// Criterion settings with short measurements: all benchmark groups together take one or two minutes.
#[must_use]
pub fn config() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(50))
        .measurement_time(Duration::from_millis(300))
        .without_plots()
        .configure_from_args()
}

/// Runs `f` with criterion and prints its rate and its share of the ceiling. The share is the time that the peaks of
/// all cores allow, divided by the best time per call.
pub fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    work: Work,
    mut f: impl FnMut(),
) {
    let ceilings = Ceilings::of_this_machine();
    // Equal numbers of calls per sample; with criterion's default, slow operations would take a minute.
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(if work.flops > 0.0 {
        Throughput::Elements(work.flops as u64)
    } else {
        Throughput::Bytes(work.bytes as u64)
    });
    let mut best = f64::INFINITY;
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| {
            let start = Instant::now();
            for _ in 0..iterations {
                f();
            }
            let spent = start.elapsed();
            best = best.min(spent.as_secs_f64() / iterations as f64);
            spent
        });
    });
    if best.is_finite() {
        println!("{}", report(name, work, best, ceilings));
    }
}

fn report(name: &str, work: Work, seconds: f64, ceilings: &Ceilings) -> String {
    let least = ceilings.seconds(work);
    let share = 100.0 * least / seconds;
    let rate = if work.flops > 0.0 {
        format!("{:.1} GFLOP/s", work.flops / seconds * 1e-9)
    } else {
        format!("{:.1} GB/s", work.bytes / seconds * 1e-9)
    };
    format!("    {name}: {rate}, {share:.0} % of the ceiling")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_ceiling_is_that_of_the_slower_resource() {
        let ceilings = Ceilings {
            core_flops: 1e9,
            all_flops: 2e9,
            core_bytes: 1e9,
            all_bytes: 1e9,
            core_read: 2e9,
            all_read: 4e9,
            all_update: 5e9,
        };
        let work = Work {
            flops: 1e9,
            bytes: 1e9,
            kind: Traffic::Copy,
        };
        assert_eq!(ceilings.seconds(work), 1.0);
        assert_eq!(ceilings.seconds(Work::update(1e9)), 0.2);
        assert_eq!(ceilings.seconds(Work::read(1e9)), 0.25);
        assert_eq!(ceilings.seconds(Work::read_by_one(1e9)), 0.5);
        let line = report("x", work, 2.0, &ceilings);
        assert_eq!(line, "    x: 0.5 GFLOP/s, 50 % of the ceiling");
    }
}
