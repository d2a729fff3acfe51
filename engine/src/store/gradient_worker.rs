//! Thread that fetches gradients from a discrete device and adds them to their sums, while the rank sends weights.
//!
//! A unit's memory moves to the thread and back. The store receives it at fixed entries of the schedule, not when the
//! thread is done. Equal passes therefore allocate device memory at equal offsets; the thread affects only time.

use crate::comm::Buffer;
use crate::error::EngineError;
use crate::offload::parallel;
use crate::offload::tier::{Access, Region, Tiers};
use crate::offload::worker::Worker;
use crate::plan::Plan;
use crate::spec::UnitId;
use crate::step::gradients::{Accumulator, RoundingKey};
use crate::trace::Lane;
use kernels::{Fetch, Reservation};
use std::ops::Range;
use std::sync::Arc;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Where the gradient thread writes the gradients that it fetched from the device.
#[derive(Debug)]
pub(crate) enum Destination {
    /// Added to the sum over micro-batches.
    Sum(Accumulator),
    /// Written to a communicator's buffer, indexed by element of the parameter group; with its memory reservation.
    Bucket(Buffer, Reservation),
    /// Written to a buffer of gradients that an update consumes, indexed from the first fetched element.
    Waiting(Region),
    /// Written to plain memory, indexed from the first fetched element; the store adds them to the sum.
    Plain(Vec<f32>),
}

/// Job: fetch a unit's gradients of one micro-batch.
#[derive(Debug)]
pub(crate) struct AccumulateJob {
    pub(crate) unit: UnitId,
    /// Fetches with their ranges of elements in the parameter group, ascending.
    pub(crate) fetches: Vec<(Range<usize>, Fetch)>,
    pub(crate) destination: Destination,
    /// Ranges of elements in the parameter group without a gradient.
    pub(crate) missing: Vec<Range<usize>>,
    pub(crate) at: RoundingKey,
    pub(crate) outcome: Result<()>,
}

/// Handle of the thread that fetches gradients from the device and writes them to their destinations.
#[derive(Debug)]
pub(crate) struct GradientAccumulator(Worker<AccumulateJob, ()>);

impl GradientAccumulator {
    pub(crate) fn start(plan: Arc<Plan>, tiers: &Tiers) -> Result<Self> {
        let trace = tiers.trace().clone();
        let work = move |job: &mut AccumulateJob, (): ()| {
            let started = trace.now();
            job.outcome = job.take(&plan);
            trace.end(started, Lane::GradientAccumulator, || {
                plan.spec().units[job.unit.index()].name.clone()
            });
        };
        Ok(Self(tiers.worker("sums", work)?))
    }

    /// Number of units that were sent to the thread and not received.
    pub(crate) fn open(&self) -> usize {
        self.0.open()
    }

    /// Sends a unit's gradients to the thread.
    pub(crate) fn send(&mut self, job: AccumulateJob) -> Result<()> {
        Ok(self.0.send(job, ())?)
    }

    /// Waits for the job that was sent first of those at the thread, and returns it.
    pub(crate) fn receive(&mut self) -> Result<AccumulateJob> {
        Ok(self.0.receive()?)
    }
}

impl AccumulateJob {
    fn take(&mut self, plan: &Plan) -> Result<()> {
        let group = &plan.unit(self.unit).trainable;
        // Calls `take` with every piece of a fetch and the number of elements before it.
        let in_order = |fetch: &Fetch, take: &mut dyn FnMut(usize, &[f32]) -> Result<()>| {
            let mut at = 0;
            fetch.for_each_f32(|piece| {
                let begin = at;
                at += piece.len();
                take(begin, piece)
            })
        };
        let first = self.fetches.first().map_or(0, |(range, _)| range.start);
        for (range, fetch) in &self.fetches {
            match &mut self.destination {
                Destination::Sum(sum) => in_order(fetch, &mut |at, piece| {
                    let start = range.start + at;
                    sum.add_part(group, plan, self.at, start..start + piece.len(), piece)
                })?,
                Destination::Bucket(buffer, _) => {
                    fetch.f32_into(&mut buffer.as_mut_slice::<f32>()[range.clone()])?;
                }
                Destination::Waiting(region) => in_order(fetch, &mut |at, piece| {
                    let start = range.start - first + at;
                    let window = start * 4..(start + piece.len()) * 4;
                    let mut window = region.window(window, Access::Write, None)?;
                    parallel::copy(piece, window.as_mut_slice());
                    window.commit()
                })?,
                Destination::Plain(values) => {
                    let own = range.start - first..range.end - first;
                    fetch.f32_into(&mut values[own])?;
                }
            }
        }
        Ok(())
    }
}
