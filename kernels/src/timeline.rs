//! Timeline of a discrete device. The host only queues work, so the host's clock cannot tell when the device runs it.

use std::time::{Duration, Instant};

/// Lane of a device's timeline: a queue of work (CUDA stream), or the waits of the compute queue. Lanes run
/// in parallel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DeviceLane {
    /// Computation, from one label to the next, including waits.
    Compute,
    /// Waits of the computation for data that comes to the device.
    Wait,
    /// Host-to-device copies.
    Inward,
    /// Device-to-host copies.
    Outward,
    /// Communication with other ranks.
    Communication,
}

/// Recorded time span of a device's timeline, in which one lane was busy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSpan {
    /// Lane that was busy: computation, waits, copies or communication.
    pub lane: DeviceLane,
    /// Label that [`crate::Backend::label`] had set for the work; 0 for copies.
    pub label: u32,
    /// Start of the span, on the host's clock.
    pub start: Instant,
    /// Duration of the span.
    pub length: Duration,
    /// Number of bytes copied between host and device; 0 for other work.
    pub bytes: u64,
}
