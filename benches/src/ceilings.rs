//! Measured peak rates of this machine.

use crate::adam::{Array, scale};
use crate::{Traffic, Work};
use rayon::prelude::*;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

/// Peak rates of one core and of all threads of the rayon pool.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ceilings {
    /// f32 operations per second of one core: fused multiply-adds on registers only.
    pub core_flops: f64,
    /// f32 operations per second of all cores together.
    pub all_flops: f64,
    /// Bytes per second that one core moves: the better of STREAM's copy and triad.
    pub core_bytes: f64,
    /// Bytes per second that all cores together move.
    pub all_bytes: f64,
    /// Bytes per second that one core reads: a sum of words.
    pub core_read: f64,
    /// Bytes per second that all cores together read.
    pub all_read: f64,
    /// Bytes per second that all cores together read and write again, in place.
    pub all_update: f64,
}

impl Ceilings {
    /// Peaks of this machine, measured at the first call (about two seconds) and printed.
    pub fn of_this_machine() -> &'static Self {
        static ONCE: OnceLock<Ceilings> = OnceLock::new();
        ONCE.get_or_init(|| {
            let ceilings = Self::measured();
            let Self {
                core_flops,
                all_flops,
                core_bytes,
                all_bytes,
                core_read,
                all_read,
                all_update,
            } = ceilings;
            println!(
                "ceilings: one core {:.1} GFLOP/s, {:.1} GB/s, reads {:.1} GB/s; all {} cores {:.1} GFLOP/s, {:.1} GB/s, \
                 reads {:.1} GB/s, updates in place {:.1} GB/s",
                core_flops * 1e-9,
                core_bytes * 1e-9,
                core_read * 1e-9,
                rayon::current_num_threads(),
                all_flops * 1e-9,
                all_bytes * 1e-9,
                all_read * 1e-9,
                all_update * 1e-9,
            );
            ceilings
        })
    }

    fn measured() -> Self {
        let mut stream = Stream::new();
        let flops = multiply_adds(ROUNDS);
        Self {
            core_flops: best(5, flops, || {
                multiply_adds(ROUNDS);
            }),
            all_flops: best(5, flops * rayon::current_num_threads() as f64, || {
                rayon::broadcast(|_| multiply_adds(ROUNDS));
            }),
            core_bytes: stream.best(false),
            all_bytes: stream.best(true),
            core_read: stream.best_read(false),
            all_read: stream.best_read(true),
            all_update: stream.best_update(),
        }
    }

    /// Lower bound of the seconds that some work takes on all cores, or on one where its kind says so.
    #[must_use]
    pub fn seconds(&self, work: Work) -> f64 {
        let bytes = match work.kind {
            Traffic::Copy => self.all_bytes,
            Traffic::Read => self.all_read,
            Traffic::ReadByOne => self.core_read,
            Traffic::Update => self.all_update,
        };
        (work.flops / self.all_flops).max(work.bytes / bytes)
    }
}

/// Highest rate over `runs` runs of `amount` of work.
fn best(runs: usize, amount: f64, mut run: impl FnMut()) -> f64 {
    let mut rate = 0.0f64;
    for _ in 0..runs {
        let start = Instant::now();
        run();
        rate = rate.max(amount / start.elapsed().as_secs_f64());
    }
    rate
}

/// Number of independent accumulators: enough to hide the latency of both FMA units, and few enough for the registers.
const ACCUMULATORS: usize = 12;
const ROUNDS: usize = 2_000_000;

/// Loop of multiply-adds on registers of `LANES` elements; the result is its number of operations. `FUSED` needs the FMA
/// instruction; without it every step would be a call.
#[inline(always)]
fn register_loop<const LANES: usize, const FUSED: bool>(rounds: usize) -> f64 {
    let (factor, term) = (black_box(0.999f32), black_box(0.001f32));
    // Passed by value, so that every accumulator becomes a register.
    let step = |mut x: [f32; LANES]| {
        for x in &mut x {
            *x = if FUSED {
                x.mul_add(factor, term)
            } else {
                *x * factor + term
            };
        }
        x
    };
    let [mut a, mut b, mut c, mut d, mut e, mut f] = [[1.0f32; LANES]; 6];
    let [mut g, mut h, mut i, mut j, mut k, mut l] = [[2.0f32; LANES]; 6];
    for _ in 0..rounds {
        (a, b, c, d) = (step(a), step(b), step(c), step(d));
        (e, f, g, h) = (step(e), step(f), step(g), step(h));
        (i, j, k, l) = (step(i), step(j), step(k), step(l));
    }
    black_box([a, b, c, d, e, f, g, h, i, j, k, l]);
    (2 * ACCUMULATORS * LANES * rounds) as f64
}

#[cfg(target_arch = "x86_64")]
fn multiply_adds(rounds: usize) -> f64 {
    #[target_feature(enable = "avx512f,avx2,fma")]
    fn wide(rounds: usize) -> f64 {
        register_loop::<16, true>(rounds)
    }
    #[target_feature(enable = "avx2,fma")]
    fn narrow(rounds: usize) -> f64 {
        register_loop::<8, true>(rounds)
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature was detected, and it implies the others.
        unsafe { wide(rounds) }
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the features were detected.
        unsafe { narrow(rounds) }
    } else {
        register_loop::<4, false>(rounds)
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_adds(rounds: usize) -> f64 {
    register_loop::<4, true>(rounds)
}

/// Sum of words in 64 independent sums.
#[inline(always)]
fn sum_loop(words: &[u32]) -> u32 {
    const SUMS: usize = 64;
    let mut sums = [0u32; SUMS];
    for words in words.chunks_exact(SUMS) {
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(target_arch = "x86_64")]
fn sum(words: &[u32]) -> u32 {
    #[target_feature(enable = "avx512f,avx2,fma")]
    fn wide(words: &[u32]) -> u32 {
        sum_loop(words)
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature was detected, and it implies the others.
        return unsafe { wide(words) };
    }
    sum_loop(words)
}

#[cfg(not(target_arch = "x86_64"))]
fn sum(words: &[u32]) -> u32 {
    sum_loop(words)
}

/// Arrays larger than the caches of most machines.
struct Stream {
    a: Array<f32>,
    b: Array<f32>,
    c: Array<f32>,
}

/// Elements per array (128 MiB).
const STREAM: usize = 32 << 20;
/// Elements that one task moves.
const PART: usize = 1 << 18;

impl Stream {
    fn new() -> Self {
        let array = |value| Array::new(STREAM, value);
        Self {
            a: array(0.0),
            b: array(1.0),
            c: array(2.0),
        }
    }

    /// Bytes per second of the better of copy (two streams) and triad (three streams).
    fn best(&mut self, all_cores: bool) -> f64 {
        let bytes = (STREAM * size_of::<f32>()) as f64;
        let copy = best(4, 2.0 * bytes, || {
            self.run(all_cores, |a, b, _| a.copy_from_slice(b));
        });
        let triad = best(4, 3.0 * bytes, || {
            self.run(all_cores, |a, b, c| {
                for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
                    *a = b + 3.0 * c;
                }
            });
        });
        copy.max(triad)
    }

    /// Bytes per second of a sum of all words.
    fn best_read(&self, all_cores: bool) -> f64 {
        let words: &[u32] = bytemuck::cast_slice(self.b.get());
        best(4, size_of_val(words) as f64, || {
            black_box(match all_cores {
                true => words
                    .par_chunks(PART)
                    .map(sum)
                    .reduce(|| 0, u32::wrapping_add),
                false => sum(words),
            });
        })
    }

    /// Bytes per second, read and written, of a multiplication in place, on all cores.
    fn best_update(&mut self) -> f64 {
        let values = self.a.get_mut();
        best(4, 2.0 * size_of_val(values) as f64, || scale(values))
    }

    fn run(&mut self, all_cores: bool, f: impl Fn(&mut [f32], &[f32], &[f32]) + Sync) {
        let (a, b, c) = (self.a.get_mut(), self.b.get(), self.c.get());
        if all_cores {
            let parts = a.par_chunks_mut(PART);
            parts
                .zip(b.par_chunks(PART))
                .zip(c.par_chunks(PART))
                .for_each(|((a, b), c)| f(a, b, c));
        } else {
            f(a, b, c);
        }
        black_box(&mut self.a);
    }
}
