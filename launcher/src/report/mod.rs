//! Directory of a run, and the files in it for people and tools. Rank 0 writes them.

mod axis;
mod chart;
pub(crate) mod checkpoints;
mod comparison;
mod crc32c;
mod curve;
mod directory;
mod jsonl;
mod memory_chart;
pub mod monitor;
mod page;
mod plan_file;
pub mod run_directory;
mod state;
mod tensorboard;
mod trainer_log;

use crate::lang::both;
use crate::ui::{DiskTraffic, Event};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

use crate::config::{BestSoFar, Cadence, ReportTo, RunConfig};
use crate::error::{ErrorCode, Failure};
use crate::report::monitor::growth::GrowthDetector;
use crate::report::monitor::memory::MemoryRow;
use crate::report::monitor::split::{SlowRankNotice, StepSplit, StepTimes};
use jsonl::JsonLines;

pub use comparison::{Panel, Series, comparison};
pub use curve::{Point, loss_curve};
pub(crate) use directory::number;
pub use directory::{Answer, RunFiles};
pub(crate) use page::live;
pub use page::{REPORT, write_pages};
pub use plan_file::PlanFile;
pub use state::{TrainerState, TrainerStateConfig};
pub use tensorboard::EventWriter;
pub use trainer_log::{LogRow, TRAINER_LOG, TierBytes, TrainerLog};

/// File name of the results of the last evaluation, inside the run directory.
pub const EVAL_RESULTS: &str = "eval_results.json";
/// File name of the chart of the training loss, inside the run directory.
pub const LOSS_CURVE: &str = "training_loss.svg";
/// File name of the log of peak memory by phase, inside the run directory.
pub const MEMORY_LOG: &str = "memory.jsonl";
/// File name of the memory chart, inside the run directory.
pub const MEMORY_CHART: &str = "memory.svg";

/// Measurements of one logged step, which becomes a row of the training log.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Number of training steps (optimizer updates, skipped ones included) completed since the start of the
    /// run.
    pub step: u64,
    /// Number of completed passes over the training data, with a fraction.
    pub epoch: f64,
    /// Mean loss per supervised token, averaged over the steps since the last logged step.
    pub loss: f64,
    /// Learning rate of this step, from the schedule.
    pub lr: f64,
    /// Global L2 norm of the gradient before clipping. `None` if the update was skipped.
    pub grad_norm: Option<f64>,
    /// Input tokens, supervised or not, that all ranks together processed per second since the last logged
    /// step.
    pub tokens_per_second: f64,
    /// Input tokens, supervised or not, that all ranks together processed since the start of the run,
    /// including steps before a resume.
    pub total_tokens: u64,
    /// Memory of this rank: peak bytes of device and host memory since its start, and resident bytes now.
    pub bytes: TierBytes,
    /// Seconds of one step by part (such as forward or communication), averaged over the steps since the last
    /// logged step.
    pub times: StepTimes,
    /// Traffic of this rank's spill files (states offloaded to disk) since the last logged step. `None`
    /// without spill files.
    pub disk: Option<DiskTraffic>,
}

/// Results of an evaluation on the held-out samples, as stored in `eval_results.json`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EvalResults {
    /// Mean loss per supervised token over the held-out samples.
    pub eval_loss: f64,
    /// Share of generated answers that match the expected ones exactly, 0 to 1, if answers were generated.
    pub exact_match: Option<f64>,
    /// Share of exactly matching answers before training, 0 to 1, if answers were generated then.
    pub exact_match_before: Option<f64>,
    /// Number of held-out samples.
    pub eval_samples: usize,
    /// Duration of the evaluation in seconds, including the generation of answers.
    pub eval_runtime: f64,
    /// Held-out samples per second of the evaluation.
    pub eval_samples_per_second: f64,
    /// Number of training steps (optimizer updates) completed before the evaluation, since the start of the
    /// run.
    pub step: u64,
    /// Number of completed passes over the training data at the evaluation, with a fraction.
    pub epoch: f64,
}

/// Writer of all report files of one run. Only rank 0 has one.
#[derive(Debug)]
pub struct RunReport {
    output: PathBuf,
    log: TrainerLog,
    memory: JsonLines,
    slow_rank: SlowRankNotice,
    growth: GrowthDetector,
    state: TrainerState,
    events: Option<EventWriter>,
    curve: Vec<Point>,
    total_steps: u64,
    started: Instant,
    resumed_at: u64,
}

impl RunReport {
    /// Opens the report files of a run of `total_steps` steps that starts after `done_steps` completed steps.
    /// Existing rows of later steps, from an attempt that failed, are dropped. `epochs` is the length of the
    /// run in passes over the training data.
    ///
    /// # Errors
    /// When a file cannot be read or written (exit 16).
    pub fn open(
        config: &RunConfig,
        total_steps: u64,
        epochs: f64,
        done_steps: u64,
    ) -> Result<Self, Failure> {
        let every = |cadence: Cadence| cadence.steps(total_steps).unwrap_or(total_steps);
        let log = TrainerLog::open(&config.output, done_steps)?;
        let curve = log.points().to_vec();
        let keep = |row: &serde_json::Value| row["step"].as_u64().is_some_and(|s| s <= done_steps);
        let (memory, _) = JsonLines::open(config.output.join(MEMORY_LOG), keep)?;
        let state_config = TrainerStateConfig {
            max_steps: total_steps,
            num_train_epochs: epochs.ceil() as u64,
            train_batch_size: config.batch.micro_batch,
            logging_steps: every(config.logging),
            eval_steps: every(config.eval),
            save_steps: every(config.save),
        };
        let events = match config.report_to {
            ReportTo::None => None,
            ReportTo::Tensorboard => Some(EventWriter::create(&config.output.join("runs"))?),
        };
        Ok(Self {
            output: config.output.clone(),
            log,
            memory,
            slow_rank: SlowRankNotice::default(),
            growth: GrowthDetector::default(),
            state: TrainerState::open(&config.output, state_config, done_steps),
            events,
            curve,
            total_steps,
            started: Instant::now(),
            resumed_at: done_steps,
        })
    }

    /// Estimated seconds until the end of the run, after `step` completed steps. It assumes the mean time per
    /// step of this process so far.
    pub fn remaining_seconds(&self, step: u64) -> f64 {
        let done = step.saturating_sub(self.resumed_at).max(1) as f64;
        self.started.elapsed().as_secs_f64() / done * self.total_steps.saturating_sub(step) as f64
    }

    /// Writes a logged step to the training log, and `memory`, the peak memory since the previous row, to the
    /// memory log. Returns notices to show in addition to the row: a slow rank, or memory that keeps growing.
    ///
    /// # Errors
    /// When a file cannot be written (exit 16).
    pub fn on_step(
        &mut self,
        record: &StepRecord,
        memory: Option<MemoryRow>,
    ) -> Result<Vec<Event>, Failure> {
        let row = LogRow {
            current_steps: record.step,
            total_steps: self.total_steps,
            loss: Some(record.loss),
            lr: Some(record.lr),
            grad_norm: record.grad_norm,
            epoch: record.epoch,
            elapsed_seconds: self.started.elapsed().as_secs_f64(),
            remaining_seconds: self.remaining_seconds(record.step),
            tokens_per_second: Some(record.tokens_per_second),
            total_tokens: record.total_tokens,
            bytes: Some(record.bytes),
            times: Some(record.times.clone()),
            disk: record.disk,
            ..LogRow::default()
        };
        self.log.append(&row)?;
        self.state.on_step(record);
        self.curve.push(Point {
            step: record.step,
            loss: record.loss,
        });
        if let Some(events) = &mut self.events {
            events.scalars(record.step, &scalars(record))?;
        }
        let mut notices = Vec::new();
        if let Some(text) = self.slow_rank.line(record.times.imbalance) {
            notices.push(Event::Info {
                label: both("slowest", "最慢").into(),
                text,
            });
        }
        if let Some(memory) = memory {
            let growth = self
                .growth
                .observe(record.step, self.total_steps, &memory.ranks);
            notices.extend(growth.map(|growth| Event::Warning {
                text: growth.warning(),
            }));
            self.append_memory(&memory)?;
        }
        Ok(notices)
    }

    fn append_memory(&mut self, row: &MemoryRow) -> Result<(), Failure> {
        let row = serde_json::to_value(row).map_err(|e| {
            Failure::io(
                ErrorCode::Disk,
                both("write", "写入"),
                Path::new(MEMORY_LOG),
                &e.into(),
            )
        })?;
        self.memory.append(&row)
    }

    /// Adds an evaluation to the training log and writes `eval_results.json`.
    ///
    /// # Errors
    /// When a file cannot be written (exit 16).
    pub fn on_eval(&mut self, results: &EvalResults) -> Result<(), Failure> {
        self.log.append(&LogRow {
            current_steps: results.step,
            total_steps: self.total_steps,
            eval_loss: Some(results.eval_loss),
            epoch: results.epoch,
            elapsed_seconds: self.started.elapsed().as_secs_f64(),
            remaining_seconds: self.remaining_seconds(results.step),
            ..LogRow::default()
        })?;
        self.state.on_eval(results);
        if let Some(events) = &mut self.events {
            events.scalars(results.step, &[("eval/loss", results.eval_loss)])?;
        }
        write_json(&self.output.join(EVAL_RESULTS), results)
    }

    /// Takes the best evaluation by the run's own rule, and the best one whose checkpoint survives.
    pub(crate) fn note_best(&mut self, best: BestSoFar, kept: Option<BestSoFar>) {
        let directory = |kept: BestSoFar| self.output.join(format!("checkpoint-{}", kept.step));
        let directory = kept.map(|kept| directory(kept).display().to_string());
        self.state.set_best(best, directory);
    }

    /// Writes `trainer_state.json`, the state of training so far, into `directory`, the directory of a
    /// checkpoint that is being written.
    ///
    /// # Errors
    /// When the file cannot be written (exit 16).
    pub fn save_state(&self, directory: &Path) -> Result<(), Failure> {
        self.state.save(directory)
    }

    /// Ends the report: writes the trainer state, the loss curve, and `memory`, the peak memory since the
    /// last row of the memory log.
    ///
    /// # Errors
    /// When a file cannot be written (exit 16).
    pub fn finish(&mut self, memory: Option<MemoryRow>) -> Result<(), Failure> {
        if let Some(memory) = memory {
            self.append_memory(&memory)?;
        }
        self.state.save(&self.output)?;
        write_whole(
            &self.output.join(LOSS_CURVE),
            loss_curve(&self.curve).as_bytes(),
        )
    }
}

/// TensorBoard scalars of a logged step.
fn scalars(record: &StepRecord) -> Vec<(&'static str, f64)> {
    const TIME_TAGS: [&str; StepSplit::PARTS] = [
        "time/data",
        "time/forward",
        "time/communication",
        "time/backward",
        "time/step",
        "time/offload",
    ];
    let mut scalars = vec![
        ("train/loss", record.loss),
        ("train/learning_rate", record.lr),
        ("train/grad_norm", record.grad_norm.unwrap_or(f64::NAN)),
        ("train/epoch", record.epoch),
        ("perf/tokens_per_second", record.tokens_per_second),
        ("perf/step_seconds", record.times.step_seconds()),
        ("perf/data_wait", record.times.data_wait()),
        ("mem/device_peak_gib", gib(record.bytes.device)),
        ("mem/host_rss_gib", gib(record.bytes.rss)),
    ];
    scalars.extend(TIME_TAGS.into_iter().zip(record.times.mean.values()));
    scalars
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / 1024f64.powi(3)
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| {
        Failure::io(ErrorCode::Disk, both("write", "写入"), path, &error.into())
    })?;
    write_whole(path, (text + "\n").as_bytes())
}

/// Replaces a file atomically: readers see the complete old or new content.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let fail =
        |error: std::io::Error| Failure::io(ErrorCode::Disk, both("write", "写入"), path, &error);
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let mut file = fs::File::create(&temporary).map_err(fail)?;
    file.write_all(bytes).map_err(fail)?;
    fs::rename(&temporary, path).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Args, resolve};
    use crate::rank_env::Env;

    fn config(output: &Path) -> RunConfig {
        let env = Env::from_lookup(&|_| None).expect("reads");
        let args = Args {
            output: Some(output.to_path_buf()),
            report_to: Some(ReportTo::Tensorboard),
            ..Args::default()
        };
        resolve(&args, &env).expect("resolves").config
    }

    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            epoch: step as f64 / 10.0,
            loss: 4.0 / step as f64,
            lr: 1e-3,
            grad_norm: Some(1.0),
            tokens_per_second: 100.0,
            total_tokens: 1000 * step,
            bytes: TierBytes {
                device: 1 << 20,
                host: 2 << 20,
                rss: 3 << 20,
            },
            times: StepTimes::of(&[StepSplit::from_slice(&[0.1; 6]); 2], 1.0),
            disk: None,
        }
    }

    fn memory(step: u64) -> Option<MemoryRow> {
        Some(MemoryRow {
            step,
            ..MemoryRow::default()
        })
    }

    fn eval(step: u64) -> EvalResults {
        EvalResults {
            eval_loss: 0.5,
            exact_match: Some(0.9),
            exact_match_before: Some(0.1),
            eval_samples: 96,
            eval_runtime: 2.0,
            eval_samples_per_second: 48.0,
            step,
            epoch: 0.4,
        }
    }

    fn rows(directory: &Path) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(directory.join("trainer_log.jsonl")).expect("written");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect()
    }

    #[test]
    fn a_run_leaves_every_file() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut report = RunReport::open(&config(directory.path()), 4, 1.0, 0).expect("opened");
        for step in 1..=4 {
            report
                .on_step(&record(step), memory(step))
                .expect("written");
        }
        report.on_eval(&eval(4)).expect("written");
        report.finish(None).expect("written");
        for name in [
            "trainer_log.jsonl",
            "trainer_state.json",
            EVAL_RESULTS,
            LOSS_CURVE,
            MEMORY_LOG,
        ] {
            assert!(directory.path().join(name).is_file(), "{name}");
        }
        assert!(directory.path().join("runs").is_dir());
        let rows = rows(directory.path());
        assert_eq!(rows.len(), 5);
        assert_eq!(
            (
                rows[1]["current_steps"].as_u64(),
                rows[1]["percentage"].as_f64()
            ),
            (Some(2), Some(50.0))
        );
        let state: serde_json::Value = serde_json::from_slice(
            &fs::read(directory.path().join("trainer_state.json")).expect("read"),
        )
        .expect("JSON");
        assert_eq!(state["global_step"], 4);
        assert_eq!(state["log_history"].as_array().map(Vec::len), Some(5));
        let left = fs::read_dir(directory.path()).expect("listed").flatten();
        assert!(
            left.into_iter()
                .all(|entry| !entry.file_name().to_string_lossy().ends_with(".tmp"))
        );
    }

    #[test]
    fn a_resumed_run_replaces_the_rows_after_its_checkpoint() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut report = RunReport::open(&config(directory.path()), 4, 1.0, 0).expect("opened");
        for step in 1..=3 {
            report
                .on_step(&record(step), memory(step))
                .expect("written");
        }
        report.finish(None).expect("written");
        let mut report = RunReport::open(&config(directory.path()), 4, 1.0, 2).expect("opened");
        for step in 3..=4 {
            report
                .on_step(&record(step), memory(step))
                .expect("written");
        }
        report.finish(None).expect("written");
        let steps: Vec<_> = rows(directory.path())
            .iter()
            .map(|row| row["current_steps"].as_u64())
            .collect();
        assert_eq!(steps, [1, 2, 3, 4].map(Some));
        assert_eq!(report.curve.len(), 4);
        let steps: Vec<_> = jsonl::read(&directory.path().join(MEMORY_LOG))
            .iter()
            .map(|row| row["step"].as_u64())
            .collect();
        assert_eq!(steps, [1, 2, 3, 4].map(Some));
        let text = fs::read_to_string(directory.path().join("trainer_state.json")).expect("read");
        let state: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let history = state["log_history"].as_array().expect("rows");
        let steps: Vec<_> = history.iter().map(|row| row["step"].as_u64()).collect();
        assert_eq!(steps, [1, 2, 3, 4].map(Some));
    }
}
