//! Bytes that the decoders of one process may hold at a time.
//!
//! A reader reserves the bytes of an image before it reads the file, and waits until they are free. It returns what
//! only the decoder needed when the image is decoded, and the rest when the image is dropped. Readers are served in
//! the order in which they ask, so a large image does not wait forever. An image larger than the whole budget takes
//! all of it: it is decoded alone. A thread holds one image at a time, so readers never wait for each other.

use std::ops::Deref;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use super::RgbImage;

/// Budget of all readers of images on one machine, in bytes: about ten photos of 24 megapixels.
pub const MACHINE_BYTES: u64 = 1 << 30;

static PROCESS: LazyLock<Arc<DecodeBudget>> =
    LazyLock::new(|| Arc::new(DecodeBudget::new(MACHINE_BYTES)));

/// Bytes that readers of images share.
#[derive(Debug)]
pub struct DecodeBudget {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    total: u64,
    reserved: u64,
    /// Number of the reader that asks next, and of the one that is served next.
    next: u64,
    serving: u64,
}

/// Bytes reserved in a budget, returned when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<DecodeBudget>,
    bytes: u64,
}

/// A decoded image, with its reservation in a budget, if any.
#[derive(Debug)]
pub struct Decoded {
    image: RgbImage,
    _reservation: Option<Reservation>,
}

impl DecodeBudget {
    /// Budget of `total` bytes.
    #[must_use]
    pub fn new(total: u64) -> Self {
        Self {
            state: Mutex::new(State {
                total,
                reserved: 0,
                next: 0,
                serving: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// The budget that all readers of this process share, at first [`MACHINE_BYTES`].
    #[must_use]
    pub fn of_process() -> Arc<Self> {
        Arc::clone(&PROCESS)
    }

    /// Changes the size of the budget to `total` bytes. Images in memory keep theirs.
    pub fn resize(&self, total: u64) {
        self.state().total = total;
        self.changed.notify_all();
    }

    /// Waits until `bytes` are free, at most the whole budget, and reserves them.
    #[must_use]
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Reservation {
        let mut state = self.state();
        let own = state.next;
        state.next += 1;
        let waits = |state: &mut State| {
            // An image larger than the whole budget needs all of it.
            let alone = state.reserved == 0;
            state.serving != own || !alone && state.reserved.saturating_add(bytes) > state.total
        };
        state = self
            .changed
            .wait_while(state, waits)
            .unwrap_or_else(PoisonError::into_inner);
        state.reserved += bytes;
        state.serving += 1;
        drop(state);
        // The next reader may be served already.
        self.changed.notify_all();
        Reservation {
            budget: Arc::clone(self),
            bytes,
        }
    }

    /// Bytes that are reserved now.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.state().reserved
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Returns all but `bytes` to the budget.
    pub fn shrink(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.budget.state().reserved -= less;
        self.budget.changed.notify_all();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

impl Decoded {
    /// `image`, which keeps `reservation` until it is dropped.
    #[must_use]
    pub fn new(image: RgbImage, reservation: Reservation) -> Self {
        Self {
            image,
            _reservation: Some(reservation),
        }
    }
}

impl From<RgbImage> for Decoded {
    /// An image outside every budget.
    fn from(image: RgbImage) -> Self {
        Self {
            image,
            _reservation: None,
        }
    }
}

impl Deref for Decoded {
    type Target = RgbImage;

    fn deref(&self) -> &RgbImage {
        &self.image
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::channel;

    #[test]
    fn readers_never_hold_more_than_the_budget() {
        let budget = Arc::new(DecodeBudget::new(100));
        let (held, most) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for reader in 0..8u64 {
                let (budget, held, most) = (&budget, &held, &most);
                scope.spawn(move || {
                    for turn in 0..200 {
                        let bytes = 10 + (reader * 13 + turn * 7) % 50;
                        let reservation = budget.reserve(bytes);
                        let now = held.fetch_add(bytes, Ordering::SeqCst) + bytes;
                        most.fetch_max(now, Ordering::SeqCst);
                        held.fetch_sub(bytes, Ordering::SeqCst);
                        drop(reservation);
                    }
                });
            }
        });
        assert!(most.load(Ordering::SeqCst) <= 100);
        assert_eq!(budget.reserved_bytes(), 0);
    }

    #[test]
    fn an_image_larger_than_the_budget_is_alone_and_readers_are_served_in_order() {
        let budget = Arc::new(DecodeBudget::new(100));
        let mut first = budget.reserve(60);
        let (sender, served) = channel();
        std::thread::scope(|scope| {
            for (place, bytes) in [(1, 500), (2, 10)] {
                let (own, sender) = (Arc::clone(&budget), sender.clone());
                scope.spawn(move || {
                    let reservation = own.reserve(bytes);
                    sender.send((place, own.reserved_bytes())).unwrap();
                    drop(reservation);
                });
                // The next reader starts once this one has asked.
                while budget.state().next < place + 1 {
                    std::thread::yield_now();
                }
            }
            // Ten bytes are free, but the reader before needs all of them.
            first.shrink(30);
            assert!(served.try_recv().is_err());
            drop(first);
            assert_eq!(served.recv().unwrap(), (1, 500));
            assert_eq!(served.recv().unwrap(), (2, 10));
        });
    }
}
