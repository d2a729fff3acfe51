//! Synchronization primitives of the state machines that threads share. `tests/loom` compiles the same state machines
//! with loom's primitives instead, and checks all interleavings.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub(crate) mod atomic {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}

pub(crate) mod channel {
    pub(crate) use crossbeam::channel::{Receiver, Sender, unbounded};
}

pub(crate) mod thread {
    pub(crate) use std::thread::{Builder, JoinHandle};
}

pub(crate) mod futex {
    use rustix::thread::futex;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    /// Waits while `word` equals `seen`, at most for `limit`; may also return early.
    pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
        let limit = futex::Timespec::try_from(limit).ok();
        // After any error (changed value, signal, time limit) the caller checks the word again.
        futex::wait(word, futex::Flags::empty(), seen, limit.as_ref()).unwrap_or(());
    }

    /// Wakes all threads that wait on `word`.
    pub(crate) fn wake_all(word: &AtomicU32) {
        // Waking cannot fail on a mapped word, and a waiter has its deadline in any case.
        futex::wake(word, futex::Flags::empty(), i32::MAX as u32).unwrap_or(0);
    }
}
