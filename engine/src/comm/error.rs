//! Errors of collectives, with the facts of every rank involved.

use super::{CollectiveKind, Tag};
use kernels::DType;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Error of a communicator or of one of its collectives.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The rank does not exist in a world of this size, or the world is too large.
    #[error(
        "rank {rank} of a world of {size} ranks (1 to {} are possible)",
        super::MAX_RANKS
    )]
    InvalidWorld {
        /// The rejected rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
    },
    /// The buffer cannot be divided into equal parts of whole elements.
    #[error(
        "{kind} {tag} of {bytes} bytes does not divide into {ranks} parts of whole {dtype} elements"
    )]
    Indivisible {
        /// Kind of the collective.
        kind: CollectiveKind,
        /// Tag of the collective.
        tag: Tag,
        /// Length of the buffer in bytes.
        bytes: usize,
        /// Number of equal parts that the buffer must have.
        ranks: usize,
        /// Type of the buffer's elements.
        dtype: DType,
    },
    /// Sums exist for f32 and f64 only.
    #[error("{kind} {tag} cannot sum {dtype} elements")]
    UnsupportedDType {
        /// Kind of the collective.
        kind: CollectiveKind,
        /// Tag of the collective.
        tag: Tag,
        /// Type of the buffer's elements.
        dtype: DType,
    },
    /// The root of a broadcast is outside the world.
    #[error("{tag}: broadcast from rank {root} in a world of {size} ranks")]
    InvalidRoot {
        /// Tag of the broadcast.
        tag: Tag,
        /// The rejected root.
        root: usize,
        /// Number of ranks in the world.
        size: usize,
    },
    /// The shard groups do not divide the world, or the collective does not support them.
    #[error("{tag}: {kind} in groups of {group} ranks in a world of {size}")]
    InvalidGroup {
        /// Kind of the collective.
        kind: CollectiveKind,
        /// Tag of the collective.
        tag: Tag,
        /// Number of ranks in a shard group.
        group: usize,
        /// Number of ranks in the world.
        size: usize,
    },
    /// The number of pipeline stages does not divide the number of ranks.
    #[error("{size} ranks cannot be divided into {stages} pipeline stages")]
    InvalidMesh {
        /// Number of ranks in the world.
        size: usize,
        /// Number of pipeline stages.
        stages: usize,
    },
    /// A transfer to a neighbor that the pipeline stage does not have.
    #[error("pipeline stage {stage} of {stages} has no neighbor in that direction")]
    NoNeighbor {
        /// Index of the pipeline stage.
        stage: usize,
        /// Number of pipeline stages.
        stages: usize,
    },
    /// A transfer between pipeline stages has more values than its description holds.
    #[error("{values} values cross a boundary between pipeline stages, at most {most} can")]
    TooManyValues {
        /// Number of values.
        values: usize,
        /// Largest number of values.
        most: usize,
    },
    /// The tag's name is longer than a fingerprint can hold.
    #[error("tag name `{name}` is longer than {} bytes", Tag::MAX_NAME_BYTES)]
    TagTooLong {
        /// The rejected name.
        name: &'static str,
    },
    /// The buffer was allocated by another communicator.
    #[error("{tag}: the buffer belongs to another communicator")]
    ForeignBuffer {
        /// Tag of the collective that the buffer was meant for.
        tag: Tag,
    },
    /// This rank's part of the window has too little free memory.
    #[error(
        "no room for {asked_bytes} bytes in the communication window ({in_use_bytes} of {capacity_bytes} bytes in use)"
    )]
    WindowFull {
        /// Number of bytes that were requested.
        asked_bytes: usize,
        /// Bytes held by buffers and tickets.
        in_use_bytes: usize,
        /// Size of this rank's part of the window in bytes.
        capacity_bytes: usize,
    },
    /// Two ranks issued different collectives at the same position of the sequence.
    #[error("collective #{sequence} differs: rank {} issued {}, rank {} issued {}", first.rank, first.op, second.rank, second.op)]
    Mismatch {
        /// Position in the sequence of collectives, from 0.
        sequence: u64,
        /// The rank with the lower index, and its collective.
        first: Box<RankOp>,
        /// The rank with the higher index, and its collective.
        second: Box<RankOp>,
    },
    /// A collective did not finish in time.
    #[error("rank {noticed_by} waited {:.1} s in collective #{sequence}, {op}; last collectives: {}", elapsed.as_secs_f64(), table(ranks))]
    Timeout {
        /// The rank whose wait ran out first.
        noticed_by: usize,
        /// Position, from 0, of the collective in which that rank waited.
        sequence: u64,
        /// The collective in which that rank waited.
        op: Box<OpInfo>,
        /// Time that the rank had waited.
        elapsed: Duration,
        /// Last collective of every rank, in rank order.
        ranks: Vec<RankStatus>,
    },
    /// A rank aborted, or ended before a collective that the others started.
    #[error("rank {by_rank} aborted: {reason}")]
    Aborted {
        /// The rank that aborted or ended.
        by_rank: usize,
        /// Why it aborted or ended, in words.
        reason: String,
    },
    /// A frame between two ranks was changed, repeated or left out on the way.
    #[error("rank {noticed_by} received an altered frame from rank {from} in collective #{sequence}{}", op.as_ref().map_or_else(String::new, |op| format!(", {op}")))]
    Altered {
        /// The rank that received the frame.
        noticed_by: usize,
        /// The rank at the other end of the connection.
        from: usize,
        /// Position, from 0, of the sender's next collective.
        sequence: u64,
        /// That collective, if the receiver had started it.
        op: Option<Box<OpInfo>>,
    },
    /// Not every rank joined in time.
    #[error("ranks {missing:?} did not join within {:.1} s (joined: {arrived:?})", elapsed.as_secs_f64())]
    Rendezvous {
        /// Ranks that joined in time.
        arrived: Vec<usize>,
        /// Ranks that did not join in time.
        missing: Vec<usize>,
        /// Time that this rank waited for the others.
        elapsed: Duration,
    },
    /// Another process joined as the same rank, or a file of an earlier job was found.
    #[error("rank {rank} has already joined {path}")]
    AlreadyJoined {
        /// The rank as which this process wanted to join.
        rank: usize,
        /// Path of the window file.
        path: PathBuf,
    },
    /// Joining was ended by the caller's stop flag.
    #[error("stopped while the other ranks were awaited")]
    Stopped,
    /// The ranks disagree about the window, or the file is not a window.
    #[error("window file {path}: {what} is {found}, expected {expected}")]
    WindowConflict {
        /// Path of the window file.
        path: PathBuf,
        /// Name of the property that differs.
        what: &'static str,
        /// Value in the window file.
        found: u64,
        /// Value that this rank expects.
        expected: u64,
    },
    /// A window name must be a plain file name.
    #[error("window name `{name}` must be 1 to 200 letters, digits, `-`, `_` or `.`")]
    InvalidName {
        /// The rejected name.
        name: String,
    },
    /// No directory has enough free space for the window, or for shared weights.
    #[error(
        "no room for {asked_bytes} bytes that the ranks share ({})",
        free_table(tried)
    )]
    NoSpace {
        /// Size of the window, or of the weights, in bytes.
        asked_bytes: u64,
        /// Directories tried, and bytes free in each.
        tried: Vec<(PathBuf, u64)>,
    },
    /// An operating system call failed.
    #[error("cannot {action} {path}")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file of the operation.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

/// Description of one collective that a rank has published to its peers, for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpInfo {
    /// Kind of the collective, e.g. all-gather.
    pub kind: CollectiveKind,
    /// Element type of the collective's buffer.
    pub dtype: DType,
    /// Length in bytes of the buffer on the rank that published the collective.
    pub bytes: usize,
    /// Name in the collective's tag: what it transfers, e.g. `update`.
    pub tag_name: String,
    /// Index in the collective's tag, e.g. that of the unit.
    pub tag_index: u32,
    /// Size of a shard group: number of consecutive ranks that hold one copy of the data as shards. `None` if
    /// all ranks do.
    pub group: Option<usize>,
}

impl std::fmt::Display for OpInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            kind,
            dtype,
            bytes,
            tag_name,
            tag_index,
            group,
        } = self;
        write!(f, "{kind} {tag_name}[{tag_index}] of {bytes} bytes {dtype}")?;
        group.map_or(Ok(()), |ranks| write!(f, " in groups of {ranks}"))
    }
}

/// One side of a mismatch: a rank, and the collective that it issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankOp {
    /// Index of the rank that issued the collective.
    pub rank: usize,
    /// Collective that the rank issued.
    pub op: OpInfo,
}

/// Progress of one rank in its sequence of collectives, for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// Index of the rank whose progress this is.
    pub rank: usize,
    /// Number of collectives that this rank has started.
    pub started: u64,
    /// Collective that this rank started last; `None` before its first.
    pub last: Option<OpInfo>,
}

impl std::fmt::Display for RankStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.last {
            None => write!(f, "rank {}: none", self.rank),
            Some(op) => write!(f, "rank {}: #{} {op}", self.rank, self.started - 1),
        }
    }
}

fn table(ranks: &[RankStatus]) -> String {
    ranks
        .iter()
        .map(RankStatus::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

fn free_table(tried: &[(PathBuf, u64)]) -> String {
    let entry = |(dir, free): &(PathBuf, u64)| format!("{}: {free} bytes free", dir.display());
    tried.iter().map(entry).collect::<Vec<_>>().join("; ")
}
