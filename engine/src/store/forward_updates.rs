//! Exchange of units between the store and the thread of the optimizer in forward.

use super::{Residency, Result, Store};
use crate::error::EngineError;
use crate::plan::GroupKind;
use crate::spec::UnitId;
use crate::step::OptimizerConfig;
use crate::step::optimizer_in_forward::{ForwardJob, ForwardUpdates};
use crate::step::update::Scalars;
use crate::trace::Lane;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Store {
    /// Sends `units` to a thread that updates them in this order.
    pub(crate) fn step_in_forward(
        &mut self,
        units: impl Iterator<Item = UnitId>,
        optimizer: &Arc<OptimizerConfig>,
        scalars: Scalars,
    ) -> Result<()> {
        let run =
            ForwardUpdates::start(self.plan.clone(), optimizer.clone(), scalars, &self.tiers)?;
        let units = units.map(|unit| {
            let start = self.resting(unit, GroupKind::Trainable).start;
            (unit, start, self.unit_name(unit))
        });
        let units: Vec<_> = units.collect();
        let run = self.in_forward.insert(run);
        for (unit, start, name) in units {
            let parts = &mut self.units[unit.index()];
            parts.residency = Residency::Sharded;
            let place = |(kind, _): &(GroupKind, _)| *kind == GroupKind::Trainable;
            let place = parts.weights.iter().position(place);
            let whole = (place, &mut parts.gradients, &mut parts.state);
            let (Some(place), gradients @ Some(_), state @ Some(_)) = whole else {
                return Err(EngineError::WeightsBorrowed { unit: name });
            };
            let (_, weights) = &mut parts.weights[place];
            self.tiers.lend(Arc::get_mut(weights).into_iter())?;
            if let (Some(gradients), Some(state)) = (gradients.take(), state.take()) {
                let (_, weights) = parts.weights.remove(place);
                parts.updating = Some(place);
                run.send(ForwardJob {
                    unit,
                    gradients,
                    weights,
                    start,
                    state,
                    outcome: Ok(()),
                    took: Duration::ZERO,
                })?;
            }
        }
        Ok(())
    }

    /// Waits until the thread has returned `unit`.
    pub(crate) fn await_update(&mut self, unit: UnitId) -> Result<()> {
        self.take_updated(|store| store.units[unit.index()].updating.is_none())
    }

    /// Waits until the updates of all units in forward are done.
    pub(crate) fn finish_updates(&mut self) -> Result<()> {
        self.take_updated(|store| {
            let back = store.units.iter().all(|unit| unit.updating.is_none());
            back && store.in_forward.is_none()
        })
    }

    /// Receives units until `enough` is true. After a failure too, received units belong to the store again.
    fn take_updated(&mut self, enough: impl Fn(&Self) -> bool) -> Result<()> {
        if enough(self) {
            return Ok(());
        }
        let started = Instant::now();
        let mut outcome = Ok(());
        while !enough(self) {
            let Some(run) = self.in_forward.as_mut().filter(|run| run.open() > 0) else {
                self.in_forward = None;
                break;
            };
            match run.receive() {
                Ok(job) => outcome = outcome.and(self.take_back_updated(job)),
                Err(gone) => {
                    self.in_forward = None;
                    return Err(gone);
                }
            }
        }
        if !enough(self) {
            // A thread that ended early does not return its units.
            return Err(EngineError::BackwardThread);
        }
        self.copies.count(started.elapsed());
        let trace = self.tiers.trace();
        let waited = trace.now().map(|_| started);
        trace.end(waited, Lane::Offload, || "wait for updates".into());
        outcome
    }

    fn take_back_updated(&mut self, job: ForwardJob) -> Result<()> {
        self.update_time += job.took;
        let parts = &mut self.units[job.unit.index()];
        let mut gradients = job.gradients;
        gradients.clear();
        parts.gradients = Some(gradients);
        let state = parts.state.insert(job.state);
        // The unit's next optimizer in backward may have been announced meanwhile.
        let borrowed = match self.in_backward {
            Some(_) => self.tiers.lend(state.spare_mut()),
            None => Ok(()),
        };
        let mut weights = job.weights;
        let back = self.tiers.take_back(Arc::get_mut(&mut weights).into_iter());
        if let Some(place) = parts.updating.take() {
            parts.weights.insert(place, (GroupKind::Trainable, weights));
        }
        job.outcome.and(back).and(borrowed)
    }
}
