//! Private files of a job, and their removal.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{ErrorCode, Failure};

/// Directory of the ranks' shared-memory files.
const SHARED_MEMORY: &str = "/dev/shm";

/// Directory of these files where the others are unusable.
const TEMPORARY: &str = "/tmp";

/// Name and private directory of a job. Every shared-memory or temporary file of the job has [`Job::token`] in its
/// name. Dropping the job removes all of them, whichever process created them.
#[derive(Debug)]
pub struct Job {
    token: String,
    directory: PathBuf,
    temp_dir: PathBuf,
}

impl Job {
    /// Creates a job with a new token and an empty directory in `temp_dir`.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn new(temp_dir: &Path) -> Result<Self, Failure> {
        let token = fresh_token();
        let directory = temp_dir.join(format!("tessera-{token}"));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .map_err(|error| unmade(&directory, &error))?;
        Ok(Self {
            token,
            directory,
            temp_dir: temp_dir.to_path_buf(),
        })
    }

    /// The token, part of every shared file's name.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Private directory of the job, in the directory for temporary files. Only its owner can read it.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// File of the configuration that the ranks read.
    pub fn config_file(&self) -> PathBuf {
        config_file(&self.directory)
    }
}

/// Failure of a private directory that cannot be made.
fn unmade(directory: &Path, error: &io::Error) -> Failure {
    Failure::new(
        ErrorCode::Disk,
        format!("cannot make the job's private directory {}", directory.display()),
        error.to_string(),
    )
    .next("set TMPDIR to a writable directory with free space, e.g. TMPDIR=$HOME/tmp; --output does not move this directory")
}

impl Drop for Job {
    fn drop(&mut self) {
        sweep(&self.token, &self.temp_dir);
    }
}

/// File of the configuration in a job's directory.
pub fn config_file(job_dir: &Path) -> PathBuf {
    job_dir.join("config.json")
}

/// Removes all files of the job with this token from shared memory and `temp_dir`.
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
    hasher.finalize().to_hex()[..24].to_string()
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
    fn job_tokens_differ_and_short_ones_remove_nothing() {
        assert_ne!(fresh_token(), fresh_token());
        let temp = tempfile::tempdir().expect("temp dir");
        fs::write(temp.path().join("abc"), "x").expect("written");
        sweep("abc", temp.path());
        sweep("", temp.path());
        assert!(temp.path().join("abc").exists());
    }
}
