//! `launcher ckpt`: lists, verifies, reshards and consolidates checkpoints.
//!
//! The subcommands need only the directory of a run, and change nothing in it. Output is written in parts of a few
//! MiB to a temporary name, and renamed when it is complete.

mod consolidate;
mod ls;
mod reshard;
mod verify;

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
fn open(directory: &Path, doing: &str) -> Result<Checkpoint, Failure> {
    let doing = format!("{doing} {}", directory.display());
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

fn missing(directory: &Path, doing: &str) -> Failure {
    let cause = if directory.exists() {
        "it is not a directory"
    } else {
        "the directory does not exist"
    };
    Failure::new(ErrorCode::Resume, format!("cannot {doing}"), cause)
        .next("give a checkpoint-N directory of a run; `launcher ckpt ls RUN` lists them")
}

/// The output directory, required by every subcommand that writes.
fn required(output: Option<&PathBuf>) -> Result<&PathBuf, Failure> {
    output.ok_or_else(|| {
        Failure::usage("--output is missing", "the result needs a directory")
            .next("add --output DIR")
    })
}
