//! Defaults of all flags. Some differ between the user's models and the built-in demo.

use super::{Cadence, DeviceChoice, InitChoice, PrecisionChoice, Scheduler, Warmup};

/// Default values of the flags whose defaults differ between the built-in demo and the user's own models.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// Default of `--init`: source of the initial weights.
    pub init: InitChoice,
    /// Default of `--precision`: dtypes of weights, activations and optimizer states.
    pub precision: PrecisionChoice,
    /// Default of `--max-steps`, in optimizer updates. `None`: `num_train_epochs` sets the length.
    pub max_steps: Option<u64>,
    /// Default of `--num-train-epochs`: number of passes over the training data.
    pub num_train_epochs: f64,
    /// Samples per optimizer update over all ranks, from which the demo derives its micro-batch. `None`:
    /// `micro_batch` is the default.
    pub global_batch: Option<usize>,
    /// Default of `--per-device-train-batch-size`: samples per rank and micro-batch.
    pub micro_batch: usize,
    /// Default of `--per-device-eval-batch-size`: samples per rank and evaluation batch.
    pub eval_batch: usize,
    /// Default of `--learning-rate`: peak learning rate.
    pub learning_rate: f64,
    /// The same for a run of adapters.
    pub adapter_learning_rate: f64,
    /// Default of `--lr-scheduler-type`: learning-rate schedule.
    pub scheduler: Scheduler,
    /// Default of `--warmup-ratio` or `--warmup-steps`: length of the learning-rate warmup.
    pub warmup: Warmup,
    /// Default of `--weight-decay`: decoupled weight decay of AdamW.
    pub weight_decay: f64,
    /// Default of `--save-steps`.
    pub save: Cadence,
    /// Default of `--save-total-limit` for a run that does not say when to save.
    pub save_total_limit: Option<usize>,
    /// Default of `--logging-steps`: number of optimizer updates between log rows.
    pub logging_steps: u64,
    /// Default of `--model-max-length`: maximum tokens per sample.
    pub model_max_length: usize,
    /// Default of `--longest-first`: whether the first update takes the largest samples.
    pub worst_first: bool,
}

/// Defaults for the user's models: those of OpenBMB's fine-tuning scripts. Adapters train alone, at peft's usual rate.
/// Checkpoints are saved as often as Hugging Face does.
pub const MODEL: Defaults = Defaults {
    init: InitChoice::Checkpoint,
    precision: PrecisionChoice::Bf16,
    max_steps: None,
    num_train_epochs: 3.0,
    global_batch: None,
    micro_batch: 1,
    eval_batch: 1,
    learning_rate: 1e-6,
    adapter_learning_rate: 1e-4,
    scheduler: Scheduler::Cosine,
    warmup: Warmup::Ratio(0.01),
    weight_decay: 0.1,
    save: Cadence::Steps(500),
    save_total_limit: Some(2),
    logging_steps: 1,
    model_max_length: 2048,
    worst_first: true,
};

/// Defaults of the built-in demo: a small model that trains from random weights within a minute on two cores.
pub const DEMO: Defaults = Defaults {
    init: InitChoice::Random,
    precision: PrecisionChoice::F32,
    max_steps: Some(300),
    num_train_epochs: 3.0,
    global_batch: Some(32),
    micro_batch: 16,
    eval_batch: 12,
    learning_rate: 1e-3,
    adapter_learning_rate: 1e-3,
    scheduler: Scheduler::Cosine,
    warmup: Warmup::Steps(20),
    weight_decay: 0.05,
    save: Cadence::End,
    save_total_limit: None,
    logging_steps: 10,
    model_max_length: 256,
    // The samples of the demo have similar sizes, and its settings are tuned for the shuffled order.
    worst_first: false,
};

/// Default of `--zero`: ZeRO stage.
pub(crate) const ZERO: u8 = 3;
/// Default of `--device`: GPUs that are verified, else the CPU.
pub(crate) const DEVICE: DeviceChoice = DeviceChoice::Auto;
/// Default of `--nproc`, the number of ranks, if no GPU is visible.
pub(crate) const NPROC: usize = 2;
/// Default of `--comm-timeout`: maximum wait of a rank for another rank, in seconds.
pub(crate) const COMM_TIMEOUT_SECONDS: u64 = 300;
/// Default of `--adam-beta1`: decay of the first moment.
pub(crate) const ADAM_BETA1: f64 = 0.9;
/// Default of `--adam-beta2`: decay of the second moment.
pub(crate) const ADAM_BETA2: f64 = 0.95;
/// Default of `--adam-epsilon`.
pub(crate) const ADAM_EPSILON: f64 = 1e-8;
/// Default of `--max-grad-norm`: global gradient norm above which gradients are clipped.
pub(crate) const MAX_GRAD_NORM: f64 = 1.0;
/// Default of `--max-slice-nums`: maximum slices per image.
pub(crate) const MAX_SLICE_NUMS: usize = 9;
/// Default of `--lora-rank`.
pub(crate) const LORA_RANK: usize = 64;
/// Default of `--lora-alpha` as a multiple of the rank. The output of an adapter is scaled by alpha / rank.
pub(crate) const LORA_SCALE: f64 = 2.0;
/// Default of `--seed`.
pub(crate) const SEED: u64 = 42;
