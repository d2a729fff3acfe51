//! Defaults of all flags. Some differ between the user's models and the built-in demo.

use super::{DeviceChoice, InitChoice, PrecisionChoice, Scheduler, Warmup};

/// Defaults that differ between the demo and the user's models. Each field is the default of the named flag.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    /// `--init`
    pub init: InitChoice,
    /// `--precision`
    pub precision: PrecisionChoice,
    /// `--max-steps`, if the length is not given in epochs.
    pub max_steps: Option<u64>,
    /// `--num-train-epochs`
    pub num_train_epochs: f64,
    /// Samples per update over all ranks. The demo derives its micro-batch from them.
    pub global_batch: Option<usize>,
    /// `--per-device-train-batch-size`
    pub micro_batch: usize,
    /// `--per-device-eval-batch-size`
    pub eval_batch: usize,
    /// `--learning-rate`
    pub learning_rate: f64,
    /// `--lr-scheduler-type`
    pub scheduler: Scheduler,
    /// `--warmup-ratio` or `--warmup-steps`
    pub warmup: Warmup,
    /// `--weight-decay`
    pub weight_decay: f64,
    /// `--logging-steps`
    pub logging_steps: u64,
    /// `--model-max-length`
    pub model_max_length: usize,
    /// `--longest-first`
    pub worst_first: bool,
}

/// Defaults for the user's models: those of OpenBMB's fine-tuning scripts.
pub const MODEL: Defaults = Defaults {
    init: InitChoice::Checkpoint,
    precision: PrecisionChoice::Bf16,
    max_steps: None,
    num_train_epochs: 3.0,
    global_batch: None,
    micro_batch: 1,
    eval_batch: 1,
    learning_rate: 1e-6,
    scheduler: Scheduler::Cosine,
    warmup: Warmup::Ratio(0.01),
    weight_decay: 0.1,
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
    scheduler: Scheduler::Cosine,
    warmup: Warmup::Steps(20),
    weight_decay: 0.05,
    logging_steps: 10,
    model_max_length: 256,
    // The samples of the demo have similar sizes, and its settings are tuned for the shuffled order.
    worst_first: false,
};

/// `--zero`
pub(crate) const ZERO: u8 = 3;
/// `--device`: the CPU, until training on GPUs has been measured on hardware.
pub(crate) const DEVICE: DeviceChoice = DeviceChoice::Cpu;
/// `--nproc` if no GPU is visible.
pub(crate) const NPROC: usize = 2;
/// `--comm-timeout`, in seconds.
pub(crate) const COMM_TIMEOUT_SECONDS: u64 = 300;
/// `--adam-beta1`
pub(crate) const ADAM_BETA1: f64 = 0.9;
/// `--adam-beta2`
pub(crate) const ADAM_BETA2: f64 = 0.95;
/// `--adam-epsilon`
pub(crate) const ADAM_EPSILON: f64 = 1e-8;
/// `--max-grad-norm`
pub(crate) const MAX_GRAD_NORM: f64 = 1.0;
/// `--max-slice-nums`
pub(crate) const MAX_SLICE_NUMS: usize = 9;
/// `--lora-rank`
pub(crate) const LORA_RANK: usize = 64;
/// `--lora-alpha`
pub(crate) const LORA_ALPHA: f64 = 64.0;
/// `--seed`
pub(crate) const SEED: u64 = 42;
