//! Opening of a rank: reads model and samples, joins the other ranks, allocates and loads the states.

use super::collectives::Collectives;
use super::inject::Faults;
use super::spill;
use crate::config::{
    Collectives as ChosenCollectives, Device, PrecisionChoice, RunConfig, RunGpu, RunPlan, Task,
    fault_lines,
};
use crate::data::{SampleSet, Taken, check, problems};
use crate::device::{Devices, cores, counting_of, gpu_of};
use crate::error::threads::start_pool;
use crate::error::{ErrorCode, Failure, chain, failures};
use crate::lang::{both, text};
use crate::launch::rank::StopFlag;
use crate::launch::rendezvous::{self, Addresses, AgreedMath, Met};
use crate::model::optimizer::optimizer;
use crate::model::quantize;
use crate::model::setup::Setup;
use crate::plan::rank_memory::{mapped_line, registered_line};
use crate::plan::{MemoryPlans, WINDOW_SLACK_BYTES, kernels_of, resume};
use crate::rank_env::{RankEnv, Variables};
use crate::ui::{Event, Reporter};
use engine::checkpoint::Checkpoint;
use engine::comm::mesh::{BROADCAST_BYTES, MAX_VALUES, Mesh, Regions};
use engine::comm::{Communicator, World};
use engine::{EngineError, ParamId, Tiers, Zero};
use half::f16;
use kernels::{Backend, CpuBackend, CpuMath, DType, Pool};
use models::Processor;
use models::adapter::Adapter;
use models::params::is_added;
use models::{VisionLanguageModel, WeightError, WeightSource};
use optim::loss_scale::LossScaler;
use serde_json::Value;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Model of one rank with its states, compute device and communicator.
pub(crate) struct Replica<'a> {
    pub(crate) config: &'a RunPlan,
    pub(crate) model: Arc<dyn VisionLanguageModel>,
    pub(crate) processor: Arc<dyn Processor>,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) zero: Zero,
    /// Order of sums on CPUs, equal on all ranks.
    pub(crate) math: CpuMath,
}

impl Replica<'_> {
    /// This data-parallel rank, and their number: ranks that have samples of their own.
    pub(crate) fn data(&self) -> World {
        self.zero.mesh().coordinates().data
    }
}

/// Bytes of a link's region for each value beside its content: alignment, and blocks that best fit leaves.
const LINK_VALUE_SLACK_BYTES: usize = 4096;

/// GPU on which a rank computes.
pub(crate) struct OwnGpu<'a> {
    pub(crate) gpu: &'a RunGpu,
    devices: &'a dyn Devices,
}

impl OwnGpu<'_> {
    /// Bytes currently free on the GPU, if the driver reports them.
    pub(crate) fn free_bytes(&self) -> Option<u64> {
        self.devices.free_bytes(self.gpu, &Variables::read())
    }
}

/// One rank that is ready to train, with its samples.
pub(crate) struct Opened<'a> {
    pub(crate) replica: Replica<'a>,
    /// Files of the base weights; `None` for random weights.
    pub(crate) weights: Option<WeightSource>,
    /// Adapters that training starts from.
    adapter: Option<Adapter>,
    pub(crate) train: Arc<SampleSet>,
    pub(crate) eval: Option<SampleSet>,
    pub(crate) gpu: Option<OwnGpu<'a>>,
    /// Memory plans of micro-batches. `None` on the CPU.
    pub(crate) memory_plans: Option<MemoryPlans>,
    /// Loss scaler. `None` unless the precision is fp16.
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) reporter: Reporter,
    /// Measured bytes per second of this rank's share of the spill disks, if any.
    pub(crate) disk_ceiling: Option<f64>,
    /// Directory and metadata of the checkpoint resumed from, if any.
    pub(crate) resumed: Option<(PathBuf, Value)>,
    /// Log of this rank's last collectives.
    pub(crate) collectives: Arc<Collectives>,
    /// Faults to inject into this rank, for tests.
    pub(crate) faults: Faults,
}

/// Reason why a rank was not opened.
pub(crate) enum NotOpened {
    /// Peer access between GPUs is not available, and the run can be planned again without it. Every rank gets this
    /// result.
    IpcRefused(String),
    /// So many ranks share a GPU, and the plan assumed another number. Every rank gets this result.
    SharesGpu(usize),
    Failed(Box<Failure>),
}

impl From<Failure> for NotOpened {
    fn from(failure: Failure) -> Self {
        Self::Failed(Box::new(failure))
    }
}

impl<'a> Opened<'a> {
    /// Reads model and samples, joins the other ranks, allocates the states and loads them.
    pub(crate) fn open(
        config: &'a RunPlan,
        env: &RankEnv,
        stop: &StopFlag,
        devices: &'a dyn Devices,
    ) -> Result<Self, NotOpened> {
        let bound = cores::bind(config.bind_cores.as_ref(), config.device, env)?;
        start_pool(Some(bound.threads))?;
        let reporter = Reporter::for_rank(env);
        if env.rank == 0 {
            bound
                .line()
                .into_iter()
                .for_each(|line| reporter.emit(&line));
        }
        if env.rank == 0 && !env.is_supervised() {
            // Under another launcher no supervisor prints these warnings.
            for text in fault_lines(config) {
                reporter.emit(&Event::Warning { text });
            }
        }
        let Setup {
            model,
            processor,
            weights,
            adapter,
        } = Setup::open(config)?;
        let train = check::load(
            config,
            &config.data_file(),
            Taken::Training(config.batch.limit),
            &*processor,
        )?;
        if env.rank == 0 && !train.problems.is_empty() {
            problems::write(&config.output, &train.problems)?;
        }
        let eval = match config.eval_file() {
            Some(path) => Some(check::load(config, &path, Taken::HeldOut, &*processor)?),
            None => None,
        };
        let setup = Setup {
            model,
            processor,
            weights,
            adapter,
        };
        let plan = own_plan(config, env, &setup)?;
        let collectives = Collectives::new();
        let started = Instant::now();
        let mut met = meet(config, env, &plan, devices, stop, &collectives)?;
        if config.device == Device::Cuda && env.can_plan_again() {
            let found = rendezvous::ranks_per_gpu(config, env.local_rank, &*met.comm)?;
            if let Some(ranks) = found {
                return Err(NotOpened::SharesGpu(ranks));
            }
        }
        let addresses = std::mem::take(&mut met.addresses);
        let (comm, run_token) = announced(met, env, started, &reporter);
        let env = &RankEnv {
            run_token,
            ..env.clone()
        };
        let faults = Faults::of(config, env.rank);
        let deadline = Duration::from_secs(config.comm_timeout_seconds);
        let comm = faults.link(comm, deadline);
        let noted = |comm| faults.link(collectives.of(comm), deadline);
        let mesh = mesh(config, env, &plan, (comm.clone(), addresses), stop, noted)?;
        let Setup {
            model,
            processor,
            weights,
            adapter,
        } = setup;
        let counting = gpu_of(config, env.local_rank).and_then(counting_of);
        let memory_plans = counting.map(|device| MemoryPlans::new(config, &plan, device));
        let memory_plans = memory_plans.transpose();
        let memory_plans = memory_plans.map_err(|e| {
            failures::engine(
                both("plan the memory of a micro-batch", "计划微批的内存"),
                &e,
            )
        })?;
        let checkpoint = resume::open(config)?;
        let saved = checkpoint.as_ref().map(Checkpoint::meta);
        let math = sums(config, saved, &*comm, &reporter)?;
        let States {
            backend,
            zero,
            disk_ceiling,
        } = States::allocate(config, env, plan, mesh, devices, math, &*model, &reporter)?;
        let memory_plans = memory_plans.map(|plans| plans.for_device(backend.clone()));
        let gpu = gpu_of(config, env.local_rank);
        if let Some(gpu) = gpu {
            backend.compile_ahead(&kernels_of(config, gpu)?);
        }
        zero.reserve_activations(config.found().spilled_activation_bytes)
            .map_err(|e| {
                failures::engine(
                    both("reserve spill space for activations", "为激活预留溢出空间"),
                    &e,
                )
            })?;
        let scaler = (config.precision == PrecisionChoice::Fp16)
            .then(|| LossScaler::new(config.numbers.loss_scale))
            .transpose()
            .map_err(|e| {
                Failure::usage(
                    both("the loss scale is out of range", "损失缩放超出范围"),
                    chain(&e),
                )
            })?;
        let mut opened = Self {
            replica: Replica {
                config,
                model,
                processor,
                backend,
                comm,
                zero,
                math,
            },
            weights,
            adapter,
            train: Arc::new(train),
            eval,
            gpu: gpu.map(|gpu| OwnGpu { gpu, devices }),
            memory_plans,
            scaler,
            reporter,
            disk_ceiling,
            resumed: None,
            collectives,
            faults,
        };
        let loaded = opened.load();
        loaded.inspect_err(|_| opened.replica.backend.abandon())?;
        Ok(opened)
    }

    /// Loads the base weights and the adapters to start from, then the checkpoint to resume from, if any.
    fn load(&mut self) -> Result<(), Failure> {
        let started = Instant::now();
        let Replica {
            config,
            model,
            zero,
            ..
        } = &mut self.replica;
        if let Some(source) = &mut self.weights {
            source.quantize_on_read(quantize::quantizations(model.spec()));
        }
        let weights = self.weights.as_ref();
        load_weights(zero, config, &**model, weights, self.adapter.as_ref())?;
        if let Some(source) = weights {
            let sizes = source.files().filter_map(|f| std::fs::metadata(f).ok());
            self.reporter.emit(&Event::Load {
                bytes: sizes.map(|m| m.len()).sum(),
                files: source.files().count(),
                seconds: started.elapsed().as_secs_f64(),
            });
        }
        let lines = [
            mapped_line(zero.plan()),
            registered_line(&zero.host_registered()),
        ];
        lines
            .into_iter()
            .flatten()
            .for_each(|line| self.reporter.emit(&line));
        if let Some(checkpoint) = resume::open(config)? {
            let doing = resume::doing(checkpoint.directory());
            // Before training, the supervisor has verified all hashes.
            if config.task == Task::Evaluate {
                checkpoint
                    .verify()
                    .map_err(|e| failures::checkpoint(&doing, &e))?;
            }
            let updates = checkpoint.meta().get("updates").and_then(Value::as_u64);
            let updates = updates.unwrap_or_else(|| checkpoint.step());
            zero.restore(&checkpoint, updates)
                .map_err(|e| failures::engine(&doing, &e))?;
            let directory = checkpoint.directory().to_owned();
            self.resumed = Some((directory, checkpoint.meta().clone()));
        } else if config.task == Task::Evaluate {
            return Err(Failure::new(
                ErrorCode::Resume,
                both(
                    "no checkpoint to evaluate was found",
                    "没有找到可供评估的检查点",
                ),
                text!(
                    "{} contains none",
                    "{} 中没有检查点",
                    config.output.display()
                ),
            ));
        }
        Ok(())
    }
}

impl<'a> Replica<'a> {
    /// Rank of a subcommand that answers: joins the other ranks, allocates the weights of `setup`, and reads them.
    pub(crate) fn answering(
        config: &'a RunPlan,
        env: &RankEnv,
        stop: &StopFlag,
        devices: &dyn Devices,
        setup: &Setup,
    ) -> Result<Self, NotOpened> {
        let plan = own_plan(config, env, setup)?;
        let met = meet(config, env, &plan, devices, stop, &Collectives::new())?;
        let (comm, addresses) = (met.comm, met.addresses);
        let reporter = Reporter::for_rank(env);
        let model = setup.model.clone();
        let mesh = mesh(
            config,
            env,
            &plan,
            (comm.clone(), addresses),
            stop,
            |comm| comm,
        )?;
        let math = sums(config, None, &*comm, &reporter)?;
        let States { backend, zero, .. } =
            States::allocate(config, env, plan, mesh, devices, math, &*model, &reporter)?;
        if let Some(gpu) = gpu_of(config, env.local_rank) {
            backend.compile_ahead(&kernels_of(config, gpu)?);
        }
        let mut replica = Self {
            config,
            model,
            processor: setup.processor.clone(),
            backend,
            comm,
            zero,
            math,
        };
        load_weights(
            &mut replica.zero,
            config,
            &*replica.model,
            setup.weights.as_ref(),
            setup.adapter.as_ref(),
        )
        .inspect_err(|_| replica.backend.abandon())?;
        Ok(replica)
    }

    /// Ends the exchange with the other ranks after `failure`.
    pub(crate) fn abandon(&self, failure: &Failure) {
        self.zero.mesh().abort(&failure.title);
        // Otherwise the destructors would wait once more for a GPU that waits for a lost rank.
        self.backend.abandon();
    }
}

/// Compute device and states of a rank that met the others, without values.
struct States {
    backend: Arc<dyn Backend>,
    zero: Zero,
    /// Measured bytes per second of this rank's share of the spill disks, if any.
    disk_ceiling: Option<f64>,
}

impl States {
    fn allocate(
        config: &RunPlan,
        env: &RankEnv,
        plan: Arc<engine::Plan>,
        mesh: Mesh,
        devices: &dyn Devices,
        math: CpuMath,
        model: &dyn VisionLanguageModel,
        reporter: &Reporter,
    ) -> Result<Self, NotOpened> {
        let host_share = config
            .host_memory_limit
            .map(|limit| limit / config.ranks_here() as u64);
        let host = Pool::new("host", host_share);
        let disk = spill::open(config, env, &plan, &host, &**mesh.world(), reporter)?;
        let (backend, device) = compute(config, env, devices, math, &host)?;
        let mut tiers = Tiers::new(device, host);
        let mut disk_ceiling = None;
        if let Some(disk) = disk {
            disk_ceiling = disk.ceiling;
            tiers = tiers.with_spill(disk.spill);
        }
        let rule = optimizer(config, model)?;
        let zero = Zero::in_mesh(plan, mesh, backend.clone(), tiers, rule)
            .map_err(|error| match error {
                EngineError::NoPeerAccess { refusals } if goes_another_way(config, env) => {
                    NotOpened::IpcRefused(refused(&refusals))
                }
                error => {
                    failures::engine(both("allocate model states", "分配模型状态"), &error).into()
                }
            })
            .inspect_err(|error| {
                if let NotOpened::Failed(_) = error {
                    backend.abandon();
                }
            })?;
        Ok(Self {
            backend,
            zero,
            disk_ceiling,
        })
    }
}

/// Reads the weights of `model`: those of an adapter, else those of the files, else initial values.
fn load_weights(
    zero: &mut Zero,
    config: &RunConfig,
    model: &dyn VisionLanguageModel,
    weights: Option<&WeightSource>,
    adapter: Option<&Adapter>,
) -> Result<(), Failure> {
    let half = config.precision == PrecisionChoice::Fp16;
    let read = |id: ParamId, elements: Range<usize>, out: &mut [f32]| {
        let name = &model.spec().params[id.index()].name;
        match (adapter, weights) {
            (Some(adapter), _) if adapter.has(name) => {
                let bytes = bytemuck::cast_slice_mut(out);
                adapter.read_range(name, elements, DType::F32, bytes)
            }
            (_, Some(source)) if !is_added(name) => {
                let bytes = bytemuck::cast_slice_mut(out);
                source.read_finite(name, elements, DType::F32, bytes)?;
                match half && out.iter().any(|value| !f16::from_f32(*value).is_finite()) {
                    true => Err(source.not_finite_as(name, DType::F16)?),
                    false => Ok(()),
                }
            }
            _ => {
                model.init(id, config.seed, elements, out);
                Ok::<_, WeightError>(())
            }
        }
    };
    let dtype = zero.plan().config().precision.weight_dtype();
    let map = |id: ParamId| {
        let name = &model.spec().params[id.index()].name;
        let place = weights.and_then(|source| source.in_file(name, dtype));
        let (file, range) = place.ok_or(std::io::ErrorKind::NotFound)?;
        Ok::<_, std::io::Error>((file.try_clone()?, range))
    };
    let quantized = |id: ParamId, out: &mut [u8]| {
        let name = &model.spec().params[id.index()].name;
        let Some(source) = weights else {
            return Ok(false);
        };
        out.copy_from_slice(&source.read_quantized(name)?);
        Ok(true)
    };
    let loaded = zero.map_files(map);
    loaded
        .and_then(|()| zero.load_quantized(read, quantized))
        .map_err(|e| failures::engine(both("load weights", "加载权重"), &e))
}

/// Order of sums on CPUs that all ranks use, which rank 0 names if it is not the usual one.
fn sums(
    config: &RunPlan,
    saved: Option<&Value>,
    comm: &dyn Communicator,
    reporter: &Reporter,
) -> Result<CpuMath, Failure> {
    let AgreedMath { math, text } = rendezvous::cpu_math(config, saved, CpuMath::native(), comm)?;
    if let Some(text) = text.filter(|_| comm.world().rank == 0) {
        reporter.emit(&Event::Info {
            label: both("cpu", "cpu").into(),
            text,
        });
    }
    Ok(math)
}

/// Backend, and the pool for the engine's buffers. On a GPU that pool is host memory.
fn compute(
    config: &RunPlan,
    env: &RankEnv,
    devices: &dyn Devices,
    math: CpuMath,
    host: &Pool,
) -> Result<(Arc<dyn Backend>, Pool), Failure> {
    match gpu_of(config, env.local_rank) {
        Some(gpu) => {
            let backend = devices.open(
                gpu,
                config.found().arena_bytes,
                config.cuda_graph,
                &Variables::read(),
            )?;
            Ok((backend, host.clone()))
        }
        None => {
            let pool = Pool::new("device", config.device_memory_limit);
            let cpu = CpuBackend::new(pool.clone()).with_math(math);
            Ok((Arc::new(cpu), pool))
        }
    }
}

/// Whether this run may be planned again with exchange through host memory: with `--collectives auto` on one machine.
/// Under MPI it may not, because processes can join only once.
fn goes_another_way(config: &RunConfig, env: &RankEnv) -> bool {
    #[cfg(feature = "mpi")]
    if env.is_under_mpi() {
        return false;
    }
    config.collectives == ChosenCollectives::Auto && !env.has_peers_elsewhere()
}

/// First refusal in one line, with the number of others.
fn refused(refusals: &[(usize, String)]) -> String {
    let Some(((rank, what), others)) = refusals.split_first() else {
        return String::new();
    };
    match others.len() {
        0 => format!("rank {rank} {what}"),
        others => format!("rank {rank} {what} (and {others} more)"),
    }
}

/// Plan of this rank's pipeline stage, from that of the first one. Leases read weights in their files where they can.
fn own_plan(config: &RunPlan, env: &RankEnv, setup: &Setup) -> Result<Arc<engine::Plan>, Failure> {
    let plan = setup.plan(config)?;
    let plan = match config.mp_size {
        1 => Ok(plan),
        stages => plan.at_stage(env.rank % stages),
    };
    let plan = plan.map_err(|e| failures::engine(both("plan the run", "计划运行"), &e.into()))?;
    let is_gpu = config.device == Device::Cuda;
    let dtype = plan.config().precision.weight_dtype();
    let is_in_file = |id: ParamId| {
        let name = &setup.model.spec().params[id.index()].name;
        let is_replaced = setup.adapter.as_ref().is_some_and(|own| own.has(name));
        let weights = setup.weights.as_ref().filter(|_| !is_replaced);
        weights.is_some_and(|weights| weights.in_file(name, dtype).is_some())
    };
    Ok(Arc::new(plan.with_mapped_files(is_gpu, is_in_file)))
}

/// The mesh of this rank, whose ranks `comm` connects. `noted` wraps the communicators of pipeline stages.
fn mesh(
    config: &RunPlan,
    env: &RankEnv,
    plan: &Arc<engine::Plan>,
    (comm, addresses): (Arc<dyn Communicator>, Addresses),
    stop: &StopFlag,
    noted: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator>,
) -> Result<Mesh, Failure> {
    match config.mp_size {
        1 => Ok(Mesh::from(comm)),
        _ => {
            let regions = regions(config, plan)?;
            rendezvous::join_stages(config, env, (comm, addresses), regions, stop, noted)
        }
    }
}

/// Bytes of this rank's regions in the windows of its data group and of its links. A link's has space for every value that
/// crosses a boundary at once, each at an aligned offset.
fn regions(config: &RunPlan, plan: &Arc<engine::Plan>) -> Result<Regions, Failure> {
    let crossing = match config.resolved_collectives() {
        // Values are in GPU memory, and a link has messages only.
        ChosenCollectives::Ipc => None,
        _ => config.found().boundary_bytes.iter().max(),
    };
    let crossing = crossing.copied().unwrap_or(0) as usize;
    Ok(Regions {
        data: crate::plan::window_region(config, plan)? as usize,
        link: crossing + MAX_VALUES * LINK_VALUE_SLACK_BYTES,
    })
}

fn meet(
    config: &RunPlan,
    env: &RankEnv,
    plan: &Arc<engine::Plan>,
    devices: &dyn Devices,
    stop: &StopFlag,
    collectives: &Arc<Collectives>,
) -> Result<Met, Failure> {
    let region = match config.mp_size {
        1 => crate::plan::window_region(config, plan)?,
        // The same on all pipeline stages: small messages, and weights that a checkpoint collects.
        _ => WINDOW_SLACK_BYTES + 2 * BROADCAST_BYTES as u64,
    } as usize;
    rendezvous::join(config, env, plan, region, devices, stop, |comm| {
        collectives.of(comm)
    })
}

/// Reports the rendezvous. Returns the communicator and the job's token.
fn announced(
    met: Met,
    env: &RankEnv,
    started: Instant,
    reporter: &Reporter,
) -> (Arc<dyn Communicator>, String) {
    reporter.emit(&Event::Comm {
        ranks: env.world_size,
        transport: met.transport.into(),
        seconds: started.elapsed().as_secs_f64(),
    });
    for text in met.warnings {
        reporter.emit(&Event::Warning { text });
    }
    (met.comm, met.token)
}
