//! An allocator that counts what a thread holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, counted.
#[derive(Debug)]
pub struct Counting;

thread_local! {
    // Without a destructor, so that it may be used whenever memory is given back.
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let held = HELD.get() + bytes;
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        // Old and new exist at once where the block has to move.
        count(new_bytes.cast_signed());
        count(-layout.size().cast_signed());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(place, layout, new_bytes) }
    }
}

/// What `run` returns, and the most bytes that this thread held meanwhile beyond what it held before.
pub fn peak<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let value = run();
    (value, (PEAK.get() - before).unsigned_abs())
}
