//! `trainer_log.jsonl`: one JSON object per logged step, with the fields LLaMA-Factory's tools read.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use super::curve::Point;
use crate::exit::{ErrorCode, Failure};
use crate::units::clock;

/// Bytes of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct TierBytes {
    /// Peak on the device.
    pub device: u64,
    /// Peak in the host tier.
    pub host: u64,
    /// Resident memory of the process.
    pub rss: u64,
}

/// One row. Fields without a value are left out.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LogRow {
    /// Steps done.
    pub current_steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Training loss.
    pub loss: Option<f64>,
    /// Loss of held-out samples.
    pub eval_loss: Option<f64>,
    /// Learning rate.
    pub lr: Option<f64>,
    /// Global gradient norm.
    pub grad_norm: Option<f64>,
    /// Epochs done.
    pub epoch: f64,
    /// Seconds since the start.
    pub elapsed_seconds: f64,
    /// Estimated seconds to the end.
    pub remaining_seconds: f64,
    /// Tokens per second over all ranks.
    pub tokens_per_second: Option<f64>,
    /// Tokens of all ranks so far.
    pub total_tokens: u64,
    /// Bytes by tier.
    pub bytes: Option<TierBytes>,
}

impl LogRow {
    fn to_json(self) -> Value {
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
            // Gigabytes, as the readers of these fields expect.
            let gib = bytes.device as f64 / 1024f64.powi(3);
            put("vram_allocated", rounded(gib, 2));
            put("vram_reserved", rounded(gib, 2));
        }
        row
    }
}

/// JSON has no NaN; a name is better than a hole.
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

/// The growing log file.
#[derive(Debug)]
pub struct TrainerLog {
    path: PathBuf,
    file: File,
    points: Vec<Point>,
}

impl TrainerLog {
    /// Opens the log in `output`, keeping rows up to `done_steps`.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(output: &Path, done_steps: u64) -> Result<Self, Failure> {
        let path = output.join("trainer_log.jsonl");
        let fail = |error: std::io::Error| Failure::io(ErrorCode::Disk, "write", &path, &error);
        let old = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(fail(error)),
        };
        let mut kept = String::new();
        let mut points = Vec::new();
        for line in old.lines() {
            // A row cut by a crash cannot be read and goes.
            let Ok(row) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let Some(step) = row["current_steps"]
                .as_u64()
                .filter(|step| *step <= done_steps)
            else {
                continue;
            };
            kept += line;
            kept.push('\n');
            points.extend(row["loss"].as_f64().map(|loss| Point { step, loss }));
        }
        if kept.len() != old.len() {
            super::write_whole(&path, kept.as_bytes())?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(fail)?;
        Ok(Self { path, file, points })
    }

    /// Losses of the rows that were kept.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Appends a row in one write, so that readers see whole rows.
    ///
    /// # Errors
    /// The file cannot be written (exit 16).
    pub fn append(&mut self, row: &LogRow) -> Result<(), Failure> {
        let line = format!("{}\n", row.to_json());
        self.file
            .write_all(line.as_bytes())
            .map_err(|error| Failure::io(ErrorCode::Disk, "write", &self.path, &error))
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
            ..LogRow::default()
        };
        assert_eq!(
            row.to_json(),
            json!({
                "current_steps": 5, "total_steps": 20, "loss": 1.5, "lr": 1e-4, "grad_norm": "NaN",
                "epoch": 0.25, "percentage": 25.0, "elapsed_time": "0:01:01", "remaining_time": "0:03:03",
                "tokens_per_second": 1234.57, "throughput": 1234.57, "total_tokens": 75000,
                "bytes": { "device": 1 << 30, "host": 5, "rss": 7 },
                "vram_allocated": 1.0, "vram_reserved": 1.0
            })
        );
    }

    #[test]
    fn a_torn_last_row_is_dropped() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("trainer_log.jsonl");
        fs::write(&path, "{\"current_steps\":1,\"loss\":2.0}\n{\"current_st").expect("written");
        let mut log = TrainerLog::open(folder.path(), 9).expect("opened");
        log.append(&LogRow {
            current_steps: 2,
            ..LogRow::default()
        })
        .expect("written");
        let text = fs::read_to_string(&path).expect("read");
        assert_eq!(text.lines().count(), 2);
        assert_eq!(log.points().len(), 1);
    }
}
