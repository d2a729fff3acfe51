//! Conversion of typed library errors to failures: cause, evidence, next steps.

use crate::error::parts::part_of;
use crate::error::threads::no_thread;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Both, Text, both, text};
use crate::memory::kind_name;
use crate::units::bytes;
use engine::EngineError;
use engine::checkpoint::CheckpointError;
use engine::comm::CommError;
use engine::spill::SpillError;
use kernels::{DType, KernelError, Tag};
use models::adapter::AdapterError;
use models::{ModelError, WeightError};
use std::error::Error;
use std::path::Path;

use crate::error::system::system_remedy;

pub(crate) use crate::error::chain;
pub(crate) use crate::error::model_files::{check_directory, moved_base, unusable};

/// Operations of NCCL before ranks wait for each other.
const ASKING: [Both; 2] = [
    both("ask NCCL for its version", "查询 NCCL 的版本"),
    both("name an NCCL group", "命名 NCCL 组"),
];
/// Operation of NCCL in which ranks wait for each other.
const JOINING: Both = both("join the NCCL group", "加入 NCCL 组");
/// Next step after a lack of memory: a rank makes no plans itself, the supervisor adds those that fit.
const OTHER_PLANS: Both = both(
    "`launcher plan` with the same flags names settings that fit",
    "用相同的参数运行 `launcher plan`，可得到放得下的设置",
);

pub(crate) fn engine(doing: impl Into<Text>, error: &EngineError) -> Failure {
    let doing = doing.into();
    match error {
        EngineError::Comm(comm_error) => comm(comm_error),
        EngineError::Checkpoint(inner) => checkpoint(doing, inner),
        EngineError::Kernel(inner) => kernel(doing, inner),
        EngineError::Map { .. } => host_memory(doing, chain(error)),
        EngineError::Spill(inner) => spill(doing, inner),
        EngineError::CheckpointMismatch { missing, extra } => mismatch(&doing, missing, extra),
        EngineError::Load { source, .. } => match source.downcast_ref::<WeightError>() {
            Some(weights) => self::weights(weights),
            None => Failure::new(
                ErrorCode::ModelFiles,
                text!("cannot {doing}", "无法{doing}"),
                chain(error),
            ),
        },
        EngineError::LibraryDiffers { .. } => Failure::new(
            ErrorCode::Rendezvous,
            both("the ranks have different versions of NCCL", "各 rank 的 NCCL 版本不同"),
            chain(error),
        )
        .next(both("install one version on all machines, or omit --collectives nccl", "请在所有机器上安装同一版本，或去掉 --collectives nccl")),
        EngineError::NoPeerAccess { refusals } => Failure::new(
            ErrorCode::Cuda,
            both("the GPUs of the ranks cannot read each other's memory, which --collectives ipc needs", "各 rank 的 GPU 无法互相读取显存，而 --collectives ipc 需要这样做"),
            both("the driver or the container of a rank refuses it", "某个 rank 的驱动或容器拒绝了访问"),
        )
        .evidence_lines(refusals.iter().map(|(rank, what)| text!("rank {rank} {what}", "rank {rank} {what}")))
        .next(both("--collectives shm exchanges through host memory and works everywhere; auto falls back to it", "--collectives shm 经由主机内存交换数据，在任何环境都可用；auto 会自动退回到它"))
        .next(both("in a container, ranks that share GPU memory need one IPC namespace (docker run --ipc=host)", "在容器中，共享显存的 rank 需要同一个 IPC 命名空间（docker run --ipc=host）")),
        EngineError::Thread(source) => no_thread(doing, source),
        EngineError::PlanDiffers { .. } => Failure::new(
            ErrorCode::Rendezvous,
            both("the ranks have different plans", "各 rank 的计划不同"),
            chain(error),
        )
        .next(both("start all ranks from the same configuration and the same build", "请用相同的配置和相同的构建启动所有 rank")),
        _ => Failure::new(ErrorCode::Panic, text!("cannot {doing}", "无法{doing}"), chain(error)),
    }
}

/// Failure of a spill disk: full, slow, or missing.
pub(crate) fn spill(doing: impl Into<Text>, error: &SpillError) -> Failure {
    let doing = doing.into();
    let failure = Failure::new(
        ErrorCode::Disk,
        text!("cannot {doing}", "无法{doing}"),
        chain(error),
    );
    match error {
        SpillError::NoSpace { .. } => failure.next(both(
            "use a larger disk for --offload nvme:DIR, or --offload cpu",
            "请为 --offload nvme:DIR 使用更大的磁盘，或改用 --offload cpu",
        )),
        SpillError::Taken { .. } => failure.next(both(
            "use another directory for --offload nvme:DIR, or wait for the other job to end",
            "请为 --offload nvme:DIR 指定另一个目录，或等待另一个作业结束",
        )),
        _ => failure.next(both(
            "use a writable directory on a local disk for --offload nvme:DIR",
            "请为 --offload nvme:DIR 使用本地磁盘上的可写目录",
        )),
    }
}

/// Failure of a directory of adapters that cannot be read: `otherwise` says what to do, unless they are of a kind that only
/// peft has.
pub(crate) fn adapter(title: Text, error: &AdapterError, otherwise: Both) -> Failure {
    let failure = Failure::new(ErrorCode::ModelFiles, title, chain(error));
    if !matches!(error, AdapterError::Unsupported { .. }) {
        return failure.next(otherwise);
    }
    failure
        .next(both(
            "merge it into its base with peft (merge_and_unload, save_pretrained), and give that directory to --model",
            "用 peft 把它合并到基础模型中（merge_and_unload、save_pretrained），再把该目录交给 --model",
        ))
        .next(both(
            "or train plain LoRA adapters instead: --use-lora without --adapter",
            "或改为训练普通的 LoRA 适配器：--use-lora，不用 --adapter",
        ))
}

/// Failure of a list of parts that matches nothing.
pub(crate) fn selection(flag: &str, error: &ModelError) -> Failure {
    Failure::new(ErrorCode::Usage, text!("{flag} names no part of this model", "{flag} 没有匹配到该模型的任何部分"), chain(error)).next(
        both("select modules by parts of their path (llm, vpm, resampler, lm_head, embed_tokens, layers), by norm or bias, or by a regular expression over whole paths", "可按路径中的模块名（llm、vpm、resampler、lm_head、embed_tokens、layers）选择，也可用 norm 或 bias，或用匹配完整路径的正则表达式"),
    )
}

pub(crate) fn model(doing: impl Into<Text>, error: &ModelError) -> Failure {
    let doing = doing.into();
    match error {
        ModelError::Engine(inner) => engine(doing, inner),
        ModelError::Kernel(inner) => kernel(doing, inner),
        ModelError::AdapterTarget { .. } => Failure::new(
            ErrorCode::Usage,
            both("this model cannot be set up with these flags", "无法按这些参数设置该模型"),
            chain(error),
        )
        .next(both("--lora-target-modules takes a regular expression over module names, or names such as q_proj,v_proj", "--lora-target-modules 接受匹配模块名的正则表达式，或 q_proj,v_proj 这样的名称")),
        ModelError::SavedModule { module } => Failure::new(
            ErrorCode::Usage,
            both("this model cannot be set up with these flags", "无法按这些参数设置该模型"),
            chain(error),
        )
        .next(text!("omit {module} from --modules-to-save, or name modules by parts of their path, such as embed_tokens", "请从 --modules-to-save 中去掉 {module}，或用路径中的模块名指定，如 embed_tokens")),
        ModelError::QuantizedTrains { .. } => Failure::new(
            ErrorCode::Usage,
            both("quantized weights cannot train", "压缩存储的权重不能训练"),
            chain(error),
        )
        .next(both("train adapters beside them: --lora-rank 16", "请在它们旁边训练适配器：--lora-rank 16"))
        .next(both("--quantize none dequantizes the weights and trains them in the format of --precision", "--quantize none 会解压权重，并以 --precision 的格式训练")),
        ModelError::NothingQuantized => Failure::new(
            ErrorCode::Usage,
            both("--quantize packs nothing", "--quantize 没有可压缩存储的权重"),
            chain(error),
        )
        .next(both("train adapters, which leave the weights frozen: --lora-rank 16", "请训练适配器，这样权重保持冻结：--lora-rank 16"))
        .next(both("--quantize-modules names parts with frozen linear layers", "用 --quantize-modules 指定含有冻结线性层的部分")),
        ModelError::Selection { .. } => selection("--train, --freeze or --quantize-modules", error),
        ModelError::NotFinite { .. } => not_finite(
            text!("cannot {doing}: a value is not finite", "无法{doing}：出现非有限值"),
            chain(error),
        ),
        ModelError::Config { .. } => Failure::new(
            ErrorCode::ModelFiles,
            both("this model cannot be set up", "无法设置该模型"),
            chain(error),
        )
        .next(both("use the published config.json of the model", "请使用该模型官方发布的 config.json")),
        _ => Failure::new(ErrorCode::Panic, text!("cannot {doing}", "无法{doing}"), chain(error)),
    }
}

/// Failure of a run that needs a kernel which this machine lacks: it is not built in, and NVRTC was not found.
pub(crate) fn without_kernel(doing: impl Into<Text>, cause: impl std::fmt::Display) -> Failure {
    let doing = doing.into();
    Failure::new(
        ErrorCode::Cuda,
        text!(
            "cannot {doing}: a kernel is neither built in nor can it be compiled",
            "无法{doing}：有内核既未内置，也无法编译"
        ),
        Text::literal(cause),
    )
    .next(both(
        "pip install nvidia-cuda-nvrtc; no toolkit is needed",
        "pip install nvidia-cuda-nvrtc；不需要 CUDA 工具包",
    ))
}

pub(crate) fn kernel(doing: impl Into<Text>, error: &KernelError) -> Failure {
    let doing = doing.into();
    match error {
        KernelError::OutOfMemory {
            pool,
            tag,
            asked_bytes,
            in_use_bytes,
            capacity_bytes,
            breakdown,
        } if *pool == "GPU" => Failure::new(
            ErrorCode::DeviceMemory,
            text!("cannot {doing}: the memory set aside on the GPU ran out", "无法{doing}：预留的显存已用完"),
            text!("{} more are needed for {kind} in one block, {} of the reserved {} are unused", "还需要为{kind}一次分配 {}，预留的 {2} 中只剩 {1}",
                bytes(*asked_bytes),
                bytes(capacity_bytes.saturating_sub(*in_use_bytes)),
                bytes(*capacity_bytes),
                kind = kind_name(tag.name())
            ),
        )
        .evidence(in_use(*in_use_bytes, breakdown))
        .next(OTHER_PLANS),
        KernelError::Device { op, cause } if let Some(op) = ASKING.iter().find(|asking| asking.en == *op) => Failure::new(
            ErrorCode::Cuda,
            text!("the GPUs of the ranks cannot {op}", "各 rank 的 GPU 无法{op}"),
            Text::literal(cause),
        )
        .next(both("--collectives shm exchanges through host memory and works everywhere", "--collectives shm 经由主机内存交换数据，在任何环境都可用")),
        KernelError::Device { op, cause } if *op == JOINING.en => Failure::new(
            ErrorCode::Cuda,
            text!("the GPUs of the ranks cannot {JOINING}", "各 rank 的 GPU 无法{JOINING}"),
            Text::literal(cause),
        )
        .next(both("NCCL_DEBUG=INFO shows in logs/ how far each rank came; NCCL_SOCKET_IFNAME names the network interface to use", "设置 NCCL_DEBUG=INFO 后，logs/ 会显示每个 rank 进行到哪一步；NCCL_SOCKET_IFNAME 指定使用的网卡"))
        .next(both("--comm-timeout gives ranks more time to join", "--comm-timeout 可给 rank 更多时间加入"))
        .next(both("--collectives shm exchanges through host memory and works everywhere", "--collectives shm 经由主机内存交换数据，在任何环境都可用")),
        KernelError::Device { cause, .. } if error.missing_kernel().is_some() => without_kernel(doing, cause),
        KernelError::Device { op, cause } => Failure::new(
            ErrorCode::Cuda,
            text!("cannot {doing}: the GPU failed in {op}", "无法{doing}：GPU 在执行 {op} 时出错"),
            Text::literal(cause),
        )
        .next(both("look for Xid messages in the machine's log (dmesg), and run `launcher doctor`", "请在系统日志（dmesg）中查找 Xid 消息，并运行 `launcher doctor`"))
        .next(both("--resume RUN, the run's directory, continues from the last checkpoint; --device cpu needs no GPU", "--resume RUN（RUN 为运行目录）从最近的检查点继续；--device cpu 不需要 GPU")),
        KernelError::OutOfMemory {
            pool,
            tag,
            asked_bytes,
            in_use_bytes,
            capacity_bytes,
            breakdown,
        } => {
            let device = *pool == "device";
            let (code, flag) = if device {
                (ErrorCode::DeviceMemory, "--device-memory-limit")
            } else {
                (ErrorCode::HostMemory, "--host-memory-limit")
            };
            let (name, share) = if device {
                (both("device", "设备"), both("", ""))
            } else {
                (both("host", "主机"), both(", this rank's share", "，即本 rank 的份额"))
            };
            Failure::new(
                code,
                text!("cannot {doing}: {name} memory ran out", "无法{doing}：{name}内存不足"),
                text!("{} more are needed for {kind}, {} of {flag} ({}{share}) are left", "还需要为{kind}分配 {}，{flag}（{2}{share}）只剩 {1}",
                    bytes(*asked_bytes),
                    bytes(capacity_bytes.saturating_sub(*in_use_bytes)),
                    bytes(*capacity_bytes),
                    kind = kind_name(tag.name())
                ),
            )
            .evidence(in_use(*in_use_bytes, breakdown))
            .next(OTHER_PLANS)
            .next(text!("or use a higher {flag}", "或提高 {flag}"))
        }
        _ => Failure::new(ErrorCode::Panic, text!("cannot {doing}", "无法{doing}"), chain(error)),
    }
}

/// Memory by kind, the largest first: `in use 44.8G = parameters 25.9G + activations 18.7G`.
fn in_use(total: u64, breakdown: &[(Tag, u64)]) -> Text {
    let mut parts = breakdown.to_vec();
    parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let parts: Vec<Text> = parts
        .iter()
        .map(|(tag, used)| text!("{} {}", "{} {}", kind_name(tag.name()), bytes(*used)))
        .collect();
    text!(
        "in use {} = {}",
        "已用 {} = {}",
        bytes(total),
        Text::join(&parts, " + ")
    )
}

fn host_memory(doing: Text, evidence: Text) -> Failure {
    Failure::new(
        ErrorCode::HostMemory,
        text!(
            "cannot {doing}: host memory ran out",
            "无法{doing}：主机内存不足"
        ),
        both(
            "the states that --offload stores in host memory do not fit",
            "--offload 放在主机内存中的状态放不下",
        ),
    )
    .evidence(evidence)
}

/// Failure of a checkpoint whose trained parts differ from this run's.
fn mismatch(doing: &Text, missing: &[String], extra: &[String]) -> Failure {
    let (missing_parts, extra_parts) = (parts(missing), parts(extra));
    let mut failure = Failure::new(
        ErrorCode::Resume,
        text!(
            "cannot {doing}: the checkpoint does not fit this run",
            "无法{doing}：检查点与本次运行不匹配"
        ),
        text!(
            "the trained parts differ: {} tensors of the checkpoint are frozen in this run, {} trained tensors of this run are not in the checkpoint",
            "训练的部分不同：检查点中有 {} 个张量在本次运行中被冻结，本次运行有 {} 个可训练张量不在检查点中",
            extra.len(),
            missing.len()
        ),
    );
    if !extra.is_empty() {
        failure = failure
            .evidence(text!(
                "in the checkpoint, but frozen in this run: {}",
                "检查点中有，但在本次运行中被冻结：{}",
                listed(&extra_parts)
            ))
            .next(text!(
                "train these parts too, as the run that saved it: {}",
                "请像保存它的那次运行一样，也训练这些部分：{}",
                names(&extra_parts)
            ));
    }
    if !missing.is_empty() {
        failure = failure
            .evidence(text!(
                "trained in this run, but not in the checkpoint: {}",
                "在本次运行中训练，但检查点中没有：{}",
                listed(&missing_parts)
            ))
            .next(text!(
                "freeze these parts, as the run that saved it: {}",
                "请像保存它的那次运行一样，冻结这些部分：{}",
                names(&missing_parts)
            ));
    }
    failure
        .evidence(both("world size, ZeRO stage and tiers may differ: the state is resharded", "world size、ZeRO 阶段和存放层级可以不同：状态会重新分片"))
        .next(both("the flags are --train, --freeze, --tune-vision, --tune-llm, --use-lora and the LoRA flags; config.resolved.json of that run has their values", "相关参数为 --train、--freeze、--tune-vision、--tune-llm、--use-lora 和各 LoRA 参数；那次运行的 config.resolved.json 中有它们的取值"))
}

/// Parts of the model with the number of `names` in each, in the order of the names.
fn parts(names: &[String]) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = Vec::new();
    for name in names {
        let part = part_of(name);
        match found.iter_mut().find(|(known, _)| *known == part) {
            Some((_, count)) => *count += 1,
            None => found.push((part, 1)),
        }
    }
    found
}

fn listed(parts: &[(String, usize)]) -> String {
    let parts: Vec<String> = parts
        .iter()
        .map(|(part, count)| format!("{part} ({count})"))
        .collect();
    parts.join(", ")
}

fn names(parts: &[(String, usize)]) -> String {
    let parts: Vec<&str> = parts.iter().map(|(part, _)| &**part).collect();
    parts.join(", ")
}

pub(crate) fn comm(error: &CommError) -> Failure {
    match error {
        CommError::Rendezvous {
            arrived,
            missing,
            elapsed,
        } => Failure::new(
            ErrorCode::Rendezvous,
            text!("rendezvous incomplete after {:.0} s: {} of {} ranks arrived", "会合未完成：{:.0} 秒后只有 {} 个 rank 到达，共 {} 个",
                elapsed.as_secs_f64(),
                arrived.len(),
                arrived.len() + missing.len()
            ),
            text!("ranks {missing:?} never joined the shared segment", "rank {missing:?} 始终没有加入共享内存段"),
        )
        .evidence(text!("ranks {arrived:?} joined", "rank {arrived:?} 已加入"))
        .next(both("read logs/ of the missing ranks; raise --comm-timeout if a rank starts slowly", "请查看 logs/ 中缺失 rank 的日志；如果某个 rank 启动较慢，请提高 --comm-timeout")),
        CommError::NoSpace { asked_bytes, tried } => Failure::new(
            ErrorCode::SharedMemory,
            both("shared memory is too small for the exchange between ranks", "共享内存过小，rank 之间无法交换数据"),
            text!("the ranks exchange data through a file of {}", "各 rank 通过一个 {} 的文件交换数据",
                bytes(*asked_bytes)
            ),
        )
        .evidence_lines(
            tried
                .iter()
                .map(|(path, free)| text!("{}: {} free", "{}：空闲 {}", path.display(), bytes(*free))),
        )
        .next(both("enlarge /dev/shm (Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory), or mount it writable where 0 bytes are free", "请扩大 /dev/shm（Docker：--shm-size 8g；Kubernetes：medium 为 Memory 的 emptyDir）；空闲为 0 字节时请以可写方式挂载"))
        .next(both("or set TMPDIR to a writable directory with that much free space", "或把 TMPDIR 设为有足够空闲空间的可写目录"))
        .next(both("or use --nproc 1, which needs no shared memory", "或使用 --nproc 1，它不需要共享内存")),
        CommError::Altered { from, .. } => Failure::new(
            ErrorCode::Collective,
            text!("data from rank {from} was changed on its way", "来自 rank {from} 的数据在传输途中被改动"),
            chain(error),
        )
        .next(both("look for a proxy, a tunnel or a faulty network card between the machines", "请检查机器之间的代理、隧道或有故障的网卡"))
        .next(both("continue from the last checkpoint with --resume RUN, the run's directory", "用 --resume RUN（RUN 为运行目录）从最近的检查点继续")),
        CommError::Stopped => Failure::new(
            ErrorCode::Interrupted,
            both("stopped by a signal before all ranks had come", "在所有 rank 到齐之前被信号停止"),
            both("this rank waited for the others", "本 rank 正在等待其他 rank"),
        )
        .next(both("start all ranks again", "请重新启动所有 rank")),
        CommError::Aborted { .. } => Failure::new(
            ErrorCode::Collective,
            both("another rank ended the run", "另一个 rank 结束了运行"),
            chain(error),
        ),
        _ => Failure::new(
            ErrorCode::Collective,
            both("the exchange between ranks failed", "rank 之间的数据交换失败"),
            chain(error),
        )
        .next(system_remedy(error).unwrap_or(both("the report of the first failing rank has the cause; see logs/", "原因见最先失败的 rank 的报告；请查看 logs/"))),
    }
}

pub(crate) fn checkpoint(doing: impl Into<Text>, error: &CheckpointError) -> Failure {
    let doing = doing.into();
    match error {
        CheckpointError::NoSpace {
            path, needed_bytes, ..
        } => Failure::new(
            ErrorCode::Disk,
            text!(
                "cannot {doing}: no space left on the disk",
                "无法{doing}：磁盘空间不足"
            ),
            chain(error),
        )
        .evidence(text!(
            "{} needs {}, {} are free on the disk",
            "{} 需要 {}，磁盘空闲 {}",
            crate::error::file_name(path),
            bytes(*needed_bytes),
            crate::memory::disk_free_bytes(path).map_or_else(
                |_| both("unknown", "未知").into(),
                |free| Text::literal(bytes(free))
            )
        ))
        .evidence(both("earlier checkpoints are intact", "之前的检查点完好"))
        .next(both(
            "free space, use --save-total-limit 1, or use another --output",
            "请清理磁盘空间，或使用 --save-total-limit 1，或换一个 --output",
        )),
        CheckpointError::HashMismatch { .. }
        | CheckpointError::WrongLength { .. }
        | CheckpointError::MissingFile { .. } => Failure::new(
            ErrorCode::Resume,
            text!(
                "cannot {doing}: the checkpoint is damaged",
                "无法{doing}：检查点已损坏"
            ),
            chain(error),
        )
        .next(both(
            "`launcher ckpt verify` lists every damaged file of the checkpoint",
            "`launcher ckpt verify` 会列出检查点中所有损坏的文件",
        )),
        _ => {
            let (code, next) = match system_remedy(error) {
                Some(remedy) => (ErrorCode::Disk, Some(remedy)),
                None => (ErrorCode::Resume, None),
            };
            let mut failure =
                Failure::new(code, text!("cannot {doing}", "无法{doing}"), chain(error));
            failure.next.extend(next.map(Text::from));
            failure
        }
    }
}

/// Failure of a pass, or of weights, with values that are infinite or NaN.
pub(crate) fn not_finite(title: impl Into<Text>, cause: impl Into<Text>) -> Failure {
    Failure::new(ErrorCode::Numeric, title, cause)
        .next(both(
            "--precision f32 shows whether the number format is the cause",
            "--precision f32 可以判断数值格式是否是原因",
        ))
        .next(both(
            "if not, take an earlier checkpoint, or download the weights again",
            "如果不是，请使用更早的检查点，或重新下载权重",
        ))
}

/// Failure of a tensor of which `count` of `elems` values are not finite in `dtype`, in which it would be written.
pub(crate) fn not_finite_tensor(name: &str, count: usize, elems: usize, dtype: DType) -> Failure {
    Failure::new(
        ErrorCode::Numeric,
        text!(
            "{count} values of {name} are not finite in {dtype}; nothing was written",
            "{name} 有 {count} 个值在 {dtype} 下不是有限值；没有写入任何内容"
        ),
        text!(
            "{count} of its {elems} values are infinite or NaN, or leave the range of {dtype}",
            "它的 {elems} 个值中有 {count} 个是无穷大或 NaN，或超出 {dtype} 的范围"
        ),
    )
    .next(both(
        "bf16 and f32 have the same range; that of f16 ends at 65504",
        "bf16 与 f32 的范围相同；f16 的范围到 65504 为止",
    ))
    .next(both(
        "if the values are not finite in the checkpoint either, take an earlier one",
        "如果检查点中的值也不是有限值，请使用更早的检查点",
    ))
}

pub(crate) fn weights(error: &WeightError) -> Failure {
    super::weight_files::report(error)
}

pub(crate) fn files(title: impl Into<Text>, path: &Path, error: &(dyn Error + 'static)) -> Failure {
    Failure::new(ErrorCode::ModelFiles, title, chain(error)).evidence(Text::literal(path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_ran_out_is_broken_down_by_use() {
        let error = KernelError::OutOfMemory {
            pool: "device",
            tag: Tag::Activations,
            asked_bytes: 2 << 20,
            in_use_bytes: 15 << 20,
            capacity_bytes: 16 << 20,
            breakdown: vec![(Tag::Parameters, 5 << 20), (Tag::Activations, 10 << 20)],
        };
        let failure = kernel("train", &error);
        assert_eq!(failure.code.status(), 11);
        assert_eq!(
            failure.cause,
            "2.0M more are needed for activations, 1.0M of --device-memory-limit (16.0M) are left"
        );
        assert_eq!(
            failure.evidence,
            ["in use 15.0M = activations 10.0M + parameters 5.0M"]
        );
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn a_kernel_that_cannot_be_compiled_is_no_failure_of_the_gpu() {
        let cause = kernels::cuda::CudaError::NoImage {
            module: "attention".into(),
            nvrtc: "NVRTC was not found".into(),
        };
        let (op, cause) = ("matmul", cause.into());
        let failure = kernel("train", &KernelError::Device { op, cause });
        assert!(failure.next[0].contains("nvidia-cuda-nvrtc"), "{failure:?}");
        let (op, cause) = ("matmul", "CUDA_ERROR_LAUNCH_FAILED".into());
        let failure = kernel("train", &KernelError::Device { op, cause });
        assert!(failure.next[0].contains("Xid"), "{failure:?}");
    }

    #[test]
    fn different_libraries_fail_the_rendezvous() {
        let error = EngineError::LibraryDiffers {
            rank: 3,
            theirs: "2.26.2".into(),
            ours: "2.27.5".into(),
        };
        let failure = engine("train", &error);
        assert_eq!(failure.code, ErrorCode::Rendezvous);
        assert_eq!(
            failure.cause,
            "rank 3 has NCCL 2.26.2, this rank has 2.27.5"
        );
        assert!(failure.next[0].contains("one version"), "{failure:?}");
    }

    #[test]
    fn too_little_shared_memory_is_told_apart_from_missing_ranks() {
        let tried = vec![("/dev/shm".into(), 64 << 10)];
        let failure = comm(&CommError::NoSpace {
            asked_bytes: 32 << 20,
            tried,
        });
        assert_eq!(failure.code, ErrorCode::SharedMemory);
        assert_eq!(failure.evidence, ["/dev/shm: 64.0K free"]);
        let failure = comm(&CommError::Rendezvous {
            arrived: vec![0, 2],
            missing: vec![1],
            elapsed: std::time::Duration::from_secs(60),
        });
        assert_eq!(
            failure.title,
            "rendezvous incomplete after 60 s: 2 of 3 ranks arrived"
        );
        let failure = comm(&CommError::Io {
            action: "size",
            path: "/dev/shm/window".into(),
            source: std::io::Error::from_raw_os_error(27),
        });
        assert!(failure.next[0].contains("ulimit -f"), "{failure}");
    }

    #[test]
    fn blocks_of_codes_that_need_other_ranks_or_a_gpu_are_chinese() {
        let rendezvous = CommError::Rendezvous {
            arrived: vec![0],
            missing: vec![1],
            elapsed: std::time::Duration::from_secs(60),
        };
        let tried = vec![("/dev/shm".into(), 64 << 10)];
        let space = CommError::NoSpace {
            asked_bytes: 32 << 20,
            tried,
        };
        let altered = CommError::Altered {
            noticed_by: 0,
            from: 1,
            sequence: 3,
            op: None,
        };
        let out_of_memory = |pool| KernelError::OutOfMemory {
            pool,
            tag: Tag::Parameters,
            asked_bytes: 2 << 20,
            in_use_bytes: 1 << 20,
            capacity_bytes: 2 << 20,
            breakdown: vec![(Tag::Parameters, 1 << 20)],
        };
        let train = || both("train", "训练");
        let blocks = [
            kernel(train(), &out_of_memory("device")),
            kernel(train(), &out_of_memory("host")),
            comm(&rendezvous),
            comm(&altered),
            comm(&space),
            comm(&CommError::Stopped),
        ];
        let codes: Vec<&str> = blocks.iter().map(|failure| failure.code.as_str()).collect();
        assert_eq!(codes, ["E01", "E02", "E03", "E04", "E15", "E21"]);
        blocks.iter().for_each(crate::lang::assert_chinese);
    }

    #[test]
    fn tensors_that_differ_are_grouped_by_part() {
        let names = [
            "resampler.query",
            "resampler.proj",
            "llm.model.layers.0.mlp.up.weight",
        ];
        let failure = mismatch(&Text::literal("resume"), &[], &names.map(str::to_owned));
        assert_eq!(
            failure.evidence[0],
            "in the checkpoint, but frozen in this run: resampler (2), llm.model.layers (1)"
        );
    }
}
