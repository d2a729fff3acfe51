//! State machines of the engine in every order of their threads, under loom.
//!
//! The machines are the engine's own files: here they find loom's primitives where a program has those of the standard
//! library (`engine/src/sync.rs`). A model bounds how often a thread is interrupted where all orders are too many; what
//! each shows, and which change makes it fail, stands with it.
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

/// Runs `model` in every order in which a thread is interrupted at most `interruptions` times, or as often as loom's
/// variable `LOOM_MAX_PREEMPTIONS` says.
fn check(interruptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(interruptions));
    builder.max_branches = 20_000;
    builder.check(model);
}
