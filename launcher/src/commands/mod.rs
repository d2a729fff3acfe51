//! Subcommands, one module each, and the dispatch of the command line to them.

pub mod bench;
mod ckpt;
mod data_check;
pub mod demo;
pub mod doctor;
pub mod explain;
mod export;
mod generate;
mod new_directory;
mod plan;
mod synth;
mod train;
mod verify;
mod watch;

use crate::cli::{self, Args, Command, DataCheckArgs, Note, PlanArgs, file};
use crate::config::RunPlan;
use crate::data::stream;
use crate::device::{Devices, Nvidia};
use crate::error::Failure;
use crate::error::format::{ErrorFormat, last_value};
use crate::error::output::print;
use crate::error::threads::start_pool;
use crate::lang::{self, Lang};
use crate::launch::hostfile;
use crate::launch::rank::{RunSummary, StopFlag};
use crate::plan::Suggestions;
use crate::rank_env::{self, Env, RankEnv, Variables};
use crate::ui::{Event, Screen};
use generate::ranks::Asking;
use signal_hook::consts::SIGXFSZ;
use std::process::ExitCode;
use std::sync::Arc;
use train::{run_rank, run_supervisor, show_files};

/// Main function of a rank process: it trains or evaluates as the plan says, and returns the rank's summary.
pub type RankMain = fn(&RunPlan, &RankEnv, &StopFlag, &dyn Devices) -> Result<RunSummary, Failure>;

/// Function that the supervisor runs before ranks start and before the run's directory is touched.
///
/// Its arguments are the draft of the run's plan, and a callback for messages to the user. It checks model
/// and data, and plans the memory. It returns the complete plan, and a function that adds suggestions to
/// later failures of ranks.
pub type PrepareHook =
    fn(&RunPlan, &mut dyn FnMut(Event)) -> Result<(RunPlan, Suggestions), Failure>;

/// Functions that the supervisor and the ranks call, and the source of GPUs. Tests replace them.
#[derive(Debug, Clone, Copy)]
pub struct Hooks {
    /// Checks and planning: called in the supervisor before ranks start.
    pub prepare: PrepareHook,
    /// Main function of a rank: called once in every rank process.
    pub rank_main: RankMain,
    /// Source of GPUs: finds and opens them. Tests use emulated ones.
    pub devices: &'static dyn Devices,
}

/// Runs the program with `rank_main` as the main function of its ranks, without checks and planning. Returns
/// the exit code of this process.
pub fn run_with(rank_main: RankMain) -> ExitCode {
    run_hooks(Hooks {
        prepare: |draft, _| Ok((draft.clone(), Box::new(|_| ()))),
        rank_main,
        devices: &Nvidia,
    })
}

/// Runs the program with the arguments of this process, and returns its exit code. Environment variables
/// decide whether this process is the supervisor or a rank.
pub fn run_hooks(hooks: Hooks) -> ExitCode {
    let argv: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let format = ErrorFormat::of_line(&argv);
    last_value(&argv, lang::FLAG, Lang::named)
        .unwrap_or_else(rank_env::language)
        .choose();
    // Without a handler, a write beyond the limit of file sizes kills the process instead of failing. If none can be
    // installed, it stays so.
    drop(signal_hook::flag::register(SIGXFSZ, Arc::default()));
    run_command(&hooks, &argv, format).unwrap_or_else(|failure| {
        let failure = failure.complete(&argv);
        format.print(&failure);
        failure.exit_code()
    })
}

fn run_command(hooks: &Hooks, argv: &[String], format: ErrorFormat) -> Result<ExitCode, Failure> {
    match cli::parse(argv)? {
        Command::Train { args, typed, notes } => {
            let mut env = Env::read(args.rank_is)?;
            let loaded = file::load(&typed)?.unwrap_or_default();
            let mut args = match loaded.words.is_empty() {
                true => args,
                false => Box::new(cli::train_args(&loaded.words)?),
            };
            // Ranks of the supervisor read its configuration instead of the command line.
            if !env.rank.as_ref().is_some_and(RankEnv::is_supervised) {
                let mut screen = Screen::on_stderr(env.no_color);
                let place = hostfile::place(&args, argv, &env, &mut |event| screen.show(&event))?;
                env.node = place.or(env.node);
            }
            match env.rank.clone() {
                Some(rank) => {
                    // Under another launcher no supervisor prints this.
                    if rank.rank == 0 {
                        show_files(&loaded, &mut Screen::on_stderr(env.no_color));
                    }
                    if !rank.is_supervised() {
                        stream::refuse(args.data.as_deref())?;
                        stream::refuse(args.eval_data.as_deref())?;
                    }
                    run_rank(hooks, &env, &rank, &args, format)
                }
                None => {
                    start_pool(None)?;
                    store_streams(&mut args, &env)?;
                    run_supervisor(hooks, &env, &args, &loaded, notes)
                }
            }
        }
        Command::Plan {
            mut args,
            typed,
            notes,
        } => plan_with_files(hooks, &mut args, typed, notes),
        Command::ExplainConfig { args, typed } => file::explain(&args, &typed, &Env::read_alone()),
        // The report must also work in an environment that training refuses.
        Command::Doctor(options) => match &options.verify_request {
            Some(request) => start_pool(None).and_then(|()| verify::child::serve(hooks, request)),
            None if options.verify_gpu == Some(true) => {
                start_pool(None).and_then(|()| verify::report(hooks))
            }
            None => doctor::run(&Variables::read(), options.json == Some(true)),
        },
        Command::Explain(options) => explain::run(&options),
        Command::DataCheck(mut options) => {
            start_pool(None)?;
            let variables = Variables::read();
            let DataCheckArgs {
                file, image_dir, ..
            } = &mut *options;
            stream::store(file, image_dir, &variables.cache_dir())?;
            data_check::run(&options, &variables)
        }
        Command::Generate(args) => generate::ask::run(&args, &mut Asking::new(hooks, argv)?),
        Command::Eval(args) => generate::evaluate::run(*args, &mut Asking::new(hooks, argv)?),
        Command::Export(options) => start_pool(None).and_then(|()| export::export(&options)),
        Command::Import(options) => {
            start_pool(None).and_then(|()| export::import::import(&options))
        }
        Command::Ckpt(command) => start_pool(None).and_then(|()| ckpt::run(&command)),
        Command::Watch(options) => watch::run(&options),
        Command::Synth(options) => start_pool(None).and_then(|()| synth::run(&options)),
        Command::BenchNvme(options) => bench::nvme::run(&options),
        Command::Print(text) => print(&text),
    }
}

/// Stores the data of `args` that can be read only once.
fn store_streams(args: &mut Args, env: &Env) -> Result<(), Failure> {
    for data in [&mut args.data, &mut args.eval_data] {
        stream::store(data, &mut args.image_dir, &env.cache_dir)?;
    }
    Ok(())
}

/// Runs `launcher plan` with a command line that may name configuration files.
fn plan_with_files(
    hooks: &Hooks,
    args: &mut PlanArgs,
    typed: Vec<String>,
    mut notes: Vec<Note>,
) -> Result<ExitCode, Failure> {
    let env = Env::read_alone();
    let Some(loaded) = file::load(&typed)? else {
        store_streams(&mut args.run, &env)?;
        return plan::run(args, &typed, &env, &notes, hooks.devices);
    };
    let mut screen = Screen::on_stderr(env.no_color);
    show_files(&loaded, &mut screen);
    notes.extend(loaded.notes.iter().cloned());
    let mut args = cli::plan_args(&loaded.words)?;
    store_streams(&mut args.run, &env)?;
    plan::run(&args, &loaded.words, &env, &notes, hooks.devices)
        .map_err(|failure| loaded.place(failure))
}
