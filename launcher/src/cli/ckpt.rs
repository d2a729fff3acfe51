//! The command lines of `launcher ckpt`.

use std::path::PathBuf;

use clap::Parser;

use crate::units::parse_bytes;

/// Parsed command line of `launcher ckpt`: a subcommand with its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CkptCommand {
    /// `ls`: list the checkpoints of a run.
    Ls(CkptLsArgs),
    /// `verify`: compare the files of a checkpoint with the hashes recorded when it was written.
    Verify(CkptVerifyArgs),
    /// `reshard`: write a copy of a checkpoint, sharded for another number of ranks.
    Reshard(CkptReshardArgs),
    /// `consolidate`: write the weights of a checkpoint as one unsharded model in f32.
    Consolidate(CkptConsolidateArgs),
}

/// What the user typed after `launcher ckpt ls`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher ckpt ls",
    version,
    about = "Lists the checkpoints of a run: steps, contents, bytes, and whether each is intact",
    max_term_width = 100
)]
pub struct CkptLsArgs {
    /// Directory of a run, or one checkpoint
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Print JSON with stable keys
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
}

/// What the user typed after `launcher ckpt verify`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher ckpt verify",
    version,
    about = "Verifies a checkpoint: every byte against its hash, every tensor against its description",
    max_term_width = 100
)]
pub struct CkptVerifyArgs {
    /// Directory of a run, which means its latest checkpoint, or one checkpoint-N
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
}

/// What the user typed after `launcher ckpt reshard`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher ckpt reshard",
    version,
    about = "Writes a checkpoint sharded for another number of ranks",
    max_term_width = 100
)]
pub struct CkptReshardArgs {
    /// Directory of a run, which means its latest checkpoint, or one checkpoint-N
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Number of ranks to shard for
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub nproc: Option<u32>,
    /// Directory to write; it must not exist or must be empty
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

/// What the user typed after `launcher ckpt consolidate`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher ckpt consolidate",
    version,
    about = "Writes a checkpoint as f32 safetensors, under the original names and from master weights if it has them",
    max_term_width = 100
)]
pub struct CkptConsolidateArgs {
    /// Directory of a run, which means its latest checkpoint, or one checkpoint-N
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Directory to write; it must not exist or must be empty
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Also write the optimizer state to optimizer.safetensors (tensors NAME.exp_avg, …; NAME.state1, … as bitsandbytes has them after --moments 8bit)
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub optimizer: Option<bool>,
    /// Largest weight file, such as 5GB (the default) or 512MiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_shard_size: Option<u64>,
}
