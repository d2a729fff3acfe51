//! Timeline of a discrete device. The host only queues work, so the host's clock cannot tell when the device runs it.

use std::time::{Duration, Instant};

/// Queue of a device.
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
    /// The queue.
    pub lane: DeviceLane,
    /// Label of the work, see [`crate::Backend::label`]; 0 for copies.
    pub label: u32,
    /// Start on the host's clock.
    pub start: Instant,
    /// Duration.
    pub length: Duration,
    /// Bytes copied between host and device.
    pub bytes: u64,
}
