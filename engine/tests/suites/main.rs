//! The engine's suites: one program, which is linked once.

#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test program: a broken expectation ends the test where it stands"
)]

mod checkpoints;
mod checks;
mod dry_run;
mod hostile;
mod invariants;
mod optimizer_in_backward;
mod optimizer_in_forward;
mod pipeline;
mod shared_frozen;
mod toy;
