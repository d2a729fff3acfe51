//! ZeRO stages 0-3 as one code path: plan, communicators, sharded parameter store, offload tiers, checkpoints.
#![deny(unsafe_code)]

pub mod access;
mod activations;
pub mod checkpoint;
pub mod comm;
mod error;
mod gradients;
pub mod plan;
mod prefetch;
mod rehearsal;
pub mod sharded;
mod snapshot;
pub mod spec;
pub mod spill;
mod state;
mod store;
pub mod tier;
mod timing;
mod update;
mod zero;

pub use access::{Lease, LeaseOwner, ParamAccess, Phase};
pub use activations::{Activations, Saved};
pub use error::EngineError;
pub use optim::Precision;
pub use optim::clip::{NORM_BLOCK_ELEMS, sum_of_squares};
pub use plan::{GradDtype, Offload, PassKind, Plan, Stage, StateKind, Tier, ZeroConfig};
pub use rehearsal::Rehearsal;
pub use snapshot::check_trained;
pub use spec::{ModelSpec, ParamId, ParamSpec, TensorParallel, UnitId, UnitSpec};
pub use tier::{Region, Spill, Tiers};
pub use timing::Times;
pub use zero::{OptimizerConfig, StepReport, Zero};
