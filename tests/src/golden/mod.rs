//! Golden packs: reading what a reference computed, and comparing with it.
//!
//! A pack is a tiny model folder with `cases/` (raw samples, pictures, expected tensors) and
//! `trajectory.json` (losses along optimizer steps). The format is the one of the folders beside
//! the test suites; any other folder of that format can be compared too.

pub mod cog;
mod compare;
mod family;
mod glm;
pub mod minicpm;
mod pack;

pub use compare::{
    CaseRun, Comparison, compare_computed, compare_floats, compare_gradient, compare_ints,
    compare_loss, compare_tap, largest_gradient,
};
pub use family::{AdamW, PackFamily, Section, Trajectory, floats, packs_of};
pub use pack::{Case, Data, Expected, Pack, Stored, read_json};
