//! Optimizer in forward: a thread updates units during the next forward pass, in the order in which the pass uses them.
//!
//! A unit's memory moves to the thread and back, so nothing is shared and no second copy is needed. The global norm is
//! known before the first update, so clipping works as usual. A lease of a unit waits for its update. The thread
//! affects only time. Every element gets one update, with the same numbers as before the pass.

use super::OptimizerConfig;
use super::gradients::Accumulator;
use super::optimizer_in_backward::CHUNK_ELEMS;
use super::state::UnitState;
use super::update::{Parts, Reads, Rule, Scalars, chunks};
use crate::error::EngineError;
use crate::offload::tier::{COPY_ELEMS, Region, Tiers};
use crate::offload::worker::Worker;
use crate::plan::Plan;
use crate::spec::UnitId;
use crate::trace::Lane;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Job of the update thread: update one unit's weights and optimizer state during the next forward pass.
#[derive(Debug)]
pub(crate) struct ForwardJob {
    pub(crate) unit: UnitId,
    pub(crate) gradients: Accumulator,
    pub(crate) weights: Arc<Region>,
    /// Element of the parameter group at which the weights begin.
    pub(crate) start: usize,
    pub(crate) state: UnitState,
    pub(crate) outcome: Result<()>,
    /// Time that the update of this unit took.
    pub(crate) took: Duration,
}

/// Handle of the thread that applies one update, unit by unit, during the next forward pass.
#[derive(Debug)]
pub(crate) struct ForwardUpdates {
    thread: Worker<ForwardJob, ()>,
    /// Whether the remaining updates are canceled, so that a failed rank ends at once.
    given_up: Arc<AtomicBool>,
}

impl ForwardUpdates {
    /// Starts the thread of an update with the numbers `scalars`.
    pub(crate) fn start(
        plan: Arc<Plan>,
        optimizer: Arc<OptimizerConfig>,
        scalars: Scalars,
        tiers: &Tiers,
    ) -> Result<Self> {
        let trace = tiers.trace().clone();
        let given_up = Arc::new(AtomicBool::new(false));
        let stop = given_up.clone();
        let work = move |job: &mut ForwardJob, (): ()| {
            let rule = Rule {
                plan: &plan,
                optimizer: &optimizer,
                scalars,
            };
            let (started, begun) = (trace.now(), Instant::now());
            job.outcome = job.step(rule, &stop);
            job.took = begun.elapsed();
            trace.end(started, Lane::UpdateInForward, || {
                plan.spec().units[job.unit.index()].name.clone()
            });
        };
        let thread = tiers.worker("late-step", work)?;
        Ok(Self { thread, given_up })
    }

    /// Number of units that were sent to the thread and not received.
    pub(crate) fn open(&self) -> usize {
        self.thread.open()
    }

    /// Sends a unit to the thread, which updates it.
    pub(crate) fn send(&mut self, job: ForwardJob) -> Result<()> {
        Ok(self.thread.send(job, ())?)
    }

    /// Waits for the unit that was sent first of those at the thread, and returns it.
    pub(crate) fn receive(&mut self) -> Result<ForwardJob> {
        Ok(self.thread.receive()?)
    }
}

impl Drop for ForwardUpdates {
    fn drop(&mut self) {
        // Dropping `thread` afterwards waits for the thread.
        self.given_up.store(true, Ordering::Relaxed);
    }
}

impl ForwardJob {
    fn step(&mut self, rule: Rule<'_>, given_up: &AtomicBool) -> Result<()> {
        let unit = self.unit;
        let weights = Arc::get_mut(&mut self.weights);
        let weights = weights.ok_or_else(|| EngineError::WeightsBorrowed {
            unit: rule.plan.spec().units[unit.index()].name.clone(),
        })?;
        let of_unit = [(unit, self.state.range())];
        // Starting a copy to or from a device costs as much as copying a million elements.
        let most = match weights.resident() {
            Some(_) => COPY_ELEMS,
            None => CHUNK_ELEMS,
        };
        let most = rule.plan.config().sub_group_elems.min(most);
        let border = rule.plan.unit(unit).trainable.elementwise_elems;
        for chunk in chunks(of_unit.into_iter(), |_| border, most, false) {
            if given_up.load(Ordering::Relaxed) {
                return Err(EngineError::BackwardThread);
            }
            let parts = Parts {
                gradients: &mut self.gradients,
                weights: (weights, self.start),
                state: &mut self.state,
            };
            rule.step(&chunk, Reads::new(), None, parts)?;
        }
        Ok(())
    }
}
