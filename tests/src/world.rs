//! Runs golden cases and trajectories through the real engine, on worlds of threads.

use crate::golden::{AdamW, CaseRun, Pack, Trajectory};
use anyhow::{Result, anyhow};
use engine::comm::{Communicator, threads};
use engine::{
    Offload, OptimizerConfig, ParamId, ParamSpec, PassKind, Plan, Precision, Stage, Tiers, Zero,
    ZeroConfig,
};
use kernels::{Backend, CpuBackend, DType, Pool, Tensor};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::{
    ModelOptions, SampleInput, VisionLanguageModel, WeightError, WeightSource, open_model,
};
use optim::GroupOptions;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// How a world shards and where its states live.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Layout {
    /// Ranks, each a thread.
    pub world: usize,
    /// ZeRO stage.
    pub stage: u8,
    /// Tiers.
    pub offload: Offload,
}

impl Layout {
    /// One rank that shards nothing.
    pub const SINGLE: Self = Self {
        world: 1,
        stage: 0,
        offload: NO_OFFLOAD,
    };
}

/// Everything on the device.
pub const NO_OFFLOAD: Offload = Offload::states(engine::Tier::Device);

/// What all ranks of this process compute on, where that is not the CPU.
static DEVICE: OnceLock<Arc<dyn Backend>> = OnceLock::new();

/// Lets every world of this process compute on `backend`. Only the first call counts.
pub fn compute_on(backend: Arc<dyn Backend>) {
    DEVICE.set(backend).ok();
}

/// How ranks of a world are set up.
#[derive(Debug)]
pub struct Setup<'a> {
    /// Options of the model.
    pub options: ModelOptions,
    /// Start values that the base does not have, or has otherwise.
    pub start: &'a BTreeMap<String, Vec<f32>>,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Global norm that gradients are clipped to.
    pub max_grad_norm: Option<f32>,
    /// Decay and learning-rate factor of parameters by name, where they differ.
    pub groups: &'a BTreeMap<String, GroupOptions>,
}

impl Setup<'static> {
    /// A full fine-tune.
    #[must_use]
    pub fn full() -> Self {
        static NOTHING: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        static NO_GROUPS: BTreeMap<String, GroupOptions> = BTreeMap::new();
        Self {
            options: ModelOptions::new(DType::F32),
            start: &NOTHING,
            optimizer: AdamW {
                lr: 1e-3,
                betas: [0.9, 0.95],
                eps: 1e-8,
                weight_decay: 0.1,
            },
            max_grad_norm: None,
            groups: &NO_GROUPS,
        }
    }
}

impl<'a> From<&'a Trajectory> for Setup<'a> {
    fn from(run: &'a Trajectory) -> Self {
        Self {
            options: run.options.clone(),
            start: &run.start,
            optimizer: run.optimizer.clone(),
            max_grad_norm: run.max_grad_norm,
            groups: &run.groups,
        }
    }
}

/// One rank's engine and model.
pub struct Rank {
    /// The model.
    pub model: Arc<dyn VisionLanguageModel>,
    /// Its states.
    pub zero: Zero,
    backend: Arc<dyn Backend>,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank")
            .field("zero", &self.zero)
            .finish_non_exhaustive()
    }
}

impl Rank {
    fn new(
        pack: &Pack,
        layout: Layout,
        comm: Arc<dyn Communicator>,
        setup: &Setup<'_>,
    ) -> Result<Self> {
        let model = open_model(&pack.dir, setup.options.clone())?;
        let weights = WeightSource::open(&pack.dir)?;
        let zero_config = ZeroConfig {
            stage: Stage::try_from(layout.stage).map_err(|e| anyhow!(e))?,
            precision: Precision::F32,
            offload: layout.offload,
            max_grad_norm: setup.max_grad_norm,
            ..ZeroConfig::default()
        };
        let plan = Arc::new(Plan::new(model.spec().clone(), zero_config, layout.world)?);
        let device = Pool::new("device", None);
        let backend: Arc<dyn Backend> = match DEVICE.get() {
            Some(gpu) => gpu.clone(),
            None => Arc::new(CpuBackend::new(device.clone())),
        };
        let tiers = Tiers::new(device, Pool::new("host", None));
        let settings = &setup.optimizer;
        // The references decay every trainable tensor.
        let common = GroupOptions {
            weight_decay: settings.weight_decay as f32,
            lr_scale: 1.0,
        };
        let rule = optim::AdamW {
            beta1: settings.betas[0],
            beta2: settings.betas[1],
            eps: settings.eps,
            ..optim::AdamW::default()
        };
        let names = &model.spec().params;
        let group = |p: &ParamSpec| setup.groups.get(&p.name).copied().unwrap_or(common);
        let optimizer = OptimizerConfig {
            rule: Arc::new(rule),
            groups: names.iter().map(group).collect(),
        };
        let mut zero = Zero::new(plan, comm, backend.clone(), tiers, optimizer)?;
        zero.load(|id, elements, out| {
            let name = &names[id.index()].name;
            match setup.start.get(name) {
                Some(values) => out.copy_from_slice(&values[elements]),
                None => {
                    let out = bytemuck::cast_slice_mut(out);
                    weights.read_range(name, elements, DType::F32, out)?;
                }
            }
            Ok::<_, WeightError>(())
        })?;
        Ok(Self {
            model,
            zero,
            backend,
        })
    }

    /// Forward and backward of one micro-batch; the sum of losses and the supervised tokens.
    ///
    /// # Errors
    /// When the engine fails.
    pub fn micro_batch(&mut self, samples: &[EncodedSample]) -> Result<(f64, usize)> {
        let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
        self.zero.begin_pass(PassKind::Train);
        let batch = self.model.collate(&inputs, &*self.backend)?;
        let tape = Tape::training(&self.zero).with_replay_check(true);
        let loss = self.model.forward(&tape, &batch)?;
        let sums = (loss.sum()?, loss.supervised);
        tape.backward(&loss, 1.0)?;
        self.zero.end_micro_batch(sums.0, sums.1 as u64)?;
        Ok(sums)
    }

    /// Observed values and logits of a forward pass.
    fn observe(&mut self, samples: &[EncodedSample]) -> Result<CaseRun> {
        let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
        let batch = self.model.collate(&inputs, &*self.backend)?;
        let taps = RefCell::new(BTreeMap::new());
        let observer = |name: &str, value: &Tensor| {
            if let Ok(values) = value.to_f32_vec() {
                taps.borrow_mut().insert(name.to_owned(), values);
            }
        };
        self.zero.begin_pass(PassKind::Infer);
        let tape = Tape::inference(&self.zero).with_observer(&observer);
        let logits = self.model.full_logits(&tape, &batch)?.to_f32_vec()?;
        drop(tape);
        self.zero.end_pass()?;
        Ok(CaseRun {
            taps: taps.into_inner(),
            logits: Some(logits),
            ..CaseRun::default()
        })
    }
}

/// Runs `body` on every rank of a world and returns the results in rank order.
///
/// # Errors
/// The first rank's error, or a panic of a rank.
pub fn run_world<T: Send>(
    pack: &Pack,
    layout: Layout,
    setup: &Setup<'_>,
    body: impl Fn(&mut Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let comms = threads::world(layout.world, 1 << 26)?;
    let work = |comm: Arc<dyn Communicator>| -> Result<T> {
        let result = Rank::new(pack, layout, comm.clone(), setup).and_then(|mut r| body(&mut r));
        if let Err(error) = &result {
            comm.abort(&error.to_string());
        }
        result
    };
    std::thread::scope(|scope| {
        let work = &work;
        let handles: Vec<_> = comms
            .into_iter()
            .map(|comm| scope.spawn(move || work(comm)))
            .collect();
        let joined = handles
            .into_iter()
            .map(|h| h.join().map_err(|_| anyhow!("a rank panicked")));
        joined.collect::<Result<Vec<_>>>()?.into_iter().collect()
    })
}

/// Everything a case stores: values of the first layout's pass, mean loss and its gradients. With
/// several ranks the samples are divided among them.
///
/// # Errors
/// When a file or the engine fails.
pub fn run_case(pack: &Pack, samples: &[EncodedSample], layout: Layout) -> Result<CaseRun> {
    let mut runs = run_world(pack, layout, &Setup::full(), |rank| {
        let world = rank.zero.comm().world();
        let mut run = if world.size == 1 {
            rank.observe(samples)?
        } else {
            CaseRun::default()
        };
        let own: Vec<EncodedSample> = samples
            .iter()
            .skip(world.rank)
            .step_by(world.size)
            .cloned()
            .collect();
        if own.is_empty() {
            rank.zero.begin_pass(PassKind::Train);
            rank.zero.end_micro_batch(0.0, 0)?;
        } else {
            rank.micro_batch(&own)?;
        }
        let grads = rank.zero.gradients()?;
        let report = rank.zero.step(0.0)?;
        let tokens = report.supervised_tokens as f32;
        let name = |id: ParamId| rank.model.spec().params[id.index()].name.clone();
        run.loss = Some(report.loss);
        run.grads = grads
            .into_iter()
            .map(|(id, g)| (name(id), g.into_iter().map(|v| v / tokens).collect()))
            .collect();
        Ok(run)
    })?;
    Ok(runs.remove(0))
}

/// What a trajectory left.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Travelled {
    /// Losses before each step and after the last.
    pub losses: Vec<f64>,
    /// Gradient norms of the steps, before clipping.
    pub grad_norms: Vec<f64>,
    /// The trained weights at the end.
    pub weights: BTreeMap<String, Vec<f32>>,
}

/// Takes a trajectory's steps, with its samples on every rank.
///
/// # Errors
/// When a file or the engine fails, or other numbers of elements train.
pub fn run_trajectory(pack: &Pack, expected: &Trajectory, layout: Layout) -> Result<Travelled> {
    let mut results = run_world(pack, layout, &expected.into(), |rank| {
        let trainable = rank.model.spec().elems().1;
        if let Some(wanted) = expected.trainable.filter(|wanted| *wanted != trainable) {
            return Err(anyhow!("{trainable} trainable elements, expected {wanted}"));
        }
        let accumulate = |rank: &mut Rank| {
            let batches = expected.micro_batches.iter();
            batches
                .map(|b| rank.micro_batch(b))
                .collect::<Result<Vec<_>>>()
        };
        let mut run = Travelled::default();
        for _ in 1..expected.losses.len() {
            accumulate(rank)?;
            let report = rank.zero.step(expected.optimizer.lr)?;
            run.losses.push(report.loss);
            run.grad_norms.push(report.grad_norm);
        }
        accumulate(rank)?;
        rank.zero.visit_weights(|id, tensor| {
            let param = &rank.model.spec().params[id.index()];
            if param.trainable {
                run.weights.insert(param.name.clone(), tensor.to_f32_vec()?);
            }
            Ok::<_, engine::EngineError>(())
        })?;
        run.losses.push(rank.zero.step(0.0)?.loss);
        Ok(run)
    })?;
    Ok(results.remove(0))
}
