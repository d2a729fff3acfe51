//! Training: the supervisor process and the rank process.

use super::verify::{self, Proven};
use super::{Hooks, demo};
use crate::error::{ErrorCode, Failure, RECORD_TARGET, continue_run};
use crate::lang::{Text, both, text};
use crate::plan::{Suggestions, resume, settle_one_by_one, spill_directories};
use kernels::STRETCH_ROWS;
use std::cell::RefCell;
use std::process::ExitCode;
use std::time::Instant;

use crate::cli::file::Loaded;
use crate::cli::{self, Args, Note, resolve_on};
use crate::config::{
    CONFIG_FILE, Collectives, DEVICE, Device, DeviceChoice, OptimizerInBackward, Resume, RunConfig,
    RunPlan, Task,
};
use crate::device::survey::environment;
use crate::device::{self, Chosen, Devices, one_gpu_each};
use crate::error::format::ErrorFormat;
use crate::launch::logging;
use crate::launch::rank::{self, RunSummary};
use crate::launch::restart::{self, Attempts};
use crate::launch::supervisor::job::{Job, config_file, hold};
use crate::launch::supervisor::{RunFailure, Share, SignalSource, Supervisor, own_program};
use crate::rank_env::{Env, RankEnv, Variables};
use crate::report::checkpoints;
use crate::report::run_directory::{self, Held};
use crate::report::{self, PlanFile};
use crate::ui::{DoneEvent, Event, ResumeEvent, Screen};

/// Devices of the run that `args` describe.
fn choose(args: &Args, devices: &dyn Devices) -> Result<Chosen, Failure> {
    let choice = args.device.unwrap_or(DEVICE);
    device::choose(choice, devices, &Variables::read())
}

/// Shows which settings come from configuration files, and warnings about them.
pub(super) fn show_files(loaded: &Loaded, screen: &mut Screen) {
    for text in &loaded.gives {
        screen.show(&Event::Info {
            label: both("config", "配置").into(),
            text: text.clone(),
        });
    }
    if !loaded.defaults.is_empty() {
        screen.show(&Event::Info {
            label: both("recipe", "配方").into(),
            text: Text::join(&loaded.defaults, "\n"),
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
    let mut asked = resume::continued(resolved.config, args);
    let mut screen = Screen::on_stderr(env.no_color);
    logging::init_supervisor(env.rust_log.as_deref())?;
    show_files(loaded, &mut screen);
    for note in notes {
        screen.show(&Event::Note {
            flag: note.flag,
            reason: note.reason,
        });
    }
    for event in environment::notes(&Variables::read()) {
        screen.show(&event);
    }
    if let Some(preset) = args.preset.as_deref().and_then(cli::Preset::named) {
        screen.show(&Event::Info {
            label: both("preset", "预设").into(),
            text: Text::literal(format_args!("{}: {}", preset.script, preset.spelled())),
        });
    }
    for event in chosen.events(&asked) {
        screen.show(&event);
    }
    if let (Some(tokens), Device::Cuda) = (asked.mlp_tile_tokens, asked.device) {
        let rows = tokens.get().next_multiple_of(STRETCH_ROWS);
        if rows > tokens.get() {
            screen.show(&Event::Info {
                label: both("tiles", "分块").into(),
                text: text!(
                    "feed-forward layers run on {rows} tokens at a time: on a GPU --mlp-tile-tokens {tokens} is rounded up to a multiple of {STRETCH_ROWS}, which keeps all bits",
                    "前馈层每次处理 {rows} 个 token：在 GPU 上，--mlp-tile-tokens {tokens} 向上取整为 {STRETCH_ROWS} 的倍数，因此结果的每一位都不变"
                ),
            });
        }
    }
    let share = share_of(&asked, env);
    if share.is_some() {
        if asked.optimizer_in_backward == OptimizerInBackward::Auto && asked.updates_beside_gpus() {
            screen.show(&Event::Info {
                label: both("early", "提前").into(),
                text: both("--optimizer-in-backward auto keeps updates after the pass: spare host memory differs between machines; a number of bytes applies to all", "--optimizer-in-backward auto 保持在反向传播之后更新：各机器的空余主机内存不同；给出字节数时适用于所有机器").into(),
            });
        }
        asked = settle_one_by_one(&asked)?;
    }
    // The machine of rank 0 prepares the run's directory. The other machines share it.
    let is_first = share.as_ref().is_none_or(|share| share.first_rank == 0);
    if is_first {
        asked = RunConfig {
            output: run_directory::check(&asked)?,
            ..asked
        };
    }
    let asked = demo::prepare(asked, env, &mut |event| screen.show(&event))?;
    // Another launcher's variables would make the ranks of a verification part of its job.
    let alone = share.is_none();
    let proven = verify::prove(hooks, env, asked.clone(), alone, &mut |event| {
        screen.show(&event);
    });
    let Proven {
        config: asked,
        ipc_refused,
    } = match proven {
        Err(failure) if takes_the_cpu(&asked, args, &failure) => {
            screen.show(&on_the_cpu(&failure));
            Proven {
                config: RunConfig {
                    output: asked.output,
                    source: asked.source,
                    ..resolve_on(args, env, &Chosen::cpu())?.config
                },
                ipc_refused: None,
            }
        }
        proven => proven?,
    };
    let draft = RunPlan::draft(asked.clone(), ipc_refused);
    let prepared = prepare(hooks, &draft, &mut |event| screen.show(&event));
    let Prepared {
        run,
        suggestions,
        plan,
    } = match prepared {
        Err(failure) if is_finished(args, &failure) => {
            screen.show(&finished(&failure));
            return Ok(ExitCode::SUCCESS);
        }
        prepared => prepared?,
    };
    let signals = SignalSource::new()?;
    let held = match is_first {
        true => Some(run_directory::prepare(&run)?),
        false => {
            run_directory::join(&run)?;
            None
        }
    };
    if is_first {
        plan.save(&run.output)?;
    }
    let output = run.output.clone();
    let job = Planned {
        asked,
        run,
        suggestions,
    };
    let ended = run_job(hooks, job, env, share, &signals, &mut screen);
    // A failed run also gets pages, from the files it left.
    if is_first && let Err(failure) = report::write_pages(&output) {
        let text = failure.summary();
        screen.show(&Event::Warning { text });
    }
    drop(held);
    let (run, summary) = ended?;
    screen.show(&Event::Done(done(
        &run,
        &summary,
        &loaded
            .warnings
            .iter()
            .map(Text::literal)
            .collect::<Vec<_>>(),
        started.elapsed().as_secs_f64(),
    )));
    Ok(status_of(&summary))
}

/// Whether `--resume auto` found a completed run. A job that is queued again after its end has nothing to do.
fn is_finished(args: &Args, failure: &Failure) -> bool {
    failure.code == ErrorCode::NothingToDo && args.resume.as_deref() == Some("auto")
}

/// Line about a completed run.
fn finished(failure: &Failure) -> Event {
    Event::Info {
        label: both("resume", "续训").into(),
        text: failure.summary(),
    }
}

/// Whether a run goes on without its wrong GPU: the demo does, where the device was left open.
fn takes_the_cpu(config: &RunConfig, args: &Args, failure: &Failure) -> bool {
    let is_open = args.device.unwrap_or(DEVICE) == DeviceChoice::Auto;
    config.is_demo() && is_open && failure.code == ErrorCode::GpuVerification
}

/// Warning that the demo takes the CPU.
fn on_the_cpu(failure: &Failure) -> Event {
    let evidence = Text::join(&failure.evidence, "; ");
    Event::Warning {
        text: text!(
            "{} ({}): {evidence}; the demo takes the CPU",
            "{}（{}）：{evidence}；演示改用 CPU",
            failure.title,
            failure.code
        ),
    }
}

/// Position of this machine's ranks among those of all machines. `None` on a single machine.
fn share_of(config: &RunConfig, env: &Env) -> Option<Share> {
    let node = env.node.as_ref().filter(|_| config.ranks_here.is_some())?;
    let (first_rank, _, world_size) = node.share(config.world_size / node.nodes);
    Some(Share {
        first_rank,
        world_size,
        master: node.master.clone(),
    })
}

/// Run that is ready to start.
struct Planned {
    /// Configuration as requested.
    asked: RunConfig,
    run: RunPlan,
    suggestions: Suggestions,
}

/// Result of planning a draft.
struct Prepared {
    run: RunPlan,
    suggestions: Suggestions,
    /// Numbers of the plan for the report.
    plan: PlanFile,
}

/// Checks and resolves a draft.
fn prepare(
    hooks: &Hooks,
    draft: &RunPlan,
    show: &mut dyn FnMut(Event),
) -> Result<Prepared, Failure> {
    let mut plan = PlanFile::default();
    let (run, suggestions) = (hooks.prepare)(draft, &mut |event| {
        plan.note(&event);
        show(event);
    })?;
    Ok(Prepared {
        run,
        suggestions,
        plan,
    })
}

/// Trains, with restarts. For the demo, then proves that the result can be loaded. Returns the plan of the last
/// attempt.
fn run_job(
    hooks: &Hooks,
    planned: Planned,
    env: &Env,
    share: Option<Share>,
    signals: &SignalSource,
    screen: &mut Screen,
) -> Result<(RunPlan, RunSummary), Failure> {
    let is_first = share.as_ref().is_none_or(|share| share.first_rank == 0);
    let mut attempts = Attempts::new(planned.asked, planned.run);
    if is_first {
        // Before a rank can die: a restart must not find the checkpoints that a run leaves behind when it goes back.
        let from = match &attempts.run().resume {
            Resume::From(path) => Some(&**path),
            Resume::No | Resume::Latest => None,
        };
        checkpoints::go_on_from(&attempts.run().output, from)?;
    }
    // Suggestions of the newest plan.
    let suggestions = RefCell::new(planned.suggestions);
    let mut again = |draft: &RunPlan, screen: &mut Screen| {
        let newest = prepare(hooks, draft, &mut |event| screen.show(&event))?;
        drop(suggestions.replace(newest.suggestions));
        newest.plan.save(&newest.run.output)?;
        Ok(newest.run)
    };
    let summary = loop {
        let suggest = |failure: &mut Failure| (suggestions.borrow())(failure);
        let ended = supervise(
            attempts.run(),
            env,
            share.clone(),
            signals,
            screen,
            &suggest,
        );
        match ended {
            Ok(RunSummary {
                ipc_refused: Some(why),
                ..
            }) => attempts.through_host(why, &mut again, screen)?,
            Ok(summary) => break summary,
            Err(ended) => attempts.again(ended, &mut again, screen)?,
        }
    };
    let run = attempts.run();
    if run.is_demo() && is_first && !summary.interrupted {
        prove_resume(run, &summary, env, signals, screen)?;
    }
    Ok((run.clone(), summary))
}

fn supervise(
    config: &RunPlan,
    env: &Env,
    share: Option<Share>,
    signals: &SignalSource,
    screen: &mut Screen,
    suggestions: &dyn Fn(&mut Failure),
) -> Result<RunSummary, RunFailure> {
    let job = Job::new(&env.temp_dir)?;
    config.save_to(&job.config_file())?;
    let spill = spill_directories::hold(config, job.token())?;
    let program = own_program()?;
    let supervisor = Supervisor {
        program: &program,
        words: &[],
        processes: config.ranks_here(),
        share,
        output: &config.output,
        job: &job,
        claims_hosts: config.shares_gpus() && config.resolved_collectives() == Collectives::Nccl,
        suggestions,
    };
    let ended = supervisor
        .run(signals, screen)
        .inspect_err(|_| screen.finish_bar());
    drop(spill);
    ended
}

/// Loads the demo's last checkpoint on one rank and compares the evaluation loss bit for bit.
fn prove_resume(
    run: &RunPlan,
    trained: &RunSummary,
    env: &Env,
    signals: &SignalSource,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let (Some(checkpoint), Some(expected)) = (&trained.checkpoint, trained.eval_loss) else {
        return Ok(());
    };
    let again = run.with_config(RunConfig {
        task: Task::Evaluate,
        world_size: 1,
        ranks_here: None,
        resume: Resume::From(checkpoint.clone()),
        ..run.config().clone()
    });
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
        both(
            "the resumed demo has another evaluation loss",
            "续训后的演示得到不同的评估损失",
        ),
        both(
            "the checkpoint, loaded in one rank, does not give the loss of the run that saved it",
            "检查点在一个 rank 中加载后，没有得到保存它的那次运行的损失",
        ),
    )
    .evidence(text!(
        "saved {expected:?}, resumed {:?}",
        "保存时为 {expected:?}，续训后为 {:?}",
        summary.eval_loss
    )))
}

fn done(config: &RunConfig, summary: &RunSummary, warnings: &[Text], seconds: f64) -> DoneEvent {
    let output = config.output.display();
    let mut next: Vec<Text> = Vec::new();
    if summary.interrupted {
        next.push(Text::literal(continue_run(&config.output)));
    } else {
        next.push(text!(
            "report {output}/{}",
            "报告 {output}/{}",
            report::REPORT
        ));
        if config.is_demo() {
            next.push(both("your own model: --model <MiniCPM-V-2_6 directory> --data <samples.json> --zero 3 --offload cpu", "用您自己的模型：--model <MiniCPM-V-2_6 directory> --data <samples.json> --zero 3 --offload cpu").into());
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
    // Under another launcher, rank 0 prepares the run's directory.
    let (config, alone) = match rank_run(hooks, env, rank, args) {
        Err(failure) if is_finished(args, &failure) => {
            if rank.rank == 0 {
                Screen::on_stderr(env.no_color).show(&finished(&failure));
            }
            return Ok(ExitCode::SUCCESS);
        }
        found => found?,
    };
    let stop = rank::enter(rank, &config.output, &env.temp_dir)
        .inspect_err(|failure| drop(failure.save(&config.output, rank.rank)))?;
    // Until this process ends, no other job takes this one for dead.
    let _held = rank.job_dir.as_deref().map(hold).transpose()?;
    let result = logging::init(
        &config.output.join(run_directory::LOGS),
        rank.rank,
        env.rust_log.as_deref(),
    )
    .and_then(|()| {
        let mut plan = config.clone();
        loop {
            let summary = (hooks.rank_main)(&plan, rank, &stop, hooks.devices)?;
            match &alone {
                Some(alone) if summary.ipc_refused.is_some() || summary.ranks_per_gpu.is_some() => {
                    plan = alone.plan_again(hooks, env, rank, &plan, summary)?;
                }
                _ => return Ok(summary),
            }
        }
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

/// State of a rank under another launcher, which plans the run itself.
struct Alone {
    /// Configuration as requested.
    asked: RunConfig,
    /// Lock on the run's directory; rank 0 only.
    held: Option<Held>,
}

impl Alone {
    /// Plans the run again after what the ranks found when they met: the number of ranks on one GPU, or that they
    /// must exchange through host memory. Every rank does the same.
    fn plan_again(
        &self,
        hooks: &Hooks,
        env: &Env,
        rank: &RankEnv,
        before: &RunPlan,
        summary: RunSummary,
    ) -> Result<RunPlan, Failure> {
        if rank.rank == 0 {
            let mut screen = Screen::on_stderr(env.no_color);
            let refused = summary.ipc_refused.as_deref().map(restart::refused);
            let shared = summary.ranks_per_gpu.map(restart::shared);
            refused
                .iter()
                .chain(&shared)
                .for_each(|event| screen.show(event));
        }
        let config = RunConfig {
            ranks_per_gpu: summary.ranks_per_gpu.or(before.config().ranks_per_gpu),
            ..self.asked.clone()
        };
        let refused = summary
            .ipc_refused
            .or_else(|| before.found().ipc_refused.clone());
        let draft = RunPlan::draft(config, refused);
        let Prepared { run, plan, .. } = prepare(hooks, &draft, &mut |_| ())?;
        if rank.rank == 0 {
            run.save_to(&run.output.join(CONFIG_FILE))?;
            plan.save(&run.output)?;
        }
        Ok(run)
    }
}

/// Plan of a rank. Under the supervisor it is read from a file. Under another launcher every rank resolves the same
/// command line, and rank 0 locks the run's directory.
fn rank_run(
    hooks: &Hooks,
    env: &Env,
    rank: &RankEnv,
    args: &Args,
) -> Result<(RunPlan, Option<Alone>), Failure> {
    if let Some(job_dir) = &rank.job_dir {
        return Ok((RunPlan::load_from(&config_file(job_dir))?, None));
    }
    let asked = resolve_on(args, env, &choose(args, hooks.devices)?)?.config;
    let asked = resume::continued(asked, args);
    let mut asked = settle_one_by_one(&asked)?;
    if rank.can_plan_again() {
        asked = one_gpu_each(asked);
    }
    let asked = demo::prepare(asked, env, &mut |_| ())?;
    let mut screen = Screen::on_stderr(env.no_color);
    let is_shown = rank.rank == 0;
    let Proven {
        config: mut asked,
        ipc_refused,
    } = verify::prove(hooks, env, asked, false, &mut |event| {
        if is_shown {
            screen.show(&event);
        }
    })?;
    if rank.rank == 0 {
        asked = RunConfig {
            output: run_directory::check(&asked)?,
            ..asked
        };
    }
    // Every rank plans, because all need the sample order and the evaluation batch size.
    let draft = RunPlan::draft(asked.clone(), ipc_refused);
    let Prepared { run, plan, .. } = prepare(hooks, &draft, &mut |_| ())?;
    let mut held = None;
    if rank.rank == 0 {
        held = Some(run_directory::prepare(&run)?);
        plan.save(&run.output)?;
    }
    Ok((run, Some(Alone { asked, held })))
}
