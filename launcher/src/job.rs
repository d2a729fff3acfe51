//! The two parts of the program: supervisor and rank.

use std::cell::RefCell;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use crate::args::{self, Args, Command, Note, PlanArgs};
use crate::bench;
use crate::ckpt;
use crate::config::file::{self, Loaded};
use crate::config::{
    CONFIG_FILE, Collectives, DEVICE, EarlyStep, Resume, RunConfig, Task, UploadAhead, resolve_on,
};
use crate::data;
use crate::device::{self, Chosen, Devices, Nvidia};
use crate::doctor;
use crate::error_format::ErrorFormat;
use crate::exit::{ErrorCode, Failure};
use crate::explain;
use crate::generate;
use crate::hostfile;
use crate::logging;
use crate::plan;
use crate::rank::{self, RunSummary, StopFlag};
use crate::rank_env::{Env, RankEnv, Variables};
use crate::report::{self, PlanFile};
use crate::restart::{self, Attempts};
use crate::run;
use crate::run_folder::{self, Held};
use crate::supervisor::job::{Job, config_file};
use crate::supervisor::{RunFailure, Share, SignalSource, Supervisor, own_program};
use crate::synth;
use crate::ui::{DoneEvent, Event, ResumeEvent, Screen};
use crate::watch;

/// Target of the log record with which a failing rank ends.
pub(crate) const RECORD_TARGET: &str = "tessera_report";

/// The work of one rank process, from its configuration to its summary.
pub type RankMain =
    fn(&RunConfig, &RankEnv, &StopFlag, &dyn Devices) -> Result<RunSummary, Failure>;

/// Work of the supervisor before ranks start and before the run's folder is touched: check model
/// and data, plan the memory. What it shows goes through the callback.
/// It returns what it can say later about failures of ranks.
pub type PrepareHook = fn(&mut RunConfig, &Env, &mut dyn FnMut(Event)) -> Result<Advice, Failure>;

/// Adds next steps to the failure of a rank that depend on model and data.
pub type Advice = Box<dyn Fn(&mut Failure)>;

/// What the program does besides supervising.
#[derive(Debug, Clone, Copy)]
pub struct Hooks {
    /// Runs once, in the supervisor.
    pub prepare: PrepareHook,
    /// Runs in every rank.
    pub rank_main: RankMain,
    /// GPUs.
    pub devices: &'static dyn Devices,
}

/// Runs the program with nothing to prepare.
pub fn run_with(rank_main: RankMain) -> ExitCode {
    run_hooks(Hooks {
        prepare: |_, _, _| Ok(Box::new(|_| ())),
        rank_main,
        devices: &Nvidia,
    })
}

/// Runs the program: this process becomes the supervisor or a rank, as the environment says.
pub fn run_hooks(hooks: Hooks) -> ExitCode {
    let argv: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let format = ErrorFormat::of_line(&argv);
    run_command(&hooks, &argv, format).unwrap_or_else(|failure| {
        format.print(&failure);
        failure.exit_code()
    })
}

fn run_command(hooks: &Hooks, argv: &[String], format: ErrorFormat) -> Result<ExitCode, Failure> {
    match args::parse(argv)? {
        Command::Train { args, typed, notes } => {
            let mut env = Env::read(args.rank_is)?;
            let loaded = file::load(&typed)?.unwrap_or_default();
            let args = match loaded.words.is_empty() {
                true => args,
                false => Box::new(args::train_args(&loaded.words)?),
            };
            // Ranks that our own supervisor started have its configuration instead of a line.
            if !env.rank.as_ref().is_some_and(RankEnv::is_supervised) {
                let mut screen = Screen::on_stderr(env.no_color);
                let place = hostfile::place(&args, argv, &env, &mut |event| screen.show(&event))?;
                env.node = place.or(env.node);
            }
            match env.rank.clone() {
                Some(rank) => {
                    // Under another launcher no supervisor has said it.
                    if rank.rank == 0 {
                        show_files(&loaded, &mut Screen::on_stderr(env.no_color));
                    }
                    run_rank(hooks, &env, &rank, &args, format)
                }
                None => run_supervisor(hooks, &env, &args, &loaded, notes),
            }
        }
        Command::Plan { args, typed, notes } => plan_with_files(hooks, &args, typed, notes),
        Command::ExplainConfig { args, typed } => file::explain(&args, &typed, &Env::read_alone()),
        // Reports also on an environment that training refuses.
        Command::Doctor(options) => doctor::run(&Variables::read(), options.json == Some(true)),
        Command::Explain(options) => explain::run(&options),
        Command::DataCheck(options) => data::check::run(&options, &Variables::read()),
        Command::Generate(args) => generate::ask::run(&args),
        Command::Eval(args) => generate::evaluate::run(&args),
        Command::Export(options) => run::export(&options),
        Command::Ckpt(command) => ckpt::run(&command),
        Command::Watch(options) => watch::run(&options),
        Command::Synth(options) => synth::run(&options),
        Command::BenchNvme(options) => bench::nvme::run(&options),
        Command::Print(text) => {
            drop(write!(std::io::stdout(), "{text}"));
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Plans a line that its files are part of.
fn plan_with_files(
    hooks: &Hooks,
    args: &PlanArgs,
    typed: Vec<String>,
    mut notes: Vec<Note>,
) -> Result<ExitCode, Failure> {
    let env = Env::read_alone();
    let Some(loaded) = file::load(&typed)? else {
        return plan::run(args, &typed, &env, &notes, hooks.devices);
    };
    let mut screen = Screen::on_stderr(env.no_color);
    show_files(&loaded, &mut screen);
    notes.extend(loaded.notes.iter().cloned());
    let args = args::plan_args(&loaded.words)?;
    plan::run(&args, &loaded.words, &env, &notes, hooks.devices)
        .map_err(|failure| loaded.place(failure))
}

/// Where the run of a line computes.
fn choose(args: &Args, devices: &dyn Devices) -> Result<Chosen, Failure> {
    let choice = args.device.unwrap_or(DEVICE);
    device::choose(choice, devices, &Variables::read())
}

/// What the files of a line give, and what in them deserves attention.
fn show_files(loaded: &Loaded, screen: &mut Screen) {
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

fn run_supervisor(
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
    if let Some(preset) = args.preset.as_deref().and_then(args::Preset::named) {
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
        run_folder::check(&mut config)?;
    }
    crate::demo::prepare(&mut config, env, &mut |event| screen.show(&event))?;
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
        true => Some(run_folder::prepare(&config)?),
        false => {
            run_folder::join(&config)?;
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
    let spill = run::hold_folders(config, job.token())?;
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

fn run_rank(
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
        &config.output.join(run_folder::LOGS),
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
    crate::demo::prepare(&mut config, env, &mut |_| ())?;
    if rank.rank == 0 {
        run_folder::check(&mut config)?;
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
        alone.held = Some(run_folder::prepare(&config)?);
        plan.save(&config.output)?;
    }
    Ok((config, Some(alone)))
}
