//! What happens in a run, as far as a person wants to see it.

use std::fmt;
use std::path::PathBuf;

use crate::memory::RankMemory;
use serde::{Deserialize, Deserializer, Serialize};

/// A number that went into JSON, which has no NaN and no infinity: both are written as null and read as NaN.
pub(crate) fn or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// One thing to show.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    /// A flag without effect.
    Note {
        /// As typed.
        flag: String,
        /// Why.
        reason: String,
    },
    /// A line of information.
    Info {
        /// Label of at most seven letters.
        label: String,
        /// The text.
        text: String,
    },
    /// Something that deserves attention but does not stop the run.
    Warning {
        /// The text.
        text: String,
    },
    /// Who owns what, before weights are read.
    Plan(PlanEvent),
    /// What trains, before weights are read.
    Trains(Vec<TrainRow>),
    /// What the data holds.
    Data(DataEvent),
    /// The ranks have met.
    Comm {
        /// Number of ranks.
        ranks: usize,
        /// How they exchange data.
        transport: String,
        /// Seconds until all had arrived.
        #[serde(deserialize_with = "or_nan")]
        seconds: f64,
    },
    /// Weights were read.
    Load {
        /// Bytes read over all ranks.
        bytes: u64,
        /// Safetensors files.
        files: usize,
        /// Seconds it took.
        #[serde(deserialize_with = "or_nan")]
        seconds: f64,
    },
    /// Training starts: the head of the table.
    TrainStart {
        /// Steps of the whole run.
        total: u64,
        /// Steps already done.
        done: u64,
    },
    /// One step done; moves the progress bar only.
    Tick {
        /// Steps done.
        step: u64,
        /// Steps of the whole run.
        total: u64,
        /// Loss of the step, where known.
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
    /// The end.
    Done(DoneEvent),
}

/// Bytes of one kind on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanPart {
    /// Kind: params, grads, optimizer, activations, …
    pub name: String,
    /// Bytes on the device.
    pub device_bytes: u64,
    /// Bytes in the host tier.
    pub host_bytes: u64,
}

/// The plan in three lines.
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
    /// Ranks that hold one copy, where not all do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_group: Option<usize>,
    /// ZeRO stage.
    pub stage: u8,
    /// Number format.
    pub precision: String,
    /// What is offloaded, as on the command line.
    pub offload: String,
    /// Bytes of one rank by kind.
    pub per_rank: Vec<PlanPart>,
    /// Host memory of the machine.
    pub host_total_bytes: u64,
    /// Host memory free before the run.
    pub host_free_bytes: u64,
    /// Host memory all ranks need together.
    pub host_need_bytes: u64,
    /// Of the elements that a rank updates, the share that it updates while backward runs.
    #[serde(default, deserialize_with = "or_nan")]
    pub early_share: f64,
    /// One rank by phase, tier and kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Box<RankMemory>>,
}

/// Tensors of one part of the model that train.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainRow {
    /// The part of the model's tree, or its adapters.
    pub module: String,
    /// How many tensors of it train.
    pub tensors: usize,
    /// Their elements.
    pub params: u64,
    /// Number format of the weights.
    pub dtype: String,
    /// Peak learning rate.
    #[serde(deserialize_with = "or_nan")]
    pub lr: f64,
}

/// The data in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEvent {
    /// Training samples.
    pub samples: usize,
    /// Held-out samples.
    pub eval_samples: usize,
    /// Tokens of the longest sample.
    pub longest_tokens: usize,
    /// Pictures, all readable.
    pub images: usize,
    /// Fewest supervised tokens of a sample.
    pub supervised_min_tokens: usize,
    /// Samples left out by `--skip-bad-samples`.
    pub skipped: usize,
    /// Set where one update takes more samples than there are, so that they repeat within it.
    pub wraps_around_global_batch: Option<usize>,
}

/// A row of the training table.
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
    /// Global gradient norm before clipping; `None` where the step was skipped.
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
    /// Whether the update was skipped for a value that is not finite.
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
    /// Share of answers that are exactly right, 0 to 1, where answers were generated.
    pub exact_match: Option<f64>,
    /// The same before training.
    pub exact_match_before: Option<f64>,
    /// Held-out samples.
    pub samples: usize,
}

/// A written checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveEvent {
    /// Folder name.
    pub name: String,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of the sharded state.
    pub state_bytes: u64,
    /// Files, hashes written.
    pub files: usize,
}

/// A loaded checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeEvent {
    /// Folder name.
    pub name: String,
    /// Number of ranks that loaded it.
    pub ranks: usize,
    /// Its step.
    pub step: u64,
    /// Whether the loss equals that of the saving run bit for bit, where that was compared.
    pub loss_is_identical: Option<bool>,
}

/// The last lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DoneEvent {
    /// Seconds of the whole run.
    #[serde(deserialize_with = "or_nan")]
    pub seconds: f64,
    /// Folder of the run.
    pub output: PathBuf,
    /// Whether a signal ended it early.
    pub interrupted: bool,
    /// What was warned of before the run and may have been forgotten.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// What to do next, one line each.
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
