//! Timeline of a GPU: spans between events on its streams.

use super::context::{Event, Stream};
use super::error::{DriverResult, Result};
use super::group::Group;
use crate::timeline::{DeviceLane, DeviceSpan};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Recording since the last [`Timeline::take`].
#[derive(Debug)]
struct Measured {
    /// One point in time on the GPU's and the host's clock.
    origin: (Event, Instant),
    /// Label of the current work and the event at its start.
    open: Option<(u32, Event)>,
    spans: Vec<Measure>,
}

/// Span: queue, label, start event, end event, bytes over the bus.
type Measure = (DeviceLane, u32, Event, Event, u64);

impl Measured {
    /// Starts a recording now. Waits for the stream, at most for the deadline of `group`.
    fn begin(stream: &Stream, group: &Group) -> Result<Self> {
        let event = stream.timed_event()?;
        group.wait(&event)?;
        Ok(Self {
            origin: (event, Instant::now()),
            open: None,
            spans: Vec::new(),
        })
    }
}

/// Timeline of one GPU. It records nothing until it is started.
#[derive(Debug, Default)]
pub(super) struct Timeline(Mutex<Option<Measured>>);

impl Timeline {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Measured>> {
        // Every statement leaves a valid state, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts recording, or stops and drops the recording.
    pub(super) fn measure(&self, on: bool, stream: &Stream, group: &Group) -> Result<()> {
        let mut measured = self.lock();
        match (on, measured.is_some()) {
            (true, false) => *measured = Some(Measured::begin(stream, group)?),
            (false, true) => *measured = None,
            _ => {}
        }
        Ok(())
    }

    /// Event at the current end of a stream, if recording is on.
    pub(super) fn stamp(&self, stream: &Stream) -> Result<Option<Event>> {
        let measures = self.lock().is_some();
        measures.then(|| stream.timed_event()).transpose()
    }

    /// Records a span from the event `start` to the current end of `stream`, with `bytes` over the bus.
    pub(super) fn end(
        &self,
        lane: DeviceLane,
        start: Option<Event>,
        stream: &Stream,
        bytes: u64,
    ) -> Result<()> {
        if let (Some(measured), Some(start)) = (&mut *self.lock(), start) {
            measured
                .spans
                .push((lane, 0, start, stream.timed_event()?, bytes));
        }
        Ok(())
    }

    /// Sets the label of work queued from here on.
    pub(super) fn label(&self, label: Option<u32>, stream: &Stream) -> Result<()> {
        if let Some(measured) = &mut *self.lock() {
            if let Some((label, start)) = measured.open.take() {
                let span = (DeviceLane::Compute, label, start, stream.timed_event()?, 0);
                measured.spans.push(span);
            }
            if let Some(label) = label {
                measured.open = Some((label, stream.timed_event()?));
            }
        }
        Ok(())
    }

    /// Returns the spans recorded since the last call. Waits for the GPU. The span of the current label continues in
    /// the next recording.
    pub(super) fn take(&self, stream: &Stream, group: &Group) -> Result<Vec<DeviceSpan>> {
        let mut guard = self.lock();
        let Some(measured) = &mut *guard else {
            return Ok(Vec::new());
        };
        let next = Measured::begin(stream, group)?;
        let done = std::mem::replace(measured, next);
        measured.open = done.open;
        let (event, at) = done.origin;
        // Other streams may lag behind this one and may wait for dead ranks.
        let since = |from: &Event, to: &Event| -> Result<Duration> {
            group.wait(from)?;
            group.wait(to)?;
            let milliseconds = from.milliseconds_to(to).during("reading a GPU's clock")?;
            Ok(Duration::from_secs_f64(
                f64::from(milliseconds.max(0.0)) / 1e3,
            ))
        };
        let span = |(lane, label, start, end, bytes): Measure| {
            Ok(DeviceSpan {
                lane,
                label,
                start: at + since(&event, &start)?,
                length: since(&start, &end)?,
                bytes,
            })
        };
        done.spans.into_iter().map(span).collect()
    }
}
