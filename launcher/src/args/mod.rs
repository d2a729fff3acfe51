//! The command line, exactly as typed: every field optional, no I/O, no defaults.
//!
//! Flags are kebab-case; the snake_case spelling of each is accepted too, so that command lines of
//! the Hugging Face trainers paste in. [`parse`] first rewrites the line onto the frozen set of
//! flags (see `normalise.rs`) and then hands it to clap.

mod bench;
mod ckpt;
mod data_check;
mod explain;
mod explain_config;
mod export;
mod foreign;
mod generate;
mod normalise;
mod plan;
mod presets;
mod synth;
mod table;
mod watch;

use std::path::PathBuf;

use clap::{CommandFactory, Parser};

use crate::config::{
    Collectives, CudaGraph, DataFormatChoice, DeviceChoice, EarlyStep, Fault, GradDtype,
    InitChoice, LateStep, LrScale, NvmeIo, Offload, PrecisionChoice, PureBf16Moments,
    PureBf16Weights, Recompute, ReportTo, RopeChoice, Scheduler, SchedulerKwargs, Strategy,
    TemplateChoice, UploadAhead, Workers,
};
use crate::error_format::ErrorFormat;
use crate::exit::Failure;
use crate::identity::RankIs;
use crate::units::parse_bytes;

pub use bench::BenchNvmeArgs;
pub use ckpt::{CkptCommand, CkptConsolidateArgs, CkptLsArgs, CkptReshardArgs, CkptVerifyArgs};
pub use data_check::DataCheckArgs;
pub use explain::{ExplainArgs, Lang};
pub use explain_config::ExplainConfigArgs;
pub use export::{ExportArgs, ExportDtype};
pub use foreign::{IGNORED, RESTRICTED};
pub use generate::{EvalArgs, GenerateArgs};
use normalise::Verb;
pub(crate) use normalise::{FileKey, file_key, nearest};
pub use normalise::{Note, VERBS};
pub use plan::{Hardware, PlanArgs};
pub use presets::{PRESETS, Preset};
pub use synth::{SynthArgs, SynthWeights};
pub(crate) use table::value_name;
pub use table::{flag_table, with_flags};
pub use watch::WatchArgs;

/// What the user typed after `launcher`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher",
    version,
    about = "Fine-tunes vision-language models with sharded optimizer states",
    long_about = "Fine-tunes vision-language models with sharded optimizer states (ZeRO 0-3) and offload to host \
memory.\nWithout --model it trains the built-in demo. Every flag is also accepted in snake_case.\n\
Other verbs, each with its own --help: \
plan, doctor, data check, generate, eval, export, ckpt ls, ckpt verify, ckpt reshard, ckpt consolidate, watch, explain, explain-config, synth, bench nvme.",
    max_term_width = 100
)]
pub struct Args {
    /// Folder of the model: config.json, tokenizer and processor files, safetensors
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub model: Option<PathBuf>,
    /// Training samples: a file or folder in one of the forms of --data-format
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub data: Option<PathBuf>,
    /// Held-out samples in the same format
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub eval_data: Option<PathBuf>,
    /// Folder of the run: logs, reports, checkpoints
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub output: Option<PathBuf>,
    /// Let CogAgent answer samples without a picture by leaving its cross attention out; its published code refuses them
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub text_without_cross: Option<bool>,
    /// A published recipe: sets the flags that are listed for it, where the line does not have them
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(PRESETS.map(|p| p.name)), help_heading = "Model and data")]
    pub preset: Option<String>,
    /// Flags in a file, under their names: TOML, or the YAML of a trainer; the line comes before it
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub config: Option<PathBuf>,
    /// Form of the data; auto goes by what the file or folder holds
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        help_heading = "Model and data"
    )]
    pub data_format: Option<DataFormatChoice>,
    /// How CogVLM's, CogVLM2's and CogAgent's prompts are written; auto is the model folder's way
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Model and data")]
    pub template: Option<TemplateChoice>,
    /// Let GLM-4V learn the token that ends an answer, so that it stops; its published recipe does not
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub train_on_turn_end: Option<bool>,
    /// Where the weights come from
    #[arg(
        long,
        value_enum,
        value_name = "SOURCE",
        help_heading = "Model and data"
    )]
    pub init: Option<InitChoice>,
    /// Longest sample in tokens; longer ones are cut
    #[arg(long, value_name = "TOKENS", help_heading = "Model and data")]
    pub model_max_length: Option<usize>,
    /// Most slices a picture is cut into
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    pub max_slice_nums: Option<usize>,
    /// Leave samples that cannot be used out instead of refusing the data
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub skip_bad_samples: Option<bool>,

    /// Use only so many of the first training samples
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    pub limit: Option<usize>,
    /// Threads per rank that read samples ahead: auto, or a number; 0 reads them where they are needed
    #[arg(long, value_name = "N", value_parser = workers, help_heading = "Model and data")]
    pub data_workers: Option<Workers>,
    /// Train the longest samples in the first update, so that a memory peak shows at once
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub worst_first: Option<bool>,

    /// ZeRO stage: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are sharded
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u8).range(0..=3), help_heading = "Memory and ranks")]
    pub zero: Option<u8>,
    /// Configuration file of DeepSpeed: every key is honoured, refused, or said to have no effect
    #[arg(long, value_name = "FILE", help_heading = "Memory and ranks")]
    pub deepspeed: Option<PathBuf>,
    /// Make misplaced, unknown and old keys of --deepspeed an error instead of a warning
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub strict_config: Option<bool>,
    /// Where states rest: none, cpu, nvme:DIR, or by kind, as param=nvme:DIR,optimizer=cpu,activation=cpu
    #[arg(long, value_name = "TIERS", help_heading = "Memory and ranks")]
    pub offload: Option<Offload>,
    /// Consecutive ranks that hold one copy of what --zero shards, replicated across groups; all ranks by default
    #[arg(long, value_name = "RANKS", help_heading = "Memory and ranks")]
    pub shard_group: Option<usize>,
    /// What carries weights and gradients between GPUs: their own reads of each other's memory (ipc), host memory (shm), or NCCL by request; auto takes ipc where all GPUs of the run reach each other, else shm
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub collectives: Option<Collectives>,
    /// The way to files of --offload nvme: auto measures and takes the faster
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub nvme_io: Option<NvmeIo>,
    /// Update units while backward runs, from a second copy of their states: auto does so where it only takes disk and saves traffic, and beside GPUs, with --offload cpu, in host memory that the plan leaves, but for a tenth of it
    #[arg(
        long,
        value_name = "auto|off|all|BYTES",
        help_heading = "Memory and ranks"
    )]
    pub early_step: Option<EarlyStep>,
    /// Whether units are updated while the next pass begins, each before it is used: auto does so beside GPUs with the optimizer in host memory; no result depends on it
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub late_step: Option<LateStep>,
    /// Longest wait of a rank for another, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Memory and ranks")]
    pub comm_timeout: Option<u64>,
    /// Number of ranks on this machine, and on each other one; on GPUs one on each that is visible, by default
    #[arg(long, value_name = "N", help_heading = "Memory and ranks")]
    pub nproc: Option<usize>,
    /// Machines of the run, as `host slots=N` lines; the same command runs on each of them
    #[arg(long, value_name = "FILE", help_heading = "Memory and ranks")]
    pub hostfile: Option<PathBuf>,
    /// Only these machines and slots of the hostfile, as host1@host2:0,2
    #[arg(long, value_name = "HOSTS", help_heading = "Memory and ranks")]
    pub include: Option<String>,
    /// All but these machines and slots of the hostfile
    #[arg(long, value_name = "HOSTS", help_heading = "Memory and ranks")]
    pub exclude: Option<String>,
    /// What RANK counts where the environment does not tell: machines, each of which starts --nproc ranks, or processes
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        help_heading = "Memory and ranks"
    )]
    pub rank_is: Option<RankIs>,
    /// Where the ranks compute; auto takes NVIDIA GPUs where there is one that can be used
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub device: Option<DeviceChoice>,
    /// Whether runs of kernels on GPUs are queued as one CUDA graph when they come again; no result depends on it
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub cuda_graph: Option<CudaGraph>,
    /// Whether weights that do not stay on a GPU come there one unit before they are used, beside the work of the unit in between: auto does so where the plan still fits with one more unit's weights; no result depends on it
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub upload_ahead: Option<UploadAhead>,
    /// Number format of weights and activations
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub precision: Option<PrecisionChoice>,
    /// Where rotary angles are rounded: as the model's own code does, or nowhere
    #[arg(
        long,
        value_enum,
        value_name = "WHERE",
        help_heading = "Memory and ranks"
    )]
    pub rope_precision: Option<RopeChoice>,
    /// `--bf16 true` is `--precision bf16`, `--bf16 false` is `--precision f32`
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub bf16: Option<bool>,
    /// `--fp16 true` is `--precision fp16`
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub fp16: Option<bool>,
    /// Number format of accumulated gradients; the default is f32, bf16 with --precision pure-bf16
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub grad_dtype: Option<GradDtype>,
    /// How pure bf16 stores weights
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub pure_bf16_weights: Option<PureBf16Weights>,
    /// Number format of the moments beside pure bf16 weights
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub pure_bf16_moments: Option<PureBf16Moments>,
    /// Factor on the loss of fp16; 0 finds it by trial
    #[arg(long, value_name = "FACTOR", help_heading = "Memory and ranks")]
    pub loss_scale: Option<f64>,
    /// The first dynamic loss scale is two to this power [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100), help_heading = "Memory and ranks")]
    pub initial_scale_power: Option<u32>,
    /// Updates without overflow after which a dynamic loss scale doubles [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Memory and ranks")]
    pub loss_scale_window: Option<u64>,
    /// Overflows until a dynamic loss scale is halved [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Memory and ranks")]
    pub hysteresis: Option<u32>,
    /// The smallest dynamic loss scale; an overflow there ends the run [default: 1]
    #[arg(long, value_name = "FACTOR", help_heading = "Memory and ranks")]
    pub min_loss_scale: Option<f64>,
    /// Host memory the run may use over all ranks of a machine, such as 64G or 512MiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "Memory and ranks")]
    pub host_memory_limit: Option<u64>,
    /// Device memory each rank may use
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "Memory and ranks")]
    pub device_memory_limit: Option<u64>,

    /// Towers whose activations are computed again in backward instead of kept: all, none, or of llm,vit,resampler
    #[arg(long, value_name = "TOWERS", help_heading = "Memory and ranks")]
    pub checkpoint_activations: Option<Recompute>,
    /// Layers that share one kept input: more than 1 needs less memory, and computes the other inputs again in backward
    #[arg(long, value_name = "N", help_heading = "Memory and ranks")]
    pub checkpoint_num_layers: Option<usize>,
    /// `--gradient-checkpointing true` is `--checkpoint-activations all`, false is none
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub gradient_checkpointing: Option<bool>,

    /// Optimizer updates; -1 leaves the length to --num-train-epochs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(-1..), help_heading = "Training")]
    pub max_steps: Option<i64>,
    /// Passes over the data
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub num_train_epochs: Option<f64>,
    /// Samples per rank and micro-batch
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub per_device_train_batch_size: Option<usize>,
    /// Samples per rank and batch of the evaluation
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub per_device_eval_batch_size: Option<usize>,
    /// Micro-batches per optimizer update
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub gradient_accumulation_steps: Option<usize>,
    /// Samples per optimizer update over all ranks; two of this, the batch size and the accumulation give the third
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub global_batch: Option<usize>,
    /// Take the largest batch size that the plan says fits, and show how memory grows with it
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Training")]
    pub find_batch: Option<bool>,
    /// Peak learning rate
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub learning_rate: Option<f64>,
    /// What ranks × accumulation multiply the learning rate by
    #[arg(long, value_enum, value_name = "RULE", help_heading = "Training")]
    pub lr_scale: Option<LrScale>,
    /// Course of the learning rate
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Training")]
    pub lr_scheduler_type: Option<Scheduler>,
    /// What warmup_lr, warmup_decay_lr and warmup_cosine_lr take besides, as warmup_type=linear,cos_min_ratio=0.1
    #[arg(long, value_name = "NAME=X", help_heading = "Training")]
    pub lr_scheduler_kwargs: Option<SchedulerKwargs>,
    /// Warmup as a share of all steps
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub warmup_ratio: Option<f64>,
    /// Warmup in steps; above 0 it comes before --warmup-ratio
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub warmup_steps: Option<u64>,
    /// Decoupled weight decay; biases and norm weights do not decay
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// Parts that do not decay, written as for --train, instead of biases and norm weights
    #[arg(long, value_name = "PARTS", help_heading = "Training")]
    pub no_decay: Option<String>,
    /// Decay of the first moment
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub adam_beta1: Option<f64>,
    /// Decay of the second moment
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub adam_beta2: Option<f64>,
    /// Added to the root of the second moment
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub adam_epsilon: Option<f64>,
    /// Largest global gradient norm; 0 turns clipping off
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub max_grad_norm: Option<f64>,
    /// Seed of data order, initial weights and stochastic rounding
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub seed: Option<u64>,

    /// Exactly the parts that train, adapters aside: modules, norm, bias, regular expressions, separated by commas
    #[arg(long, value_name = "PARTS", help_heading = "What is trained")]
    pub train: Option<String>,
    /// Parts that stay frozen whatever else trains, written as for --train
    #[arg(long, value_name = "PARTS", help_heading = "What is trained")]
    pub freeze: Option<String>,
    /// Learning rates of parts, separated by commas: resampler=1e-5,vpm=2e-6
    #[arg(long, value_name = "PART=X", help_heading = "What is trained")]
    pub lr: Option<String>,
    /// Train low-rank adapters on the language model
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub use_lora: Option<bool>,
    /// Rank of the adapters
    #[arg(long, value_name = "N", help_heading = "What is trained")]
    pub lora_rank: Option<usize>,
    /// Scale of the adapters: alpha ÷ rank
    #[arg(long, value_name = "X", help_heading = "What is trained")]
    pub lora_alpha: Option<f64>,
    /// Share of the adapters' inputs that training sets to zero; which ones depends on seed, sample and layer only
    #[arg(long, value_name = "P", help_heading = "What is trained")]
    pub lora_dropout: Option<f64>,
    /// Layers with adapters: names (q_proj,v_proj), attn, mlp, all, or a regular expression over whole module paths
    #[arg(long, value_name = "REGEX", help_heading = "What is trained")]
    pub lora_target_modules: Option<String>,
    /// Decoder layers with adapters, such as 0..16
    #[arg(long, value_name = "A..B", help_heading = "What is trained")]
    pub lora_layers: Option<String>,
    /// One adapter for each of the queries, keys and values that a model keeps in one weight, instead of one for all
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub lora_per_projection: Option<bool>,
    /// Learned keys and values per decoder layer (p-tuning v2); CogVLM, CogVLM2 and CogAgent
    #[arg(long, value_name = "N", help_heading = "What is trained")]
    pub ptuning_tokens: Option<usize>,
    /// Modules that train in full beside the adapters, separated by commas; none for none
    #[arg(long, value_name = "NAMES", help_heading = "What is trained")]
    pub modules_to_save: Option<String>,
    /// Train the vision tower
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub tune_vision: Option<bool>,
    /// Train the language model
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub tune_llm: Option<bool>,

    /// Steps between checkpoints
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub save_steps: Option<u64>,
    /// When to save; the end of the run is always saved except with no
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        help_heading = "Saving, evaluation, logs"
    )]
    pub save_strategy: Option<Strategy>,
    /// Checkpoints to keep; older ones are removed
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub save_total_limit: Option<usize>,
    /// Steps between evaluations
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub eval_steps: Option<u64>,
    /// When to evaluate during training
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        help_heading = "Saving, evaluation, logs"
    )]
    pub eval_strategy: Option<Strategy>,
    /// Steps between log lines
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub logging_steps: Option<u64>,
    /// Steps of which each rank writes what it did when, for Chrome's and Perfetto's trace viewers, as in 3..5
    #[arg(
        long,
        value_name = "FROM..TO",
        help_heading = "Saving, evaluation, logs"
    )]
    pub trace_steps: Option<String>,
    /// When to log
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        help_heading = "Saving, evaluation, logs"
    )]
    pub logging_strategy: Option<Strategy>,
    /// Further reports
    #[arg(
        long,
        value_enum,
        value_name = "WHERE",
        help_heading = "Saving, evaluation, logs"
    )]
    pub report_to: Option<ReportTo>,
    /// How a failure is printed on standard error; every verb takes this flag
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        value_name = "FORMAT",
        help_heading = "Saving, evaluation, logs"
    )]
    pub error_format: Option<ErrorFormat>,
    /// Continue from a checkpoint folder, or from the latest one in --output (auto)
    #[arg(
        long,
        value_name = "auto|PATH",
        help_heading = "Saving, evaluation, logs"
    )]
    pub resume: Option<String>,
    /// Start the run again from its newest whole checkpoint, at most so often, when a rank died
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub max_restarts: Option<u32>,
    /// With --max-restarts: go on with fewer ranks and the same global batch where one is gone for good
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Saving, evaluation, logs")]
    pub elastic: Option<bool>,
    /// For tests of a cluster or of this program: let a fault happen, such as kill:rank=1,step=3; may be given several times
    #[arg(long, value_name = "SPEC", help_heading = "Saving, evaluation, logs")]
    pub inject: Vec<Fault>,
}

/// What the user typed after `launcher doctor`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher doctor",
    version,
    about = "Reports what this machine offers for training and what stands in the way",
    max_term_width = 100
)]
pub struct DoctorArgs {
    /// Print the report as JSON with stable keys
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
}

/// Other spellings of flags, in snake_case as Hugging Face writes them.
pub const ALIASES: [(&str, &str); 12] = [
    ("model_name_or_path", "model"),
    ("data_path", "data"),
    ("eval_data_path", "eval-data"),
    ("output_dir", "output"),
    ("lora_r", "lora-rank"),
    ("lora_modules_to_save", "modules-to-save"),
    ("max_train_samples", "limit"),
    ("dataloader_num_workers", "data-workers"),
    ("global_batch_size", "global-batch"),
    ("evaluation_strategy", "eval-strategy"),
    ("resume_from_checkpoint", "resume"),
    ("deepspeed_config", "deepspeed"),
];

/// What a command line asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Train with these arguments; the notes are to be shown once.
    Train {
        /// The arguments.
        args: Box<Args>,
        /// The flags as they were typed, each as `--name=value`.
        typed: Vec<String>,
        /// Flags without effect here.
        notes: Vec<Note>,
    },
    /// Show what a configuration file becomes.
    ExplainConfig {
        /// The arguments.
        args: Box<ExplainConfigArgs>,
        /// The flags as they were typed, each as `--name=value`; the file is not among them.
        typed: Vec<String>,
    },
    /// Plan a run.
    Plan {
        /// The arguments.
        args: Box<PlanArgs>,
        /// The flags as they were typed, each as `--name=value`.
        typed: Vec<String>,
        /// Flags without effect here.
        notes: Vec<Note>,
    },
    /// Report on the machine.
    Doctor(DoctorArgs),
    /// Show a run from its folder.
    Watch(WatchArgs),
    /// Explain an error code.
    Explain(ExplainArgs),
    /// Check a data file.
    DataCheck(Box<DataCheckArgs>),
    /// Answer a prompt.
    Generate(Box<GenerateArgs>),
    /// Evaluate a model on samples.
    Eval(Box<EvalArgs>),
    /// Write weights for other programs.
    Export(ExportArgs),
    /// List, verify, cut or widen checkpoints.
    Ckpt(CkptCommand),
    /// Write a model folder with random weights.
    Synth(SynthArgs),
    /// Measure a disk.
    BenchNvme(BenchNvmeArgs),
    /// Print this text on stdout and end well: help or version.
    Print(String),
}

/// Parses a command line without the program's name.
///
/// # Errors
/// A usage failure (exit 2): unknown verb or flag, a value out of range, contradicting spellings.
pub fn parse(argv: &[String]) -> Result<Command, Failure> {
    let (verb, rest) = normalise::split_verb(argv)?;
    let parsed = match verb {
        Verb::Train => {
            let mut line = normalise::normalise(verb, rest, &Args::command())?;
            let typed = line.args.clone();
            presets::expand(&mut line.args);
            Args::try_parse_from(words(&line)).map(|args| Command::Train {
                args: Box::new(args),
                typed,
                notes: line.notes,
            })
        }
        Verb::ExplainConfig => {
            let line = normalise::normalise(verb, rest, &ExplainConfigArgs::described())?;
            let typed = line.args.iter().filter(|word| word.starts_with("--"));
            let typed = typed.cloned().collect();
            ExplainConfigArgs::parse_words(&words(&line)).map(|args| Command::ExplainConfig {
                args: Box::new(args),
                typed,
            })
        }
        Verb::Plan => {
            let mut line = normalise::normalise(verb, rest, &PlanArgs::described())?;
            let typed = line.args.clone();
            presets::expand(&mut line.args);
            PlanArgs::parse_words(&words(&line)).map(|args| Command::Plan {
                args: Box::new(args),
                typed,
                notes: line.notes,
            })
        }
        Verb::Doctor => {
            let line = normalise::normalise(verb, rest, &DoctorArgs::command())?;
            DoctorArgs::try_parse_from(words(&line)).map(Command::Doctor)
        }
        Verb::Watch => {
            let line = normalise::normalise(verb, rest, &WatchArgs::command())?;
            WatchArgs::try_parse_from(words(&line)).map(Command::Watch)
        }
        Verb::Explain => {
            let line = normalise::normalise(verb, rest, &ExplainArgs::command())?;
            ExplainArgs::try_parse_from(words(&line)).map(Command::Explain)
        }
        Verb::DataCheck => {
            let line = normalise::normalise(verb, rest, &DataCheckArgs::command())?;
            DataCheckArgs::try_parse_from(words(&line))
                .map(|args| Command::DataCheck(Box::new(args)))
        }
        Verb::Generate => {
            let line = normalise::normalise(verb, rest, &GenerateArgs::command())?;
            GenerateArgs::try_parse_from(words(&line)).map(|args| Command::Generate(Box::new(args)))
        }
        Verb::Eval => {
            let line = normalise::normalise(verb, rest, &EvalArgs::command())?;
            EvalArgs::try_parse_from(words(&line)).map(|args| Command::Eval(Box::new(args)))
        }
        Verb::Export => {
            let line = normalise::normalise(verb, rest, &ExportArgs::command())?;
            ExportArgs::try_parse_from(words(&line)).map(Command::Export)
        }
        Verb::CkptLs => {
            let line = normalise::normalise(verb, rest, &CkptLsArgs::command())?;
            CkptLsArgs::try_parse_from(words(&line)).map(|a| Command::Ckpt(CkptCommand::Ls(a)))
        }
        Verb::CkptVerify => {
            let line = normalise::normalise(verb, rest, &CkptVerifyArgs::command())?;
            CkptVerifyArgs::try_parse_from(words(&line))
                .map(|a| Command::Ckpt(CkptCommand::Verify(a)))
        }
        Verb::CkptReshard => {
            let line = normalise::normalise(verb, rest, &CkptReshardArgs::command())?;
            CkptReshardArgs::try_parse_from(words(&line))
                .map(|a| Command::Ckpt(CkptCommand::Reshard(a)))
        }
        Verb::CkptConsolidate => {
            let line = normalise::normalise(verb, rest, &CkptConsolidateArgs::command())?;
            CkptConsolidateArgs::try_parse_from(words(&line))
                .map(|a| Command::Ckpt(CkptCommand::Consolidate(a)))
        }
        Verb::BenchNvme => {
            let line = normalise::normalise(verb, rest, &BenchNvmeArgs::command())?;
            BenchNvmeArgs::try_parse_from(words(&line)).map(Command::BenchNvme)
        }
        Verb::Synth => {
            let line = normalise::normalise(verb, rest, &SynthArgs::command())?;
            SynthArgs::try_parse_from(words(&line)).map(Command::Synth)
        }
    };
    parsed.or_else(|error| {
        if error.use_stderr() {
            Err(usage_from(&error))
        } else {
            Ok(Command::Print(error.render().to_string()))
        }
    })
}

/// The arguments of a rewritten line of training, presets expanded.
///
/// # Errors
/// A value that its flag does not take (exit 2).
pub(crate) fn train_args(typed: &[String]) -> Result<Args, Failure> {
    Args::try_parse_from(expanded(typed)).map_err(|error| usage_from(&error))
}

/// As [`train_args`], for a line of `launcher plan`.
pub(crate) fn plan_args(typed: &[String]) -> Result<PlanArgs, Failure> {
    PlanArgs::parse_words(&expanded(typed)).map_err(|error| usage_from(&error))
}

fn expanded(typed: &[String]) -> Vec<String> {
    let mut line = normalise::Line {
        args: typed.to_vec(),
        notes: Vec::new(),
    };
    presets::expand(&mut line.args);
    words(&line)
}

fn workers(text: &str) -> Result<Workers, String> {
    text.parse()
}

/// A rewritten line as clap takes it: the program's name comes first.
fn words(line: &normalise::Line) -> Vec<String> {
    let mut words = vec!["launcher".to_string()];
    words.extend(line.args.iter().cloned());
    words
}

/// clap's first paragraph says what is wrong; its usage text does not help here.
fn usage_from(error: &clap::Error) -> Failure {
    let text = error.render().to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let title = lines
        .next()
        .unwrap_or("bad command line")
        .trim_start_matches("error: ");
    let detail = lines.find(|line| line.starts_with('['));
    let mut failure = Failure::usage(title, "a flag has a value it does not take");
    if let Some(detail) = detail {
        failure = failure.evidence(detail);
    }
    failure.next("`launcher --help` lists every flag")
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn parse_line(line: &str) -> Result<(Args, Vec<Note>), Failure> {
        let argv: Vec<String> = line.split_whitespace().map(str::to_string).collect();
        match parse(&argv)? {
            Command::Train { args, notes, .. } => Ok((*args, notes)),
            other => panic!("parsed as {other:?}"),
        }
    }

    fn args(line: &str) -> Args {
        parse_line(line).expect("parses").0
    }

    fn refused(line: &str) -> Failure {
        let failure = parse_line(line).expect_err("refused");
        assert_eq!(failure.code.status(), 2);
        failure
    }

    /// The set of flags is a promise to scripts: change it only together with CHANGELOG.md.
    #[test]
    fn the_set_of_flags_is_frozen() {
        let command = Args::command();
        let mut names: Vec<_> = command
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .collect();
        names.sort_unstable();
        assert_eq!(
            names.join(" "),
            "adam-beta1 adam-beta2 adam-epsilon bf16 checkpoint-activations checkpoint-num-layers collectives comm-timeout config cuda-graph data data-format data-workers deepspeed device \
             device-memory-limit early-step elastic error-format eval-data eval-steps eval-strategy exclude find-batch fp16 freeze global-batch grad-dtype \
             gradient-accumulation-steps gradient-checkpointing host-memory-limit hostfile hysteresis include init initial-scale-power inject late-step learning-rate \
             limit logging-steps logging-strategy lora-alpha lora-dropout lora-layers lora-per-projection lora-rank \
             lora-target-modules loss-scale loss-scale-window lr lr-scale lr-scheduler-kwargs lr-scheduler-type max-grad-norm max-restarts max-slice-nums max-steps min-loss-scale model \
             model-max-length modules-to-save no-decay nproc num-train-epochs nvme-io offload output \
             per-device-eval-batch-size per-device-train-batch-size precision preset ptuning-tokens pure-bf16-moments pure-bf16-weights rank-is report-to resume \
             rope-precision save-steps save-strategy \
             save-total-limit seed shard-group skip-bad-samples strict-config template text-without-cross trace-steps train train-on-turn-end tune-llm tune-vision upload-ahead use-lora warmup-ratio \
             warmup-steps weight-decay worst-first zero"
        );
        for (alias, target) in ALIASES {
            assert!(names.contains(&target), "{alias} -> {target}");
        }
    }

    #[test]
    fn an_empty_line_sets_nothing() {
        assert_eq!(args(""), Args::default());
    }

    #[test]
    fn kebab_snake_and_equals_are_the_same() {
        let expected = Args {
            learning_rate: Some(1e-5),
            max_steps: Some(3),
            ..Args::default()
        };
        assert_eq!(args("--learning-rate 1e-5 --max-steps=3"), expected);
        assert_eq!(args("--learning_rate=1e-5 --max_steps 3"), expected);
        assert_eq!(args("train --learning_rate 1e-5 --max-steps 3"), expected);
    }

    #[test]
    fn booleans_take_an_optional_literal() {
        assert_eq!(args("--use-lora").use_lora, Some(true));
        assert_eq!(args("--use_lora false --zero 2").use_lora, Some(false));
        assert_eq!(args("--tune_llm True").tune_llm, Some(true));
        refused("--use-lora maybe");
    }

    #[test]
    fn a_minicpm_command_line_pastes_in() {
        let (args, notes) = parse_line(
            "--model_name_or_path m --llm_type qwen --data_path d.json --eval_data_path e.json \
             --remove_unused_columns false --label_names labels --prediction_loss_only false \
             --bf16 true --bf16_full_eval true --fp16 false --fp16_full_eval false --do_train \
             --do_eval --tune_vision true --tune_llm true --model_max_length 2048 \
             --max_slice_nums 9 --max_steps 10000 --eval_steps 1000 --output_dir out \
             --logging_dir out/logs --logging_strategy steps --per_device_train_batch_size 1 \
             --per_device_eval_batch_size 1 --gradient_accumulation_steps 1 \
             --evaluation_strategy steps --save_strategy steps --save_steps 1000 \
             --save_total_limit 10 --learning_rate 1e-6 --weight_decay 0.1 --adam_beta2 0.95 \
             --warmup_ratio 0.01 --lr_scheduler_type cosine --logging_steps 1 \
             --gradient_checkpointing true --deepspeed ds_config_zero3.json --report_to tensorboard",
        )
        .expect("pastes in");
        assert_eq!(args.model, Some("m".into()));
        assert_eq!(args.output, Some("out".into()));
        assert_eq!(args.bf16, Some(true));
        assert_eq!(args.lr_scheduler_type, Some(Scheduler::Cosine));
        let listed: Vec<_> = notes.iter().map(|note| note.flag.as_str()).collect();
        for flag in [
            "--llm_type",
            "--remove_unused_columns",
            "--label_names",
            "--do_train",
        ] {
            assert!(listed.contains(&flag), "{flag} missing in {listed:?}");
        }
        assert!(!listed.contains(&"--bf16"));
        assert_eq!(args.deepspeed, Some("ds_config_zero3.json".into()));
    }

    #[test]
    fn an_unknown_flag_names_the_nearest_one() {
        let failure = refused("--learning-rat 1");
        assert!(failure.next[0].contains("--learning-rate"), "{failure}");
        let failure = refused("--model_name_or_pth x");
        assert!(
            failure.next[0].contains("--model_name_or_path"),
            "{failure}"
        );
    }

    #[test]
    fn verbs_that_do_not_exist_yet_say_so() {
        let exists = |verb: &str| {
            let known = Verb::ALL;
            known
                .iter()
                .any(|(_, name)| name.split(' ').next() == Some(verb))
        };
        for verb in VERBS.iter().filter(|verb| !exists(verb)) {
            assert!(refused(verb).title.contains("not available yet"));
        }
        assert!(refused("trian --zero 3").next[0].contains("train"));
    }

    #[test]
    fn doctor_has_flags_of_its_own() {
        let doctor = |line: &str| {
            let argv: Vec<String> = line.split_whitespace().map(str::to_string).collect();
            parse(&argv)
        };
        for (line, json) in [
            ("doctor", None),
            ("doctor --json", Some(true)),
            ("doctor --json=false", Some(false)),
            ("doctor --json True", Some(true)),
        ] {
            let expected = Command::Doctor(DoctorArgs { json });
            assert_eq!(doctor(line).expect("parses"), expected, "{line}");
        }
        let printed = doctor("doctor --help").expect("prints");
        assert!(matches!(printed, Command::Print(text) if text.contains("--json")));
        for (line, next) in [
            ("doctor --jsno", "did you mean --json?"),
            ("doctor --zero 3", "launcher doctor --help"),
            ("doctor --deepspeed x.json", "launcher doctor --help"),
            ("doctor now", "launcher doctor --help"),
            ("doctr", "did you mean `launcher doctor`?"),
        ] {
            let failure = doctor(line).expect_err(line);
            assert!(failure.next[0].contains(next), "{line}: {failure}");
        }
        refused("doctor --json maybe");
    }

    #[test]
    fn pictures_may_be_given_several_times_and_other_flags_may_not() {
        let parsed = |line: &str| {
            let argv: Vec<String> = line.split_whitespace().map(str::to_string).collect();
            parse(&argv)
        };
        let line = "generate --model m --image a.png --image=b.png --image a.png --top_k 3";
        let Ok(Command::Generate(args)) = parsed(line) else {
            panic!("{line} is not parsed");
        };
        assert_eq!(args.image, ["a.png", "b.png", "a.png"].map(PathBuf::from));
        assert_eq!((args.model, args.top_k), (Some("m".into()), Some(3)));
        let Ok(Command::Eval(args)) = parsed("eval --model_name_or_path m --data_path d.json")
        else {
            panic!("eval is not parsed");
        };
        assert_eq!(args.data, Some("d.json".into()));
        let failure = parsed("generate --prompt a --prompt b").expect_err("refused");
        assert!(failure.title.contains("contradict"), "{failure}");
        for line in ["generate --zero 3", "eval --image a.png", "eval --limit x"] {
            parsed(line).expect_err(line);
        }
    }

    #[test]
    fn watch_takes_a_folder_before_and_after_its_flags() {
        let watch = |line: &str| {
            let argv: Vec<String> = line.split_whitespace().map(str::to_string).collect();
            parse(&argv)
        };
        for (line, once, json) in [
            ("watch runs/x", None, None),
            ("watch runs/x --once --json", Some(true), Some(true)),
            ("watch --once runs/x", Some(true), None),
            (
                "watch --once false --json true runs/x",
                Some(false),
                Some(true),
            ),
        ] {
            let run = "runs/x".into();
            let expected = Command::Watch(WatchArgs { run, once, json });
            assert_eq!(watch(line).expect("parses"), expected, "{line}");
        }
        for line in ["watch", "watch a b", "watch a --zero 3"] {
            assert_eq!(watch(line).expect_err(line).code.status(), 2, "{line}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for line in [
            "--zero 4",
            "--max-steps -2",
            "--nproc x",
            "--precision fp8",
            "--initial-scale-power -1",
            "--device gpu",
            "--offload nvme",
            "--zero",
            "--lr-scheduler-type polynomial",
            "--report_to wandb",
            "--host-memory-limit 5X",
            "stray --zero 1",
            "--zero 1 stray",
        ] {
            refused(line);
        }
    }

    #[test]
    fn two_spellings_must_agree() {
        assert_eq!(
            args("--model a --model_name_or_path a").model,
            Some("a".into())
        );
        let failure = refused("--model a --model_name_or_path b");
        assert!(
            failure.title.contains("--model_name_or_path") && failure.title.contains("--model ")
        );
    }

    #[test]
    fn help_and_version_print_and_end_well() {
        for flag in ["--help", "-h", "--version", "-V"] {
            let command = parse(&[flag.to_string()]).expect("prints");
            assert!(matches!(command, Command::Print(_)), "{flag}");
        }
    }
}
