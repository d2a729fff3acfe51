//! Timeline of a discrete device. The host only queues work, so the host's clock cannot tell when the device runs it.

use std::time::{Duration, Instant};

/// Queue of work on a device, which runs in parallel with the other queues.
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

/// Time span in which a device's queue was busy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSpan {
    /// Queue that was busy.
    pub lane: DeviceLane,
    /// Label of the work, see [`crate::Backend::label`]; 0 for copies.
    pub label: u32,
    /// Time at which the work started, on the host's clock.
    pub start: Instant,
    /// Time that the work took.
    pub length: Duration,
    /// Number of bytes copied between host and device; 0 for other work.
    pub bytes: u64,
}
