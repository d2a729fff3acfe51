//! What the files of a run's folder say: all that reports and `launcher watch` know of a run.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::{EVAL_RESULTS, MEMORY_LOG, PlanFile, TRAINER_LOG, jsonl};
use crate::config::CONFIG_FILE;
use crate::error::Failure;
use crate::report::monitor::memory::MemoryRow;
use crate::report::run_directory;

/// Folder of answers.
const SAMPLES: &str = "samples";

/// An answer of the model to a held-out sample.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Answer {
    /// Place in the held-out data, from 0.
    pub index: usize,
    /// The sample's own name, whatever JSON it is.
    #[serde(default)]
    pub id: Value,
    /// Its pictures: absolute, or relative to the run's folder.
    #[serde(default)]
    pub images: Vec<PathBuf>,
    /// What was asked.
    pub prompt: String,
    /// The right answer.
    pub reference: String,
    /// The model's answer.
    pub answer: String,
    /// Whether the two are the same.
    #[serde(default)]
    pub exact: bool,
}

/// A run's folder, read once. Files that are not there or cannot be read are empty here.
#[derive(Debug, Clone, Default)]
pub struct RunFiles {
    /// The folder.
    pub folder: PathBuf,
    /// `trainer_log.jsonl`.
    pub rows: Vec<Value>,
    /// `memory.jsonl`.
    pub memory: Vec<MemoryRow>,
    /// `plan.json`.
    pub plan: Option<PlanFile>,
    /// `config.resolved.json`.
    pub config: Option<Value>,
    /// `eval_results.json`.
    pub results: Option<Value>,
    /// `trainer_state.json`.
    pub state: Option<Value>,
    /// `errors/`, by rank.
    pub failures: Vec<(usize, Failure)>,
    /// `samples/`, by step.
    pub answers: Vec<(u64, Vec<Answer>)>,
    /// Checkpoints by step.
    pub checkpoints: Vec<(u64, PathBuf)>,
}

impl RunFiles {
    /// Reads a folder.
    pub fn read(folder: &Path) -> Self {
        let memory = jsonl::read(&folder.join(MEMORY_LOG));
        let memory = memory
            .into_iter()
            .filter_map(|row| serde_json::from_value(row).ok());
        Self {
            folder: folder.to_path_buf(),
            rows: jsonl::read(&folder.join(TRAINER_LOG)),
            memory: memory.collect(),
            plan: PlanFile::load(folder),
            config: json(&folder.join(CONFIG_FILE)),
            results: json(&folder.join(EVAL_RESULTS)),
            state: json(&folder.join("trainer_state.json")),
            failures: failures(folder),
            answers: answers(&folder.join(SAMPLES)),
            checkpoints: run_directory::checkpoints(folder),
        }
    }

    /// The rows of training steps.
    pub fn steps(&self) -> impl DoubleEndedIterator<Item = &Value> {
        self.rows.iter().filter(|row| !row["loss"].is_null())
    }

    /// The rows of evaluations.
    pub fn evaluations(&self) -> impl DoubleEndedIterator<Item = &Value> {
        self.rows.iter().filter(|row| !row["eval_loss"].is_null())
    }

    /// Steps done and steps of the whole run, as the last row tells.
    pub fn progress(&self) -> (u64, u64) {
        self.rows.last().map_or((0, 0), |row| {
            let of = |name: &str| row[name].as_u64().unwrap_or(0);
            (of("current_steps"), of("total_steps"))
        })
    }

    /// Whether every step was taken.
    pub fn is_complete(&self) -> bool {
        let (done, total) = self.progress();
        total > 0 && done >= total
    }

    /// Whether the run ended by saving its state, not by being cut off.
    pub fn is_saved(&self) -> bool {
        let saved = self
            .state
            .as_ref()
            .and_then(|state| state["global_step"].as_u64());
        saved.is_some_and(|step| step > 0 && step >= self.progress().0)
    }
}

/// A number of a row; the log writes those that JSON lacks as text.
pub(crate) fn number(row: &Value, name: &str) -> Option<f64> {
    let value = &row[name];
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}

fn json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Names in a folder with the number in them, by that number: `rank-0001.json`, `step-000200.json`.
fn numbered(folder: &Path, prefix: &str) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
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

fn failures(folder: &Path) -> Vec<(usize, Failure)> {
    let files = numbered(&folder.join(run_directory::ERRORS), "rank-");
    files
        .into_iter()
        .filter_map(|(rank, _)| Some((rank as usize, Failure::load(folder, rank as usize)?)))
        .collect()
}

fn answers(folder: &Path) -> Vec<(u64, Vec<Answer>)> {
    let files = numbered(folder, "step-");
    files
        .into_iter()
        .filter_map(|(step, path)| {
            Some((step, serde_json::from_slice(&fs::read(path).ok()?).ok()?))
        })
        .collect()
}
