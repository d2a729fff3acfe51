//! Run directory: checks before a run, lock, subdirectories and checkpoints.

use crate::error::{ErrorCode, Failure, continue_run, file_name};
use crate::lang::{Text, both, text};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::config::{CONFIG_FILE, Resume, RunConfig, RunPlan};

/// Name of the directory with one log file per rank, inside the run directory.
pub const LOGS: &str = "logs";
/// Name of the directory with the stored failures of ranks, inside the run directory.
pub const ERRORS: &str = "errors";
/// Names of files that show that a directory contains a run.
const MARKS: [&str; 2] = ["trainer_log.jsonl", "trainer_state.json"];

/// Checks the output directory and the checkpoint to resume from, without changing anything. Returns the
/// output directory. If the user did not choose it and it exists, a number is appended to its name, such as
/// `-2`.
///
/// # Errors
/// The directory contains a run that this run does not resume, or is a file (exit 2), or the checkpoint does
/// not exist (exit 9).
pub fn check(config: &RunConfig) -> Result<PathBuf, Failure> {
    if let Resume::From(path) = &config.resume
        && !path.is_dir()
    {
        return Err(Failure::new(
            ErrorCode::Resume,
            text!(
                "cannot resume: {} is not a directory",
                "无法继续：{} 不是目录",
                path.display()
            ),
            both("the checkpoint does not exist", "检查点不存在"),
        )
        .next(both(
            "give the directory of a run, or a checkpoint-N directory in it",
            "请指定某次运行的目录，或其中的 checkpoint-N 目录",
        )));
    }
    if !config.output_is_explicit {
        return Ok(unused(&config.output));
    }
    if config.output.exists() && !config.output.is_dir() {
        return Err(Failure::usage(
            text!(
                "--output {} is not a directory",
                "--output {} 不是目录",
                config.output.display()
            ),
            both("a file has that name", "有同名的文件"),
        )
        .next(both("choose another directory", "请选择另一个目录")));
    }
    let continues = match &config.resume {
        Resume::No => false,
        Resume::Latest => true,
        Resume::From(checkpoint) => lies_in(checkpoint, &config.output),
    };
    if continues {
        return Ok(config.output.clone());
    }
    match sign_of_a_run(&config.output) {
        None => Ok(config.output.clone()),
        Some(sign) => Err(Failure::usage(
            text!(
                "--output {} contains another run",
                "--output {} 中已有另一次运行",
                config.output.display()
            ),
            both("runs are never overwritten", "程序从不覆盖已有的运行"),
        )
        .evidence(text!("found {sign}", "发现 {sign}"))
        .next(both(
            "choose another directory, or continue that run with --resume and its directory",
            "请选择另一个目录，或用 --resume 加该目录继续那次运行",
        ))
        .next(Text::literal(continue_run(&config.output)))),
    }
}

/// Whether a checkpoint is one of the run in `output`, however the two are spelled.
fn lies_in(checkpoint: &Path, output: &Path) -> bool {
    match (fs::canonicalize(checkpoint), fs::canonicalize(output)) {
        (Ok(checkpoint), Ok(output)) => checkpoint.parent() == Some(&output),
        _ => false,
    }
}

fn sign_of_a_run(directory: &Path) -> Option<String> {
    if let Some(mark) = MARKS.iter().find(|name| directory.join(name).exists()) {
        return Some((*mark).to_string());
    }
    if let Some((_, path)) = checkpoints(directory).pop() {
        return Some(file_name(&path));
    }
    // A run that failed before its first step left its errors and nothing to lose.
    let started = directory.join(CONFIG_FILE).exists() && !directory.join(ERRORS).exists();
    started.then(|| CONFIG_FILE.to_string())
}

fn unused(directory: &Path) -> PathBuf {
    let name = file_name(directory);
    let mut candidate = directory.to_path_buf();
    let mut number = 2;
    while candidate.exists() {
        candidate = directory.with_file_name(format!("{name}-{number}"));
        number += 1;
    }
    candidate
}

/// Creates the run directory with its subdirectory for logs and locks it for this process. Then removes the
/// failures of an earlier attempt and saves the plan. The lock lasts until the returned value is dropped.
///
/// # Errors
/// Another process uses the directory (exit 2), or it cannot be written (exit 16).
pub fn prepare(config: &RunPlan) -> Result<Held, Failure> {
    let logs = config.output.join(LOGS);
    fs::create_dir_all(&logs)
        .map_err(|error| Failure::io(ErrorCode::Disk, both("make", "创建"), &logs, &error))?;
    let held = hold(&config.output)?;
    forget_errors(config)?;
    config.save_to(&config.output.join(CONFIG_FILE))?;
    Ok(held)
}

/// Creates the subdirectory for logs in a run directory that the machine of rank 0 prepares and locks. The other
/// machines of the run call it.
///
/// # Errors
/// The directory cannot be created (exit 16).
pub fn join(config: &RunConfig) -> Result<(), Failure> {
    let logs = config.output.join(LOGS);
    fs::create_dir_all(&logs)
        .map_err(|error| Failure::io(ErrorCode::Disk, both("make", "创建"), &logs, &error))
}

/// Lock on a run directory, which keeps other processes away from it. The operating system releases it when
/// the process ends, in whatever way.
#[derive(Debug)]
#[must_use = "the folder is free again when this is dropped"]
pub struct Held {
    /// The locked directory; `None` on file systems without locks.
    lock: Option<File>,
}

impl Drop for Held {
    /// Unlocks the directory. Closing it alone would leave the lock to a child process that another thread has forked
    /// and that has not yet started its program.
    fn drop(&mut self) {
        if let Some(lock) = &self.lock {
            let _closed_next = lock.unlock();
        }
    }
}

fn hold(directory: &Path) -> Result<Held, Failure> {
    let open =
        |error: io::Error| Failure::io(ErrorCode::Disk, both("open", "打开"), directory, &error);
    let lock = File::open(directory).map_err(open)?;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(Held { lock: Some(lock) }),
            Err(TryLockError::Error(_)) => return Ok(Held { lock: None }),
            // `is_held` briefly takes a shared lock, so try again.
            Err(TryLockError::WouldBlock) if lock.try_lock_shared().is_ok() => {
                std::thread::yield_now();
            }
            Err(TryLockError::WouldBlock) => break,
        }
    }
    Err(Failure::usage(
        text!(
            "--output {} is in use",
            "--output {} 正在使用",
            directory.display()
        ),
        both("another run is using it now", "另一次运行正在使用它"),
    )
    .next(both(
        "choose another directory, or wait until that run has ended",
        "请选择另一个目录，或等待那次运行结束",
    ))
    .next(text!(
        "launcher watch {} shows it",
        "launcher watch {} 可以查看它",
        directory.display()
    )))
}

/// Whether a process holds the lock on the run directory `directory`, so that a run is active in it. False if
/// the directory cannot be opened or its file system has no locks.
pub fn is_held(directory: &Path) -> bool {
    File::open(directory)
        .is_ok_and(|directory| matches!(directory.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Removes the failures of an earlier attempt.
fn forget_errors(config: &RunConfig) -> Result<(), Failure> {
    let errors = config.output.join(ERRORS);
    match fs::remove_dir_all(&errors) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::io(
            ErrorCode::Disk,
            both("remove", "删除"),
            &errors,
            &error,
        )),
        _ => Ok(()),
    }
}

/// Moves the stored failures of attempt number `attempt`, counted from 1, into the subdirectory `attempt-N`
/// of `errors`. So the next attempt starts without failures.
///
/// # Errors
/// The directory cannot be written (exit 16).
pub fn set_errors_aside(output: &Path, attempt: u32) -> Result<(), Failure> {
    let errors = output.join(ERRORS);
    let aside = errors.join(format!("attempt-{attempt}"));
    let moved = || -> io::Result<()> {
        fs::create_dir_all(&aside)?;
        for entry in fs::read_dir(&errors)? {
            let path = entry?.path();
            if path.is_file() {
                fs::rename(&path, aside.join(file_name(&path)))?;
            }
        }
        Ok(())
    };
    moved().map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &aside, &error))
}

/// Checkpoints in the run directory `directory` (subdirectories `checkpoint-N`) as (completed training steps
/// `N`, path), sorted by step. Empty if the directory cannot be read.
pub fn checkpoints(directory: &Path) -> Vec<(u64, PathBuf)> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut found: Vec<(u64, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let digits = name.to_str()?.strip_prefix("checkpoint-")?;
            let step = digits
                .bytes()
                .all(|byte| byte.is_ascii_digit())
                .then(|| digits.parse().ok())??;
            entry.path().is_dir().then(|| (step, entry.path()))
        })
        .collect();
    found.sort();
    found
}

/// Path of the checkpoint from which the run resumes: the given one, or the newest in the output directory.
/// `None` if the run starts without a checkpoint.
pub fn checkpoint_to_resume(config: &RunConfig) -> Option<PathBuf> {
    match &config.resume {
        Resume::No => None,
        Resume::From(path) => Some(path.clone()),
        Resume::Latest => checkpoints(&config.output).pop().map(|(_, path)| path),
    }
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
            ..Args::default()
        };
        resolve(&args, &env).expect("resolves").config
    }

    #[test]
    fn a_directory_with_a_run_is_refused_without_resume() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut config = config(&directory.path().join("out"));
        check(&config).expect("new");
        drop(prepare(&config.draft()).expect("made"));
        let failure = check(&config).expect_err("taken");
        assert_eq!(failure.code.status(), 2);
        config.resume = Resume::Latest;
        check(&config).expect("continues");
        let checkpoint = directory.path().join("elsewhere/checkpoint-1");
        fs::create_dir_all(&checkpoint).expect("made");
        config.resume = Resume::From(checkpoint);
        check(&config).expect_err("a checkpoint of one run does not open the folder of another");
        config.resume = Resume::From(config.output.join("checkpoint-1"));
        fs::create_dir(config.output.join("checkpoint-1")).expect("made");
        check(&config).expect("continues its own run");
    }

    #[test]
    fn a_run_that_failed_before_its_first_step_does_not_block_its_directory() {
        let directory = tempfile::tempdir().expect("temp dir");
        let config = config(&directory.path().join("out"));
        drop(prepare(&config.draft()).expect("made"));
        Failure::usage("t", "c")
            .save(&config.output, 0)
            .expect("saved");
        check(&config).expect("free");
        fs::write(config.output.join("trainer_log.jsonl"), "{}").expect("written");
        check(&config).expect_err("steps were taken");
    }

    #[test]
    fn unrelated_files_are_ignored_and_checkpoints_are_not() {
        let directory = tempfile::tempdir().expect("temp dir");
        fs::write(directory.path().join("notes.txt"), "x").expect("written");
        let config = config(directory.path());
        check(&config).expect("free");
        fs::create_dir(directory.path().join("checkpoint-7")).expect("made");
        assert!(check(&config).expect_err("taken").evidence[0].contains("checkpoint-7"));
    }

    #[test]
    fn a_default_directory_that_exists_gets_a_suffix() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut config = config(directory.path());
        config.output_is_explicit = false;
        let output = check(&config).expect("renamed");
        assert!(output.to_string_lossy().ends_with("-2"));
    }

    #[test]
    fn a_run_directory_is_locked_by_one_process() {
        let directory = tempfile::tempdir().expect("temp dir");
        let config = config(directory.path());
        assert!(!is_held(directory.path()));
        let held = prepare(&config.draft()).expect("prepared");
        assert!(is_held(directory.path()));
        Failure::usage("t", "c")
            .save(&config.output, 0)
            .expect("saved");
        let refused = prepare(&config.draft()).expect_err("in use");
        assert_eq!(refused.code.status(), 2, "{refused}");
        assert!(
            config.output.join(ERRORS).exists(),
            "a stranger's files stay"
        );
        // A forked child has such copies until it starts its program.
        let copy = held.lock.as_ref().map(File::try_clone);
        drop(held);
        assert!(!is_held(directory.path()));
        drop(copy);
        prepare(&config.draft()).map(drop).expect("free again");
    }

    #[test]
    fn asking_whether_a_directory_is_locked_does_not_block_a_run() {
        let directory = tempfile::tempdir().expect("temp dir");
        let config = config(directory.path());
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        is_held(directory.path());
                    }
                });
            }
            let failed = (0..500).find_map(|_| prepare(&config.draft()).err());
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(failed.is_none(), "{failed:?}");
        });
    }

    #[test]
    fn a_missing_checkpoint_is_a_resume_failure() {
        let directory = tempfile::tempdir().expect("temp dir");
        let mut config = config(directory.path());
        config.resume = Resume::From(directory.path().join("checkpoint-9"));
        assert_eq!(check(&config).expect_err("missing").code.status(), 9);
    }

    #[test]
    fn checkpoints_are_sorted_by_number_and_unfinished_ones_left_out() {
        let directory = tempfile::tempdir().expect("temp dir");
        for name in [
            "checkpoint-9",
            "checkpoint-10",
            "checkpoint-11.tmp",
            "checkpoint-",
            "checkpoint-x1",
        ] {
            fs::create_dir(directory.path().join(name)).expect("made");
        }
        fs::write(directory.path().join("checkpoint-12"), "a file").expect("written");
        let steps: Vec<u64> = checkpoints(directory.path())
            .into_iter()
            .map(|(step, _)| step)
            .collect();
        assert_eq!(steps, [9, 10]);
        let mut config = config(directory.path());
        config.resume = Resume::Latest;
        assert!(
            checkpoint_to_resume(&config)
                .expect("found")
                .ends_with("checkpoint-10")
        );
    }
}
