//! Errors of checkpoints.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::write::ProducerError;

/// A checkpoint could not be written, or the files on disk are no intact checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused an operation.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The attempted action.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The disk, or the user's share of it, is full.
    #[error("no space left for {} ({needed_bytes} bytes)", path.display())]
    NoSpace {
        /// The file that did not fit.
        path: PathBuf,
        /// Its full length.
        needed_bytes: u64,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file named by the manifest, or the manifest, does not exist.
    #[error("{} is missing", path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file's length differs from the written one.
    #[error("{} has {found} bytes, the manifest says {expected}", path.display())]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// Bytes according to the manifest.
        expected: u64,
        /// Bytes on disk.
        found: u64,
    },
    /// A file's content differs from the written one.
    #[error("{} is damaged: its hash is {found}, expected {expected}", path.display())]
    HashMismatch {
        /// The file.
        path: PathBuf,
        /// BLAKE3 according to the manifest, in hex.
        expected: String,
        /// BLAKE3 of the bytes on disk, in hex.
        found: String,
    },
    /// A file is not JSON of the expected structure.
    #[error("{} cannot be parsed", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Position and cause.
        #[source]
        source: serde_json::Error,
    },
    /// A file parses but contradicts itself or other files.
    #[error("{} is not valid: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// Another version of the format wrote the directory.
    #[error("{} has format version {found}, this program reads {supported}", path.display())]
    UnsupportedVersion {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version of this program.
        supported: u32,
    },
    /// A path inside a checkpoint must be relative, without `..`, and may not leave the directory through a link.
    #[error("`{path}` is not a path inside the checkpoint")]
    UnsafePath {
        /// The path given.
        path: String,
    },
    /// The pieces of all ranks do not cover a tensor exactly once.
    #[error("{kind} of `{name}` is {problem} at element {element} of {elems}")]
    Coverage {
        /// Kind of the tensor.
        kind: String,
        /// Its name.
        name: String,
        /// What is wrong.
        problem: &'static str,
        /// First affected element.
        element: u64,
        /// Elements of the tensor.
        elems: u64,
    },
    /// A tensor's description is invalid.
    #[error("{kind} of `{name}`: {what}")]
    BadTensor {
        /// Kind of the tensor.
        kind: String,
        /// Its name.
        name: String,
        /// What is wrong.
        what: &'static str,
    },
    /// The checkpoint has no such tensor.
    #[error("the checkpoint holds no {kind} of `{name}`")]
    UnknownTensor {
        /// Kind asked for.
        kind: String,
        /// Name asked for.
        name: String,
    },
    /// A range or buffer does not fit a tensor.
    #[error(
        "{kind} of `{name}`: elements {start}..{end} of {elems} do not fit a buffer of {buffer_bytes} bytes"
    )]
    BadRange {
        /// Kind of the tensor.
        kind: String,
        /// Its name.
        name: String,
        /// First element asked for.
        start: u64,
        /// End of the range asked for.
        end: u64,
        /// Elements of the tensor.
        elems: u64,
        /// Length of the caller's buffer.
        buffer_bytes: usize,
    },
    /// Tensors must be written in the declared order, each with its declared length.
    #[error("{}: wrote {got_bytes} bytes of `{got}` where {expected} follows", path.display())]
    WriteOrder {
        /// The file being written.
        path: PathBuf,
        /// The tensor written.
        got: String,
        /// Bytes of it.
        got_bytes: usize,
        /// The declared tensor and length.
        expected: String,
    },
    /// The producer of a piece's bytes failed.
    #[error("cannot produce {kind} of `{name}`")]
    Producer {
        /// Kind of the tensor.
        kind: String,
        /// Its name.
        name: String,
        /// Error of the producer.
        #[source]
        source: ProducerError,
    },
    /// A rank's index is missing from a save, or belongs to another save.
    #[error("rank {rank} has not finished this checkpoint: {}", path.display())]
    RankIncomplete {
        /// The rank.
        rank: u32,
        /// Its index.
        path: PathBuf,
    },
    /// A directory with the checkpoint's name exists that this program did not write.
    #[error("{} exists and is not a checkpoint of this program", path.display())]
    ForeignDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// A call of the writer was out of order.
    #[error("rank {rank} of {world_size} cannot {action} now")]
    OutOfTurn {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        world_size: u32,
        /// The attempted action.
        action: &'static str,
    },
}

impl CheckpointError {
    /// Wraps an I/O error with the path. A full disk and a missing file have their own variants.
    pub(super) fn io(
        action: &'static str,
        path: &Path,
        needed_bytes: u64,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| {
            let path = path.to_owned();
            match source.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::NoSpace {
                    path,
                    needed_bytes,
                    source,
                },
                _ => Self::Io {
                    action,
                    path,
                    source,
                },
            }
        }
    }

    /// Converts an I/O error while reading `path`: a missing file is `MissingFile`, everything else is `Io`.
    pub(super) fn reading(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            ErrorKind::NotFound => Self::MissingFile {
                path: path.to_owned(),
            },
            _ => Self::Io {
                action: "read",
                path: path.to_owned(),
                source,
            },
        }
    }
}
