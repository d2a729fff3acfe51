//! The emulator's clock: what a device with one queue and a bus in each direction would do when, if every work took as
//! long as its size says. Nothing is measured, so that the same works always take the same time.

use kernels::{DeviceLane, DeviceSpan};
use std::time::{Duration, Instant};

/// Of a launch, and for each of its blocks.
const LAUNCH_NANOS: u64 = 2_000;
const BLOCK_NANOS: u64 = 500;
/// Bytes that a bus moves in a nanosecond.
const BUS_BYTES: u64 = 8;

/// Nanoseconds since the machine was made.
type Nanos = u64;

/// What happens when.
#[derive(Debug)]
pub(crate) struct Clock {
    origin: Instant,
    measures: bool,
    /// When the queue, and each direction of the bus, is done with what it has.
    queue: Nanos,
    inward: Nanos,
    outward: Nanos,
    /// When each work of the queue is done.
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
    /// A launch of so many blocks, or another work of the queue.
    pub(crate) fn work(&mut self, blocks: u64) {
        self.queue += LAUNCH_NANOS + blocks * BLOCK_NANOS;
        self.done.push(self.queue);
    }

    /// An upload behind the first `behind` works; what is queued from here on waits for it.
    pub(crate) fn upload(&mut self, bytes: usize, behind: u64) {
        let start = self.inward.max(self.moment(behind));
        self.inward = start + bytes as u64 / BUS_BYTES;
        self.note((DeviceLane::Inward, bytes), 0, start, self.inward);
        if self.inward > self.queue {
            self.note((DeviceLane::Wait, 0), 0, self.queue, self.inward);
            self.queue = self.inward;
        }
    }

    /// A fetch behind the first `behind` works.
    pub(crate) fn fetch(&mut self, bytes: usize, behind: u64) {
        let start = self.outward.max(self.moment(behind));
        self.outward = start + bytes as u64 / BUS_BYTES;
        self.note((DeviceLane::Outward, bytes), 0, start, self.outward);
    }

    /// When the first `works` works are done.
    fn moment(&self, works: u64) -> Nanos {
        let last = works.checked_sub(1).and_then(|n| self.done.get(n as usize));
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

    /// From here on the end of the queue so far is the present moment of the host's clock, which goes its own way.
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
