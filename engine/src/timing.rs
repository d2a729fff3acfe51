//! Times of one rank: communication, copies, and the work of a discrete device.

use crate::plan::Tier;
use kernels::{DeviceLane, DeviceSpan};
use std::time::{Duration, Instant};

/// Total time that one rank has spent in collectives and in copies between memory tiers, since its states
/// were allocated. [`Times::since`] gives the difference of two readings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Times {
    /// Total time inside collectives: waits for peers, and reading and adding their data.
    pub communication: Duration,
    /// Total time of this rank's copies to and from offloaded tiers (host memory and disk), waits included.
    pub offload: Duration,
}

impl Times {
    /// Times between the reading `earlier` and this one: the difference of every field, at least 0.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            communication: self.communication.saturating_sub(earlier.communication),
            offload: self.offload.saturating_sub(earlier.offload),
        }
    }
}

/// Total times and copied bytes of one rank's discrete device (a GPU whose memory the host cannot address),
/// by the device's clock. Copies overlap with computation, so the sum of the fields may exceed the elapsed
/// time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceTimes {
    /// Total time of the device's computation in training passes, without its waits.
    pub compute: Duration,
    /// Total time that the device's computation waited for data that was being copied to the device.
    pub waits: Duration,
    /// Total time of the device's host-to-device copies.
    pub inward: Duration,
    /// Total time of the device's device-to-host copies.
    pub outward: Duration,
    /// Total time of transfers to this rank's device from the devices of other ranks.
    pub communication: Duration,
    /// Total time of optimizer updates by CPU threads during passes, by the host's clock. An update during
    /// forward is counted when the thread has returned the unit's state.
    pub updates: Duration,
    /// Total bytes of host-to-device copies.
    pub inward_bytes: u64,
    /// Total bytes of device-to-host copies.
    pub outward_bytes: u64,
}

impl DeviceTimes {
    /// Adds measured spans. A wait is either inside a unit's computation or outside of it; waits inside are
    /// subtracted.
    pub(crate) fn add(&mut self, spans: &[DeviceSpan]) {
        let of = |lane| spans.iter().filter(move |span| span.lane == lane);
        let total = |lane| -> Duration { of(lane).map(|span| span.length).sum() };
        let inside = of(DeviceLane::Wait).filter(|wait| {
            let middle = wait.start + wait.length / 2;
            of(DeviceLane::Compute).any(|w| w.start <= middle && middle < w.start + w.length)
        });
        let inside: Duration = inside.map(|wait| wait.length).sum();
        self.compute += total(DeviceLane::Compute).saturating_sub(inside);
        self.waits += total(DeviceLane::Wait);
        self.inward += total(DeviceLane::Inward);
        self.outward += total(DeviceLane::Outward);
        self.communication += total(DeviceLane::Communication);
        let bytes = |lane| of(lane).map(|span| span.bytes).sum::<u64>();
        self.inward_bytes += bytes(DeviceLane::Inward);
        self.outward_bytes += bytes(DeviceLane::Outward);
    }

    /// Times and bytes between the reading `earlier` and this one: the difference of every field, at least 0.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            compute: self.compute.saturating_sub(earlier.compute),
            waits: self.waits.saturating_sub(earlier.waits),
            inward: self.inward.saturating_sub(earlier.inward),
            outward: self.outward.saturating_sub(earlier.outward),
            communication: self.communication.saturating_sub(earlier.communication),
            updates: self.updates.saturating_sub(earlier.updates),
            inward_bytes: self.inward_bytes.saturating_sub(earlier.inward_bytes),
            outward_bytes: self.outward_bytes.saturating_sub(earlier.outward_bytes),
        }
    }
}

/// Total time of copies to and from tiers other than the device's.
#[derive(Debug, Default)]
pub(crate) struct CopyClock(Duration);

impl CopyClock {
    /// Runs `copy` and adds its time, unless `tier`, its source or target, is the device.
    pub(crate) fn time<R>(&mut self, tier: Tier, copy: impl FnOnce() -> R) -> R {
        if tier == Tier::Device {
            return copy();
        }
        let started = Instant::now();
        let result = copy();
        self.0 += started.elapsed();
        result
    }

    /// Adds a wait for copies that another thread makes.
    pub(crate) fn count(&mut self, waited: Duration) {
        self.0 += waited;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.0 += other.0;
    }

    pub(crate) fn total(&self) -> Duration {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_copies_to_another_tier_are_timed() {
        let mut clock = CopyClock::default();
        let work = || (0..1000).map(std::hint::black_box).sum::<u64>();
        assert_eq!(clock.time(Tier::Device, work), 499_500);
        assert_eq!(clock.total(), Duration::ZERO);
        assert_eq!(clock.time(Tier::Host, work), 499_500);
        assert!(clock.total() > Duration::ZERO);
    }

    #[test]
    fn waits_inside_device_work_do_not_count_as_work() {
        let origin = Instant::now();
        let span = |lane, from, to| DeviceSpan {
            lane,
            label: 0,
            start: origin + Duration::from_millis(from),
            length: Duration::from_millis(to - from),
            bytes: 10 * to,
        };
        let mut times = DeviceTimes::default();
        times.add(&[
            span(DeviceLane::Compute, 0, 10),
            span(DeviceLane::Wait, 4, 6),
            span(DeviceLane::Wait, 10, 13),
            span(DeviceLane::Compute, 13, 20),
            span(DeviceLane::Inward, 3, 6),
            span(DeviceLane::Outward, 7, 8),
            span(DeviceLane::Communication, 8, 12),
        ]);
        let millis = Duration::from_millis;
        let want = DeviceTimes {
            compute: millis(15),
            waits: millis(5),
            inward: millis(3),
            outward: millis(1),
            communication: millis(4),
            updates: Duration::ZERO,
            inward_bytes: 60,
            outward_bytes: 80,
        };
        assert_eq!(times, want);
        assert_eq!(times.since(want), DeviceTimes::default());
    }

    #[test]
    fn differences_of_times_are_never_negative() {
        let later = Times {
            communication: Duration::from_millis(5),
            offload: Duration::from_millis(1),
        };
        assert_eq!(later.since(Times::default()), later);
        assert_eq!(Times::default().since(later), Times::default());
    }
}
