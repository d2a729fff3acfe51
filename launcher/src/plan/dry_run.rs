//! Dry run: the passes of a run on the meta device, in the order of the training loop. It measures memory.

use super::fixed::{self, Fixed};
use super::memory_plans::{self, MemoryPlans};
use super::stages::{self, StageRun, Transfer};
use crate::config::{Collectives, RunConfig, RunGpu, RunPlan, Task};
use crate::device;
use crate::device::checks::have_code;
use crate::error::failures::unusable;
use crate::error::{Failure, failures};
use crate::lang::both;
use crate::memory::{Footprint, Kinds, Phase, PhaseBytes, RankMemory};
use crate::model::optimizer::rule;
use crate::model::setup::{dropout, keeps, shapes};
use crate::rank_env::Variables;
use engine::comm::WindowBytes;
use engine::{DryRun, EngineError, ParamAccess, PassKind, PipelineStage, Plan};
use kernels::{Backend, KernelList, MemoryPlan, PoolStats, Tag};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::generate::{Prompt, dry_run_answers};
use models::pipeline::{self, Point};
use models::{ModelError, SampleInput, VisionLanguageModel, largest_sample};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tokens of a short sample.
const SHORT_TOKENS: usize = 64;

/// Input of a dry run of one rank: the largest batch of each kind that the run will process.
#[derive(Debug)]
pub(crate) struct Work<'a> {
    /// Samples of the largest training micro-batch.
    pub(crate) train: &'a [EncodedSample],
    /// Largest batches of held-out samples. `None` if the run does not evaluate.
    pub(crate) held_out: Option<HeldOut<'a>>,
    /// Host memory of the process that does not depend on the batches.
    pub(crate) fixed: Fixed,
}

/// Largest batches of an evaluation.
#[derive(Debug)]
pub(crate) struct HeldOut<'a> {
    /// The longest held-out sample, as a batch of one, to compute its loss. Empty if no loss is computed.
    pub(crate) longest: &'a [EncodedSample],
    /// The longest held-out questions, as one batch, to generate answers.
    pub(crate) prompts: Vec<Prompt<'a>>,
}

/// Peak memory that one rank of `plan` needs, found by a dry run that computes no values.
///
/// # Errors
/// A sample does not fit the model.
pub(crate) fn dry_run(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    plan: &Arc<Plan>,
    work: &Work<'_>,
) -> Result<RankMemory, Failure> {
    let failed = |e: ModelError| failures::model(both("plan memory", "计划内存"), &e);
    // Scratch memory depends on the number of multiprocessors. The kind of GPU that needs most counts.
    let kinds = device::counting(config).len();
    let mut most: Option<RankMemory> = None;
    for kind in 0..kinds.max(1) {
        let device = || device::counting(config).into_iter().nth(kind);
        let memory = match plan.stages() {
            1 => alone(config, model, plan, work, &device),
            _ => of_stages(config, model, plan, work, &device),
        };
        let memory = memory.map_err(failed)?;
        if most
            .as_ref()
            .is_none_or(|m| memory.peak.device > m.peak.device)
        {
            most = Some(memory);
        }
    }
    Ok(most.unwrap_or_default())
}

/// Lower bound of the device memory that a rank of `plan` needs: that of one training micro-batch of the samples `train`.
/// It takes
/// a small part of the time of [`dry_run`]. 0 on the CPU, and for pipeline stages.
///
/// # Errors
/// A sample does not fit the model.
pub(crate) fn least_device_bytes(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    plan: &Arc<Plan>,
    train: &[EncodedSample],
) -> Result<u64, Failure> {
    if config.task == Task::Answer || plan.stages() > 1 {
        return Ok(0);
    }
    let need = |device: Arc<dyn Backend>| -> Result<u64, ModelError> {
        let mut memory_plans = MemoryPlans::new(config, plan, device.clone())?;
        let states = device.pool().stats().touched;
        let memory_plan = memory_plans.of(config, model, train)?;
        Ok(states + memory_plan.bytes() + memory_plans::margin(&memory_plan))
    };
    let needs = device::counting(config).into_iter().map(need);
    let needs: Result<Vec<u64>, ModelError> = needs.collect();
    let needs = needs.map_err(|e| failures::model(both("plan memory", "计划内存"), &e))?;
    Ok(needs.into_iter().max().unwrap_or(0))
}

/// Meta device of one kind of GPU; `None` on the CPU.
type Counting<'a> = dyn Fn() -> Option<Arc<dyn Backend>> + 'a;

/// Peak memory of a rank that has all units.
fn alone(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    plan: &Arc<Plan>,
    work: &Work<'_>,
    device: &Counting<'_>,
) -> Result<RankMemory, ModelError> {
    let mut run = Run::new(config, model, plan, work, device)?;
    run.all()?;
    Ok(run.memory())
}

/// Bytes of one rank's region of the communicator's window. In stage 3, ranks whose GPUs exchange directly use it
/// only to save weights.
///
/// # Errors
/// None in practice: the dry run has no memory limit.
pub(crate) fn window_region(config: &RunConfig, plan: &Arc<Plan>) -> Result<u64, Failure> {
    let count = || -> Result<WindowBytes, EngineError> {
        // The window has the same size on every kind of GPU.
        let mut dry_run = match device::counting(config).pop() {
            Some(device) => {
                DryRun::on_discrete_device(plan.clone(), Arc::new(rule(config)), device)
            }
            None => DryRun::new(plan.clone(), Arc::new(rule(config))),
        }?;
        for kind in [PassKind::Train, PassKind::Infer] {
            dry_run.begin_pass(kind);
            dry_run.end_pass()?;
        }
        dry_run.take_step()?;
        dry_run.save_trained()?;
        Ok(dry_run.window())
    };
    let window = count().map_err(|e| allocate(&e))?;
    Ok(window.region + fixed::WINDOW_SLACK_BYTES)
}

/// GPU kernels of an update of the run on `gpu`, and of its evaluation. Products choose their kernels by the number of
/// rows, so the largest possible micro-batch, the largest sample and a short one are counted. Files beside the model's configuration are
/// not read.
///
/// # Errors
/// The configuration cannot be used.
pub(crate) fn kernels_of(run: &RunPlan, gpu: &RunGpu) -> Result<KernelList, Failure> {
    match device::counting_of(gpu) {
        Some(counting) => launched(run, &counting),
        None => Ok(KernelList::default()),
    }
}

/// As [`kernels_of`], on a meta device that stands for the GPU.
fn launched(run: &RunPlan, counting: &Arc<dyn Backend>) -> Result<KernelList, Failure> {
    // The kernels of a pipeline stage are among those of the whole model.
    let run = &run.with_config(RunConfig {
        world_size: run.data_ranks(),
        mp_size: 1,
        mp_split: None,
        ..run.config().clone()
    });
    let (model, plan) = shapes(run)?;
    let (dir, batch) = (run.model_dir(), &run.batch);
    let (tokens, slices) = (batch.model_max_length, batch.max_slice_nums);
    let sample = |tokens, slices| {
        let sample = largest_sample(&dir, tokens, slices, batch.image_max_pixels);
        sample.map_err(|error| unusable(&dir, &error))
    };
    let batches = [
        vec![sample(tokens, slices)?; batch.micro_batch],
        vec![sample(tokens, slices)?],
        vec![sample(tokens.min(SHORT_TOKENS), 1)?],
    ];
    let trains = run.task != Task::Answer;
    let answers = run.task == Task::Answer || run.eval_file().is_some();
    let count = || -> Result<(), ModelError> {
        let rule = Arc::new(rule(run));
        let mut dry_run = DryRun::on_discrete_device(Arc::new(plan), rule, counting.clone())?;
        for samples in &batches {
            if answers {
                let prompt = Prompt {
                    input: SampleInput::from(&samples[0]),
                    index: 0,
                    max_new_tokens: 2,
                };
                answer(run, &*model, &dry_run, samples, &[prompt])?;
            }
            if trains {
                micro_batch(run, &*model, &dry_run, samples, &mut || (), &mut || ())?;
            }
        }
        if trains {
            dry_run.take_step()?;
        }
        Ok(())
    };
    count().map_err(|e| failures::model(both("plan memory", "计划内存"), &e))?;
    Ok(counting.launched())
}

/// Refuses a run on this machine's GPUs whose kernels are neither built in nor can be compiled.
///
/// # Errors
/// A kernel without code (exit 13); the configuration cannot be used.
pub(crate) fn check_kernels(config: &RunConfig) -> Result<(), Failure> {
    let kinds = device::counting(config);
    if kinds.is_empty() {
        // Nothing on the CPU needs NVRTC, which takes a while to search for.
        return Ok(());
    }
    let run = config.draft();
    let lists = kinds.iter().map(|counting| launched(&run, counting));
    have_code(lists, &Variables::read())
}

fn allocate(error: &EngineError) -> Failure {
    failures::engine(both("plan memory", "计划内存"), error)
}

/// Dry run of one training micro-batch, forward and backward, in the order of the trainer. `begun` is called before
/// the first tensor exists, `turn` between forward and backward.
///
/// # Errors
/// A sample does not fit the model.
pub(crate) fn micro_batch(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    dry_run: &DryRun,
    samples: &[EncodedSample],
    begun: &mut dyn FnMut(),
    turn: &mut dyn FnMut(),
) -> Result<(), ModelError> {
    let samples: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
    let backend: &dyn Backend = &**dry_run.backend();
    dry_run.begin_pass(PassKind::Train);
    begun();
    let batch = model.collate(&samples, backend)?;
    let keep = |unit| keeps(config, model, unit);
    let tape = Tape::training(&**dry_run).with_stored(&keep);
    let mut tape = tape.with_mlp_tiles(config.mlp_tile_tokens);
    let keys = vec![0; samples.len()];
    if let Some(state) = dropout(config, &keys, &samples, backend)? {
        tape = tape.with_dropout(state);
    }
    let loss = model.forward(&tape, &batch)?;
    turn();
    tape.backward(&loss, 1.0)?;
    drop((loss, batch));
    Ok(dry_run.end_pass()?)
}

/// Peak memory of the ranks of all pipeline stages of `plan`. The stages run one after the other, each with the values that
/// cross the boundary to it.
fn of_stages(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    plan: &Arc<Plan>,
    work: &Work<'_>,
    device: &Counting<'_>,
) -> Result<RankMemory, ModelError> {
    let (mut memories, mut boundaries) = (Vec::new(), Vec::<u64>::new());
    let mut transfers = Vec::new();
    for stage in 0..plan.stages() {
        let plan = plan.at_stage(stage).map_err(EngineError::from)?;
        let plan = Arc::new(plan);
        let mut run = Run::new(config, model, &plan, work, device)?;
        run.stage = Some(StageRun::new(stage, &plan, transfers));
        run.all()?;
        let next = run.stage.take().map(StageRun::sent).unwrap_or_default();
        let mut memory = run.memory();
        let sent = next.iter().map(Transfer::bytes).max().unwrap_or(0);
        // A rank has a region for each direction of its two links. GPUs with peer access need it for messages only.
        let links = match config.resolved_collectives() {
            Collectives::Ipc => 0,
            _ => 2 * (boundaries.last().copied().unwrap_or(0) + sent),
        };
        memory.peak.window += links;
        memory.peak.resident += links;
        memory.peak.resident_window += links;
        for bytes in &mut memory.resident_by_rank {
            *bytes += links;
        }
        boundaries.push(sent);
        memories.push(memory);
        transfers = next;
    }
    // Nothing crosses after the last stage.
    boundaries.pop();
    Ok(RankMemory::of_stages(memories, boundaries))
}

/// Dry run of an evaluation: the loss of `samples` in one pass, if there are any, and answers to `prompts`.
///
/// # Errors
/// A sample does not fit the model.
fn answer(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    dry_run: &DryRun,
    samples: &[EncodedSample],
    prompts: &[Prompt<'_>],
) -> Result<(), ModelError> {
    if !samples.is_empty() {
        let samples: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
        dry_run.begin_pass(PassKind::Infer);
        let batch = model.collate(&samples, &**dry_run.backend())?;
        let tape = Tape::inference(&**dry_run).with_mlp_tiles(config.mlp_tile_tokens);
        drop(model.forward(&tape, &batch)?);
        drop(tape);
        drop(batch);
        dry_run.end_pass()?;
    }
    let begin = || dry_run.begin_pass(PassKind::Infer);
    let end = || Ok(dry_run.end_pass()?);
    let tiles = config.mlp_tile_tokens;
    dry_run_answers(model, &**dry_run, prompts, tiles, &begin, &end)
}

/// Micro-batches of an update on a pipeline stage, for its memory: as many as are alive at once and one more.
fn in_stage<'a>(config: &RunConfig, largest: &'a [EncodedSample]) -> Vec<&'a [EncodedSample]> {
    vec![largest; config.batch.accumulation_steps.min(config.mp_size + 1)]
}

struct Run<'a> {
    config: &'a RunConfig,
    model: &'a dyn VisionLanguageModel,
    work: &'a Work<'a>,
    dry_run: DryRun,
    /// Memory plan of a micro-batch, or of an update on a pipeline stage. `None` on the CPU.
    memory_plan: Option<Arc<MemoryPlan>>,
    /// The pipeline stage. `None` if the rank has all units.
    stage: Option<StageRun>,
    phases: BTreeMap<Phase, PhaseBytes>,
    /// Peak host bytes outside the memory pools so far.
    beside: Cell<u64>,
}

impl<'a> Run<'a> {
    fn new(
        config: &'a RunConfig,
        model: &'a dyn VisionLanguageModel,
        plan: &'a Arc<Plan>,
        work: &'a Work<'a>,
        device: &Counting<'_>,
    ) -> Result<Self, ModelError> {
        let rule = Arc::new(rule(config));
        let mut memory_plan = None;
        // A second meta device records the blocks of a micro-batch, and the first gives them the planned offsets.
        let dry_run = match device().zip(device()) {
            Some((device, other)) => {
                if config.task != Task::Answer {
                    let mut memory_plans = MemoryPlans::new(config, plan, other)?;
                    memory_plan = Some(match plan.stages() {
                        1 => memory_plans.of(config, model, work.train)?,
                        _ => {
                            let micro_batches = in_stage(config, work.train);
                            memory_plans.of_stage(config, model, &micro_batches)?
                        }
                    });
                }
                DryRun::on_discrete_device(plan.clone(), rule, device)
            }
            None => DryRun::new(plan.clone(), rule),
        };
        Ok(Self {
            memory_plan,
            stage: None,
            config,
            model,
            work,
            dry_run: dry_run?,
            phases: BTreeMap::new(),
            beside: Cell::new(0),
        })
    }

    /// Runs all passes in the order of the training loop. Two steps, because the first leaves state for the second.
    fn all(&mut self) -> Result<(), ModelError> {
        self.mark(Phase::Load);
        self.evaluate()?;
        if self.config.task == Task::Answer {
            return Ok(());
        }
        for _ in 0..2 {
            if let Some(stage) = self.stage.take() {
                self.train_stage(&stage)?;
                self.stage = Some(stage);
            } else {
                for _ in 0..self.config.batch.accumulation_steps.min(2) {
                    self.micro_batch()?;
                }
            }
            self.dry_run.take_step()?;
            self.mark(Phase::Step);
        }
        self.evaluate()?;
        // A stopped run saves even if checkpoints are off.
        self.dry_run.save_trained()?;
        self.mark(Phase::Save);
        Ok(())
    }

    fn micro_batch(&mut self) -> Result<(), ModelError> {
        let pool = self.dry_run.device_pool();
        let margin = self.memory_plan.as_deref().map_or(0, memory_plans::margin);
        let margin = pool.reserve(margin, Tag::Margin)?;
        let forward = Cell::new(None);
        micro_batch(
            self.config,
            self.model,
            &self.dry_run,
            self.work.train,
            &mut || pool.follow(self.memory_plan.clone()),
            &mut || forward.set(Some(self.moment(Phase::Forward))),
        )?;
        pool.follow(None);
        let forward = forward.take().unwrap_or_default();
        self.phases
            .entry(Phase::Forward)
            .or_default()
            .raise(forward);
        let backward = self.moment(Phase::Backward);
        drop(margin);
        self.phases
            .entry(Phase::Backward)
            .or_default()
            .raise(backward);
        Ok(())
    }

    /// Dry run of the micro-batches of one update on a pipeline stage.
    fn train_stage(&mut self, stage: &StageRun) -> Result<(), ModelError> {
        let pool = self.dry_run.device_pool();
        let margin = self.memory_plan.as_deref().map_or(0, memory_plans::margin);
        let margin = pool.reserve(margin, Tag::Margin)?;
        let mut peaks = Vec::new();
        pool.follow(self.memory_plan.clone());
        stages::step(
            self.config,
            self.model,
            (&self.dry_run, stage),
            &in_stage(self.config, self.work.train),
            &mut |point| {
                let phase = match point {
                    Point::Forward => Phase::Forward,
                    Point::Backward => Phase::Backward,
                };
                peaks.push((phase, self.moment(phase)));
            },
        )?;
        pool.follow(None);
        stage.wait();
        drop(margin);
        for (phase, moment) in peaks {
            self.phases.entry(phase).or_default().raise(moment);
        }
        Ok(())
    }

    /// Dry run of an evaluation on a pipeline stage.
    fn evaluate_stage(&self, held_out: &HeldOut<'_>, stage: &StageRun) -> Result<(), ModelError> {
        let samples: Vec<SampleInput<'_>> =
            held_out.longest.iter().map(SampleInput::from).collect();
        let on = stage.on(&self.dry_run);
        on.begin(PassKind::Infer);
        let batch = self.model.collate(&samples, &**self.dry_run.backend())?;
        drop(pipeline::forward(
            self.model,
            &on,
            &batch,
            self.config.mlp_tile_tokens,
        )?);
        drop(batch);
        on.end(PassKind::Infer)?;
        let begin = || on.begin(PassKind::Infer);
        let end = || Ok(on.end(PassKind::Infer)?);
        let tiles = self.config.mlp_tile_tokens;
        dry_run_answers(self.model, &on, &held_out.prompts, tiles, &begin, &end)
    }

    fn evaluate(&mut self) -> Result<(), ModelError> {
        let Some(held_out) = &self.work.held_out else {
            return Ok(());
        };
        if let Some(stage) = &self.stage {
            self.evaluate_stage(held_out, stage)?;
            self.mark(Phase::Eval);
            return Ok(());
        }
        answer(
            self.config,
            self.model,
            &self.dry_run,
            held_out.longest,
            &held_out.prompts,
        )?;
        self.mark(Phase::Eval);
        Ok(())
    }

    fn mark(&mut self, phase: Phase) {
        let moment = self.moment(phase);
        self.phases.entry(phase).or_default().raise(moment);
    }

    /// Peak bytes by kind since the last call, plus the memory of `phase` outside the pools.
    fn moment(&self, phase: Phase) -> PhaseBytes {
        let read = |pool: &kernels::Pool| {
            let stats = pool.stats();
            pool.reset_peaks();
            at_peak(&stats)
        };
        let mut device = read(self.dry_run.device_pool());
        let mut host = read(self.dry_run.host_pool());
        // Buffers of collectives count where they are located: in the window, which is host memory on a GPU machine.
        let tier = if self.dry_run.is_host_addressable() {
            &mut device
        } else {
            &mut host
        };
        let gathered = tier.get(Tag::Gathered.name()).copied().unwrap_or(0);
        let sent = self.dry_run.take_window_peak().saturating_sub(gathered);
        let communication = tier.entry(Tag::Communication.name().into()).or_default();
        *communication = sent.max(*communication);
        device.retain(|_, bytes| *bytes > 0);
        let mut beside = 0;
        for (kind, bytes) in self.work.fixed.in_phase(phase, self.config, self.work) {
            *host.entry(kind.to_owned()).or_default() += bytes;
            beside += bytes;
        }
        self.beside.set(self.beside.get().max(beside));
        host.retain(|_, bytes| *bytes > 0);
        let mut nvme = read(self.dry_run.nvme_pool());
        nvme.retain(|_, bytes| *bytes > 0);
        PhaseBytes { device, host, nvme }
    }

    fn memory(self) -> RankMemory {
        let stats = self.dry_run.device_pool().stats();
        let window = self.dry_run.window();
        let footprint = Footprint {
            touched: if self.dry_run.is_host_addressable() {
                stats.touched
            } else {
                0
            },
            held: stats.held,
            host: self.dry_run.host_bytes(),
            shared: (self.dry_run.shared_bytes(), self.config.data_ranks()),
            nvme: self.dry_run.nvme_pool().stats().held,
            beside: self.beside.get(),
            region: window.region + fixed::WINDOW_SLACK_BYTES,
            window,
        };
        RankMemory::new(self.phases, footprint)
    }
}

fn at_peak(stats: &PoolStats) -> Kinds {
    let kinds = Tag::ALL.iter();
    kinds
        .map(|tag| (tag.name().to_owned(), stats.tag(*tag).at_peak))
        .collect()
}
