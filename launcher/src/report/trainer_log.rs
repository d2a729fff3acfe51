//! `trainer_log.jsonl`: one JSON object per logged step, with the fields that LLaMA-Factory's tools read.

use crate::ui::DiskTraffic;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::curve::Point;
use super::jsonl::JsonLines;
use crate::error::Failure;
use crate::report::monitor::split::{DeviceSplit, StepSplit, StepTimes};
use crate::units::clock;

/// File name of the training log, inside the run directory.
pub const TRAINER_LOG: &str = "trainer_log.jsonl";

/// Decimal digits of times in seconds.
const SECONDS: i32 = 6;

/// Memory of one rank in bytes: peaks of device and host memory, and resident memory. The field or argument
/// that holds this struct states the time span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TierBytes {
    /// Peak bytes in use in the rank's device memory pool.
    pub device: u64,
    /// Peak bytes in use in the rank's host memory pool, where offloaded states are.
    pub host: u64,
    /// Resident bytes (RSS) of the rank's process. The field or argument that holds this struct states
    /// whether this is a current value or a peak.
    pub rss: u64,
}

/// One row of the training log, for a logged step or an evaluation. Fields without a value are left out of
/// the file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LogRow {
    /// Number of training steps (optimizer updates, skipped ones included) completed since the start of the
    /// run.
    pub current_steps: u64,
    /// Number of training steps of the whole run.
    pub total_steps: u64,
    /// Mean training loss per supervised token; only in rows of logged steps.
    pub loss: Option<f64>,
    /// Mean loss per supervised token over the held-out samples; only in rows of evaluations.
    pub eval_loss: Option<f64>,
    /// Learning rate of the step, from the schedule; only in rows of logged steps.
    pub lr: Option<f64>,
    /// Global L2 norm of the gradient before clipping; only in rows of steps whose update was applied.
    pub grad_norm: Option<f64>,
    /// Number of completed passes over the training data, with a fraction.
    pub epoch: f64,
    /// Seconds since this process started to train. Time before a resume is not counted.
    pub elapsed_seconds: f64,
    /// Estimated seconds until the end of the run.
    pub remaining_seconds: f64,
    /// Input tokens that all ranks together processed per second since the last logged step; only in rows of
    /// logged steps.
    pub tokens_per_second: Option<f64>,
    /// Input tokens that all ranks together processed since the start of the run. Rows of evaluations leave
    /// it out.
    pub total_tokens: u64,
    /// Memory of rank 0: peak bytes of device and host memory since its start, and resident bytes now.
    pub bytes: Option<TierBytes>,
    /// Seconds of one step by part (such as forward or communication), averaged over the steps since the last
    /// row.
    pub times: Option<StepTimes>,
    /// Traffic of rank 0's spill files (states offloaded to disk) since the last row. `None` without spill
    /// files.
    pub disk: Option<DiskTraffic>,
}

impl LogRow {
    fn to_json(&self) -> Value {
        let percentage = 100.0 * self.current_steps as f64 / self.total_steps.max(1) as f64;
        let mut row = json!({
            "current_steps": self.current_steps,
            "total_steps": self.total_steps,
            "epoch": rounded(self.epoch, 4),
            "percentage": rounded(percentage, 2),
            "elapsed_time": clock(self.elapsed_seconds),
            "remaining_time": clock(self.remaining_seconds),
        });
        let mut put = |name: &str, value: Value| {
            row[name] = value;
        };
        for (name, value) in [
            ("loss", self.loss),
            ("eval_loss", self.eval_loss),
            ("lr", self.lr),
            ("grad_norm", self.grad_norm),
        ] {
            if let Some(value) = value {
                put(name, number(value));
            }
        }
        if let Some(rate) = self.tokens_per_second {
            put("tokens_per_second", rounded(rate, 2));
            put("throughput", rounded(rate, 2));
            put("total_tokens", self.total_tokens.into());
        }
        if let Some(bytes) = self.bytes {
            put(
                "bytes",
                json!({ "device": bytes.device, "host": bytes.host, "rss": bytes.rss }),
            );
            // GiB, as readers of these fields expect.
            let gib = bytes.device as f64 / 1024f64.powi(3);
            put("vram_allocated", rounded(gib, 2));
            put("vram_reserved", rounded(gib, 2));
        }
        if let Some(disk) = &self.disk {
            put(
                "nvme",
                json!({
                    "read_bytes": disk.read_bytes, "written_bytes": disk.written_bytes,
                    "gb_per_second": rounded(disk.bytes_per_second / 1e9, 3),
                    "share_of_measured": rounded(disk.share, 3),
                }),
            );
        }
        if let Some(times) = &self.times {
            put("step_seconds", rounded(times.step_seconds(), SECONDS));
            put("data_wait", rounded(times.data_wait(), 4));
            let parts = StepSplit::NAMES.into_iter().zip(times.mean.values());
            let parts = parts.map(|(name, value)| (name.to_owned(), rounded(value, SECONDS)));
            put("seconds", Value::Object(parts.collect()));
            let own = times.own.iter().map(|seconds| rounded(*seconds, SECONDS));
            put("rank_seconds", own.collect());
            if let Some(device) = times.device {
                let names = DeviceSplit::NAMES.into_iter();
                let parts = names.zip(device.values());
                let parts = parts.map(|(name, value)| (name.to_owned(), rounded(value, SECONDS)));
                put("device_seconds", Value::Object(parts.collect()));
                let [to, from] = [device.inward_bytes, device.outward_bytes].map(|b| b as u64);
                put("device_bytes", json!({"inward": to, "outward": from}));
            }
            if let Some(imbalance) = times.imbalance {
                put("slowest_rank", imbalance.rank.into());
                put("slowest_part", imbalance.part.into());
                put("imbalance", rounded(imbalance.share, 4));
            }
        }
        row
    }
}

/// JSON cannot represent NaN and infinities, so they are written as text.
fn number(value: f64) -> Value {
    if value.is_finite() {
        value.into()
    } else {
        value.to_string().into()
    }
}

fn rounded(value: f64, digits: i32) -> Value {
    let scale = 10f64.powi(digits);
    number((value * scale).round() / scale)
}

/// Training log (`trainer_log.jsonl`), open for appending.
#[derive(Debug)]
pub struct TrainerLog {
    file: JsonLines,
    points: Vec<Point>,
}

impl TrainerLog {
    /// Opens or creates the training log in the run directory `output`. Keeps its rows up to step
    /// `done_steps` and drops later ones.
    ///
    /// # Errors
    /// When the file cannot be read or written (exit 16).
    pub fn open(output: &Path, done_steps: u64) -> Result<Self, Failure> {
        let step = |row: &Value| row["current_steps"].as_u64();
        let keep = |row: &Value| step(row).is_some_and(|step| step <= done_steps);
        let (file, rows) = JsonLines::open(output.join(TRAINER_LOG), keep)?;
        let point = |row: &Value| {
            Some(Point {
                step: step(row)?,
                loss: row["loss"].as_f64()?,
            })
        };
        let points = rows.iter().filter_map(point).collect();
        Ok(Self { file, points })
    }

    /// Finite training losses by step, from the rows that were kept when the log was opened. Rows appended
    /// later are not included.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Appends a row in one write, so readers see whole rows.
    ///
    /// # Errors
    /// When the file cannot be written (exit 16).
    pub fn append(&mut self, row: &LogRow) -> Result<(), Failure> {
        self.file.append(&row.to_json())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_fields_that_tools_read() {
        let row = LogRow {
            current_steps: 5,
            total_steps: 20,
            loss: Some(1.5),
            lr: Some(1e-4),
            grad_norm: Some(f64::NAN),
            epoch: 0.25,
            elapsed_seconds: 61.0,
            remaining_seconds: 183.0,
            tokens_per_second: Some(1234.567),
            total_tokens: 75_000,
            bytes: Some(TierBytes {
                device: 1 << 30,
                host: 5,
                rss: 7,
            }),
            times: Some(
                StepTimes::of(
                    &[
                        StepSplit::from_slice(&[0.1, 0.2, 0.5, 0.4, 0.1, 0.1]),
                        StepSplit::from_slice(&[0.1, 0.2, 0.1, 0.8, 0.1, 0.1]),
                    ],
                    2.0,
                )
                .with_devices(
                    &[DeviceSplit::from_slice(&[0.6, 0.1, 0.4, 0.2, 0.0, 0.8, 64.0, 32.0]); 2],
                    2.0,
                ),
            ),
            ..LogRow::default()
        };
        assert_eq!(
            row.to_json(),
            json!({
                "current_steps": 5, "total_steps": 20, "loss": 1.5, "lr": 1e-4, "grad_norm": "NaN",
                "epoch": 0.25, "percentage": 25.0, "elapsed_time": "0:01:01", "remaining_time": "0:03:03",
                "tokens_per_second": 1234.57, "throughput": 1234.57, "total_tokens": 75000,
                "bytes": { "device": 1 << 30, "host": 5, "rss": 7 },
                "vram_allocated": 1.0, "vram_reserved": 1.0,
                "step_seconds": 0.7, "data_wait": 0.0714,
                "seconds": {
                    "data": 0.05, "forward": 0.1, "communication": 0.15, "backward": 0.3,
                    "step": 0.05, "offload": 0.05
                },
                "rank_seconds": [0.45, 0.65],
                "device_seconds": {"compute": 0.3, "waits": 0.05, "inward": 0.2, "outward": 0.1, "communication": 0.0, "updates": 0.4},
                "device_bytes": {"inward": 32, "outward": 16},
                "slowest_rank": 1, "slowest_part": "backward", "imbalance": 0.1818
            })
        );
    }

    #[test]
    fn a_torn_last_row_is_dropped() {
        let directory = tempfile::tempdir().expect("temp dir");
        let path = directory.path().join(TRAINER_LOG);
        std::fs::write(&path, "{\"current_steps\":1,\"loss\":2.0}\n{\"current_st")
            .expect("written");
        let mut log = TrainerLog::open(directory.path(), 9).expect("opened");
        log.append(&LogRow {
            current_steps: 2,
            ..LogRow::default()
        })
        .expect("written");
        let text = std::fs::read_to_string(&path).expect("read");
        assert_eq!(text.lines().count(), 2);
        assert_eq!(log.points().len(), 1);
    }
}
