//! Golden packs: reading what a reference computed, and comparing with it.
//!
//! A pack is a tiny model folder with `cases/` (raw samples, pictures, expected tensors) and
//! `trajectory.json` (losses along optimizer steps). The format is the one of the folders beside
//! the test suites; any other folder of that format can be compared too.

mod compare;
mod pack;

pub use compare::{
    CaseRun, Comparison, compare_floats, compare_inputs, compare_ints, compare_run,
    compare_trajectory,
};
pub use pack::{AdamW, AdapterConfig, Case, Data, Expected, Pack, Run, Stored, Trajectory};
