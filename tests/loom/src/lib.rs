//! Loom models of the engine's state machines, run in every order of their threads with few preemptions.
//!
//! The state machines are the engine's own files, compiled with loom's primitives instead of the standard library's
//! (`engine/src/sync.rs`). If a model has too many orders, it limits how often a thread is interrupted. Each model
//! states what it shows and which changes make it fail.
#![cfg(test)]

#[path = "../../../engine/src/comm/bell.rs"]
#[allow(dead_code, reason = "models do not spin")]
mod bell;
#[path = "../../../engine/src/offload/spill/queue.rs"]
#[allow(dead_code, unreachable_pub, reason = "no model measures traffic")]
mod queue;
#[path = "../../../engine/src/comm/ring.rs"]
#[allow(dead_code, reason = "messages of errors are made from records, too")]
mod ring;
mod sync;
#[path = "../../../engine/src/offload/worker.rs"]
#[allow(dead_code, reason = "an idle one has no thread")]
mod worker;

mod collectives;
mod disk_queue;
mod guarded;
mod residency;

/// Runs `model` in every order in which a thread is interrupted at most `interruptions` times. Loom's variable
/// `LOOM_MAX_PREEMPTIONS` overrides the limit.
fn check(interruptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(interruptions));
    builder.max_branches = 20_000;
    builder.check(model);
}
