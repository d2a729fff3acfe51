//! From arguments to a configuration.

mod batch;
mod best;
mod numbers;
mod quantize;
mod trainable;

use crate::lang::{Both, Text, both, text};
use models::places;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::config::defaults::{self, DEMO, Defaults, MODEL};
use crate::config::{
    Cadence, Device, DeviceChoice, Every, Length, LrScale, Offload, OptimizerConfig,
    OptimizerInBackward, PrecisionChoice, PureBf16Weights, ReportTo, Resume, RunConfig, RunGpu,
    SampleRules, Scheduler, SchedulerKwargs, Source, Strategy, Task, Tier, Warmup, ZeroChoice,
};
use engine::comm::MAX_RANKS;
use models::data::{DATASET_INFO, data_parts, weight_of};

/// Directory of `dataset_info.json` where none is given, as in LLaMA-Factory.
const DATASET_DIR: &str = "data";

use crate::cli::{Args, Note};
use crate::config::words::value_name;
use crate::device::Chosen;
use crate::error::Failure;
use crate::rank_env::Env;

/// Configuration of a run, resolved from its arguments, and notes on it for the user.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// Configuration of the run, with every default filled in.
    pub config: RunConfig,
    /// Notes on flags that have no effect in this configuration, for example because another flag overrides
    /// them.
    pub notes: Vec<Note>,
}

/// Turns command-line arguments and environment into the full configuration of a run. It reads no file, so it
/// does not check whether paths exist.
///
/// # Errors
/// A usage failure naming the flags that contradict each other or are out of range (exit 2).
pub fn resolve(args: &Args, env: &Env) -> Result<Resolved, Failure> {
    let chosen = match args.device {
        Some(DeviceChoice::Cuda) => Chosen::described(Vec::new()),
        Some(DeviceChoice::Auto | DeviceChoice::Cpu) | None => Chosen::cpu(),
    };
    resolve_on(args, env, &chosen)
}

/// As [`resolve`], on a device that was chosen before.
///
/// # Errors
/// As [`resolve`].
pub(crate) fn resolve_on(args: &Args, env: &Env, chosen: &Chosen) -> Result<Resolved, Failure> {
    let source = source(args, env)?;
    let defaults = if matches!(source, Source::Demo { .. }) {
        &DEMO
    } else {
        &MODEL
    };
    let mut notes = Vec::new();
    for (flag, path, names) in [
        ("data", &args.data, &args.dataset),
        ("eval-data", &args.eval_data, &args.eval_dataset),
    ] {
        if path.is_some() && names.is_some() {
            let reason = text!("--{flag} gives the samples", "样本已由 --{flag} 指定");
            notes.push(note(
                if flag == "data" {
                    "--dataset"
                } else {
                    "--eval-dataset"
                },
                &reason,
            ));
        }
    }
    let world_size = world_size(args, env, &chosen.gpus)?;
    if world_size > MAX_RANKS {
        let what = match args.nproc {
            Some(asked) if asked == world_size => Text::literal(format_args!("--nproc {asked}")),
            _ => text!(
                "a world of {world_size} ranks",
                "world size 为 {world_size}"
            ),
        };
        let why = text!(
            "a run has at most {MAX_RANKS} ranks over all machines",
            "一次运行在所有机器上最多有 {MAX_RANKS} 个 rank"
        );
        return Err(out_of_range(&what, &why));
    }
    let mp_size = mp_size(args, env, world_size)?;
    let (output, output_is_explicit) = output(args, env, &source)?;
    let offload = offload(args, chosen.device, &mut notes)?;
    let on_gpu = chosen.device == Device::Cuda && offload.optimizer == Tier::None;
    let eval = eval(args, &source, &mut notes)?;
    // Checkpoints follow the evaluations, of which the best is kept.
    let save = match args.load_best_model_at_end {
        Some(true) => eval,
        _ => defaults.save,
    };
    let (when, steps) = (args.save_strategy, args.save_steps);
    let save = cadence("save", when, steps, save, &mut notes)?;
    let config = RunConfig {
        task: Task::Train,
        output,
        output_is_explicit,
        samples: SampleRules {
            data_format: args.data_format.unwrap_or_default(),
            template: args.template.unwrap_or_default(),
            train_on_turn_end: args.train_on_turn_end.unwrap_or(false),
            text_without_cross: args.text_without_cross.unwrap_or(false),
            exif_rotation: args.exif_rotation.unwrap_or_default(),
        },
        init: args.init.unwrap_or(defaults.init),
        zero: defaults::ZERO,
        zero_auto: None,
        shard_group: shard_group(args, world_size / mp_size)?,
        collectives: args.collectives.unwrap_or_default(),
        nvme_io: args.nvme_io.unwrap_or_default(),
        optimizer_in_backward: match optimizer_in_backward(args, on_gpu, &mut notes) {
            OptimizerInBackward::Auto if mp_size > 1 => OptimizerInBackward::Off,
            chosen => chosen,
        },
        optimizer_in_forward: args.optimizer_in_forward.unwrap_or_default(),
        offload,
        world_size,
        mp_size,
        mp_split: args.mp_split.clone(),
        ranks_here: ranks_here(args, env, world_size),
        ranks_per_gpu: None,
        bind_cores: args.bind_cores.clone(),
        cpu_math: args.cpu_math,
        comm_timeout_seconds: args.comm_timeout.unwrap_or(defaults::COMM_TIMEOUT_SECONDS),
        device: chosen.device,
        gpus: chosen.gpus.clone(),
        cuda_graph: args.cuda_graph.unwrap_or_default(),
        verify_gpu: args.verify_gpu.unwrap_or_default(),
        prefetch_weights: args.prefetch_weights.unwrap_or_default(),
        numbers: numbers::resolve(args, precision(args, defaults)?)?,
        precision: precision(args, defaults)?,
        rope_precision: args.rope_precision.unwrap_or_default(),
        quantize: quantize::resolve(args, &mut notes)?,
        host_memory_limit: args.host_memory_limit,
        host_reserve: args.host_reserve,
        device_memory_limit: args.device_memory_limit,
        length: length(args, defaults, &mut notes)?,
        checkpoint_activations: batch::recompute(args)?,
        checkpoint_num_layers: batch::num_layers(args)?,
        mlp_tile_tokens: batch::tile_tokens(args)?,
        batch: batch::resolve(args, env, defaults, world_size / mp_size, &mut notes)?,
        optimizer: optimizer(args, defaults, &mut notes)?,
        trainable: trainable::resolve(args, &mut notes)?,
        best: best::resolve(args, (save, eval), &mut notes)?,
        save,
        save_total_limit: match args.save_total_limit {
            Some(0) => {
                return Err(out_of_range(
                    "--save-total-limit 0",
                    both(
                        "at least 1 checkpoint must be kept",
                        "至少要保留 1 个检查点",
                    ),
                ));
            }
            None if args.save_steps.is_none() && args.save_strategy.is_none() => {
                defaults.save_total_limit
            }
            limit => limit,
        },
        eval,
        logging: cadence(
            "logging",
            args.logging_strategy,
            args.logging_steps,
            Cadence::Steps(defaults.logging_steps),
            &mut notes,
        )?,
        trace_steps: trace_steps(args)?,
        report_to: args.report_to.unwrap_or(ReportTo::None),
        seed: args.seed.unwrap_or(defaults::SEED),
        resume: resume(args)?,
        resume_anyway: args.resume_anyway.unwrap_or(false),
        max_restarts: args.max_restarts.unwrap_or(0),
        elastic: elastic(args)?,
        inject: args.inject.clone(),
        source,
    }
    .with_zero(args.zero);
    config.check_collectives()?;
    config.check_prefetch_weights()?;
    config.check_optimizer_in_forward()?;
    config.check_pipeline()?;
    Ok(Resolved { config, notes })
}

/// Pipeline stages: the flag, or the environment's `MP_SIZE`.
fn mp_size(args: &Args, env: &Env, world_size: usize) -> Result<usize, Failure> {
    if args.mp_size.is_none() {
        usable(env, "MP_SIZE")?;
    }
    let stages = args.mp_size.or(env.mp_size).unwrap_or(1);
    if stages > 0 && world_size.is_multiple_of(stages) {
        return Ok(stages);
    }
    let why = text!(
        "pipeline stages must divide the number of ranks, which is {world_size}",
        "流水线段数必须整除 rank 数 {world_size}"
    );
    let next = world_size.div_ceil(stages.max(1)) * stages.max(1);
    let asked = match args.mp_size {
        Some(_) => format!("--mp-size {stages}"),
        None => format!("MP_SIZE={stages}"),
    };
    Err(out_of_range(&asked, &why).next(Text::literal(format_args!("--nproc {next}"))))
}

/// Refuses the value of one of SAT's variables if it is not a number above 0.
fn usable(env: &Env, name: &str) -> Result<(), Failure> {
    let mut unusable = env.unusable.iter();
    let Some((name, value)) = unusable.find(|(unusable, _)| *unusable == name) else {
        return Ok(());
    };
    let why = both("must be a whole number above 0", "必须是大于 0 的整数");
    let next = text!("unset {name}", "请取消设置 {name}");
    Err(out_of_range(&format!("{name}={value}"), why).next(next))
}

/// Groups of ranks that hold a copy each; one group of all is none.
fn shard_group(args: &Args, world_size: usize) -> Result<Option<usize>, Failure> {
    let Some(ranks) = args.shard_group else {
        return Ok(None);
    };
    let why = if ranks == 0 || !world_size.is_multiple_of(ranks) {
        text!(
            "it must divide the number of ranks, which is {world_size}",
            "它必须整除 rank 数 {world_size}"
        )
    } else if args.zero == Some(ZeroChoice::Stage(0)) && ranks < world_size {
        both("nothing is sharded at --zero 0", "--zero 0 时不做任何分片").into()
    } else {
        return Ok((ranks < world_size).then_some(ranks));
    };
    Err(out_of_range(&format!("--shard-group {ranks}"), &why))
}

fn trace_steps(args: &Args) -> Result<Option<std::ops::Range<u64>>, Failure> {
    let Some(text) = &args.trace_steps else {
        return Ok(None);
    };
    let steps = text.split_once("..").and_then(|(from, to)| {
        let number = |word: &str| word.trim().parse::<u64>().ok();
        Some(number(from)?..number(to)?)
    });
    let steps = steps.filter(|steps| steps.start > 0 && steps.start < steps.end);
    steps.map(Some).ok_or_else(|| {
        out_of_range(
            &format!("--trace-steps {text}"),
            both(
                "must be a half-open range of steps such as 3..5; steps count from 1",
                "必须是半开的步区间，例如 3..5；步从 1 开始计数",
            ),
        )
    })
}

fn elastic(args: &Args) -> Result<bool, Failure> {
    let elastic = args.elastic.unwrap_or(false);
    if elastic && args.max_restarts.unwrap_or(0) == 0 {
        return Err(Failure::usage(
            both(
                "--elastic needs --max-restarts",
                "--elastic 需要 --max-restarts",
            ),
            both(
                "it sets the number of ranks of a restarted run, but no restart is allowed",
                "它决定重新启动后的 rank 数，但当前不允许重新启动",
            ),
        )
        .next(both("add --max-restarts N", "请加上 --max-restarts N")));
    }
    Ok(elastic)
}

fn source(args: &Args, env: &Env) -> Result<Source, Failure> {
    let needs = |flag: &str, other: Text, why: Both| {
        Failure::usage(text!("{flag} needs {other}", "{flag} 需要 {other}"), why).next(text!(
            "add {other}, or omit {flag} to train the built-in demo",
            "请加上 {other}，或去掉 {flag} 以训练内置的演示"
        ))
    };
    let samples = |given: &Option<PathBuf>, names: &Option<String>| {
        data(
            given.as_deref(),
            names.as_deref(),
            args.dataset_dir.as_deref(),
        )
    };
    let data = samples(&args.data, &args.dataset)?;
    let eval_data = samples(&args.eval_data, &args.eval_dataset)?;
    if let Some(eval_data) = &eval_data {
        refuse_weights(eval_data)?;
    }
    match (&args.model, data) {
        (Some(model), Some(data)) => Ok(Source::Files {
            model: location(model, args.tokenizer.as_deref())?,
            data,
            eval_data,
            image_dir: args.image_dir.as_deref().map(absolute).transpose()?,
        }),
        (Some(_), None) => Err(needs(
            "--model",
            Text::literal("--data"),
            both("the model has no data to train on", "模型没有可训练的数据"),
        )),
        (None, Some(_)) => Err(needs(
            "--data",
            Text::literal("--model"),
            both("the demo has its own images", "演示有自己的图片"),
        )),
        (None, None) if eval_data.is_some() => Err(needs(
            "--eval-data",
            both("--model and --data", "--model 和 --data").into(),
            both("the demo has its own images", "演示有自己的图片"),
        )),
        (None, None) => Ok(Source::Demo {
            directory: crate::config::demo::directory_in(&env.cache_dir),
        }),
    }
}

/// Fails if held-out data has a weight: each sample is evaluated once.
///
/// # Errors
/// It does (exit 2).
pub(crate) fn refuse_weights(data: &Path) -> Result<(), Failure> {
    let parts = data_parts(data);
    let weighted = |part: &&PathBuf| !matches!(weight_of(part), Ok((_, 1.0)));
    let Some(part) = parts.iter().find(weighted) else {
        return Ok(());
    };
    Err(Failure::usage(
        text!(
            "the held-out data {} has a weight",
            "留出数据 {} 带有权重",
            part.display()
        ),
        both(
            "each held-out sample is evaluated once",
            "每个留出样本只评估一次",
        ),
    )
    .next(both("omit the weight", "请去掉权重")))
}

/// The files that are `given`, otherwise those that the `names` in a `dataset_info.json` of `directory` stand for.
fn data(
    given: Option<&Path>,
    names: Option<&str>,
    directory: Option<&Path>,
) -> Result<Option<PathBuf>, Failure> {
    let parts: Vec<PathBuf> = match (given, names) {
        (None, None) => return Ok(None),
        (Some(path), _) => data_parts(path),
        (None, Some(names)) => {
            let directory = directory.unwrap_or(Path::new(DATASET_DIR));
            let names = names
                .split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty());
            let exists = |name: &str| match weight_of(Path::new(name)) {
                Ok((path, _)) => path.exists(),
                Err(_) => false,
            };
            let entry = |name: &str| match exists(name) {
                true => PathBuf::from(name),
                false => directory.join(format!("{DATASET_INFO}#{name}")),
            };
            names.map(entry).collect()
        }
    };
    let parts: Result<Vec<String>, Failure> = parts
        .iter()
        .map(|part| Ok(absolute(part)?.display().to_string()))
        .collect();
    Ok(Some(parts?.join(",").into()))
}

/// Mode of the optimizer in backward. It runs on the CPU, so it is off if the states are on a GPU, which
/// updates them itself.
fn optimizer_in_backward(args: &Args, on_gpu: bool, notes: &mut Vec<Note>) -> OptimizerInBackward {
    let asked = args.optimizer_in_backward.unwrap_or_default();
    if !on_gpu || matches!(asked, OptimizerInBackward::Auto | OptimizerInBackward::Off) {
        return asked;
    }
    let reason = both(
        "states in GPU memory are updated there, after the pass",
        "显存中的状态在 GPU 上更新，在反向传播之后进行",
    );
    notes.push(note("--optimizer-in-backward", reason));
    OptimizerInBackward::Off
}

/// Memory tiers of the model states, as the flags ask for them. If a GPU has no kernel for the update, its
/// optimizer states are in host memory instead.
fn offload(args: &Args, device: Device, notes: &mut Vec<Note>) -> Result<Offload, Failure> {
    let asked = args.offload.clone().unwrap_or_default();
    let mut offload = asked.resolved(absolute)?;
    let stored = args.pure_bf16_weights.unwrap_or_default();
    let steps = device != Device::Cuda || stored == PureBf16Weights::Stochastic;
    if !steps && offload.optimizer == Tier::None {
        offload.optimizer = Tier::Cpu;
        let reason = both(
            "this update has no GPU kernel and runs on the host, so gradients and optimizer states must be in host memory",
            "这种更新没有 GPU 内核，在主机上进行，因此梯度和优化器状态必须在主机内存中",
        );
        notes.push(note("--offload none", reason));
    }
    Ok(offload)
}

/// One rank on each GPU, where there are any and nothing else is said.
fn world_size(args: &Args, env: &Env, gpus: &[RunGpu]) -> Result<usize, Failure> {
    let default = match gpus.len() {
        0 => defaults::NPROC,
        // More ranks make the demo slower.
        count if args.model.is_none() => count.min(defaults::NPROC),
        count => count,
    };
    let stages = args.mp_size.or(env.mp_size).unwrap_or(1).max(1);
    if args.nproc.is_none() {
        usable(env, "NUM_GPUS_PER_WORKER")?;
    }
    let default = env
        .gpus_per_worker
        .unwrap_or_else(|| default.next_multiple_of(stages));
    if args.nproc == Some(0) {
        return Err(out_of_range(
            "--nproc 0",
            both("at least 1 rank is needed", "至少需要 1 个 rank"),
        ));
    }
    if let Some(node) = &env.node {
        return match (args.nproc, &node.ranks) {
            (Some(asked), Some((name, told))) if asked != *told => Err(Failure::usage(
                text!(
                    "--nproc {asked} and {name}={told} contradict each other",
                    "--nproc {asked} 与 {name}={told} 互相矛盾"
                ),
                both(
                    "both set the number of ranks on each machine",
                    "两者都设定每台机器上的 rank 数",
                ),
            )
            .next(text!(
                "omit --nproc, or unset {name}",
                "请去掉 --nproc，或取消设置 {name}"
            ))),
            (asked, _) => Ok(node.share(asked.unwrap_or(default)).2),
        };
    }
    let started = env.rank.as_ref().map(|rank| rank.world_size);
    match (args.nproc, started) {
        (Some(asked), Some(world)) if asked != world => Err(Failure::usage(
            text!(
                "--nproc {asked} and the {world} ranks of the environment contradict each other",
                "--nproc {asked} 与环境中的 {world} 个 rank 互相矛盾"
            ),
            both(
                "the ranks were started by another launcher",
                "这些 rank 由另一个启动器启动",
            ),
        )
        .next(both("omit --nproc", "请去掉 --nproc"))
        .next(both(
            "--rank-is node, if each started process represents a machine",
            "如果每个已启动的进程代表一台机器，请使用 --rank-is node",
        ))),
        (asked, started) => Ok(started.or(asked).unwrap_or(default)),
    }
}

/// Ranks of this machine, where others have some too.
fn ranks_here(args: &Args, env: &Env, world_size: usize) -> Option<usize> {
    let here = match (&env.rank, &env.node) {
        (Some(rank), _) => rank.local_world_size,
        (_, Some(node)) => {
            let asked = args.nproc.or(env.gpus_per_worker);
            node.share(asked.unwrap_or(defaults::NPROC)).1
        }
        _ => world_size,
    };
    (here < world_size).then_some(here)
}

fn output(args: &Args, env: &Env, source: &Source) -> Result<(PathBuf, bool), Failure> {
    if let Some(directory) = &args.output {
        return Ok((absolute(directory)?, true));
    }
    // Continuing a checkpoint continues its run.
    if let Some(directory) = args
        .resume
        .as_deref()
        .filter(|text| !matches!(*text, "auto" | "false"))
    {
        let checkpoint = absolute(Path::new(directory))?;
        if let Some(run) = checkpoint.parent() {
            return Ok((run.to_path_buf(), true));
        }
    }
    if env.rank.is_some() || env.node.as_ref().is_some_and(|node| node.nodes > 1) {
        return Err(Failure::usage(
            both("--output is missing", "缺少 --output"),
            both(
                "ranks that another launcher starts need a common directory",
                "由其他启动器启动的 rank 需要一个共同的目录",
            ),
        )
        .next(both("add --output DIR", "请加上 --output DIR")));
    }
    let directory = Path::new("runs").join(format!("{}-{}", source.name(), timestamp(env.now)));
    Ok((absolute(&directory)?, false))
}

fn precision(args: &Args, defaults: &Defaults) -> Result<PrecisionChoice, Failure> {
    use PrecisionChoice as P;
    let contradiction = |one: String, other: String| {
        Err(Failure::usage(
            text!(
                "{one} and {other} contradict each other",
                "{one} 与 {other} 互相矛盾"
            ),
            both("both set the number format", "两者都设定数值格式"),
        )
        .next(both("keep one of them", "请只保留其中一个")))
    };
    let meant = match (args.bf16, args.fp16) {
        (Some(true), Some(true)) => {
            return contradiction("--bf16 true".into(), "--fp16 true".into());
        }
        (Some(true), _) => Some(("--bf16 true", P::Bf16)),
        (_, Some(true)) => Some(("--fp16 true", P::Fp16)),
        (Some(false), _) => Some(("--bf16 false", P::F32)),
        // Without fp16 any other format is meant.
        (None, Some(false) | None) => None,
    };
    match (args.precision, meant) {
        (Some(asked), Some((flag, meant))) => {
            // Pure bf16 is a kind of bf16, and --bf16 false says nothing about fp16.
            let agree = asked == meant
                || (asked == P::PureBf16 && meant == P::Bf16)
                || (asked == P::Fp16 && args.bf16 == Some(false));
            if !agree || (asked == P::Fp16 && args.fp16 == Some(false)) {
                let asked = format!("--precision {}", value_name(asked));
                return contradiction(asked, flag.to_owned());
            }
            Ok(asked)
        }
        (Some(P::Fp16), None) if args.fp16 == Some(false) => {
            contradiction("--precision fp16".into(), "--fp16 false".into())
        }
        (asked, meant) => Ok(asked
            .or(meant.map(|(_, meant)| meant))
            .unwrap_or(defaults.precision)),
    }
}

fn length(args: &Args, defaults: &Defaults, notes: &mut Vec<Note>) -> Result<Length, Failure> {
    if let Some(epochs) = args.num_train_epochs {
        positive("--num-train-epochs", epochs)?;
    }
    let steps = args.max_steps.filter(|steps| *steps >= 0);
    match (steps, args.num_train_epochs) {
        (Some(0), _) => Err(out_of_range(
            "--max-steps 0",
            both(
                "at least 1 step, or -1 to count epochs",
                "至少 1 步，或用 -1 表示按 epoch 计数",
            ),
        )),
        (Some(steps), epochs) => {
            if epochs.is_some() {
                notes.push(note(
                    "--num-train-epochs",
                    both("--max-steps is given", "已给出 --max-steps"),
                ));
            }
            Ok(Length::Steps(steps.unsigned_abs()))
        }
        (None, Some(epochs)) => Ok(Length::Epochs(epochs)),
        (None, None) => Ok(match defaults.max_steps {
            Some(steps) if args.max_steps.is_none() => Length::Steps(steps),
            _ => Length::Epochs(defaults.num_train_epochs),
        }),
    }
}

/// Rate at the end of a polynomial schedule, as in transformers.
const POLYNOMIAL_END: f64 = 1e-7;

/// Fails if the schedule does not take these arguments, or needs one that is not given.
fn schedule_takes(
    scheduler: Scheduler,
    kwargs: &SchedulerKwargs,
    learning_rate: f64,
) -> Result<(), Failure> {
    if let Some(name) = kwargs.stranger(scheduler) {
        let takes = match scheduler.arguments() {
            [] => both("it takes none", "它不接受参数").into(),
            names => text!("it takes {}", "它接受 {}", names.join(", ")),
        };
        return Err(Failure::usage(
            text!(
                "--lr-scheduler-kwargs {name} has no meaning for --lr-scheduler-type {}",
                "--lr-scheduler-kwargs {name} 对 --lr-scheduler-type {} 没有意义",
                value_name(scheduler)
            ),
            takes,
        )
        .next(both(
            "omit it, or choose another schedule",
            "请去掉它，或选择其他调度",
        )));
    }
    let end = kwargs.curve.lr_end.unwrap_or(POLYNOMIAL_END);
    if scheduler == Scheduler::Polynomial && end >= learning_rate {
        return Err(out_of_range(
            &format!("--lr-scheduler-kwargs lr_end={end:e}"),
            text!(
                "it must be below the learning rate, {learning_rate:e}",
                "必须低于学习率 {learning_rate:e}"
            ),
        )
        .next(both(
            "--lr-scheduler-kwargs lr_end=0",
            "--lr-scheduler-kwargs lr_end=0",
        )));
    }
    let lowest = [kwargs.curve.min_lr, kwargs.curve.min_lr_rate];
    if scheduler != Scheduler::CosineWithMinLr || lowest.iter().flatten().count() == 1 {
        return Ok(());
    }
    Err(Failure::usage(
        both(
            "--lr-scheduler-type cosine_with_min_lr needs one lowest rate",
            "--lr-scheduler-type cosine_with_min_lr 需要一个最低学习率",
        ),
        both(
            "min_lr is a rate, min_lr_rate its share of the learning rate; one of the two decides",
            "min_lr 是学习率，min_lr_rate 是它占学习率的比例；由其中一个决定",
        ),
    )
    .next(both(
        "--lr-scheduler-kwargs min_lr_rate=0.1",
        "--lr-scheduler-kwargs min_lr_rate=0.1",
    )))
}

fn optimizer(
    args: &Args,
    defaults: &Defaults,
    notes: &mut Vec<Note>,
) -> Result<OptimizerConfig, Failure> {
    let scheduler = args.lr_scheduler_type.unwrap_or(defaults.scheduler);
    let kwargs = args.lr_scheduler_kwargs.unwrap_or_default();
    let learning_rate = args
        .learning_rate
        .unwrap_or(match trainable::has_adapters(args) {
            true => defaults.adapter_learning_rate,
            false => defaults.learning_rate,
        });
    schedule_takes(scheduler, &kwargs, learning_rate)?;
    let optimizer = OptimizerConfig {
        learning_rate,
        lr_scale: args.lr_scale.unwrap_or(LrScale::None),
        scheduler,
        scheduler_kwargs: kwargs,
        warmup: warmup(args, defaults, notes),
        weight_decay: args.weight_decay.unwrap_or(defaults.weight_decay),
        no_decay: args.no_decay.clone(),
        adam_beta1: args.adam_beta1.unwrap_or(defaults::ADAM_BETA1),
        adam_beta2: args.adam_beta2.unwrap_or(defaults::ADAM_BETA2),
        adam_epsilon: args.adam_epsilon.unwrap_or(defaults::ADAM_EPSILON),
        max_grad_norm: Some(args.max_grad_norm.unwrap_or(defaults::MAX_GRAD_NORM))
            .filter(|norm| *norm != 0.0),
    };
    positive("--learning-rate", optimizer.learning_rate)?;
    positive("--adam-epsilon", optimizer.adam_epsilon)?;
    // The optimizer computes in f32.
    let (least, most) = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
    let norm = optimizer.max_grad_norm.unwrap_or(0.0);
    for (flag, value, least) in [
        ("--learning-rate", optimizer.learning_rate, 0.0),
        ("--adam-epsilon", optimizer.adam_epsilon, least),
        ("--weight-decay", optimizer.weight_decay, 0.0),
        ("--max-grad-norm", norm, 0.0),
    ] {
        within(flag, value, least, most)?;
    }
    within(
        "--adam-beta1",
        optimizer.adam_beta1,
        0.0,
        1.0 - f64::EPSILON,
    )?;
    within(
        "--adam-beta2",
        optimizer.adam_beta2,
        0.0,
        1.0 - f64::EPSILON,
    )?;
    if let Warmup::Ratio(ratio) = optimizer.warmup {
        within("--warmup-ratio", ratio, 0.0, 1.0)?;
    }
    Ok(optimizer)
}

/// Hugging Face: steps above zero come before the ratio.
fn warmup(args: &Args, defaults: &Defaults, notes: &mut Vec<Note>) -> Warmup {
    let steps = args.warmup_steps.map(|every| match every {
        Every::Steps(steps) => Warmup::Steps(steps),
        Every::Share(share) => Warmup::Ratio(share),
    });
    match (steps, args.warmup_ratio) {
        (Some(steps), Some(_)) if steps != Warmup::Steps(0) => {
            notes.push(note(
                "--warmup-ratio",
                both("--warmup-steps is given", "已给出 --warmup-steps"),
            ));
            steps
        }
        (_, Some(ratio)) => Warmup::Ratio(ratio),
        (Some(steps), None) => steps,
        (None, None) => defaults.warmup,
    }
}

fn eval(args: &Args, source: &Source, notes: &mut Vec<Note>) -> Result<Cadence, Failure> {
    let has_data = !matches!(
        source,
        Source::Files {
            eval_data: None,
            ..
        }
    );
    let cadence = cadence(
        "eval",
        args.eval_strategy,
        // As Hugging Face: a strategy without a number takes that of logging.
        args.eval_steps.or(match args.eval_strategy {
            Some(Strategy::Steps) => args.logging_steps,
            _ => None,
        }),
        Cadence::End,
        notes,
    )?;
    if !has_data
        && (args.eval_steps.is_some()
            || matches!(args.eval_strategy, Some(Strategy::Steps | Strategy::Epoch)))
    {
        notes.push(note(
            "--eval-steps/--eval-strategy",
            both("no --eval-data is given", "没有给出 --eval-data"),
        ));
    }
    Ok(if has_data { cadence } else { Cadence::Never })
}

fn cadence(
    name: &str,
    strategy: Option<Strategy>,
    steps: Option<Every>,
    default: Cadence,
    notes: &mut Vec<Note>,
) -> Result<Cadence, Failure> {
    let flag = format!("--{name}-steps");
    if steps == Some(Every::Steps(0)) {
        return Err(out_of_range(
            &format!("{flag} 0"),
            both("must be at least 1", "必须至少为 1"),
        )
        .next(Text::literal(format_args!("--{name}-strategy no"))));
    }
    if steps.is_some() && matches!(strategy, Some(Strategy::No | Strategy::Epoch)) {
        notes.push(note(
            &flag,
            text!(
                "--{name}-strategy takes precedence",
                "以 --{name}-strategy 为准"
            ),
        ));
    }
    Ok(match (strategy, steps) {
        (Some(Strategy::No), _) => Cadence::Never,
        (Some(Strategy::Epoch), _) => Cadence::Epoch,
        (Some(Strategy::Steps), None) => match default {
            Cadence::Steps(_) => default,
            // As Hugging Face: 500 where only the strategy is named.
            _ => Cadence::Steps(500),
        },
        (_, Some(every)) => every.into(),
        (None, None) => default,
    })
}

fn resume(args: &Args) -> Result<Resume, Failure> {
    match args.resume.as_deref() {
        None | Some("false") => Ok(Resume::No),
        Some("auto") if args.output.is_none() => Err(Failure::usage(
            both(
                "--resume auto needs --output",
                "--resume auto 需要 --output",
            ),
            both(
                "it continues from the latest checkpoint in that directory",
                "它从该目录中最近的检查点继续",
            ),
        )
        .next(both(
            "add --output DIR, or give the run itself: --resume DIR",
            "请加上 --output DIR，或直接指定那次运行：--resume DIR",
        ))),
        Some("auto") => Ok(Resume::Latest),
        Some(path) => Ok(Resume::From(absolute(Path::new(path))?)),
    }
}

pub(super) fn note(flag: &str, reason: impl Into<Text>) -> Note {
    Note {
        flag: flag.to_string(),
        reason: reason.into(),
    }
}

pub(super) fn out_of_range(what: &str, why: impl Into<Text>) -> Failure {
    Failure::usage(text!("{what} is out of range", "{what} 超出范围"), why).next(both(
        "`launcher --help-all` lists every flag with the values it takes",
        "`launcher --help-all` 会列出每个参数及其可取的值",
    ))
}

pub(super) fn positive(flag: &str, value: f64) -> Result<(), Failure> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(out_of_range(
        &format!("{flag} {value}"),
        both("must be a number above 0", "必须是大于 0 的数"),
    ))
}

pub(super) fn within(flag: &str, value: f64, low: f64, high: f64) -> Result<(), Failure> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    let range = if high == f64::MAX {
        text!("at least {low}", "至少为 {low}")
    } else if high > 1.0 {
        text!("from {low:e} to {high:e}", "在 {low:e} 到 {high:e} 之间")
    } else {
        text!("in {low}..1", "在 {low}..1 之内")
    };
    Err(out_of_range(
        &format!("{flag} {value}"),
        text!("must be {range}", "必须{range}"),
    ))
}

/// The location of the model with its tokenizer, of absolute paths.
fn location(model: &Path, tokenizer: Option<&Path>) -> Result<PathBuf, Failure> {
    let model = places::with_tokenizer(model, tokenizer);
    let all: Result<Vec<_>, _> = places::directories(&model)
        .iter()
        .map(|dir| absolute(dir))
        .collect();
    Ok(places::joined(&all?))
}

/// An absolute path. A shell replaces `~` only at the beginning of a word, and nothing replaces it in a file.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    let home = std::env::home_dir();
    let in_home = path.strip_prefix("~").ok().zip(home);
    let path = in_home.map_or_else(|| path.to_owned(), |(rest, home)| home.join(rest));
    std::path::absolute(&path).map_err(|error| {
        Failure::usage(
            text!("bad path '{}'", "路径无效 '{}'", path.display()),
            Text::literal(&error),
        )
    })
}

/// `YYYYmmdd-HHMMSS` in UTC.
fn timestamp(now: SystemTime) -> String {
    let seconds = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (year, month, day) = civil_from_days(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// Gregorian date of a day since 1970-01-01, counting years from March so that the leap day is last.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    (400 * era + year_of_era + u64::from(month <= 2), month, day)
}

impl RunConfig {
    /// This configuration as a full command line: (flag without `--`, value) for every flag that has a value.
    /// [`resolve`] turns these flags into this configuration again.
    pub fn to_flags(&self) -> Vec<(&'static str, String)> {
        let mut flags: Vec<(&'static str, String)> = Vec::new();
        if let Source::Files {
            model,
            data,
            eval_data,
            image_dir,
        } = &self.source
        {
            let images = image_dir.iter();
            flags.extend(images.map(|path| ("image-dir", path.display().to_string())));
            flags.push(("model", model.display().to_string()));
            flags.push(("data", data.display().to_string()));
            flags.extend(
                eval_data
                    .iter()
                    .map(|file| ("eval-data", file.display().to_string())),
            );
        }
        flags.push(("output", self.output.display().to_string()));
        flags.push(("init", value_name(self.init)));
        flags.push(("zero", self.zero_choice().to_string()));
        flags.extend(
            self.shard_group
                .map(|ranks| ("shard-group", ranks.to_string())),
        );
        flags.push(("offload", self.offload.to_string()));
        flags.push(("nvme-io", value_name(self.nvme_io)));
        flags.push((
            "optimizer-in-backward",
            self.optimizer_in_backward.to_string(),
        ));
        flags.push((
            "optimizer-in-forward",
            value_name(self.optimizer_in_forward),
        ));
        flags.push(("nproc", self.ranks_here().to_string()));
        if self.mp_size > 1 {
            flags.push(("mp-size", self.mp_size.to_string()));
        }
        flags.extend(self.mp_split.as_ref().map(|split| {
            let counts: Vec<String> = split.iter().map(u32::to_string).collect();
            ("mp-split", counts.join(","))
        }));
        flags.extend(
            self.bind_cores
                .as_ref()
                .map(|cores| ("bind-cores", cores.to_string())),
        );
        flags.extend(self.cpu_math.map(|math| ("cpu-math", value_name(math))));
        flags.push(("comm-timeout", self.comm_timeout_seconds.to_string()));
        flags.push(("device", self.device.name().to_string()));
        flags.push(("cuda-graph", value_name(self.cuda_graph)));
        flags.push(("verify-gpu", value_name(self.verify_gpu)));
        flags.push(("prefetch-weights", value_name(self.prefetch_weights)));
        flags.push(("collectives", value_name(self.collectives)));
        flags.push(("precision", value_name(self.precision)));
        flags.extend(self.numbers.flags(self.precision));
        let towers = self.checkpoint_activations.to_string();
        flags.push(("checkpoint-activations", towers));
        let layers = self.checkpoint_num_layers.to_string();
        flags.push(("checkpoint-num-layers", layers));
        flags.extend(
            self.mlp_tile_tokens
                .map(|tokens| ("mlp-tile-tokens", tokens.to_string())),
        );
        flags.extend(
            self.host_memory_limit
                .map(|bytes| ("host-memory-limit", bytes.to_string())),
        );
        flags.extend(
            self.host_reserve
                .map(|bytes| ("host-reserve", bytes.to_string())),
        );
        flags.extend(
            self.device_memory_limit
                .map(|bytes| ("device-memory-limit", bytes.to_string())),
        );
        match self.length {
            Length::Steps(steps) => flags.push(("max-steps", steps.to_string())),
            Length::Epochs(epochs) => flags.push(("num-train-epochs", epochs.to_string())),
        }
        self.push_training_flags(&mut flags);
        self.push_report_flags(&mut flags);
        flags
    }

    fn push_training_flags(&self, flags: &mut Vec<(&'static str, String)>) {
        let (batch, optimizer) = (&self.batch, &self.optimizer);
        if batch.find_batch {
            flags.push(("find-batch", true.to_string()));
        } else if let Some(tokens) = batch.tokens_per_batch {
            flags.push(("tokens-per-batch", tokens.to_string()));
        } else {
            flags.push(("per-device-train-batch-size", batch.micro_batch.to_string()));
        }
        flags.extend(
            batch
                .global_batch
                .map(|n| ("global-batch-size", n.to_string())),
        );
        flags.extend(batch.limit.map(|n| ("limit", n.to_string())));
        flags.push(("data-workers", batch.data_workers.to_string()));
        flags.push(("longest-first", batch.worst_first.to_string()));
        flags.push(("per-device-eval-batch-size", batch.eval_batch.to_string()));
        flags.push((
            "gradient-accumulation-steps",
            batch.accumulation_steps.to_string(),
        ));
        flags.push(("model-max-length", batch.model_max_length.to_string()));
        flags.push(("max-slice-nums", batch.max_slice_nums.to_string()));
        for (flag, area) in [
            ("image-max-pixels", batch.image_max_pixels),
            ("image-min-pixels", batch.image_min_pixels),
        ] {
            flags.extend(area.map(|area| (flag, area.to_string())));
        }
        flags.push(("skip-bad-samples", batch.skip_bad_samples.to_string()));
        flags.push(("learning-rate", format!("{:e}", optimizer.learning_rate)));
        flags.push(("lr-scale", value_name(optimizer.lr_scale)));
        flags.push(("lr-scheduler-type", value_name(optimizer.scheduler)));
        let kwargs = optimizer.scheduler_kwargs.typed(optimizer.scheduler);
        flags.extend(kwargs.map(|kwargs| ("lr-scheduler-kwargs", kwargs)));
        match optimizer.warmup {
            Warmup::Steps(steps) => flags.push(("warmup-steps", steps.to_string())),
            Warmup::Ratio(ratio) => flags.push(("warmup-ratio", ratio.to_string())),
        }
        flags.push(("weight-decay", optimizer.weight_decay.to_string()));
        flags.extend(optimizer.no_decay.clone().map(|parts| ("no-decay", parts)));
        flags.push(("adam-beta1", optimizer.adam_beta1.to_string()));
        flags.push(("adam-beta2", optimizer.adam_beta2.to_string()));
        flags.push(("adam-epsilon", format!("{:e}", optimizer.adam_epsilon)));
        flags.push((
            "max-grad-norm",
            optimizer.max_grad_norm.unwrap_or(0.0).to_string(),
        ));
        flags.push(("seed", self.seed.to_string()));
        flags.push(("use-lora", self.trainable.lora.is_some().to_string()));
        if let Some(lora) = &self.trainable.lora {
            let adapter = lora.adapter.as_ref();
            flags.extend(adapter.map(|dir| ("adapter", dir.display().to_string())));
            flags.push(("lora-rank", lora.lora_rank.to_string()));
            flags.push(("lora-alpha", lora.lora_alpha.to_string()));
            if lora.use_rslora {
                flags.push(("use-rslora", true.to_string()));
            }
            let ratio = lora.loraplus_lr_ratio;
            flags.extend(ratio.map(|ratio| ("loraplus-lr-ratio", ratio.to_string())));
            flags.push(("lora-dropout", lora.lora_dropout.to_string()));
            flags.extend(
                lora.target_modules
                    .clone()
                    .map(|t| ("lora-target-modules", t)),
            );
            flags.push(("lora-per-projection", lora.per_projection.to_string()));
            let layers = lora.layers.as_ref();
            flags.extend(layers.map(|l| ("lora-layers", format!("{}..{}", l.start, l.end))));
            let modules = lora
                .modules_to_save
                .as_deref()
                .map(|modules| match modules {
                    [] => "none".to_owned(),
                    modules => modules.join(","),
                });
            flags.extend(modules.map(|modules| ("modules-to-save", modules)));
        }
        let rules = &self.samples;
        flags.push(("data-format", value_name(rules.data_format)));
        flags.push(("template", value_name(rules.template)));
        flags.push(("train-on-turn-end", rules.train_on_turn_end.to_string()));
        flags.push(("text-without-cross", rules.text_without_cross.to_string()));
        flags.push(("exif-rotation", value_name(rules.exif_rotation)));
        flags.push(("ptuning-tokens", self.trainable.ptuning_tokens.to_string()));
        flags.push(("rope-precision", value_name(self.rope_precision)));
        if let Some(quantize) = &self.quantize {
            flags.push(("quantize", value_name(quantize.format)));
            if quantize.double {
                flags.push(("quantize-double", true.to_string()));
            }
            let modules = quantize.modules.clone();
            flags.extend(modules.map(|words| ("quantize-modules", words)));
        }
        let lists = [
            ("train", &self.trainable.train),
            ("freeze", &self.trainable.freeze),
        ];
        for (flag, words) in lists {
            flags.extend(words.clone().map(|words| (flag, words)));
        }
        if !self.trainable.learning_rates.is_empty() {
            let rates = self.trainable.learning_rates.iter();
            let rates: Vec<String> = rates
                .map(|(part, rate)| format!("{part}={rate:e}"))
                .collect();
            flags.push(("lr", rates.join(",")));
        }
        flags.push(("tune-vision", self.trainable.tune_vision.to_string()));
        flags.push(("tune-llm", self.trainable.tune_llm.to_string()));
    }

    fn push_report_flags(&self, flags: &mut Vec<(&'static str, String)>) {
        for (strategy, steps, cadence) in [
            ("save-strategy", "save-steps", self.save),
            ("eval-strategy", "eval-steps", self.eval),
            ("logging-strategy", "logging-steps", self.logging),
        ] {
            match cadence {
                Cadence::Never => flags.push((strategy, "no".to_string())),
                Cadence::Epoch => flags.push((strategy, "epoch".to_string())),
                Cadence::Steps(every) => flags.push((steps, every.to_string())),
                Cadence::Share(share) => flags.push((steps, share.to_string())),
                // The default of evaluating, and of saving the demo.
                Cadence::End => {}
            }
        }
        let steps = self.trace_steps.as_ref();
        flags.extend(steps.map(|s| ("trace-steps", format!("{}..{}", s.start, s.end))));
        flags.extend(
            self.save_total_limit
                .map(|limit| ("save-total-limit", limit.to_string())),
        );
        if let Some(best) = &self.best {
            flags.push(("load-best-model-at-end", best.load.to_string()));
            flags.push(("metric-for-best-model", value_name(best.metric)));
            flags.push(("greater-is-better", best.greater_is_better.to_string()));
            let patience = best
                .patience
                .map(|n| ("early-stopping-patience", n.to_string()));
            flags.extend(patience);
        }
        flags.push(("report-to", value_name(self.report_to)));
        flags.push(("max-restarts", self.max_restarts.to_string()));
        flags.push(("elastic", self.elastic.to_string()));
        match &self.resume {
            Resume::No => {}
            Resume::Latest => flags.push(("resume", "auto".to_string())),
            Resume::From(path) => flags.push(("resume", path.display().to_string())),
        }
        if self.resume_anyway {
            flags.push(("resume-anyway", "true".to_string()));
        }
        flags.extend(
            self.inject
                .iter()
                .map(|fault| ("inject", fault.to_string())),
        );
    }
}

#[cfg(test)]
mod tests;
