//! Output directory that gets its name only when it is complete. Existing files are never overwritten.

use crate::lang::{Text, both, text};
use std::path::{Path, PathBuf};

use crate::error::{ErrorCode, Failure};

/// Directory under construction, next to its final path. Dropping it before [`NewDirectory::publish`] removes it.
#[derive(Debug)]
pub(crate) struct NewDirectory {
    output: PathBuf,
    staging: PathBuf,
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
        let mut name = output.file_name().unwrap_or_default().to_os_string();
        name.push(".tmp");
        let staging = output.with_file_name(name);
        // A killed run may have left this directory.
        drop(std::fs::remove_dir_all(&staging));
        std::fs::create_dir_all(&staging).map_err(|error| {
            Failure::io(ErrorCode::Disk, both("make", "创建"), &staging, &error)
        })?;
        Ok(Self {
            output: output.to_owned(),
            staging,
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
    }
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
}
