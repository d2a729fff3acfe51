//! Loom models of the engine's state machines, in every order of their threads.
//!
//! The machines are the engine's own files, included with loom's primitives instead of those of the standard library
//! (`engine/src/sync.rs`). Where all orders are too many, a model bounds the number of preemptions. Each model
//! documents its property and the changes that make it fail.
#![cfg(test)]

#[path = "../../../engine/src/comm/bell.rs"]
#[allow(dead_code, reason = "models do not spin")]
mod bell;
#[path = "../../../engine/src/handover.rs"]
#[allow(dead_code, reason = "an idle one has no thread")]
mod handover;
#[path = "../../../engine/src/spill/queue.rs"]
#[allow(dead_code, unreachable_pub, reason = "no model measures traffic")]
mod queue;
#[path = "../../../engine/src/comm/ring.rs"]
#[allow(dead_code, reason = "messages of errors are made from records, too")]
mod ring;
mod sync;

mod collectives;
mod disk_queue;
mod guarded;
mod residency;

/// Runs `model` in every order with at most `interruptions` preemptions of a thread. Loom's variable
/// `LOOM_MAX_PREEMPTIONS` overrides the bound.
fn check(interruptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(interruptions));
    builder.max_branches = 20_000;
    builder.check(model);
}
