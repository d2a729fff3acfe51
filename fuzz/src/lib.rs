//! Fuzzers of what this program reads from outside, one per kind of input; run by `.ci/fuzz`.

pub mod memory;
pub mod targets;

#[global_allocator]
static COUNTING: memory::Counting = memory::Counting;

/// Reads `bytes` as the kind called `name`.
///
/// # Panics
/// There is no such kind, or its reader took more memory than it may.
pub fn check(name: &str, bytes: &[u8]) {
    let target = targets::target(name).expect("a kind of input");
    let _accepted = target.check(bytes);
}
