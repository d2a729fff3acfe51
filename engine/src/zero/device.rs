//! Time of a discrete device: work per unit, waits, and copies over the bus.

use super::{Result, Zero};
use crate::plan::Phase;
use crate::spec::UnitId;
use crate::timing::DeviceTimes;
use crate::trace::Lane;
use kernels::DeviceLane;

/// Phases in the order of their numbers in labels.
const PHASES: [Phase; 3] = [Phase::Forward, Phase::Recompute, Phase::Backward];

/// Label of device work: the unit and the phase of its pass.
fn label(unit: UnitId, phase: Phase) -> u32 {
    let number = PHASES.iter().position(|known| *known == phase);
    (PHASES.len() * unit.index() + number.unwrap_or(0)) as u32
}

/// The unit and the phase that a label encodes.
fn labelled(label: u32) -> (UnitId, Phase) {
    let count = PHASES.len() as u32;
    (UnitId(label / count), PHASES[(label % count) as usize])
}

impl Zero {
    /// Times of this rank's discrete device by its own clock, summed over the training passes up to the last
    /// step. Only `updates` is by the host's clock. All fields are zero if the device is not discrete.
    #[must_use]
    pub fn device_times(&self) -> DeviceTimes {
        let mut times = self.device_times;
        if self.discrete {
            times.updates = self.store.borrow().update_time();
        }
        times
    }

    /// Labels work that is queued from now on with a unit and its phase. Only training passes are measured, because a
    /// step reads and resets the measurements.
    pub(super) fn label_device(&self, work: Option<(UnitId, Phase)>) -> Result<()> {
        self.backend.measure(self.trains.get())?;
        let label = work.map(|(unit, phase)| label(unit, phase));
        Ok(self.backend.label(label)?)
    }

    /// Adds the device's measurements since the last call to the totals and, during a recording, to the trace.
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
