//! The optimizer of another library's model: the engine's step over a plan made from the bridge.

use super::bridge::{BridgeError, TensorBridge};
use crate::access::ParamAccess;
use crate::comm::Communicator;
use crate::error::EngineError;
use crate::offload::tier::Tiers;
use crate::plan::{PassKind, Phase, Plan, ZeroConfig};
use crate::spec::{ModelSpec, ParamId, ParamSpec, UnitId, UnitSpec};
use crate::step::OptimizerConfig;
use crate::zero::{StepReport, Zero};
use kernels::{MetaBackend, Pool, Shape, Tag, Tensor};
use optim::Optimizer;
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
    zero: Zero,
    pool: Pool,
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
        let (spec, groups) = spec(bridge);
        let plan = Arc::new(Plan::new(spec, config, comm.world().size)?);
        let pool = tiers.device.clone();
        let backend = Arc::new(MetaBackend::new(pool.clone()));
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
        Ok(Self { zero, pool })
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
        self.zero.begin_pass(PassKind::Train);
        if samples > 0 {
            let plan = self.zero.plan().clone();
            for unit in plan.units().iter().rev() {
                let lease = self.zero.lease(unit.id, Phase::Backward)?;
                for slot in &unit.trainable.slots {
                    self.deposit(bridge, slot.param, samples)?;
                }
                lease.end()?;
            }
        }
        let loss = if samples > 0 { mean_loss } else { 0.0 };
        self.zero.end_micro_batch(loss * samples as f64, samples)
    }

    fn deposit(&self, bridge: &dyn TensorBridge, id: ParamId, samples: u64) -> Result<()> {
        let param = &self.zero.plan().spec().params[id.index()];
        let mut gradient = vec![0.0; param.shape.elems()];
        let read = bridge.read_gradient(id.index(), &mut gradient);
        read.map_err(|source| EngineError::Bridge {
            action: "read the gradient of",
            tensor: param.name.clone(),
            source,
        })?;
        // The engine divides by all samples in the step.
        for value in &mut gradient {
            *value *= samples as f32;
        }
        let gradient = Tensor::from_slice(&self.pool, Tag::Workspace, param.shape, &gradient)?;
        self.zero.deposit(id, &gradient)
    }

    /// Updates the weights with learning rate `lr` by all gradients accumulated since the last step, and
    /// writes them into the bridge. Gradients are clipped to [`ZeroConfig::max_grad_norm`]. If a gradient or
    /// a loss is not finite, nothing changes and [`StepReport::applied`] is false.
    ///
    /// # Errors
    /// When the bridge or communication fails.
    pub fn step(&mut self, bridge: &mut dyn TensorBridge, lr: f64) -> Result<StepReport> {
        let report = self.zero.step(lr)?;
        if report.applied {
            self.write_weights(bridge)?;
        }
        Ok(report)
    }

    /// Writes the weights that the engine stores into the bridge, for example after a checkpoint was loaded.
    /// All ranks must call it.
    ///
    /// # Errors
    /// When the bridge or communication fails.
    pub fn write_weights(&self, bridge: &mut dyn TensorBridge) -> Result<()> {
        let plan = self.zero.plan();
        self.zero.visit_weights(|id, weight| {
            let written = bridge.write_weight(id.index(), &weight.to_f32_vec()?);
            written.map_err(|source| EngineError::Bridge {
                action: "write",
                tensor: plan.spec().params[id.index()].name.clone(),
                source,
            })
        })
    }

    /// Engine with this optimizer's states: for checkpoints, memory sizes and times.
    #[must_use]
    pub fn zero(&self) -> &Zero {
        &self.zero
    }

    /// Engine with this optimizer's states, mutable: for example to load a checkpoint into it.
    pub fn zero_mut(&mut self) -> &mut Zero {
        &mut self.zero
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
            });
        }
    }
    (spec, options)
}
