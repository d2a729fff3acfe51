//! Where a rank's time goes beside computing: what a training loop cannot see from outside.

use crate::plan::Tier;
use std::time::{Duration, Instant};

/// Time of one rank since its states were allocated. Only ever grows: take differences.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Times {
    /// Inside collectives: waiting for peers, reading and adding their data.
    pub communication: Duration,
    /// Copying between the tiers of this rank.
    pub offload: Duration,
}

impl Times {
    /// What was added since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            communication: self.communication.saturating_sub(earlier.communication),
            offload: self.offload.saturating_sub(earlier.offload),
        }
    }
}

/// Sum of the copies to and from memory that is not the device's.
#[derive(Debug, Default)]
pub(crate) struct CopyClock(Duration);

impl CopyClock {
    /// Runs `copy`, which crosses tiers when one of its ends rests on `tier`.
    pub(crate) fn time<R>(&mut self, tier: Tier, copy: impl FnOnce() -> R) -> R {
        if tier == Tier::Device {
            return copy();
        }
        let started = Instant::now();
        let result = copy();
        self.0 += started.elapsed();
        result
    }

    /// Counts a wait for copies that somebody else makes.
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
    fn only_copies_to_another_tier_count() {
        let mut clock = CopyClock::default();
        let work = || (0..1000).map(std::hint::black_box).sum::<u64>();
        assert_eq!(clock.time(Tier::Device, work), 499_500);
        assert_eq!(clock.total(), Duration::ZERO);
        assert_eq!(clock.time(Tier::Host, work), 499_500);
        assert!(clock.total() > Duration::ZERO);
    }

    #[test]
    fn differences_never_go_below_zero() {
        let later = Times {
            communication: Duration::from_millis(5),
            offload: Duration::from_millis(1),
        };
        assert_eq!(later.since(Times::default()), later);
        assert_eq!(Times::default().since(later), Times::default());
    }
}
