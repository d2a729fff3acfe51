//! The command line of `launcher export`.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::units::parse_bytes;

/// What the user typed after `launcher export`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher export",
    version,
    about = "Writes the weights of a checkpoint as a folder that other programs load",
    max_term_width = 100
)]
pub struct ExportArgs {
    /// Folder checkpoint-N of a run, or an adapter folder
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Folder to write; it must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Base model of adapters and trained parts; the one the run was started with unless given
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Write the whole model with adapters and trained parts in it, instead of the adapter alone
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub merge: Option<bool>,
    /// Number format of the weights; that of the base model unless given
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub dtype: Option<ExportDtype>,
    /// Largest file of weights, such as 5GB (the default) or 512MiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_shard_size: Option<u64>,
}

/// `--dtype` of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportDtype {
    /// 32-bit.
    F32,
    /// 16-bit with the range of f32.
    Bf16,
    /// 16-bit with more digits and less range.
    F16,
}
