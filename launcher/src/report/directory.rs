//! Contents of a run directory: all that reports and `launcher watch` know of a run.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::{EVAL_RESULTS, MEMORY_LOG, PlanFile, TRAINER_LOG, jsonl};
use crate::config::CONFIG_FILE;
use crate::error::Failure;
use crate::report::monitor::memory::MemoryRow;
use crate::report::{checkpoints, run_directory};

/// Directory of answers within a run directory.
const SAMPLES: &str = "samples";

/// The model's answer to one held-out sample.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Answer {
    /// Index of the sample in the held-out data, from 0.
    pub index: usize,
    /// The sample's own id, which may be any JSON value.
    #[serde(default)]
    pub id: Value,
    /// Images of the sample: absolute paths, or paths relative to the run directory.
    #[serde(default)]
    pub images: Vec<PathBuf>,
    /// The question that the model was asked.
    pub prompt: String,
    /// The expected answer, from the sample.
    pub reference: String,
    /// The answer that the model generated.
    pub answer: String,
    /// Whether the generated answer equals the expected one, apart from white space at the ends.
    #[serde(default)]
    pub exact: bool,
}

/// Contents of a run directory, read once. Fields of missing or unreadable files are empty.
#[derive(Debug, Clone, Default)]
pub struct RunFiles {
    /// Path of the run directory.
    pub directory: PathBuf,
    /// Rows of the training log, `trainer_log.jsonl`: one for each logged step and each evaluation.
    pub rows: Vec<Value>,
    /// Rows of the memory log, `memory.jsonl`: peak memory by phase of the run.
    pub memory: Vec<MemoryRow>,
    /// Memory plan, trainable parameters and data, from `plan.json`.
    pub plan: Option<PlanFile>,
    /// Resolved configuration of the run, from `config.resolved.json`.
    pub config: Option<Value>,
    /// Results of the last evaluation, from `eval_results.json`.
    pub results: Option<Value>,
    /// State of the trainer at the end of the run, from `trainer_state.json`.
    pub state: Option<Value>,
    /// Failures of ranks as (rank, failure), from `errors/`.
    pub failures: Vec<(usize, Failure)>,
    /// Answers that the model generated, one entry per evaluation as (completed training steps, answers),
    /// from `samples/`.
    pub answers: Vec<(u64, Vec<Answer>)>,
    /// Checkpoints of the run as (completed training steps, path of the checkpoint), sorted by step.
    pub checkpoints: Vec<(u64, PathBuf)>,
}

impl RunFiles {
    /// Reads the files of the run directory `directory`.
    pub fn read(directory: &Path) -> Self {
        let memory = jsonl::read(&directory.join(MEMORY_LOG));
        let memory = memory
            .into_iter()
            .filter_map(|row| serde_json::from_value(row).ok());
        Self {
            directory: directory.to_path_buf(),
            rows: jsonl::read(&directory.join(TRAINER_LOG)),
            memory: memory.collect(),
            plan: PlanFile::load(directory),
            config: json(&directory.join(CONFIG_FILE)),
            results: json(&directory.join(EVAL_RESULTS)),
            state: json(&directory.join("trainer_state.json")),
            failures: failures(directory),
            answers: answers(&directory.join(SAMPLES)),
            checkpoints: checkpoints::of_run(directory),
        }
    }

    /// Rows of the training log that have a training loss: one for each logged step.
    pub fn steps(&self) -> impl DoubleEndedIterator<Item = &Value> {
        self.rows.iter().filter(|row| !row["loss"].is_null())
    }

    /// Rows of the training log that have a loss of held-out samples: one for each evaluation.
    pub fn evaluations(&self) -> impl DoubleEndedIterator<Item = &Value> {
        self.rows.iter().filter(|row| !row["eval_loss"].is_null())
    }

    /// (Completed training steps, training steps of the whole run) in the last row of the training log. Zeros
    /// if the log has no rows.
    pub fn progress(&self) -> (u64, u64) {
        self.rows.last().map_or((0, 0), |row| {
            let of = |name: &str| row[name].as_u64().unwrap_or(0);
            (of("current_steps"), of("total_steps"))
        })
    }

    /// Whether the training log has reached the last step of the run.
    pub fn is_complete(&self) -> bool {
        let (done, total) = self.progress();
        total > 0 && done >= total
    }

    /// Whether the run ended by saving its state: `trainer_state.json` covers every step of the training log.
    /// False for a run that was cut off.
    pub fn is_saved(&self) -> bool {
        let saved = self
            .state
            .as_ref()
            .and_then(|state| state["global_step"].as_u64());
        saved.is_some_and(|step| step > 0 && step >= self.progress().0)
    }
}

/// Number in a row. Numbers that JSON cannot represent are stored as text.
pub(crate) fn number(row: &Value, name: &str) -> Option<f64> {
    let value = &row[name];
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}

fn json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Files in a directory with a number in their name (`rank-0001.json`, `step-000200.json`), sorted by that number.
fn numbered(directory: &Path, prefix: &str) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.path();
            let name = path.file_name()?.to_str()?;
            let number = name.strip_prefix(prefix)?.strip_suffix(".json")?;
            Some((number.parse().ok()?, path))
        })
        .collect();
    found.sort();
    found
}

fn failures(directory: &Path) -> Vec<(usize, Failure)> {
    let files = numbered(&directory.join(run_directory::ERRORS), "rank-");
    files
        .into_iter()
        .filter_map(|(rank, _)| Some((rank as usize, Failure::load(directory, rank as usize)?)))
        .collect()
}

fn answers(directory: &Path) -> Vec<(u64, Vec<Answer>)> {
    let files = numbered(directory, "step-");
    files
        .into_iter()
        .filter_map(|(step, path)| {
            Some((step, serde_json::from_slice(&fs::read(path).ok()?).ok()?))
        })
        .collect()
}
