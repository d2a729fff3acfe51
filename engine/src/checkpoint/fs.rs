//! The file-system calls of a save, as a trait so that tests can fail any of them.

use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{CWD, FallocateFlags, OFlags, RenameFlags};

/// Operations that change the disk while a checkpoint is written. Tests use an implementation that fails.
pub(super) trait FileSystem: Debug + Send + Sync {
    /// Creates or truncates a file for `bytes` bytes and reserves the space if the disk can.
    fn create(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn FileHandle>>;
    /// Creates a directory and its parents.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Renames a file over another one, or a directory to a free name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Swaps two directories atomically; fails if the disk cannot.
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()>;
    /// Makes the content of a file written by others durable.
    fn sync_file(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory with its content.
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
}

/// A file that a checkpoint writer has created and is writing.
pub(super) trait FileHandle: Write + Debug + Send {
    /// Syncs the written content to disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// The real file system, as opposed to one that fails in tests.
#[derive(Debug)]
pub(super) struct Disk;

impl FileSystem for Disk {
    fn create(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn FileHandle>> {
        // The user's umask decides who may read the file. Symbolic links are not followed.
        let file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(path)?;
        if bytes > 0 {
            // A full disk is detected before the first byte is written. Disks that cannot reserve space continue.
            let reserved = rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes);
            if let Err(error @ (rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT)) = reserved {
                return Err(error.into());
            }
        }
        Ok(Box::new(file))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        Ok(rustix::fs::renameat_with(
            CWD,
            a,
            CWD,
            b,
            RenameFlags::EXCHANGE,
        )?)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

impl FileHandle for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn files_and_directories_follow_the_umask_and_links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let plain = directory.path().join("plain");
        fs::create_dir(&plain).unwrap();
        fs::write(plain.join("file"), "x").unwrap();
        let inner = directory.path().join("a/b");
        Disk.create_dir_all(&inner).unwrap();
        let file = inner.join("file");
        Disk.create(&file, 10).unwrap().write_all(b"x").unwrap();
        assert_eq!(mode(&inner), mode(&plain));
        assert_eq!(mode(&file), mode(&plain.join("file")));

        let target = directory.path().join("target");
        fs::write(&target, "precious").unwrap();
        let link = inner.join("link");
        symlink(&target, &link).unwrap();
        Disk.create(&link, 0).unwrap_err();
        assert_eq!(fs::read(&target).unwrap(), b"precious");
    }
}
