//! The emulator's clock. It models a device with one queue and one bus per direction, on which every command takes a
//! time given by its size. Nothing is measured, so the same commands always take the same time.

use kernels::{DeviceLane, DeviceSpan};
use std::time::{Duration, Instant};

/// Time of a launch, and of each of its blocks.
const LAUNCH_NANOS: u64 = 2_000;
const BLOCK_NANOS: u64 = 500;
/// Bytes that a bus moves per nanosecond.
const BUS_BYTES: u64 = 8;

/// Nanoseconds since the machine was made.
type Nanos = u64;

/// Start and end times of the queue and of both bus directions.
#[derive(Debug)]
pub(crate) struct Clock {
    origin: Instant,
    measures: bool,
    /// Time at which the queue and each direction of the bus finish their work.
    queue: Nanos,
    inward: Nanos,
    outward: Nanos,
    /// Time at which each command of the queue finishes.
    done: Vec<Nanos>,
    open: Option<(u32, Nanos)>,
    spans: Vec<DeviceSpan>,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            origin: Instant::now(),
            measures: false,
            queue: 0,
            inward: 0,
            outward: 0,
            done: Vec::new(),
            open: None,
            spans: Vec::new(),
        }
    }
}

impl Clock {
    /// Adds a launch of `blocks` blocks, or another command of the queue.
    pub(crate) fn command(&mut self, blocks: u64) {
        self.queue += LAUNCH_NANOS + blocks * BLOCK_NANOS;
        self.done.push(self.queue);
    }

    /// Adds an upload that starts after the first `behind` commands. Commands queued later wait for it.
    pub(crate) fn upload(&mut self, bytes: usize, behind: u64) {
        let start = self.inward.max(self.event(behind));
        self.inward = start + bytes as u64 / BUS_BYTES;
        self.note((DeviceLane::Inward, bytes), 0, start, self.inward);
        if self.inward > self.queue {
            self.note((DeviceLane::Wait, 0), 0, self.queue, self.inward);
            self.queue = self.inward;
        }
    }

    /// Adds a fetch that starts after the first `behind` commands.
    pub(crate) fn fetch(&mut self, bytes: usize, behind: u64) {
        let start = self.outward.max(self.event(behind));
        self.outward = start + bytes as u64 / BUS_BYTES;
        self.note((DeviceLane::Outward, bytes), 0, start, self.outward);
    }

    /// Time at which the first `commands` commands are finished.
    fn event(&self, commands: u64) -> Nanos {
        let last = commands
            .checked_sub(1)
            .and_then(|n| self.done.get(n as usize));
        last.copied().unwrap_or(0)
    }

    fn note(&mut self, (lane, bytes): (DeviceLane, usize), label: u32, from: Nanos, to: Nanos) {
        if self.measures {
            self.spans.push(DeviceSpan {
                lane,
                label,
                start: self.origin + Duration::from_nanos(from),
                length: Duration::from_nanos(to - from),
                bytes: bytes as u64,
            });
        }
    }

    pub(crate) fn measure(&mut self, on: bool) {
        if on != self.measures {
            self.spans.clear();
            self.open = None;
        }
        if on && !self.measures {
            self.meet();
        }
        self.measures = on;
    }

    /// Aligns the end of the queue with the present time of the host, whose clock runs independently.
    fn meet(&mut self) {
        let now = Instant::now();
        let passed = Duration::from_nanos(self.queue);
        self.origin = now.checked_sub(passed).unwrap_or(now);
    }

    pub(crate) fn label(&mut self, label: Option<u32>) {
        if let Some((label, from)) = self.open.take() {
            self.note((DeviceLane::Compute, 0), label, from, self.queue);
        }
        self.open = label.map(|label| (label, self.queue));
    }

    pub(crate) fn take(&mut self) -> Vec<DeviceSpan> {
        self.meet();
        std::mem::take(&mut self.spans)
    }
}
