//! A number that loom guards: it fails a model in which two threads may use it at once and one of them writes.

use loom::cell::UnsafeCell;

#[derive(Debug)]
pub(crate) struct Guarded(UnsafeCell<u64>);

// SAFETY: loom looks at every access, and a model ends before the first that overlaps with another.
unsafe impl Sync for Guarded {}

impl Guarded {
    pub(crate) fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> u64 {
        // SAFETY: nobody writes meanwhile, as loom checks.
        self.0.with(|value| unsafe { *value })
    }

    pub(crate) fn set(&self, value: u64) {
        // SAFETY: nobody else reads or writes meanwhile, as loom checks.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}
