//! Frozen weights that leases read in the maps of their files.

use super::{Result, Store};
use crate::comm::shared::FileMap;
use crate::error::EngineError;
use crate::offload::tier::{Region, Tiers};
use crate::plan::{GroupKind, Plan, Row, Stored};
use crate::spec::{ParamId, UnitId};
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// The region of a row whose weights are in files; `None` if they are stored elsewhere.
pub(super) fn allocate(plan: &Plan, row: &Row, tiers: &Tiers) -> Result<Option<Region>> {
    let (Stored::Weights(kind), Some(unit), false) = (row.what, row.unit, row.spare) else {
        return Ok(None);
    };
    if !plan.maps_files(unit, kind) {
        return Ok(None);
    }
    let size = row.dtype.size_bytes();
    let lengths = (
        row.range.len() * size,
        plan.unit(unit).group(kind).padded_elems * size,
    );
    let region = tiers.in_files(lengths, plan.maps_shared(kind), row.tag())?;
    Ok(Some(region))
}

impl Store {
    /// Maps the weight `param` of `unit`: the bytes `range` of `file`.
    pub(crate) fn map_file(
        &mut self,
        (unit, param): (UnitId, ParamId),
        file: &File,
        range: Range<u64>,
    ) -> Result<()> {
        let plan = self.plan.clone();
        let spec = &plan.spec().params[param.index()];
        let name = || spec.name.clone();
        let not_mapped = || EngineError::NotMapped { param: name() };
        let slots = &plan.unit(unit).frozen.slots;
        let slot = slots.iter().find(|slot| slot.param == param);
        let start = slot.ok_or_else(not_mapped)?.offset;
        let bytes = spec.shape.elems() * plan.dtype_of(GroupKind::Frozen).size_bytes();
        if range.end - range.start != bytes as u64 {
            return Err(not_mapped());
        }
        let map = FileMap::new(file, range).map_err(|source| EngineError::Load {
            param: name(),
            source: source.into(),
        })?;
        let region = self.weights_mut(unit, GroupKind::Frozen)?;
        let maps = region.files_mut().ok_or_else(not_mapped)?;
        maps.insert(start, Arc::new(map));
        Ok(())
    }
}
