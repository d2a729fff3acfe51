//! Private files of a job, and their removal.

use crate::lang::{Text, both, text};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{ErrorCode, Failure};

/// Directory of the ranks' shared-memory files.
const SHARED_MEMORY: &str = "/dev/shm";

/// Directory of these files where the others are unusable.
const TEMPORARY: &str = "/tmp";
/// Start of the name of a job's private directory. The token follows.
const PREFIX: &str = "tessera-";
/// File in the private directory on which every process of the job holds a shared lock.
const LOCK: &str = "lock";

/// Token and private directory of a job: one start of the ranks by their supervisor. Every shared-memory or
/// temporary file of the job has [`Job::token`] in its name. Dropping the job removes all of them, whichever
/// process created them.
#[derive(Debug)]
pub struct Job {
    token: String,
    directory: PathBuf,
    temp_dir: PathBuf,
    /// Dropped after the files are gone.
    _held: Held,
}

/// Shared lock on a job's private directory, by which other jobs see that this job lives.
#[derive(Debug)]
pub struct Held {
    lock: File,
}

impl Drop for Held {
    /// Unlocks the directory, also if a forked child that has not yet started its program has a copy of the descriptor.
    fn drop(&mut self) {
        let _closed_next = self.lock.unlock();
    }
}

/// Holds `job_dir`, a job's private directory, for this process.
///
/// # Errors
/// The lock file cannot be created.
pub fn hold(job_dir: &Path) -> Result<Held, Failure> {
    let path = job_dir.join(LOCK);
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .and_then(|lock| lock.lock_shared().map(|()| Held { lock }))
        .map_err(|error| Failure::io(ErrorCode::Disk, both("lock", "锁定"), &path, &error))
}

impl Job {
    /// Creates a job with a new token and an empty directory in `temp_dir`. Removes the files of jobs of this user whose
    /// processes are all dead.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn new(temp_dir: &Path) -> Result<Self, Failure> {
        sweep_dead(temp_dir);
        let token = fresh_token();
        let directory = temp_dir.join(format!("{PREFIX}{token}"));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .map_err(|error| unmade(&directory, &error))?;
        Ok(Self {
            token,
            _held: hold(&directory)?,
            directory,
            temp_dir: temp_dir.to_path_buf(),
        })
    }

    /// Token of the job: a unique hexadecimal text in the name of every shared-memory or temporary file of
    /// the job.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Private directory of the job, in the directory for temporary files. Only its owner can read it.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Path of the job's file with the run's configuration, which the ranks read.
    pub fn config_file(&self) -> PathBuf {
        config_file(&self.directory)
    }
}

/// Failure of a private directory that cannot be made.
fn unmade(directory: &Path, error: &io::Error) -> Failure {
    Failure::new(
        ErrorCode::Disk,
        text!("cannot make the job's private directory {}", "无法创建作业的私有目录 {}", directory.display()),
        Text::literal(error),
    )
    .next(both("set TMPDIR to a writable directory with free space, e.g. TMPDIR=$HOME/tmp; --output does not move this directory", "请把 TMPDIR 设为有空闲空间的可写目录，例如 TMPDIR=$HOME/tmp；--output 不会改变这个目录的位置"))
}

impl Drop for Job {
    fn drop(&mut self) {
        sweep(&self.token, &self.temp_dir);
    }
}

/// Path of the file with the run's configuration in `job_dir`, a job's private directory.
pub fn config_file(job_dir: &Path) -> PathBuf {
    job_dir.join("config.json")
}

/// Removes all files with this job's token in their names from `/dev/shm` and `temp_dir`. Errors are ignored.
/// A token of fewer than 16 bytes removes nothing.
pub fn sweep(token: &str, temp_dir: &Path) {
    // A short token could match files of other jobs.
    if token.len() < 16 {
        return;
    }
    for directory in [Path::new(SHARED_MEMORY), temp_dir, Path::new(TEMPORARY)] {
        let Ok(entries) = fs::read_dir(directory) else {
            continue;
        };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().contains(token) {
                let path = entry.path();
                // Another process of the job may be removing the same file.
                drop(if path.is_dir() {
                    fs::remove_dir_all(path)
                } else {
                    fs::remove_file(path)
                });
            }
        }
    }
}

/// Removes the files of every job of this user in `temp_dir` whose processes are all dead, as after `kill -9` of the
/// supervisor and its ranks. Errors are ignored.
fn sweep_dead(temp_dir: &Path) {
    let Ok(entries) = fs::read_dir(temp_dir) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let token = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let is_token = |token: &&str| {
            token.len() == TOKEN_CHARS && token.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        if let Some(token) = token.filter(is_token)
            && is_dead(&entry.path())
        {
            sweep(token, temp_dir);
        }
    }
}

/// Whether a directory is that of a job of this user that no process holds. A directory without a lock file is that of
/// a job which starts at this moment.
fn is_dead(job_dir: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let is_own = fs::symlink_metadata(job_dir).is_ok_and(|meta| meta.is_dir() && meta.uid() == own);
    let lock = job_dir.join(LOCK);
    let is_file = fs::symlink_metadata(&lock).is_ok_and(|meta| meta.is_file());
    is_own && is_file && File::open(&lock).is_ok_and(|lock| lock.try_lock().is_ok())
}

/// Number of characters of a token.
const TOKEN_CHARS: usize = 24;

/// A unique token of 96 bits in hexadecimal.
pub(crate) fn fresh_token() -> String {
    let mut seed = [0u8; 32];
    // Without a random source, the time and the process id make it unique.
    let random = getrandom::fill(&mut seed);
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed);
    if random.is_err() {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos());
        hasher.update(&now.to_le_bytes());
    }
    hasher.update(&std::process::id().to_le_bytes());
    hasher.finalize().to_hex()[..TOKEN_CHARS].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_job_leaves_no_files() {
        let temp = tempfile::tempdir().expect("temp dir");
        let job = Job::new(temp.path()).expect("made");
        fs::write(job.directory().join("x"), "x").expect("written");
        fs::write(temp.path().join(format!("spill-{}-0", job.token())), "x").expect("written");
        fs::write(temp.path().join("other"), "x").expect("written");
        drop(job);
        let left: Vec<_> = fs::read_dir(temp.path())
            .expect("listed")
            .flatten()
            .map(|e| e.file_name())
            .collect();
        assert_eq!(left, ["other"]);
    }

    #[test]
    fn a_job_removes_the_files_of_dead_jobs_and_no_others() {
        let temp = tempfile::tempdir().expect("temp dir");
        let names = |temp: &Path| {
            let entries = fs::read_dir(temp).expect("listed").flatten();
            let mut names: Vec<_> = entries.map(|e| e.file_name()).collect();
            names.sort();
            names
        };
        let alive = Job::new(temp.path()).expect("made");
        let dead = Job::new(temp.path()).expect("made");
        let (token, directory) = (dead.token.clone(), dead.directory.clone());
        let held = hold(&directory).expect("held");
        drop(dead);
        // A job that was killed leaves its directory, the lock file and files with its token.
        fs::create_dir(&directory).expect("made");
        let rank = hold(&directory).expect("held");
        fs::write(temp.path().join(format!("spill-{token}")), "x").expect("written");
        drop(held);
        let other = temp.path().join("tessera-notes");
        fs::create_dir(&other).expect("made");
        hold(&other).expect("held");
        let before = names(temp.path());
        drop(Job::new(temp.path()).expect("made"));
        assert_eq!(names(temp.path()), before, "a rank lives");
        drop(rank);
        drop(Job::new(temp.path()).expect("made"));
        let left = [alive.directory(), &other].map(|path| path.file_name().expect("a name"));
        let mut left: Vec<_> = left.iter().map(|name| name.to_os_string()).collect();
        left.sort();
        assert_eq!(names(temp.path()), left);
    }

    #[test]
    fn job_tokens_differ_and_short_ones_remove_nothing() {
        assert_ne!(fresh_token(), fresh_token());
        let temp = tempfile::tempdir().expect("temp dir");
        fs::write(temp.path().join("abc"), "x").expect("written");
        sweep("abc", temp.path());
        sweep("", temp.path());
        assert!(temp.path().join("abc").exists());
    }
}
