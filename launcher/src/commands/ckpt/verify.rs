//! `launcher ckpt verify`: check of every byte and every tensor of one checkpoint.

use crate::lang::{Text, both, text};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use engine::checkpoint::{Checkpoint, LogicalTensor, audit};
use models::adapter::{Adapter, AdapterError};
use models::{WeightError, WeightSource};

use super::missing;
use crate::cli::CkptVerifyArgs;
use crate::error::output::say;
use crate::error::{ErrorCode, Failure, chain, failures};
use crate::plan::resume;
use crate::report::checkpoints::advise_intact;
use crate::units::{bytes, grouped, seconds};

/// Maximal number of problems that are printed; the rest is counted.
const SHOWN: usize = 20;

/// Runs `launcher ckpt verify`: checks the files and tensors of one checkpoint and prints the problems found.
pub(super) fn run(args: &CkptVerifyArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let directory = &args.checkpoint;
    let doing = text!("verify {}", "校验 {}", directory.display());
    if !directory.is_dir() {
        return Err(missing(directory, &doing));
    }
    failures::check_directory(&doing, directory)?;
    resume::refuse_foreign(&doing, directory)?;
    let found =
        audit(directory).map_err(|e| advise_intact(failures::checkpoint(&doing, &e), directory))?;
    let mut problems: Vec<Text> = found.problems.iter().map(|e| chain(e)).collect();
    let bad_files = problems.len();
    if bad_files == 0 {
        problems.extend(weights(directory)?);
    }
    if problems.is_empty() {
        let name = crate::error::file_name(directory);
        say(&text!(
            " verify  {name} is intact · {} files · {} · {} tensors of training state · {}\n",
            " 校验    {name} 完好 · {} 个文件 · {} · {} 个训练状态张量 · {}\n",
            found.files,
            bytes(found.bytes),
            grouped(found.tensors as u64),
            seconds(started.elapsed().as_secs_f64())
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut failure = Failure::new(
        ErrorCode::Resume,
        text!("{} is damaged", "{} 已损坏", directory.display()),
        match bad_files {
            0 => both("its files have the hashes of the manifest, but they do not contain all trained tensors", "其文件与清单中的哈希一致，但没有包含所有训练过的张量").into(),
            n => text!("{n} of {} files differ from what was written; they contain {} of {} tensors of training state", "{0} 个文件中有 {n} 个与写入时不同；它们包含 {2} 个训练状态张量中的 {1} 个",
                found.files,
                found.lost.len(),
                found.tensors
            ),
        },
    );
    let more = problems.len().saturating_sub(SHOWN);
    failure = failure.evidence_lines(problems.into_iter().take(SHOWN));
    if more > 0 {
        failure = failure.evidence(text!("and {more} more", "另有 {more} 个"));
    }
    Err(advise_intact(failure, directory))
}

/// Lists problems of the weight files. Every parameter of the training state must be in one of them with its shape.
fn weights(directory: &Path) -> Result<Vec<Text>, Failure> {
    let doing = text!("verify {}", "校验 {}", directory.display());
    let checkpoint = Checkpoint::open(directory).map_err(|e| failures::checkpoint(&doing, &e))?;
    let model = match WeightSource::open(directory) {
        Ok(model) => Some(model),
        Err(WeightError::NoWeights { .. }) => None,
        Err(error) => return Ok(vec![chain(&error)]),
    };
    let adapter = match Adapter::open(directory) {
        Ok(adapter) => Some(adapter),
        Err(AdapterError::Nothing { .. }) => None,
        Err(error) => return Ok(vec![chain(&error)]),
    };
    if model.is_none() && adapter.is_none() {
        // The checkpoint has no weight files: its program stores weights elsewhere.
        return Ok(Vec::new());
    }
    let shape = |name: &str| {
        let own = adapter.as_ref().and_then(|adapter| adapter.shape(name));
        own.or_else(|| model.as_ref()?.shape(name))
    };
    let trained = checkpoint.tensors().iter().filter(|t| is_weight(t));
    Ok(trained
        .filter_map(|tensor| match shape(&tensor.name) {
            None => Some(text!(
                "no weight file contains {}",
                "没有权重文件包含 {}",
                tensor.name
            )),
            Some(found) if !fits(tensor, found) => Some(text!(
                "{} has the shape {found:?} in its weight file and {:?} in the training state",
                "{} 在权重文件中的形状为 {found:?}，在训练状态中为 {:?}",
                tensor.name,
                tensor.shape
            )),
            Some(_) => None,
        })
        .collect())
}

/// Whether a tensor of the training state is a parameter, not an optimizer state.
pub(super) fn is_weight(tensor: &LogicalTensor) -> bool {
    matches!(&*tensor.kind, "master" | "weight")
}

/// Whether the shape `found` in a weight file matches `tensor` of the training state. Adapters of single projections
/// are written with one column block per projection.
fn fits(tensor: &LogicalTensor, found: &[usize]) -> bool {
    let same = tensor
        .shape
        .iter()
        .copied()
        .eq(found.iter().map(|&n| n as u64));
    let widened = || match (&tensor.shape[..], found) {
        (&[n, r], &[m, c]) => n == m as u64 && r > 0 && (c as u64).is_multiple_of(r),
        _ => false,
    };
    same || (tensor.name.ends_with(".lora_B.weight") && widened())
}
