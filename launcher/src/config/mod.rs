//! What a run is asked to do, and what came of it.
//!
//! [`RunConfig`] is what was asked: flag > file > default, every value present, a choice may be `auto`. [`RunPlan`] is what
//! came of it: no choice is left, and it has what the plan found. It is saved as `config.resolved.json`; ranks read that file
//! and decide nothing themselves. Neither is ever changed outside this module.

mod choices;
mod collectives;
pub(crate) mod defaults;
pub mod demo;
mod early;
mod fault;
mod gpu;
mod late;
pub(crate) mod numbers;
mod offload;
mod run_plan;
mod schedule;
mod upload;
pub(crate) mod words;

use std::ops::Range;
use std::path::PathBuf;

use models::Family;
use serde::{Deserialize, Serialize};

pub use choices::{
    Cadence, CudaGraph, DataFormatChoice, Device, DeviceChoice, InitChoice, LrScale,
    PrecisionChoice, Recompute, ReportTo, RopeChoice, Scheduler, Strategy, TemplateChoice, Workers,
};
pub use collectives::Collectives;
pub(crate) use defaults::DEVICE;
pub use defaults::{DEMO, Defaults, MODEL};
pub use early::OptimizerInBackward;
pub use fault::{Fault, FaultKind, FaultPhase, NotFinite};
pub(crate) use fault::{check_faults, fault_lines};
pub use gpu::{Products, RunGpu};
pub use late::OptimizerInForward;
pub use numbers::{GradDtype, Numbers, PureBf16Moments, PureBf16Weights, check_family};
pub use offload::{NvmeIo, Offload, Tier};
pub(crate) use run_plan::Found;
pub use run_plan::{CONFIG_FILE, RunPlan};
pub use schedule::SchedulerKwargs;
pub use upload::PrefetchWeights;

/// Where the model, its tokenizer and the samples come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Source {
    /// The built-in demo; the files are drawn into a cache directory before the ranks start.
    Demo {
        /// The directory, once it is drawn.
        #[serde(rename = "folder")]
        directory: PathBuf,
    },
    /// Directories and files of the user.
    Files {
        /// Model directory.
        model: PathBuf,
        /// Training samples.
        data: PathBuf,
        /// Held-out samples.
        eval_data: Option<PathBuf>,
    },
}

/// What the ranks are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Train from the start or from a checkpoint.
    Train,
    /// Load the checkpoint of `resume`, evaluate once, change nothing on the disk.
    Evaluate,
}

/// How long training goes on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Length {
    /// So many optimizer updates.
    Steps(u64),
    /// So many passes over the data.
    Epochs(f64),
}

/// Warmup of the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Warmup {
    /// So many updates.
    Steps(u64),
    /// This share of all updates, rounded up.
    Ratio(f64),
}

impl Warmup {
    /// Warmup updates of a run of `total` updates.
    pub fn steps(self, total: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Ratio(ratio) => (ratio * total as f64).ceil() as u64,
        }
    }
}

/// Where to continue from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resume {
    /// Start anew.
    No,
    /// The latest checkpoint of the output directory, or anew where there is none.
    Latest,
    /// This checkpoint directory.
    From(PathBuf),
}

/// Low-rank adapters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lora {
    /// Adapter rank `r`.
    pub lora_rank: usize,
    /// Scale is `alpha ÷ r`.
    pub lora_alpha: f64,
    /// Share of the adapters' inputs that training sets to zero.
    pub lora_dropout: f64,
    /// Names of projections, or a regular expression over whole module paths; those of the model's family when absent.
    pub target_modules: Option<String>,
    /// Whether each projection of a fused layer has an adapter of its own.
    pub per_projection: bool,
    /// Decoder layers with adapters; all when absent.
    pub layers: Option<Range<usize>>,
    /// Modules that train in full beside the adapters; those of the model's family when absent.
    pub modules_to_save: Option<Vec<String>>,
}

impl Lora {
    /// Layers with adapters in a model of `family`.
    #[must_use]
    pub fn target_modules(&self, family: Family) -> &str {
        let own = self.target_modules.as_deref();
        own.unwrap_or(family.default_lora_targets())
    }

    /// Modules that train in full beside the adapters in a model of `family`.
    #[must_use]
    pub fn modules_to_save(&self, family: Family, tune_vision: bool) -> Vec<String> {
        let published = || words::words(family.default_modules_to_save(tune_vision));
        self.modules_to_save.clone().unwrap_or_else(published)
    }
}

/// What samples look like, and how they are written for the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleRules {
    /// Form of the data.
    pub data_format: DataFormatChoice,
    /// How prompts are written.
    pub template: TemplateChoice,
    /// Whether GLM-4V learns the token behind an answer.
    pub train_on_turn_end: bool,
    /// Whether CogAgent takes samples without an image.
    pub text_without_cross: bool,
}

/// Which parts of the model are trained; the resampler is unless `train` or `freeze` say otherwise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trainable {
    /// The vision tower.
    pub tune_vision: bool,
    /// The language model, embeddings and head included.
    pub tune_llm: bool,
    /// Exactly these parts instead, as on the command line.
    pub train: Option<String>,
    /// Parts that stay frozen, as on the command line.
    pub freeze: Option<String>,
    /// Learning rates of parts, in the order they were given: the first that matches a name decides.
    pub learning_rates: Vec<(String, f64)>,
    /// Adapters on the language model.
    pub lora: Option<Lora>,
    /// Learned keys and values per decoder layer.
    pub ptuning_tokens: usize,
}

/// AdamW and its schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Peak learning rate, before it is scaled.
    pub learning_rate: f64,
    /// How it is scaled.
    pub lr_scale: LrScale,
    /// Its course.
    pub scheduler: Scheduler,
    /// What the course takes besides.
    #[serde(default)]
    pub scheduler_kwargs: SchedulerKwargs,
    /// Its warmup.
    pub warmup: Warmup,
    /// Decoupled weight decay, on weights that are neither biases nor norms.
    pub weight_decay: f64,
    /// Parts that do not decay instead, as on the command line.
    pub no_decay: Option<String>,
    /// Decay of the first moment.
    pub adam_beta1: f64,
    /// Decay of the second moment.
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    pub adam_epsilon: f64,
    /// Largest global gradient norm; `None` does not clip.
    pub max_grad_norm: Option<f64>,
}

/// How samples become batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Samples per rank and micro-batch.
    pub micro_batch: usize,
    /// Micro-batches per update.
    pub accumulation_steps: usize,
    /// Samples per rank and batch of the evaluation.
    pub eval_batch: usize,
    /// Samples are cut to this many tokens.
    pub model_max_length: usize,
    /// Most slices of one image.
    pub max_slice_nums: usize,
    /// Whether unusable samples are left out instead of refused.
    pub skip_bad_samples: bool,
    /// Use only so many of the first training samples.
    pub limit: Option<usize>,
    /// Threads that read samples ahead.
    pub data_workers: Workers,
    /// Whether the first update takes the longest samples.
    pub worst_first: bool,
    /// Samples per update that the batch size must keep; `None` where it follows from the others.
    pub global_batch: Option<usize>,
    /// Whether the plan chooses the batch size.
    pub find_batch: bool,
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// What the ranks do.
    pub task: Task,
    /// Model and data.
    pub source: Source,
    /// Directory of the run, absolute.
    pub output: PathBuf,
    /// Whether `output` was named by the user rather than made up.
    pub output_is_explicit: bool,
    /// What samples look like.
    pub samples: SampleRules,
    /// Where the weights come from.
    pub init: InitChoice,
    /// ZeRO stage, 0 to 3.
    pub zero: u8,
    /// Ranks that hold one copy of what is sharded; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// What carries weights and gradients between GPUs, as asked for.
    #[serde(default)]
    pub collectives: Collectives,
    /// Tiers of optimizer states and parameters.
    pub offload: Offload,
    /// The way to spill files.
    pub nvme_io: NvmeIo,
    /// Updates that begin while backward runs.
    #[serde(default)]
    #[serde(rename = "early_step")]
    pub optimizer_in_backward: OptimizerInBackward,
    /// Updates that go on beside the next pass.
    #[serde(default)]
    #[serde(rename = "late_step")]
    pub optimizer_in_forward: OptimizerInForward,
    /// Number of ranks over all machines.
    #[serde(rename = "nproc")]
    pub world_size: usize,
    /// How many of them are on this machine; `None` is all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks_here: Option<usize>,
    /// Longest wait of a rank for another, seconds.
    pub comm_timeout_seconds: u64,
    /// Where they compute.
    pub device: Device,
    /// The GPUs of a run on GPUs, which ranks take in turn.
    #[serde(default)]
    pub gpus: Vec<RunGpu>,
    /// Whether runs of works on them are queued as one when they come again.
    #[serde(default)]
    pub cuda_graph: CudaGraph,
    /// Whether weights that do not stay on a GPU come there one unit before they are used.
    #[serde(default)]
    #[serde(rename = "upload_ahead")]
    pub prefetch_weights: PrefetchWeights,
    /// Number format.
    pub precision: PrecisionChoice,
    /// What the number format leaves open.
    pub numbers: Numbers,
    /// Where rotary angles are rounded.
    pub rope_precision: RopeChoice,
    /// Host memory the run may use over all ranks, bytes; `None` is what the machine has.
    pub host_memory_limit: Option<u64>,
    /// Device memory of each rank, bytes; `None` is what the device has.
    pub device_memory_limit: Option<u64>,
    /// Towers whose activations are computed again in backward.
    pub checkpoint_activations: Recompute,
    /// Layers of these that share one kept input.
    #[serde(default = "one")]
    pub checkpoint_num_layers: usize,
    /// Length of the run.
    pub length: Length,
    /// Batches.
    pub batch: BatchConfig,
    /// Optimizer.
    pub optimizer: OptimizerConfig,
    /// What is trained.
    pub trainable: Trainable,
    /// When checkpoints are written.
    pub save: Cadence,
    /// How many checkpoints stay; `None` keeps all.
    pub save_total_limit: Option<usize>,
    /// When the held-out samples are evaluated.
    pub eval: Cadence,
    /// When a log row is written.
    pub logging: Cadence,
    /// Steps that are traced, from 1.
    #[serde(default)]
    pub trace_steps: Option<Range<u64>>,
    /// Further reports.
    pub report_to: ReportTo,
    /// Seed of data order, initial weights and stochastic rounding.
    pub seed: u64,
    /// Where to continue from.
    pub resume: Resume,
    /// How often the run is started again after a rank died.
    #[serde(default)]
    pub max_restarts: u32,
    /// Whether it may then go on with fewer ranks.
    #[serde(default)]
    pub elastic: bool,
    /// Faults that happen on purpose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inject: Vec<Fault>,
}

/// Every layer keeps its input.
const fn one() -> usize {
    1
}

impl RunConfig {
    /// Ranks that hold one copy of what is sharded. `None` where all do: also where a run goes on with other ranks than were
    /// asked for, which the groups do not divide.
    pub(crate) fn shard_groups(&self) -> Option<usize> {
        let divide =
            |ranks: &usize| *ranks < self.world_size && self.world_size.is_multiple_of(*ranks);
        self.shard_group.filter(divide)
    }

    /// Number of ranks on this machine.
    pub fn ranks_here(&self) -> usize {
        self.ranks_here.unwrap_or(self.world_size)
    }

    /// Samples per optimizer update over all ranks.
    pub const fn global_batch(&self) -> usize {
        self.batch.micro_batch * self.batch.accumulation_steps * self.world_size
    }

    /// Micro-batches per optimizer update over all ranks.
    pub const fn micro_batches(&self) -> usize {
        self.batch.accumulation_steps * self.world_size
    }

    /// What every learning rate is multiplied by.
    pub fn lr_factor(&self) -> f64 {
        self.optimizer.lr_scale.factor(self.micro_batches())
    }

    /// Peak learning rate after scaling.
    pub fn peak_lr(&self) -> f64 {
        self.optimizer.learning_rate * self.lr_factor()
    }

    /// Number of optimizer updates for `samples` training samples.
    pub fn total_steps(&self, samples: usize) -> u64 {
        match self.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                let exact = epochs * samples as f64 / self.global_batch() as f64;
                // 3 epochs of 100 samples must not become one step more through rounding.
                (exact - 1e-9).ceil().max(1.0) as u64
            }
        }
    }

    /// Whether this is the built-in demo.
    pub const fn is_demo(&self) -> bool {
        matches!(self.source, Source::Demo { .. })
    }

    /// The model directory.
    pub fn model_dir(&self) -> PathBuf {
        match &self.source {
            Source::Demo { directory } => directory.join(demo::MODEL_DIR),
            Source::Files { model, .. } => model.clone(),
        }
    }

    /// The file of training samples.
    pub fn data_file(&self) -> PathBuf {
        match &self.source {
            Source::Demo { directory } => directory.join(demo::TRAIN_FILE),
            Source::Files { data, .. } => data.clone(),
        }
    }

    /// The file of held-out samples.
    pub fn eval_file(&self) -> Option<PathBuf> {
        match &self.source {
            Source::Demo { directory } => Some(directory.join(demo::HELD_OUT_FILE)),
            Source::Files { eval_data, .. } => eval_data.clone(),
        }
    }

    /// A name for people: the model directory's, or "demo".
    pub fn name(&self) -> String {
        match &self.source {
            Source::Demo { .. } => "demo".to_string(),
            Source::Files { model, .. } => model.file_name().map_or_else(
                || "model".to_string(),
                |name| name.to_string_lossy().into_owned(),
            ),
        }
    }

    /// The draft of this run, with nothing found yet.
    pub(crate) fn draft(&self) -> RunPlan {
        RunPlan::draft(self.clone(), None)
    }
}
