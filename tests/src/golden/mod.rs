//! Golden packs: stored results of a reference implementation, and the comparison with them.
//!
//! A pack is a tiny model directory with `cases/` (raw samples, images, expected tensors) and `trajectory.json` (losses
//! along optimizer steps). The packs beside the suites define the format. Any other directory of that format can be
//! compared too.

pub mod cog;
mod compare;
mod family;
mod glm;
pub mod minicpm;
mod pack;
pub mod quantized;
mod supported;
mod trajectories;

pub use compare::{
    CaseRun, Comparison, compare_activation, compare_computed, compare_floats, compare_gradient,
    compare_ints, compare_loss, largest_gradient,
};
pub use family::{AdamW, PackFamily, Section, Trajectory, floats, packs_of};
pub use pack::{Case, Data, Expected, Pack, Stored, read_json};
