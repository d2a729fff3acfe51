//! The interface between a model's forward and backward code and the engine.

use crate::comm::mesh::{Coordinates, Neighbor, Sent};
use crate::error::EngineError;
use crate::offload::activations::Activations;
use crate::plan::PassKind;
pub use crate::plan::Phase;
use crate::spec::{ParamId, UnitId};
use kernels::{Backend, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// Interface through which a model's forward and backward code reads weights and hands over gradients.
///
/// Weights are leased by unit: parameters that are gathered together, usually one layer. A pass leases units
/// in plan order in forward and in reverse order in backward. A recompute group
/// ([`ZeroConfig::recomputed`](crate::ZeroConfig::recomputed)) saves only its first input. Before its
/// backward, the pass leases all its units but the last again, in plan order, for [`Phase::Recompute`]. A
/// pass leases no unit that its batch does not use, e.g. the vision tower without an image. The engine then
/// takes part in that unit's collectives, so all ranks issue the same sequence.
pub trait ParamAccess {
    /// Backend of the device on which forward and backward run.
    fn backend(&self) -> &Arc<dyn Backend>;

    /// Makes the whole weights of a unit readable until the lease ends: gathers them or waits for their
    /// prefetch.
    ///
    /// # Errors
    /// When the schedule has no such entry after the current one, or when communication or memory fails.
    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError>;

    /// Hands over the complete gradient of one parameter for this micro-batch, while its unit is leased for
    /// backward. `grad` is f32 and has the parameter's number of elements. Each parameter has one deposit per
    /// micro-batch.
    ///
    /// # Errors
    /// When the unit is not leased for backward, the parameter is frozen, its gradient was already deposited,
    /// or dtype or size differ; when communication or memory fails.
    fn deposit(&self, id: ParamId, grad: &Tensor) -> Result<(), EngineError>;

    /// Storage of saved activations between forward and backward; `None` if activations stay on the device.
    fn activations(&self) -> Option<&Activations> {
        None
    }

    /// Whether the parameter needs a gradient.
    fn is_trainable(&self, id: ParamId) -> bool;

    /// Whether backward visits this unit: it or a previous unit has trainable parameters. The plan decides, so all
    /// ranks agree.
    fn needs_backward(&self, unit: UnitId) -> bool;

    /// Whether backward recomputes the input of this unit instead of loading a saved one. The plan decides, so all
    /// ranks agree.
    fn recomputes_input(&self, _unit: UnitId) -> bool {
        false
    }

    /// The pipeline stage through which passes transfer values; `None` if this rank has all units.
    fn pipeline(&self) -> Option<&dyn PipelineStage> {
        None
    }

    /// Indices of the units that this pipeline stage has; `None` if it has all units.
    fn own_units(&self) -> Option<Range<u32>> {
        None
    }
}

/// Value that crosses the boundary between two pipeline stages: an activation, or the gradient of one.
#[derive(Clone, Debug)]
pub struct BoundaryTensor {
    /// Index of the value among the outputs of the pass's segments, equal on all stages.
    pub index: u32,
    /// Whether the value depends on a trainable parameter, so that its sender expects a gradient.
    pub wants_gradient: bool,
    /// The value.
    pub value: Tensor,
}

impl BoundaryTensor {
    /// Description of the value for its receiver.
    pub(crate) fn described(&self) -> Sent {
        Sent {
            index: self.index,
            wants_gradient: self.wants_gradient,
            shape: self.value.shape(),
            dtype: self.value.dtype(),
        }
    }
}

/// One pipeline stage of a model: passes through its units, and transfers to the neighboring stages.
pub trait PipelineStage: ParamAccess {
    /// Position of this rank among stages and data-parallel ranks.
    fn coordinates(&self) -> Coordinates;

    /// Starts a pass through the units of this stage.
    fn begin(&self, kind: PassKind);

    /// Ends the pass: takes part in the collectives of units that this rank did not lease. A backward pass ends a
    /// micro-batch.
    ///
    /// # Errors
    /// When communication fails.
    fn end(&self, kind: PassKind) -> Result<(), EngineError>;

    /// Sends values to a neighbor.
    ///
    /// # Errors
    /// When communication fails.
    fn send(&self, to: Neighbor, values: &[BoundaryTensor]) -> Result<(), EngineError>;

    /// Receives the values that a neighbor sends next.
    ///
    /// # Errors
    /// When communication or memory fails.
    fn receive(&self, from: Neighbor) -> Result<Vec<BoundaryTensor>, EngineError>;
}

/// Owner of leases, usually the engine. A [`Lease`] keeps the gathered weights of a unit readable, and
/// notifies its owner when it ends.
pub trait LeaseOwner {
    /// Ends the lease of `unit`; called exactly once. `completed` is false when an error or panic dropped the lease
    /// early.
    ///
    /// # Errors
    /// When the unit's gradients cannot be reduced or added.
    fn end_lease(&self, unit: UnitId, phase: Phase, completed: bool) -> Result<(), EngineError>;
}

/// Guard that keeps the gathered weights of one unit readable, as between FSDP's unshard and reshard. A unit
/// consists of parameters that are gathered together, usually one layer.
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
    /// Creates a lease of `unit` for `phase`. `params` are the ids and gathered weights of its parameters,
    /// ascending by id. `owner` is notified when the lease ends.
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

    /// Id of the unit whose weights this lease keeps readable.
    #[must_use]
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// Weight of the parameter `id`: the whole tensor, not a shard, in the dtype of the weights.
    ///
    /// # Errors
    /// [`EngineError::NotInUnit`] when the parameter belongs to another unit.
    pub fn param(&self, id: ParamId) -> Result<&Tensor, EngineError> {
        self.params
            .binary_search_by_key(&id, |(p, _)| *p)
            .map(|i| &self.params[i].1)
            .map_err(|_| EngineError::NotInUnit {
                param: id,
                unit: self.unit,
            })
    }

    /// Ends the lease and reports its work to the owner as completed. A lease that is dropped without this
    /// call, e.g. after an error, is reported as failed.
    ///
    /// # Errors
    /// When the unit's gradients cannot be reduced between ranks or added to their sums.
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
            // The caller already returns another error, which this one must not replace.
            self.owner.end_lease(self.unit, self.phase, false).ok();
        }
    }
}
