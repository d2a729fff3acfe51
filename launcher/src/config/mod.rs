//! Configuration of a run ([`RunConfig`]) and the plan resolved from it ([`RunPlan`]).
//!
//! [`RunConfig`] holds a value for every setting. A flag wins over a file, a file over a default. Some values may
//! still be `auto`. [`RunPlan`] holds the configuration with every `auto` resolved, and the results of planning. The
//! supervisor saves it as `config.resolved.json`. Ranks read that file and make no choices. Only this module changes
//! either of them.

mod best;
mod choices;
mod collectives;
pub(crate) mod defaults;
pub mod demo;
mod fault;
mod gpu;
pub(crate) mod numbers;
mod offload;
mod optimizer_in_backward;
mod optimizer_in_forward;
mod origin;
mod pipeline;
mod prefetch_weights;
mod quantize;
mod run_plan;
mod schedule;
pub(crate) mod words;
mod zero;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};

use models::Family;
use serde::{Deserialize, Serialize};

pub use best::{Best, BestMetric, BestSoFar};
pub use choices::{
    BindCores, Cadence, CpuMathChoice, CudaGraph, DataFormatChoice, Device, DeviceChoice, Every,
    ExifRotation, InitChoice, LrScale, PrecisionChoice, Recompute, ReportTo, RopeChoice, Scheduler,
    Strategy, TemplateChoice, VerifyGpu, Workers,
};
pub(crate) use choices::{core_list, core_ranges};
pub use collectives::Collectives;
pub(crate) use defaults::DEVICE;
pub use defaults::{DEMO, Defaults, MODEL};
pub use fault::{Fault, FaultKind, FaultPhase, NotFinite};
pub(crate) use fault::{check_faults, fault_lines};
pub use gpu::{Products, RunGpu};
pub(crate) use numbers::exceeds_f16;
pub use numbers::{GradDtype, Moments, Numbers, PureBf16Moments, PureBf16Weights, check_family};
pub use offload::{NvmeIo, Offload, Tier};
pub use optimizer_in_backward::OptimizerInBackward;
pub use optimizer_in_forward::OptimizerInForward;
pub(crate) use origin::Origin;
pub use prefetch_weights::PrefetchWeights;
pub use quantize::{MergeBase, Quantize, QuantizeFormat};
pub(crate) use run_plan::Found;
pub use run_plan::{CONFIG_FILE, RunPlan};
pub use schedule::SchedulerKwargs;
pub use zero::{ZeroAuto, ZeroChoice};

/// Source of the model, its tokenizer and the samples: the built-in demo, or files of the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Source {
    /// The built-in demo. Its files are generated into a cache directory before the ranks start.
    Demo {
        /// Directory with the generated files.
        #[serde(rename = "folder")]
        directory: PathBuf,
    },
    /// Directories and files of the user.
    Files {
        /// Model directory.
        model: PathBuf,
        /// Files or directories of training samples, separated by commas.
        data: PathBuf,
        /// File or directory of held-out samples, if there are any.
        eval_data: Option<PathBuf>,
        /// Directory at which relative paths of images start; `None` is beside each file.
        #[serde(default)]
        image_dir: Option<PathBuf>,
    },
}

impl Source {
    /// Name of the model's directory, or `demo`.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Demo { .. } => "demo".to_owned(),
            Self::Files { model, .. } => models::places::main(model).file_name().map_or_else(
                || "model".to_owned(),
                |name| name.to_string_lossy().into_owned(),
            ),
        }
    }
}

/// What the ranks of a run do: train, evaluate once, or answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Train from the start or from a checkpoint.
    Train,
    /// Load the checkpoint of `resume` and evaluate once. Writes no checkpoint.
    Evaluate,
    /// Generate answers or evaluate samples for a subcommand. All parameters are frozen.
    Answer,
}

/// Length of training, in optimizer updates or in epochs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Length {
    /// Number of optimizer updates.
    Steps(u64),
    /// Number of passes over the data.
    Epochs(f64),
}

/// Length of the learning-rate warmup at the start of training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Warmup {
    /// Number of optimizer updates.
    Steps(u64),
    /// Fraction of all optimizer updates of the run, rounded up to whole updates.
    Ratio(f64),
}

impl Warmup {
    /// Number of warmup updates in a run of `total` optimizer updates: the given number, which may exceed
    /// `total`, or the given fraction of `total`, rounded up.
    pub fn steps(self, total: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Ratio(ratio) => (ratio * total as f64).ceil() as u64,
        }
    }
}

/// Checkpoint from which a run continues, if any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resume {
    /// Start without a checkpoint.
    No,
    /// The newest checkpoint of the output directory. Starts without one if the directory has none.
    Latest,
    /// This checkpoint directory.
    From(PathBuf),
}

/// Settings of low-rank adapters (LoRA, Hu et al. 2021).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// LoRA rank `r`: inner dimension of the two low-rank matrices of an adapter.
    pub lora_rank: usize,
    /// LoRA `alpha`: the adapter's output is scaled by `alpha / r`, where `r` is the LoRA rank.
    pub lora_alpha: f64,
    /// Whether the scale is `alpha / √r` instead (rsLoRA).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub use_rslora: bool,
    /// LoRA+: learning rate of B, and of vectors that train too, as a multiple of the rate of A. `None`: one rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loraplus_lr_ratio: Option<f64>,
    /// Dropout probability of the adapters' inputs during training.
    pub lora_dropout: f64,
    /// Modules that get adapters: names separated by commas, or a regular expression over whole module paths.
    /// `None`: the default of the model's family.
    pub target_modules: Option<String>,
    /// Whether projections that the model fuses in one weight (such as q, k and v) get one adapter each.
    /// Otherwise the fused weight gets one adapter.
    pub per_projection: bool,
    /// Range of decoder layers that get adapters, counted from 0; `None` means all.
    pub layers: Option<Range<usize>>,
    /// Names of modules trained in full in addition to the adapters, as `modules_to_save` in peft. `None`:
    /// the default of the model's family.
    pub modules_to_save: Option<Vec<String>>,
    /// Directory of the adapters that training starts from, in peft's files. They decide which modules have adapters,
    /// and the rank and alpha of each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
}

impl Lora {
    /// Scale of the adapters that the files of `adapter` give no other rank or alpha.
    pub fn scale(&self) -> f64 {
        models::lora::scale(self.lora_alpha, self.lora_rank, self.use_rslora)
    }

    /// Modules that get adapters in a model of `family`: the setting, or else the family's default.
    #[must_use]
    pub fn target_modules(&self, family: Family) -> &str {
        let own = self.target_modules.as_deref();
        own.unwrap_or(family.default_lora_targets())
    }

    /// Names of modules trained in full in addition to the adapters in a model of `family`: the setting, or
    /// else the family's default. The default may contain the vision tower if `tune_vision` is set.
    #[must_use]
    pub fn modules_to_save(&self, family: Family, tune_vision: bool) -> Vec<String> {
        let published = || words::words(family.default_modules_to_save(tune_vision));
        self.modules_to_save.clone().unwrap_or_else(published)
    }
}

/// Rules for turning samples into prompts: format of the data, prompt template, and options of single model
/// families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleRules {
    /// Format of the file or directory with the samples.
    pub data_format: DataFormatChoice,
    /// Prompt template, for model families that have several (CogVLM, CogVLM2, CogAgent).
    pub template: TemplateChoice,
    /// For GLM-4V: whether the loss covers the token that ends an answer.
    pub train_on_turn_end: bool,
    /// For CogAgent: whether samples without an image are accepted. Such samples skip its cross attention.
    pub text_without_cross: bool,
    /// What becomes of the orientation that EXIF data states.
    #[serde(default)]
    pub exif_rotation: ExifRotation,
}

/// Selection of the parts of the model to train. The resampler has no switch: without `train` it is trained
/// unless the run has adapters or p-tuning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trainable {
    /// Whether the weights of the vision tower are trained.
    pub tune_vision: bool,
    /// Whether the weights of the language model are trained, embeddings and head included.
    pub tune_llm: bool,
    /// Selection of trained parts, in the syntax of `--train`. It replaces `tune_vision` and `tune_llm`.
    pub train: Option<String>,
    /// Selection of parts that stay frozen, in the syntax of `--freeze`. It overrides the other settings, but
    /// not adapters.
    pub freeze: Option<String>,
    /// Peak learning rates of parts, as (selection of parameters, rate) in command-line order. The first
    /// entry that matches a parameter name applies.
    pub learning_rates: Vec<(String, f64)>,
    /// LoRA adapters on the language model, if any.
    pub lora: Option<Lora>,
    /// P-tuning v2: number of trained keys and values before each sample, per decoder layer; 0 means none.
    pub ptuning_tokens: usize,
}

/// Settings of AdamW and of the learning-rate schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Peak learning rate before `lr_scale` applies.
    pub learning_rate: f64,
    /// Rule for scaling the learning rate with the number of micro-batches per update.
    pub lr_scale: LrScale,
    /// Shape of the learning-rate schedule.
    pub scheduler: Scheduler,
    /// Arguments of DeepSpeed's learning-rate schedules; the other schedules ignore them.
    #[serde(default)]
    pub scheduler_kwargs: SchedulerKwargs,
    /// Length of the learning-rate warmup at the start of training.
    pub warmup: Warmup,
    /// Decoupled weight decay of AdamW, for all parameters that `no_decay` does not select.
    pub weight_decay: f64,
    /// Selection of parameters without weight decay. `None` means biases and norm weights.
    pub no_decay: Option<String>,
    /// AdamW `beta1`: decay of the first moment.
    pub adam_beta1: f64,
    /// AdamW `beta2`: decay of the second moment.
    pub adam_beta2: f64,
    /// AdamW `eps`: added to the square root of the second moment.
    pub adam_epsilon: f64,
    /// Maximum global L2 norm of the gradient; larger gradients are clipped. `None` disables clipping.
    pub max_grad_norm: Option<f64>,
}

/// Batch sizes, limits on samples, and settings for loading samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Samples per rank and micro-batch.
    pub micro_batch: usize,
    /// Gradient accumulation: micro-batches per rank and optimizer update.
    pub accumulation_steps: usize,
    /// Samples per rank and evaluation batch.
    pub eval_batch: usize,
    /// Maximum tokens per sample; longer samples are truncated.
    pub model_max_length: usize,
    /// Maximum number of slices that an image is cut into.
    pub max_slice_nums: usize,
    /// Largest area of an image in pixels; `None`: that of the model directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_max_pixels: Option<usize>,
    /// Smallest area of an image in pixels; `None`: that of the model directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_min_pixels: Option<usize>,
    /// Whether unusable samples are skipped instead of failing the run.
    pub skip_bad_samples: bool,
    /// Maximum number of training samples of each file; its first ones are used. `None` means all.
    pub limit: Option<usize>,
    /// Number of threads per rank that encode samples ahead of the training loop.
    pub data_workers: Workers,
    /// Whether the first update takes the largest samples, so that a lack of memory shows at once.
    pub worst_first: bool,
    /// Requested samples per optimizer update over all ranks. `None`: the product of micro-batch,
    /// accumulation steps and ranks.
    pub global_batch: Option<usize>,
    /// Whether planning chooses the micro-batch size: the largest that fits the memory.
    pub find_batch: bool,
    /// Most tokens of the samples in a micro-batch, which then replace their number. `None`: `micro_batch` samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_batch: Option<usize>,
}

/// Configuration of a run: a value for every setting, as requested. Some values may still be `auto`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// What the ranks do: train, evaluate once, or answer.
    pub task: Task,
    /// Where the model, its tokenizer and the samples come from.
    pub source: Source,
    /// Output directory of the run (checkpoints, logs), as an absolute path.
    pub output: PathBuf,
    /// Whether the user chose `output`, rather than the program.
    pub output_is_explicit: bool,
    /// Rules for turning samples into prompts: format of the data files, and prompt template.
    pub samples: SampleRules,
    /// Source of the initial weights.
    pub init: InitChoice,
    /// ZeRO stage, 0 to 3: which of optimizer states, gradients and parameters are sharded over the ranks.
    pub zero: u8,
    /// State of `--zero auto`. `None`: the stage was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_auto: Option<ZeroAuto>,
    /// Ranks per shard group; each group holds one copy of the sharded states. `None`: one group of all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// Transport of the collectives between GPUs, as requested.
    #[serde(default)]
    pub collectives: Collectives,
    /// Tiers (device memory, host memory or disk) that store optimizer states, parameters and activations
    /// while not in use.
    pub offload: Offload,
    /// I/O method for the spill files of states that are offloaded to disk.
    pub nvme_io: NvmeIo,
    /// Optimizer in backward: which units (usually one layer each) are updated during the backward pass.
    #[serde(default)]
    #[serde(rename = "early_step")]
    pub optimizer_in_backward: OptimizerInBackward,
    /// Optimizer in forward: whether a unit (usually one layer) may be updated during the next pass, before
    /// that pass uses it.
    #[serde(default)]
    #[serde(rename = "late_step")]
    pub optimizer_in_forward: OptimizerInForward,
    /// Number of ranks over all machines.
    #[serde(rename = "nproc")]
    pub world_size: usize,
    /// Number of pipeline stages that divide the layers; it divides the number of ranks.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub mp_size: usize,
    /// Number of units of each pipeline stage, as requested. `None`: balanced by planning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mp_split: Option<Vec<u32>>,
    /// Number of ranks on this machine; `None` means that all ranks are on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_here: Option<usize>,
    /// Most ranks that compute on one GPU, where every rank chose its GPU itself: another launcher may show each rank
    /// other GPUs. `None`: the machine's ranks take `gpus` in turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_per_gpu: Option<usize>,
    /// Processor cores of the machine's ranks, as requested. `None`: bound within a scheduler's mask and to NUMA nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind_cores: Option<BindCores>,
    /// Order of sums on CPUs, as requested. `None`: that of the checkpoint it continues, else native.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_math: Option<CpuMathChoice>,
    /// Maximum wait of a rank for another rank, in seconds.
    pub comm_timeout_seconds: u64,
    /// Kind of device on which the ranks compute.
    pub device: Device,
    /// GPUs of this machine that the run uses, assigned to the machine's ranks round robin. Empty on the CPU.
    #[serde(default)]
    pub gpus: Vec<RunGpu>,
    /// Whether repeated sequences of GPU commands are replayed as CUDA graphs.
    #[serde(default)]
    pub cuda_graph: CudaGraph,
    /// How the GPUs are verified before the run is planned.
    #[serde(default)]
    pub verify_gpu: VerifyGpu,
    /// Whether offloaded weights are copied to the GPU one unit (usually one layer) before their use.
    #[serde(default)]
    #[serde(rename = "upload_ahead")]
    pub prefetch_weights: PrefetchWeights,
    /// Precision of weights, activations and optimizer states.
    pub precision: PrecisionChoice,
    /// Numeric settings that `precision` leaves open: gradient dtype, pure bf16, and loss scale.
    pub numbers: Numbers,
    /// Whether the angles of rotary position embeddings are rounded as in the model's own code, or stay in f32.
    pub rope_precision: RopeChoice,
    /// How frozen linear layers are quantized. `None`: as in the model's files.
    #[serde(default)]
    pub quantize: Option<Quantize>,
    /// Limit on the host memory of all ranks of one machine together, in bytes. `None`: no limit besides the
    /// machine's memory.
    pub host_memory_limit: Option<u64>,
    /// Host memory of each machine, in bytes, that stays free for the system and for file pages. `None`: a share of
    /// the machine's memory.
    #[serde(default)]
    pub host_reserve: Option<u64>,
    /// Limit on the device memory of each rank, in bytes. `None`: no limit besides the device's memory.
    pub device_memory_limit: Option<u64>,
    /// Parts of the model with activation checkpointing: their activations are recomputed in backward.
    pub checkpoint_activations: Recompute,
    /// Number of layers per checkpointed segment. Only the input of a segment is stored; backward recomputes
    /// the rest.
    #[serde(default = "one")]
    pub checkpoint_num_layers: usize,
    /// Tokens or patches of a tile of the feed-forward layers. `None`: all rows of a micro-batch at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_tile_tokens: Option<NonZeroUsize>,
    /// Length of training, in optimizer updates or in epochs.
    pub length: Length,
    /// Batch sizes, limits on samples, and settings for loading samples.
    pub batch: BatchConfig,
    /// Settings of AdamW and of the learning-rate schedule.
    pub optimizer: OptimizerConfig,
    /// Parts of the model that are trained.
    pub trainable: Trainable,
    /// How often a checkpoint is saved.
    pub save: Cadence,
    /// Maximum number of stored checkpoints; `None` keeps all.
    pub save_total_limit: Option<usize>,
    /// How the best checkpoint is chosen, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// How often the held-out samples are evaluated.
    pub eval: Cadence,
    /// How often a log row with loss, learning rate and times is written.
    pub logging: Cadence,
    /// Training steps (optimizer updates, counted from 1) that are recorded in a trace; the end of the range
    /// is excluded. `None`: no trace.
    #[serde(default)]
    pub trace_steps: Option<Range<u64>>,
    /// Report format in addition to the files of the run directory.
    pub report_to: ReportTo,
    /// Seed of data order, initial weights and stochastic rounding.
    pub seed: u64,
    /// Checkpoint from which the run continues, if any.
    pub resume: Resume,
    /// Whether a run continues although its base weights or its data differ from those of its checkpoint.
    #[serde(default)]
    pub resume_anyway: bool,
    /// Maximum number of restarts after a rank died.
    #[serde(default)]
    pub max_restarts: u32,
    /// Whether a restart may continue with fewer ranks.
    #[serde(default)]
    pub elastic: bool,
    /// Faults that ranks inject on purpose, for tests of the run's reaction.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inject: Vec<Fault>,
}

/// Default of `checkpoint_num_layers`: every layer stores its input.
const fn one() -> usize {
    1
}

/// Whether a count is the default of 1; serde passes a reference.
const fn is_one(count: &usize) -> bool {
    *count == 1
}

impl RunConfig {
    /// Number of data-parallel ranks: ranks that train on samples of their own.
    pub const fn data_ranks(&self) -> usize {
        self.world_size / self.mp_size
    }

    /// Ranks per shard group. `None` if all ranks form one group. A run that continues with a number of ranks that
    /// the group size does not divide also has one group.
    pub(crate) fn shard_groups(&self) -> Option<usize> {
        let divide =
            |ranks: &usize| *ranks < self.data_ranks() && self.data_ranks().is_multiple_of(*ranks);
        self.shard_group.filter(divide)
    }

    /// Number of ranks on this machine; all ranks of the run if the field `ranks_here` is `None`.
    pub fn ranks_here(&self) -> usize {
        self.ranks_here.unwrap_or(self.world_size)
    }

    /// Samples per optimizer update over all ranks.
    pub const fn global_batch(&self) -> usize {
        self.batch.micro_batch * self.batch.accumulation_steps * self.data_ranks()
    }

    /// Micro-batches per optimizer update over all ranks.
    pub const fn micro_batches(&self) -> usize {
        self.batch.accumulation_steps * self.data_ranks()
    }

    /// Factor on every learning rate, from `lr_scale` and the number of micro-batches per update.
    pub fn lr_factor(&self) -> f64 {
        self.optimizer.lr_scale.factor(self.micro_batches())
    }

    /// Peak learning rate of the schedule: `learning_rate` times `lr_factor()`.
    pub fn peak_lr(&self) -> f64 {
        self.optimizer.learning_rate * self.lr_factor()
    }

    /// Number of optimizer updates of the run. A length in epochs is converted with `samples`, the number of
    /// training samples, and rounded up; it gives at least 1. A length in updates ignores `samples`.
    pub fn total_steps(&self, samples: usize) -> u64 {
        match self.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                let exact = epochs * samples as f64 / self.global_batch() as f64;
                // The subtraction absorbs floating-point error: 3 epochs of 100 samples must not become one step
                // more.
                (exact - 1e-9).ceil().max(1.0) as u64
            }
        }
    }

    /// Whether the run is the built-in demo.
    pub const fn is_demo(&self) -> bool {
        matches!(self.source, Source::Demo { .. })
    }

    /// Path of the model directory: the user's, or the generated one of the built-in demo.
    pub fn model_dir(&self) -> PathBuf {
        match &self.source {
            Source::Demo { directory } => directory.join(demo::MODEL_DIR),
            Source::Files { model, .. } => model.clone(),
        }
    }

    /// Path of the training samples: the user's file or directory, or the generated file of the built-in
    /// demo.
    pub fn data_file(&self) -> PathBuf {
        match &self.source {
            Source::Demo { directory } => directory.join(demo::TRAIN_FILE),
            Source::Files { data, .. } => data.clone(),
        }
    }

    /// Path of the held-out samples: the user's file or directory, or the generated file of the built-in
    /// demo. `None` if the user gave none.
    pub fn eval_file(&self) -> Option<PathBuf> {
        match &self.source {
            Source::Demo { directory } => Some(directory.join(demo::HELD_OUT_FILE)),
            Source::Files { eval_data, .. } => eval_data.clone(),
        }
    }

    /// Directory at which relative paths of images start. `None` is beside each data file.
    pub fn image_dir(&self) -> Option<&Path> {
        match &self.source {
            Source::Demo { .. } => None,
            Source::Files { image_dir, .. } => image_dir.as_deref(),
        }
    }

    /// Name of the model for messages: that of its directory, or "demo".
    pub fn name(&self) -> String {
        self.source.name()
    }

    /// A draft of this run, without results of planning.
    pub(crate) fn draft(&self) -> RunPlan {
        RunPlan::draft(self.clone(), None)
    }
}
