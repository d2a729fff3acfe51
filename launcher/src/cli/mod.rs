//! The command line: flags as typed, every field optional ([`Args`]); files that become flags (`file/`); and the
//! configuration that both lead to (`resolve/`).
//!
//! Flags are kebab-case. The snake_case spelling of each is accepted too, so command lines of the Hugging Face
//! trainers work. [`parse`] first rewrites the line to the frozen set of flags (see `normalise.rs`), then passes it
//! to clap.

mod bench;
mod ckpt;
mod data_check;
mod explain;
mod explain_config;
mod export;
pub(crate) mod file;
mod foreign;
mod generate;
mod help;
mod normalise;
mod plan;
mod presets;
mod resolve;
mod synth;
mod table;
mod trainers;
mod usage;
mod watch;

use std::path::PathBuf;

use clap::Parser;

use crate::config::{
    BestMetric, BindCores, Collectives, CpuMathChoice, CudaGraph, DataFormatChoice, DeviceChoice,
    Every, ExifRotation, Fault, GradDtype, InitChoice, LrScale, Moments, NvmeIo, Offload,
    OptimizerInBackward, OptimizerInForward, PrecisionChoice, PrefetchWeights, PureBf16Moments,
    PureBf16Weights, QuantizeFormat, Recompute, ReportTo, RopeChoice, Scheduler, SchedulerKwargs,
    Strategy, TemplateChoice, VerifyGpu, Workers, ZeroChoice,
};
use crate::error::Failure;
use crate::error::format::ErrorFormat;
use crate::lang::{Lang, Text};
use crate::rank_env::identity::RankIs;
use crate::units::parse_bytes;
use usage::usage_from;

pub use bench::BenchNvmeArgs;
pub use ckpt::{CkptCommand, CkptConsolidateArgs, CkptLsArgs, CkptReshardArgs, CkptVerifyArgs};
pub use data_check::DataCheckArgs;
pub use explain::ExplainArgs;
pub use explain_config::ExplainConfigArgs;
pub use export::{ExportArgs, ExportDtype, ExportFormat, ImportArgs};
pub use foreign::{IGNORED, RESTRICTED};
pub(crate) use foreign::{OTHER_REPORT, split_reports};
pub use generate::{AskedRanks, EvalArgs, GenerateArgs};
pub use help::{CompletionsArgs, ManArgs};
pub use normalise::Note;
use normalise::Subcommand;
pub(crate) use normalise::{FileKey, file_key, typed_value};
pub use plan::{Hardware, PlanArgs};
pub use presets::{PRESETS, Preset};
pub(crate) use resolve::refuse_weights;
pub(crate) use resolve::resolve_on;
pub use resolve::{Resolved, resolve};
pub use synth::{SynthArgs, SynthWeights};
pub use table::flag_table;
pub use trainers::DefaultsOf;
pub use watch::WatchArgs;

/// What the user typed after `launcher`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(
    name = "launcher",
    version,
    about = "Fine-tunes vision-language models larger than the GPUs at hand: ZeRO sharding and offload",
    max_term_width = 100
)]
pub struct Args {
    /// Model directory: config.json, tokenizer, weights; or SAT's
    ///
    /// Weights are safetensors files or pytorch_model.bin. Ranks of a SAT checkpoint in two directories are joined by a
    /// comma.
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub model: Option<PathBuf>,
    /// Directory of the tokenizer, where it is not in that of --model
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub tokenizer: Option<PathBuf>,
    /// Training samples: files or directories, separated by commas
    ///
    /// Their form is one of --data-format. FILE:2 takes a file twice an epoch, FILE:0.5 a half of it, FILE#500 as many samples.
    /// DIR#train is one split of several; - is standard input.
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub data: Option<PathBuf>,
    /// Held-out samples, in the same forms as --data
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub eval_data: Option<PathBuf>,
    /// Names of data sets in dataset_info.json (LLaMA-Factory), separated by commas
    ///
    /// It stands for --data. A name that is a path is that file.
    #[arg(long, value_name = "NAMES", help_heading = "Model and data")]
    pub dataset: Option<String>,
    /// Directory of dataset_info.json; by default data
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub dataset_dir: Option<PathBuf>,
    /// Directory at which relative paths of images start; by default beside each data file
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub image_dir: Option<PathBuf>,
    /// Orientation in EXIF data: apply turns the image, ignore leaves it as published
    #[arg(long, value_enum, value_name = "WHAT", help_heading = "Model and data")]
    pub exif_rotation: Option<ExifRotation>,
    /// Names of held-out data sets in dataset_info.json, as --dataset
    #[arg(long, value_name = "NAMES", help_heading = "Model and data")]
    pub eval_dataset: Option<String>,
    /// Directory of the run: logs, reports, checkpoints
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    pub output: Option<PathBuf>,
    /// Allow samples without an image for CogAgent
    ///
    /// Such samples skip its cross attention. The published code refuses them.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub text_without_cross: Option<bool>,
    /// A published recipe: a list of flags
    ///
    /// The run prints them. A flag on the command line overrides the same flag of the preset.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(PRESETS.map(|p| p.name)), help_heading = "Model and data")]
    pub preset: Option<String>,
    /// Read flags from a file: TOML, or a trainer's YAML
    ///
    /// A flag on the command line overrides the file.
    #[arg(long, value_name = "FILE", help_heading = "Model and data")]
    pub config: Option<PathBuf>,
    /// Whose values absent settings take: ours, theirs, or a trainer's
    ///
    /// theirs is the default: the trainer whose file or line it is. The run prints the values it takes from there.
    #[arg(
        long,
        value_enum,
        value_name = "WHOSE",
        help_heading = "Model and data"
    )]
    pub defaults: Option<DefaultsOf>,
    /// Form of the data; auto looks at the content
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        help_heading = "Model and data"
    )]
    pub data_format: Option<DataFormatChoice>,
    /// Prompt template of CogVLM, CogVLM2 and CogAgent
    ///
    /// auto takes the template of the model directory.
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Model and data")]
    pub template: Option<TemplateChoice>,
    /// Supervise the token that ends an answer (GLM-4V)
    ///
    /// GLM-4V then learns to stop. Its published recipe does not supervise this token.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub train_on_turn_end: Option<bool>,
    /// Where the initial weights come from
    #[arg(
        long,
        value_enum,
        value_name = "SOURCE",
        help_heading = "Model and data"
    )]
    pub init: Option<InitChoice>,
    /// Longest sample in tokens, image tokens included
    ///
    /// Longer samples are truncated.
    #[arg(long, value_name = "TOKENS", help_heading = "Model and data")]
    pub model_max_length: Option<usize>,
    /// Most slices an image is cut into (MiniCPM)
    ///
    /// The variable MAX_SLICE_NUMS sets it too.
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    pub max_slice_nums: Option<usize>,
    /// Largest area of an image in pixels (GLM-4.1V)
    ///
    /// Larger images are resized. The model directory's own bound holds besides. The variable MAX_PIXELS sets it too.
    #[arg(long, value_name = "PIXELS", help_heading = "Model and data")]
    pub image_max_pixels: Option<usize>,
    /// Smallest area of an image in pixels (GLM-4.1V)
    ///
    /// Smaller images are resized. The model directory's own bound holds besides. The variable MIN_PIXELS sets it too.
    #[arg(long, value_name = "PIXELS", help_heading = "Model and data")]
    pub image_min_pixels: Option<usize>,
    /// Skip samples that cannot be used, instead of refusing the data
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub skip_bad_samples: Option<bool>,

    /// Use only the first N training samples of each file
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    pub limit: Option<usize>,
    /// Loader threads per rank: auto, or a number; 0 loads on the training thread
    #[arg(long, value_name = "N", value_parser = workers, help_heading = "Model and data")]
    pub data_workers: Option<Workers>,
    /// Train the longest samples in the first update
    ///
    /// The highest memory peak then shows in step 1.
    #[arg(long = "longest-first", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Model and data")]
    pub worst_first: Option<bool>,

    /// ZeRO stage: 0 to 3, or auto
    ///
    /// 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters. auto takes 2 if its plan fits, else 3; both give the same bits. It is the default with adapters, except for the demo.
    #[arg(long, value_name = "STAGE", help_heading = "Memory and ranks")]
    pub zero: Option<ZeroChoice>,
    /// DeepSpeed configuration file
    ///
    /// Every key is honored, refused, or reported as having no effect.
    #[arg(long, value_name = "FILE", help_heading = "Memory and ranks")]
    pub deepspeed: Option<PathBuf>,
    /// Refuse misplaced, unknown and outdated keys of --deepspeed, instead of warning
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub strict_config: Option<bool>,
    /// Where model states are stored: none, cpu, nvme:DIR
    ///
    /// none is the device, cpu host memory, nvme:DIR a directory on a disk. Tiers by kind are possible: param=nvme:DIR,optimizer=cpu,activation=cpu.
    #[arg(long, value_name = "TIERS", help_heading = "Memory and ranks")]
    pub offload: Option<Offload>,
    /// Ranks per shard group (hybrid sharding); all ranks by default
    ///
    /// N consecutive ranks hold one copy of what --zero shards. Groups replicate it.
    #[arg(long, value_name = "RANKS", help_heading = "Memory and ranks")]
    pub shard_group: Option<usize>,
    /// What carries weights and gradients between GPUs
    ///
    /// ipc: GPUs read each other's memory. shm: through host memory. nccl: NCCL, only by request. auto takes ipc if all GPUs of the run can read each other, else shm.
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub collectives: Option<Collectives>,
    /// I/O path of --offload nvme; auto measures both and takes the faster
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub nvme_io: Option<NvmeIo>,
    /// Update parameters during backward (optimizer in backward)
    ///
    /// The update works on a second copy of the optimizer states and is kept only if the step is valid, so results are the same bits, also with clipping. auto uses it where it saves disk traffic, and on GPUs with --offload cpu where spare host memory, less 10 %, fits the second copy.
    #[arg(
        long = "optimizer-in-backward",
        value_name = "auto|off|all|BYTES",
        help_heading = "Memory and ranks"
    )]
    pub optimizer_in_backward: Option<OptimizerInBackward>,
    /// Update parameters during the next forward pass (optimizer in forward)
    ///
    /// Each unit is updated before its first use; results are the same bits. auto uses it on GPUs with the optimizer in host memory.
    #[arg(
        long = "optimizer-in-forward",
        value_enum,
        help_heading = "Memory and ranks"
    )]
    pub optimizer_in_forward: Option<OptimizerInForward>,
    /// Processor cores that ranks keep to: auto, none or a list
    ///
    /// auto divides the cores that the process may use evenly over the machine's ranks, a list such as 0-7,16-23 those cores; threads of one physical core stay together. By default ranks are bound where a scheduler or container gave less than the machine, and on the CPU to NUMA nodes where both divide evenly. Tasks of an MPI or of srun keep the mask they were given.
    #[arg(long, num_args = 0..=1, default_missing_value = "auto", value_name = "auto|none|LIST", help_heading = "Memory and ranks")]
    pub bind_cores: Option<BindCores>,
    /// Order in which CPUs sum products of bf16 matrices
    ///
    /// native takes that of AMX (Intel, since Sapphire Rapids) if the processors of all ranks have it, else portable, which AVX512-BF16 computes too. Either gives the same bits for any number of threads, ranks and stages. amx gives the bits of AMX on any processor, slowly without it. By default native; a resumed run keeps the order that it had.
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub cpu_math: Option<CpuMathChoice>,
    /// Seconds a rank waits for another before the job ends
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Memory and ranks")]
    pub comm_timeout: Option<u64>,
    /// Ranks per machine
    ///
    /// The default on GPUs is one rank per visible GPU.
    #[arg(long, value_name = "N", help_heading = "Memory and ranks")]
    pub nproc: Option<usize>,
    /// Pipeline stages that divide the layers (MP_SIZE)
    ///
    /// Each stage is a rank; the other factor of the ranks is data parallelism: --nproc 4 --mp-size 2 trains two copies of the model, each on two ranks. Losses and gradient norms in f32 are the bits of a run with --mp-size 1.
    #[arg(long, value_name = "M", help_heading = "Memory and ranks")]
    pub mp_size: Option<usize>,
    /// Units of each pipeline stage, such as 20,15; the default balances the stages
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "A,B,…",
        help_heading = "Memory and ranks"
    )]
    pub mp_split: Option<Vec<u32>>,
    /// Machines of the run, as `host slots=N` lines; run the same command on each
    #[arg(long, value_name = "FILE", help_heading = "Memory and ranks")]
    pub hostfile: Option<PathBuf>,
    /// Use only these machines and slots of the hostfile, such as host1@host2:0,2
    #[arg(long, value_name = "HOSTS", help_heading = "Memory and ranks")]
    pub include: Option<String>,
    /// Use all but these machines and slots of the hostfile
    #[arg(long, value_name = "HOSTS", help_heading = "Memory and ranks")]
    pub exclude: Option<String>,
    /// What RANK in the environment numbers
    ///
    /// node: machines, each of which starts --nproc ranks. process: ranks. Needed only where the other variables do not say.
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        help_heading = "Memory and ranks"
    )]
    pub rank_is: Option<RankIs>,
    /// Where ranks compute; auto takes a usable NVIDIA GPU
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub device: Option<DeviceChoice>,
    /// Launch repeated kernel sequences as one CUDA graph; results are the same bits
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub cuda_graph: Option<CudaGraph>,
    /// Compare the GPUs with the CPU before the run is planned
    ///
    /// auto checks the operations that the run uses and two steps of a tiny model of its family, once for each GPU model, driver, set of libraries and kernels. full checks every operation each time.
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub verify_gpu: Option<VerifyGpu>,
    /// Copy offloaded weights to the GPU one unit ahead of their use
    ///
    /// auto does so if the plan fits with one more unit of weights. Results are the same bits.
    #[arg(
        long = "prefetch-weights",
        value_enum,
        help_heading = "Memory and ranks"
    )]
    pub prefetch_weights: Option<PrefetchWeights>,
    /// Number format of weights and activations
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub precision: Option<PrecisionChoice>,
    /// How rotary angles are rounded: like the model's published code, or in f32
    #[arg(
        long,
        value_enum,
        value_name = "WHERE",
        help_heading = "Memory and ranks"
    )]
    pub rope_precision: Option<RopeChoice>,
    /// Quantize frozen linear layers in 4 or 8 bits (QLoRA): nf4, fp4, int8
    ///
    /// Weights are quantized while they are loaded. A model directory that bitsandbytes quantized needs no flag; none dequantizes it.
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        help_heading = "Memory and ranks"
    )]
    pub quantize: Option<QuantizeFormat>,
    /// Quantize the scales of 4-bit weights too (double quantization)
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub quantize_double: Option<bool>,
    /// Parts whose linear layers are quantized, written as for --train, or all; the default is the language model
    #[arg(long, value_name = "PARTS", help_heading = "Memory and ranks")]
    pub quantize_modules: Option<String>,
    /// `--load-in-4bit true` is `--quantize nf4`
    #[arg(long = "load-in-4bit", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub load_in_4bit: Option<bool>,
    /// `--load-in-8bit true` is `--quantize int8`
    #[arg(long = "load-in-8bit", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub load_in_8bit: Option<bool>,
    /// Format of --load-in-4bit: nf4 or fp4
    #[arg(
        long = "bnb-4bit-quant-type",
        value_enum,
        value_name = "FORMAT",
        help_heading = "Memory and ranks"
    )]
    pub bnb_4bit_quant_type: Option<QuantizeFormat>,
    /// `--bf16 true` is `--precision bf16`; `--bf16 false` is `--precision f32`
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub bf16: Option<bool>,
    /// `--fp16 true` is `--precision fp16`
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub fp16: Option<bool>,
    /// Number format of accumulated gradients
    ///
    /// The default is f32, and bf16 with --precision pure-bf16.
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub grad_dtype: Option<GradDtype>,
    /// Rounding of pure-bf16 weights: stochastic, Kahan, or nearest
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub pure_bf16_weights: Option<PureBf16Weights>,
    /// Number format of Adam's moments with pure-bf16 weights
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub pure_bf16_moments: Option<PureBf16Moments>,
    /// Storage of Adam's moments: full, or 8bit as bitsandbytes does
    ///
    /// 8bit takes 2 bytes per parameter instead of 8. Tensors below 4096 elements, embeddings and the head keep f32.
    #[arg(long, value_enum, help_heading = "Memory and ranks")]
    pub moments: Option<Moments>,
    /// Static loss scale of fp16; 0 is a dynamic scale
    #[arg(long, value_name = "FACTOR", help_heading = "Memory and ranks")]
    pub loss_scale: Option<f64>,
    /// Initial dynamic loss scale, as a power of two [default: 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100), help_heading = "Memory and ranks")]
    pub initial_scale_power: Option<u32>,
    /// Updates without overflow before the dynamic loss scale doubles [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Memory and ranks")]
    pub loss_scale_window: Option<u64>,
    /// Overflows before the dynamic loss scale is halved [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Memory and ranks")]
    pub hysteresis: Option<u32>,
    /// Smallest dynamic loss scale; an overflow at this scale ends the run [default: 1]
    #[arg(long, value_name = "FACTOR", help_heading = "Memory and ranks")]
    pub min_loss_scale: Option<f64>,
    /// Host memory for all ranks of a machine, such as 64G or 512MiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "Memory and ranks")]
    pub host_memory_limit: Option<u64>,
    /// Host memory of each machine that stays free for the system and for file pages
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "Memory and ranks")]
    pub host_reserve: Option<u64>,
    /// Device memory for each rank
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "Memory and ranks")]
    pub device_memory_limit: Option<u64>,

    /// Recompute activations: all, none, or llm,vit,resampler
    ///
    /// The towers named keep only the inputs of their segments and recompute the rest in backward.
    #[arg(long, num_args = 0..=1, default_missing_value = "all", value_name = "TOWERS", help_heading = "Memory and ranks")]
    pub checkpoint_activations: Option<Recompute>,
    /// Layers per checkpointed segment
    ///
    /// More than 1 needs less memory and recomputes the segment's other inputs in backward.
    #[arg(long, value_name = "N", help_heading = "Memory and ranks")]
    pub checkpoint_num_layers: Option<usize>,
    /// Compute feed-forward layers in tiles of N tokens or patches
    ///
    /// Their inner values then exist for one tile only: long samples need less memory, for most of one more forward pass of these layers. No bit changes. On the CPU tiles are a little larger than N, on a GPU N is rounded up to a multiple of 4096.
    #[arg(long, value_name = "N", help_heading = "Memory and ranks")]
    pub mlp_tile_tokens: Option<usize>,
    /// `true` is `--checkpoint-activations all`, `false` is none
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Memory and ranks")]
    pub gradient_checkpointing: Option<bool>,

    /// Optimizer updates; -1 uses --num-train-epochs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(-1..), help_heading = "Training")]
    pub max_steps: Option<i64>,
    /// Passes over the data
    ///
    /// A batch may go over the end of one: 10 samples in batches of 4 are 8 updates in 3 epochs, not 9.
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub num_train_epochs: Option<f64>,
    /// Samples per rank and micro-batch
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub per_device_train_batch_size: Option<usize>,
    /// Fill each micro-batch with samples of at most N tokens together
    ///
    /// Replaces --per-device-train-batch-size. No token is padding; images count with their tokens. An update takes samples in the order of the data, as many as fit its micro-batches, balanced over the ranks.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub tokens_per_batch: Option<usize>,
    /// Samples per rank and evaluation batch
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub per_device_eval_batch_size: Option<usize>,
    /// Micro-batches per optimizer update
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub gradient_accumulation_steps: Option<usize>,
    /// Samples per optimizer update over all ranks
    ///
    /// Two of global batch size, batch size per rank and accumulation determine the third.
    #[arg(
        long = "global-batch-size",
        value_name = "N",
        help_heading = "Training"
    )]
    pub global_batch: Option<usize>,
    /// Take the largest batch size that the plan says fits
    ///
    /// The run prints how memory grows with the batch size.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Training")]
    pub find_batch: Option<bool>,
    /// Peak learning rate
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub learning_rate: Option<f64>,
    /// Scale the learning rate by ranks × accumulation: none, linear, or its square root
    #[arg(long, value_enum, value_name = "RULE", help_heading = "Training")]
    pub lr_scale: Option<LrScale>,
    /// Learning rate schedule
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Training")]
    pub lr_scheduler_type: Option<Scheduler>,
    /// Arguments of the schedule, such as min_lr_rate=0.1, also as JSON
    ///
    /// Names are those of Hugging Face (num_cycles, min_lr, min_lr_rate, power, lr_end, timescale) and of DeepSpeed: warmup_type=linear,cos_min_ratio=0.1.
    #[arg(long, value_name = "NAME=X", help_heading = "Training")]
    pub lr_scheduler_kwargs: Option<SchedulerKwargs>,
    /// Warmup as a share of all steps
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub warmup_ratio: Option<f64>,
    /// Warmup in steps, or below 1 a share; above 0 it overrides --warmup-ratio
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub warmup_steps: Option<Every>,
    /// Decoupled weight decay; biases and norm weights do not decay
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// Parameters without weight decay, written as for --train
    ///
    /// Replaces the default, norm weights and biases.
    #[arg(long, value_name = "PARTS", help_heading = "Training")]
    pub no_decay: Option<String>,
    /// Decay of Adam's first moment
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub adam_beta1: Option<f64>,
    /// Decay of Adam's second moment
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub adam_beta2: Option<f64>,
    /// Epsilon in the denominator of Adam's update
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub adam_epsilon: Option<f64>,
    /// Clip the global gradient norm to this value; 0 disables clipping
    #[arg(long, value_name = "X", help_heading = "Training")]
    pub max_grad_norm: Option<f64>,
    /// Seed of data order, initial weights, dropout and stochastic rounding
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub seed: Option<u64>,

    /// Trainable parts: modules, norm, bias, or regexes
    ///
    /// vision and projector name these parts in every family.
    /// Separated by commas. Adapters train besides. Replaces --tune-vision and --tune-llm.
    #[arg(long, value_name = "PARTS", help_heading = "What is trained")]
    pub train: Option<String>,
    /// Parts that stay frozen, written as for --train, or none
    ///
    /// Overrides every other choice.
    #[arg(long, value_name = "PARTS", help_heading = "What is trained")]
    pub freeze: Option<String>,
    /// Learning rates of parts, such as resampler=1e-5,vpm=2e-6
    #[arg(long, value_name = "PART=X", help_heading = "What is trained")]
    pub lr: Option<String>,
    /// Train LoRA adapters on the language model
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub use_lora: Option<bool>,
    /// Start from the adapters in this directory: of a run, or of peft
    ///
    /// Their files decide rank, alpha and layers. A run directory means its latest checkpoint.
    #[arg(long, value_name = "DIR", help_heading = "What is trained")]
    pub adapter: Option<PathBuf>,
    /// Rank of the LoRA adapters; implies --use-lora
    #[arg(long, value_name = "N", help_heading = "What is trained")]
    pub lora_rank: Option<usize>,
    /// LoRA alpha; adapters are scaled by alpha ÷ rank
    ///
    /// The default is twice the rank. With --use-rslora the scale is alpha ÷ √rank.
    #[arg(long, value_name = "X", help_heading = "What is trained")]
    pub lora_alpha: Option<f64>,
    /// Scale adapters by alpha ÷ √rank (rsLoRA)
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub use_rslora: Option<bool>,
    /// Learning rate of the adapters' B matrices as a multiple of that of A (LoRA+)
    ///
    /// As in peft, vectors that train beside the adapters, such as biases and norms, have the rate of B.
    #[arg(long, value_name = "X", help_heading = "What is trained")]
    pub loraplus_lr_ratio: Option<f64>,
    /// Dropout on the inputs of the adapters
    ///
    /// The masks depend on seed, sample and layer only.
    #[arg(long, value_name = "P", help_heading = "What is trained")]
    pub lora_dropout: Option<f64>,
    /// Layers with adapters: names, attn, mlp, all, or a regex
    ///
    /// Names are separated by commas: q_proj,v_proj. all, or all-linear, is every linear layer of the decoder layers. A regular expression must match the whole module path.
    #[arg(long, value_name = "REGEX", help_heading = "What is trained")]
    pub lora_target_modules: Option<String>,
    /// Decoder layers with adapters, such as 0..16
    #[arg(long, value_name = "A..B", help_heading = "What is trained")]
    pub lora_layers: Option<String>,
    /// Separate adapters for q, k and v where the model fuses them in one weight
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub lora_per_projection: Option<bool>,
    /// Trainable key and value prefixes per decoder layer (p-tuning v2; Cog families)
    #[arg(long, value_name = "N", help_heading = "What is trained")]
    pub ptuning_tokens: Option<usize>,
    /// Modules trained in full beside the adapters
    ///
    /// Names are separated by commas; none, the default, trains the adapters alone.
    #[arg(long, value_name = "NAMES", help_heading = "What is trained")]
    pub modules_to_save: Option<String>,
    /// Train the vision tower; the default is true without adapters
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub tune_vision: Option<bool>,
    /// Train the language model; the default is true without adapters
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What is trained")]
    pub tune_llm: Option<bool>,

    /// Steps between checkpoints; below 1 a share of all steps
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub save_steps: Option<Every>,
    /// When to save; the end of the run is always saved except with no
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        help_heading = "Saving, evaluation, logs"
    )]
    pub save_strategy: Option<Strategy>,
    /// Checkpoints to keep; older ones are removed
    ///
    /// The default keeps two, or all if --save-steps or --save-strategy is given.
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub save_total_limit: Option<usize>,
    /// Keep the best checkpoint and let it stand for the run after its end
    ///
    /// Checkpoints are saved where the held-out samples are evaluated, or at a multiple of these steps (--save-steps). `generate`, `eval` and `export` with the run's directory take the best one; --resume continues from the latest.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Saving, evaluation, logs")]
    pub load_best_model_at_end: Option<bool>,
    /// Metric of the held-out samples that decides
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        help_heading = "Saving, evaluation, logs"
    )]
    pub metric_for_best_model: Option<BestMetric>,
    /// Whether a greater metric is better; the default is false for loss
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Saving, evaluation, logs")]
    pub greater_is_better: Option<bool>,
    /// End training after N evaluations in a row without a better metric
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub early_stopping_patience: Option<u64>,
    /// Steps between evaluations; below 1 a share of all steps
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub eval_steps: Option<Every>,
    /// When to evaluate during training
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        help_heading = "Saving, evaluation, logs"
    )]
    pub eval_strategy: Option<Strategy>,
    /// Steps between log lines; below 1 a share of all steps
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub logging_steps: Option<Every>,
    /// Steps to trace for Perfetto and chrome://tracing, such as 3..5
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
    /// Additional report format
    #[arg(
        long,
        value_enum,
        value_name = "WHERE",
        help_heading = "Saving, evaluation, logs"
    )]
    pub report_to: Option<ReportTo>,
    /// Format of failures on standard error; every subcommand takes this flag
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        value_name = "FORMAT",
        help_heading = "Saving, evaluation, logs"
    )]
    pub error_format: Option<ErrorFormat>,
    /// Language of messages; by default that of the locale; every subcommand takes this flag
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        value_name = "LANG",
        help_heading = "Saving, evaluation, logs"
    )]
    pub lang: Option<Lang>,
    /// Continue a run: its directory, a checkpoint, or auto
    ///
    /// The directory alone gives all settings; flags override them. auto looks in --output.
    #[arg(
        long,
        value_name = "auto|PATH",
        value_parser = resume_word,
        help_heading = "Saving, evaluation, logs"
    )]
    pub resume: Option<String>,
    /// Continue although base weights or data differ from the checkpoint's
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Saving, evaluation, logs")]
    pub resume_anyway: Option<bool>,
    /// After a rank dies, restart the run, up to N times
    ///
    /// The run restarts from the newest intact checkpoint.
    #[arg(long, value_name = "N", help_heading = "Saving, evaluation, logs")]
    pub max_restarts: Option<u32>,
    /// With --max-restarts: continue with fewer ranks and the same global batch size
    ///
    /// Used if a rank cannot be started again.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "Saving, evaluation, logs")]
    pub elastic: Option<bool>,
    /// Inject a fault, such as kill:rank=1,step=3; may be repeated
    ///
    /// For tests of a cluster or of this program.
    #[arg(long, value_name = "SPEC", help_heading = "Saving, evaluation, logs")]
    pub inject: Vec<Fault>,
}

/// What the user typed after `launcher doctor`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(
    name = "launcher doctor",
    version,
    about = "Reports what this machine offers for training, with findings and next steps",
    max_term_width = 100
)]
pub struct DoctorArgs {
    /// Print the report as JSON with stable keys
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
    /// Compare every operation and two training steps on all GPUs with the CPU, and write a report to send
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub verify_gpu: Option<bool>,
    /// Verification of one GPU: the request that the verifying process wrote
    #[arg(long, value_name = "FILE", hide = true)]
    pub verify_request: Option<PathBuf>,
}

/// Other names of this program's flags: (other name in snake_case, flag). First the names of other trainers,
/// then those of earlier versions of this program.
pub const ALIASES: [(&str, &str); 35] = [
    ("activation_checkpointing", "gradient-checkpointing"),
    ("model_name_or_path", "model"),
    ("tokenizer_name_or_path", "tokenizer"),
    ("tokenizer_name", "tokenizer"),
    ("data_path", "data"),
    ("eval_data_path", "eval-data"),
    ("media_dir", "image-dir"),
    ("image_folder", "image-dir"),
    ("image_root", "image-dir"),
    ("output_dir", "output"),
    ("lora_r", "lora-rank"),
    ("lora_modules_to_save", "modules-to-save"),
    ("max_train_samples", "limit"),
    ("dataloader_num_workers", "data-workers"),
    ("evaluation_strategy", "eval-strategy"),
    ("resume_from_checkpoint", "resume"),
    ("deepspeed_config", "deepspeed"),
    ("max_pixels", "image-max-pixels"),
    ("min_pixels", "image-min-pixels"),
    ("nproc_per_node", "nproc"),
    ("bind_cores_to_rank", "bind-cores"),
    ("bind_core_list", "bind-cores"),
    ("model_parallel_size", "mp-size"),
    ("pipeline_parallel_size", "mp-size"),
    ("auto_find_batch_size", "find-batch"),
    ("early_step", "optimizer-in-backward"),
    ("late_step", "optimizer-in-forward"),
    ("upload_ahead", "prefetch-weights"),
    ("worst_first", "longest-first"),
    ("global_batch", "global-batch-size"),
    ("picture_side", "image-size"),
    ("bnb_4bit_use_double_quant", "quantize-double"),
    ("use_double_quant", "quantize-double"),
    ("use_bnb_nested_quant", "quantize-double"),
    ("double_quantization", "quantize-double"),
];

/// Parsed command line of the program: the subcommand and its arguments.
#[derive(Debug, Clone, PartialEq)]
pub enum Command {
    /// Train with these arguments; the notes are shown once.
    Train {
        /// The arguments.
        args: Box<Args>,
        /// The flags as typed, each as `--name=value`.
        typed: Vec<String>,
        /// Flags without effect here.
        notes: Vec<Note>,
    },
    /// Show the effect of a configuration file.
    ExplainConfig {
        /// The arguments.
        args: Box<ExplainConfigArgs>,
        /// The flags as typed, each as `--name=value`, without the file.
        typed: Vec<String>,
    },
    /// Plan a run.
    Plan {
        /// The arguments.
        args: Box<PlanArgs>,
        /// The flags as typed, each as `--name=value`.
        typed: Vec<String>,
        /// Flags without effect here.
        notes: Vec<Note>,
    },
    /// Report on the machine.
    Doctor(DoctorArgs),
    /// Show a run from its directory.
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
    /// Write a foreign checkpoint as a Hugging Face directory.
    Import(ImportArgs),
    /// List, verify, reshard or consolidate checkpoints.
    Ckpt(CkptCommand),
    /// Write a model directory with random weights.
    Synth(SynthArgs),
    /// Measure a disk.
    BenchNvme(BenchNvmeArgs),
    /// Print this text on standard output and exit with 0: help or version.
    Print(String),
}

/// Parses `argv`, the program's arguments without the program's name, into a subcommand with its arguments.
///
/// # Errors
/// A usage failure (exit 2): an unknown subcommand or flag, a value out of range, or two spellings of one
/// flag with different values.
pub fn parse(argv: &[String]) -> Result<Command, Failure> {
    let (subcommand, rest) = normalise::split_subcommand(argv)?;
    if let Some(text) = help::asked_for(subcommand, rest)? {
        return Ok(Command::Print(text));
    }
    let mut line = normalise::normalise(subcommand, rest, &subcommand.command())?;
    let typed = line.args.clone();
    if matches!(subcommand, Subcommand::Train | Subcommand::Plan) {
        presets::expand(&mut line.args);
    }
    let words = words(&line);
    let notes = line.notes;
    let parsed = match subcommand {
        Subcommand::Train => Args::try_parse_from(words).map(|args| Command::Train {
            args: Box::new(args),
            typed,
            notes,
        }),
        Subcommand::Plan => PlanArgs::parse_words(&words).map(|args| Command::Plan {
            args: Box::new(args),
            typed,
            notes,
        }),
        Subcommand::ExplainConfig => {
            ExplainConfigArgs::parse_words(&words).map(|args| Command::ExplainConfig {
                args: Box::new(args),
                typed: typed.into_iter().filter(|w| w.starts_with("--")).collect(),
            })
        }
        Subcommand::Doctor => DoctorArgs::try_parse_from(words).map(Command::Doctor),
        Subcommand::Watch => WatchArgs::try_parse_from(words).map(Command::Watch),
        Subcommand::Explain => ExplainArgs::try_parse_from(words).map(Command::Explain),
        Subcommand::DataCheck => {
            DataCheckArgs::try_parse_from(words).map(|args| Command::DataCheck(Box::new(args)))
        }
        Subcommand::Generate => {
            GenerateArgs::try_parse_from(words).map(|args| Command::Generate(Box::new(args)))
        }
        Subcommand::Eval => {
            EvalArgs::try_parse_from(words).map(|args| Command::Eval(Box::new(args)))
        }
        Subcommand::Export => ExportArgs::try_parse_from(words).map(Command::Export),
        Subcommand::Import => ImportArgs::try_parse_from(words).map(Command::Import),
        Subcommand::CkptLs => {
            CkptLsArgs::try_parse_from(words).map(|a| Command::Ckpt(CkptCommand::Ls(a)))
        }
        Subcommand::CkptVerify => {
            CkptVerifyArgs::try_parse_from(words).map(|a| Command::Ckpt(CkptCommand::Verify(a)))
        }
        Subcommand::CkptReshard => {
            CkptReshardArgs::try_parse_from(words).map(|a| Command::Ckpt(CkptCommand::Reshard(a)))
        }
        Subcommand::CkptConsolidate => CkptConsolidateArgs::try_parse_from(words)
            .map(|a| Command::Ckpt(CkptCommand::Consolidate(a))),
        Subcommand::BenchNvme => BenchNvmeArgs::try_parse_from(words).map(Command::BenchNvme),
        Subcommand::Synth => SynthArgs::try_parse_from(words).map(Command::Synth),
        Subcommand::Completions => CompletionsArgs::try_parse_from(words)
            .map(|args| Command::Print(help::completions(args.shell))),
        Subcommand::Man => ManArgs::try_parse_from(words).map(|_| Command::Print(help::man_page())),
    };
    parsed.or_else(|error| {
        if error.use_stderr() {
            Err(usage_from(&error))
        } else {
            Ok(Command::Print(error.render().to_string()))
        }
    })
}

/// Training arguments of a rewritten line, with presets expanded.
///
/// # Errors
/// A flag has an invalid value (exit 2).
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

/// `auto` and the booleans of other trainers in one spelling; a path stays as it is.
fn resume_word(text: &str) -> Result<String, String> {
    Ok(match &*text.to_ascii_lowercase() {
        "auto" | "true" => "auto".to_owned(),
        "false" | "none" => "false".to_owned(),
        _ => text.to_owned(),
    })
}

fn workers(text: &str) -> Result<Workers, Text> {
    text.parse()
}

/// A rewritten line in clap's form: the program's name is the first word.
fn words(line: &normalise::Line) -> Vec<String> {
    let mut words = vec!["launcher".to_string()];
    words.extend(line.args.iter().cloned());
    words
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

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
            "adam-beta1 adam-beta2 adam-epsilon adapter bf16 bind-cores bnb-4bit-quant-type checkpoint-activations checkpoint-num-layers collectives comm-timeout config cpu-math cuda-graph data data-format data-workers dataset dataset-dir deepspeed defaults device \
             device-memory-limit early-stopping-patience elastic error-format eval-data eval-dataset eval-steps eval-strategy exclude exif-rotation find-batch fp16 freeze global-batch-size grad-dtype \
             gradient-accumulation-steps gradient-checkpointing greater-is-better host-memory-limit host-reserve hostfile hysteresis image-dir image-max-pixels image-min-pixels include init initial-scale-power inject lang learning-rate \
             limit load-best-model-at-end load-in-4bit load-in-8bit logging-steps logging-strategy longest-first lora-alpha lora-dropout lora-layers lora-per-projection lora-rank \
             lora-target-modules loraplus-lr-ratio loss-scale loss-scale-window lr lr-scale lr-scheduler-kwargs lr-scheduler-type max-grad-norm max-restarts max-slice-nums max-steps metric-for-best-model min-loss-scale mlp-tile-tokens model \
             model-max-length modules-to-save moments mp-size mp-split no-decay nproc num-train-epochs nvme-io offload optimizer-in-backward optimizer-in-forward output \
             per-device-eval-batch-size per-device-train-batch-size precision prefetch-weights preset ptuning-tokens pure-bf16-moments pure-bf16-weights quantize quantize-double quantize-modules rank-is report-to resume resume-anyway \
             rope-precision save-steps save-strategy \
             save-total-limit seed shard-group skip-bad-samples strict-config template text-without-cross tokenizer tokens-per-batch trace-steps train train-on-turn-end tune-llm tune-vision use-lora use-rslora verify-gpu warmup-ratio \
             warmup-steps weight-decay zero"
        );
        for (alias, target) in ALIASES {
            let known = names.contains(&target) || target == "image-size";
            assert!(known, "{alias} -> {target}");
        }
    }

    #[test]
    fn an_empty_command_line_sets_nothing() {
        assert_eq!(args(""), Args::default());
    }

    #[test]
    fn kebab_case_snake_case_and_equals_signs_mean_the_same() {
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
    fn spellings_of_earlier_versions_still_work() {
        for (old, new) in [
            ("--early-step all", "--optimizer-in-backward all"),
            ("--late_step off", "--optimizer-in-forward off"),
            ("--upload-ahead=on", "--prefetch-weights on"),
            ("--worst-first false", "--longest-first false"),
            ("--global-batch 8", "--global-batch-size 8"),
        ] {
            assert_eq!(args(old), args(new), "{old}");
            assert_ne!(args(old), Args::default(), "{old}");
        }
    }

    #[test]
    fn cores_are_bound_as_deepspeed_is_asked_to() {
        let list = args("--bind-cores 0-3,8");
        assert_eq!(list.bind_cores, Some(BindCores::List(vec![0, 1, 2, 3, 8])));
        assert_eq!(args("--bind_cores_to_rank --bind_core_list 0-3,8"), list);
        assert_eq!(args("--bind_core_list 0-3,8 --bind_cores_to_rank"), list);
        let auto = args("--bind_cores_to_rank --max-steps 3");
        assert_eq!(auto.bind_cores, Some(BindCores::Auto));
        assert_eq!(auto.max_steps, Some(3));
        let last = args("--bind-cores none --bind-cores auto");
        assert_eq!(last.bind_cores, Some(BindCores::Auto));
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
    fn an_unknown_subcommand_names_the_nearest_one() {
        assert!(refused("trian --zero 3").next[0].contains("train"));
    }

    #[test]
    fn a_subcommand_after_a_flag_is_told_to_come_first() {
        assert!(refused("--lang zh doctor").next[0].contains("`launcher doctor …`"));
        assert!(refused("--lang zh doktor").next[0].contains("--help-all"));
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
            let expected = Command::Doctor(DoctorArgs {
                json,
                ..DoctorArgs::default()
            });
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
    fn image_flags_add_up_and_other_flags_take_their_last_value() {
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
        let Ok(Command::Generate(args)) = parsed("generate --prompt a --prompt b") else {
            panic!("a repeated flag is not parsed");
        };
        assert_eq!(args.prompt.as_deref(), Some("b"));
        for line in ["generate --zero 3", "eval --image a.png", "eval --limit x"] {
            parsed(line).expect_err(line);
        }
    }

    #[test]
    fn watch_takes_a_directory_before_and_after_its_flags() {
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
            let expected = Command::Watch(WatchArgs {
                run,
                once,
                json,
                serve: None,
            });
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
            "--lr-scheduler-type reduce_lr_on_plateau",
            "--report_to nothing",
            "--host-memory-limit 5X",
            "stray --zero 1",
            "--zero 1 stray",
        ] {
            refused(line);
        }
    }

    #[test]
    fn two_spellings_of_one_flag_must_agree() {
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
