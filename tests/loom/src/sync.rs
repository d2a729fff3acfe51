//! Loom's primitives under the names of `engine/src/sync.rs`.

pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::sync::PoisonError;

pub(crate) mod thread {
    pub(crate) use loom::thread::{Builder, JoinHandle};
}

/// Atomics with fences around sequentially consistent accesses. Loom treats such an access as acquire and release only,
/// but orders fences as the language does.
pub(crate) mod atomic {
    pub(crate) use loom::sync::atomic::Ordering;
    use loom::sync::atomic::fence;

    macro_rules! atomic {
        ($name:ident, $value:ty) => {
            #[derive(Debug)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            #[allow(dead_code, reason = "not every type is used in every way")]
            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                fn around<T>(
                    &self,
                    order: Ordering,
                    access: impl FnOnce(Option<Ordering>) -> T,
                ) -> T {
                    if order != Ordering::SeqCst {
                        return access(Some(order));
                    }
                    // Other threads may run between the previous access and the fence.
                    self.0.load(Ordering::Relaxed);
                    fence(Ordering::SeqCst);
                    let value = access(None);
                    fence(Ordering::SeqCst);
                    value
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    self.around(order, |order| {
                        self.0.load(order.unwrap_or(Ordering::Acquire))
                    })
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    self.around(order, |order| {
                        self.0.store(value, order.unwrap_or(Ordering::Release))
                    });
                }

                pub(crate) fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                    self.around(order, |order| {
                        self.0.fetch_add(value, order.unwrap_or(Ordering::AcqRel))
                    })
                }

                pub(crate) fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                    self.around(order, |order| {
                        self.0.fetch_sub(value, order.unwrap_or(Ordering::AcqRel))
                    })
                }
            }
        };
    }

    atomic!(AtomicU32, u32);
    atomic!(AtomicU64, u64);
}

/// A futex as the system has it: `wait` compares the word again under a lock that wakers take too.
pub(crate) mod futex {
    use super::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};
    use std::time::Duration;

    loom::lazy_static! {
        static ref SLEEPERS: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    /// Ignores the timeout, so that a lost wake-up is a deadlock, which loom reports.
    pub(crate) fn wait(word: &AtomicU32, seen: u32, _: Duration) {
        let (lock, woken) = &*SLEEPERS;
        let guard = lock.lock().expect("no thread panics with it");
        if word.load(Ordering::Relaxed) == seen {
            drop(woken.wait(guard).expect("no thread panics with it"));
        }
    }

    pub(crate) fn wake_all(_: &AtomicU32) {
        let (lock, woken) = &*SLEEPERS;
        let _guard = lock.lock().expect("no thread panics with it");
        woken.notify_all();
    }
}

/// An unbounded channel with several senders and receivers.
pub(crate) mod channel {
    use loom::sync::{Arc, Condvar, Mutex};
    use std::collections::VecDeque;

    #[derive(Debug)]
    struct State<T> {
        items: VecDeque<T>,
        senders: usize,
        receivers: usize,
    }

    #[derive(Debug)]
    struct Shared<T> {
        state: Mutex<State<T>>,
        changed: Condvar,
    }

    #[derive(Debug)]
    pub(crate) struct Closed;

    #[derive(Debug)]
    pub(crate) struct Sender<T>(Arc<Shared<T>>);

    #[derive(Debug)]
    pub(crate) struct Receiver<T>(Arc<Shared<T>>);

    pub(crate) fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
        let state = State {
            items: VecDeque::new(),
            senders: 1,
            receivers: 1,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        (Sender(shared.clone()), Receiver(shared))
    }

    impl<T> Sender<T> {
        pub(crate) fn send(&self, item: T) -> Result<(), Closed> {
            let mut state = self.0.state.lock().expect("no thread panics with it");
            if state.receivers == 0 {
                return Err(Closed);
            }
            state.items.push_back(item);
            drop(state);
            self.0.changed.notify_one();
            Ok(())
        }
    }

    impl<T> Receiver<T> {
        pub(crate) fn recv(&self) -> Result<T, Closed> {
            let mut state = self.0.state.lock().expect("no thread panics with it");
            loop {
                if let Some(item) = state.items.pop_front() {
                    return Ok(item);
                }
                if state.senders == 0 {
                    return Err(Closed);
                }
                state = self
                    .0
                    .changed
                    .wait(state)
                    .expect("no thread panics with it");
            }
        }
    }

    impl<T> Clone for Receiver<T> {
        fn clone(&self) -> Self {
            self.0
                .state
                .lock()
                .expect("no thread panics with it")
                .receivers += 1;
            Self(self.0.clone())
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            self.0
                .state
                .lock()
                .expect("no thread panics with it")
                .senders -= 1;
            self.0.changed.notify_all();
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            self.0
                .state
                .lock()
                .expect("no thread panics with it")
                .receivers -= 1;
        }
    }
}
