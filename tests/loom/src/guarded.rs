//! A number guarded by loom. A model fails if one thread writes it while another may access it.

use loom::cell::UnsafeCell;

#[derive(Debug)]
pub(crate) struct Guarded(UnsafeCell<u64>);

// SAFETY: loom observes every access, and a model stops before overlapping accesses.
unsafe impl Sync for Guarded {}

impl Guarded {
    pub(crate) fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> u64 {
        // SAFETY: nobody writes at the same time, as loom checks.
        self.0.with(|value| unsafe { *value })
    }

    pub(crate) fn set(&self, value: u64) {
        // SAFETY: nobody else reads or writes at the same time, as loom checks.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}
