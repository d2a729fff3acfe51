//! A job's rank process: stop flag, watch on the parent, panic report.

use crate::lang::{Text, both, text};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::threads::no_thread;
use crate::error::{ErrorCode, Failure};
use crate::launch::signals;
use crate::launch::supervisor::job;
use crate::rank_env::RankEnv;

/// Flag that a signal sets to ask a rank to finish its step, save a checkpoint, and return. Ranks see it at
/// different times, so the training loop must agree on it by an all-reduce before it acts.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// New stop flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the rank was asked to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for waits of the engine.
    pub(crate) fn shared(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }

    /// Asks the rank to stop.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Result of one rank's run. The supervisor of a machine uses that of its first rank.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RunSummary {
    /// Number of completed training steps, including those of earlier attempts that this one resumed from.
    pub steps: u64,
    /// Mean loss of the held-out samples in the last evaluation, if any.
    pub eval_loss: Option<f64>,
    /// Share of exactly correct answers among those generated in the last evaluation, 0 to 1, if any.
    pub exact_match: Option<f64>,
    /// Share of exactly correct answers among those generated before training, 0 to 1, if any.
    pub exact_match_before: Option<f64>,
    /// Directory of the last checkpoint that this attempt saved, if any.
    pub checkpoint: Option<PathBuf>,
    /// Whether a signal ended the run early; the process then exits with 130.
    pub interrupted: bool,
    /// Reason why `--collectives auto` could not use peer access between GPUs (CUDA IPC). If set, the rank
    /// returned before training; every rank has the same text.
    #[serde(default)]
    pub ipc_refused: Option<String>,
    /// Most ranks on one GPU, if the plan assumed another number. If set, the rank returned before training; every
    /// rank has the same number.
    #[serde(default)]
    pub ranks_per_gpu: Option<usize>,
}

impl RunSummary {
    fn path(job_dir: &Path, rank: usize) -> PathBuf {
        job_dir.join(format!("summary-{rank:04}.json"))
    }

    /// Writes the summary of `rank` to a file in `job_dir`, the job's private directory, where the supervisor
    /// reads it.
    ///
    /// # Errors
    /// The job's directory cannot be written.
    pub fn save(&self, job_dir: &Path, rank: usize) -> Result<(), Failure> {
        let path = Self::path(job_dir, rank);
        serde_json::to_vec(self)
            .map_err(std::io::Error::from)
            .and_then(|bytes| std::fs::write(&path, bytes))
            .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))
    }

    /// Reads the summary of `rank` from `job_dir`, the job's private directory; `None` if there is none or it
    /// is damaged.
    pub fn load(job_dir: &Path, rank: usize) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(Self::path(job_dir, rank)).ok()?).ok()
    }
}

/// Prepares this process to run as a rank. SIGTERM, SIGINT, SIGHUP and SIGUSR1 set the returned flag. Any
/// panic ends the process, and so does the end of the supervisor that started it.
///
/// A panic is recorded in `output`, the run's directory. If the supervisor ends, the job's files in
/// `temp_dir` are removed.
///
/// # Errors
/// A signal handler cannot be installed (exit 13).
pub fn enter(env: &RankEnv, output: &Path, temp_dir: &Path) -> Result<StopFlag, Failure> {
    let stop = StopFlag::new();
    for signal in signals::handled() {
        signal_hook::flag::register(signal, Arc::clone(&stop.0)).map_err(|error| {
            Failure::new(
                ErrorCode::Rendezvous,
                both("signals cannot be handled", "无法处理信号"),
                Text::literal(&error),
            )
        })?;
    }
    install_panic_hook(env.rank, output.to_path_buf());
    if env.is_supervised() {
        watch_parent(env.run_token.clone(), temp_dir.to_path_buf())
            .map_err(|error| no_thread(both("watch the supervisor", "监视监督进程"), &error))?;
    }
    Ok(stop)
}

/// Watches standard input, a pipe from the supervisor. It closes when the supervisor dies for any reason, or wants
/// this rank to end at once.
fn watch_parent(token: String, temp_dir: PathBuf) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("supervisor".to_owned());
    let watching = thread.spawn(move || {
        let mut byte = [0u8; 1];
        let mut pipe = std::io::stdin().lock();
        while matches!(pipe.read(&mut byte), Ok(1)) {}
        // Possibly no other process is left to remove the job's files.
        job::sweep(&token, &temp_dir);
        end_process(ErrorCode::Interrupted);
    });
    watching.map(drop)
}

/// Ends the rank on any panic: a rank that lost a thread would keep its peers waiting.
fn install_panic_hook(rank: usize, output: PathBuf) {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default(info);
        let payload = info.payload();
        let message = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_string());
        let place = info
            .location()
            .map_or_else(String::new, |at| format!("{}:{}", at.file(), at.line()));
        let failure = Failure::new(
            ErrorCode::Panic,
            text!(
                "rank {rank} panicked: {message}",
                "rank {rank} 发生 panic：{message}"
            ),
            both("a bug in this program", "这是本程序的缺陷"),
        )
        .evidence(text!("at {place}", "位置 {place}"))
        .next(both(
            "please report it together with the rank's log",
            "请连同该 rank 的日志一起报告",
        ));
        if Failure::load(&output, rank).is_none() {
            drop(failure.save(&output, rank));
        }
        end_process(ErrorCode::Panic);
    }));
}

#[expect(
    clippy::exit,
    reason = "these threads cannot return: the process must end while main is busy"
)]
fn end_process(code: ErrorCode) -> ! {
    std::process::exit(i32::from(code.status()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_keep_every_bit_of_a_loss() {
        let directory = tempfile::tempdir().expect("temp dir");
        let summary = RunSummary {
            eval_loss: Some(0.1 + 0.2),
            steps: 4,
            ..RunSummary::default()
        };
        summary.save(directory.path(), 0).expect("saved");
        let loaded = RunSummary::load(directory.path(), 0).expect("loaded");
        assert_eq!(
            loaded.eval_loss.map(f64::to_bits),
            summary.eval_loss.map(f64::to_bits)
        );
        assert_eq!(RunSummary::load(directory.path(), 1), None);
    }

    #[test]
    fn a_stop_flag_is_shared_by_its_clones() {
        let flag = StopFlag::new();
        let seen = flag.clone();
        assert!(!seen.is_set());
        flag.set();
        assert!(seen.is_set());
    }
}
