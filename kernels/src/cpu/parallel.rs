//! Division of work into tasks. Tasks depend on shapes only, so results do not depend on threads.
#![allow(
    unsafe_code,
    reason = "tasks write disjoint, interleaved parts of one output"
)]

use rayon::prelude::*;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Floating-point operations below which waking another thread (about 50 us) costs more than it saves.
pub(crate) const MIN_PARALLEL_FLOPS: usize = 8 << 20;
/// Number of elements of a pointwise loop below which waking another thread costs more than it saves.
pub(crate) const MIN_PARALLEL_ELEMS: usize = 1 << 17;
/// Spins of a waiting thread before it yields the processor.
const SPINS: u32 = 1 << 12;
/// Elements per task of a pointwise loop.
const TASK_ELEMS: usize = 1 << 15;

/// Number of threads of the current rayon pool.
pub(crate) fn workers() -> usize {
    rayon::current_num_threads()
}

/// Scratch buffers that `tasks` tasks need at one time.
pub(crate) fn slots(tasks: usize) -> usize {
    tasks.min(workers()).max(1)
}

/// Runs `task(index, its scratch)` for `0..tasks` on as many threads as `scratch` has buffers of `scratch_len`. If no
/// scratch is needed, all threads take part.
pub(crate) fn run_tasks(
    tasks: usize,
    scratch: &mut [f32],
    scratch_len: usize,
    parallel: bool,
    task: impl Fn(usize, &mut [f32]) + Sync,
) {
    let buffers = scratch.len().checked_div(scratch_len);
    let slots = buffers.map_or(slots(tasks), |n| n.min(slots(tasks)));
    let (mut rest, mut buffers) = (scratch, Vec::with_capacity(slots));
    for _ in 0..slots {
        let (buffer, tail) = rest.split_at_mut(scratch_len);
        buffers.push(buffer);
        rest = tail;
    }
    if !parallel || slots == 1 {
        let buffer = &mut *buffers[0];
        return (0..tasks).for_each(|i| task(i, buffer));
    }
    let next = AtomicUsize::new(0);
    buffers.into_par_iter().with_max_len(1).for_each(|buffer| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= tasks {
                break;
            }
            task(i, buffer);
        }
    });
}

/// Progress of one phase: the next task to begin, and the number of ended tasks.
struct Round {
    tasks: usize,
    next: AtomicUsize,
    ended: AtomicUsize,
}

/// Guard that counts a task as ended, even if it panics, so no thread waits forever.
struct Ending<'a>(&'a AtomicUsize);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Runs `task(phase, 0..tasks(phase))` for `0..phases` on all threads. A phase begins after the previous one ended. A
/// thread waits only for tasks that other threads are already running, so the call makes progress with any number of
/// free threads.
pub(crate) fn run_phases(
    phases: usize,
    tasks: impl Fn(usize) -> usize,
    parallel: bool,
    task: impl Fn(usize, usize) + Sync,
) {
    let threads = workers();
    if !parallel || threads == 1 {
        for phase in 0..phases {
            (0..tasks(phase)).for_each(|i| task(phase, i));
        }
        return;
    }
    let phases: Vec<Round> = (0..phases)
        .map(|phase| Round {
            tasks: tasks(phase),
            next: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
        })
        .collect();
    (0..threads).into_par_iter().with_max_len(1).for_each(|_| {
        for (at, phase) in phases.iter().enumerate() {
            loop {
                let i = phase.next.fetch_add(1, Ordering::Relaxed);
                if i >= phase.tasks {
                    break;
                }
                let _ending = Ending(&phase.ended);
                task(at, i);
            }
            let mut turns = 0u32;
            while phase.ended.load(Ordering::Acquire) < phase.tasks {
                turns += 1;
                if turns < SPINS {
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
        }
    });
}

/// Calls `f(first element, chunk)` on chunks of `out`, in parallel if `out` is large. Chunks start at multiples of
/// `row` elements.
pub(crate) fn chunks<T: Send>(out: &mut [T], row: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if out.is_empty() || row == 0 {
        return;
    }
    if out.len() < MIN_PARALLEL_ELEMS || workers() == 1 {
        return f(0, out);
    }
    let chunk = TASK_ELEMS.div_ceil(row) * row;
    out.par_chunks_mut(chunk)
        .enumerate()
        .for_each(|(i, part)| f(i * chunk, part));
}

/// Output whose disjoint parts are written by different tasks.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are available only through an unsafe function whose contract requires that they are disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(all: &'a mut [T]) -> Self {
        Self {
            start: all.as_mut_ptr(),
            len: all.len(),
            _borrow: PhantomData,
        }
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    /// No other task may access an element of the range while the result lives.
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees disjoint ranges")]
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start + len <= self.len, "{start} + {len} of {}", self.len);
        // SAFETY: inside the borrowed slice by the assertion, exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    /// Pointer to the element with index `start`, at most one past the end. Panics if `start` is larger.
    pub(crate) fn at(&self, start: usize) -> *mut T {
        assert!(start <= self.len, "{start} of {}", self.len);
        // SAFETY: inside the borrowed slice, or one past its end.
        unsafe { self.start.add(start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn on_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads").install(f)
    }

    #[test]
    fn a_phase_begins_after_the_previous_one_has_ended() {
        for threads in [1, 2, 5] {
            let seen = Mutex::new(Vec::new());
            let sizes = [7, 0, 1, 40, 3];
            on_threads(threads, || {
                run_phases(
                    sizes.len(),
                    |p| sizes[p],
                    true,
                    |phase, i| {
                        seen.lock().expect("no task panics").push((phase, i));
                    },
                );
            });
            let seen = seen.into_inner().expect("no task panics");
            assert!(seen.is_sorted_by_key(|(phase, _)| *phase), "{threads}");
            let mut sorted = seen;
            sorted.sort_unstable();
            let all = sizes.iter().enumerate();
            let all: Vec<_> = all
                .flat_map(|(p, n)| (0..*n).map(move |i| (p, i)))
                .collect();
            assert_eq!(sorted, all, "{threads}");
        }
    }

    #[test]
    fn a_panic_propagates_out_of_the_phases_without_a_deadlock() {
        let ended = std::panic::catch_unwind(|| {
            on_threads(3, || {
                run_phases(
                    4,
                    |_| 9,
                    true,
                    |phase, i| {
                        assert!((phase, i) != (1, 4), "on purpose");
                    },
                );
            });
        });
        assert!(ended.is_err());
    }
}
