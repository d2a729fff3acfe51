//! Arguments of the subcommands that ask a model: `generate` and `eval`.

use std::path::PathBuf;

use clap::Parser;

use crate::config::{
    DataFormatChoice, DeviceChoice, ExifRotation, Offload, PrecisionChoice, TemplateChoice,
    VerifyGpu,
};

/// Arguments about devices, ranks and images that both subcommands take.
#[derive(Debug, Clone, Default, PartialEq, clap::Args)]
pub struct AskedRanks {
    /// Where ranks compute; auto takes a usable NVIDIA GPU
    #[arg(long, value_enum)]
    pub device: Option<DeviceChoice>,
    /// Where weights are stored: none, cpu, nvme:DIR
    ///
    /// none is the device, cpu host memory, nvme:DIR a directory on a disk.
    #[arg(long, value_name = "TIERS")]
    pub offload: Option<Offload>,
    /// Ranks, which share the weights; 1 by default
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,
    /// Pipeline stages that divide the layers, one rank each; 1 by default, whatever MP_SIZE is
    #[arg(long, value_name = "M")]
    pub mp_size: Option<usize>,
    /// Compare the GPUs with the CPU before the weights are read
    #[arg(long, value_enum)]
    pub verify_gpu: Option<VerifyGpu>,
    /// Compute feed-forward layers in tiles of N tokens or patches
    ///
    /// Their inner values then exist for one tile only: long prompts need less memory. No bit changes. On a GPU N is rounded up to a multiple of 4096.
    #[arg(long, value_name = "N")]
    pub mlp_tile_tokens: Option<usize>,
    /// Largest area of an image in pixels (GLM-4.1V)
    ///
    /// Larger images are resized. The model directory's own bound holds besides. The variable MAX_PIXELS sets it too.
    #[arg(long, value_name = "PIXELS")]
    pub image_max_pixels: Option<usize>,
    /// Smallest area of an image in pixels (GLM-4.1V)
    ///
    /// Smaller images are resized. The model directory's own bound holds besides. The variable MIN_PIXELS sets it too.
    #[arg(long, value_name = "PIXELS")]
    pub image_min_pixels: Option<usize>,
}

/// What the user typed after `launcher generate`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher generate",
    version,
    about = "Answers a prompt about images",
    max_term_width = 100
)]
pub struct GenerateArgs {
    /// Model directory, a run, which means its latest checkpoint, or one checkpoint-N
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Directory of the tokenizer, where it is not in that of --model
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Checkpoint-N directory of a run that trained adapters or parts of the model
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// An image; may be repeated
    ///
    /// Images are placed before the prompt, in this order.
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    /// The question; `<image>`, or `<image_00>`, `<image_01>`, …, place images in it
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Longest answer in tokens; 256 by default
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Sampling temperature; 0, the default, takes the most likely token
    #[arg(long, value_name = "X")]
    pub temperature: Option<f32>,
    /// Nucleus sampling: smallest set of tokens with this probability; 1 by default
    #[arg(long, value_name = "X")]
    pub top_p: Option<f32>,
    /// Sample among the K most likely tokens; 0, the default, means all
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Seed of the sampling; 42 by default
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Number format of weights and activations; by default that of the model files
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionChoice>,
    /// Orientation in EXIF data: apply turns the image, ignore leaves it as published
    #[arg(long, value_enum, value_name = "WHAT")]
    pub exif_rotation: Option<ExifRotation>,
    /// Prompt template of CogVLM, CogVLM2 and CogAgent
    ///
    /// auto takes the template of the model directory.
    #[arg(long, value_enum, value_name = "NAME")]
    pub template: Option<TemplateChoice>,
    /// Whether answers begin with a thought (GLM-4.6V-Flash, MiniCPM 4.5); by default the template decides
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub enable_thinking: Option<bool>,
    /// Longest prompt in tokens, image tokens included; 8192 by default
    #[arg(long, value_name = "TOKENS")]
    pub model_max_length: Option<usize>,
    /// Most slices an image is cut into; 9 by default
    #[arg(long, value_name = "N")]
    pub max_slice_nums: Option<usize>,
    /// Devices, ranks and images.
    #[command(flatten)]
    pub ranks: AskedRanks,
    /// Print the answer with its counts and times as JSON
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
}

/// What the user typed after `launcher eval`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher eval",
    version,
    about = "Evaluates a model on held-out samples and prints JSON",
    max_term_width = 100
)]
pub struct EvalArgs {
    /// Model directory, a run, which means its latest checkpoint, or one checkpoint-N
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Directory of the tokenizer, where it is not in that of --model
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Checkpoint-N directory of a run that trained adapters or parts of the model
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Samples with reference answers, in one of the forms of --data-format
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Directory at which relative paths of images start; by default beside the data file
    #[arg(long, value_name = "DIR")]
    pub image_dir: Option<PathBuf>,
    /// Also write the result, with every answer, to this file
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Longest answer in tokens; by default that of the reference and 8 more
    #[arg(long, value_name = "N")]
    pub max_new_tokens: Option<usize>,
    /// Samples that each rank answers together; 8 by default
    #[arg(long, value_name = "N")]
    pub per_device_eval_batch_size: Option<usize>,
    /// Evaluate only the first N samples of each file
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Skip samples that cannot be used, instead of refusing the data
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub skip_bad_samples: Option<bool>,
    /// Number format of weights and activations; by default that of the model files
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionChoice>,
    /// Form of the data; auto looks at the content
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub data_format: Option<DataFormatChoice>,
    /// Orientation in EXIF data: apply turns the image, ignore leaves it as published
    #[arg(long, value_enum, value_name = "WHAT")]
    pub exif_rotation: Option<ExifRotation>,
    /// Prompt template of CogVLM, CogVLM2 and CogAgent
    ///
    /// auto takes the template of the model directory.
    #[arg(long, value_enum, value_name = "NAME")]
    pub template: Option<TemplateChoice>,
    /// Whether answers begin with a thought (GLM-4.6V-Flash, MiniCPM 4.5); by default the template decides
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub enable_thinking: Option<bool>,
    /// Supervise the token that ends an answer (GLM-4V)
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub train_on_turn_end: Option<bool>,
    /// Longest sample in tokens; longer ones are cut; 2048 by default
    #[arg(long, value_name = "TOKENS")]
    pub model_max_length: Option<usize>,
    /// Most slices an image is cut into; 9 by default
    #[arg(long, value_name = "N")]
    pub max_slice_nums: Option<usize>,
    /// Devices, ranks and images.
    #[command(flatten)]
    pub ranks: AskedRanks,
}
