//! The event counter on which all ranks of a window sleep. `README.md` has its correctness argument, and `tests/loom`
//! runs it in every order of threads.

use crate::sync::atomic::{AtomicU32, Ordering::SeqCst};
use crate::sync::futex;
use std::time::{Duration, Instant};

/// About the cost of falling asleep and waking up, so that no wait costs more than twice the better choice.
const SPIN: Duration = Duration::from_micros(5);

/// Counter of changes of the window, with its sleepers. All zero is the initial state.
#[repr(C, align(128))]
pub(super) struct Bell {
    pub(super) events: AtomicU32,
    pub(super) sleepers: AtomicU32,
}

impl Bell {
    /// The value to pass to [`Bell::wait`]; taken before the condition is evaluated.
    pub(super) fn events(&self) -> u32 {
        self.events.load(SeqCst)
    }

    /// Rings the bell. Must be called after every change.
    pub(super) fn ring(&self) {
        self.events.fetch_add(1, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            futex::wake_all(&self.events);
        }
    }

    /// Calls `look` after every change until it returns a value. An error is the time after which it is called in any
    /// case.
    pub(super) fn until<T>(&self, spin: bool, mut look: impl FnMut() -> Result<T, Duration>) -> T {
        loop {
            let seen = self.events();
            match look() {
                Ok(value) => return value,
                Err(limit) => self.wait(seen, limit, spin),
            }
        }
    }

    /// Returns after the bell has rung since `seen` was taken, after `limit`, or for no reason.
    pub(super) fn wait(&self, seen: u32, limit: Duration, spin: bool) {
        if spin && self.spin(seen) {
            return;
        }
        self.sleepers.fetch_add(1, SeqCst);
        if self.events.load(SeqCst) == seen {
            futex::wait(&self.events, seen, limit);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    fn spin(&self, seen: u32) -> bool {
        let started = Instant::now();
        while started.elapsed() < SPIN {
            for _ in 0..16 {
                if self.events.load(SeqCst) != seen {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        false
    }
}
