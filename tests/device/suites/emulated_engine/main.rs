//! The engine on the emulated GPU: passes on the device, states there or in host memory.

#![allow(unreachable_pub, reason = "helpers of a test binary")]

mod boundaries;
mod collectives;
mod delays;
mod peers;
mod plan;
mod references;
mod resident;
mod setup;
mod sharded;
mod training;
