//! Conversion of typed library errors to failures: cause, evidence, next steps.

use crate::error::parts::part_of;
use crate::error::threads::no_thread;
use crate::error::{ErrorCode, Failure};
use crate::units::bytes;
use engine::EngineError;
use engine::checkpoint::CheckpointError;
use engine::comm::CommError;
use engine::spill::SpillError;
use kernels::{DType, KernelError, Tag};
use models::{ModelError, WeightError};
use std::error::Error;
use std::path::Path;

use crate::error::system::system_remedy;

pub(crate) use crate::error::chain;
pub(crate) use crate::error::model_files::{adapter_remedy, check_directory, unusable};

/// Operations of NCCL before ranks wait for each other.
const ASKING: [&str; 2] = ["ask NCCL for its version", "name an NCCL group"];
/// Operation of NCCL in which ranks wait for each other.
const JOINING: &str = "join the NCCL group";
/// Next step after a lack of memory: a rank makes no plans itself, the supervisor adds those that fit.
const OTHER_PLANS: &str = "`launcher plan` with the same flags names settings that fit";

pub(crate) fn engine(doing: &str, error: &EngineError) -> Failure {
    match error {
        EngineError::Comm(comm_error) => comm(comm_error),
        EngineError::Checkpoint(inner) => checkpoint(doing, inner),
        EngineError::Kernel(inner) => kernel(doing, inner),
        EngineError::Map { .. } => host_memory(doing, chain(error)),
        EngineError::Spill(inner) => spill(doing, inner),
        EngineError::CheckpointMismatch { missing, extra } => mismatch(doing, missing, extra),
        EngineError::Load { source, .. } => match source.downcast_ref::<WeightError>() {
            Some(weights) => self::weights(weights),
            None => Failure::new(
                ErrorCode::ModelFiles,
                format!("cannot {doing}"),
                chain(error),
            ),
        },
        EngineError::LibraryDiffers { .. } => Failure::new(
            ErrorCode::Rendezvous,
            "the ranks have different versions of NCCL",
            chain(error),
        )
        .next("install one version on all machines, or omit --collectives nccl"),
        EngineError::NoPeerAccess { refusals } => Failure::new(
            ErrorCode::Cuda,
            "the GPUs of the ranks cannot read each other's memory, which --collectives ipc needs",
            "the driver or the container of a rank refuses it",
        )
        .evidence_lines(refusals.iter().map(|(rank, what)| format!("rank {rank} {what}")))
        .next("--collectives shm exchanges through host memory and works everywhere; auto falls back to it")
        .next("in a container, ranks that share GPU memory need one IPC namespace (docker run --ipc=host)"),
        EngineError::Thread(source) => no_thread(doing, source),
        EngineError::PlanDiffers { .. } => Failure::new(
            ErrorCode::Rendezvous,
            "the ranks have different plans",
            chain(error),
        )
        .next("start all ranks from the same configuration and the same build"),
        _ => Failure::new(ErrorCode::Panic, format!("cannot {doing}"), chain(error)),
    }
}

/// Failure of a spill disk: full, slow, or missing.
pub(crate) fn spill(doing: &str, error: &SpillError) -> Failure {
    let failure = Failure::new(ErrorCode::Disk, format!("cannot {doing}"), chain(error));
    match error {
        SpillError::NoSpace { .. } => {
            failure.next("use a larger disk for --offload nvme:DIR, or --offload cpu")
        }
        SpillError::Taken { .. } => failure
            .next("use another directory for --offload nvme:DIR, or wait for the other job to end"),
        _ => failure.next("use a writable directory on a local disk for --offload nvme:DIR"),
    }
}

/// Failure of a list of parts that matches nothing.
pub(crate) fn selection(flag: &str, error: &ModelError) -> Failure {
    Failure::new(ErrorCode::Usage, format!("{flag} names no part of this model"), chain(error)).next(
        "select modules by parts of their path (llm, vpm, resampler, lm_head, embed_tokens, layers), by norm or bias, or by a regular expression over whole paths",
    )
}

pub(crate) fn model(doing: &str, error: &ModelError) -> Failure {
    match error {
        ModelError::Engine(inner) => engine(doing, inner),
        ModelError::Kernel(inner) => kernel(doing, inner),
        ModelError::AdapterTarget { .. } => Failure::new(
            ErrorCode::Usage,
            "this model cannot be set up with these flags",
            chain(error),
        )
        .next("--lora-target-modules takes a regular expression over module names, or names such as q_proj,v_proj"),
        ModelError::Selection { .. } => selection("--train, --freeze", error),
        ModelError::NotFinite { .. } => not_finite(
            format!("cannot {doing}: a value is not finite"),
            chain(error),
        ),
        ModelError::Config { .. } => Failure::new(
            ErrorCode::ModelFiles,
            "this model cannot be set up",
            chain(error),
        )
        .next("use the published config.json of the model"),
        _ => Failure::new(ErrorCode::Panic, format!("cannot {doing}"), chain(error)),
    }
}

pub(crate) fn kernel(doing: &str, error: &KernelError) -> Failure {
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
            format!("cannot {doing}: the memory set aside on the GPU ran out"),
            format!(
                "{} more are needed for {tag} in one block, {} of the reserved {} are unused",
                bytes(*asked_bytes),
                bytes(capacity_bytes.saturating_sub(*in_use_bytes)),
                bytes(*capacity_bytes)
            ),
        )
        .evidence(in_use(*in_use_bytes, breakdown))
        .next(OTHER_PLANS),
        KernelError::Device { op, cause } if ASKING.contains(op) => Failure::new(
            ErrorCode::Cuda,
            format!("the GPUs of the ranks cannot {op}"),
            cause.to_string(),
        )
        .next("--collectives shm exchanges through host memory and works everywhere"),
        KernelError::Device { op, cause } if *op == JOINING => Failure::new(
            ErrorCode::Cuda,
            format!("the GPUs of the ranks cannot {op}"),
            cause.to_string(),
        )
        .next("NCCL_DEBUG=INFO shows in logs/ how far each rank came; NCCL_SOCKET_IFNAME names the network interface to use")
        .next("--comm-timeout gives ranks more time to join")
        .next("--collectives shm exchanges through host memory and works everywhere"),
        KernelError::Device { op, cause } => Failure::new(
            ErrorCode::Cuda,
            format!("cannot {doing}: the GPU failed in {op}"),
            cause.to_string(),
        )
        .next("look for Xid messages in the machine's log (dmesg), and run `launcher doctor`")
        .next("--resume RUN, the run's directory, continues from the last checkpoint; --device cpu needs no GPU"),
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
            let share = if device { "" } else { ", this rank's share" };
            Failure::new(
                code,
                format!("cannot {doing}: {pool} memory ran out"),
                format!(
                    "{} more are needed for {tag}, {} of {flag} ({}{share}) are left",
                    bytes(*asked_bytes),
                    bytes(capacity_bytes.saturating_sub(*in_use_bytes)),
                    bytes(*capacity_bytes)
                ),
            )
            .evidence(in_use(*in_use_bytes, breakdown))
            .next(OTHER_PLANS)
            .next(format!("or use a higher {flag}"))
        }
        _ => Failure::new(ErrorCode::Panic, format!("cannot {doing}"), chain(error)),
    }
}

/// Memory by kind, the largest first: `in use 44.8G = parameters 25.9G + activations 18.7G`.
fn in_use(total: u64, breakdown: &[(Tag, u64)]) -> String {
    let mut parts = breakdown.to_vec();
    parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let parts: Vec<String> = parts
        .iter()
        .map(|(tag, used)| format!("{tag} {}", bytes(*used)))
        .collect();
    format!("in use {} = {}", bytes(total), parts.join(" + "))
}

fn host_memory(doing: &str, evidence: String) -> Failure {
    Failure::new(
        ErrorCode::HostMemory,
        format!("cannot {doing}: host memory ran out"),
        "the states that --offload stores in host memory do not fit",
    )
    .evidence(evidence)
}

/// Failure of a checkpoint whose trained parts differ from this run's.
fn mismatch(doing: &str, missing: &[String], extra: &[String]) -> Failure {
    let (missing_parts, extra_parts) = (parts(missing), parts(extra));
    let mut failure = Failure::new(
        ErrorCode::Resume,
        format!("cannot {doing}: the checkpoint does not fit this run"),
        format!(
            "the trained parts differ: {} tensors of the checkpoint are frozen in this run, {} trained tensors of this run are not in the checkpoint",
            extra.len(),
            missing.len()
        ),
    );
    if !extra.is_empty() {
        failure = failure
            .evidence(format!(
                "in the checkpoint, but frozen in this run: {}",
                listed(&extra_parts)
            ))
            .next(format!(
                "train these parts too, as the run that saved it: {}",
                names(&extra_parts)
            ));
    }
    if !missing.is_empty() {
        failure = failure
            .evidence(format!(
                "trained in this run, but not in the checkpoint: {}",
                listed(&missing_parts)
            ))
            .next(format!(
                "freeze these parts, as the run that saved it: {}",
                names(&missing_parts)
            ));
    }
    failure
        .evidence("world size, ZeRO stage and tiers may differ: the state is resharded")
        .next("the flags are --train, --freeze, --tune-vision, --tune-llm, --use-lora and the LoRA flags; config.resolved.json of that run has their values")
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
            format!(
                "rendezvous incomplete after {:.0} s: {} of {} ranks arrived",
                elapsed.as_secs_f64(),
                arrived.len(),
                arrived.len() + missing.len()
            ),
            format!("ranks {missing:?} never joined the shared segment"),
        )
        .evidence(format!("ranks {arrived:?} joined"))
        .next("read logs/ of the missing ranks; raise --comm-timeout if a rank starts slowly"),
        CommError::NoSpace { asked_bytes, tried } => Failure::new(
            ErrorCode::SharedMemory,
            "shared memory is too small for the exchange between ranks",
            format!(
                "the ranks exchange data through a file of {}",
                bytes(*asked_bytes)
            ),
        )
        .evidence_lines(
            tried
                .iter()
                .map(|(path, free)| format!("{}: {} free", path.display(), bytes(*free))),
        )
        .next("enlarge /dev/shm (Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory), or mount it writable where 0 bytes are free")
        .next("or set TMPDIR to a writable directory with that much free space")
        .next("or use --nproc 1, which needs no shared memory"),
        CommError::Altered { from, .. } => Failure::new(
            ErrorCode::Collective,
            format!("data from rank {from} was changed on its way"),
            chain(error),
        )
        .next("look for a proxy, a tunnel or a faulty network card between the machines")
        .next("continue from the last checkpoint with --resume RUN, the run's directory"),
        CommError::Stopped => Failure::new(
            ErrorCode::Interrupted,
            "stopped by a signal before all ranks had come",
            "this rank waited for the others",
        )
        .next("start all ranks again"),
        CommError::Aborted { .. } => Failure::new(
            ErrorCode::Collective,
            "another rank ended the run",
            chain(error),
        ),
        _ => Failure::new(
            ErrorCode::Collective,
            "the exchange between ranks failed",
            chain(error),
        )
        .next("the report of the first failing rank has the cause; see logs/"),
    }
}

pub(crate) fn checkpoint(doing: &str, error: &CheckpointError) -> Failure {
    match error {
        CheckpointError::NoSpace {
            path, needed_bytes, ..
        } => Failure::new(
            ErrorCode::Disk,
            format!("cannot {doing}: no space left on the disk"),
            chain(error),
        )
        .evidence(format!(
            "{} needs {}, {} are free on the disk",
            crate::error::file_name(path),
            bytes(*needed_bytes),
            crate::memory::disk_free_bytes(path).map_or_else(|_| "unknown".into(), bytes)
        ))
        .evidence("earlier checkpoints are intact")
        .next("free space, use --save-total-limit 1, or use another --output"),
        CheckpointError::HashMismatch { .. }
        | CheckpointError::WrongLength { .. }
        | CheckpointError::MissingFile { .. } => Failure::new(
            ErrorCode::Resume,
            format!("cannot {doing}: the checkpoint is damaged"),
            chain(error),
        )
        .next("`launcher ckpt verify` lists every damaged file of the checkpoint"),
        _ => {
            let (code, next) = match system_remedy(error) {
                Some(remedy) => (ErrorCode::Disk, Some(remedy)),
                None => (ErrorCode::Resume, None),
            };
            let mut failure = Failure::new(code, format!("cannot {doing}"), chain(error));
            failure.next.extend(next);
            failure
        }
    }
}

/// Failure of a pass, or of weights, with values that are infinite or NaN.
pub(crate) fn not_finite(title: impl Into<String>, cause: impl Into<String>) -> Failure {
    Failure::new(ErrorCode::Numeric, title, cause)
        .next("--precision f32 shows whether the number format is the cause")
        .next("if not, take an earlier checkpoint, or download the weights again")
}

/// Failure of a tensor of which `count` of `elems` values are not finite in `dtype`, in which it would be written.
pub(crate) fn not_finite_tensor(name: &str, count: usize, elems: usize, dtype: DType) -> Failure {
    Failure::new(
        ErrorCode::Numeric,
        format!("{count} values of {name} are not finite in {dtype}; nothing was written"),
        format!("{count} of its {elems} values are infinite or NaN, or leave the range of {dtype}"),
    )
    .next("bf16 and f32 have the same range; that of f16 ends at 65504")
    .next("if the values are not finite in the checkpoint either, take an earlier one")
}

pub(crate) fn weights(error: &WeightError) -> Failure {
    super::weight_files::report(error)
}

pub(crate) fn files(title: &str, path: &Path, error: &dyn Error) -> Failure {
    Failure::new(ErrorCode::ModelFiles, title, chain(error)).evidence(path.display().to_string())
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
    }

    #[test]
    fn tensors_that_differ_are_grouped_by_part() {
        let names = [
            "resampler.query",
            "resampler.proj",
            "llm.model.layers.0.mlp.up.weight",
        ];
        let failure = mismatch("resume", &[], &names.map(str::to_owned));
        assert_eq!(
            failure.evidence[0],
            "in the checkpoint, but frozen in this run: resampler (2), llm.model.layers (1)"
        );
    }
}
