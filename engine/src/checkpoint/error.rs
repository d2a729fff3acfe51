//! Errors of checkpoints.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::write::ProducerError;

/// Error of a checkpoint that cannot be written, or whose files on disk are missing or damaged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused an operation.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The operation that failed, such as `read`.
        action: &'static str,
        /// The file or directory of the operation.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The disk, or the user's share of it, is full.
    #[error("no space left for {} ({needed_bytes} bytes)", path.display())]
    NoSpace {
        /// The file that did not fit.
        path: PathBuf,
        /// Length in bytes that the whole file needs.
        needed_bytes: u64,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// A file named by the manifest, or the manifest, does not exist.
    #[error("{} is missing", path.display())]
    MissingFile {
        /// Path of the missing file.
        path: PathBuf,
    },
    /// A file's length differs from the written one.
    #[error("{} has {found} bytes, the manifest says {expected}", path.display())]
    WrongLength {
        /// Path of the file.
        path: PathBuf,
        /// Length in bytes according to the manifest.
        expected: u64,
        /// Length in bytes on disk.
        found: u64,
    },
    /// A file's content differs from the written one.
    #[error("{} is damaged: its hash is {found}, expected {expected}", path.display())]
    HashMismatch {
        /// Path of the file.
        path: PathBuf,
        /// BLAKE3 according to the manifest, in hex.
        expected: String,
        /// BLAKE3 of the bytes on disk, in hex.
        found: String,
    },
    /// A file is not JSON of the expected structure.
    #[error("{} cannot be parsed", path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// The parser's error, with its position in the file.
        #[source]
        source: serde_json::Error,
    },
    /// A file parses but contradicts itself or other files.
    #[error("{} is not valid: {what}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// The contradiction, in words.
        what: &'static str,
    },
    /// Another version of the format wrote the directory.
    #[error("{} has format version {found}, this program reads {supported}", path.display())]
    UnsupportedVersion {
        /// Path of the manifest.
        path: PathBuf,
        /// The format version in the manifest.
        found: u32,
        /// The format version that this program reads.
        supported: u32,
    },
    /// A path inside a checkpoint must be relative, without `..`, and may not leave the directory through a link.
    #[error("`{path}` is not a path inside the checkpoint")]
    UnsafePath {
        /// The rejected path.
        path: String,
    },
    /// The pieces of all ranks do not cover a tensor exactly once.
    #[error("{kind} of `{name}` is {problem} at element {element} of {elems}")]
    Coverage {
        /// Kind of the tensor.
        kind: String,
        /// Name of the tensor.
        name: String,
        /// What is wrong at this element, such as `missing` or `covered twice`.
        problem: &'static str,
        /// Index of the first affected element.
        element: u64,
        /// Number of elements of the tensor.
        elems: u64,
    },
    /// A tensor's description is invalid.
    #[error("{kind} of `{name}`: {what}")]
    BadTensor {
        /// Kind of the tensor.
        kind: String,
        /// Name of the tensor.
        name: String,
        /// What is wrong with the description, in words.
        what: &'static str,
    },
    /// The checkpoint has no such tensor.
    #[error("the checkpoint holds no {kind} of `{name}`")]
    UnknownTensor {
        /// Kind of the tensor that was asked for.
        kind: String,
        /// Name of the tensor that was asked for.
        name: String,
    },
    /// A range or buffer does not fit a tensor.
    #[error(
        "{kind} of `{name}`: elements {start}..{end} of {elems} do not fit a buffer of {buffer_bytes} bytes"
    )]
    BadRange {
        /// Kind of the tensor.
        kind: String,
        /// Name of the tensor.
        name: String,
        /// First element that was asked for.
        start: u64,
        /// End (exclusive) of the range that was asked for.
        end: u64,
        /// Number of elements of the tensor.
        elems: u64,
        /// Length of the caller's buffer in bytes.
        buffer_bytes: usize,
    },
    /// Tensors must be written in the declared order, each with its declared length.
    #[error("{}: wrote {got_bytes} bytes of `{got}` where {expected} follows", path.display())]
    WriteOrder {
        /// Path of the file being written.
        path: PathBuf,
        /// Name of the tensor that was written, or `the end`.
        got: String,
        /// Number of bytes that the caller wrote.
        got_bytes: usize,
        /// The tensor that should have been written, in words.
        expected: String,
    },
    /// The producer of a piece's bytes failed.
    #[error("cannot produce {kind} of `{name}`")]
    Producer {
        /// Kind of the tensor.
        kind: String,
        /// Name of the tensor.
        name: String,
        /// The producer's error.
        #[source]
        source: ProducerError,
    },
    /// A rank's index is missing from a save, or belongs to another save.
    #[error("rank {rank} has not finished this checkpoint: {}", path.display())]
    RankIncomplete {
        /// The rank whose index is missing or belongs to another save.
        rank: u32,
        /// Path of that rank's index.
        path: PathBuf,
    },
    /// A directory with the checkpoint's name exists that this program did not write.
    #[error("{} exists and is not a checkpoint of this program", path.display())]
    ForeignDirectory {
        /// Path of the directory.
        path: PathBuf,
    },
    /// A call of the writer was out of order.
    #[error("rank {rank} of {world_size} cannot {action} now")]
    OutOfTurn {
        /// The rank of the writer.
        rank: u32,
        /// Number of ranks that write the checkpoint.
        world_size: u32,
        /// The call that was out of order.
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
