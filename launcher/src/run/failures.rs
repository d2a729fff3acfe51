//! From typed errors of the libraries to reports for people: cause, evidence, next step.

use crate::exit::{ErrorCode, Failure};
use engine::EngineError;
use engine::checkpoint::CheckpointError;
use engine::comm::CommError;
use kernels::KernelError;
use models::{ModelError, WeightError};
use std::error::Error;
use std::path::Path;

/// An error with all its sources in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        source = inner.source();
    }
    text
}

pub(super) fn engine(doing: &str, error: &EngineError) -> Failure {
    match error {
        EngineError::Comm(comm_error) => comm(comm_error),
        EngineError::Checkpoint(inner) => checkpoint(doing, inner),
        EngineError::Kernel(inner) => kernel(doing, inner),
        EngineError::Map { .. } => host_memory(doing, chain(error)),
        EngineError::CheckpointMismatch { .. } => Failure::new(
            ErrorCode::Resume,
            format!("cannot {doing}: the checkpoint does not fit this run"),
            chain(error),
        )
        .next("train the same parts as the run that saved it (--tune-vision, --tune-llm, --use-lora and its flags)"),
        EngineError::Load { source, .. } => match source.downcast_ref::<WeightError>() {
            Some(weights) => self::weights(weights),
            None => Failure::new(ErrorCode::ModelFiles, format!("cannot {doing}"), chain(error)),
        },
        EngineError::PlanDiffers { .. } => Failure::new(
            ErrorCode::Rendezvous,
            "the ranks do not run the same plan",
            chain(error),
        )
        .next("start all ranks from the same configuration and the same build"),
        _ => Failure::new(ErrorCode::Panic, format!("cannot {doing}"), chain(error)),
    }
}

/// A list of parts that names nothing.
pub(super) fn selection(flag: &str, error: &ModelError) -> Failure {
    Failure::new(ErrorCode::Usage, format!("{flag} names no part of this model"), chain(error)).next(
        "modules by parts of their path (llm, vpm, resampler, lm_head, embed_tokens, layers), norm, bias, or a regular \
         expression over whole paths",
    )
}

pub(crate) fn model(doing: &str, error: &ModelError) -> Failure {
    match error {
        ModelError::Engine(inner) => engine(doing, inner),
        ModelError::Kernel(inner) => kernel(doing, inner),
        ModelError::AdapterTarget { .. } => Failure::new(
            ErrorCode::Usage,
            "this model cannot be set up as asked",
            chain(error),
        )
        .next("--lora-target-modules takes a regular expression over module names, or names such as q_proj,v_proj"),
        ModelError::Selection { .. } => selection("--train, --freeze", error),
        ModelError::Config { .. } => Failure::new(
            ErrorCode::ModelFiles,
            "this model cannot be set up",
            chain(error),
        )
        .next("take config.json from a MiniCPM-V 2.6 or MiniCPM-o 2.6 folder"),
        _ => Failure::new(ErrorCode::Panic, format!("cannot {doing}"), chain(error)),
    }
}

pub(crate) fn kernel(doing: &str, error: &KernelError) -> Failure {
    match error {
        KernelError::OutOfMemory { pool: "device", .. } => Failure::new(
            ErrorCode::DeviceMemory,
            format!("cannot {doing}: device memory is exhausted"),
            "the micro-batch needs more than --device-memory-limit allows",
        )
        .evidence(error.to_string())
        .next("a smaller --per-device-train-batch-size or --model-max-length, --zero 3 --offload cpu, or a higher limit"),
        KernelError::OutOfMemory { .. } => host_memory(doing, error.to_string()),
        _ => Failure::new(ErrorCode::Panic, format!("cannot {doing}"), chain(error)),
    }
}

fn host_memory(doing: &str, evidence: String) -> Failure {
    Failure::new(
        ErrorCode::HostMemory,
        format!("cannot {doing}: host memory is exhausted"),
        "the states that --offload keeps in host memory do not fit",
    )
    .evidence(evidence)
    .next("--precision pure-bf16, fewer trained parts, or --use-lora true")
}

pub(crate) fn comm(error: &CommError) -> Failure {
    match error {
        CommError::Rendezvous { .. } => Failure::new(
            ErrorCode::Rendezvous,
            "the ranks did not all meet",
            chain(error),
        ),
        CommError::NoSpace { .. } => Failure::new(
            ErrorCode::Rendezvous,
            "shared memory is too small for the exchange of ranks",
            chain(error),
        )
        .next("enlarge /dev/shm (Docker: --shm-size 8g), or use --nproc 1"),
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
        .next("the report of the first failing rank tells why; see logs/"),
    }
}

pub(super) fn checkpoint(doing: &str, error: &CheckpointError) -> Failure {
    match error {
        CheckpointError::NoSpace { .. } => Failure::new(
            ErrorCode::Disk,
            format!("cannot {doing}: no space left on the disk"),
            chain(error),
        )
        .evidence("earlier checkpoints are whole and untouched")
        .next("free space, --save-total-limit 1, or another --output; then --resume auto"),
        CheckpointError::HashMismatch { .. }
        | CheckpointError::WrongLength { .. }
        | CheckpointError::MissingFile { .. } => Failure::new(
            ErrorCode::Resume,
            format!("cannot {doing}: the checkpoint is damaged"),
            chain(error),
        )
        .next("--resume an earlier checkpoint folder"),
        _ => Failure::new(ErrorCode::Resume, format!("cannot {doing}"), chain(error)),
    }
}

pub(crate) fn weights(error: &WeightError) -> Failure {
    let next = match error {
        WeightError::NoWeights { .. } => {
            "download the weights, or begin from random ones with --init random"
        }
        WeightError::WrongShape { .. } | WeightError::MissingTensor { .. } => {
            "take config.json and the safetensors files from the same model"
        }
        WeightError::DType { .. } => "convert the weights to bf16 or f32",
        _ => "download the named file again",
    };
    Failure::new(
        ErrorCode::ModelFiles,
        "the model folder is incomplete or damaged",
        chain(error),
    )
    .next(next)
}

pub(super) fn files(title: &str, path: &Path, error: &dyn Error) -> Failure {
    Failure::new(ErrorCode::ModelFiles, title, chain(error)).evidence(path.display().to_string())
}
