//! The engine on the emulated GPU: weights, gradients and optimizer in host memory, passes on the device.

#![allow(unreachable_pub, reason = "helpers of a test binary")]

mod delays;
mod peers;
mod plan;
mod setup;
mod training;
