//! Ranks that answer: one in this process, or several in processes that run the same command line.
//!
//! They go the way of a run: the memory is planned before a weight is read, the ranks meet, and each leases the units
//! of its model from the engine. All parameters are frozen.

use super::model::OpenModel;
use super::note;
use crate::cli::{Args, AskedRanks, resolve_on};
use crate::commands::Hooks;
use crate::commands::verify::{self, Proven};
use crate::config::{
    DEVICE, Device, Found, Lora, PrecisionChoice, RunConfig, RunPlan, Source, Strategy, Task,
    Trainable, Workers, ZeroChoice,
};
use crate::device::{self, Chosen, cores};
use crate::error::threads::start_pool;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, both, text};
use crate::launch::logging;
use crate::launch::rank::{self, RunSummary, StopFlag};
use crate::launch::restart;
use crate::launch::supervisor::job::{Job, config_file, hold};
use crate::launch::supervisor::{SignalSource, Supervisor, own_program};
use crate::plan::{
    Counted, HeldOut, Machine, Work, dry_run, fixed_memory, pixel_line, settle, spill_directories,
};
use crate::rank_env::{Env, JOB_DIR, RankEnv, Variables};
use crate::report::run_directory;
use crate::train::replica::{NotOpened, Replica};
use crate::ui::Screen;
use kernels::DType;
use models::adapter::Adapter;
use models::data::EncodedSample;
use models::generate::Prompt;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// A command line that asks a model, in the process that was started with it or in one of its ranks.
pub(crate) struct Asking<'a> {
    hooks: &'a Hooks,
    words: &'a [String],
    env: Env,
    chosen: Chosen,
    /// Number and plan of this rank, if another process started it as one of several.
    own: Option<(RankEnv, RunPlan)>,
}

/// What becomes of a question.
pub(super) enum Outcome {
    /// What rank 0 found.
    Found(Value),
    /// This process is one of several ranks, and has ended its work.
    Rank(ExitCode),
}

/// The largest batches that the ranks process.
pub(super) struct Largest<'a> {
    pub(super) longest: &'a [EncodedSample],
    pub(super) prompts: Vec<Prompt<'a>>,
    /// Most bytes that the decoding of one image takes; `None`: unknown.
    pub(super) image_bytes: Option<u64>,
}

/// Work of a rank. The value of rank 0 counts.
pub(super) type Answering<'a> = dyn Fn(&Replica<'_>, &RankEnv) -> Result<Value, Failure> + 'a;

impl<'a> Asking<'a> {
    /// Finds out what this process is, and starts its threads.
    ///
    /// # Errors
    /// The plan of a rank cannot be read.
    pub(crate) fn new(hooks: &'a Hooks, words: &'a [String]) -> Result<Self, Failure> {
        let is_rank = Variables::read().get(JOB_DIR).is_some();
        let env = match is_rank {
            true => Env::read(None)?,
            false => Env::read_alone(),
        };
        let own = match env.rank.clone() {
            Some(rank) => {
                let directory = rank.job_dir.clone().unwrap_or_default();
                Some((rank, RunPlan::load_from(&config_file(&directory))?))
            }
            None => None,
        };
        let bound = own.as_ref().map(|(rank, plan)| {
            let config = plan.config();
            cores::bind(config.bind_cores.as_ref(), config.device, rank)
        });
        start_pool(bound.transpose()?.map(|bound| bound.threads))?;
        Ok(Self {
            hooks,
            words,
            env,
            chosen: Chosen::cpu(),
            own,
        })
    }

    /// Whether this process was started first, and not as one of several ranks.
    pub(super) const fn is_first(&self) -> bool {
        self.own.is_none()
    }

    /// Plan of the ranks, without their memory in the process that was started first. `more` has the settings of one
    /// subcommand, `source` the samples and the directory of their images.
    ///
    /// # Errors
    /// Flags that contradict each other or are out of range, or no GPU where one is asked for.
    pub(super) fn plan(
        &mut self,
        open: &OpenModel,
        flags: &AskedRanks,
        more: Args,
        source: (PathBuf, Option<PathBuf>),
    ) -> Result<RunPlan, Failure> {
        if let Some((_, run)) = &self.own {
            return Ok(run.clone());
        }
        let choice = flags.device.unwrap_or(DEVICE);
        self.chosen = device::choose(choice, self.hooks.devices, &Variables::read())?;
        let precision = match open.model().dtype() {
            DType::F32 => PrecisionChoice::F32,
            DType::F16 => PrecisionChoice::Fp16,
            _ => PrecisionChoice::Bf16,
        };
        let args = Args {
            device: flags.device,
            offload: flags.offload.clone(),
            nproc: Some(flags.nproc.or(flags.mp_size).unwrap_or(1)),
            // MP_SIZE is for training: one rank answers without it.
            mp_size: Some(flags.mp_size.unwrap_or(1)),
            verify_gpu: flags.verify_gpu,
            mlp_tile_tokens: flags.mlp_tile_tokens,
            image_max_pixels: flags.image_max_pixels,
            image_min_pixels: flags.image_min_pixels,
            precision: Some(precision),
            // Ranks share the weights.
            zero: Some(ZeroChoice::Stage(3)),
            data_workers: Some(Workers::Count(0)),
            eval_strategy: Some(Strategy::No),
            ..more
        };
        let asked = resolve_on(&args, &self.env, &self.chosen)?.config;
        let (data, image_dir) = source;
        let adapter = open.setup.adapter.as_ref();
        let config = RunConfig {
            task: Task::Answer,
            // What the ranks compute decides which operations a GPU is verified on.
            trainable: Trainable {
                lora: adapter.and_then(applied),
                ptuning_tokens: adapter.map_or(0, Adapter::prefix_tokens),
                ..asked.trainable
            },
            source: Source::Files {
                model: open.dir.clone(),
                data,
                eval_data: None,
                image_dir,
            },
            ..asked
        };
        Ok(config.draft())
    }

    /// Plans the memory, starts the ranks, and returns what rank 0 finds.
    ///
    /// # Errors
    /// The ranks do not fit (exit 5), a GPU is wrong (exit 13), or a rank fails.
    pub(super) fn answer(
        &self,
        open: &OpenModel,
        run: &RunPlan,
        largest: &Largest<'_>,
        work: &Answering<'_>,
    ) -> Result<Outcome, Failure> {
        if let Some((rank, run)) = &self.own {
            return self.serve(open, run, rank, work).map(Outcome::Rank);
        }
        let mut screen = Screen::on_stderr(self.env.no_color);
        for event in self.chosen.events(run) {
            screen.show(&event);
        }
        if let Some(event) = pixel_line(run) {
            screen.show(&event);
        }
        logging::init_supervisor(self.env.rust_log.as_deref())?;
        let proven = verify::prove(
            self.hooks,
            &self.env,
            run.config().clone(),
            true,
            &mut |event| screen.show(&event),
        );
        let Proven {
            config,
            mut ipc_refused,
        } = proven?;
        spill_directories::sweep(&config, &mut |event| screen.show(&event))?;
        loop {
            let job = Job::new(&self.env.temp_dir)?;
            let config = RunConfig {
                output: job.directory().to_owned(),
                ..config.clone()
            };
            let run = settled(&RunPlan::draft(config, ipc_refused.take()), open, largest)?;
            let _spill = spill_directories::hold(&run, job.token())?;
            if run.world_size == 1 {
                let rank = RankEnv::lone(job.token().to_owned(), self.env.no_color);
                let value = self.work(open, &run, &rank, &StopFlag::new(), work);
                return value.map_err(unopened).map(Outcome::Found);
            }
            let summary = self.supervise(&run, &job, &mut screen)?;
            ipc_refused = summary.ipc_refused;
            match &ipc_refused {
                Some(why) => screen.show(&restart::refused(why)),
                None => return found(&job).map(Outcome::Found),
            }
        }
    }

    fn supervise(
        &self,
        run: &RunPlan,
        job: &Job,
        screen: &mut Screen,
    ) -> Result<RunSummary, Failure> {
        run.save_to(&job.config_file())?;
        let logs = run.output.join(run_directory::LOGS);
        fs::create_dir_all(&logs)
            .map_err(|error| Failure::io(ErrorCode::Disk, both("create", "创建"), &logs, &error))?;
        let program = own_program()?;
        let supervisor = Supervisor {
            program: &program,
            words: self.words,
            processes: run.world_size,
            share: None,
            output: &run.output,
            job,
            claims_hosts: false,
            suggestions: &|_| (),
        };
        Ok(supervisor.run(&SignalSource::new()?, screen)?)
    }

    /// Main function of one of several ranks.
    fn serve(
        &self,
        open: &OpenModel,
        run: &RunPlan,
        rank: &RankEnv,
        work: &Answering<'_>,
    ) -> Result<ExitCode, Failure> {
        let stop = rank::enter(rank, &run.output, &self.env.temp_dir)?;
        let job = rank.job_dir.as_deref().unwrap_or(&run.output);
        let _held = hold(job)?;
        let logs = run.output.join(run_directory::LOGS);
        logging::init(&logs, rank.rank, self.env.rust_log.as_deref())?;
        let summary = match self.work(open, run, rank, &stop, work) {
            Ok(value) => {
                if rank.rank == 0 {
                    save(job, &value)?;
                }
                RunSummary::default()
            }
            Err(NotOpened::IpcRefused(why)) => RunSummary {
                ipc_refused: Some(why),
                ..RunSummary::default()
            },
            Err(other) => {
                let failure = unopened(other);
                failure.save(&run.output, rank.rank).map_err(|error| {
                    Failure::io(ErrorCode::Disk, both("write", "写入"), &run.output, &error)
                })?;
                return Ok(failure.exit_code());
            }
        };
        summary.save(job, rank.rank)?;
        Ok(ExitCode::SUCCESS)
    }

    fn work(
        &self,
        open: &OpenModel,
        run: &RunPlan,
        rank: &RankEnv,
        stop: &StopFlag,
        work: &Answering<'_>,
    ) -> Result<Value, NotOpened> {
        let started = Instant::now();
        let replica = Replica::answering(run, rank, stop, self.hooks.devices, &open.setup)?;
        if rank.rank == 0 {
            note(open.summary(started.elapsed().as_secs_f64()));
        }
        Ok(work(&replica, rank).inspect_err(|failure| {
            // Destructors may take long, so the report comes first.
            drop(failure.save(&run.output, rank.rank));
            replica.abandon(failure);
        })?)
    }
}

/// Settings of the adapters that the files apply to the model.
fn applied(adapter: &Adapter) -> Option<Lora> {
    let lora = adapter.lora()?;
    Some(Lora {
        lora_rank: lora.lora_rank,
        lora_alpha: lora.lora_alpha.into(),
        use_rslora: lora.use_rslora,
        loraplus_lr_ratio: None,
        lora_dropout: 0.0,
        target_modules: None,
        per_projection: lora.per_projection,
        layers: None,
        modules_to_save: Some(Vec::new()),
        adapter: Some(adapter.dir().to_owned()),
    })
}

/// The draft with every choice made, if it fits this machine.
fn settled(draft: &RunPlan, open: &OpenModel, largest: &Largest<'_>) -> Result<RunPlan, Failure> {
    let draft = draft.with_found(Found {
        image_bytes: largest.image_bytes,
        ..draft.found().clone()
    });
    let settled = settle(&draft, &Machine::here, &mut |run| {
        let plan = Arc::new(open.setup.plan(run)?);
        let work = Work {
            train: &[],
            held_out: Some(HeldOut {
                longest: largest.longest,
                prompts: largest.prompts.clone(),
            }),
            fixed: fixed_memory(run, open.model()),
        };
        Ok(Counted {
            memory: dry_run(run, open.model(), &plan, &work)?,
            plan,
            eval_batch: run.batch.eval_batch,
        })
    })?;
    let fit = &settled.fit;
    fit.check(&settled.run, &settled.memory).map_err(|failure| {
        let next = match fit.exceeds_device() && settled.run.device == Device::Cuda {
            true => both(
                "use --offload cpu, --nproc N on more GPUs, --device cpu, or fewer tokens or samples at once",
                "请使用 --offload cpu、在更多 GPU 上使用 --nproc N、--device cpu，或减少同时处理的 token 或样本",
            ),
            false => both(
                "use --precision bf16, --offload nvme:DIR, or fewer tokens or samples at once",
                "请使用 --precision bf16、--offload nvme:DIR，或减少同时处理的 token 或样本",
            ),
        };
        let mut failure = failure;
        failure.next.insert(0, next.into());
        failure
    })?;
    Ok(settled.run)
}

fn unopened(error: NotOpened) -> Failure {
    let cause = match error {
        NotOpened::Failed(failure) => return *failure,
        NotOpened::IpcRefused(why) => Text::literal(why),
        NotOpened::SharesGpu(ranks) => {
            text!("{ranks} ranks share a GPU", "{ranks} 个 rank 共用一块 GPU")
        }
    };
    let title = both("the ranks cannot work together", "各 rank 无法协同工作");
    Failure::new(ErrorCode::Rendezvous, title, cause)
}

/// File of what rank 0 found, in the job's private directory.
fn result_file(job: &Path) -> PathBuf {
    job.join("answers.json")
}

fn save(job: &Path, value: &Value) -> Result<(), Failure> {
    let path = result_file(job);
    fs::write(&path, value.to_string())
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))
}

fn found(job: &Job) -> Result<Value, Failure> {
    let path = result_file(job.directory());
    let fail =
        |error: std::io::Error| Failure::io(ErrorCode::Disk, both("read", "读取"), &path, &error);
    let text = fs::read_to_string(&path).map_err(fail)?;
    serde_json::from_str(&text).map_err(|error| fail(error.into()))
}
