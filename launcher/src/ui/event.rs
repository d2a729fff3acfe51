//! Events of a run that are shown to a person.

use std::fmt;
use std::path::PathBuf;

use crate::memory::RankMemory;
use serde::{Deserialize, Deserializer, Serialize};

/// A number that went into JSON, which has no NaN and no infinity: both are written as null and read as NaN.
pub(crate) fn or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Event to show.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    /// A flag has no effect.
    Note {
        /// The flag as typed.
        flag: String,
        /// Why it has no effect.
        reason: String,
    },
    /// Line of information.
    Info {
        /// Label of at most seven letters.
        label: String,
        /// The text.
        text: String,
    },
    /// Warning that does not stop the run.
    Warning {
        /// The text.
        text: String,
    },
    /// Memory plan, before weights are read.
    Plan(PlanEvent),
    /// Trainable tensors, before weights are read.
    Trains(Vec<TrainRow>),
    /// Summary of the data.
    Data(DataEvent),
    /// All ranks have joined the rendezvous.
    Comm {
        /// Number of ranks.
        ranks: usize,
        /// Transport between the ranks.
        transport: String,
        /// Seconds until all ranks had joined.
        #[serde(deserialize_with = "or_nan")]
        seconds: f64,
    },
    /// Weights were read.
    Load {
        /// Bytes read over all ranks.
        bytes: u64,
        /// Safetensors files.
        files: usize,
        /// Seconds.
        #[serde(deserialize_with = "or_nan")]
        seconds: f64,
    },
    /// Training starts; shows the header of the table.
    TrainStart {
        /// Steps of the whole run.
        total: u64,
        /// Steps already done.
        done: u64,
    },
    /// One step is done; only moves the progress bar.
    Tick {
        /// Steps done.
        step: u64,
        /// Steps of the whole run.
        total: u64,
        /// Loss of the step, if known.
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
    /// The run has ended.
    Done(DoneEvent),
}

/// Planned bytes of one kind on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanPart {
    /// Kind: params, grads, optimizer, activations, …
    pub name: String,
    /// Bytes on the device.
    pub device_bytes: u64,
    /// Bytes in the host tier.
    pub host_bytes: u64,
}

/// Memory plan, shown in three lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanEvent {
    /// Name of the model.
    pub model: String,
    /// Number of parameters.
    pub params: u64,
    /// Number of trained parameters.
    pub trainable: u64,
    /// Number of ranks.
    pub ranks: usize,
    /// Device of the ranks.
    pub device: String,
    /// Ranks that together hold one copy of the state, if not all ranks do (hybrid sharding).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// ZeRO stage.
    pub stage: u8,
    /// Precision.
    pub precision: String,
    /// Offload setting, as on the command line.
    pub offload: String,
    /// Planned bytes of one rank by kind.
    pub per_rank: Vec<PlanPart>,
    /// Host memory of the machine in bytes.
    pub host_total_bytes: u64,
    /// Free host memory before the run in bytes.
    pub host_free_bytes: u64,
    /// Host memory that all ranks need together in bytes.
    pub host_need_bytes: u64,
    /// Share of a rank's elements that it updates during backward (optimizer in backward).
    #[serde(default, deserialize_with = "or_nan")]
    #[serde(rename = "early_share")]
    pub backward_share: f64,
    /// Planned memory of one rank by phase, tier and kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Box<RankMemory>>,
}

/// Trainable tensors of one part of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainRow {
    /// Name of the part in the model's tree, or its adapters.
    pub module: String,
    /// Number of trainable tensors.
    pub tensors: usize,
    /// Number of their elements.
    pub params: u64,
    /// Dtype of the weights.
    pub dtype: String,
    /// Peak learning rate.
    #[serde(deserialize_with = "or_nan")]
    pub lr: f64,
}

/// Summary of the data, shown in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEvent {
    /// Training samples.
    pub samples: usize,
    /// Held-out samples.
    pub eval_samples: usize,
    /// Tokens of the longest sample.
    pub longest_tokens: usize,
    /// Number of images, all readable.
    pub images: usize,
    /// Minimum supervised tokens of a sample.
    pub supervised_min_tokens: usize,
    /// Number of samples left out by `--skip-bad-samples`.
    pub skipped: usize,
    /// The global batch, if it is larger than the data, so that samples repeat within one update.
    pub wraps_around_global_batch: Option<usize>,
}

/// Row of the training table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepEvent {
    /// Steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub total: u64,
    /// Mean loss of supervised tokens since the last row.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Learning rate of the step.
    #[serde(deserialize_with = "or_nan")]
    pub lr: f64,
    /// Global gradient norm before clipping. `None` if the step was skipped.
    pub grad_norm: Option<f64>,
    /// Tokens per second over all ranks.
    #[serde(deserialize_with = "or_nan")]
    pub tokens_per_second: f64,
    /// Seconds of one step.
    #[serde(deserialize_with = "or_nan")]
    pub step_seconds: f64,
    /// Share of the step spent waiting for data, 0 to 1.
    #[serde(deserialize_with = "or_nan")]
    pub data_wait: f64,
    /// Peak bytes on the device, one rank.
    pub device_peak_bytes: u64,
    /// Peak bytes in the host tier, one rank.
    pub host_bytes: u64,
    /// Whether the update was skipped because a value was not finite.
    pub skipped: bool,
    /// Estimated seconds to the end.
    #[serde(deserialize_with = "or_nan")]
    pub remaining_seconds: f64,
    /// Traffic of one rank's spill files since the last row.
    #[serde(default)]
    pub disk: Option<DiskTraffic>,
}

/// Result of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalEvent {
    /// Steps done.
    pub step: u64,
    /// Mean loss of the held-out samples' supervised tokens.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    /// Share of answers that match exactly, 0 to 1, if answers were generated.
    pub exact_match: Option<f64>,
    /// The same share before training.
    pub exact_match_before: Option<f64>,
    /// Number of held-out samples.
    pub samples: usize,
}

/// Checkpoint that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveEvent {
    /// Directory name.
    pub name: String,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of the sharded state.
    pub state_bytes: u64,
    /// Number of files, all hashed.
    pub files: usize,
}

/// Checkpoint that was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeEvent {
    /// Directory name.
    pub name: String,
    /// Number of ranks that loaded it.
    pub ranks: usize,
    /// Step of the checkpoint.
    pub step: u64,
    /// Whether the loss equals that of the saving run bit for bit, if they were compared.
    pub loss_is_identical: Option<bool>,
}

/// Outcome of the run, shown in the last lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DoneEvent {
    /// Seconds of the whole run.
    #[serde(deserialize_with = "or_nan")]
    pub seconds: f64,
    /// Run directory.
    pub output: PathBuf,
    /// Whether a signal ended the run early.
    pub interrupted: bool,
    /// Warnings from before the run, repeated because they may have been forgotten.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Suggested next steps, one line each.
    pub next: Vec<String>,
}

/// Traffic of one rank's spill files.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DiskTraffic {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes per second while requests were under way.
    #[serde(deserialize_with = "or_nan")]
    pub bytes_per_second: f64,
    /// Share of what the disk reached when it was measured at the start; 0 where it was not.
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
