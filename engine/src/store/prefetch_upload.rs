//! Places on a device apart for the weights of the unit that a pass leases next. They are taken before the work of the
//! unit in front of it is queued, so that the copy runs beside that work; a run and its dry run take the same ones.

use crate::error::EngineError;
use crate::plan::{GroupKind, Plan};
use crate::spec::{ParamId, UnitId};
use kernels::{Arrival, Backend, Tag};
use std::collections::BTreeMap;

/// The places, by parameter.
pub(crate) type Places = BTreeMap<ParamId, Arrival>;

/// Places for one unit at most.
#[derive(Default)]
pub(crate) struct Ahead(Option<(UnitId, Places)>);

impl Ahead {
    /// Has places for `next` from here on, in the order of its parameters; those of another unit are given back first.
    pub(crate) fn reserve(
        &mut self,
        next: Option<UnitId>,
        plan: &Plan,
        backend: &dyn Backend,
    ) -> Result<(), EngineError> {
        if self.0.as_ref().map(|(unit, _)| *unit) == next {
            return Ok(());
        }
        self.clear();
        let Some(unit) = next else {
            return Ok(());
        };
        let dtype = plan.config().precision.weight_dtype();
        let groups = GroupKind::ALL.into_iter();
        let slots = groups.flat_map(|kind| &plan.unit(unit).group(kind).slots);
        let mut ids: Vec<ParamId> = slots.map(|slot| slot.param).collect();
        ids.sort_unstable();
        let mut places = Places::new();
        for id in ids {
            let shape = plan.spec().params[id.index()].shape;
            places.insert(id, backend.reserve_upload(shape, dtype, Tag::Gathered)?);
        }
        self.0 = Some((unit, places));
        Ok(())
    }

    /// The places that were taken for `unit`. Those of another one, which a batch passes over, are given back.
    pub(crate) fn take(&mut self, unit: UnitId) -> Places {
        let taken = self.0.take().filter(|(other, _)| *other == unit);
        taken.map(|(_, places)| places).unwrap_or_default()
    }

    /// Gives all places back.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}
