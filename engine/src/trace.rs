//! Trace of a rank: spans of passes, collectives, updates and disk requests, during a recording.
//!
//! Without a recording a span costs one check of a flag. Names of spans contain the names of the model's units.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lane of a rank's trace: the worker, e.g. a thread or a device queue, whose activities it shows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lane {
    /// Passes of the model: from a unit's lease to its end.
    Compute,
    /// Collectives: waits for peers, reading and adding their data.
    Communication,
    /// Copies between tiers, and waits for them.
    Offload,
    /// Thread that fetches gradients from a discrete device and adds them to their sums.
    GradientAccumulator,
    /// Optimizer updates after the pass.
    Update,
    /// Optimizer updates during the backward pass.
    UpdateInBackward,
    /// Optimizer updates during the next forward pass.
    UpdateInForward,
    /// Computation of a discrete device: from a unit's first to its last kernel.
    Device,
    /// Waits of the device's computation for data that is copied to the device.
    DeviceWait,
    /// Copies from the host to the device.
    Inward,
    /// Copies from the device to the host.
    Outward,
    /// Transfers to the device from devices of other ranks.
    Between,
    /// Thread that sends values to the previous pipeline stage.
    ToPrevious,
    /// Thread that sends values to the next pipeline stage.
    ToNext,
    /// One thread of the disk queue, by index.
    Disk(u16),
}

impl Lane {
    /// Name of the lane (the worker of a rank) for display, e.g. `compute`.
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
            Self::ToPrevious => "to the previous stage".into(),
            Self::ToNext => "to the next stage".into(),
            Self::Disk(thread) => format!("disk {thread}"),
        }
    }

    /// Index of the lane in the order of declaration, from 0. Disk threads have 14 and up.
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
            Self::ToPrevious => 12,
            Self::ToNext => 13,
            Self::Disk(thread) => 14 + u32::from(thread),
        }
    }
}

/// One traced activity: a time interval of one lane (a worker of a rank).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// Lane of the activity: the worker of the rank that did it.
    pub lane: Lane,
    /// What the worker did, e.g. `gather llm.layers.3`.
    pub name: String,
    /// Start of the activity: time since the recording began.
    pub start: Duration,
    /// Duration of the activity.
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

/// Trace recorder of one rank: it collects [`Span`]s during a recording. Clones share the recording.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Inner>);

impl Trace {
    fn recording(&self) -> std::sync::MutexGuard<'_, Option<Recording>> {
        // A panic of another thread leaves a valid list of spans.
        let recording = self.0.recording.lock();
        recording.unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a recording. The spans of an earlier recording that was not stopped are discarded.
    pub fn start(&self) {
        *self.recording() = Some(Recording {
            origin: Instant::now(),
            spans: Vec::new(),
        });
        // The lock protects the spans. The flag only says whether to record, so relaxed ordering suffices.
        self.0.on.store(true, Ordering::Relaxed);
    }

    /// Ends the recording and returns its spans, sorted by start time; empty if no recording was started.
    #[must_use]
    pub fn stop(&self) -> Vec<Span> {
        self.0.on.store(false, Ordering::Relaxed);
        let recording = self.recording().take();
        let mut spans = recording.map_or_else(Vec::new, |recording| recording.spans);
        spans.sort_by_key(|span| (span.start, span.lane));
        spans
    }

    /// The current time during a recording, otherwise `None`.
    pub(crate) fn now(&self) -> Option<Instant> {
        self.0.on.load(Ordering::Relaxed).then(Instant::now)
    }

    /// Records a span from `started`, a result of [`Trace::now`], to now.
    pub(crate) fn end(&self, started: Option<Instant>, lane: Lane, name: impl FnOnce() -> String) {
        if let Some(started) = started {
            self.add(lane, (started, started.elapsed()), name);
        }
    }

    /// Records a span that was measured elsewhere, with its start and duration.
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

    /// Runs `body` and records it as a span.
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
