//! The optimizer of another library's model: the engine's step over a plan made from the bridge.

use super::bridge::{BridgeError, TensorBridge};
use super::micro_batch::MicroBatch;
use crate::comm::Communicator;
use crate::error::EngineError;
use crate::offload::tier::Tiers;
use crate::plan::{PassKind, Plan, ZeroConfig};
use crate::spec::{ModelSpec, ParamId, ParamSpec, UnitId, UnitSpec};
use crate::step::OptimizerConfig;
use crate::zero::{StepReport, Zero};
use kernels::{Backend, MetaBackend, Pool, Shape};
use optim::Optimizer;
use std::ops::Range;
use std::sync::Arc;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Optimizer for a model of another library, with its states sharded over ranks as in ZeRO.
///
/// Every rank creates one over the same tensors with the same weights. All ranks call the same methods in the
/// same order.
///
/// ```
/// use engine::comm::threads;
/// use engine::sharded::{BridgeError, ShardedOptimizer, TensorBridge, TensorGroup, TensorInfo};
/// use engine::{Stage, ZeroConfig};
/// use std::sync::Arc;
///
/// /// One weight, and a sample that it should become.
/// struct Model { weight: Vec<f32>, gradient: Vec<f32> }
///
/// impl TensorBridge for Model {
///     fn groups(&self) -> Vec<TensorGroup> {
///         let tensors = vec![TensorInfo::new("weight", 1, 0.0)];
///         vec![TensorGroup { name: "model".into(), tensors }]
///     }
///     fn read_weight(&self, _: usize, out: &mut [f32]) -> Result<(), BridgeError> {
///         out.copy_from_slice(&self.weight);
///         Ok(())
///     }
///     fn read_gradient(&self, _: usize, out: &mut [f32]) -> Result<(), BridgeError> {
///         out.copy_from_slice(&self.gradient);
///         Ok(())
///     }
///     fn write_weight(&mut self, _: usize, values: &[f32]) -> Result<(), BridgeError> {
///         self.weight.copy_from_slice(values);
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), engine::EngineError> {
/// // Two ranks, here threads of one process; `engine::comm::shm` joins processes.
/// let ranks = threads::world(2, 1 << 20)?.into_iter().map(|comm| {
///     std::thread::spawn(move || -> Result<f32, engine::EngineError> {
///         let target = comm.world().rank as f32; // each rank sees another sample: 0 and 1
///         let mut model = Model { weight: vec![3.0], gradient: vec![0.0] };
///         let config = ZeroConfig { stage: Stage::Zero2, ..ZeroConfig::default() };
///         let rule = Arc::new(optim::AdamW::default());
///         let mut optimizer = ShardedOptimizer::new(&model, comm, rule, config)?;
///         for _ in 0..400 {
///             let error = model.weight[0] - target;
///             model.gradient[0] = 2.0 * error;
///             optimizer.accumulate(&model, f64::from(error * error), 1)?;
///             optimizer.step(&mut model, 0.02)?;
///         }
///         Ok(model.weight[0])
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     let weight = rank.join().expect("no rank panics")?;
///     assert!((weight - 0.5).abs() < 0.05, "{weight}"); // the mean of both samples
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ShardedOptimizer {
    pub(super) zero: Zero,
    /// Whether gradients were accumulated since the last step.
    pub(super) accumulated: bool,
}

impl ShardedOptimizer {
    /// Creates an optimizer as [`ShardedOptimizer::with_tiers`] does, with no limit on device and host memory
    /// and without spill files.
    ///
    /// # Errors
    /// As [`ShardedOptimizer::with_tiers`].
    pub fn new(
        bridge: &dyn TensorBridge,
        comm: Arc<dyn Communicator>,
        rule: Arc<dyn Optimizer>,
        config: ZeroConfig,
    ) -> Result<Self> {
        let tiers = Tiers::new(Pool::new("device", None), Pool::new("host", None));
        Self::with_tiers(bridge, comm, rule, config, tiers)
    }

    /// Creates an optimizer that updates by `rule`, with states on the memory tiers that `config.offload`
    /// names. It reads the initial weights from the bridge.
    ///
    /// # Errors
    /// When memory is short, two tensors share a name, ranks have different tensors or settings, or the bridge fails.
    pub fn with_tiers(
        bridge: &dyn TensorBridge,
        comm: Arc<dyn Communicator>,
        rule: Arc<dyn Optimizer>,
        config: ZeroConfig,
        tiers: Tiers,
    ) -> Result<Self> {
        let backend = Arc::new(MetaBackend::new(tiers.device.clone()));
        Self::on_device(bridge, comm, rule, config, tiers, backend)
    }

    /// Creates an optimizer as [`ShardedOptimizer::with_tiers`] does, whose gradients may be in the memory of the
    /// device `backend` ([`TensorBridge::device_gradient`]). On a GPU the states of the device tier are in that
    /// memory too, and the pool of the device tier counts buffers of the host.
    ///
    /// # Errors
    /// As [`ShardedOptimizer::with_tiers`], and when the device fails.
    pub fn on_device(
        bridge: &dyn TensorBridge,
        comm: Arc<dyn Communicator>,
        rule: Arc<dyn Optimizer>,
        config: ZeroConfig,
        tiers: Tiers,
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let (spec, groups) = spec(bridge);
        let plan = Arc::new(Plan::new(spec, config, comm.world().size)?);
        let optimizer = OptimizerConfig { rule, groups };
        let mut zero = Zero::new(plan.clone(), comm, backend, tiers, optimizer)?;
        // The engine asks for parts of a tensor in order, and the bridge returns whole ones.
        let mut read: (Option<ParamId>, Vec<f32>) = (None, Vec::new());
        zero.load(|id, elements, out| -> Result<(), BridgeError> {
            if read.0 != Some(id) {
                read.1
                    .resize(plan.spec().params[id.index()].shape.elems(), 0.0);
                bridge.read_weight(id.index(), &mut read.1)?;
                read.0 = Some(id);
            }
            out.copy_from_slice(&read.1[elements]);
            Ok(())
        })?;
        Ok(Self {
            zero,
            accumulated: false,
        })
    }

    /// Adds the gradients of one micro-batch, read from the bridge, to those of the next step. They must be
    /// the gradients of `mean_loss`, the mean loss over `samples` samples (or tokens) of this rank. Ranks and
    /// calls may differ in `samples`, since each sample has the same weight. A rank without samples passes 0,
    /// and its gradients are not read.
    ///
    /// # Errors
    /// When the bridge or communication fails.
    pub fn accumulate(
        &mut self,
        bridge: &dyn TensorBridge,
        mean_loss: f64,
        samples: u64,
    ) -> Result<()> {
        let plan = self.zero.plan().clone();
        let batch = self.micro_batch(samples);
        let units = plan.units().iter().filter(|_| samples > 0);
        for unit in units.rev() {
            let lease = batch.backward(unit.id)?;
            for slot in &unit.trainable.slots {
                hand_over(&batch, bridge, &plan, slot.param)?;
            }
            lease.end()?;
        }
        batch.end(mean_loss)
    }

    /// Begins a micro-batch of `samples` samples (or tokens) of this rank, for a model that hands over gradients
    /// itself or reads its weights group by group. All ranks must call it.
    pub fn micro_batch(&mut self, samples: u64) -> MicroBatch<'_> {
        self.zero.begin_pass(PassKind::Train);
        MicroBatch::new(self, samples)
    }

    pub(super) fn end_micro_batch(&mut self, mean_loss: f64, samples: u64) -> Result<()> {
        self.accumulated = true;
        let loss = if samples > 0 { mean_loss } else { 0.0 };
        self.zero.end_micro_batch(loss * samples as f64, samples)
    }

    /// Updates the weights with learning rate `lr` by all gradients accumulated since the last step, and
    /// writes them into the bridge. Gradients are clipped to [`ZeroConfig::max_grad_norm`]. If a gradient or
    /// a loss is not finite, nothing changes and [`StepReport::applied`] is false.
    ///
    /// # Errors
    /// When the bridge or communication fails.
    pub fn step(&mut self, bridge: &mut dyn TensorBridge, lr: f64) -> Result<StepReport> {
        let report = self.step_sharded(lr)?;
        if report.applied {
            self.write_weights(bridge)?;
        }
        Ok(report)
    }

    /// Updates as [`ShardedOptimizer::step`] does, without writing whole weights anywhere. For models that read weights
    /// through [`MicroBatch::weights`] or [`ShardedOptimizer::visit_sharded_weights`].
    ///
    /// # Errors
    /// When communication fails.
    pub fn step_sharded(&mut self, lr: f64) -> Result<StepReport> {
        let report = self.zero.step(lr)?;
        self.accumulated = false;
        Ok(report)
    }

    /// Calls `visit` with this rank's part of the weights: the number of a tensor, a range of its elements, and their
    /// values. The parts of all ranks (of one shard group) have every element once. No rank communicates.
    ///
    /// # Errors
    /// When memory, the disk or `visit` fails.
    pub fn visit_sharded_weights(
        &mut self,
        mut visit: impl FnMut(usize, Range<usize>, &[f32]) -> Result<(), BridgeError>,
    ) -> Result<()> {
        let plan = self.zero.plan().clone();
        self.zero.visit_sharded_weights(|id, elements, values| {
            let visited = visit(id.index(), elements, &values.to_f32_vec()?);
            visited.map_err(|source| failed("visit", &plan, id, source))
        })
    }

    /// Writes the weights that the engine stores into the bridge. All ranks must call it.
    ///
    /// # Errors
    /// When the bridge or communication fails.
    pub fn write_weights(&self, bridge: &mut dyn TensorBridge) -> Result<()> {
        let plan = self.zero.plan();
        self.zero.visit_weights(|id, weight| {
            let written = bridge.write_weight(id.index(), &weight.to_f32_vec()?);
            written.map_err(|source| failed("write", plan, id, source))
        })
    }

    /// Engine with this optimizer's states: for memory sizes and times.
    #[must_use]
    pub fn zero(&self) -> &Zero {
        &self.zero
    }

    /// Engine with this optimizer's states, mutable.
    pub fn zero_mut(&mut self) -> &mut Zero {
        &mut self.zero
    }
}

/// Hands over the gradient of one tensor, from the device where the bridge has it there.
fn hand_over(
    batch: &MicroBatch<'_>,
    bridge: &dyn TensorBridge,
    plan: &Plan,
    id: ParamId,
) -> Result<()> {
    let cannot_read = |source| failed("read the gradient of", plan, id, source);
    let tensor = id.index();
    if let Some(gradient) = bridge.device_gradient(tensor).map_err(cannot_read)? {
        return batch.deposit(tensor, &gradient);
    }
    let mut gradient = vec![0.0; plan.spec().params[tensor].shape.elems()];
    let read = bridge.read_gradient(tensor, &mut gradient);
    read.map_err(cannot_read)?;
    batch.deposit_values(tensor, gradient)
}

fn failed(action: &'static str, plan: &Plan, id: ParamId, source: BridgeError) -> EngineError {
    EngineError::Bridge {
        action,
        tensor: plan.spec().params[id.index()].name.clone(),
        source,
    }
}

/// One unit per group, one flat parameter per tensor.
fn spec(bridge: &dyn TensorBridge) -> (ModelSpec, Vec<optim::GroupOptions>) {
    let mut spec = ModelSpec::default();
    let mut options = Vec::new();
    for (unit, group) in (0..).zip(bridge.groups()) {
        spec.units.push(UnitSpec { name: group.name });
        for tensor in group.tensors {
            options.push(tensor.options);
            spec.params.push(ParamSpec {
                name: tensor.name,
                shape: Shape::new(&[tensor.elems]),
                unit: UnitId(unit),
                trainable: true,
                quantization: None,
            });
        }
    }
    (spec, options)
}
