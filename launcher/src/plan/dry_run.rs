//! Dry run: the passes of a run on the meta device, in the order of the training loop. It measures memory.

use super::fixed::{self, Fixed};
use super::memory_plans::{self, MemoryPlans};
use crate::config::{RunConfig, RunGpu, RunPlan, Task};
use crate::device;
use crate::error::failures::unusable;
use crate::error::{Failure, failures};
use crate::lang::both;
use crate::memory::{Footprint, Kinds, Phase, PhaseBytes, RankMemory};
use crate::model::optimizer::rule;
use crate::model::setup::{dropout, keeps, shapes};
use engine::comm::WindowBytes;
use engine::{DryRun, EngineError, ParamAccess, PassKind, Plan};
use kernels::{Backend, KernelList, MemoryPlan, PoolStats, Tag};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::generate::{Prompt, dry_run_answers};
use models::{ModelError, SampleInput, VisionLanguageModel, largest_sample};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

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
    let count = |devices: Option<[Arc<dyn Backend>; 2]>| -> Result<RankMemory, Failure> {
        let failed = |e: ModelError| failures::model(both("plan memory", "计划内存"), &e);
        let mut run = Run::new(config, model, plan, work, devices).map_err(failed)?;
        run.all().map_err(failed)?;
        Ok(run.memory())
    };
    // Scratch memory depends on the number of multiprocessors. The kind of GPU that needs most counts.
    let mut most: Option<RankMemory> = None;
    // Two meta devices per kind of GPU. One records the blocks of a micro-batch, the other gives them the planned
    // offsets.
    for devices in device::counting(config)
        .into_iter()
        .zip(device::counting(config))
    {
        let memory = count(Some(devices.into()))?;
        if most
            .as_ref()
            .is_none_or(|m| memory.peak.device > m.peak.device)
        {
            most = Some(memory);
        }
    }
    most.map_or_else(|| count(None), Ok)
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

/// GPU kernels of an update of the run on `gpu`, from the largest possible sample. Files beside the model's
/// configuration are not read.
///
/// # Errors
/// The configuration cannot be used.
pub(crate) fn kernels_of(run: &RunPlan, gpu: &RunGpu) -> Result<KernelList, Failure> {
    let Some(counting) = device::counting_of(gpu) else {
        return Ok(KernelList::default());
    };
    let (model, plan) = shapes(run)?;
    let (dir, batch) = (run.model_dir(), &run.batch);
    let (tokens, slices) = (batch.model_max_length, batch.max_slice_nums);
    let sample = largest_sample(&dir, tokens, slices, batch.image_max_pixels);
    let sample = [sample.map_err(|error| unusable(&dir, &error))?];
    let count = || -> Result<(), ModelError> {
        let rule = Arc::new(rule(run));
        let mut dry_run = DryRun::on_discrete_device(Arc::new(plan), rule, counting.clone())?;
        if run.task == Task::Answer {
            let prompt = Prompt {
                input: SampleInput::from(&sample[0]),
                index: 0,
                max_new_tokens: 2,
            };
            return answer(run, &*model, &dry_run, &sample, &[prompt]);
        }
        micro_batch(run, &*model, &dry_run, &sample, &mut || (), &mut || ())?;
        Ok(dry_run.take_step()?)
    };
    count().map_err(|e| failures::model(both("plan memory", "计划内存"), &e))?;
    Ok(counting.launched())
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
    dry_run_answers(model, &**dry_run, prompts, &begin, &end)
}

struct Run<'a> {
    config: &'a RunConfig,
    model: &'a dyn VisionLanguageModel,
    work: &'a Work<'a>,
    dry_run: DryRun,
    /// Memory plan of a micro-batch. `None` on the CPU.
    memory_plan: Option<Arc<MemoryPlan>>,
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
        devices: Option<[Arc<dyn Backend>; 2]>,
    ) -> Result<Self, ModelError> {
        let rule = Arc::new(rule(config));
        let mut memory_plan = None;
        let dry_run = match devices {
            Some([device, other]) => {
                if config.task != Task::Answer {
                    let mut memory_plans = MemoryPlans::new(config, plan, other)?;
                    memory_plan = Some(memory_plans.of(config, model, work.train)?);
                }
                DryRun::on_discrete_device(plan.clone(), rule, device)
            }
            None => DryRun::new(plan.clone(), rule),
        };
        Ok(Self {
            memory_plan,
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
            for _ in 0..self.config.batch.accumulation_steps.min(2) {
                self.micro_batch()?;
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

    fn evaluate(&mut self) -> Result<(), ModelError> {
        let Some(held_out) = &self.work.held_out else {
            return Ok(());
        };
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
