//! Events of a run that are shown to a person.

use std::fmt;
use std::path::PathBuf;

use crate::lang::{Text, both, text};
use crate::memory::{RankMemory, kind_name};
use crate::units::{bytes, grouped};
use serde::{Deserialize, Deserializer, Serialize};

/// A number that went into JSON, which has no NaN and no infinity: both are written as null and read as NaN.
pub(crate) fn or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Event of a run that a rank or the supervisor shows on the screen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    /// A flag has no effect.
    Note {
        /// The flag as typed.
        flag: String,
        /// Why it has no effect.
        reason: Text,
    },
    /// Line of information with a label.
    Info {
        /// Label of at most seven columns.
        label: Text,
        /// Text of the line.
        text: Text,
    },
    /// Warning that does not stop the run.
    Warning {
        /// Text of the warning.
        text: Text,
    },
    /// Memory plan of the run, shown before weights are read.
    Plan(PlanEvent),
    /// Trainable tensors by part of the model, shown before weights are read.
    Trains(Vec<TrainRow>),
    /// Quantized weights of the base, shown before weights are read.
    Quantized(QuantizedEvent),
    /// Pipeline stages of the run, shown before weights are read.
    Stages(StagesEvent),
    /// Number and size of the samples and images.
    Data(DataEvent),
    /// All ranks have joined the rendezvous.
    Comm {
        /// Number of ranks.
        ranks: usize,
        /// Name of the transport between the ranks.
        transport: String,
        /// Seconds until all ranks had joined the rendezvous.
        #[serde(deserialize_with = "or_nan")]
        seconds: f64,
    },
    /// Weights were read.
    Load {
        /// Total size of the weight files in bytes.
        bytes: u64,
        /// Number of weight files (safetensors).
        files: usize,
        /// Seconds from the start of reading until the weights were loaded.
        #[serde(deserialize_with = "or_nan")]
        seconds: f64,
    },
    /// Training starts; shows the header of the table.
    TrainStart {
        /// Steps of the whole run.
        total: u64,
        /// Steps that were already completed, by the run that is resumed; 0 in a new run.
        done: u64,
    },
    /// One step is done; only moves the progress bar.
    Tick {
        /// Number of completed steps.
        step: u64,
        /// Steps of the whole run.
        total: u64,
        /// Training loss of the step, if known.
        loss: Option<f64>,
    },
    /// A logged step.
    Step(StepEvent),
    /// An evaluation.
    Eval(EvalEvent),
    /// A checkpoint was written.
    Save(SaveEvent),
    /// A checkpoint was loaded.
    Resume(ResumeEvent),
    /// A piece of an answer. It goes to standard output.
    Answer {
        /// The text after the earlier pieces.
        text: String,
    },
    /// The run has ended.
    Done(DoneEvent),
}

/// One kind of memory in the memory plan: its name, and its planned peaks in the device and host memory of
/// one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanPart {
    /// Kind of memory: `params`, `grads`, `optimizer`, `gathered` (gathered parameters), `communication` (buffers
    /// between ranks) or `activations`.
    pub name: String,
    /// Planned peak bytes of this kind in the device memory of one rank.
    pub device_bytes: u64,
    /// Planned peak bytes of this kind in the host memory of one rank.
    pub host_bytes: u64,
}

impl fmt::Display for PlanPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, device) = (kind_name(&self.name), bytes(self.device_bytes));
        write!(f, "{name} {device}")?;
        match self.host_bytes {
            0 => Ok(()),
            host => {
                let host = text!(" (host {})", "（主机 {}）", bytes(host));
                host.fmt(f)
            }
        }
    }
}

/// Memory plan of a run: size of the model, ranks, sharding, and planned bytes per rank. The screen shows it
/// in three lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanEvent {
    /// Name of the model's directory, or `demo` for the built-in demo.
    pub model: String,
    /// Number of elements of all parameters of the model, unsharded.
    pub params: u64,
    /// Number of elements of the trained parameters of the model, unsharded.
    pub trainable: u64,
    /// Number of ranks on all machines.
    pub ranks: usize,
    /// Kind of the ranks' device: `cpu` or `cuda`.
    pub device: String,
    /// Number of ranks that together hold one copy of the sharded state (hybrid sharding). `None` if all
    /// ranks do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// ZeRO stage of the run, 0 to 3.
    pub stage: u8,
    /// Name of the training precision, such as `bf16`.
    pub precision: String,
    /// Offload setting in the syntax of `--offload`, such as `cpu`.
    pub offload: String,
    /// Planned peak bytes of each rank, one entry per kind of memory.
    pub per_rank: Vec<PlanPart>,
    /// Total host memory of the machine, in bytes.
    pub host_total_bytes: u64,
    /// Host memory in bytes that was free before the run.
    pub host_free_bytes: u64,
    /// Bytes of the free host memory that the run leaves to the system.
    #[serde(default)]
    pub host_reserve_bytes: u64,
    /// The run's own limit of host memory in bytes, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_limit_bytes: Option<u64>,
    /// Planned peak of the host memory that all ranks of the machine use together, in bytes.
    pub host_need_bytes: u64,
    /// Whether the need fits into the free host memory, less the reserve and within the limit.
    #[serde(default)]
    pub host_fits: bool,
    /// Fraction (0 to 1) of a rank's trainable elements that it updates during backward (optimizer in backward).
    #[serde(default, deserialize_with = "or_nan")]
    #[serde(rename = "early_share")]
    pub backward_share: f64,
    /// Planned bytes of one rank by phase of the run, then by tier (device or host memory) and kind of
    /// memory. `None` if the plan was read from a file without them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Box<RankMemory>>,
}

/// Trainable tensors that belong to one part of the model and share a learning rate: one row of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainRow {
    /// Name of the part of the model. LoRA adapters have rows of their own, with ` (adapters)` after the
    /// name.
    pub module: String,
    /// Number of trainable tensors in this row.
    pub tensors: usize,
    /// Number of elements of these tensors, unsharded.
    pub params: u64,
    /// Dtype of the weights in forward and backward, such as `bf16`.
    pub dtype: String,
    /// Peak learning rate of these tensors, with `--lr-scale` applied.
    #[serde(deserialize_with = "or_nan")]
    pub lr: f64,
}

/// Pipeline stages of a run. Shares and bytes are lists in the order of the stages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StagesEvent {
    /// Number of units of each stage.
    pub units: Vec<u32>,
    /// Share of each stage in the estimated operations of a step, in percent.
    pub operations_percent: Vec<f64>,
    /// Share of each stage in the bytes of stored states, in percent.
    pub bytes_percent: Vec<f64>,
    /// Most bytes that cross each boundary in one direction, for a micro-batch. One fewer than stages.
    pub boundary_bytes: Vec<u64>,
    /// Data-parallel ranks of each stage.
    pub data_ranks: usize,
    /// Micro-batches per update on each of them.
    pub micro_batches: usize,
    /// Share of a step in which a stage waits for others, in percent.
    pub waiting_percent: f64,
}

impl fmt::Display for StagesEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |shares: &[f64]| {
            let shares: Vec<String> = shares.iter().map(|share| format!("{share:.0}")).collect();
            shares.join(", ")
        };
        let counts: Vec<String> = self.units.iter().map(u32::to_string).collect();
        let crossing: Vec<String> = self.boundary_bytes.iter().map(|n| bytes(*n)).collect();
        let (crossing, waits) = (crossing.join(", "), self.waiting_percent);
        let micro_batches = self.micro_batches;
        let text = Text::join(
            &[
                text!(
                    "{} units · {} % of the operations · {} % of the bytes · {} data-parallel ranks each",
                    "{} 个单元 · 占运算的 {} % · 占字节的 {} % · 各有 {} 个数据并行 rank",
                    counts.join(", "),
                    list(&self.operations_percent),
                    list(&self.bytes_percent),
                    self.data_ranks,
                ),
                text!(
                    "at most {crossing} cross each boundary, in each direction · a stage waits {waits:.0} % of a step with {micro_batches} micro-batches",
                    "每个边界每个方向最多传输 {crossing} · 每次更新 {micro_batches} 个微批时，各段有 {waits:.0} % 的时间在等待"
                ),
            ],
            "\n",
        );
        write!(f, "{text}")
    }
}

/// Quantized weights of a model's base: their formats and sizes, unsharded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantizedEvent {
    /// Formats, such as `nf4, double`.
    pub formats: Vec<String>,
    /// Number of quantized tensors.
    pub tensors: usize,
    /// Number of elements of these tensors.
    pub params: u64,
    /// Bytes of these tensors as they are stored.
    pub bytes: u64,
}

impl fmt::Display for QuantizedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = match self.tensors {
            1 => both("layer", "个层"),
            _ => both("layers", "个层"),
        };
        let text = text!(
            "{} {tensors} in {} · {} instead of {} in 16 bits",
            "{} {tensors}，格式 {} · 占 {}，16 位时为 {}",
            grouped(self.tensors as u64),
            self.formats.join(" + "),
            bytes(self.bytes),
            bytes(2 * self.params)
        );
        write!(f, "{text}")
    }
}

/// Counts of a run's training and held-out data (samples, tokens, images), shown in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEvent {
    /// Number of training samples.
    pub samples: usize,
    /// Number of held-out samples.
    pub eval_samples: usize,
    /// Number of tokens of the longest training sample.
    pub longest_tokens: usize,
    /// Number of images in the training and held-out data, all readable.
    pub images: usize,
    /// Number of supervised tokens of the training sample that has the fewest.
    pub supervised_min_tokens: usize,
    /// Number of training and held-out samples left out by `--skip-bad-samples`.
    pub skipped: usize,
    /// Samples per global batch, if that is more than the number of training samples, so that samples repeat
    /// within one update. Otherwise `None`.
    pub wraps_around_global_batch: Option<usize>,
}

/// Progress of the run at a logged step: loss, learning rate, speed and memory. The screen shows it as one
/// row of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepEvent {
    /// Number of training steps (optimizer updates, skipped ones included) completed since the start of the
    /// run.
    pub step: u64,
    /// Number of training steps of the whole run.
    pub total: u64,
    /// Mean loss per supervised token, averaged over the steps since the last row.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Learning rate of the step, from the schedule.
    #[serde(deserialize_with = "or_nan")]
    pub lr: f64,
    /// Global L2 norm of the gradient before clipping. `None` if the update was skipped.
    pub grad_norm: Option<f64>,
    /// Input tokens, supervised or not, that all ranks together processed per second since the last row.
    #[serde(deserialize_with = "or_nan")]
    pub tokens_per_second: f64,
    /// Seconds of one step, averaged over the steps since the last row and over ranks.
    #[serde(deserialize_with = "or_nan")]
    pub step_seconds: f64,
    /// Fraction of the step time that ranks waited for samples, 0 to 1. Averaged over the steps since the
    /// last row and over ranks.
    #[serde(deserialize_with = "or_nan")]
    pub data_wait: f64,
    /// Peak bytes of device memory of the reporting rank (rank 0) since its start.
    pub device_peak_bytes: u64,
    /// Peak bytes of host memory in the memory pool of the reporting rank (rank 0) since its start. Offloaded
    /// states are in this pool.
    pub host_bytes: u64,
    /// Whether the update of this step was skipped because the loss or a gradient was not finite.
    pub skipped: bool,
    /// Estimated seconds from this step until the end of the run.
    #[serde(deserialize_with = "or_nan")]
    pub remaining_seconds: f64,
    /// Traffic of rank 0's spill files (states offloaded to disk) since the last row. `None` without spill
    /// files.
    #[serde(default)]
    pub disk: Option<DiskTraffic>,
}

/// Result of an evaluation on the held-out samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalEvent {
    /// Number of training steps (optimizer updates) completed before the evaluation, since the start of the
    /// run.
    pub step: u64,
    /// Mean loss per supervised token over the held-out samples.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Share of generated answers that match the expected ones exactly, 0 to 1, if answers were generated.
    pub exact_match: Option<f64>,
    /// Share of exactly matching answers before training, 0 to 1, if answers were generated then.
    pub exact_match_before: Option<f64>,
    /// Number of held-out samples.
    pub samples: usize,
}

/// Checkpoint that was just written: its name, sizes and number of files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveEvent {
    /// Name of the checkpoint's directory inside the run directory.
    pub name: String,
    /// Size of the exported weight files in bytes.
    pub weight_bytes: u64,
    /// Size of the sharded training state of all ranks together, in bytes.
    pub state_bytes: u64,
    /// Number of files in the checkpoint.
    pub files: usize,
}

/// Checkpoint that the run was resumed from: its name, its step, and the outcome of a comparison of losses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeEvent {
    /// Name of the checkpoint's directory.
    pub name: String,
    /// Number of ranks that loaded the checkpoint.
    pub ranks: usize,
    /// Number of training steps (optimizer updates) completed when the checkpoint was written.
    pub step: u64,
    /// Whether the evaluation loss after loading equals that of the saving run bit for bit. `None` if not
    /// compared.
    pub loss_is_identical: Option<bool>,
}

/// Outcome of the run: its duration, its directory, warnings and suggestions. Shown in the last lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DoneEvent {
    /// Seconds from the start of the command to the end of the run.
    #[serde(deserialize_with = "or_nan")]
    pub seconds: f64,
    /// Path of the run directory.
    pub output: PathBuf,
    /// Whether a signal ended the run early.
    pub interrupted: bool,
    /// Warnings that were shown before training, repeated at the end of the run.
    #[serde(default)]
    pub warnings: Vec<Text>,
    /// Suggested next steps, one line each.
    pub next: Vec<Text>,
}

/// Traffic of one rank's spill files (states offloaded to disk) in a time span.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DiskTraffic {
    /// Bytes read from spill files.
    pub read_bytes: u64,
    /// Bytes written to spill files.
    pub written_bytes: u64,
    /// Throughput: bytes read and written per second of the time with at least one request in flight.
    #[serde(deserialize_with = "or_nan")]
    pub bytes_per_second: f64,
    /// `bytes_per_second` as a fraction of the disk throughput measured at the start; 0 if it was not
    /// measured.
    #[serde(deserialize_with = "or_nan")]
    pub share: f64,
}

impl fmt::Display for DiskTraffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nvme {:.2} GB/s", self.bytes_per_second / 1e9)?;
        if self.share > 0.0 {
            write!(f, " ({:.0} %)", 100.0 * self.share)?;
        }
        Ok(())
    }
}
