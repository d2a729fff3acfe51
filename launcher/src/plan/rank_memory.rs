//! Memory of a rank from dry runs, and the output lines about it.

use crate::config::{Cadence, RunConfig, RunPlan};
use crate::data::answers::Question;
use crate::data::check::{self, encode_options};
use crate::data::{self, SampleSet};
use crate::error::Failure;
use crate::lang::{Text, both, text};
use crate::memory::{PARTS, Part, Phase, RankMemory};
use crate::plan::{Fixed, HeldOut, Machine, MemoryCheck, Work, backward_share, dry_run};
use crate::ui::{Event, PlanEvent, PlanPart};
use crate::units::bytes;
use engine::{HostRegistered, Plan, Tier};
use kernels::Tag;
use models::Processor;
use models::VisionLanguageModel;
use models::data::{EncodedSample, data_files};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Memory of a rank's process outside the memory pools that does not depend on the phase.
pub(crate) fn fixed(config: &RunPlan, model: &dyn VisionLanguageModel) -> Fixed {
    let (train, eval) = (config.data_file(), config.eval_file());
    let data: Vec<PathBuf> = std::iter::once(train)
        .chain(eval)
        // A prompt is in no file.
        .filter(|path| !path.as_os_str().is_empty())
        .flat_map(|path| data_files(&path))
        .collect();
    let data: Vec<&Path> = data.iter().map(PathBuf::as_path).collect();
    let images = config.found().image_bytes;
    Fixed::of(&config.model_dir(), vocabulary(model), &data, images)
}

/// Number of tokens in the model's vocabulary.
fn vocabulary(model: &dyn VisionLanguageModel) -> u64 {
    let head = &model.spec().params[model.head().weight.index()];
    head.shape.dims()[0] as u64
}

/// Memory of a rank that trains on micro-batch `samples` and does not evaluate.
pub(crate) fn training_memory(
    config: &RunPlan,
    model: &dyn VisionLanguageModel,
    plan: &Arc<Plan>,
    samples: &[EncodedSample],
) -> Result<RankMemory, Failure> {
    let work = Work {
        train: samples,
        held_out: None,
        fixed: fixed(config, model),
    };
    dry_run(config, model, plan, &work)
}

/// Memory of a rank over the whole run, and the batch size for generating answers. Generation must not need more
/// device memory than training, so that batch size is halved until it does not.
pub(crate) fn whole_memory(
    config: &RunPlan,
    model: &dyn VisionLanguageModel,
    processor: &dyn Processor,
    plan: &Arc<Plan>,
    samples: &[EncodedSample],
    held_out: Option<&SampleSet>,
) -> Result<(RankMemory, usize), Failure> {
    let mut eval_batch = config.batch.eval_batch;
    let Some(set) = held_out.filter(|_| config.eval != Cadence::Never) else {
        return Ok((training_memory(config, model, plan, samples)?, eval_batch));
    };
    let options = encode_options(config);
    let order = set.by_size();
    let longest = data::encode_in_order(&set.samples, &set.images, processor, &options, &order, 1)?;
    loop {
        let questions = order.iter().take(eval_batch).map(|i| {
            let sample = &set.samples[*i];
            Question::new(processor, sample, &set.images, *i, &options)
        });
        let questions: Vec<Question> = questions.collect::<Result<_, _>>()?;
        let work = Work {
            train: samples,
            held_out: Some(HeldOut {
                longest: &longest,
                prompts: questions.iter().map(Question::prompt).collect(),
            }),
            fixed: fixed(config, model),
        };
        let memory = dry_run(config, model, plan, &work)?;
        let training = memory.device_in(&[Phase::Forward, Phase::Backward, Phase::Step]);
        if memory.device_in(&[Phase::Eval]) <= training || eval_batch <= 1 {
            return Ok((memory, eval_batch));
        }
        eval_batch /= 2;
    }
}

/// Line that says that the batch of generated answers is smaller than requested, if it is.
pub(crate) fn eval_line(asked: usize, eval_batch: usize) -> Option<Event> {
    (eval_batch < asked).then(|| Event::Info {
        label: both("eval", "评估").into(),
        text: text!("answers are generated in batches of {eval_batch}, not {asked}: larger batches need more memory than training", "生成回答时批大小为 {eval_batch}，而不是 {asked}：更大的批次需要的内存超过训练"
        ),
    })
}

/// Memory of a rank that trains on the largest samples of `train`.
pub(crate) fn memory_on(
    config: &RunPlan,
    model: &dyn VisionLanguageModel,
    processor: &dyn Processor,
    plan: &Arc<Plan>,
    train: &SampleSet,
) -> Result<RankMemory, Failure> {
    let worst = check::largest(train, config, processor)?;
    training_memory(config, model, plan, &worst)
}

/// Peak bytes of activations in a rank's spill file; 0 if activations are not spilled.
pub(crate) fn spilled_activations(memory: &RankMemory) -> u64 {
    let phases = memory.phases.values();
    let bytes = phases.filter_map(|phase| phase.nvme.get(Tag::Activations.name()));
    bytes.copied().max().unwrap_or(0)
}

/// Comparison of the planned memory of a rank with the machine on which this process runs.
pub(crate) fn fit(config: &RunConfig, memory: &RankMemory) -> MemoryCheck {
    MemoryCheck::new(config, memory, Machine::here())
}

/// Line about the GPU memory of each rank.
pub(crate) fn device_line(run: &RunPlan, memory: &RankMemory, fit: &MemoryCheck) -> Event {
    let limit = fit.device_limit().map(bytes).unwrap_or_default();
    Event::Info {
        label: Text::default(),
        text: text!(
            "GPU memory per rank: {} by the plan, {} reserved at the start, {} for CUDA itself, of {limit}",
            "每个 rank 的显存：计划 {}，启动时预留 {}，CUDA 自身 {}，上限 {limit}",
            bytes(memory.peak.device),
            bytes(run.found().arena_bytes),
            bytes(fit.machine.device_context_bytes()),
        ),
    }
}

/// Line about host-to-device copies of weights; `None` if nothing is prefetched. `tried` is the check of a prefetch
/// that did not fit.
pub(crate) fn upload_line(plan: &Plan, tried: Option<&MemoryCheck>) -> Option<Event> {
    let text = match tried {
        Some(tried) => text!(
            "are copied when they are used; a prefetch of one unit needs {}",
            "在使用时才复制；预取一个单元需要 {}",
            tried.needs()
        ),
        None if plan.prefetch_weights() => both(
            "are prefetched one unit ahead, while the previous unit computes",
            "提前一个单元预取，与前一个单元的计算同时进行",
        )
        .into(),
        None => return None,
    };
    Some(Event::Info {
        label: both("weights", "权重").into(),
        text,
    })
}

/// Line about frozen weights outside device memory that several ranks use; `None` without them.
pub(crate) fn shared_line(plan: &Plan) -> Option<Event> {
    let (config, ranks) = (plan.config(), plan.world_size());
    let frozen = plan.spec().params.iter().any(|param| !param.trainable);
    let text = match (config.offload.param, plan.shares_frozen()) {
        (Tier::Host, true) => text!(
            "frozen weights: one copy in shared memory, {}, which all {ranks} ranks read",
            "冻结的权重：共享内存中只有一份，{}，由全部 {ranks} 个 rank 读取",
            bytes(plan.shared_bytes())
        ),
        (Tier::Nvme, true) => text!(
            "frozen weights: one copy on disk, divided among {ranks} ranks",
            "冻结的权重：磁盘上只有一份，由 {ranks} 个 rank 分担"
        ),
        (Tier::Host | Tier::Nvme, false) if frozen && plan.shards() < ranks => {
            match config.stage.shards_parameters() {
                true => text!(
                    "frozen weights: with --shard-group, each group of {} ranks stores one copy and gathers it",
                    "冻结的权重：使用 --shard-group 时，每组 {} 个 rank 各存一份并自行收集",
                    plan.shards()
                ),
                false => both(
                    "frozen weights: with --shard-group, each rank stores a copy",
                    "冻结的权重：使用 --shard-group 时，每个 rank 各存一份",
                )
                .into(),
            }
        }
        (Tier::Host | Tier::Nvme, false) if frozen && ranks > 1 && !config.shares_host_memory => {
            both(
                "frozen weights: ranks on several machines do not share one copy",
                "冻结的权重：位于多台机器上的 rank 不共享同一份",
            )
            .into()
        }
        _ => return None,
    };
    Some(Event::Info {
        label: both("weights", "权重").into(),
        text,
    })
}

/// Line about frozen weights that leases read in the maps of their files; `None` without them.
pub(crate) fn mapped_line(plan: &Plan) -> Option<Event> {
    let size = plan.config().precision.weight_dtype().size_bytes();
    let params = plan.mapped_params();
    let elems: usize = params
        .map(|id| plan.spec().params[id.index()].shape.elems())
        .sum();
    (elems > 0).then(|| Event::Info {
        label: both("weights", "权重").into(),
        text: text!(
            "frozen weights: {} are read in the mapped weight files, without a copy",
            "冻结的权重：{} 直接从映射的权重文件读取，不另存副本",
            bytes((elems * size) as u64)
        ),
    })
}

/// Line about frozen weights that the GPU's driver has page-locked, or refused; `None` without a GPU that reads them.
pub(crate) fn registered_line(registered: &HostRegistered) -> Option<Event> {
    let text = match &registered.refused {
        Some(reason) => text!(
            "frozen weights: copied to the GPU through pinned memory; the driver registered {} of them in place ({reason})",
            "冻结的权重：经锁页内存复制到 GPU；驱动只就地注册了 {}（{reason}）",
            bytes(registered.bytes)
        ),
        None if registered.bytes > 0 => text!(
            "frozen weights: the driver registered {} in place, from where they are copied to the GPU",
            "冻结的权重：驱动就地注册了 {}，从原处复制到 GPU",
            bytes(registered.bytes)
        ),
        None => return None,
    };
    Some(Event::Info {
        label: both("weights", "权重").into(),
        text,
    })
}

/// Planned bytes of each part of a rank's memory: the figures of the plan's line, its table, refusals and reports.
pub(crate) fn parts(memory: &RankMemory) -> Vec<PlanPart> {
    PARTS.iter().map(|part| planned(memory, part)).collect()
}

/// Planned bytes of one part of a rank's memory.
pub(crate) fn planned(memory: &RankMemory, part: &Part) -> PlanPart {
    let [device_bytes, host_bytes, _] = memory.of_part(part);
    PlanPart {
        name: part.name.to_owned(),
        device_bytes,
        host_bytes,
    }
}

/// Event that shows the memory plan: planned bytes of one rank by kind, and the machine's host memory.
pub(crate) fn plan_event(
    config: &RunConfig,
    plan: &Plan,
    memory: &RankMemory,
    fit: &MemoryCheck,
) -> PlanEvent {
    let (params, trainable) = plan.spec().elems();
    PlanEvent {
        model: config.name(),
        params: params as u64,
        trainable: trainable as u64,
        ranks: config.world_size,
        device: config.device.name().into(),
        shard_group: config.shard_groups(),
        stage: config.zero,
        precision: plan.config().precision.name().into(),
        offload: config.offload.to_string(),
        per_rank: parts(memory),
        host_total_bytes: fit.machine.host_total_bytes,
        host_free_bytes: fit.machine.host_free_bytes,
        host_need_bytes: fit.need.host,
        host_reserve_bytes: fit.machine.host_reserve_bytes,
        host_limit_bytes: fit.machine.host_limit_bytes,
        host_fits: !fit.exceeds_host(),
        backward_share: backward_share(plan),
        memory: Some(Box::new(memory.clone())),
    }
}
