//! What the state machines that threads share are made of. `tests/loom` compiles the same machines with loom's
//! primitives in the place of this module, and runs them in every order.

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

    /// Sleeps while `word` is `seen`, at most for `limit`, or wakes for no reason.
    pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
        let limit = futex::Timespec::try_from(limit).ok();
        // Every error (changed value, signal, time limit) means: look again.
        futex::wait(word, futex::Flags::empty(), seen, limit.as_ref()).unwrap_or(());
    }

    /// Wakes all who sleep on `word`.
    pub(crate) fn wake_all(word: &AtomicU32) {
        // Waking cannot fail on a mapped word, and a waiter has its deadline in any case.
        futex::wake(word, futex::Flags::empty(), i32::MAX as u32).unwrap_or(0);
    }
}
