//! Exchange of units between the store and the thread of the optimizer in backward.

use super::{BackwardUpdate, Residency, Result, Store};
use crate::error::EngineError;
use crate::offload::tier::Region;
use crate::plan::JOBS;
use crate::plan::{GroupKind, Tier};
use crate::spec::UnitId;
use crate::step::OptimizerConfig;
use crate::step::gradients::RoundingKey;
use crate::step::optimizer_in_backward::{BackwardJob, BackwardUpdates, Gradients};
use crate::step::state::UnitState;
use crate::step::update::Scalars;
use crate::trace::Lane;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Store {
    /// Starts the thread of the optimizer in backward before the last pass of an update with the numbers `scalars`.
    pub(crate) fn begin_in_backward(
        &mut self,
        optimizer: &Arc<OptimizerConfig>,
        scalars: Scalars,
    ) -> Result<()> {
        // Results of an announced update that was never applied are dropped.
        self.end_in_backward()?;
        self.units
            .iter_mut()
            .for_each(|unit| unit.in_backward = BackwardUpdate::default());
        // During the pass the thread reads weights and writes second copies on a device; events order both.
        self.record_weight_writes()?;
        let states = self.units.iter_mut().filter_map(|unit| unit.state.as_mut());
        self.tiers.lend(states.flat_map(UnitState::spare_mut))?;
        let run =
            BackwardUpdates::start(self.plan.clone(), optimizer.clone(), scalars, &self.tiers)?;
        self.in_backward = Some(run);
        Ok(())
    }

    /// Waits for all units at the update thread and takes them back.
    pub(super) fn collect(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(run) = &mut self.in_backward
            && run.open() > 0
        {
            // After a failure too, since the memory of all units belongs to the store.
            let job = run.receive()?;
            outcome = outcome.and(self.take_back(job));
        }
        outcome
    }

    /// Ends the thread. Returns the numbers of the update that was announced, if any.
    pub(crate) fn end_in_backward(&mut self) -> Result<Option<Scalars>> {
        let outcome = self.collect();
        let scalars = self.in_backward.take().map(|run| run.scalars());
        outcome.map(|()| scalars)
    }

    /// Whether the second copy of `unit` contains the updated unit.
    pub(crate) fn stepped_in_backward(&self, unit: UnitId) -> bool {
        self.units[unit.index()].in_backward.stepped
    }

    /// Sum of squares of the consumed gradients of `unit`; `None` if they were not consumed.
    pub(crate) fn consumed_squares(&self, unit: UnitId) -> Option<f64> {
        self.units[unit.index()].in_backward.squares
    }

    /// Makes the second copy of `unit` its state and weights.
    pub(crate) fn commit_in_backward(&mut self, unit: UnitId) -> Result<()> {
        let start = self.resting(unit, GroupKind::Trainable).start;
        let (name, dtype) = (
            self.unit_name(unit),
            self.plan.dtype_of(GroupKind::Trainable),
        );
        self.weights_change();
        let parts = &mut self.units[unit.index()];
        parts.residency = Residency::Sharded;
        let mut weights = parts.weights.iter_mut();
        let weights = weights
            .find(|(kind, _)| *kind == GroupKind::Trainable)
            .and_then(|(_, region)| Arc::get_mut(region));
        match (weights, &mut parts.state) {
            (Some(weights), Some(state)) => state.commit(weights, start, dtype),
            _ => Err(EngineError::WeightsBorrowed { unit: name }),
        }
    }

    /// Sends a unit with its final sum to the thread, if it is updated in backward and this is the update's last pass.
    pub(super) fn step_in_backward(&mut self, unit: UnitId) -> Result<()> {
        let route = self.gradient_route(unit);
        if self.in_backward.is_none() || route.is_none_or(|route| !route.updated_in_backward) {
            return Ok(());
        }
        self.wait_for_thread()?;
        match self.units[unit.index()].gradients.take() {
            Some(sum) => self.hand_over(unit, Gradients::Summed(sum)),
            None => Ok(()),
        }
    }

    /// Checks that an update may consume gradients of `unit` now.
    pub(super) fn may_consume(&self, unit: UnitId) -> Result<()> {
        let refuse = |reason| {
            Err(EngineError::Consumed {
                unit: self.unit_name(unit),
                reason,
            })
        };
        if self.in_backward.is_none() {
            return refuse("the update was not announced before the pass");
        }
        if self.rounding_key.micro_batch > 0 {
            return refuse("this is not the update's first micro-batch");
        }
        Ok(())
    }

    /// Sends gradients of a unit to the thread, which consumes them.
    pub(super) fn consume(&mut self, unit: UnitId, values: &[f32]) -> Result<()> {
        self.may_consume(unit)?;
        self.wait_for_thread()?;
        let mut region = self.waiting.pop().ok_or(EngineError::BackwardThread)?;
        let write = || region.write(0, bytemuck::cast_slice(values));
        let copied = self.copies.time(Tier::Host, write);
        match copied {
            Ok(()) => self.consume_region(unit, region, self.rounding_key),
            Err(error) => {
                self.waiting.push(region);
                Err(error)
            }
        }
    }

    /// Sends gradients in the buffer `region` to the thread. The caller has waited until the thread accepts a unit.
    pub(super) fn consume_region(
        &mut self,
        unit: UnitId,
        region: Region,
        at: RoundingKey,
    ) -> Result<()> {
        self.hand_over(unit, Gradients::Coming(region, at))
    }

    fn hand_over(&mut self, unit: UnitId, gradients: Gradients) -> Result<()> {
        let start = self.resting(unit, GroupKind::Trainable).start;
        let parts = &mut self.units[unit.index()];
        let weights = parts
            .weights
            .iter()
            .find(|(kind, _)| *kind == GroupKind::Trainable);
        let weights = weights.map(|(_, region)| (region.clone(), start));
        let (Some(run), Some(state)) = (&mut self.in_backward, parts.state.take()) else {
            return Ok(());
        };
        let job = BackwardJob {
            unit,
            gradients,
            state,
            squares: None,
            outcome: Ok(()),
            took: Duration::ZERO,
        };
        run.send(job, weights)
    }

    /// Waits until the thread has fewer than [`JOBS`] units.
    pub(super) fn wait_for_thread(&mut self) -> Result<()> {
        while let Some(run) = &mut self.in_backward
            && run.open() >= JOBS
        {
            let started = Instant::now();
            let job = run.receive()?;
            self.copies.count(started.elapsed());
            let waited = self.tiers.trace().now().map(|_| started);
            let trace = self.tiers.trace();
            trace.end(waited, Lane::Offload, || "wait for updates".into());
            self.take_back(job)?;
        }
        Ok(())
    }

    fn take_back(&mut self, job: BackwardJob) -> Result<()> {
        self.update_time += job.took;
        let parts = &mut self.units[job.unit.index()];
        let state = parts.state.insert(job.state);
        let back = self.tiers.take_back(state.spare_mut());
        match job.gradients {
            Gradients::Summed(sum) => parts.gradients = Some(sum),
            Gradients::Coming(region, _) => self.waiting.push(region),
        }
        job.outcome.and(back)?;
        parts.in_backward = BackwardUpdate {
            stepped: true,
            squares: job.squares,
        };
        Ok(())
    }
}
