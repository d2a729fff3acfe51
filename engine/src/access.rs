//! The seam between a model's tape and the engine.

use crate::error::EngineError;
use crate::offload::activations::Activations;
pub use crate::plan::Phase;
use crate::spec::{ParamId, UnitId};
use kernels::{Backend, Tensor};
use std::sync::Arc;

/// What one forward/backward pass may ask of the engine.
///
/// Units are leased in plan order in forward, in reverse in backward; of a group whose inputs are not kept, all but the
/// last once more in plan order in front of its backward. Units that a pass does not
/// touch (no image in the batch) are left out: the engine takes part in their collectives by
/// itself, so every rank issues the same sequence whatever its data.
pub trait ParamAccess {
    /// The device.
    fn backend(&self) -> &Arc<dyn Backend>;

    /// Makes a unit's weights readable until the lease ends.
    ///
    /// # Errors
    /// When the order is violated, or communication or memory fails.
    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError>;

    /// Hands over a complete f32 gradient of this micro-batch, once per parameter and micro-batch,
    /// while the unit is leased for backward.
    ///
    /// # Errors
    /// When it is not expected, or communication fails.
    fn deposit(&self, id: ParamId, grad: &Tensor) -> Result<(), EngineError>;

    /// Where values wait between forward and backward; `None` where they stay on the device.
    fn activations(&self) -> Option<&Activations> {
        None
    }

    /// Whether a gradient is wanted.
    fn is_trainable(&self, id: ParamId) -> bool;

    /// Whether backward visits this unit: it trains, or something before it does. The answer comes
    /// from the plan, so that all ranks agree.
    fn needs_backward(&self, unit: UnitId) -> bool;

    /// Whether what the unit in front hands to this one is computed again instead of being kept for backward. The answer
    /// comes from the plan, as all leases do.
    fn recomputes_input(&self, _unit: UnitId) -> bool {
        false
    }
}

/// Receives the end of a lease.
pub trait LeaseOwner {
    /// Called exactly once. `completed` is false when an error or panic unwound past the lease.
    ///
    /// # Errors
    /// When closing the unit's gradients fails.
    fn end_lease(&self, unit: UnitId, phase: Phase, completed: bool) -> Result<(), EngineError>;
}

/// Permission to read one unit's weights.
pub struct Lease<'e> {
    owner: &'e dyn LeaseOwner,
    unit: UnitId,
    phase: Phase,
    params: Vec<(ParamId, Tensor)>,
    ended: bool,
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("unit", &self.unit)
            .field("phase", &self.phase)
            .finish()
    }
}

impl<'e> Lease<'e> {
    /// A lease of `unit`; `params` are ascending by id.
    #[must_use]
    pub fn new(
        owner: &'e dyn LeaseOwner,
        unit: UnitId,
        phase: Phase,
        params: Vec<(ParamId, Tensor)>,
    ) -> Self {
        Self {
            owner,
            unit,
            phase,
            params,
            ended: false,
        }
    }

    /// The leased unit.
    #[must_use]
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// A weight of the unit.
    ///
    /// # Errors
    /// When the parameter belongs to another unit.
    pub fn param(&self, id: ParamId) -> Result<&Tensor, EngineError> {
        self.params
            .binary_search_by_key(&id, |(p, _)| *p)
            .map(|i| &self.params[i].1)
            .map_err(|_| EngineError::NotInUnit {
                param: id,
                unit: self.unit,
            })
    }

    /// Ends the lease.
    ///
    /// # Errors
    /// When closing the unit's gradients fails.
    pub fn end(mut self) -> Result<(), EngineError> {
        self.params.clear();
        self.ended = true;
        self.owner.end_lease(self.unit, self.phase, true)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.params.clear();
        if !self.ended {
            // An error is already on its way up; this one would hide it.
            self.owner.end_lease(self.unit, self.phase, false).ok();
        }
    }
}
