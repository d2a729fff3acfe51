//! Frozen weights in memory that all ranks of the machine map.

use super::{Residency, Result, Store};
use crate::comm::Communicator;
use crate::comm::shared::{Medium, SharedMap, close_maps, create, open_maps};
use crate::error::EngineError;
use crate::offload::tier::{Region, Tiers};
use crate::plan::{GroupKind, Plan, Row, Stored};
use crate::spec::UnitId;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// The shared memory while the store allocates its regions.
pub(super) struct SharedWeights {
    /// `None` in a dry run, and if the plan shares nothing.
    file: Option<File>,
    /// Bytes of each parameter group in the memory.
    groups: HashMap<(UnitId, GroupKind), Range<u64>>,
}

impl SharedWeights {
    /// Creates the memory that `plan` shares. Every rank must call it.
    pub(super) fn new(plan: &Plan, comm: &dyn Communicator, tiers: &Tiers) -> Result<Self> {
        let groups = plan.shared_groups().into_iter();
        let groups: HashMap<_, _> = groups
            .map(|(unit, kind, bytes)| ((unit, kind), bytes))
            .collect();
        let file = match groups.is_empty() || tiers.counters().is_some() {
            true => None,
            false => Some(create(comm, plan.shared_bytes(), &Medium::all())?),
        };
        Ok(Self { file, groups })
    }

    /// This rank's part of a parameter group in the memory; `None` if the row is not shared.
    pub(super) fn allocate(&self, row: &Row, tiers: &Tiers) -> Result<Option<Region>> {
        let (Stored::Weights(kind), Some(unit)) = (row.what, row.unit) else {
            return Ok(None);
        };
        let Some(bytes) = self.groups.get(&(unit, kind)) else {
            return Ok(None);
        };
        let size = row.dtype.size_bytes();
        let own = row.range.start * size..row.range.end * size;
        let lengths = (own.len(), (bytes.end - bytes.start) as usize);
        let map = || {
            let missing = || std::io::Error::other("a dry run has no shared memory");
            let file = self.file.as_ref().ok_or_else(|| EngineError::Map {
                bytes: lengths.1,
                source: missing(),
            })?;
            Ok(SharedMap::new(file, bytes.clone(), own)?)
        };
        tiers.shared(lengths, row.tag(), map).map(Some)
    }
}

impl Store {
    /// Lets the ranks write the weights that all map. Every rank must call it, and then [`Store::close_shared`]. Leases between
    /// the two calls are errors.
    pub(crate) fn open_shared(&mut self) -> Result<()> {
        self.unregister();
        let comm = self.comm.clone();
        match self.shared_maps()? {
            maps if maps.is_empty() => Ok(()),
            maps => Ok(open_maps(&*comm, maps)?),
        }
    }

    /// Ends [`Store::open_shared`] after all ranks have written.
    pub(crate) fn close_shared(&mut self) -> Result<()> {
        let comm = self.comm.clone();
        match self.shared_maps()? {
            maps if maps.is_empty() => Ok(()),
            maps => Ok(close_maps(&*comm, maps)?),
        }
    }

    /// Maps of the weights that all ranks map; an error while a lease reads one of them.
    fn shared_maps(&mut self) -> Result<Vec<&mut SharedMap>> {
        let plan = &self.plan;
        let mut maps = Vec::new();
        for (unit, planned) in self.units.iter_mut().zip(plan.units()) {
            for (kind, region) in &mut unit.weights {
                if !plan.maps_shared(*kind) {
                    continue;
                }
                unit.residency = Residency::Sharded;
                let name = || plan.spec().units[planned.id.index()].name.clone();
                let region = Arc::get_mut(region);
                let region = region.ok_or_else(|| EngineError::WeightsBorrowed { unit: name() })?;
                maps.extend(region.shared_mut());
            }
        }
        Ok(maps)
    }
}
