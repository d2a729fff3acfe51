//! Data loader: threads that prepare batches ahead of time, delivered in order.
//!
//! Worker `w` of `n` prepares batches `w`, `w + n`, `w + 2n`, … and sends them to its own bounded channel. The
//! consumer receives from the channels in turn, so no sorting is needed. At most `ahead + threads` batches exist at
//! any time.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, bounded};

/// Options of a data loader: its number of threads, and how many batches they prepare ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Number of worker threads. With 0 the consumer prepares each batch when it needs it.
    pub threads: usize,
    /// Maximum number of finished batches, over all threads, that wait for the consumer. It is rounded up to
    /// a positive multiple of `threads`; without threads it has no effect.
    pub ahead: usize,
}

impl LoaderOptions {
    /// Default options for the data loader of one rank on a machine with `cores` cores and `local_world_size`
    /// ranks: one thread less than the rank's share of the cores, but from one to four, and two batches ahead
    /// per thread. The threads decode images while the rank computes.
    pub fn for_node(cores: usize, local_world_size: usize) -> Self {
        let threads = (cores / local_world_size.max(1))
            .saturating_sub(1)
            .clamp(1, 4);
        Self {
            threads,
            ahead: 2 * threads,
        }
    }
}

/// Data that a loader prepared for one micro-batch, with the training step and micro-batch that it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared<T> {
    /// Number of the training step, from the range given to [`Loader::new`]. A run counts its steps from 0.
    pub step: u64,
    /// Micro-batch within the step, counted from 0.
    pub micro_step: u64,
    /// Value that the loader's `prepare` function returned for this micro-batch.
    pub batch: T,
}

type Prepare<T, E> = dyn Fn(u64, u64) -> Result<T, E> + Send + Sync;

/// Iterator over the prepared micro-batches of a range of training steps, in order. Worker threads, if there
/// are any, prepare them ahead. It ends after an error.
pub struct Loader<T, E> {
    prepare: Arc<Prepare<T, E>>,
    channels: Vec<Receiver<Result<T, E>>>,
    workers: Vec<JoinHandle<()>>,
    next: u64,
    end: u64,
    first_step: u64,
    micro_steps: u64,
    waited: Duration,
}

impl<T, E> std::fmt::Debug for Loader<T, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("workers", &self.workers.len())
            .field("next", &self.next)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static, E: Send + 'static> Loader<T, E> {
    /// Starts worker threads that call `prepare(step, micro_step)` for each of the `micro_steps`
    /// micro-batches of every step in `steps`. Without threads, the consumer calls it for each batch.
    ///
    /// # Errors
    /// A thread cannot start.
    ///
    /// # Panics
    /// When `micro_steps` is zero.
    pub fn new(
        options: LoaderOptions,
        steps: Range<u64>,
        micro_steps: u64,
        prepare: impl Fn(u64, u64) -> Result<T, E> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        assert!(micro_steps > 0, "a step has at least one micro-batch");
        let prepare: Arc<Prepare<T, E>> = Arc::new(prepare);
        let threads = options.threads;
        let (first_step, end) = (
            steps.start,
            steps.end.saturating_sub(steps.start) * micro_steps,
        );
        let mut channels = Vec::with_capacity(threads);
        let mut workers = Vec::with_capacity(threads);
        for worker in 0..threads {
            let (sender, receiver) = bounded(options.ahead.div_ceil(threads).max(1));
            let prepare = Arc::clone(&prepare);
            channels.push(receiver);
            let thread = Builder::new().name(format!("data {worker}"));
            workers.push(thread.spawn(move || {
                for item in (worker as u64..end).step_by(threads) {
                    let batch = prepare(first_step + item / micro_steps, item % micro_steps);
                    let failed = batch.is_err();
                    // The loader was dropped, or an error ended it.
                    if sender.send(batch).is_err() || failed {
                        break;
                    }
                }
            })?);
        }
        Ok(Self {
            prepare,
            channels,
            workers,
            next: 0,
            end,
            first_step,
            micro_steps,
            waited: Duration::ZERO,
        })
    }

    /// Total time that the consumer has waited for batches since the loader was made. Without threads, it is
    /// the time of preparing them.
    pub const fn waited(&self) -> Duration {
        self.waited
    }
}

impl<T: Send + 'static, E: Send + 'static> Iterator for Loader<T, E> {
    type Item = Result<Prepared<T>, E>;

    /// The next batch in order.
    ///
    /// # Panics
    /// When `prepare` panicked in a worker, with the same panic.
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.end {
            return None;
        }
        let (step, micro_step) = (
            self.first_step + self.next / self.micro_steps,
            self.next % self.micro_steps,
        );
        let started = Instant::now();
        let received = match self.channels.len() {
            0 => Ok((self.prepare)(step, micro_step)),
            threads => self.channels[(self.next % threads as u64) as usize].recv(),
        };
        self.waited += started.elapsed();
        let Ok(batch) = received else {
            // A worker closes its channel early only by panicking.
            let worker = (self.next % self.channels.len() as u64) as usize;
            let worker = self.workers.swap_remove(worker);
            self.next = self.end;
            match worker.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => return None,
            }
        };
        self.next = if batch.is_ok() {
            self.next + 1
        } else {
            self.end
        };
        Some(batch.map(|batch| Prepared {
            step,
            micro_step,
            batch,
        }))
    }
}

impl<T, E> Drop for Loader<T, E> {
    fn drop(&mut self) {
        // Workers blocked on a full channel wake up and end.
        self.channels.clear();
        for worker in self.workers.drain(..) {
            // A worker's panic is ignored, because its batch was not requested.
            drop(worker.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn options(threads: usize, ahead: usize) -> LoaderOptions {
        LoaderOptions { threads, ahead }
    }

    #[test]
    fn batches_come_in_order_from_any_number_of_threads() {
        for threads in 0..5 {
            let loader = Loader::new(options(threads, 3), 5..12, 3, |step, micro| {
                Ok::<_, ()>((step, micro))
            })
            .expect("threads");
            let places: Vec<_> = loader
                .map(|item| {
                    let item = item.expect("prepared");
                    assert_eq!(item.batch, (item.step, item.micro_step));
                    item.batch
                })
                .collect();
            let expected: Vec<_> = (5..12)
                .flat_map(|step| (0..3).map(move |micro| (step, micro)))
                .collect();
            assert_eq!(places, expected);
        }
    }

    #[test]
    fn an_error_arrives_in_order_and_ends_the_stream() {
        let mut loader = Loader::new(options(3, 6), 0..100, 1, |step, _| {
            if step == 4 {
                Err("bad picture")
            } else {
                Ok(step)
            }
        })
        .expect("threads");
        for expected in 0..4 {
            assert_eq!(
                loader.next().expect("one more").expect("good").batch,
                expected
            );
        }
        assert_eq!(loader.next(), Some(Err("bad picture")));
        assert_eq!(loader.next(), None);
    }

    #[test]
    fn the_loader_prefetches_a_bounded_number_of_batches() {
        let prepared = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&prepared);
        let (started, starts) = crossbeam::channel::unbounded();
        let mut loader = Loader::new(options(2, 4), 0..1000, 1, move |step, _| {
            count.fetch_add(1, Ordering::SeqCst);
            started.send(()).expect("test is listening");
            Ok::<_, ()>(step)
        })
        .expect("threads");
        // Four batches are ready, and each worker holds one that it cannot deliver yet.
        for _ in 0..6 {
            starts.recv().expect("started");
        }
        assert_eq!(prepared.load(Ordering::SeqCst), 6);
        assert!(loader.next().is_some());
        starts.recv().expect("room for one more");
        assert_eq!(prepared.load(Ordering::SeqCst), 7);
    }

    #[test]
    fn dropping_the_loader_ends_its_threads() {
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        let mut loader = Loader::new(options(3, 3), 0..1_000_000, 1, move |step, _| {
            let _held = &held;
            Ok::<_, ()>(step)
        })
        .expect("threads");
        assert!(loader.next().is_some());
        drop(loader);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    #[should_panic(expected = "decoder bug")]
    fn a_panic_of_a_worker_reaches_the_consumer() {
        let loader = Loader::new(options(2, 2), 0..10, 1, |step, _| {
            assert!(step != 3, "decoder bug");
            Ok::<_, ()>(step)
        })
        .expect("threads");
        for item in loader {
            drop(item);
        }
    }

    #[test]
    fn loader_threads_leave_a_core_for_each_rank() {
        assert_eq!(LoaderOptions::for_node(2, 2).threads, 1);
        assert_eq!(LoaderOptions::for_node(16, 2).threads, 4);
        assert_eq!(LoaderOptions::for_node(8, 2).threads, 3);
    }
}
