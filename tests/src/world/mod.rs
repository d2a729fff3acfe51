//! Golden cases and trajectories run by the real engine, on worlds of threads.

mod setup;

use crate::golden::{CaseRun, Pack, Trajectory};
use crate::tolerance::Roundings;
use anyhow::{Result, anyhow};
use engine::comm::mesh::{Mesh, Regions};
use engine::{
    OptimizerConfig, ParamId, ParamSpec, PassKind, Plan, Precision, Slice, Stage, StepReport,
    Tiers, Zero, ZeroConfig,
};
use kernels::{Backend, CpuBackend, DType, Pool, Tensor};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::options::RopePrecision;
use models::pipeline::{self, Schedule1F1B};
use models::{
    ModelOptions, QuantizedWeights, SampleInput, VisionLanguageModel, WeightError, WeightSource,
    open_model,
};
use optim::GroupOptions;
use optim::loss_scale::{LossScale, LossScaler, Verdict};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

pub use setup::{Device, Layout, NO_OFFLOAD, Setup, compute_on, on_a_device};

/// One rank's engine and model.
pub struct Rank {
    /// The model.
    pub model: Arc<dyn VisionLanguageModel>,
    /// Its engine with all model states.
    pub zero: Zero,
    backend: Arc<dyn Backend>,
    /// The loss scaler, in fp16.
    scaler: Option<LossScaler>,
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank")
            .field("zero", &self.zero)
            .finish_non_exhaustive()
    }
}

impl Rank {
    /// A rank on `backend`, or on the CPU.
    fn new(
        pack: &Pack,
        layout: Layout,
        mesh: Mesh,
        setup: &Setup<'_>,
        backend: Option<Arc<dyn Backend>>,
    ) -> Result<Self> {
        let mut weights = WeightSource::open(&pack.dir)?;
        // Quantized weights stay so beside adapters; else all weights train.
        let quantized = match (&setup.options.quantized, &setup.options.lora) {
            (QuantizedWeights::None, Some(_)) => QuantizedWeights::Stored(weights.quantizations()),
            (chosen, _) => chosen.clone(),
        };
        let options = ModelOptions {
            quantized,
            dtype: layout.precision.weight_dtype(),
            // Rotary angles of the references, which some families would round to the model's dtype.
            rope_precision: RopePrecision::F32,
            ..setup.options.clone()
        };
        let model = open_model(&pack.dir, options)?;
        let params = model.spec().params.iter();
        let quantized = params.filter_map(|p| Some((p.name.clone(), p.stored_quantization()?)));
        weights.quantize_on_read(quantized.collect());
        let at = mesh.coordinates();
        let units = model.spec().units.len() as u32;
        let border = |stage: usize| units * stage as u32 / at.stages as u32;
        let counts = (0..at.stages).map(|stage| border(stage + 1) - border(stage));
        let zero_config = ZeroConfig {
            slice: (at.stages > 1).then(|| Slice {
                counts: counts.collect(),
                stage: at.stage,
            }),
            stage: Stage::try_from(layout.stage).map_err(|e| anyhow!(e))?,
            precision: layout.precision,
            offload: layout.offload,
            // The ranks are threads of this process.
            shares_host_memory: true,
            max_grad_norm: setup.max_grad_norm,
            ..ZeroConfig::default()
        };
        let plan = Arc::new(Plan::new(model.spec().clone(), zero_config, layout.world)?);
        let device = Pool::new("device", None);
        let cpu = || CpuBackend::new(device.clone()).with_math(layout.math);
        let backend = backend.unwrap_or_else(|| Arc::new(cpu()));
        let tiers = Tiers::new(device, Pool::new("host", None));
        let settings = &setup.optimizer;
        // The references apply weight decay to every trainable tensor.
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
        let mut zero = Zero::in_mesh(plan, mesh, backend.clone(), tiers, optimizer)?;
        let read = |id: ParamId, elements: Range<usize>, out: &mut [f32]| {
            let name = &names[id.index()].name;
            let first = elements.start;
            match setup.start.get(name) {
                Some(values) => out.copy_from_slice(&values[elements]),
                None => {
                    let out = bytemuck::cast_slice_mut(out);
                    weights.read_range(name, elements, DType::F32, out)?;
                }
            }
            if let Some(shake) = layout.shake {
                shake.apply(name, first, out);
            }
            Ok::<_, WeightError>(())
        };
        zero.load_quantized(read, |id, out| {
            out.copy_from_slice(&weights.read_quantized(&names[id.index()].name)?);
            Ok(true)
        })?;
        Ok(Self {
            model,
            zero,
            backend,
            scaler: (layout.precision == Precision::Fp16)
                .then(|| LossScaler::new(LossScale::default()))
                .transpose()?,
        })
    }

    /// Runs forward and backward of one micro-batch. Returns the sum of losses and the number of supervised tokens.
    ///
    /// # Errors
    /// When the engine fails.
    pub fn micro_batch(&mut self, samples: &[EncodedSample]) -> Result<(f64, usize)> {
        let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
        self.zero.begin_pass(PassKind::Train);
        let batch = self.model.collate(&inputs, &*self.backend)?;
        let scale = self.loss_scale() as f32;
        let tape = Tape::training(&self.zero).with_recompute_check(true);
        let tape = tape.with_loss_factor(scale);
        let loss = self.model.forward(&tape, &batch)?;
        let fetch = loss.fetch()?;
        tape.backward(&loss, scale)?;
        let sums = (fetch.sum()?, loss.supervised);
        self.zero.end_micro_batch(sums.0, sums.1 as u64)?;
        Ok(sums)
    }

    /// Runs forward and backward of the micro-batches of an update, on a pipeline stage in 1F1B order. Returns for each what
    /// [`Rank::micro_batch`] does.
    ///
    /// # Errors
    /// When the engine fails.
    pub fn micro_batches(&mut self, batches: &[Vec<EncodedSample>]) -> Result<Vec<(f64, usize)>> {
        if self.zero.mesh().coordinates().stages == 1 {
            return batches.iter().map(|b| self.micro_batch(b)).collect();
        }
        let schedule = Schedule1F1B {
            model: &*self.model,
            stored: &|_| false,
            factor: self.loss_scale() as f32,
            micro_batches: batches.len(),
            mlp_tiles: None,
        };
        let mut next = |index: usize| {
            let inputs = batches[index].iter().map(SampleInput::from);
            let inputs: Vec<SampleInput<'_>> = inputs.collect();
            let batch = self.model.collate(&inputs, &*self.backend)?;
            let dropout = None;
            Ok(pipeline::MicroBatch { batch, dropout })
        };
        let sums = schedule.run(&self.zero, &mut next, &mut |_, _| ())?;
        for (sum, supervised) in &sums {
            self.zero.add_losses(*sum, *supervised as u64);
        }
        Ok(sums)
    }

    /// Factor on the losses, above 1 in fp16 only.
    fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Runs `accumulate`, then an update. If gradients overflow in fp16, it repeats both with a smaller loss scale. A
    /// training run skips that batch, but the reference does not.
    ///
    /// # Errors
    /// When the engine fails, or losses or gradients are not finite for another reason.
    pub fn update<T>(
        &mut self,
        lr: f64,
        accumulate: impl Fn(&mut Self) -> Result<T>,
    ) -> Result<(T, StepReport)> {
        loop {
            let scale = self.loss_scale();
            let accumulated = accumulate(self)?;
            let report = self.zero.step_scaled(lr, scale)?;
            let verdict = self.scaler.as_mut().map(|s| s.update(!report.applied));
            match verdict.transpose()? {
                Some(Verdict::Skip) => {}
                _ if !report.applied => return Err(anyhow!("loss or gradients are not finite")),
                _ => return Ok((accumulated, report)),
            }
        }
    }

    /// Runs a forward pass and returns its observed values and logits.
    fn observe(&mut self, samples: &[EncodedSample]) -> Result<CaseRun> {
        let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
        let batch = self.model.collate(&inputs, &*self.backend)?;
        let taps = RefCell::new(BTreeMap::new());
        // Pixels count as one result.
        let (results, read_by_any) = (Cell::new(1), RefCell::new(BTreeSet::new()));
        let counter = |_: &'static str, read: &[ParamId], _: &Tensor| {
            results.set(results.get() + 1);
            read_by_any.borrow_mut().extend(read.iter().copied());
        };
        let observer = |name: &str, value: &Tensor| {
            if let Ok(values) = value.to_f32_vec() {
                taps.borrow_mut().insert(name.to_owned(), values);
            }
        };
        self.zero.begin_pass(PassKind::Infer);
        let tape = Tape::inference(&self.zero).with_observer(&observer);
        let tape = tape.with_op_observer(&counter);
        let logits = self.model.full_logits(&tape, &batch)?.to_f32_vec()?;
        drop(tape);
        self.zero.end_pass()?;
        Ok(CaseRun {
            taps: taps.into_inner(),
            logits: Some(logits),
            roundings: Roundings {
                results: results.get(),
                weights: read_by_any.into_inner().len(),
            },
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
    let regions = Regions {
        data: 1 << 26,
        link: 1 << 24,
    };
    let ranks = layout.world * layout.stages;
    let meshes = Mesh::threads(ranks, layout.stages, 1 << 26, regions)?;
    let backend = layout.backend();
    let work = |mesh: Mesh| -> Result<T> {
        let rank = Rank::new(pack, layout, mesh.clone(), setup, backend.clone());
        let result = rank.and_then(|mut rank| body(&mut rank));
        if let Err(error) = &result {
            mesh.abort(&error.to_string());
        }
        result
    };
    std::thread::scope(|scope| {
        let work = &work;
        let handles: Vec<_> = meshes
            .into_iter()
            .map(|mesh| scope.spawn(move || work(mesh)))
            .collect();
        let joined = handles
            .into_iter()
            .map(|h| h.join().map_err(|_| anyhow!("a rank panicked")));
        joined.collect::<Result<Vec<_>>>()?.into_iter().collect()
    })
}

/// Runs a case and returns the values of one pass, the mean loss and its gradients. Several ranks divide the samples
/// among them.
///
/// # Errors
/// When a file or the engine fails.
pub fn run_case(pack: &Pack, samples: &[EncodedSample], layout: Layout) -> Result<CaseRun> {
    run_case_with(pack, samples, layout, &Setup::full())
}

/// As [`run_case`], with another model setup.
///
/// # Errors
/// When a file or the engine fails.
pub fn run_case_with(
    pack: &Pack,
    samples: &[EncodedSample],
    layout: Layout,
    setup: &Setup<'_>,
) -> Result<CaseRun> {
    let mut runs = run_world(pack, layout, setup, |rank| {
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
        let ((grads, scale), report) = rank.update(0.0, |rank| {
            if own.is_empty() {
                rank.zero.begin_pass(PassKind::Train);
                rank.zero.end_micro_batch(0.0, 0)?;
            } else {
                rank.micro_batch(&own)?;
            }
            Ok((rank.zero.gradients()?, rank.loss_scale() as f32))
        })?;
        let tokens = report.supervised_tokens as f32 * scale;
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

/// Number of roundings in a forward pass over `samples` in 16 bits, counted in f32 on the CPU.
///
/// # Errors
/// When a file or the engine fails.
pub fn roundings(pack: &Pack, samples: &[EncodedSample], setup: &Setup<'_>) -> Result<Roundings> {
    let layout = Layout::SINGLE.on_cpu();
    let mut runs = run_world(pack, layout, setup, |rank| rank.observe(samples))?;
    Ok(runs.remove(0).roundings)
}

/// Results of a trajectory.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Travelled {
    /// Losses before each step and after the last one.
    pub losses: Vec<f64>,
    /// Gradient norms of the steps before clipping.
    pub grad_norms: Vec<f64>,
    /// Trained weights after the last step.
    pub weights: BTreeMap<String, Vec<f32>>,
}

/// Runs the steps of a trajectory, with its samples on every rank.
///
/// # Errors
/// When a file or the engine fails, or the number of trainable elements is wrong.
pub fn run_trajectory(pack: &Pack, expected: &Trajectory, layout: Layout) -> Result<Travelled> {
    let mut results = run_world(pack, layout, &expected.into(), |rank| {
        let trainable = rank.model.spec().elems().1;
        if let Some(wanted) = expected.trainable.filter(|wanted| *wanted != trainable) {
            return Err(anyhow!("{trainable} trainable elements, expected {wanted}"));
        }
        let accumulate = |rank: &mut Rank| rank.micro_batches(&expected.micro_batches);
        let mut run = Travelled::default();
        for _ in 1..expected.losses.len() {
            let (_, report) = rank.update(expected.optimizer.lr, accumulate)?;
            run.losses.push(report.loss);
            run.grad_norms.push(report.grad_norm);
        }
        rank.zero.visit_weights(|id, tensor| {
            let param = &rank.model.spec().params[id.index()];
            if param.trainable {
                run.weights.insert(param.name.clone(), tensor.to_f32_vec()?);
            }
            Ok::<_, engine::EngineError>(())
        })?;
        run.losses.push(rank.update(0.0, accumulate)?.1.loss);
        Ok(run)
    })?;
    Ok(results.remove(0))
}
