//! Reserved device memory for the weights of the unit that a pass leases next.
//!
//! It is reserved before the previous unit's work is queued, so the host-to-device copy runs during that work. A run
//! and its dry run reserve the same.

use crate::error::EngineError;
use crate::plan::{GroupKind, Plan};
use crate::spec::{ParamId, UnitId};
use kernels::{Backend, DType, ReservedUpload, Tag};
use std::collections::BTreeMap;

/// Device memory that is reserved for uploads of weights, by parameter.
pub(crate) type Reserved = BTreeMap<ParamId, ReservedUpload>;

/// Device memory that is reserved for the weights of at most one unit.
#[derive(Default)]
pub(crate) struct Prefetched(Option<(UnitId, Reserved)>);

impl Prefetched {
    /// Reserves memory for `next`, in the order of its parameters. Reservations for another unit are released first.
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
        let mut weights: Vec<(ParamId, DType)> = Vec::new();
        for kind in GroupKind::ALL {
            let slots = plan.unit(unit).group(kind).slots.iter();
            weights.extend(slots.map(|slot| (slot.param, plan.dtype_of(kind))));
        }
        weights.sort_unstable_by_key(|(id, _)| *id);
        let mut reserved = Reserved::new();
        for (id, dtype) in weights {
            let shape = plan.spec().params[id.index()].stored_shape();
            reserved.insert(id, backend.reserve_upload(shape, dtype, Tag::Gathered)?);
        }
        self.0 = Some((unit, reserved));
        Ok(())
    }

    /// Takes the reservations for `unit`. Those for another unit, which the batch skipped, are released.
    pub(crate) fn take(&mut self, unit: UnitId) -> Reserved {
        let taken = self.0.take().filter(|(other, _)| *other == unit);
        taken.map(|(_, reserved)| reserved).unwrap_or_default()
    }

    /// Releases all reserved device memory.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}
