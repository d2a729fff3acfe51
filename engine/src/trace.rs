//! What a rank did when: spans of its passes, collectives, updates and disk requests, for steps that are asked for.
//!
//! Nothing is recorded, and one flag is looked at, while no recording runs. Names are those of the model's units.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Which of a rank's workers was busy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// Passes of the model: from a unit's lease to its end.
    Compute,
    /// Waiting for peers, reading and adding their data.
    Communication,
    /// Copies between tiers, and waits for them.
    Offload,
    /// Gradients on their way from a discrete device to their sums.
    GradientAccumulator,
    /// Updates behind the pass.
    Update,
    /// Updates beside backward.
    UpdateInBackward,
    /// Updates beside the next pass.
    UpdateInForward,
    /// Work of a discrete device: from a unit's first to its last.
    Device,
    /// Waits of that work for what comes to the device.
    DeviceWait,
    /// Copies to a discrete device.
    Inward,
    /// Copies from it.
    Outward,
    /// What comes to it from devices of other ranks.
    Between,
    /// One thread of the disk queue.
    Disk(u16),
}

impl Lane {
    /// A name for people.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Compute => "compute".into(),
            Self::Communication => "communication".into(),
            Self::Offload => "offload".into(),
            Self::GradientAccumulator => "gradients".into(),
            Self::Update => "update".into(),
            Self::UpdateInBackward => "early update".into(),
            Self::UpdateInForward => "late update".into(),
            Self::Device => "device".into(),
            Self::DeviceWait => "device waits".into(),
            Self::Inward => "to the device".into(),
            Self::Outward => "from the device".into(),
            Self::Between => "between devices".into(),
            Self::Disk(thread) => format!("disk {thread}"),
        }
    }

    /// A number that orders lanes as they are declared.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Compute => 0,
            Self::Communication => 1,
            Self::Offload => 2,
            Self::GradientAccumulator => 3,
            Self::Update => 4,
            Self::UpdateInBackward => 5,
            Self::UpdateInForward => 6,
            Self::Device => 7,
            Self::DeviceWait => 8,
            Self::Inward => 9,
            Self::Outward => 10,
            Self::Between => 11,
            Self::Disk(thread) => 12 + u32::from(thread),
        }
    }
}

/// A stretch of time of one lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// Who was busy.
    pub lane: Lane,
    /// With what.
    pub name: String,
    /// Since the recording began.
    pub start: Duration,
    /// How long.
    pub length: Duration,
}

#[derive(Debug)]
struct Recording {
    origin: Instant,
    spans: Vec<Span>,
}

#[derive(Debug, Default)]
struct Inner {
    on: AtomicBool,
    recording: Mutex<Option<Recording>>,
}

/// The recorder of one rank; clones are the same recorder.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Inner>);

impl Trace {
    fn recording(&self) -> std::sync::MutexGuard<'_, Option<Recording>> {
        // A panic elsewhere leaves a list of spans, which stays one.
        let recording = self.0.recording.lock();
        recording.unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to record; what was recorded before is forgotten.
    pub fn start(&self) {
        *self.recording() = Some(Recording {
            origin: Instant::now(),
            spans: Vec::new(),
        });
        // Spans are recorded under the lock: this only says whether to look.
        self.0.on.store(true, Ordering::Relaxed);
    }

    /// Ends the recording and returns its spans in order of their starts; none where none ran.
    #[must_use]
    pub fn stop(&self) -> Vec<Span> {
        self.0.on.store(false, Ordering::Relaxed);
        let recording = self.recording().take();
        let mut spans = recording.map_or_else(Vec::new, |recording| recording.spans);
        spans.sort_by_key(|span| (span.start, span.lane));
        spans
    }

    /// The present moment, if it is recorded.
    pub(crate) fn now(&self) -> Option<Instant> {
        self.0.on.load(Ordering::Relaxed).then(Instant::now)
    }

    /// Records what began at `started`, which [`Trace::now`] gave, and ends now.
    pub(crate) fn end(&self, started: Option<Instant>, lane: Lane, name: impl FnOnce() -> String) {
        if let Some(started) = started {
            self.add(lane, (started, started.elapsed()), name);
        }
    }

    /// Records a stretch of time that somebody else measured: when it began, and how long it was.
    pub(crate) fn add(
        &self,
        lane: Lane,
        (started, length): (Instant, Duration),
        name: impl FnOnce() -> String,
    ) {
        if let Some(recording) = &mut *self.recording()
            && let Some(start) = started.checked_duration_since(recording.origin)
        {
            recording.spans.push(Span {
                lane,
                name: name(),
                start,
                length,
            });
        }
    }

    /// Runs `body` as a span.
    pub(crate) fn span<R>(
        &self,
        lane: Lane,
        name: impl FnOnce() -> String,
        body: impl FnOnce() -> R,
    ) -> R {
        let started = self.now();
        let result = body();
        self.end(started, lane, name);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_spans_that_begin_and_end_while_tracing_are_recorded() {
        let trace = Trace::default();
        let name = |text: &str| text.to_owned();
        trace.span(Lane::Compute, || name("before"), || ());
        assert_eq!(trace.stop(), []);
        let early = Some(Instant::now());
        trace.start();
        trace.end(early, Lane::Compute, || name("began before"));
        trace.span(
            Lane::Update,
            || name("outer"),
            || trace.span(Lane::Disk(3), || name("inner"), || ()),
        );
        let spans = trace.stop();
        let names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
        assert_eq!(names, ["outer", "inner"]);
        assert!(spans[1].start + spans[1].length <= spans[0].start + spans[0].length);
        assert_eq!(trace.stop(), []);
    }
}
