//! `launcher ckpt`: lists, verifies, reshards and consolidates checkpoints.
//!
//! The subcommands need only the directory of a run, and change nothing in it. Output is written in parts of a few
//! MiB to a temporary name, and renamed when it is complete.

mod consolidate;
mod ls;
mod reshard;
mod verify;

use crate::lang::{Both, Text, both, text};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use engine::checkpoint::Checkpoint;

use crate::cli::{CkptCommand, CkptConsolidateArgs, CkptReshardArgs, CkptVerifyArgs};
use crate::error::output::print;
use crate::error::{ErrorCode, Failure, failures};
use crate::plan::resume;
use crate::report::checkpoints::latest_of;

/// Runs the subcommand.
///
/// # Errors
/// The checkpoint is missing, damaged or cannot be read (exit 9), the output is taken (exit 2) or cannot be written
/// (exit 16).
pub(crate) fn run(command: &CkptCommand) -> Result<ExitCode, Failure> {
    match command {
        CkptCommand::Ls(args) => ls::run(args),
        CkptCommand::Verify(args) => verify::run(&CkptVerifyArgs {
            checkpoint: latest_of(&args.checkpoint),
        }),
        CkptCommand::Reshard(args) => reshard::run(&CkptReshardArgs {
            checkpoint: latest_of(&args.checkpoint),
            ..args.clone()
        }),
        CkptCommand::Consolidate(args) => consolidate::run(&CkptConsolidateArgs {
            checkpoint: latest_of(&args.checkpoint),
            ..args.clone()
        }),
    }
}

/// Opens a checkpoint and compares all its bytes with its hashes.
fn open(directory: &Path, doing: Both) -> Result<Checkpoint, Failure> {
    let doing = text!("{doing} {}", "{doing} {}", directory.display());
    if !directory.is_dir() {
        return Err(missing(directory, &doing));
    }
    failures::check_directory(&doing, directory)?;
    resume::refuse_foreign(&doing, directory)?;
    let open = || {
        let checkpoint = Checkpoint::open(directory)?;
        checkpoint.verify()?;
        Ok(checkpoint)
    };
    open().map_err(|e| failures::checkpoint(&doing, &e))
}

fn missing(directory: &Path, doing: &Text) -> Failure {
    let cause = if directory.exists() {
        both("it is not a directory", "它不是目录")
    } else {
        both("the directory does not exist", "该目录不存在")
    };
    Failure::new(
        ErrorCode::Resume,
        text!("cannot {doing}", "无法{doing}"),
        cause,
    )
    .next(both(
        "give the directory of a run: the value of its --output, or a directory below runs/; or a checkpoint-N directory in it",
        "请指定某次运行的目录：其 --output 的值，或 runs/ 下的目录；或其中的 checkpoint-N 目录",
    ))
}

/// The output directory, required by every subcommand that writes.
fn required(output: Option<&PathBuf>) -> Result<&PathBuf, Failure> {
    output.ok_or_else(|| {
        Failure::usage(
            both("--output is missing", "缺少 --output"),
            both("the result needs a directory", "结果需要一个目录"),
        )
        .next(both("add --output DIR", "请加上 --output DIR"))
    })
}
