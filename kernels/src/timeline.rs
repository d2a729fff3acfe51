//! What a device apart did when: the host only queues its work, so that the host's clock knows nothing of it.

use std::time::{Duration, Instant};

/// One of a device's queues.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DeviceLane {
    /// Its work, from one label to the next, waits included.
    Compute,
    /// The work's waits for what comes to the device.
    Wait,
    /// Copies to the device.
    Inward,
    /// Copies from the device.
    Outward,
    /// What comes from other ranks.
    Communication,
}

/// A stretch of a device's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSpan {
    /// Who was busy.
    pub lane: DeviceLane,
    /// What the work was labelled with; 0 for copies.
    pub label: u32,
    /// When it began, on the host's clock.
    pub start: Instant,
    /// How long it took.
    pub length: Duration,
    /// What crossed the bus between host and device.
    pub bytes: u64,
}
