//! What can go wrong with spill files.

use std::io;
use std::path::PathBuf;

/// Failures of spill files and directories.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpillError {
    /// The file system has less room than the states need.
    #[error("{} bytes of spill space are needed in {}, {free_bytes} are free", asked_bytes, path.display())]
    NoSpace {
        /// The spill file.
        path: PathBuf,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes an unprivileged process may still write there.
        free_bytes: u64,
    },
    /// A spill file of this name exists.
    #[error("{} exists: another job uses this directory", path.display())]
    Taken {
        /// The spill file.
        path: PathBuf,
    },
    /// The system refused an operation.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A thread of the disk queue is gone.
    #[error("the disk queue has ended")]
    Closed,
}

impl SpillError {
    /// An [`SpillError::Io`] of `action` on `path`.
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
