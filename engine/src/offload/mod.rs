//! Storage of model states and saved activations: tiers and their regions, spill files, and worker threads.

pub(crate) mod activations;
pub(crate) mod counters;
pub(crate) mod parallel;
pub mod spill;
pub mod tier;
pub(crate) mod worker;

pub use activations::{Activations, Saved};
pub use tier::{Region, Spill, Tiers};
