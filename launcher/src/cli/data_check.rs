//! The arguments of `launcher data check`.

use std::path::PathBuf;

use clap::Parser;

use crate::config::{DataFormatChoice, ExifRotation, TemplateChoice};

/// What the user typed after `launcher data check`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher data check",
    version,
    about = "Checks a data file as training would: lengths, images, answers, balance over ranks",
    max_term_width = 100
)]
pub struct DataCheckArgs {
    /// Samples, in one of the forms of --data-format; several files are separated by commas
    pub file: Option<PathBuf>,
    /// Model directory whose tokenizer and image rules apply
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Directory of the tokenizer, where it is not in that of --model
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Names of data sets in dataset_info.json (LLaMA-Factory), separated by commas
    #[arg(long, value_name = "NAMES")]
    pub dataset: Option<String>,
    /// Directory of dataset_info.json; by default data
    #[arg(long, value_name = "DIR")]
    pub dataset_dir: Option<PathBuf>,
    /// Directory at which relative paths of images start; by default beside each data file
    #[arg(long, value_name = "DIR")]
    pub image_dir: Option<PathBuf>,
    /// Orientation in EXIF data: apply turns the image, ignore leaves it as published
    #[arg(long, value_enum, value_name = "WHAT")]
    pub exif_rotation: Option<ExifRotation>,
    /// Form of the data; auto looks at the content
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub data_format: Option<DataFormatChoice>,
    /// Prompt template of CogVLM, CogVLM2 and CogAgent
    ///
    /// auto takes the template of the model directory.
    #[arg(long, value_enum, value_name = "NAME")]
    pub template: Option<TemplateChoice>,
    /// Supervise the token that ends an answer (GLM-4V)
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub train_on_turn_end: Option<bool>,
    /// Allow samples without an image for CogAgent, as for training
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub text_without_cross: Option<bool>,
    /// Longest sample in tokens, as for training
    #[arg(long, value_name = "TOKENS")]
    pub model_max_length: Option<usize>,
    /// Most slices an image is cut into, as for training
    #[arg(long, value_name = "N")]
    pub max_slice_nums: Option<usize>,
    /// Largest area of an image in pixels, as for training (GLM-4.1V)
    #[arg(long, value_name = "PIXELS")]
    pub image_max_pixels: Option<usize>,
    /// Smallest area of an image in pixels, as for training (GLM-4.1V)
    #[arg(long, value_name = "PIXELS")]
    pub image_min_pixels: Option<usize>,
    /// Number of ranks, for the balance between them
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,
    /// Samples per rank and micro-batch, for the balance
    #[arg(long, value_name = "N")]
    pub per_device_train_batch_size: Option<usize>,
    /// Fill each micro-batch with samples of at most N tokens together, for the balance
    #[arg(long, value_name = "N")]
    pub tokens_per_batch: Option<usize>,
    /// Micro-batches per optimizer update, for the balance
    #[arg(long, value_name = "N")]
    pub gradient_accumulation_steps: Option<usize>,
    /// Seed of the data order, for the balance
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Check only the first N samples of each file
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Directory for data_problems.jsonl, one row per unusable sample
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Print the report as JSON with stable keys
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
}
