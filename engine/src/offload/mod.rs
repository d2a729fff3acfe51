//! Memory outside a pass: tiers and their regions, activations saved for backward, spill files, and the worker thread.

pub(crate) mod activations;
pub(crate) mod counters;
pub(crate) mod parallel;
pub mod spill;
pub mod tier;
pub(crate) mod worker;

pub use activations::{Activations, Saved};
pub use tier::{Region, Spill, Tiers};
