//! The time of a device apart: which unit it worked for, what it waited for, what crossed the bus.

use super::{Result, Zero};
use crate::access::Phase;
use crate::spec::UnitId;
use crate::timing::DeviceTimes;
use crate::trace::Lane;
use kernels::DeviceLane;

/// What work on the device is labelled with: the unit, and which of its passes.
fn label(unit: UnitId, phase: Phase) -> u32 {
    2 * unit.0 + u32::from(phase == Phase::Backward)
}

impl Zero {
    /// What this rank's device did so far, by its own clock, in training passes that were followed by a step; zero where
    /// the host computes.
    #[must_use]
    pub fn device_times(&self) -> DeviceTimes {
        self.device_times
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
            let (lane, phase) = match span.lane {
                DeviceLane::Compute if span.label % 2 == 0 => (Lane::Device, Phase::Forward),
                DeviceLane::Compute => (Lane::Device, Phase::Backward),
                DeviceLane::Wait => (Lane::DeviceWait, Phase::Forward),
                DeviceLane::Inward => (Lane::Inward, Phase::Forward),
                DeviceLane::Outward => (Lane::Outward, Phase::Forward),
            };
            let when = (span.start, span.length);
            self.trace().add(lane, when, || match lane {
                Lane::Device => {
                    let unit = UnitId(span.label / 2);
                    format!("{} {}", phase.name(), self.unit_name(unit))
                }
                _ => lane.name(),
            });
        }
        Ok(())
    }
}
