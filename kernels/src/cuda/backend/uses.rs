//! When places of the arena were used last, so that a copy beside the computation waits for no more than it must.
//!
//! Computing is one queue in order: a place that is given back may be taken at once, because who takes it queues behind
//! who had it. A copy that runs beside that queue must wait for the last use itself. Uses are counted, not marked:
//! only when a copy needs a moment is one recorded, and a later one is as right, if less early.

use super::{Cause, Moment};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Moments kept: more than copies that are behind at once.
const MOMENTS: usize = 64;

/// The uses of one arena.
#[derive(Debug, Default)]
pub(super) struct Uses(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Works queued so far.
    queued: u64,
    /// By start: end, and the works queued when the place was given back.
    released: BTreeMap<u64, (u64, u64)>,
    /// Moments behind so many works, ascending.
    moments: VecDeque<(u64, Moment)>,
}

impl Uses {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every statement leaves a state that is right.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more work is in the queue.
    pub(super) fn count(&self) {
        self.lock().queued += 1;
    }

    /// The place was given back: all its uses are in the queue.
    pub(super) fn release(&self, place: Range<u64>) {
        let mut inner = self.lock();
        let inside = inner.released.range(place.clone());
        let inside: Vec<u64> = inside
            .filter(|(_, (end, _))| *end <= place.end)
            .map(|(start, _)| *start)
            .collect();
        for start in inside {
            inner.released.remove(&start);
        }
        let queued = inner.queued;
        let (end, _) = inner
            .released
            .get(&place.start)
            .copied()
            .unwrap_or_default();
        // A longer place that began here and was not wholly used again is as late now.
        inner
            .released
            .insert(place.start, (place.end.max(end), queued));
    }

    /// A moment behind the last use of `place`; `None` where it was never used.
    pub(super) fn behind(
        &self,
        place: Range<u64>,
        now: impl Fn() -> Result<Moment, Cause>,
    ) -> Result<Option<Moment>, Cause> {
        let mut inner = self.lock();
        let before = inner.released.range(..place.end);
        let uses = before.filter(|(_, (end, _))| *end > place.start);
        let Some(last) = uses.map(|(_, (_, queued))| *queued).max() else {
            return Ok(None);
        };
        if let Some((_, moment)) = inner.moments.iter().find(|(queued, _)| *queued >= last) {
            return Ok(Some(moment.clone()));
        }
        inner.mark(now).map(Some)
    }

    /// Notes a moment behind everything queued so far, so that later copies need not wait for what comes behind it.
    pub(super) fn mark(&self, now: impl Fn() -> Result<Moment, Cause>) -> Result<(), Cause> {
        self.lock().mark(now).map(drop)
    }
}

impl Inner {
    fn mark(&mut self, now: impl Fn() -> Result<Moment, Cause>) -> Result<Moment, Cause> {
        if let Some((queued, moment)) = self.moments.back()
            && *queued == self.queued
        {
            return Ok(moment.clone());
        }
        let moment = now()?;
        self.moments.push_back((self.queued, moment.clone()));
        if self.moments.len() > MOMENTS {
            self.moments.pop_front();
        }
        Ok(moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn a_copy_waits_for_the_last_use_of_its_range_and_no_later_one() {
        let (uses, marks) = (Uses::default(), AtomicU64::new(0));
        let now =
            || -> Result<Moment, Cause> { Ok(Arc::new(marks.fetch_add(1, Ordering::Relaxed))) };
        let behind = |place| {
            let moment = uses.behind(place, now).unwrap();
            moment.map(|moment| *moment.downcast_ref::<u64>().unwrap())
        };
        assert_eq!(behind(0..64), None);
        uses.count();
        uses.release(0..64);
        uses.release(64..128);
        uses.mark(now).unwrap();
        uses.count();
        // What was used before the mark need not wait for what came behind it.
        assert_eq!(behind(0..64), Some(0));
        assert_eq!(behind(100..101), Some(0));
        assert_eq!(behind(128..200), None);
        // A part is used again.
        uses.release(32..96);
        assert_eq!(behind(0..200), Some(1));
        assert_eq!(behind(0..32), Some(0));
        // The same place, shorter: the rest is taken for as late.
        uses.count();
        uses.release(0..16);
        assert_eq!(behind(0..1), Some(2));
        assert_eq!(behind(96..128), Some(0));
        // Wholly used again: one entry.
        uses.release(0..256);
        assert_eq!(uses.lock().released.len(), 1);
    }
}
