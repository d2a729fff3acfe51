//! ZeRO stages 0-3 as one code path: plan, communicators, sharded parameter store, offload tiers, checkpoints.
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod comm;
