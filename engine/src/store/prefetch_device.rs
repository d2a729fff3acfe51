//! Prefetch of weights to a device, by one unit.

use super::{Residency, Result, Store};
use crate::plan::Pass;
use crate::spec::UnitId;

impl Store {
    /// The unit whose weights are copied to the device next; `None` if weights are not prefetched.
    pub(crate) fn next_upload(&self) -> Option<UnitId> {
        let prefetched = |pass: &&Pass| self.flow.prefetch_weights && !pass.on_device;
        let pass = self.pass.as_ref().filter(prefetched)?;
        Some(pass.schedule[pass.next_unit()?].unit)
    }

    /// Takes part in the devices' gathers up to the entry at the cursor, and makes later work wait for them.
    pub(super) fn gather_at_cursor(&mut self) -> Result<()> {
        let Some(pass) = self.pass.as_ref().filter(|pass| pass.on_device) else {
            return Ok(());
        };
        self.gather_up_to(pass.position)?;
        self.arrive()
    }

    /// Takes part in the devices' gathers up to the next unit, so that they run during the work of the unit at the
    /// cursor. Only the schedule decides how far a rank gathers, so all ranks gather equally far.
    pub(super) fn prefetch_gather(&mut self) -> Result<()> {
        let next = self.pass.as_ref().and_then(Pass::next_unit);
        match next.filter(|_| self.flow.prefetches_gathers) {
            Some(next) => self.gather_up_to(next),
            None => Ok(()),
        }
    }

    fn gather_up_to(&mut self, last: usize) -> Result<()> {
        let prefetched = self.plan.config().prefetch_units;
        while let Some(pass) = &mut self.pass
            && let Some((unit, needed)) = pass.next_gather(last, prefetched)
        {
            self.gather_on_device(unit, needed)?;
        }
        Ok(())
    }

    /// Drops the gathered weights of an entry that this rank skips.
    pub(super) fn drop_gathered(&mut self, unit: UnitId) {
        let residency = &mut self.units[unit.index()].residency;
        if let Residency::OnDevice(_) = residency {
            *residency = Residency::Sharded;
        }
    }

    fn arrive(&mut self) -> Result<()> {
        match &mut self.device {
            Some(device) => device.arrive(),
            None => Ok(()),
        }
    }
}
