//! The time of a discrete device: which unit it worked for, what it waited for, what crossed the bus.

use super::{Result, Zero};
use crate::plan::Phase;
use crate::spec::UnitId;
use crate::timing::DeviceTimes;
use crate::trace::Lane;
use kernels::DeviceLane;

/// The phases by the number that they have in a label.
const PHASES: [Phase; 3] = [Phase::Forward, Phase::Recompute, Phase::Backward];

/// What work on the device is labelled with: the unit, and which of its passes.
fn label(unit: UnitId, phase: Phase) -> u32 {
    let number = PHASES.iter().position(|known| *known == phase);
    (PHASES.len() * unit.index() + number.unwrap_or(0)) as u32
}

/// The unit and the pass that a label names.
fn labelled(label: u32) -> (UnitId, Phase) {
    let count = PHASES.len() as u32;
    (UnitId(label / count), PHASES[(label % count) as usize])
}

impl Zero {
    /// What this rank's device did so far, by its own clock, in training passes that were followed by a step, and what the
    /// processor updated beside it; zero where the host computes.
    #[must_use]
    pub fn device_times(&self) -> DeviceTimes {
        let mut times = self.device_times;
        if self.discrete {
            times.updates = self.store.borrow().update_time();
        }
        times
    }

    /// What is queued from here on is work of a unit. Only passes that train are measured: a step reads what was
    /// measured, and forgets it.
    pub(super) fn label_device(&self, work: Option<(UnitId, Phase)>) -> Result<()> {
        self.backend.measure(self.trains.get())?;
        let label = work.map(|(unit, phase)| label(unit, phase));
        Ok(self.backend.label(label)?)
    }

    /// Adds up what the device did since the last call, and records it where a recording runs.
    pub(super) fn read_device(&mut self) -> Result<()> {
        let spans = self.backend.measured()?;
        self.device_times.add(&spans);
        for span in &spans {
            let lane = match span.lane {
                DeviceLane::Compute => Lane::Device,
                DeviceLane::Wait => Lane::DeviceWait,
                DeviceLane::Inward => Lane::Inward,
                DeviceLane::Outward => Lane::Outward,
                DeviceLane::Communication => Lane::Between,
            };
            let when = (span.start, span.length);
            self.trace().add(lane, when, || match lane {
                Lane::Device => {
                    let (unit, phase) = labelled(span.label);
                    format!("{} {}", phase.name(), self.unit_name(unit))
                }
                _ => lane.name(),
            });
        }
        Ok(())
    }
}
