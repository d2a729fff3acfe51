//! The two parts of the program: supervisor and rank.

use super::Hooks;
use crate::error::RECORD_TARGET;
use crate::launch::spill_directories;
use crate::plan::Advice;
use std::cell::RefCell;
use std::process::ExitCode;
use std::time::Instant;

use crate::cli::file::Loaded;
use crate::cli::resolve_on;
use crate::cli::{self, Args, Note};
use crate::config::{
    CONFIG_FILE, Collectives, DEVICE, EarlyStep, Resume, RunConfig, Task, UploadAhead,
};
use crate::device::{self, Chosen, Devices};
use crate::error::format::ErrorFormat;
use crate::error::{ErrorCode, Failure};
use crate::launch::logging;
use crate::launch::rank::{self, RunSummary};
use crate::launch::restart::{self, Attempts};
use crate::launch::supervisor::job::{Job, config_file};
use crate::launch::supervisor::{RunFailure, Share, SignalSource, Supervisor, own_program};
use crate::rank_env::{Env, RankEnv, Variables};
use crate::report::run_directory::{self, Held};
use crate::report::{self, PlanFile};
use crate::ui::{DoneEvent, Event, ResumeEvent, Screen};

/// Where the run of a line computes.
fn choose(args: &Args, devices: &dyn Devices) -> Result<Chosen, Failure> {
    let choice = args.device.unwrap_or(DEVICE);
    device::choose(choice, devices, &Variables::read())
}

/// What the files of a line give, and what in them deserves attention.
pub(super) fn show_files(loaded: &Loaded, screen: &mut Screen) {
    for text in &loaded.gives {
        screen.show(&Event::Info {
            label: "config".into(),
            text: text.clone(),
        });
    }
    for text in &loaded.warnings {
        screen.show(&Event::Warning { text: text.clone() });
    }
}

pub(super) fn run_supervisor(
    hooks: &Hooks,
    env: &Env,
    args: &Args,
    loaded: &Loaded,
    mut notes: Vec<Note>,
) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let chosen = choose(args, hooks.devices)?;
    let resolved = resolve_on(args, env, &chosen).map_err(|failure| loaded.place(failure))?;
    notes.extend(loaded.notes.iter().cloned());
    notes.extend(resolved.notes);
    let mut config = resolved.config;
    let mut screen = Screen::on_stderr(env.no_color);
    logging::init_supervisor(env.rust_log.as_deref())?;
    show_files(loaded, &mut screen);
    for note in notes {
        screen.show(&Event::Note {
            flag: note.flag,
            reason: note.reason,
        });
    }
    if let Some(preset) = args.preset.as_deref().and_then(cli::Preset::named) {
        screen.show(&Event::Info {
            label: "preset".into(),
            text: format!("{}: {}", preset.script, preset.spelled()),
        });
    }
    for event in chosen.events(&config) {
        screen.show(&event);
    }
    let share = share_of(&config, env);
    if share.is_some() {
        if config.early_step == EarlyStep::Auto && config.updates_beside_gpus() {
            screen.show(&Event::Info {
                label: "early".into(),
                text: "--optimizer-in-backward auto keeps updates after the pass: spare host memory differs between machines; a number of bytes applies to all"
                    .into(),
            });
        }
        one_by_one(&mut config)?;
    }
    // The machine of rank 0 does for the folder what elsewhere nobody must do twice.
    let is_first = share.as_ref().is_none_or(|share| share.first_rank == 0);
    if is_first {
        run_directory::check(&mut config)?;
    }
    crate::commands::demo::prepare(&mut config, env, &mut |event| screen.show(&event))?;
    let unprepared = config.clone();
    let mut plan = PlanFile::default();
    let prepared = (hooks.prepare)(&mut config, env, &mut |event| {
        plan.note(&event);
        screen.show(&event);
    });
    let advice = match prepared {
        Err(failure) if is_finished(args, &failure) => {
            screen.show(&finished(&failure));
            return Ok(ExitCode::SUCCESS);
        }
        prepared => prepared?,
    };
    let signals = SignalSource::new()?;
    let held = match is_first {
        true => Some(run_directory::prepare(&config)?),
        false => {
            run_directory::join(&config)?;
            None
        }
    };
    if is_first {
        plan.save(&config.output)?;
    }
    let planned = Planned {
        config: &config,
        unprepared: &unprepared,
        advice: &*advice,
    };
    let ended = run_job(hooks, &planned, env, share, &signals, &mut screen);
    // Also of a run that failed: from what it left.
    if is_first && let Err(failure) = report::write_pages(&config.output) {
        let text = format!("{}: {}", failure.title, failure.cause);
        screen.show(&Event::Warning { text });
    }
    drop(held);
    let summary = ended?;
    screen.show(&Event::Done(done(
        &config,
        &summary,
        &loaded.warnings,
        started.elapsed().as_secs_f64(),
    )));
    Ok(status_of(&summary))
}

/// Whether `--resume auto` found a run with no step left: a job that is queued again after its end has done its work.
fn is_finished(args: &Args, failure: &Failure) -> bool {
    failure.code == ErrorCode::NothingToDo && args.resume.as_deref() == Some("auto")
}

/// What is said of such a run.
fn finished(failure: &Failure) -> Event {
    Event::Info {
        label: "resume".into(),
        text: format!("{}: {}", failure.title, failure.cause),
    }
}

/// The ranks of this machine among those of others, where there are others.
fn share_of(config: &RunConfig, env: &Env) -> Option<Share> {
    let node = env.node.as_ref().filter(|_| config.ranks_here.is_some())?;
    let (first_rank, _, world_size) = node.share(config.nproc / node.nodes);
    Some(Share {
        first_rank,
        world_size,
        master: node.master.clone(),
    })
}

/// A run that is ready to begin.
struct Planned<'a> {
    config: &'a RunConfig,
    /// The same before its plan settled anything.
    unprepared: &'a RunConfig,
    advice: &'a dyn Fn(&mut Failure),
}

/// Trains, and in the demo shows that the result can be loaded.
fn run_job(
    hooks: &Hooks,
    planned: &Planned<'_>,
    env: &Env,
    share: Option<Share>,
    signals: &SignalSource,
    screen: &mut Screen,
) -> Result<RunSummary, Failure> {
    let config = planned.config;
    let is_first = share.as_ref().is_none_or(|share| share.first_rank == 0);
    let mut attempts = Attempts::new(config, planned.unprepared);
    // That of the newest plan.
    let advice: RefCell<Option<Advice>> = RefCell::new(None);
    let mut prepare = |config: &mut RunConfig, screen: &mut Screen| {
        let mut plan = PlanFile::default();
        let newest = (hooks.prepare)(config, env, &mut |event| {
            plan.note(&event);
            screen.show(&event);
        })?;
        advice.replace(Some(newest));
        plan.save(&config.output)
    };
    let summary = loop {
        let advise = |failure: &mut Failure| match &*advice.borrow() {
            Some(newest) => newest(failure),
            None => (planned.advice)(failure),
        };
        let config = attempts.config();
        let ended = supervise(config, env, share.clone(), signals, screen, &advise);
        match ended {
            Ok(RunSummary {
                ipc_refused: Some(why),
                ..
            }) => attempts.through_host(why, &mut prepare, screen)?,
            Ok(summary) => break summary,
            Err(ended) => attempts.again(ended, &mut prepare, screen)?,
        }
    };
    if config.is_demo() && is_first && !summary.interrupted {
        prove_resume(config, &summary, env, signals, screen)?;
    }
    Ok(summary)
}

fn supervise(
    config: &RunConfig,
    env: &Env,
    share: Option<Share>,
    signals: &SignalSource,
    screen: &mut Screen,
    advice: &dyn Fn(&mut Failure),
) -> Result<RunSummary, RunFailure> {
    let job = Job::new(&env.temp_dir)?;
    config.save_to(&job.config_file())?;
    let spill = spill_directories::hold_folders(config, job.token())?;
    let program = own_program()?;
    let supervisor = Supervisor {
        program: &program,
        nproc: config.ranks_here(),
        share,
        output: &config.output,
        job: &job,
        claims_hosts: config.shares_gpus() && config.resolved_collectives() == Collectives::Nccl,
        advice,
    };
    let ended = supervisor
        .run(signals, screen)
        .inspect_err(|_| screen.finish_bar());
    drop(spill);
    ended
}

/// Loads the demo's last checkpoint in one rank and compares the evaluation loss bit for bit.
fn prove_resume(
    config: &RunConfig,
    trained: &RunSummary,
    env: &Env,
    signals: &SignalSource,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let (Some(checkpoint), Some(expected)) = (&trained.checkpoint, trained.eval_loss) else {
        return Ok(());
    };
    let mut again = config.clone();
    again.task = Task::Evaluate;
    again.nproc = 1;
    again.ranks_here = None;
    again.resume = Resume::From(checkpoint.clone());
    let summary = supervise(&again, env, None, signals, screen, &|_| ())?;
    let identical = summary.eval_loss.map(f64::to_bits) == Some(expected.to_bits());
    let name = checkpoint
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    screen.show(&Event::Resume(ResumeEvent {
        name,
        ranks: 1,
        step: trained.steps,
        loss_is_identical: Some(identical),
    }));
    if identical {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::Resume,
        "the resumed demo has another evaluation loss",
        "the checkpoint, loaded in one rank, does not give the loss of the run that saved it",
    )
    .evidence(format!(
        "saved {expected:?}, resumed {:?}",
        summary.eval_loss
    )))
}

fn done(config: &RunConfig, summary: &RunSummary, warnings: &[String], seconds: f64) -> DoneEvent {
    let output = config.output.display();
    let mut next = Vec::new();
    if summary.interrupted {
        next.push(format!("continue with --resume auto --output {output}"));
    } else {
        next.push(format!("report {output}/{}", report::REPORT));
        if config.is_demo() {
            next.push("your own model: --model <MiniCPM-V-2_6 directory> --data <samples.json> --zero 3 --offload cpu".to_string());
        }
    }
    DoneEvent {
        seconds,
        output: config.output.clone(),
        interrupted: summary.interrupted,
        warnings: warnings.to_vec(),
        next,
    }
}

fn status_of(summary: &RunSummary) -> ExitCode {
    if summary.interrupted {
        ExitCode::from(ErrorCode::Interrupted.status())
    } else {
        ExitCode::SUCCESS
    }
}

pub(super) fn run_rank(
    hooks: &Hooks,
    env: &Env,
    rank: &RankEnv,
    args: &Args,
    format: ErrorFormat,
) -> Result<ExitCode, Failure> {
    // Under another launcher rank 0 does for the folder what otherwise the supervisor does.
    let (config, alone) = match rank_config(hooks, env, rank, args) {
        Err(failure) if is_finished(args, &failure) => {
            if rank.rank == 0 {
                Screen::on_stderr(env.no_color).show(&finished(&failure));
            }
            return Ok(ExitCode::SUCCESS);
        }
        found => found?,
    };
    let stop = rank::enter(rank, &config.output, &env.temp_dir)?;
    let result = logging::init(
        &config.output.join(run_directory::LOGS),
        rank.rank,
        env.rust_log.as_deref(),
    )
    .and_then(|()| (hooks.rank_main)(&config, rank, &stop, hooks.devices))
    .and_then(|summary| match (summary.ipc_refused.clone(), &alone) {
        (Some(why), Some(alone)) => {
            let config = alone.through_host(hooks, env, rank, why)?;
            (hooks.rank_main)(&config, rank, &stop, hooks.devices)
        }
        _ => Ok(summary),
    })
    .and_then(|summary| {
        if let Some(job_dir) = &rank.job_dir {
            summary.save(job_dir, rank.rank)?;
        }
        Ok(summary)
    });
    let status = match result {
        Ok(summary) => Ok(status_of(&summary)),
        Err(failure) => {
            tracing::error!(target: RECORD_TARGET, rank = rank.rank, code = %failure.code, "{}", failure.title);
            if let Err(error) = failure.save(&config.output, rank.rank) {
                tracing::error!(rank = rank.rank, "the failure cannot be saved: {error}");
                return Err(failure);
            }
            if !rank.is_supervised() {
                format.print(&failure);
            }
            Ok(failure.exit_code())
        }
    };
    if alone.as_ref().is_some_and(|alone| alone.held.is_some())
        && let Err(failure) = report::write_pages(&config.output)
    {
        tracing::warn!("{}: {}", failure.title, failure.cause);
    }
    drop(alone);
    status
}

/// What ranks that are started one by one, or on several machines, cannot find alike or do together.
fn one_by_one(config: &mut RunConfig) -> Result<(), Failure> {
    if config.early_step == EarlyStep::Auto {
        // What a disk or host memory has free differs between ranks.
        config.early_step = EarlyStep::Off;
    }
    if config.upload_ahead == UploadAhead::Auto {
        // As does what a GPU has.
        config.upload_ahead = UploadAhead::Off;
    }
    if config.max_restarts > 0 {
        return Err(Failure::usage(
            "--max-restarts is not available under another launcher or on several machines",
            "a restart must start all ranks together",
        )
        .next("start with this program on one machine, or let the job's own launcher restart it with --resume auto"));
    }
    if !config.batch.find_batch {
        return Ok(());
    }
    Err(Failure::usage(
        "--find-batch is not available under another launcher or on several machines",
        "free memory differs between ranks, so each rank would find another size",
    )
    .next("start with this program on one machine, or give --per-device-train-batch-size"))
}

/// What a rank has that plans for itself.
struct Alone {
    /// The configuration before its plan settled anything.
    unprepared: RunConfig,
    /// The run's folder, on rank 0.
    held: Option<Held>,
}

impl Alone {
    /// Plans the run again for the way through host memory, as every rank does.
    fn through_host(
        &self,
        hooks: &Hooks,
        env: &Env,
        rank: &RankEnv,
        why: String,
    ) -> Result<RunConfig, Failure> {
        let mut config = self.unprepared.clone();
        if rank.rank == 0 {
            Screen::on_stderr(env.no_color).show(&restart::refused(&why));
        }
        config.ipc_refused = Some(why);
        let mut plan = PlanFile::default();
        drop((hooks.prepare)(&mut config, env, &mut |event| {
            plan.note(&event);
        })?);
        if rank.rank == 0 {
            config.save_to(&config.output.join(CONFIG_FILE))?;
            plan.save(&config.output)?;
        }
        Ok(config)
    }
}

/// The configuration of a rank: the supervisor's, or under another launcher resolved from the
/// same command line on every rank, of which rank 0 holds the folder.
fn rank_config(
    hooks: &Hooks,
    env: &Env,
    rank: &RankEnv,
    args: &Args,
) -> Result<(RunConfig, Option<Alone>), Failure> {
    if let Some(job_dir) = &rank.job_dir {
        return Ok((RunConfig::load_from(&config_file(job_dir))?, None));
    }
    let mut config = resolve_on(args, env, &choose(args, hooks.devices)?)?.config;
    one_by_one(&mut config)?;
    crate::commands::demo::prepare(&mut config, env, &mut |_| ())?;
    if rank.rank == 0 {
        run_directory::check(&mut config)?;
    }
    let unprepared = config.clone();
    // The same on every rank: order of the samples, batches of the evaluation.
    let mut plan = PlanFile::default();
    drop((hooks.prepare)(&mut config, env, &mut |event| {
        plan.note(&event);
    })?);
    let mut alone = Alone {
        unprepared,
        held: None,
    };
    if rank.rank == 0 {
        alone.held = Some(run_directory::prepare(&config)?);
        plan.save(&config.output)?;
    }
    Ok((config, Some(alone)))
}
