//! State of a run as numbers.

use serde::Serialize;
use serde_json::Value;

use crate::error::Failure;
use crate::lang::{Text, both, text};
use crate::report::monitor::split::StepSplit;
use crate::report::{RunFiles, TierBytes, number};

/// Version of the JSON keys. It increases when a key changes its meaning or is removed.
const SCHEMA: u32 = 1;
/// Number of recent losses for the sparkline.
const RECENT: usize = 40;
/// Seconds without changes after which a run without a lock holder counts as dead. Some file systems do not report
/// who holds a lock.
const PATIENCE_SECONDS: f64 = 20.0;

/// Signs of life of a run that the operating system reports: the lock and the age of the files in the run directory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Presence {
    /// Whether a process holds the lock of the run directory.
    pub(super) is_held: bool,
    /// Age of the newest file in the run directory, in seconds.
    pub(super) seconds_since_news: f64,
}

/// Whether a run is starting, running, or how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum State {
    /// Before the first logged step.
    Starting,
    /// Training steps are running.
    Running,
    /// Every step is done and saved.
    Finished,
    /// A signal ended it, and its state was saved.
    Stopped,
    /// It ended with a failure.
    Failed,
    /// It ended without saving and without a failure report.
    Dead,
}

impl State {
    /// The state in one word.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Dead => "dead",
        }
    }

    /// Whether the run is still in progress.
    pub(super) fn goes_on(self) -> bool {
        matches!(self, Self::Starting | Self::Running)
    }

    fn of(files: &RunFiles, presence: Presence) -> Self {
        let goes_on = if files.rows.is_empty() {
            Self::Starting
        } else {
            Self::Running
        };
        if !files.failures.is_empty() {
            Self::Failed
        } else if presence.is_held {
            goes_on
        } else if files.is_saved() {
            if files.is_complete() {
                Self::Finished
            } else {
                Self::Stopped
            }
        } else if presence.seconds_since_news < PATIENCE_SECONDS {
            goes_on
        } else {
            Self::Dead
        }
    }
}

/// Latest evaluation of the run on its held-out samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Evaluation {
    pub(super) step: u64,
    pub(super) loss: f64,
    pub(super) exact_match: Option<f64>,
    pub(super) exact_match_before: Option<f64>,
}

/// Rank with the longest own time in the latest logged step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Slowest {
    pub(super) rank: u64,
    /// Excess of its own time over the mean of all ranks, as a share of the mean.
    pub(super) imbalance: f64,
    pub(super) part: String,
}

/// A run at one point in time. Unknown values are absent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct View {
    pub(super) schema: u32,
    pub(super) run: String,
    pub(super) state: State,
    pub(super) seconds_since_news: f64,
    pub(super) step: u64,
    pub(super) total_steps: u64,
    pub(super) elapsed_seconds: Option<f64>,
    pub(super) remaining_seconds: Option<f64>,
    pub(super) loss: Option<f64>,
    pub(super) first_loss: Option<f64>,
    pub(super) recent_losses: Vec<f64>,
    pub(super) lr: Option<f64>,
    pub(super) grad_norm: Option<f64>,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) step_seconds: Option<f64>,
    pub(super) seconds: Option<StepSplit>,
    pub(super) slowest: Option<Slowest>,
    pub(super) memory: Option<TierBytes>,
    /// Planned bytes of one rank, device and host tier together.
    pub(super) planned_bytes: Option<u64>,
    /// Model and settings in one line.
    #[serde(serialize_with = "english")]
    pub(super) plan: Option<Text>,
    pub(super) checkpoint: Option<String>,
    pub(super) evaluation: Option<Evaluation>,
    pub(super) failures: Vec<Failure>,
}

impl View {
    pub(super) fn new(files: &RunFiles, presence: Presence) -> Self {
        let state = State::of(files, presence);
        let last = files.steps().next_back();
        let of = |name: &str| last.and_then(|row| number(row, name));
        let (step, total_steps) = files.progress();
        let losses: Vec<f64> = files
            .steps()
            .filter_map(|row| number(row, "loss"))
            .collect();
        let plan = files.plan.as_ref().and_then(|plan| plan.plan.as_ref());
        let time = |name: &str| files.rows.last().and_then(|row| seconds_of(&row[name]));
        let age = presence.seconds_since_news;
        let remaining = time("remaining_time").map(|left| (left - age).max(0.0));
        Self {
            schema: SCHEMA,
            run: files.directory.display().to_string(),
            state,
            seconds_since_news: (1e3 * age).round() / 1e3,
            step,
            total_steps,
            elapsed_seconds: time("elapsed_time"),
            remaining_seconds: remaining.filter(|_| state.goes_on()),
            loss: losses.last().copied(),
            first_loss: losses.first().copied(),
            recent_losses: losses[losses.len().saturating_sub(RECENT)..].to_vec(),
            lr: of("lr"),
            grad_norm: of("grad_norm"),
            tokens_per_second: of("tokens_per_second"),
            step_seconds: of("step_seconds"),
            seconds: last.and_then(|row| serde_json::from_value(row["seconds"].clone()).ok()),
            slowest: last.and_then(slowest),
            memory: last.and_then(|row| serde_json::from_value(row["bytes"].clone()).ok()),
            planned_bytes: plan.map(|plan| {
                let parts = plan.per_rank.iter();
                parts.map(|part| part.device_bytes + part.host_bytes).sum()
            }),
            plan: plan.map(|plan| {
                text!(
                    "{} · {} on {} · ZeRO-{} · {} · offload {}",
                    "{} · {}，{} · ZeRO-{} · {} · 卸载 {}",
                    plan.model,
                    match plan.ranks {
                        1 => both("1 rank", "1 个 rank").into(),
                        ranks => text!("{ranks} ranks", "{ranks} 个 rank"),
                    },
                    plan.device,
                    plan.stage,
                    plan.precision,
                    plan.offload
                )
            }),
            checkpoint: files
                .checkpoints
                .last()
                .map(|(step, _)| format!("checkpoint-{step}")),
            evaluation: evaluation(files),
            failures: files
                .failures
                .iter()
                .map(|(_, failure)| failure.clone())
                .collect(),
        }
    }

    /// Whether the files' content is the same as in another view.
    pub(super) fn same_news(&self, other: &Self) -> bool {
        let timeless = |view: &Self| {
            let view = Self {
                seconds_since_news: 0.0,
                remaining_seconds: None,
                ..view.clone()
            };
            // Compared as text, because NaN is not equal to itself.
            format!("{view:?}")
        };
        timeless(self) == timeless(other)
    }
}

fn english<S: serde::Serializer>(text: &Option<Text>, to: S) -> Result<S::Ok, S::Error> {
    text.as_deref().serialize(to)
}

fn slowest(row: &Value) -> Option<Slowest> {
    Some(Slowest {
        rank: row["slowest_rank"].as_u64()?,
        imbalance: number(row, "imbalance")?,
        part: row["slowest_part"].as_str()?.to_owned(),
    })
}

fn evaluation(files: &RunFiles) -> Option<Evaluation> {
    let row = files.evaluations().next_back()?;
    let step = row["current_steps"].as_u64()?;
    // `eval_results.json` belongs to the last evaluation only.
    let results = files
        .results
        .as_ref()
        .filter(|results| results["step"] == step);
    let of = |name: &str| results.and_then(|results| number(results, name));
    Some(Evaluation {
        step,
        loss: number(row, "eval_loss")?,
        exact_match: of("exact_match"),
        exact_match_before: of("exact_match_before"),
    })
}

/// Seconds of a time written as `h:mm:ss`.
fn seconds_of(time: &Value) -> Option<f64> {
    let parts = time
        .as_str()?
        .split(':')
        .map(|part| part.parse::<f64>().ok());
    parts
        .into_iter()
        .try_fold(0.0, |sum, part| Some(60.0 * sum + part?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;
    use serde_json::json;

    const HELD: Presence = Presence {
        is_held: true,
        seconds_since_news: 2.0,
    };
    const LEFT: Presence = Presence {
        is_held: false,
        seconds_since_news: 90.0,
    };

    fn files(step: u64, saved: Option<u64>) -> RunFiles {
        let row = |step: u64| {
            json!({
                "current_steps": step, "total_steps": 40, "loss": 4.0 / step as f64, "lr": 1e-3,
                "grad_norm": "NaN", "elapsed_time": "0:01:01", "remaining_time": "1:00:03",
                "bytes": {"device": 1, "host": 2, "rss": 3},
                "seconds": {"data": 0.1, "forward": 0.2, "communication": 0.3, "backward": 0.4, "step": 0.5, "offload": 0.6},
                "slowest_rank": 1, "slowest_part": "forward", "imbalance": 0.3,
            })
        };
        RunFiles {
            rows: (1..=step).map(row).collect(),
            state: saved.map(|step| json!({"global_step": step})),
            ..RunFiles::default()
        }
    }

    #[test]
    fn the_state_of_a_run_follows_from_its_files_and_lock() {
        let state = |files: &RunFiles, presence| View::new(files, presence).state;
        assert_eq!(state(&files(0, None), HELD), State::Starting);
        assert_eq!(state(&files(0, None), LEFT), State::Dead);
        assert_eq!(state(&files(9, None), HELD), State::Running);
        assert_eq!(state(&files(9, None), LEFT), State::Dead);
        assert_eq!(state(&files(9, Some(9)), LEFT), State::Stopped);
        // Saved by an earlier attempt than the one that died.
        assert_eq!(state(&files(9, Some(5)), LEFT), State::Dead);
        assert_eq!(state(&files(40, Some(40)), LEFT), State::Finished);
        assert_eq!(state(&files(40, None), LEFT), State::Dead);
        assert_eq!(
            state(&files(40, None), HELD),
            State::Running,
            "it still saves"
        );
        let just_now = Presence {
            seconds_since_news: 1.0,
            ..LEFT
        };
        assert_eq!(state(&files(9, None), just_now), State::Running);
        let mut failed = files(9, None);
        failed
            .failures
            .push((0, Failure::new(ErrorCode::Numeric, "loss is NaN", "x")));
        assert_eq!(state(&failed, HELD), State::Failed);
        assert!(State::Running.goes_on() && !State::Dead.goes_on());
    }

    #[test]
    fn watch_shows_the_numbers_of_the_last_row() {
        let view = View::new(&files(8, None), HELD);
        assert_eq!((view.step, view.total_steps, view.loss), (8, 40, Some(0.5)));
        assert_eq!((view.first_loss, view.recent_losses.len()), (Some(4.0), 8));
        assert!(view.grad_norm.is_some_and(f64::is_nan));
        // One hour and three seconds, of which two seconds have passed.
        assert_eq!(view.remaining_seconds, Some(3601.0));
        assert_eq!(view.elapsed_seconds, Some(61.0));
        assert_eq!(view.seconds.map(|s| s.offload), Some(0.6));
        assert_eq!(view.memory.map(|m| m.rss), Some(3));
        assert_eq!(view.slowest.as_ref().map(|s| s.rank), Some(1));
        let later = Presence {
            seconds_since_news: 5.0,
            ..HELD
        };
        // A gradient norm of NaN does not count as a change.
        assert!(view.same_news(&View::new(&files(8, None), later)));
        assert!(!view.same_news(&View::new(&files(9, None), HELD)));
        assert_eq!(View::new(&files(8, None), LEFT).remaining_seconds, None);
    }
}
