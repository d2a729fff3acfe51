//! Number guarded by loom: a model fails if two threads may access it at the same time and one of them writes.

use loom::cell::UnsafeCell;

#[derive(Debug)]
pub(crate) struct Guarded(UnsafeCell<u64>);

// SAFETY: loom checks every access, and a model ends before the first overlapping one.
unsafe impl Sync for Guarded {}

impl Guarded {
    pub(crate) fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> u64 {
        // SAFETY: nothing writes at the same time, as loom checks.
        self.0.with(|value| unsafe { *value })
    }

    pub(crate) fn set(&self, value: u64) {
        // SAFETY: nothing else reads or writes at the same time, as loom checks.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}
