//! ZeRO stages 0-3 as one code path: plan, communicators, sharded parameter store, offload tiers, checkpoints.
#![deny(unsafe_code)]

pub mod access;
pub mod checkpoint;
pub mod comm;
mod error;
pub mod spec;

pub use access::{Lease, LeaseOwner, ParamAccess, Phase};
pub use error::EngineError;
pub use spec::{ModelSpec, ParamId, ParamSpec, Precision, TensorParallel, UnitId, UnitSpec};
