//! Frozen weights that the driver of a discrete device has page-locked where they are.
//!
//! They are registered while nothing writes them: after they are loaded, and until they are loaded again. Copies to the
//! device then need no pinned chunk.

use super::{InPlace, Store, WeightRoute};
use crate::offload::tier::Region;
use crate::plan::{GroupKind, Tier};
use kernels::{Backend, ForeignBytes, HostRegistration};
use std::sync::Arc;

/// Registered weights of a rank, and why others are not.
#[derive(Default)]
pub(super) struct RegisteredWeights {
    memory: Vec<HostRegistration>,
    refused: Option<String>,
}

/// Frozen weights in host memory that a discrete device's driver has page-locked (`cuMemHostRegister`).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostRegistered {
    /// Their size in bytes. The driver reads them in place; all other weights go through pinned chunks.
    pub bytes: u64,
    /// Why the driver refused others; `None` if it refused none.
    pub refused: Option<String>,
}

impl RegisteredWeights {
    /// Registers `bytes`. Returns whether the driver takes more.
    fn add(&mut self, backend: &dyn Backend, bytes: ForeignBytes) -> bool {
        match backend.register_host(bytes) {
            Ok(Some(registered)) => self.memory.push(registered),
            Ok(None) => return false,
            Err(error) => {
                self.refused = Some(error.to_string());
                return false;
            }
        }
        true
    }
}

/// The memory that leases of a region read: one range, or the maps of its files.
fn memory_of(region: &Arc<Region>) -> Vec<ForeignBytes> {
    match region.files() {
        Some(maps) => maps.values().cloned().collect(),
        None => vec![Arc::new(InPlace(region.clone()))],
    }
}

impl Store {
    /// Registers the frozen weights that leases read in place in host memory. A refusal is no error: the weights are then
    /// copied through pinned chunks.
    pub(crate) fn register_frozen(&mut self, backend: &dyn Backend) {
        if self.tiers.counters().is_some() {
            return;
        }
        for unit in &self.units {
            for (kind, region) in &unit.weights {
                let route = unit.routes[*kind as usize].weights;
                let from_host =
                    matches!(route, WeightRoute::InPlace | WeightRoute::GatheredOnDevice);
                let is_frozen = *kind != GroupKind::Trainable && !region.is_empty();
                if from_host && is_frozen && region.tier() == Tier::Host {
                    for bytes in memory_of(region) {
                        if !self.registered.add(backend, bytes) {
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Ends [`Store::register_frozen`] after the copies that read the weights, so that they may be written.
    pub(super) fn unregister(&mut self) {
        self.registered = RegisteredWeights::default();
    }

    /// Frozen weights that are registered.
    pub(crate) fn host_registered(&self) -> HostRegistered {
        let memory = self.registered.memory.iter();
        HostRegistered {
            bytes: memory.map(HostRegistration::bytes).sum(),
            refused: self.registered.refused.clone(),
        }
    }
}
