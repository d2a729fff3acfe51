//! Fuzz targets for input from outside, one per kind of input. `.ci/fuzz` runs them.

pub mod memory;
pub mod targets;

#[global_allocator]
static COUNTING: memory::Counting = memory::Counting;

/// Reads `bytes` as the kind of input called `name`.
///
/// # Panics
/// When no kind has this name, or its reader exceeds its memory limit.
pub fn check(name: &str, bytes: &[u8]) {
    let target = targets::target(name).expect("a kind of input");
    let _accepted = target.check(bytes);
}
