//! Directory of one job's spill files, inside a directory that the user named.

use super::Result;
use crate::error::SpillError;
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Prefix of the names of spill directories. The name of the job follows.
pub const DIRECTORY_PREFIX: &str = "tessera-spill-";
const LOCK: &str = "lock";
/// Flags for opening a lock file: symbolic links are not followed, and opening a pipe or device does not block.
const LOCK_FLAGS: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK);

/// Directory with the spill files of one job. Every process of the job holds a lock on it; the last one to
/// release it removes the directory.
#[derive(Debug)]
pub struct SpillDirectory {
    path: PathBuf,
    lock: Option<File>,
}

impl SpillDirectory {
    /// Opens and locks the spill directory of `job` in the directory `parent`. The first process of the job
    /// creates it.
    ///
    /// # Errors
    /// When the directory cannot be created or locked.
    pub fn join(parent: &Path, job: &str) -> Result<Self> {
        let path = parent.join(format!("{DIRECTORY_PREFIX}{job}"));
        loop {
            match make(&path) {
                Ok(()) => {}
                // Another process swept it between `make` and this check.
                Err(e) if e.kind() == ErrorKind::AlreadyExists && !is_file(&path) => continue,
                Err(e) => return Err(SpillError::io("create", &path)(e)),
            }
            let name = path.join(LOCK);
            let opened = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .custom_flags(LOCK_FLAGS.bits().cast_signed())
                .open(&name);
            let irregular = || io::Error::other("it is not a regular file");
            let lock = match opened {
                Ok(lock) if lock.metadata().is_ok_and(|meta| meta.is_file()) => lock,
                Ok(_) => return Err(SpillError::io("lock", &name)(irregular())),
                // Another process swept it before the lock file was created.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(_) if is_irregular(&name) => {
                    return Err(SpillError::io("lock", &name)(irregular()));
                }
                Err(e) => return Err(SpillError::io("create", &name)(e)),
            };
            lock.lock_shared().map_err(SpillError::io("lock", &name))?;
            // Another process may have removed it before it was locked.
            let held = lock.metadata().map_err(SpillError::io("read", &name))?;
            if fs::metadata(&name).is_ok_and(|there| there.ino() == held.ino()) {
                return Ok(Self {
                    path,
                    lock: Some(lock),
                });
            }
        }
    }

    /// Path of the spill directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the spill directories in `parent` that no living process uses. Returns their paths and sizes
    /// in bytes.
    ///
    /// # Errors
    /// When `parent` cannot be read.
    pub fn sweep(parent: &Path) -> Result<Vec<(PathBuf, u64)>> {
        let entries = match fs::read_dir(parent) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(SpillError::io("read", parent)(e)),
        };
        let mut swept = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name
                .to_str()
                .is_some_and(|n| n.starts_with(DIRECTORY_PREFIX))
            {
                let path = entry.path();
                let bytes = size(&path);
                if remove_if_dead(&path) {
                    swept.push((path, bytes));
                }
            }
        }
        Ok(swept)
    }
}

impl Drop for SpillDirectory {
    fn drop(&mut self) {
        // Releases the lock first, also if a forked child has a copy of the descriptor. The directory stays while another
        // process holds the lock.
        if let Some(lock) = self.lock.take() {
            let _closed_next = lock.unlock();
        }
        remove_if_dead(&self.path);
    }
}

/// Creates the directory with access for its owner only. An existing one must belong to this user and must not be a
/// link.
fn make(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && !is_file(path) => {}
        other => return other,
    }
    // Another process swept it after `create` found it. The caller retries.
    let found = fs::symlink_metadata(path).map_err(|e| match e.kind() {
        ErrorKind::NotFound => io::Error::from(ErrorKind::AlreadyExists),
        _ => e,
    })?;
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(
            ErrorKind::PermissionDenied,
            "folder of another user",
        ));
    }
    Ok(())
}

/// Whether the path is something other than a directory.
fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| !meta.is_dir())
}

/// Whether the path is something other than a regular file.
fn is_irregular(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| !meta.is_file())
}

/// Total bytes of the files in a directory.
fn size(path: &Path) -> u64 {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .map(|meta| meta.len())
        .sum()
}

/// Removes a job's directory unless a process holds its lock.
fn remove_if_dead(path: &Path) -> bool {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(LOCK_FLAGS.bits().cast_signed())
        .open(path.join(LOCK));
    let Ok(lock) = opened else {
        // Another process has created the directory but not its lock. Only an empty directory is removed; its creator
        // retries.
        return fs::remove_dir(path).is_ok();
    };
    if !lock.metadata().is_ok_and(|meta| meta.is_file()) {
        return false;
    }
    match lock.try_lock() {
        Ok(()) => {
            // Renamed first, so that a process that joins now creates a new directory and loses nothing in it.
            let grave = grave_of(path);
            let moved = match fs::metadata(path.join(LOCK)).and_then(|m| Ok((m, lock.metadata()?)))
            {
                Ok((there, held)) => there.ino() == held.ino() && fs::rename(path, &grave).is_ok(),
                Err(_) => false,
            };
            moved && fs::remove_dir_all(&grave).is_ok()
        }
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => false,
    }
}

/// An unused name with the prefix that [`SpillDirectory::sweep`] looks for.
fn grave_of(path: &Path) -> PathBuf {
    static GRAVES: AtomicU64 = AtomicU64::new(0);
    let number = GRAVES.fetch_add(1, Ordering::Relaxed);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".dead-{}-{number}", std::process::id()));
    name.into()
}

#[cfg(test)]
mod tests {
    use super::super::{IoPath, SpillFile};
    use super::*;
    use std::sync::Arc;

    #[test]
    fn spill_directory_and_files_are_private_and_links_are_not_followed() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let parent = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let directory = Arc::new(SpillDirectory::join(parent.path(), "a").unwrap());
        let file = SpillFile::create(&directory, 0, "param", IoPath::Mapped).unwrap();
        assert_eq!(mode(directory.path()), 0o700);
        assert_eq!(mode(&directory.path().join(LOCK)), 0o600);
        assert_eq!(mode(&directory.path().join("rank-0.param")), 0o600);
        drop(file);

        let target = parent.path().join("target");
        fs::write(&target, "precious").unwrap();
        symlink(&target, directory.path().join("rank-1.param")).unwrap();
        SpillFile::create(&directory, 1, "param", IoPath::Mapped).unwrap_err();
        assert_eq!(fs::read(&target).unwrap(), b"precious");
        fs::remove_file(directory.path().join("rank-1.param")).unwrap();

        let elsewhere = parent.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        symlink(
            &elsewhere,
            parent.path().join(format!("{DIRECTORY_PREFIX}b")),
        )
        .unwrap();
        SpillDirectory::join(parent.path(), "b").unwrap_err();
        let locked = parent.path().join(format!("{DIRECTORY_PREFIX}c"));
        fs::create_dir(&locked).unwrap();
        symlink(&target, locked.join(LOCK)).unwrap();
        SpillDirectory::join(parent.path(), "c").unwrap_err();
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    }

    #[test]
    fn an_existing_spill_file_is_refused_and_keeps_its_bytes() {
        let parent = tempfile::tempdir().unwrap();
        let own = Arc::new(SpillDirectory::join(parent.path(), "a").unwrap());
        let file = SpillFile::create(&own, 0, "param", IoPath::Mapped).unwrap();
        let path = own.path().join("rank-0.param");
        let before = fs::read(&path).unwrap();
        // A second process of the same job.
        let other = Arc::new(SpillDirectory::join(parent.path(), "a").unwrap());
        let error = SpillFile::create(&other, 0, "param", IoPath::Mapped).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("another job") && text.contains("tessera-spill-a"),
            "{text}"
        );
        assert_eq!(fs::read(&path).unwrap(), before);
        drop(file);
        drop(SpillFile::create(&other, 0, "param", IoPath::Mapped).unwrap());
    }

    #[test]
    fn a_fifo_named_as_the_lock_is_refused_at_once() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join(format!("{DIRECTORY_PREFIX}a"));
        fs::create_dir(&directory).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(directory.join(LOCK))
            .status();
        assert!(made.unwrap().success());
        let (sender, receiver) = std::sync::mpsc::channel();
        let path = parent.path().to_owned();
        std::thread::spawn(move || {
            let swept = SpillDirectory::sweep(&path).unwrap();
            let error = SpillDirectory::join(&path, "a").unwrap_err();
            sender.send((swept, error.to_string())).unwrap();
        });
        let wait = std::time::Duration::from_secs(20);
        let (swept, error) = receiver.recv_timeout(wait).expect("it does not hang");
        assert!(swept.is_empty() && directory.exists());
        assert!(error.contains("lock"), "{error}");
    }

    #[test]
    fn two_jobs_in_one_directory_leave_each_others_files_alone() {
        let parent = tempfile::tempdir().unwrap();
        let first = SpillDirectory::join(parent.path(), "a").unwrap();
        let other_rank = SpillDirectory::join(parent.path(), "a").unwrap();
        fs::write(first.path().join("rank-0"), [1; 100]).unwrap();
        assert!(SpillDirectory::sweep(parent.path()).unwrap().is_empty());
        let second = SpillDirectory::join(parent.path(), "b").unwrap();
        let (kept, gone) = (first.path().to_owned(), second.path().to_owned());
        drop(second);
        assert!(!gone.exists() && kept.exists());
        drop(first);
        assert!(kept.exists(), "another rank still holds it");
        drop(other_rank);
        assert!(!kept.exists());
    }

    #[test]
    fn directories_of_killed_jobs_are_swept_and_foreign_ones_are_not() {
        let parent = tempfile::tempdir().unwrap();
        let dead = parent.path().join(format!("{DIRECTORY_PREFIX}dead"));
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(LOCK), "").unwrap();
        fs::write(dead.join("rank-0"), [1; 100]).unwrap();
        let foreign = parent.path().join("pictures");
        fs::create_dir(&foreign).unwrap();
        let swept = SpillDirectory::sweep(parent.path()).unwrap();
        assert_eq!(swept, [(dead.clone(), 100)]);
        assert!(!dead.exists() && foreign.exists());
        assert!(
            SpillDirectory::sweep(&parent.path().join("nowhere"))
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn a_file_named_as_the_spill_directory_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        fs::write(parent.path().join(format!("{DIRECTORY_PREFIX}x")), "").unwrap();
        let error = SpillDirectory::join(parent.path(), "x").unwrap_err();
        assert!(error.to_string().contains("create"), "{error}");
    }

    #[test]
    fn joining_during_a_sweep_always_ends_with_an_existing_directory() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path();
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| (0..200).for_each(|_| drop(SpillDirectory::sweep(path).unwrap())));
            }
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..100 {
                        let directory = SpillDirectory::join(path, "x").unwrap();
                        fs::write(directory.path().join("file"), "x").unwrap();
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(path).unwrap().count(), 0);
    }
}
