//! Everything a rank holds while it works.

use super::check;
use super::collectives::Collectives;
use super::failures;
use super::inject::{self, Faults};
use super::place::Place;
use super::resume;
use super::setup::{self, Setup};
use super::spill;
use crate::config::{Collectives as ChosenCollectives, PrecisionChoice, RunConfig, Task};
use crate::data::{SampleSet, problems};
use crate::device::{Devices, RunGpu, counting_of, gpu_of};
use crate::exit::{ErrorCode, Failure};
use crate::plan::Places;
use crate::rank_env::{RankEnv, Variables};
use crate::rendezvous;
use crate::ui::{Event, Reporter, TrainRow};
use engine::comm::Communicator;
use engine::{EngineError, OptimizerConfig, ParamId, Tiers, Zero};
use kernels::{Backend, CpuBackend, DType, Pool};
use models::Processor;
use models::params::{ADAPTER_PREFIX, is_added};
use models::selection::Selection;
use models::{VisionLanguageModel, WeightError, WeightSource};
use optim::loss_scale::LossScaler;
use optim::{AdamW, ParameterGroups};
use serde_json::Value;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One rank's model, states, data and connections.
pub(super) struct Session<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) model: Arc<dyn VisionLanguageModel>,
    pub(super) processor: Arc<dyn Processor>,
    pub(super) weights: Option<WeightSource>,
    pub(super) backend: Arc<dyn Backend>,
    devices: &'a dyn Devices,
    local_rank: usize,
    pub(super) comm: Arc<dyn Communicator>,
    pub(super) zero: Zero,
    /// Of a GPU: where the tensors of a micro-batch lie.
    pub(super) places: Option<Places>,
    pub(super) train: Arc<SampleSet>,
    pub(super) eval: Option<SampleSet>,
    pub(super) reporter: Reporter,
    /// The micro-batch at hand, while there is one.
    pub(super) place: Option<Place>,
    /// Micro-batches of the present step and their summed losses on this rank.
    pub(super) step_losses: Vec<(Place, f64)>,
    /// The loss scale of fp16.
    pub(super) scaler: Option<LossScaler>,
    /// Bytes per second of this rank's share of the spill disks, where they were measured.
    pub(super) disk_ceiling: Option<f64>,
    /// What the checkpoint resumed from has to say to the training loop.
    pub(super) resumed: Option<(PathBuf, Value)>,
    /// What this rank exchanged with the others last.
    pub(super) collectives: Arc<Collectives>,
    /// What happens to this rank on purpose.
    pub(super) faults: Faults,
}

/// Why a rank has no session.
pub(super) enum NotOpened {
    /// GPUs should have read each other's memory, cannot, and need not: the run can be planned another way. The same on
    /// every rank.
    IpcRefused(String),
    Failed(Box<Failure>),
}

impl From<Failure> for NotOpened {
    fn from(failure: Failure) -> Self {
        Self::Failed(Box::new(failure))
    }
}

impl<'a> Session<'a> {
    pub(super) fn open(
        config: &'a RunConfig,
        env: &RankEnv,
        devices: &'a dyn Devices,
    ) -> Result<Self, NotOpened> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / env.local_world_size.max(1)).max(1);
        // A second initialisation only happens in tests that share the process.
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global()
            .ok();
        let reporter = Reporter::for_rank(env);
        if env.rank == 0 && !env.is_supervised() {
            // Under another launcher no supervisor has said it.
            for text in inject::lines(config) {
                reporter.emit(&Event::Warning { text });
            }
        }
        let Setup {
            model,
            processor,
            weights,
        } = Setup::open(config)?;
        let train = check::load(config, &config.data_file(), config.batch.limit, &*processor)?;
        if env.rank == 0 && !train.problems.is_empty() {
            problems::write(&config.output, &train.problems)?;
        }
        let eval = match config.eval_file() {
            Some(path) => Some(check::load(config, &path, None, &*processor)?),
            None => None,
        };
        let setup = Setup {
            model,
            processor,
            weights,
        };
        let plan = Arc::new(setup.plan(config)?);
        let collectives = Collectives::new();
        let (comm, run_token) = meet(config, env, &plan, devices, &collectives, &reporter)?;
        let env = &RankEnv {
            run_token,
            ..env.clone()
        };
        let faults = Faults::of(config, env.rank);
        let comm = faults.link(comm, Duration::from_secs(config.comm_timeout_seconds));
        let Setup {
            model,
            processor,
            weights,
        } = setup;
        let host_share = config
            .host_memory_limit
            .map(|limit| limit / config.ranks_here() as u64);
        let host = Pool::new("host", host_share);
        let disk = spill::open(config, env, &plan, &host, &*comm, &reporter)?;
        let (backend, device) = compute(config, env, devices, &host)?;
        let mut tiers = Tiers::new(device, host);
        let mut disk_ceiling = None;
        if let Some(disk) = disk {
            disk_ceiling = disk.ceiling;
            tiers = tiers.with_spill(disk.spill);
        }
        let counting = gpu_of(config, env.local_rank).and_then(counting_of);
        let places = counting.map(|device| Places::new(config, &plan, device));
        let places = places.transpose();
        let places =
            places.map_err(|e| failures::engine("plan the memory of a micro-batch", &e))?;
        let zero = Zero::new(
            plan,
            comm.clone(),
            backend.clone(),
            tiers,
            optimizer(config, &*model)?,
        )
        .map_err(|error| match error {
            EngineError::DevicesApart { refusals } if goes_another_way(config, env) => {
                NotOpened::IpcRefused(refused(&refusals))
            }
            error => failures::engine("allocate model states", &error).into(),
        })?;
        zero.reserve_activations(config.spilled_activation_bytes)
            .map_err(|e| failures::engine("reserve spill space for activations", &e))?;
        let scaler = (config.precision == PrecisionChoice::Fp16)
            .then(|| LossScaler::new(config.numbers.loss_scale))
            .transpose()
            .map_err(|e| Failure::usage("the loss scale is out of range", e.to_string()))?;
        let mut session = Self {
            config,
            model,
            processor,
            weights,
            backend,
            devices,
            local_rank: env.local_rank,
            comm,
            zero,
            places,
            train: Arc::new(train),
            eval,
            reporter,
            place: None,
            step_losses: Vec::new(),
            scaler,
            disk_ceiling,
            resumed: None,
            collectives,
            faults,
        };
        session.load()?;
        Ok(session)
    }

    /// This rank's GPU, and what nobody uses of it now.
    pub(super) fn gpu_now(&self) -> Option<(&RunGpu, Option<u64>)> {
        let gpu = gpu_of(self.config, self.local_rank)?;
        Some((gpu, self.devices.free_bytes(gpu)))
    }

    /// Base weights, then the checkpoint to resume from, if any.
    fn load(&mut self) -> Result<(), Failure> {
        let started = Instant::now();
        let (model, weights, seed) = (&self.model, &self.weights, self.config.seed);
        let read = |id: ParamId, elements: Range<usize>, out: &mut [f32]| {
            let name = &model.spec().params[id.index()].name;
            match weights {
                Some(source) if !is_added(name) => {
                    let bytes = bytemuck::cast_slice_mut(out);
                    source.read_range(name, elements, DType::F32, bytes)
                }
                _ => {
                    model.init(id, seed, elements, out);
                    Ok::<_, WeightError>(())
                }
            }
        };
        self.zero
            .load(read)
            .map_err(|e| failures::engine("load weights", &e))?;
        if let Some(source) = &self.weights {
            let sizes = source.files().filter_map(|f| std::fs::metadata(f).ok());
            self.reporter.emit(&Event::Load {
                bytes: sizes.map(|m| m.len()).sum(),
                files: source.files().count(),
                seconds: started.elapsed().as_secs_f64(),
            });
        }
        if let Some(checkpoint) = resume::open(self.config)? {
            let doing = resume::doing(checkpoint.folder());
            // Before training the supervisor has compared all hashes.
            if self.config.task == Task::Evaluate {
                checkpoint
                    .verify()
                    .map_err(|e| failures::checkpoint(&doing, &e))?;
            }
            let updates = checkpoint.meta().get("updates").and_then(Value::as_u64);
            let updates = updates.unwrap_or_else(|| checkpoint.step());
            self.zero
                .restore(&checkpoint, updates)
                .map_err(|e| failures::engine(&doing, &e))?;
            let folder = checkpoint.folder().to_owned();
            self.resumed = Some((folder, checkpoint.meta().clone()));
        } else if self.config.task == Task::Evaluate {
            return Err(Failure::new(
                ErrorCode::Resume,
                "no checkpoint to evaluate was found",
                format!("{} contains none", self.config.output.display()),
            ));
        }
        Ok(())
    }
}

/// What computes, and the pool of what the engine keeps beside it: of a GPU that is host memory.
fn compute(
    config: &RunConfig,
    env: &RankEnv,
    devices: &dyn Devices,
    host: &Pool,
) -> Result<(Arc<dyn Backend>, Pool), Failure> {
    match gpu_of(config, env.local_rank) {
        Some(gpu) => {
            let backend = devices.open(
                gpu,
                config.arena_bytes,
                config.cuda_graph,
                &Variables::read(),
            )?;
            Ok((backend, host.clone()))
        }
        None => {
            let pool = Pool::new("device", config.device_memory_limit);
            Ok((Arc::new(CpuBackend::new(pool.clone())), pool))
        }
    }
}

/// Whether this run may be planned again for the way through host memory. MPI lets processes meet once.
fn goes_another_way(config: &RunConfig, env: &RankEnv) -> bool {
    #[cfg(feature = "mpi")]
    if env.is_under_mpi() {
        return false;
    }
    config.collectives == ChosenCollectives::Auto && !env.has_peers_elsewhere()
}

/// The first of them in a line.
fn refused(refusals: &[(usize, String)]) -> String {
    let Some(((rank, what), others)) = refusals.split_first() else {
        return String::new();
    };
    match others.len() {
        0 => format!("rank {rank} {what}"),
        others => format!("rank {rank} {what} (and {others} more)"),
    }
}

fn meet(
    config: &RunConfig,
    env: &RankEnv,
    plan: &Arc<engine::Plan>,
    devices: &dyn Devices,
    collectives: &Arc<Collectives>,
    reporter: &Reporter,
) -> Result<(Arc<dyn Communicator>, String), Failure> {
    let started = Instant::now();
    let region = crate::plan::window_region(config, plan)? as usize;
    let met = rendezvous::join(config, env, plan, region, devices, |comm| {
        collectives.of(comm)
    })?;
    reporter.emit(&Event::Comm {
        ranks: env.world_size,
        transport: met.transport.into(),
        seconds: started.elapsed().as_secs_f64(),
    });
    for text in met.warnings {
        reporter.emit(&Event::Warning { text });
    }
    Ok((met.comm, met.token))
}

/// The path that a user writes: of the module, also for its adapter.
pub(super) fn base_name(name: &str) -> &str {
    name.strip_prefix(ADAPTER_PREFIX).unwrap_or(name)
}

/// What trains, by parts of the model's tree in the order of the forward pass.
pub(super) fn trained_parts(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
) -> Result<Vec<TrainRow>, Failure> {
    let rates = learning_rates(config)?;
    let mut rows: Vec<TrainRow> = Vec::new();
    for param in model.spec().params.iter().filter(|param| param.trainable) {
        let name = base_name(&param.name);
        let rate = rates.iter().find(|(_, part, _)| part.contains(name));
        let lr = rate.map_or(config.optimizer.learning_rate, |(.., rate)| *rate);
        let lr = lr * config.lr_factor();
        let adapter = if name.len() < param.name.len() {
            " (adapters)"
        } else {
            ""
        };
        let module = format!("{}{adapter}", part(name));
        let elems = param.shape.elems() as u64;
        match rows
            .iter_mut()
            .find(|row| row.module == module && row.lr == lr)
        {
            Some(row) => (row.tensors, row.params) = (row.tensors + 1, row.params + elems),
            None => rows.push(TrainRow {
                module,
                tensors: 1,
                params: elems,
                dtype: setup::precision(config).weight_dtype().to_string(),
                lr,
            }),
        }
    }
    Ok(rows)
}

/// The part of the model that the tensor `name` belongs to, as in the table of what trains.
pub(super) fn part_of(name: &str) -> String {
    part(base_name(name))
}

/// The first modules of the path down to numbered ones: MiniCPM's tower and resampler whole, everything else by its
/// parts.
fn part(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let modules = parts.split_last().map_or(&[][..], |(_, modules)| modules);
    let depth = match parts[0] {
        "vpm" | "resampler" => 1,
        _ => 3,
    };
    let named = modules
        .iter()
        .take_while(|part| part.parse::<usize>().is_err());
    let named: Vec<&str> = named.take(depth).copied().collect();
    if named.is_empty() {
        name.to_owned()
    } else {
        named.join(".")
    }
}

/// Learning rates of parts: as written, parsed, the rate.
pub(super) fn learning_rates(config: &RunConfig) -> Result<Vec<(&str, Selection, f64)>, Failure> {
    let rates = config.trainable.learning_rates.iter();
    let parsed = rates.map(|(part, rate)| {
        let selection = Selection::parse(part).map_err(|e| failures::selection("--lr", &e))?;
        Ok((&**part, selection, *rate))
    });
    parsed.collect()
}

/// The update rule.
pub(crate) fn rule(config: &RunConfig) -> AdamW {
    let settings = &config.optimizer;
    AdamW {
        beta1: settings.adam_beta1,
        beta2: settings.adam_beta2,
        eps: settings.adam_epsilon,
        pure_bf16: config.numbers.pure_bf16,
    }
}

fn optimizer(
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
) -> Result<OptimizerConfig, Failure> {
    let settings = &config.optimizer;
    let groups = ParameterGroups::new(settings.weight_decay as f32, &[])
        .map_err(|e| Failure::usage("parameter groups cannot be formed", e.to_string()))?;
    let rates = learning_rates(config)?;
    for (_, selection, _) in &rates {
        let names = model.spec().params.iter().map(|p| base_name(&p.name));
        selection
            .check(names)
            .map_err(|e| failures::selection("--lr", &e))?;
    }
    let spared = settings.no_decay.as_deref().map(Selection::parse);
    let spared = spared
        .transpose()
        .and_then(|spared| match &spared {
            Some(selection) => {
                let names = model.spec().params.iter().map(|p| base_name(&p.name));
                selection.check(names).map(|()| spared)
            }
            None => Ok(spared),
        })
        .map_err(|e| failures::selection("--no-decay", &e))?;
    let options = |name: &str| {
        let mut options = groups.options(name, optim::groups::is_norm_name(name));
        if let Some(spared) = &spared {
            let decays = !spared.contains(base_name(name));
            options.weight_decay = if decays {
                settings.weight_decay as f32
            } else {
                0.0
            };
        }
        if let Some((.., rate)) = rates
            .iter()
            .find(|(_, part, _)| part.contains(base_name(name)))
        {
            options.lr_scale = (rate / settings.learning_rate) as f32;
        }
        options
    };
    let groups = model
        .spec()
        .params
        .iter()
        .map(|p| options(&p.name))
        .collect();
    Ok(OptimizerConfig {
        rule: Arc::new(rule(config)),
        groups,
    })
}
