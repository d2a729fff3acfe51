//! Storage outside a pass: tiers with their regions, saved activations, spill files, and the worker thread.

pub(crate) mod activations;
pub(crate) mod counters;
pub(crate) mod parallel;
pub mod spill;
pub mod tier;
pub(crate) mod worker;

pub use activations::{Activations, Saved};
pub use tier::{Region, Spill, Tiers};
