//! The training loop of one rank.

use super::numeric::History;
use super::session::Session;
use super::step_context::Place;
use super::trace::StepTraces;
use super::{evaluate, save, tiers};
use crate::config::{Cadence, Workers};
use crate::data::check::encode_options;
use crate::data::{Loader, LoaderOptions, Sampler};
use crate::error::failures;
use crate::error::{ErrorCode, Failure};
use crate::launch::rank::{RunSummary, StopFlag};
use crate::memory::Phase;
use crate::model::setup::dropout;
use crate::model::setup::{keeps, sampler};
use crate::plan::resume;
use crate::report::checkpoints::UNITS;
use crate::report::monitor::Monitor;
use crate::report::monitor::split::StepTimes;
use crate::report::{EvalResults, RunReport, StepRecord};
use crate::ui::DiskTraffic;
use crate::ui::{EvalEvent, Event, ResumeEvent, StepEvent};
use engine::comm::Tag;
use engine::spill::SpillStats;
use engine::{PassKind, StepReport};
use models::autograd::Tape;
use models::data::EncodedSample;
use models::{ModelError, SampleInput};
use optim::Schedule;
use optim::loss_scale::{LossScaler, Verdict};
use serde_json::json;
use std::time::Instant;

/// Updates in a row that may be skipped for non-finite values before the run ends.
const MAX_SKIPPED_IN_A_ROW: u32 = 20;

/// A micro-batch on its way from a loader thread.
struct Prepared {
    /// Indices of the samples.
    indices: Vec<usize>,
    samples: Vec<EncodedSample>,
    /// Tells each visit to a sample from all others.
    keys: Vec<u64>,
}

/// Sums since the last logged row.
struct Window {
    started: Instant,
    loss: f64,
    updates: u64,
    tokens: u64,
    disk: Option<SpillStats>,
}

impl Window {
    fn new(session: &Session<'_>) -> Self {
        Self {
            disk: session.zero.spill_stats(),
            started: Instant::now(),
            loss: 0.0,
            updates: 0,
            tokens: 0,
        }
    }
}

/// The loop's own state, which a checkpoint carries.
struct Progress {
    total_steps: u64,
    /// Steps of the schedule behind, skipped updates included.
    done: u64,
    /// The same when this run began.
    started_at: u64,
    total_tokens: u64,
    skipped_in_a_row: u32,
    history: History,
    exact_match_before: Option<f64>,
    summary: RunSummary,
}

pub(crate) fn train(session: &mut Session<'_>, stop: &StopFlag) -> Result<RunSummary, Failure> {
    resume_scale(session)?;
    let sampler = sampler(
        session.config,
        session.train.samples.len(),
        &session.config.found().first_samples,
    );
    let total_steps = session.config.total_steps(session.train.samples.len());
    let mut progress = progress_from(session, total_steps)?;
    let mut monitor = Monitor::new(&session.zero);
    let epochs = sampler.epochs_after(total_steps);
    let mut report = match session.comm.world().rank {
        0 => Some(RunReport::open(
            session.config,
            total_steps,
            epochs,
            progress.done,
        )?),
        _ => None,
    };
    if session.resumed.is_none() && session.config.eval != Cadence::Never {
        let before = evaluate::loss(session)?;
        progress.exact_match_before = evaluate::exact_match(session, progress.done)?;
        monitor.end(Phase::Eval, &session.zero);
        if let Some(loss) = before {
            show_eval(session, &progress, loss, None);
        }
    }
    session.reporter.emit(&Event::TrainStart {
        total: total_steps,
        done: progress.done,
    });
    let mut loader = start_loader(session, sampler.clone(), progress.done..total_steps);
    let schedule = schedule(session, total_steps);
    let mut window = Window::new(session);
    let mut traces = StepTraces::new(session.config.trace_steps.clone());
    while progress.done < total_steps {
        let lr = schedule.lr(progress.done);
        traces.begin(progress.done + 1, session.zero.trace());
        let step = one_step(session, &mut loader, lr, &mut window, &mut monitor)?;
        progress.done += 1;
        let ended = (progress.done, progress.done == total_steps);
        let (output, rank) = (&session.config.output, session.comm.world().rank);
        traces.end(ended, session.zero.trace(), output, rank)?;
        if !rescale(session, &mut progress, &step, &mut window)? {
            account(session, &mut progress, &step, &mut window)?;
        }
        let epoch_ended = sampler.epoch_ended(progress.done);
        let done = progress.done;
        let due = |cadence: Cadence| cadence.is_due(done, total_steps, epoch_ended);
        if due(session.config.logging) || progress.done == 1 {
            let epoch = sampler.epochs_after(progress.done);
            log(
                session,
                report.as_mut(),
                &mut progress,
                &step,
                lr,
                epoch,
                &mut window,
                &mut monitor,
            )?;
        } else {
            let total = total_steps;
            let loss = Some(step.loss);
            session.reporter.emit(&Event::Tick {
                step: progress.done,
                total,
                loss,
            });
        }
        let stopping = anyone(session, stop.is_set())?;
        // Who stops a run may not wait for an evaluation: the state is saved first, and at once.
        monitor.begin(&session.zero);
        if due(session.config.eval) && !(stopping && progress.done < total_steps) {
            evaluate_now(session, report.as_mut(), &mut progress, &sampler)?;
            monitor.end(Phase::Eval, &session.zero);
        }
        if due(session.config.save) || stopping {
            save_now(session, report.as_ref(), &mut progress)?;
            monitor.end(Phase::Save, &session.zero);
        }
        if stopping && progress.done < total_steps {
            progress.summary.interrupted = true;
            break;
        }
    }
    let updated = session.zero.finish_updates();
    updated.map_err(|e| failures::engine("update weights", &e))?;
    if let Some(report) = &mut report {
        report.finish(monitor.take_memory(progress.done, Vec::new()))?;
    }
    session.reporter.emit(&Event::Info {
        label: "tiers".into(),
        text: tiers::line(&session.zero),
    });
    if let Some(text) = tiers::gpu_line(session) {
        // What the driver counts is that of all ranks of a GPU: none leaves before it is read.
        anyone(session, false)?;
        session.reporter.emit(&Event::Info {
            label: "gpu".into(),
            text,
        });
    }
    progress.summary.steps = progress.done;
    Ok(progress.summary)
}

/// Where the loop stands: at the start, or where the checkpoint left it.
fn progress_from(session: &Session<'_>, total_steps: u64) -> Result<Progress, Failure> {
    let mut progress = Progress {
        total_steps,
        done: 0,
        started_at: 0,
        total_tokens: 0,
        skipped_in_a_row: 0,
        history: History::default(),
        exact_match_before: None,
        summary: RunSummary::default(),
    };
    let Some((folder, meta)) = &session.resumed else {
        return Ok(progress);
    };
    let samples = session.train.samples.len();
    let position = resume::position(session.config, folder, meta, samples, total_steps)?;
    progress.done = position.done;
    progress.started_at = position.done;
    progress.total_tokens = position.total_tokens;
    progress.exact_match_before = position.exact_match_before;
    session.reporter.emit(&Event::Resume(ResumeEvent {
        name: folder
            .file_name()
            .map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
        ranks: session.comm.world().size,
        step: position.done,
        loss_is_identical: None,
    }));
    Ok(progress)
}

/// Continues with the loss scale of the checkpoint.
fn resume_scale(session: &mut Session<'_>) -> Result<(), Failure> {
    let (Some(scaler), Some((folder, meta))) = (&mut session.scaler, &session.resumed) else {
        return Ok(());
    };
    let state = serde_json::from_value(meta["loss_scale"].clone()).map_err(|e| {
        Failure::new(
            ErrorCode::Resume,
            format!("cannot {}", resume::doing(folder)),
            format!("its manifest has no loss scale: {e}"),
        )
    })?;
    scaler.restore(state);
    Ok(())
}

fn schedule(session: &Session<'_>, total_steps: u64) -> Schedule {
    let settings = &session.config.optimizer;
    let kwargs = settings.scheduler_kwargs;
    Schedule {
        kind: kwargs.kind(settings.scheduler),
        warmup_steps: settings.warmup.steps(total_steps),
        total_steps: kwargs.total_num_steps.unwrap_or(total_steps),
        base_lr: session.config.peak_lr(),
    }
}

fn start_loader(
    session: &Session<'_>,
    sampler: Sampler,
    steps: std::ops::Range<u64>,
) -> Loader<Prepared, Failure> {
    let (set, processor) = (session.train.clone(), session.processor.clone());
    let options = encode_options(session.config);
    let rank = session.comm.world().rank;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut ahead = LoaderOptions::for_node(cores, session.config.ranks_here());
    if let Workers::Count(threads) = session.config.batch.data_workers {
        ahead = LoaderOptions {
            threads,
            ahead: 2 * threads,
        };
    }
    let micro_steps = session.config.batch.accumulation_steps as u64;
    Loader::new(ahead, steps, micro_steps, move |step, micro| {
        let encode = |index: usize| {
            processor
                .encode(&set.samples[index], &set.images, &options)
                .map_err(|e| {
                    Failure::new(
                        ErrorCode::DataFile,
                        format!("sample {index} cannot be read in step {}", step + 1),
                        failures::chain(&e),
                    )
                    .evidence("it was readable when the run started")
                })
        };
        let indices = sampler.indices(step, micro, rank);
        let samples = indices.iter().copied().map(encode);
        Ok(Prepared {
            samples: samples.collect::<Result<_, _>>()?,
            keys: sampler.positions(step, micro, rank).collect(),
            indices,
        })
    })
}

fn one_step(
    session: &mut Session<'_>,
    loader: &mut Loader<Prepared, Failure>,
    lr: f64,
    window: &mut Window,
    monitor: &mut Monitor,
) -> Result<StepReport, Failure> {
    monitor.begin(&session.zero);
    session.step_losses.clear();
    let micro_batches = session.config.batch.accumulation_steps;
    for micro in 1..=micro_batches {
        let prepared = loader.next().ok_or_else(|| {
            Failure::new(
                ErrorCode::Panic,
                "the data ended early",
                "the loader has no batch left",
            )
        })??;
        monitor.end(Phase::Data, &session.zero);
        let batch = prepared.batch;
        session.faults.begin_step(prepared.step + 1);
        let indices = batch.indices.clone();
        let place = Place::new(prepared.step, prepared.micro_step, indices, &batch.samples);
        window.tokens += place.tokens.iter().sum::<usize>() as u64;
        session.place = Some(place.clone());
        if micro == micro_batches {
            let tokens = batch.samples.iter().map(EncodedSample::supervised_tokens);
            let (supervised, loss_scale) = (tokens.sum::<usize>() as u64, loss_scale(session));
            session
                .zero
                .announce_update(lr, loss_scale, supervised)
                .map_err(|e| failures::engine("announce an update", &e))?;
        }
        let loss = micro_batch(session, &batch, monitor)?;
        session.step_losses.push((place, loss));
    }
    let loss_scale = loss_scale(session);
    let report = session
        .zero
        .step_scaled(lr, loss_scale)
        .map_err(|e| failures::engine("update weights", &e))?;
    session.place = None;
    monitor.end(Phase::Step, &session.zero);
    Ok(report)
}

/// The factor on the losses: above 1 in fp16 only.
fn loss_scale(session: &Session<'_>) -> f64 {
    session.scaler.as_ref().map_or(1.0, LossScaler::scale)
}

/// Trains on one micro-batch; returns the sum of its token losses on this rank.
fn micro_batch(
    session: &mut Session<'_>,
    prepared: &Prepared,
    monitor: &mut Monitor,
) -> Result<f64, Failure> {
    let inputs: Vec<SampleInput<'_>> = prepared.samples.iter().map(SampleInput::from).collect();
    let script = match &mut session.places {
        Some(places) => {
            let script = places.of(session.config, &*session.model, &prepared.samples);
            Some(script.map_err(|e| failures::model("plan a micro-batch", &e))?)
        }
        None => None,
    };
    session.zero.begin_pass(PassKind::Train);
    session.backend.pool().follow(script);
    session.faults.forward();
    let scale = loss_scale(session);
    let factor = session.faults.loss_factor(scale as f32);
    let mut run = || -> Result<(f64, usize), ModelError> {
        let batch = session.model.collate(&inputs, &*session.backend)?;
        let keep = |unit| keeps(session.config, &*session.model, unit);
        let tape = Tape::training(&session.zero).with_stored(&keep);
        let mut tape = tape.with_loss_factor(factor);
        let state = dropout(session.config, &prepared.keys, &inputs, &*session.backend)?;
        if let Some(state) = state {
            tape = tape.with_dropout(state);
        }
        let loss = session.model.forward(&tape, &batch)?;
        let fetch = loss.fetch()?;
        monitor.end(Phase::Forward, &session.zero);
        tape.backward(&loss, factor)?;
        Ok((fetch.sum()?, loss.supervised))
    };
    let (sum, supervised) = run().map_err(|e| failures::model("train", &e))?;
    session
        .zero
        .end_micro_batch(sum, supervised as u64)
        .map_err(|e| failures::engine("train", &e))?;
    session.backend.pool().follow(None);
    monitor.end(Phase::Backward, &session.zero);
    Ok(sum)
}

/// Moves the loss scale of fp16. Whether the step overflowed, which is part of finding the scale.
fn rescale(
    session: &mut Session<'_>,
    progress: &mut Progress,
    step: &StepReport,
    window: &mut Window,
) -> Result<bool, Failure> {
    let Some(scaler) = &mut session.scaler else {
        return Ok(false);
    };
    let before = scaler.scale();
    let verdict = scaler.update(!step.applied).map_err(|e| {
        Failure::new(
            ErrorCode::Numeric,
            format!(
                "the gradients of step {} exceed the range of fp16",
                progress.done
            ),
            e.to_string(),
        )
        .next("--precision bf16, which needs the same memory and has the range of f32")
    })?;
    if verdict == Verdict::Apply {
        return Ok(false);
    }
    window.loss += step.loss;
    window.updates += 1;
    progress.history.push(step);
    let after = scaler.scale();
    session.reporter.emit(&Event::Warning {
        text: if after < before {
            format!(
                "step {}: gradients overflow fp16; the update was skipped, the loss scale is {after} (was {before})",
                progress.done
            )
        } else {
            format!(
                "step {}: gradients overflow fp16 at a loss scale of {before}; the update was skipped",
                progress.done
            )
        },
    });
    Ok(true)
}

/// Sums over ranks what only this rank knows, and ends runs that have left the numbers.
fn account(
    session: &Session<'_>,
    progress: &mut Progress,
    step: &StepReport,
    window: &mut Window,
) -> Result<(), Failure> {
    window.loss += step.loss;
    window.updates += 1;
    progress.history.push(step);
    if step.applied {
        progress.skipped_in_a_row = 0;
        return Ok(());
    }
    progress.skipped_in_a_row += 1;
    let finding = progress.history.investigate(session, progress.done, step)?;
    session.reporter.emit(&Event::Warning {
        text: format!(
            "step {}: loss {} or a gradient is not finite; the update was skipped on every rank{}",
            progress.done,
            step.loss,
            if progress.skipped_in_a_row == 1 {
                format!("; {}", finding.hint())
            } else {
                String::new()
            }
        ),
    });
    // What ends without a finite update is no trained model, however short it was.
    let ends = progress.done == progress.total_steps;
    let all = u64::from(progress.skipped_in_a_row) == progress.done - progress.started_at;
    let lost = ends && (all || progress.skipped_in_a_row > 1);
    if progress.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW && !lost {
        return Ok(());
    }
    Err(finding.failure(session, progress.skipped_in_a_row))
}

fn log(
    session: &Session<'_>,
    report: Option<&mut RunReport>,
    progress: &mut Progress,
    step: &StepReport,
    lr: f64,
    epoch: f64,
    window: &mut Window,
    monitor: &mut Monitor,
) -> Result<(), Failure> {
    let gathered = monitor
        .gather(window.tokens, &*session.comm)
        .map_err(|e| failures::comm(&e))?;
    let tokens: f64 = gathered.tokens.iter().sum();
    let seconds = window.started.elapsed().as_secs_f64().max(1e-9);
    let done = std::mem::replace(window, Window::new(session));
    let updates = done.updates.max(1) as f64;
    let bytes = monitor.peaks();
    let grad_norm = step.applied.then_some(step.grad_norm);
    progress.total_tokens += tokens as u64;
    let record = StepRecord {
        step: progress.done,
        epoch,
        loss: done.loss / updates,
        lr,
        grad_norm,
        tokens_per_second: tokens / seconds,
        total_tokens: progress.total_tokens,
        bytes,
        times: StepTimes::of(&gathered.splits, updates).with_devices(&gathered.devices, updates),
        disk: disk_traffic(session, done.disk),
    };
    let mut remaining_seconds = 0.0;
    let mut notices = Vec::new();
    let memory = monitor.take_memory(progress.done, gathered.peaks);
    if let Some(report) = report {
        notices = report.on_step(&record, memory)?;
        remaining_seconds = report.remaining_seconds(progress.done);
    }
    session.reporter.emit(&Event::Step(StepEvent {
        step: progress.done,
        total: progress.total_steps,
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
        session.reporter.emit(&notice);
    }
    Ok(())
}

/// What went to and from the spill files since `before`.
fn disk_traffic(session: &Session<'_>, before: Option<SpillStats>) -> Option<DiskTraffic> {
    let now = session.zero.spill_stats()?;
    let since = now.since(before.unwrap_or_default());
    let bytes_per_second = since.bytes_per_second();
    Some(DiskTraffic {
        read_bytes: since.read_bytes,
        written_bytes: since.written_bytes,
        bytes_per_second,
        share: session
            .disk_ceiling
            .map_or(0.0, |ceiling| bytes_per_second / ceiling),
    })
}

/// Whether any rank answers yes; the same answer on all.
fn anyone(session: &Session<'_>, own: bool) -> Result<bool, Failure> {
    let all = session
        .comm
        .all_gather_f64(&[f64::from(own)], Tag::new("stop", 0))
        .map_err(|e| failures::comm(&e))?;
    Ok(all.iter().any(|r| r[0] > 0.0))
}

fn show_eval(session: &Session<'_>, progress: &Progress, loss: f64, exact_match: Option<f64>) {
    session.reporter.emit(&Event::Eval(EvalEvent {
        step: progress.done,
        loss,
        exact_match: exact_match.or(progress.exact_match_before.filter(|_| progress.done == 0)),
        exact_match_before: exact_match.and(progress.exact_match_before),
        samples: session.eval.as_ref().map_or(0, |e| e.samples.len()),
    }));
}

fn evaluate_now(
    session: &Session<'_>,
    report: Option<&mut RunReport>,
    progress: &mut Progress,
    sampler: &Sampler,
) -> Result<(), Failure> {
    let started = Instant::now();
    let Some(eval_loss) = evaluate::loss(session)? else {
        return Ok(());
    };
    let exact_match = evaluate::exact_match(session, progress.done)?;
    show_eval(session, progress, eval_loss, exact_match);
    progress.summary.eval_loss = Some(eval_loss);
    progress.summary.exact_match = exact_match;
    progress.summary.exact_match_before = progress.exact_match_before;
    let samples = session.eval.as_ref().map_or(0, |e| e.samples.len());
    if let Some(report) = report {
        let seconds = started.elapsed().as_secs_f64();
        report.on_eval(&EvalResults {
            eval_loss,
            exact_match,
            exact_match_before: progress.exact_match_before,
            eval_samples: samples,
            eval_runtime: seconds,
            eval_samples_per_second: samples as f64 / seconds.max(1e-9),
            step: progress.done,
            epoch: sampler.epochs_after(progress.done),
        })?;
    }
    Ok(())
}

fn save_now(
    session: &mut Session<'_>,
    report: Option<&RunReport>,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let config = session.config;
    let mut meta = json!({
        "steps_done": progress.done,
        "updates": session.zero.step_count(),
        "total_tokens": progress.total_tokens,
        "samples": session.train.samples.len(),
        "global_batch": config.global_batch(),
        "seed": config.seed,
        "precision": session.zero.plan().config().precision.name(),
        "loss_scale": session.scaler.as_ref().map(LossScaler::state),
        "zero": config.zero,
        "world_size": session.comm.world().size,
        "exact_match_before": progress.exact_match_before,
        "worst_first": config.batch.worst_first,
        "base_model": config.model_dir(),
    });
    meta[UNITS] = save::units(session.zero.plan());
    let event = save::save(session, progress.done, &meta, report)?;
    progress.summary.checkpoint = Some(config.output.join(&event.name));
    session.reporter.emit(&Event::Save(event));
    Ok(())
}

/// Evaluates a checkpoint without training: what proves that it holds what was saved.
pub(crate) fn verify_resume(session: &mut Session<'_>) -> Result<RunSummary, Failure> {
    Ok(RunSummary {
        steps: session.zero.step_count(),
        eval_loss: evaluate::loss(session)?,
        ..RunSummary::default()
    })
}
