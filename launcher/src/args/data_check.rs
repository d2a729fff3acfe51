//! The arguments of `launcher data check`.

use std::path::PathBuf;

use clap::Parser;

use crate::config::{DataFormatChoice, TemplateChoice};

/// What the user typed after `launcher data check`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher data check",
    version,
    about = "Checks a data file as training would: lengths, pictures, answers, balance over ranks",
    max_term_width = 100
)]
pub struct DataCheckArgs {
    /// Samples in the format of --data
    pub file: Option<PathBuf>,
    /// Folder of the model whose tokenizer and pictures' rules apply
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Form of the data; auto goes by what the file or folder holds
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub data_format: Option<DataFormatChoice>,
    /// How CogVLM's, CogVLM2's and CogAgent's prompts are written; auto is the model folder's way
    #[arg(long, value_enum, value_name = "NAME")]
    pub template: Option<TemplateChoice>,
    /// Let GLM-4V learn the token that ends an answer, so that it stops; its published recipe does not
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub train_on_turn_end: Option<bool>,
    /// Longest sample in tokens, as for training
    #[arg(long, value_name = "TOKENS")]
    pub model_max_length: Option<usize>,
    /// Most slices a picture is cut into, as for training
    #[arg(long, value_name = "N")]
    pub max_slice_nums: Option<usize>,
    /// Number of ranks, for the balance between them
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,
    /// Samples per rank and micro-batch, for the balance
    #[arg(long, value_name = "N")]
    pub per_device_train_batch_size: Option<usize>,
    /// Micro-batches per optimizer update, for the balance
    #[arg(long, value_name = "N")]
    pub gradient_accumulation_steps: Option<usize>,
    /// Seed of the data order, for the balance
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Check only this many samples, from the beginning of the file
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Folder to write data_problems.jsonl to, one row per sample that cannot be used
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Print the report as JSON with stable keys
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
}
