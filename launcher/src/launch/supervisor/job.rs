//! Private files of a job, and their removal.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{ErrorCode, Failure};

/// Directory of the ranks' shared-memory files.
const SHARED_MEMORY: &str = "/dev/shm";

/// Token and private directory of a job: one start of the ranks by their supervisor. Every shared-memory or
/// temporary file of the job has [`Job::token`] in its name. Dropping the job removes all of them, whichever
/// process created them.
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
            .map_err(|error| Failure::io(ErrorCode::Disk, "make", &directory, &error))?;
        Ok(Self {
            token,
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
    for directory in [Path::new(SHARED_MEMORY), temp_dir] {
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
