//! The memory of a run before it runs: what each rank holds on which tier in which phase, whether
//! that fits, and `launcher plan`, which prints it.

#[cfg(all(test, feature = "cuda"))]
mod batches;
mod dry_run;
mod early;
mod fixed;
#[cfg(test)]
mod headline;
mod machine;
mod matrix;
mod memory;
mod nearest;
mod places;
mod planner;
mod rule;
#[cfg(test)]
mod tests;
mod text;
mod verb;

pub(crate) use dry_run::{HeldOut, Work, dry_run, window_region};
pub(crate) use early::{Spare, early_line, early_share, late_line, settle_early_step};
pub(crate) use fixed::Fixed;
pub(crate) use machine::Machine;
pub use memory::{PhaseBytes, RankMemory, RankPeak};
pub(crate) use places::Places;
pub(crate) use rule::Fit;
pub(crate) use verb::run;
