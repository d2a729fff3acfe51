//! Parameter access without sharding: the whole model in one memory.

use engine::{EngineError, Lease, LeaseOwner, ModelSpec, ParamAccess, ParamId, Phase, UnitId};
use kernels::{Backend, KernelError, Tensor};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Call of a tape to [`ResidentParams`], as it is recorded for tests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AccessEvent {
    /// A lease (a unit's weights made readable) began in this phase.
    Lease(UnitId, Phase),
    /// The gradient of this parameter arrived.
    Deposit(ParamId),
    /// A lease of the unit ended; the flag is false if an error ended it.
    End(UnitId, Phase, bool),
}

#[derive(Debug, Default)]
struct State {
    open: Option<(UnitId, Phase)>,
    deposited: BTreeSet<ParamId>,
    events: Vec<AccessEvent>,
}

/// All parameters of a model in one memory, without sharding. It is the reference in tests, and measures a
/// model's activations on the meta device.
///
/// It checks its callers against the contract of [`ParamAccess`]. One lease (a unit's weights made readable)
/// exists at a time. A parameter's gradient arrives only under a backward lease of its unit, once per lease.
/// Gradients of successive passes are summed until [`ResidentParams::clear_grads`].
#[derive(Debug)]
pub struct ResidentParams {
    backend: Arc<dyn Backend>,
    spec: ModelSpec,
    recomputed: Vec<Range<u32>>,
    weights: RefCell<Vec<Tensor>>,
    grads: RefCell<Vec<Option<Tensor>>>,
    state: RefCell<State>,
}

impl ResidentParams {
    /// Takes the weights of a model: `weights` has one tensor per parameter of `spec`, in the same order.
    ///
    /// # Errors
    /// When the number of tensors or a shape differs from `spec`.
    pub fn new(
        backend: Arc<dyn Backend>,
        spec: ModelSpec,
        weights: Vec<Tensor>,
    ) -> Result<Self, EngineError> {
        if weights.len() != spec.params.len() {
            return protocol("new", format!("{} weights", weights.len()));
        }
        for (param, weight) in spec.params.iter().zip(&weights) {
            if param.shape != weight.shape() {
                let detail = format!("{}: {} <- {}", param.name, param.shape, weight.shape());
                return protocol("new", detail);
            }
        }
        let grads = RefCell::new(vec![None; weights.len()]);
        Ok(Self {
            backend,
            spec,
            recomputed: Vec::new(),
            weights: RefCell::new(weights),
            grads,
            state: RefCell::default(),
        })
    }

    /// Makes backward recompute the inputs of some units instead of storing them. Each of `groups` is a range
    /// of unit indices, in which only the first unit's input is stored.
    #[must_use]
    pub fn with_recomputed(mut self, groups: Vec<Range<u32>>) -> Self {
        self.recomputed = groups;
        self
    }

    /// The model's list of units and parameters.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// A handle to the current weight of the parameter `id`.
    #[must_use]
    pub fn weight(&self, id: ParamId) -> Tensor {
        self.weights.borrow()[id.index()].clone()
    }

    /// Replaces the weight of the parameter `id`, as an optimizer does.
    pub fn set_weight(&self, id: ParamId, weight: Tensor) {
        self.weights.borrow_mut()[id.index()] = weight;
    }

    /// Gradient (f32) of the parameter `id`, summed over the passes since [`ResidentParams::clear_grads`];
    /// `None` if there was none.
    #[must_use]
    pub fn grad(&self, id: ParamId) -> Option<Tensor> {
        self.grads.borrow()[id.index()].clone()
    }

    /// Drops the summed gradients of all parameters.
    pub fn clear_grads(&self) {
        self.grads.borrow_mut().fill(None);
    }

    /// Returns the calls recorded since this method was last called, oldest first.
    pub fn take_events(&self) -> Vec<AccessEvent> {
        std::mem::take(&mut self.state.borrow_mut().events)
    }
}

fn protocol<T>(op: &'static str, detail: String) -> Result<T, EngineError> {
    Err(KernelError::Shape { op, detail }.into())
}

impl ParamAccess for ResidentParams {
    fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>, EngineError> {
        let mut state = self.state.borrow_mut();
        if let Some(open) = state.open {
            return protocol("lease", format!("{unit:?} while {open:?} is leased"));
        }
        state.open = Some((unit, phase));
        state.deposited.clear();
        state.events.push(AccessEvent::Lease(unit, phase));
        let weights = self.weights.borrow();
        let params = self.spec.params.iter().zip(weights.iter()).enumerate();
        let params = params
            .filter(|(_, (p, _))| p.unit == unit)
            .map(|(i, (_, w))| (ParamId(i as u32), w.clone()))
            .collect();
        Ok(Lease::new(self, unit, phase, params))
    }

    fn deposit(&self, id: ParamId, grad: &Tensor) -> Result<(), EngineError> {
        let mut state = self.state.borrow_mut();
        let param = &self.spec.params[id.index()];
        if state.open != Some((param.unit, Phase::Backward)) {
            return Err(EngineError::NotInUnit {
                param: id,
                unit: state.open.map_or(param.unit, |(unit, _)| unit),
            });
        }
        if !param.trainable || !state.deposited.insert(id) || grad.shape() != param.shape {
            let detail = format!(
                "{} {}: frozen, twice, or misshaped",
                param.name,
                grad.shape()
            );
            return protocol("deposit", detail);
        }
        state.events.push(AccessEvent::Deposit(id));
        let slot = &mut self.grads.borrow_mut()[id.index()];
        *slot = Some(match slot.take() {
            Some(sum) => self.backend.add(&sum, grad)?,
            None => grad.clone(),
        });
        Ok(())
    }

    fn is_trainable(&self, id: ParamId) -> bool {
        self.spec.params[id.index()].trainable
    }

    fn needs_backward(&self, unit: UnitId) -> bool {
        let trains = |p: &&engine::ParamSpec| p.trainable;
        self.spec
            .params
            .iter()
            .filter(trains)
            .any(|p| p.unit <= unit)
    }

    fn recomputes_input(&self, unit: UnitId) -> bool {
        let inner = |group: &Range<u32>| group.start < unit.0 && unit.0 < group.end;
        self.recomputed.iter().any(inner)
    }
}

impl LeaseOwner for ResidentParams {
    fn end_lease(&self, unit: UnitId, phase: Phase, completed: bool) -> Result<(), EngineError> {
        let mut state = self.state.borrow_mut();
        state.open = None;
        state.events.push(AccessEvent::End(unit, phase, completed));
        Ok(())
    }
}
