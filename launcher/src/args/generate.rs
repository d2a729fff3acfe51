//! Arguments of the verbs that ask a model: `generate` and `eval`.

use std::path::PathBuf;

use clap::Parser;

use crate::config::{DataFormatChoice, PrecisionChoice, TemplateChoice};

/// What the user typed after `launcher generate`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher generate",
    version,
    about = "Answers a prompt about pictures, in one process on the CPU",
    max_term_width = 100
)]
pub struct GenerateArgs {
    /// Folder of the model, or a checkpoint-N folder that holds model.safetensors
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Checkpoint-N folder of a run that trained adapters or parts of the model
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// A picture; repeat the flag for several, which then stand before the prompt in this order
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    /// The question; `<image>` or `<image_00>`, `<image_01>`, … put pictures elsewhere in it
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Longest answer in tokens; 256 by default
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// 0 (the default) takes the likeliest token; above it tokens are drawn
    #[arg(long, value_name = "X")]
    pub temperature: Option<f32>,
    /// Draws among the likeliest tokens that together reach this probability; 1 by default
    #[arg(long, value_name = "X")]
    pub top_p: Option<f32>,
    /// Draws among this many of the likeliest tokens; 0, the default, is all
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Seed of the draws; 42 by default
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Number format of weights and activations; that of the model's files by default
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionChoice>,
    /// How CogVLM's, CogVLM2's and CogAgent's prompts are written; auto is the model folder's way
    #[arg(long, value_enum, value_name = "NAME")]
    pub template: Option<TemplateChoice>,
    /// Longest prompt in tokens, pictures included; 8192 by default
    #[arg(long, value_name = "TOKENS")]
    pub model_max_length: Option<usize>,
    /// Most slices a picture is cut into; 9 by default
    #[arg(long, value_name = "N")]
    pub max_slice_nums: Option<usize>,
    /// Print the answer with its counts and times as JSON
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
}

/// What the user typed after `launcher eval`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher eval",
    version,
    about = "Evaluates a model on held-out samples, in one process on the CPU, and prints JSON",
    max_term_width = 100
)]
pub struct EvalArgs {
    /// Folder of the model, or a checkpoint-N folder that holds model.safetensors
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Checkpoint-N folder of a run that trained adapters or parts of the model
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Samples with reference answers, in one of the forms of --data-format
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Write the result with every answer to this file, too
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Longest answer in tokens; by default that of the reference and 8 more
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Samples answered together; 8 by default
    #[arg(long, value_name = "N")]
    pub per_device_eval_batch_size: Option<usize>,
    /// Only the first samples of the file
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Leave samples that cannot be used out instead of refusing the data
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub skip_bad_samples: Option<bool>,
    /// Number format of weights and activations; that of the model's files by default
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionChoice>,
    /// Form of the data; auto goes by what the file or folder holds
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub data_format: Option<DataFormatChoice>,
    /// How CogVLM's, CogVLM2's and CogAgent's prompts are written; auto is the model folder's way
    #[arg(long, value_enum, value_name = "NAME")]
    pub template: Option<TemplateChoice>,
    /// Let GLM-4V learn the token that ends an answer, so that it stops; its published recipe does not
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub train_on_turn_end: Option<bool>,
    /// Longest sample in tokens; longer ones are cut; 2048 by default
    #[arg(long, value_name = "TOKENS")]
    pub model_max_length: Option<usize>,
    /// Most slices a picture is cut into; 9 by default
    #[arg(long, value_name = "N")]
    pub max_slice_nums: Option<usize>,
}
