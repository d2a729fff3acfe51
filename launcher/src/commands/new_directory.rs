//! Output directory that gets its name only when it is complete. Existing files are never overwritten.

use crate::lang::{Text, both, text};
use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use crate::error::{ErrorCode, Failure};

/// Directory under construction, next to its final path. Dropping it before [`NewDirectory::publish`] removes it.
#[derive(Debug)]
pub(crate) struct NewDirectory {
    output: PathBuf,
    staging: PathBuf,
    /// The directory itself, locked while it is under construction.
    lock: File,
}

impl NewDirectory {
    /// Checks that `output` is free and creates an empty directory next to it. `what` is the subject of the error
    /// message about overwriting, e.g. `an export`.
    ///
    /// # Errors
    /// `output` exists and is not empty (exit 2), or the directory cannot be created (exit 16).
    pub(crate) fn begin(output: &Path, what: impl Into<Text>) -> Result<Self, Failure> {
        let what = what.into();
        check(output, &what)?;
        // An empty directory may be a link, or the current one.
        let output = output.canonicalize().unwrap_or_else(|_| output.to_owned());
        let mut name = OsString::from(".");
        name.push(output.file_name().unwrap_or_default());
        name.push(".tessera-tmp");
        let staging = output.with_file_name(name);
        let failed = |error| Failure::io(ErrorCode::Disk, both("make", "创建"), &staging, &error);
        let lock = loop {
            std::fs::create_dir_all(&staging).map_err(failed)?;
            let lock = File::open(&staging).map_err(failed)?;
            if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
                return Err(busy(&output, &what));
            }
            let is_empty = std::fs::read_dir(&staging).is_ok_and(|mut all| all.next().is_none());
            if is_empty {
                break lock;
            }
            // A killed run left this directory.
            std::fs::remove_dir_all(&staging).map_err(failed)?;
        };
        Ok(Self {
            output,
            staging,
            lock,
        })
    }

    /// Path of the directory under construction, into which the caller writes its files.
    pub(crate) fn path(&self) -> &Path {
        &self.staging
    }

    /// Renames the directory to its final path.
    ///
    /// # Errors
    /// The path was taken in the meantime, or renaming fails (exit 16).
    pub(crate) fn publish(self) -> Result<(), Failure> {
        rename(&self.staging, &self.output)
    }
}

impl NewDirectory {
    /// Renames the directory `inner` inside [`NewDirectory::path`] to the final path. Everything else is removed.
    ///
    /// # Errors
    /// As [`NewDirectory::publish`].
    pub(crate) fn publish_inner(self, inner: &Path) -> Result<(), Failure> {
        rename(inner, &self.output)
    }
}

fn rename(from: &Path, output: &Path) -> Result<(), Failure> {
    let rename = || -> std::io::Result<()> {
        if output.is_dir() {
            std::fs::remove_dir(output)?;
        }
        std::fs::rename(from, output)
    };
    rename().map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), output, &error))
}

impl Drop for NewDirectory {
    fn drop(&mut self) {
        // An unfinished directory is useless. After a rename it does not exist, and the error is ignored.
        drop(std::fs::remove_dir_all(&self.staging));
        // A child process may have a copy of the open file, which would keep the lock.
        drop(self.lock.unlock());
    }
}

/// The failure when another process writes the same directory.
fn busy(output: &Path, what: &Text) -> Failure {
    Failure::usage(
        text!(
            "another process writes --output {}",
            "另一个进程正在写入 --output {}",
            output.display()
        ),
        text!("{what} has a directory of its own", "{what}需要自己的目录"),
    )
    .next(both(
        "wait until it ends, or choose another directory",
        "请等它结束，或选择另一个目录",
    ))
}

fn check(output: &Path, what: &Text) -> Result<(), Failure> {
    let free = match std::fs::read_dir(output) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    if free {
        return Ok(());
    }
    Err(Failure::usage(
        text!(
            "--output {} is not an empty directory",
            "--output {} 不是空目录",
            output.display()
        ),
        text!(
            "{what} never overwrites existing files",
            "{what}从不覆盖已有的文件"
        ),
    )
    .next(both("choose another directory", "请选择另一个目录")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_gets_its_name_when_it_is_complete() {
        let temp = tempfile::tempdir().expect("temp dir");
        let output = temp.path().join("new");
        let entries = || std::fs::read_dir(temp.path()).expect("listed").count();
        let begun = NewDirectory::begin(&output, "a test").expect("free");
        std::fs::write(begun.path().join("file"), "x").expect("written");
        assert!(!output.exists());
        drop(begun);
        assert_eq!(entries(), 0);
        std::fs::create_dir(&output).expect("an empty folder is as good as none");
        let begun = NewDirectory::begin(&output, "a test").expect("free");
        std::fs::write(begun.path().join("file"), "x").expect("written");
        begun.publish().expect("published");
        assert!(output.join("file").is_file());
        assert_eq!(entries(), 1);
        let failure = NewDirectory::begin(&output, "a test").expect_err("taken");
        assert_eq!(failure.code.status(), 2);
        assert_eq!(entries(), 1);
    }

    #[test]
    fn what_a_killed_run_left_is_replaced_and_nothing_else() {
        let temp = tempfile::tempdir().expect("temp dir");
        let output = temp.path().join("new");
        let file = temp.path().join("new.tmp");
        std::fs::write(&file, "of the user").expect("written");
        let first = NewDirectory::begin(&output, "a test").expect("free");
        let failure = NewDirectory::begin(&output, "a test").expect_err("in use");
        assert!(failure.title.contains("another process"), "{failure}");
        let staging = first.path().to_owned();
        drop(first);
        std::fs::create_dir(&staging).expect("as a killed run leaves it");
        std::fs::write(staging.join("old"), "x").expect("written");
        let begun = NewDirectory::begin(&output, "a test").expect("free again");
        assert!(!staging.join("old").exists());
        drop(begun);
        assert!(file.is_file());
        // An empty directory may have another name.
        std::fs::create_dir(&output).expect("made");
        let link = temp.path().join("link");
        std::os::unix::fs::symlink(&output, &link).expect("linked");
        let begun = NewDirectory::begin(&link, "a test").expect("free");
        std::fs::write(begun.path().join("file"), "x").expect("written");
        begun.publish().expect("published");
        assert!(output.join("file").is_file());
    }
}
