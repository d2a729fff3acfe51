//! Last uses of ranges of the arena, so that a copy beside the computation waits no longer than necessary.
//!
//! Computation is one queue in order. A freed range can be allocated again at once, because its next owner queues
//! work after the previous owner's. A copy beside that queue must itself wait for the last use. Uses are only
//! counted. An event is recorded when a copy needs one; a later event is equally correct, only less early.

use super::{Cause, Event};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of events stored: more than copies that lag behind at one time.
const MOMENTS: usize = 64;

/// Last uses of the ranges of one arena.
#[derive(Debug, Default)]
pub(super) struct Uses(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Number of commands queued so far.
    queued: u64,
    /// Freed ranges by start: their end, and the number of commands queued when they were freed.
    released: BTreeMap<u64, (u64, u64)>,
    /// Events with the number of commands queued before each, ascending.
    events: VecDeque<(u64, Event)>,
}

impl Uses {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every statement leaves a valid state, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more command that was queued on the device.
    pub(super) fn count(&self) {
        self.lock().queued += 1;
    }

    /// Records that a range was freed; all its uses are queued.
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
        // A longer range that began here and was not used again as a whole counts as used now.
        inner
            .released
            .insert(place.start, (place.end.max(end), queued));
    }

    /// Event after the last use of `place`. `None` if it was never used.
    pub(super) fn behind(
        &self,
        place: Range<u64>,
        now: impl Fn() -> Result<Event, Cause>,
    ) -> Result<Option<Event>, Cause> {
        let mut inner = self.lock();
        let before = inner.released.range(..place.end);
        let uses = before.filter(|(_, (end, _))| *end > place.start);
        let Some(last) = uses.map(|(_, (_, queued))| *queued).max() else {
            return Ok(None);
        };
        if let Some((_, event)) = inner.events.iter().find(|(queued, _)| *queued >= last) {
            return Ok(Some(event.clone()));
        }
        inner.mark(now).map(Some)
    }

    /// Records an event after everything queued so far. Later copies then need not wait for work queued after it.
    pub(super) fn mark(&self, now: impl Fn() -> Result<Event, Cause>) -> Result<(), Cause> {
        self.lock().mark(now).map(drop)
    }
}

impl Inner {
    fn mark(&mut self, now: impl Fn() -> Result<Event, Cause>) -> Result<Event, Cause> {
        if let Some((queued, event)) = self.events.back()
            && *queued == self.queued
        {
            return Ok(event.clone());
        }
        let event = now()?;
        self.events.push_back((self.queued, event.clone()));
        if self.events.len() > MOMENTS {
            self.events.pop_front();
        }
        Ok(event)
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
            || -> Result<Event, Cause> { Ok(Arc::new(marks.fetch_add(1, Ordering::Relaxed))) };
        let behind = |place| {
            let event = uses.behind(place, now).unwrap();
            event.map(|event| *event.downcast_ref::<u64>().unwrap())
        };
        assert_eq!(behind(0..64), None);
        uses.count();
        uses.release(0..64);
        uses.release(64..128);
        uses.mark(now).unwrap();
        uses.count();
        // A range used before the event need not wait for work queued after it.
        assert_eq!(behind(0..64), Some(0));
        assert_eq!(behind(100..101), Some(0));
        assert_eq!(behind(128..200), None);
        // A part is used again.
        uses.release(32..96);
        assert_eq!(behind(0..200), Some(1));
        assert_eq!(behind(0..32), Some(0));
        // The same start, but shorter: the rest counts as used equally late.
        uses.count();
        uses.release(0..16);
        assert_eq!(behind(0..1), Some(2));
        assert_eq!(behind(96..128), Some(0));
        // Used again as a whole: one entry.
        uses.release(0..256);
        assert_eq!(uses.lock().released.len(), 1);
    }
}
