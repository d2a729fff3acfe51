//! Runs golden cases and trajectories through the real engine, on worlds of threads.

use crate::golden::{CaseRun, Expected, Pack, Run};
use anyhow::{Context, Result, anyhow};
use engine::comm::{Communicator, threads};
use engine::{
    Offload, OptimizerConfig, ParamId, PassKind, Plan, Precision, Stage, Tiers, Zero, ZeroConfig,
};
use kernels::{Backend, CpuBackend, DType, Pool, Tensor};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::{
    ModelOptions, SampleInput, VisionLanguageModel, WeightSource, open_model, open_processor,
};
use optim::{AdamW, GroupOptions};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

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
pub const NO_OFFLOAD: Offload = Offload {
    param: engine::Tier::Device,
    optimizer: engine::Tier::Device,
};

/// The options of a trajectory's run, by its name in `trajectory.json`.
///
/// # Errors
/// When the name is unknown, or an adapter run lacks its settings.
pub fn run_options(pack: &Pack, run: &str, options: &mut ModelOptions) -> Result<()> {
    let adapter = || {
        pack.adapter
            .as_ref()
            .context("the pack has no adapter_init")
    };
    let (vision, llm, lora) = match run {
        "full" => (true, true, None),
        "tune_vision_only" => (true, false, None),
        "tune_llm_only" => (false, true, None),
        "resampler_only" => (false, false, None),
        "lora" => (false, false, Some(adapter()?.to_lora(&[]))),
        "lora_modules_to_save" => (
            false,
            false,
            Some(adapter()?.to_lora(&["embed_tokens", "resampler"])),
        ),
        other => return Err(anyhow!("unknown run {other}")),
    };
    (options.tune_vision, options.tune_llm, options.lora) = (vision, llm, lora);
    Ok(())
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
        change: &dyn Fn(&mut ModelOptions) -> Result<()>,
    ) -> Result<Self> {
        let mut options = ModelOptions::new(DType::F32);
        change(&mut options)?;
        let model = open_model(&pack.dir, options)?;
        let weights = WeightSource::open(&pack.dir)?;
        let adapter = pack.dir.join("adapter_init/adapter_model.safetensors");
        let adapter = adapter
            .is_file()
            .then(|| WeightSource::open_file(&adapter))
            .transpose()?;
        let zero_config = ZeroConfig {
            stage: Stage::try_from(layout.stage).map_err(|e| anyhow!(e))?,
            precision: Precision::F32,
            offload: layout.offload,
            ..ZeroConfig::default()
        };
        let plan = Arc::new(Plan::new(model.spec().clone(), zero_config, layout.world)?);
        let device = Pool::new("device", None);
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(device.clone()));
        let tiers = Tiers {
            device,
            host: Pool::new("host", None),
        };
        let settings = &pack.trajectory.optimizer;
        // The reference decays every trainable tensor.
        let group = GroupOptions {
            weight_decay: settings.weight_decay as f32,
            lr_scale: 1.0,
        };
        let rule = AdamW {
            beta1: settings.betas[0],
            beta2: settings.betas[1],
            eps: settings.eps,
        };
        let groups = vec![group; model.spec().params.len()];
        let optimizer = OptimizerConfig {
            rule: Arc::new(rule),
            groups,
        };
        let mut zero = Zero::new(plan, comm, backend.clone(), tiers, optimizer)?;
        let names = &model.spec().params;
        zero.load(|id, elements, out| {
            let name = &names[id.index()].name;
            let source = match &adapter {
                Some(adapter) if adapter.shape(name).is_some() => adapter,
                _ => &weights,
            };
            source.read_range(name, elements, DType::F32, bytemuck::cast_slice_mut(out))
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
    change: &(dyn Fn(&mut ModelOptions) -> Result<()> + Sync),
    body: impl Fn(&mut Rank) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let comms = threads::world(layout.world, 1 << 26)?;
    let work = |comm: Arc<dyn Communicator>| -> Result<T> {
        let result = Rank::new(pack, layout, comm.clone(), change).and_then(|mut r| body(&mut r));
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
    let mut runs = run_world(pack, layout, &|_| Ok(()), |rank| {
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

/// Losses before each step and after the last, with the one sample on every rank, and the trained
/// weights at the end.
///
/// # Errors
/// When a file or the engine fails.
pub fn run_trajectory(
    pack: &Pack,
    name: &str,
    expected: &Run,
    layout: Layout,
) -> Result<(Vec<f64>, BTreeMap<String, Vec<f32>>)> {
    let case = pack.case(&pack.trajectory.case)?;
    let samples = case.encode(&*open_processor(&pack.dir)?)?;
    let change = |options: &mut ModelOptions| run_options(pack, name, options);
    let mut results = run_world(pack, layout, &change, |rank| {
        let trainable = rank.model.spec().elems().1;
        if trainable != expected.trainable {
            return Err(anyhow!(
                "{trainable} trainable elements, expected {}",
                expected.trainable
            ));
        }
        let steps = expected.losses.len().saturating_sub(1);
        let mut losses = Vec::new();
        for _ in 0..steps {
            rank.micro_batch(&samples)?;
            losses.push(rank.zero.step(pack.trajectory.optimizer.lr)?.loss);
        }
        rank.micro_batch(&samples)?;
        let mut weights = BTreeMap::new();
        rank.zero.visit_weights(|id, tensor| {
            let param = &rank.model.spec().params[id.index()];
            if param.trainable {
                weights.insert(param.name.clone(), tensor.to_f32_vec()?);
            }
            Ok::<_, engine::EngineError>(())
        })?;
        losses.push(rank.zero.step(0.0)?.loss);
        Ok((losses, weights))
    })?;
    Ok(results.remove(0))
}

/// The stored adapter after the adapter run, if the pack has one.
///
/// # Errors
/// When the file is broken.
pub fn adapter_after(pack: &Pack) -> Result<Option<Expected>> {
    let path = pack.dir.join("adapter_after8/adapter_model.safetensors");
    path.is_file().then(|| Expected::read(&path)).transpose()
}
