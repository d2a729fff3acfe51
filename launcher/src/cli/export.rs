//! The command line of `launcher export`.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::config::{MergeBase, QuantizeFormat};
use crate::units::parse_bytes;

/// What the user typed after `launcher export`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher export",
    version,
    about = "Writes a checkpoint for other programs: a Hugging Face, peft or SAT directory",
    max_term_width = 100
)]
pub struct ExportArgs {
    /// Directory of a run, which means its best checkpoint if it chose one, else its latest; one checkpoint-N; or an adapter directory
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Directory to write; it must not exist or must be empty
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Base model of adapters and trained parts; by default the one of the run
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Directory of the tokenizer, where it is not in that of --model
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Layout to write: hf, the default, for transformers and peft, or sat for SwissArmyTransformer
    ///
    /// sat merges adapters.
    #[arg(long, value_enum, value_name = "hf|sat")]
    pub format: Option<ExportFormat>,
    /// Model-parallel ranks of --format sat, 1 to 8; 1 by default
    #[arg(long, value_name = "P")]
    pub mp_size: Option<usize>,
    /// Write the whole model with adapters and trained parts merged, instead of the adapter
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub merge: Option<bool>,
    /// Quantize linear layers in 4 or 8 bits, in files that transformers and bitsandbytes read
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<QuantizeFormat>,
    /// Quantize the scales of 4-bit weights too (double quantization)
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub quantize_double: Option<bool>,
    /// Parts whose linear layers are quantized, or all; the default is the language model
    #[arg(long, value_name = "PARTS")]
    pub quantize_modules: Option<String>,
    /// Write plain weights of a model directory that is quantized
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub dequantize: Option<bool>,
    /// Weights that are merged into: those that the run trained beside, or those of --model before they were quantized
    #[arg(long, value_enum, value_name = "WHICH")]
    pub merge_base: Option<MergeBase>,
    /// Number format of the weights; by default that of the base model
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub dtype: Option<ExportDtype>,
    /// Largest weight file, such as 5GB (the default) or 512MiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_shard_size: Option<u64>,
}

/// What the user typed after `launcher import`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher import",
    version,
    about = "Writes a Hugging Face directory from a SAT checkpoint or torch files",
    max_term_width = 100
)]
pub struct ImportArgs {
    /// Directory of the checkpoint; several where its ranks are in several
    #[arg(value_name = "DIR", required = true)]
    pub checkpoint: Vec<PathBuf>,
    /// Directory to write; it must not exist or must be empty
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Directory of the tokenizer, whose files are copied
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Add LoRA matrices to the weights, instead of writing a peft adapter to OUTPUT/adapter
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub merge: Option<bool>,
    /// Number format of the weights; by default that of the checkpoint
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub dtype: Option<ExportDtype>,
    /// Largest weight file, such as 5GB (the default) or 512MiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max_shard_size: Option<u64>,
}

/// Layout that `launcher export` writes (`--format`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// safetensors files of the Hub.
    #[default]
    Hf,
    /// A checkpoint of SwissArmyTransformer.
    Sat,
}

/// Number format of the weights that `launcher export` writes (`--dtype`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportDtype {
    /// 32-bit.
    F32,
    /// 16-bit with the range of f32.
    Bf16,
    /// 16-bit with more digits and less range.
    F16,
}
