//! Errors of spill files.

use std::io;
use std::path::PathBuf;

/// Error of spill files (files with offloaded state) and their directories.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpillError {
    /// The file system has less free space than the states need.
    #[error("{} bytes of spill space are needed in {}, {free_bytes} are free", asked_bytes, path.display())]
    NoSpace {
        /// Path of the spill file.
        path: PathBuf,
        /// Number of bytes requested.
        asked_bytes: u64,
        /// Number of bytes available to an unprivileged process.
        free_bytes: u64,
    },
    /// A spill file of this name exists.
    #[error("{} exists: another job uses this directory", path.display())]
    Taken {
        /// Path of the spill file.
        path: PathBuf,
    },
    /// The operating system refused an operation.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file or directory of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The threads of the disk queue have ended.
    #[error("the disk queue has ended")]
    Closed,
}

impl SpillError {
    /// Returns a conversion of I/O errors to [`SpillError::Io`], for `action` on `path`.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
