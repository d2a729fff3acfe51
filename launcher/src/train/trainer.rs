//! Training loop of one rank. A step runs its micro-batches, forward and backward, then the update. Logging,
//! evaluation and checkpoints follow when they are due. ARCHITECTURE.md walks through it in the same order.

use super::batches::{MicroBatch, ended_early, start_loader};
use super::collectives::Collectives;
use super::inject::Faults;
use super::numeric::{History, StepSamples};
use super::replica::{Opened, OwnGpu, Replica};
use super::step_context::{self, Failing, StepContext};
use super::trace::StepTraces;
use super::{evaluate, save, tiers};
use crate::config::{BestMetric, BestSoFar, Cadence, Device};
use crate::data::{Loader, SampleSet, Sampler};
use crate::error::{ErrorCode, Failure, chain, failures};
use crate::lang::{Text, both, text};
use crate::launch::rank::{RunSummary, StopFlag};
use crate::launch::rendezvous::CPU_MATH;
use crate::memory::Phase;
use crate::model::optimizer::schedule;
use crate::model::quantize;
use crate::model::setup::{dropout, keeps};
use crate::plan::{MemoryPlans, resume};
use crate::report::checkpoints::{self, UNITS};
use crate::report::monitor::Monitor;
use crate::report::monitor::split::StepTimes;
use crate::report::{EvalResults, RunReport, StepRecord};
use crate::ui::{DiskTraffic, EvalEvent, Event, Reporter, ResumeEvent, StepEvent};
use engine::comm::Tag;
use engine::spill::SpillStats;
use engine::{PassKind, StepReport, Zero};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::pipeline::{self, Point, Schedule1F1B};
use models::{ModelError, SampleInput, WeightSource};
use optim::loss_scale::{LossScaler, Verdict};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of updates in a row that may be skipped for non-finite values.
const MAX_SKIPPED_IN_A_ROW: u32 = 20;

/// Sums over the steps since the last row of the training log.
struct LogWindow {
    started: Instant,
    loss: f64,
    updates: u64,
    tokens: u64,
    disk: Option<SpillStats>,
}

impl LogWindow {
    fn new(zero: &Zero) -> Self {
        Self {
            disk: zero.spill_stats(),
            started: Instant::now(),
            loss: 0.0,
            updates: 0,
            tokens: 0,
        }
    }
}

/// Training loop of one rank, with its state.
pub(crate) struct Trainer<'a> {
    replica: Replica<'a>,
    /// Files of the base weights; `None` for random weights.
    weights: Option<WeightSource>,
    train: Arc<SampleSet>,
    sampler: Sampler,
    eval: Option<SampleSet>,
    gpu: Option<OwnGpu<'a>>,
    /// Memory plans of micro-batches. `None` on the CPU.
    memory_plans: Option<MemoryPlans>,
    /// Loss scaler. `None` unless the precision is fp16.
    scaler: Option<LossScaler>,
    reporter: Reporter,
    /// Measured bytes per second of this rank's share of the spill disks, if any.
    disk_ceiling: Option<f64>,
    /// Directory and metadata of the checkpoint resumed from, if any.
    resumed: Option<(PathBuf, Value)>,
    /// Log of this rank's last collectives.
    collectives: Arc<Collectives>,
    /// Faults to inject into this rank, for tests.
    faults: Faults,

    total_steps: u64,
    /// Completed steps of the schedule, skipped updates included.
    done: u64,
    /// Value of `done` at the start of this run.
    started_at: u64,
    total_tokens: u64,
    skipped_in_a_row: u32,
    history: History,
    exact_match_before: Option<f64>,
    /// The best evaluation, if the run compares them.
    best: Option<BestSoFar>,
    /// The best evaluation that has a checkpoint, if the run keeps that.
    kept: Option<BestSoFar>,
    summary: RunSummary,
    /// Micro-batch in progress, if any.
    at: Option<StepContext>,
    /// Micro-batches of the current step, with the sum of token losses of each on this rank.
    losses: Vec<(StepContext, f64)>,
    monitor: Monitor,
    window: LogWindow,
    /// Writer of the report files. `None` except on rank 0.
    report: Option<RunReport>,
}

impl<'a> Trainer<'a> {
    pub(crate) fn new(opened: Opened<'a>) -> Self {
        let Opened {
            replica,
            weights,
            train,
            eval,
            gpu,
            memory_plans,
            scaler,
            reporter,
            disk_ceiling,
            resumed,
            collectives,
            faults,
            ..
        } = opened;
        let config = replica.config;
        let sampler = Sampler::of(config, &train, &config.found().first_samples);
        Self {
            total_steps: sampler.total_steps(config),
            sampler,
            done: 0,
            started_at: 0,
            total_tokens: 0,
            skipped_in_a_row: 0,
            history: History::default(),
            exact_match_before: None,
            best: None,
            kept: None,
            summary: RunSummary::default(),
            at: None,
            losses: Vec::new(),
            monitor: Monitor::new(&replica.zero),
            window: LogWindow::new(&replica.zero),
            report: None,
            replica,
            weights,
            train,
            eval,
            gpu,
            memory_plans,
            scaler,
            reporter,
            disk_ceiling,
            resumed,
            collectives,
            faults,
        }
    }

    /// Trains to the last step, or until a signal stops the run.
    pub(crate) fn train(&mut self, stop: &StopFlag) -> Result<RunSummary, Failure> {
        let config = self.replica.config;
        let sampler = self.sampler.clone();
        let schedule = schedule(config, self.total_steps);
        let mut traces = StepTraces::new(config.trace_steps.clone());
        self.resume()?;
        self.begin(&sampler)?;
        let steps = self.done..self.total_steps;
        let train = self.train.clone();
        let mut loader = start_loader(&self.replica, train, sampler.clone(), steps)?;
        self.window = LogWindow::new(&self.replica.zero);
        while self.done < self.total_steps {
            let lr = schedule.lr(self.done);
            traces.begin(self.done + 1, self.replica.zero.trace());
            let step = self.train_step(&mut loader, lr)?;
            self.done += 1;
            let is_last = self.done == self.total_steps;
            let (trace, rank) = (self.replica.zero.trace(), self.replica.comm.world().rank);
            traces.end((self.done, is_last), trace, &config.output, rank)?;
            if !self.rescale(&step)? {
                self.account(&step)?;
            }
            let epoch_ended = sampler.epoch_ended(self.done);
            let (done, total) = (self.done, self.total_steps);
            let due = |cadence: Cadence| cadence.is_due(done, total, epoch_ended);
            if due(config.logging) || done == 1 {
                self.log(&step, lr, sampler.epochs_after(done))?;
            } else {
                let (step, loss) = (done, Some(step.loss));
                self.reporter.emit(&Event::Tick { step, total, loss });
            }
            let stopping = self.anyone(stop.is_set())?;
            // A stopped run skips evaluation, so that its state is saved at once.
            self.monitor.begin(&self.replica.zero);
            let mut value = None;
            if due(config.eval) && (is_last || !stopping) {
                value = self.evaluate(&sampler)?;
                self.monitor.end(Phase::Eval, &self.replica.zero);
            }
            let best_is_past = config.best.is_some_and(|rule| rule.ends(self.best));
            if due(config.save) || stopping || best_is_past {
                self.keep(value);
                self.save()?;
                self.monitor.end(Phase::Save, &self.replica.zero);
            }
            if stopping && !is_last {
                self.summary.interrupted = true;
                break;
            }
            if best_is_past && !is_last {
                self.reporter.emit(&Event::Info {
                    label: both("early", "提前").into(),
                    text: text!(
                        "training ends at step {done} of {total}: --early-stopping-patience",
                        "训练在第 {done} 步结束，共 {total} 步：--early-stopping-patience"
                    ),
                });
                break;
            }
        }
        self.finish()
    }

    /// Restores the loop's position from the checkpoint, if there is one.
    fn resume(&mut self) -> Result<(), Failure> {
        let Some((directory, meta)) = &self.resumed else {
            return Ok(());
        };
        if let Some(scaler) = &mut self.scaler {
            let state = serde_json::from_value(meta["loss_scale"].clone()).map_err(|e| {
                Failure::new(
                    ErrorCode::Resume,
                    text!("cannot {}", "无法{}", resume::doing(directory)),
                    text!(
                        "its manifest has no loss scale: {e}",
                        "它的清单没有损失缩放：{e}"
                    ),
                )
            })?;
            scaler.restore(state);
        }
        let (config, sampler) = (self.replica.config, &self.sampler);
        let position = resume::position(config, directory, meta, sampler, self.total_steps)?;
        self.done = position.done;
        self.started_at = position.done;
        self.total_tokens = position.total_tokens;
        self.exact_match_before = position.exact_match_before;
        let best = |key: &str| serde_json::from_value(meta[key].clone()).unwrap_or_default();
        self.best = best("best");
        let loads = config.best.is_some_and(|rule| rule.load);
        // A run with a new output directory does not have the checkpoints of the old one.
        let is_here = |best: &BestSoFar| {
            let name = format!("checkpoint-{}", best.step);
            config.output.join(name).is_dir()
        };
        self.kept = best("kept").filter(|best| loads && is_here(best));
        self.reporter.emit(&Event::Resume(ResumeEvent {
            name: directory
                .file_name()
                .map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
            ranks: self.replica.comm.world().size,
            step: position.done,
            loss_is_identical: None,
        }));
        Ok(())
    }

    /// Opens the report. Evaluates once if the run starts without a checkpoint.
    fn begin(&mut self, sampler: &Sampler) -> Result<(), Failure> {
        let config = self.replica.config;
        if self.replica.comm.world().rank == 0 {
            let from = self.resumed.as_ref().map(|(directory, _)| &**directory);
            checkpoints::go_on_from(&config.output, from)?;
            let (total, epochs) = (self.total_steps, sampler.epochs_after(self.total_steps));
            self.report = Some(RunReport::open(config, total, epochs, self.done)?);
            self.report_best();
        }
        if self.resumed.is_none() && config.eval != Cadence::Never {
            let set = self.eval.as_ref();
            let loss = set
                .map(|set| evaluate::loss(&self.replica, set))
                .transpose()?;
            let exact = set.map(|set| evaluate::exact_match(&self.replica, set, self.done));
            self.exact_match_before = exact.transpose()?;
            self.monitor.end(Phase::Eval, &self.replica.zero);
            if let Some(loss) = loss {
                self.show_eval(loss, None);
            }
        }
        self.reporter.emit(&Event::TrainStart {
            total: self.total_steps,
            done: self.done,
        });
        Ok(())
    }

    /// One optimizer step: its micro-batches, then the update on all ranks.
    fn train_step(
        &mut self,
        loader: &mut Loader<MicroBatch, Failure>,
        lr: f64,
    ) -> Result<StepReport, Failure> {
        self.monitor.begin(&self.replica.zero);
        self.losses.clear();
        let micro_batches = self.replica.config.batch.accumulation_steps;
        if self.replica.config.mp_size > 1 {
            return self.train_stage(loader, lr);
        }
        for micro in 1..=micro_batches {
            let loaded = loader.next().ok_or_else(ended_early)??;
            self.monitor.end(Phase::Data, &self.replica.zero);
            let batch = loaded.batch;
            self.faults.begin_step(loaded.step + 1);
            let indices = batch.indices.clone();
            let at = StepContext::new(loaded.step, loaded.micro_step, indices, &batch.samples);
            self.window.tokens += at.tokens.iter().sum::<usize>() as u64;
            self.at = Some(at.clone());
            if micro == micro_batches {
                let tokens = batch.samples.iter().map(EncodedSample::supervised_tokens);
                let (supervised, scale) = (tokens.sum::<usize>() as u64, self.loss_scale());
                let announced = self.replica.zero.announce_update(lr, scale, supervised);
                announced
                    .map_err(|e| failures::engine(both("announce an update", "通告更新"), &e))?;
            }
            let loss = self.forward_backward(&batch)?;
            self.losses.push((at, loss));
        }
        let stepped = self.replica.zero.step_scaled(lr, self.loss_scale());
        let report =
            stepped.map_err(|e| failures::engine(both("update weights", "更新权重"), &e))?;
        self.at = None;
        self.monitor.end(Phase::Step, &self.replica.zero);
        Ok(report)
    }

    /// One optimizer step of a pipeline stage: the micro-batches in 1F1B order, then the update on all ranks.
    fn train_stage(
        &mut self,
        loader: &mut Loader<MicroBatch, Failure>,
        lr: f64,
    ) -> Result<StepReport, Failure> {
        let scale = self.loss_scale();
        let Replica {
            config,
            model,
            backend,
            zero,
            ..
        } = &mut self.replica;
        let (losses, monitor, faults) = (&mut self.losses, &mut self.monitor, &mut self.faults);
        let monitor = RefCell::new(monitor);
        faults.begin_step(self.done + 1);
        let keep = |unit| keeps(config, &**model, unit);
        let schedule = Schedule1F1B {
            model: &**model,
            stored: &keep,
            factor: faults.loss_factor(scale as f32),
            micro_batches: config.batch.accumulation_steps,
            mlp_tiles: config.mlp_tile_tokens,
        };
        // All stages of a data-parallel rank read its samples; one counts them.
        let counts_tokens = zero.mesh().coordinates().stage == 0;
        // The memory plan needs the sizes of all micro-batches.
        let loaded = (0..schedule.micro_batches).map(|_| loader.next().ok_or_else(ended_early)?);
        let loaded = loaded.collect::<Result<Vec<_>, Failure>>()?;
        monitor.borrow_mut().end(Phase::Data, zero);
        let samples: Vec<&[EncodedSample]> = loaded.iter().map(|l| &*l.batch.samples).collect();
        let memory_plan = self
            .memory_plans
            .as_mut()
            .map(|memory_plans| memory_plans.of_stage(config, &**model, &samples));
        let memory_plan = memory_plan.transpose();
        let memory_plan =
            memory_plan.map_err(|e| failures::model(both("plan a micro-batch", "计划微批"), &e))?;
        let mut next = |index: usize| -> Result<pipeline::MicroBatch, ModelError> {
            let loaded = &loaded[index];
            let batch = &loaded.batch;
            let indices = batch.indices.clone();
            let at = StepContext::new(loaded.step, loaded.micro_step, indices, &batch.samples);
            if counts_tokens {
                self.window.tokens += at.tokens.iter().sum::<usize>() as u64;
            }
            self.at = Some(at.clone());
            losses.push((at, 0.0));
            let inputs: Vec<SampleInput<'_>> =
                batch.samples.iter().map(SampleInput::from).collect();
            faults.forward();
            Ok(pipeline::MicroBatch {
                batch: model.collate(&inputs, &**backend)?,
                dropout: dropout(config, &batch.keys, &inputs, &**backend)?,
            })
        };
        let mut at = |_: usize, point: Point| {
            let phase = match point {
                Point::Forward => Phase::Forward,
                Point::Backward => Phase::Backward,
            };
            monitor.borrow_mut().end(phase, zero);
        };
        backend.pool().follow(memory_plan);
        let sums = schedule.run(&*zero, &mut next, &mut at);
        let sums = sums.map_err(|e| failures::model(both("train", "训练"), &e))?;
        backend.pool().follow(None);
        for ((_, loss), (sum, supervised)) in self.losses.iter_mut().zip(sums) {
            *loss = sum;
            zero.add_losses(sum, supervised as u64);
        }
        let stepped = zero.step_scaled(lr, scale);
        let report =
            stepped.map_err(|e| failures::engine(both("update weights", "更新权重"), &e))?;
        self.at = None;
        self.monitor.end(Phase::Step, &self.replica.zero);
        Ok(report)
    }

    /// Gives every pipeline stage the losses of the step's micro-batches, which only the last stage computes.
    fn share_losses(&mut self) -> Result<(), Failure> {
        let at = self.replica.zero.mesh().coordinates();
        if at.stages == 1 {
            return Ok(());
        }
        let own: Vec<f64> = self.losses.iter().map(|(_, loss)| *loss).collect();
        let all = self
            .replica
            .comm
            .all_gather_f64(&own, Tag::new("losses", 0));
        let all = all.map_err(|e| failures::comm(&e))?;
        let last = &all[at.rank(at.data.rank, at.stages - 1)];
        for ((_, loss), shared) in self.losses.iter_mut().zip(last) {
            *loss = *shared;
        }
        Ok(())
    }

    /// Forward and backward of one micro-batch. Returns the sum of its token losses on this rank.
    fn forward_backward(&mut self, batch: &MicroBatch) -> Result<f64, Failure> {
        let scale = self.loss_scale();
        let Replica {
            config,
            model,
            backend,
            zero,
            ..
        } = &mut self.replica;
        let inputs: Vec<SampleInput<'_>> = batch.samples.iter().map(SampleInput::from).collect();
        let memory_plan = self
            .memory_plans
            .as_mut()
            .map(|memory_plans| memory_plans.of(config, &**model, &batch.samples));
        let memory_plan = memory_plan.transpose();
        let memory_plan =
            memory_plan.map_err(|e| failures::model(both("plan a micro-batch", "计划微批"), &e))?;
        zero.begin_pass(PassKind::Train);
        backend.pool().follow(memory_plan);
        self.faults.forward();
        let factor = self.faults.loss_factor(scale as f32);
        let mut run = || -> Result<(f64, usize), ModelError> {
            let collated = model.collate(&inputs, &**backend)?;
            let keep = |unit| keeps(config, &**model, unit);
            let tape = Tape::training(&*zero).with_stored(&keep);
            let tape = tape.with_mlp_tiles(config.mlp_tile_tokens);
            let mut tape = tape.with_loss_factor(factor);
            if let Some(state) = dropout(config, &batch.keys, &inputs, &**backend)? {
                tape = tape.with_dropout(state);
            }
            let loss = model.forward(&tape, &collated)?;
            let fetch = loss.fetch()?;
            self.monitor.end(Phase::Forward, zero);
            tape.backward(&loss, factor)?;
            Ok((fetch.sum()?, loss.supervised))
        };
        let (sum, supervised) = run().map_err(|e| failures::model(both("train", "训练"), &e))?;
        zero.end_micro_batch(sum, supervised as u64)
            .map_err(|e| failures::engine(both("train", "训练"), &e))?;
        backend.pool().follow(None);
        self.monitor.end(Phase::Backward, zero);
        Ok(sum)
    }

    /// Factor on the loss before the backward pass; 1 except in fp16.
    fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Updates the loss scale of fp16. Returns whether the step overflowed, which is normal while the scale adapts.
    fn rescale(&mut self, step: &StepReport) -> Result<bool, Failure> {
        let Some(scaler) = &mut self.scaler else {
            return Ok(false);
        };
        let done = self.done;
        let before = scaler.scale();
        let verdict = scaler.update(!step.applied).map_err(|e| {
            Failure::new(
                ErrorCode::Numeric,
                text!(
                    "the gradients of step {done} exceed the range of fp16",
                    "第 {done} 步的梯度超出 fp16 的范围"
                ),
                chain(&e),
            )
            .next(both(
                "--precision bf16, which needs the same memory and has the range of f32",
                "请使用 --precision bf16，它需要的内存相同，范围与 f32 一样",
            ))
        })?;
        if verdict == Verdict::Apply {
            return Ok(false);
        }
        let after = scaler.scale();
        self.note(step);
        self.reporter.emit(&Event::Warning {
            text: if after < before {
                text!("step {done}: gradients overflow fp16; the update was skipped, the loss scale is {after} (was {before})", "第 {done} 步：梯度在 fp16 中溢出；已跳过更新，损失缩放为 {after}（原为 {before}）"
                )
            } else {
                text!("step {done}: gradients overflow fp16 at a loss scale of {before}; the update was skipped", "第 {done} 步：损失缩放为 {before} 时梯度在 fp16 中溢出；已跳过更新"
                )
            },
        });
        Ok(true)
    }

    /// Records a step. Fails after too many skipped updates in a row.
    fn account(&mut self, step: &StepReport) -> Result<(), Failure> {
        self.note(step);
        if step.applied {
            self.skipped_in_a_row = 0;
            return Ok(());
        }
        self.skipped_in_a_row += 1;
        self.share_losses()?;
        let made_of = StepSamples {
            replica: &self.replica,
            train: &self.train,
            losses: &self.losses,
        };
        let finding = self.history.investigate(&made_of, self.done, step)?;
        self.reporter.emit(&Event::Warning {
            text: text!("step {}: loss {} or a gradient is not finite; the update was skipped on every rank{}", "第 {} 步：损失 {} 或某个梯度不是有限值；所有 rank 都已跳过更新{}",
                self.done,
                step.loss,
                if self.skipped_in_a_row == 1 {
                    text!("; {}", "；{}", finding.hint())
                } else {
                    Text::default()
                }
            ),
        });
        // A run that ends on skipped updates has no trained model to report, even if it was short.
        let ends = self.done == self.total_steps;
        let all = u64::from(self.skipped_in_a_row) == self.done - self.started_at;
        let lost = ends && (all || self.skipped_in_a_row > 1);
        if self.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW && !lost {
            return Ok(());
        }
        Err(finding.failure(self.replica.config, self.skipped_in_a_row))
    }

    fn note(&mut self, step: &StepReport) {
        self.window.loss += step.loss;
        self.window.updates += 1;
        self.history.push(step);
    }

    /// Gathers the numbers of all ranks and writes a log row.
    fn log(&mut self, step: &StepReport, lr: f64, epoch: f64) -> Result<(), Failure> {
        let (zero, comm) = (&self.replica.zero, &*self.replica.comm);
        let gathered = self.monitor.gather(self.window.tokens, comm);
        let gathered = gathered.map_err(|e| failures::comm(&e))?;
        let tokens: f64 = gathered.tokens.iter().sum();
        let seconds = self.window.started.elapsed().as_secs_f64().max(1e-9);
        let window = std::mem::replace(&mut self.window, LogWindow::new(zero));
        let updates = window.updates.max(1) as f64;
        let bytes = self.monitor.peaks();
        let grad_norm = step.applied.then_some(step.grad_norm);
        self.total_tokens += tokens as u64;
        let record = StepRecord {
            step: self.done,
            epoch,
            loss: window.loss / updates,
            lr,
            grad_norm,
            tokens_per_second: tokens / seconds,
            total_tokens: self.total_tokens,
            bytes,
            times: StepTimes::of(&gathered.splits, updates)
                .with_devices(&gathered.devices, updates),
            disk: disk_traffic(zero, window.disk, self.disk_ceiling),
        };
        let mut remaining_seconds = 0.0;
        let mut notices = Vec::new();
        let memory = self.monitor.take_memory(self.done, gathered.peaks);
        if let Some(report) = &mut self.report {
            notices = report.on_step(&record, memory)?;
            remaining_seconds = report.remaining_seconds(self.done);
        }
        self.reporter.emit(&Event::Step(StepEvent {
            step: self.done,
            total: self.total_steps,
            loss: record.loss,
            lr,
            grad_norm,
            tokens_per_second: record.tokens_per_second,
            step_seconds: record.times.step_seconds(),
            data_wait: record.times.data_wait(),
            device_peak_bytes: bytes.device,
            host_bytes: bytes.host,
            skipped: !step.applied,
            remaining_seconds,
            disk: record.disk,
        }));
        for notice in notices {
            self.reporter.emit(&notice);
        }
        Ok(())
    }

    /// Evaluates on the held-out samples, if there are any. Returns the metric that the run compares.
    fn evaluate(&mut self, sampler: &Sampler) -> Result<Option<f64>, Failure> {
        let Some(set) = &self.eval else {
            return Ok(None);
        };
        let started = Instant::now();
        let eval_loss = evaluate::loss(&self.replica, set)?;
        let exact = evaluate::exact_match(&self.replica, set, self.done)?;
        let exact_match = Some(exact);
        let samples = set.samples.len();
        self.show_eval(eval_loss, exact_match);
        self.summary.eval_loss = Some(eval_loss);
        self.summary.exact_match = exact_match;
        self.summary.exact_match_before = self.exact_match_before;
        if let Some(report) = &mut self.report {
            let seconds = started.elapsed().as_secs_f64();
            report.on_eval(&EvalResults {
                eval_loss,
                exact_match,
                exact_match_before: self.exact_match_before,
                eval_samples: samples,
                eval_runtime: seconds,
                eval_samples_per_second: samples as f64 / seconds.max(1e-9),
                step: self.done,
                epoch: sampler.epochs_after(self.done),
            })?;
        }
        let value = self.replica.config.best.map(|rule| {
            let value = match rule.metric {
                BestMetric::Loss => eval_loss,
                BestMetric::ExactMatch => exact,
            };
            self.best = rule.after(self.best, self.done, value);
            value
        });
        self.report_best();
        Ok(value)
    }

    /// Remembers this step as the best one with a checkpoint, if its metric `value` is better than that of the best so
    /// far. Called before a step is saved; `value` is `None` if the step was not evaluated.
    fn keep(&mut self, value: Option<f64>) {
        let rule = self.replica.config.best.filter(|rule| rule.load);
        if let (Some(rule), Some(value)) = (rule, value) {
            self.kept = rule.after(self.kept, self.done, value);
            self.report_best();
        }
    }

    /// Passes the best evaluation, and the best that has a checkpoint, to the report.
    fn report_best(&mut self) {
        if let (Some(report), Some(best)) = (&mut self.report, self.best) {
            report.note_best(best, self.kept);
        }
    }

    /// Lets the best checkpoint stand for the run.
    fn load_best(&self) -> Result<(), Failure> {
        let (Some(best), Some(rule)) = (self.kept, self.replica.config.best) else {
            return Ok(());
        };
        let name = format!("checkpoint-{}", best.step);
        if self.report.is_some() {
            checkpoints::write_best(&self.replica.config.output, &name)?;
        }
        let (metric, value) = (rule.metric.name(), best.value);
        self.reporter.emit(&Event::Info {
            label: both("best", "最佳").into(),
            text: text!(
                "{name} · {metric} {value:.4} · generate, eval and export of this run take it",
                "{name} · {metric} {value:.4} · 对本次运行的 generate、eval 和 export 使用它"
            ),
        });
        Ok(())
    }

    fn show_eval(&self, loss: f64, exact_match: Option<f64>) {
        self.reporter.emit(&Event::Eval(EvalEvent {
            step: self.done,
            loss,
            exact_match: exact_match.or(self.exact_match_before.filter(|_| self.done == 0)),
            exact_match_before: exact_match.and(self.exact_match_before),
            samples: self.eval.as_ref().map_or(0, |e| e.samples.len()),
        }));
    }

    /// Saves a checkpoint with the state of this loop.
    fn save(&mut self) -> Result<(), Failure> {
        let total_tokens = self.total_tokens + self.unlogged_tokens()?;
        let Replica {
            config,
            comm,
            zero,
            math,
            ..
        } = &self.replica;
        let mut meta = json!({
            "steps_done": self.done,
            "updates": zero.step_count(),
            "total_tokens": total_tokens,
            "samples": self.train.mix().per_epoch(),
            "global_batch": config.global_batch(),
            "seed": config.seed,
            "precision": zero.plan().config().precision.name(),
            "loss_scale": self.scaler.as_ref().map(LossScaler::state),
            "zero": config.zero,
            "world_size": comm.world().size,
            "exact_match_before": self.exact_match_before,
            "worst_first": config.batch.worst_first,
            "base_model": config.model_dir(),
            "best": self.best,
            "kept": self.kept,
        });
        if let Some(most) = config.batch.tokens_per_batch {
            meta[resume::TOKENS_PER_BATCH] = most.into();
            meta[resume::SAMPLES_USED] = self.sampler.used(self.done).into();
        }
        let quantized = quantize::record(zero.plan().spec());
        if !quantized.is_null() {
            meta[quantize::QUANTIZED] = quantized;
        }
        if config.device == Device::Cpu {
            meta[CPU_MATH] = math.name().into();
        }
        meta[UNITS] = save::units(zero.plan());
        meta[resume::ORIGIN] = json!(config.found().origin);
        meta[resume::RESUMED_ANYWAY] = json!(config.found().resumed_anyway);
        let kept = self.kept.map(|best| best.step);
        let (weights, report) = (self.weights.as_ref(), self.report.as_ref());
        let event = save::save(
            &mut self.replica,
            weights,
            &mut self.faults,
            self.done,
            (&meta, kept),
            report,
        )?;
        let output = &self.replica.config.output;
        self.summary.checkpoint = Some(output.join(&event.name));
        self.reporter.emit(&Event::Save(event));
        Ok(())
    }

    /// Waits for pending updates, closes the report, and emits the summary lines.
    fn finish(&mut self) -> Result<RunSummary, Failure> {
        let updated = self.replica.zero.finish_updates();
        updated.map_err(|e| failures::engine(both("update weights", "更新权重"), &e))?;
        if let Some(report) = &mut self.report {
            report.finish(self.monitor.take_memory(self.done, Vec::new()))?;
        }
        if !self.summary.interrupted {
            self.load_best()?;
        }
        for text in tiers::lines(&self.replica.zero).map_err(|e| failures::comm(&e))? {
            self.reporter.emit(&Event::Info {
                label: both("tiers", "存放").into(),
                text,
            });
        }
        if let Some(gpu) = &self.gpu {
            let arena_bytes = self.replica.config.found().arena_bytes;
            let text = tiers::gpu_line(&self.replica.zero, arena_bytes, gpu);
            // The driver's count covers all ranks of a GPU, so none may exit before it is read.
            self.anyone(false)?;
            self.reporter.emit(&Event::Info {
                label: both("gpu", "gpu").into(),
                text,
            });
        }
        self.summary.steps = self.done;
        Ok(std::mem::take(&mut self.summary))
    }

    /// Tokens of all ranks since the last row of the log.
    fn unlogged_tokens(&self) -> Result<u64, Failure> {
        let own = [self.window.tokens as f64];
        let comm = &self.replica.comm;
        let all = comm.all_gather_f64(&own, Tag::new("tokens", self.done as u32));
        let all = all.map_err(|e| failures::comm(&e))?;
        Ok(all.iter().map(|tokens| tokens[0] as u64).sum())
    }

    /// Whether any rank passes true. The result is the same on all ranks.
    fn anyone(&self, own: bool) -> Result<bool, Failure> {
        let answers = self
            .replica
            .comm
            .all_gather_f64(&[f64::from(own)], Tag::new("stop", 0));
        let answers = answers.map_err(|e| failures::comm(&e))?;
        Ok(answers.iter().any(|r| r[0] > 0.0))
    }

    /// Evaluates a checkpoint without training, to prove that it can be loaded.
    pub(crate) fn verify_resume(&self) -> Result<RunSummary, Failure> {
        let set = self.eval.as_ref();
        let loss = set.map(|set| evaluate::loss(&self.replica, set));
        Ok(RunSummary {
            steps: self.replica.zero.step_count(),
            eval_loss: loss.transpose()?,
            ..RunSummary::default()
        })
    }

    /// Aborts the exchange of all ranks. Returns the failure with this rank's context.
    pub(crate) fn abort(&self, failure: Failure) -> Failure {
        let failure = step_context::complete(
            failure,
            &Failing {
                replica: &self.replica,
                place: self.at.as_ref(),
                train: &self.train,
                evaluates: self.eval.is_some(),
                collectives: &self.collectives,
            },
        );
        self.replica.abandon(&failure);
        failure
    }
}

/// Traffic of the spill files since `before`. `ceiling` is the measured bytes per second of the disks.
fn disk_traffic(
    zero: &Zero,
    before: Option<SpillStats>,
    ceiling: Option<f64>,
) -> Option<DiskTraffic> {
    let now = zero.spill_stats()?;
    let since = now.since(before.unwrap_or_default());
    let bytes_per_second = since.bytes_per_second();
    Some(DiskTraffic {
        read_bytes: since.read_bytes,
        written_bytes: since.written_bytes,
        bytes_per_second,
        share: ceiling.map_or(0.0, |ceiling| bytes_per_second / ceiling),
    })
}
