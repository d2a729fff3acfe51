//! Communicators: collectives over owned buffers, fingerprinted and bounded by deadlines.
//!
//! A [`Communicator`] allocates its own memory ([`Buffer`]). [`Communicator::start`] takes a buffer and returns a
//! [`Ticket`]. Waiting for the ticket returns the buffer. Nothing is borrowed while a collective is in flight, so
//! several may overlap with computation without lifetimes or helper threads.
//!
//! Every rank of a world issues the same collectives in the same order. Each has a fingerprint (sequence, kind,
//! element type, length, tag). When two ranks disagree, every rank gets [`CommError::Mismatch`] instead of a
//! hang. Sums run in rank order 0, 1, 2, …, so their bits depend on neither timing nor transport.
//!
//! All transports share one protocol over a byte window, which `README.md` in this directory describes: [`threads`]
//! (ranks of one process), [`shm`] (processes of one machine) and [`tcp`] (several machines, each rank with a copy of
//! the window). A dry run uses the communicator of `dry.rs`, which counts buffers without memory and sends nothing.

mod arena;
mod bell;
mod buffer;
pub(crate) mod dry;
mod endpoint;
mod error;
mod fingerprint;
pub mod mesh;
mod mirror;
#[cfg(feature = "mpi")]
pub mod mpi;
mod op;
mod reduce;
mod ring;
pub(crate) mod shared;
pub mod shm;
pub mod tcp;
pub mod threads;
mod ticket;
mod window;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod process_tests;

pub use buffer::{Buffer, ReadBuffer};
pub use dry::{WindowBytes, control_bytes};
pub use endpoint::cores_at_start;
pub use error::{CommError, OpInfo, RankOp, RankStatus};
pub use ticket::Ticket;

use kernels::DType;
use std::time::Duration;

/// Default deadline: longest time that one wait in a collective may take before it fails with
/// [`CommError::Timeout`].
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

/// Largest number of ranks that one communicator can have.
pub const MAX_RANKS: usize = 64;

/// Index of this rank, and the number of all ranks (world size).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct World {
    /// Index of this rank, `0..size`.
    pub rank: usize,
    /// Number of ranks in the world.
    pub size: usize,
}

impl World {
    /// World of a single rank: rank 0 of 1.
    pub const SINGLE: Self = Self { rank: 0, size: 1 };

    /// Indices of all other ranks, ascending.
    pub fn peers(self) -> impl Iterator<Item = usize> {
        (0..self.size).filter(move |&rank| rank != self.rank)
    }

    /// Index of this rank in its shard group, and the group's size. A shard group is `group` consecutive
    /// ranks that hold one copy of the data as shards. With `None` all ranks form one group.
    #[must_use]
    pub fn in_group(self, group: Option<usize>) -> Self {
        let size = group.unwrap_or(self.size);
        let rank = self.rank % size;
        Self { rank, size }
    }

    fn check(self) -> Result<(), CommError> {
        if self.rank < self.size && self.size <= MAX_RANKS {
            Ok(())
        } else {
            Err(CommError::InvalidWorld {
                rank: self.rank,
                size: self.size,
            })
        }
    }
}

/// Tag of a collective: its name and index, which ranks compare and error messages show as `name[index]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Name of what the collective transfers, e.g. `update`; at most [`Tag::MAX_NAME_BYTES`] bytes.
    pub name: &'static str,
    /// Index of the unit, bucket or step to which the transferred data belongs.
    pub index: u32,
}

impl Tag {
    /// Largest length of a tag's name in bytes: the space for it in the fingerprint that ranks compare.
    pub const MAX_NAME_BYTES: usize = 24;

    /// Creates a tag, which error messages show as `name[index]`.
    #[must_use]
    pub const fn new(name: &'static str, index: u32) -> Self {
        Self { name, index }
    }
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]", self.name, self.index)
    }
}

/// Kind of a collective. It works in place on a buffer of `bytes` bytes on each of `n` ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// All-gather. Before: the rank's own part, at offset `rank * bytes / n`. After: every rank's part at its
    /// offset.
    AllGather,
    /// Reduce-scatter of `f32` or `f64`. Before: `bytes` bytes on every rank. After: the rank's own part is
    /// the sum over ranks, added in rank order; the other parts are unspecified.
    ReduceScatter,
    /// All-reduce of `f32` or `f64`, of any length. Before: `bytes` bytes on every rank. After: the sum over
    /// ranks, added in rank order.
    AllReduce,
    /// Broadcast. Before: the bytes of the root. After: the same bytes on every rank.
    Broadcast {
        /// The rank whose bytes are sent.
        root: usize,
    },
    /// Barrier: waits until every rank has arrived. The buffer is not touched.
    Barrier,
}

impl CollectiveKind {
    /// Whether the collective sums over ranks.
    fn sums(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllReduce)
    }
}

impl std::fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AllGather => f.write_str("all-gather"),
            Self::ReduceScatter => f.write_str("reduce-scatter"),
            Self::AllReduce => f.write_str("all-reduce"),
            Self::Broadcast { root } => write!(f, "broadcast from rank {root}"),
            Self::Barrier => f.write_str("barrier"),
        }
    }
}

/// Whether this rank needs the result of a collective. Ranks may differ in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Participation {
    /// This rank contributes its data and receives the result.
    #[default]
    Full,
    /// This rank only contributes its data. Nothing is copied into its buffer, whose contents are unspecified
    /// afterwards.
    ContributeOnly,
}

/// Description of one collective. Every rank must issue the same one; only `participation` may differ between
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// Kind of the collective, e.g. all-gather.
    pub kind: CollectiveKind,
    /// Element type of the collective's buffer.
    pub dtype: DType,
    /// Name and index of the collective, which ranks compare and error messages show.
    pub tag: Tag,
    /// Whether this rank needs the result of the collective.
    pub participation: Participation,
    /// Size of a shard group (hybrid sharding): number of consecutive ranks that hold one copy of the data as
    /// shards. With `None` all ranks do. With `Some(k)` the buffer has `k` parts. An all-gather runs within
    /// each shard group. A reduce-scatter sums over all ranks, and each rank of a shard group receives its
    /// part of the sum.
    pub group: Option<usize>,
}

impl Collective {
    /// Describes a collective among all ranks whose result this rank needs.
    #[must_use]
    pub const fn new(kind: CollectiveKind, dtype: DType, tag: Tag) -> Self {
        Self {
            kind,
            dtype,
            tag,
            participation: Participation::Full,
            group: None,
        }
    }

    /// Description of this collective for error messages, with a buffer of `bytes` bytes.
    #[must_use]
    pub fn info(&self, bytes: usize) -> OpInfo {
        OpInfo {
            kind: self.kind,
            dtype: self.dtype,
            bytes,
            tag_name: self.tag.name.to_owned(),
            tag_index: self.tag.index,
            group: self.group,
        }
    }

    /// The same all-gather or reduce-scatter for hybrid sharding, where shard groups of `group` consecutive
    /// ranks hold one copy of the data each. With `None` all ranks are one group.
    #[must_use]
    pub const fn in_groups(mut self, group: Option<usize>) -> Self {
        self.group = group;
        self
    }

    /// The same collective, where this rank contributes its data but does not receive the result.
    #[must_use]
    pub const fn contribute_only(mut self) -> Self {
        self.participation = Participation::ContributeOnly;
        self
    }
}

/// Memory use of one rank's part of the communicator's window (the memory that all ranks share): current,
/// peak and total bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowUsage {
    /// Bytes that buffers and collectives in flight occupy now.
    pub in_use_bytes: usize,
    /// Largest number of bytes in use at once so far, with padding and gaps. The operating system has
    /// provided memory for these.
    pub peak_bytes: usize,
    /// Size in bytes of this rank's part of the window (the memory that all ranks share).
    pub capacity_bytes: usize,
}

/// Communicator: the collectives of one process group.
///
/// Every rank calls [`start`](Self::start) for the same collectives in the same order. Tickets (handles of
/// collectives in flight) may be waited for in any order. After [`CommError::Mismatch`],
/// [`CommError::Timeout`] or [`CommError::Aborted`] the communicator is dead on every rank, and each later
/// collective returns the same error.
pub trait Communicator: Send + Sync + std::fmt::Debug {
    /// This rank and the number of ranks.
    fn world(&self) -> World;

    /// A buffer of `bytes` bytes, 64-byte aligned, with unspecified contents.
    ///
    /// May wait until peers have finished reading a region that this rank dropped earlier.
    ///
    /// # Errors
    /// [`CommError::WindowFull`]; while waiting, the errors of a dead communicator.
    fn alloc(&self, bytes: usize) -> Result<Buffer, CommError>;

    /// Starts a collective on `buffer`; peers can read this rank's data at once.
    ///
    /// # Errors
    /// An argument error (indivisible length, element type without a sum, root outside the world,
    /// long tag, buffer of another communicator) or the error of a dead communicator.
    fn start(&self, op: Collective, buffer: Buffer) -> Result<Ticket, CommError>;

    /// Tells every rank that this one cannot continue. All waits end with [`CommError::Aborted`]. The first reason
    /// given is reported, cut to 256 bytes.
    fn abort(&self, reason: &str);

    /// The reason why this communicator is dead, with the last collective of every rank after a timeout; `None` while
    /// it works.
    fn failure(&self) -> Option<CommError>;

    /// Memory use of this rank's part of the window.
    fn memory(&self) -> WindowUsage;

    /// Time that this rank has spent inside collectives so far: waiting for peers, reading their data and summing it.
    fn time_spent(&self) -> Duration;

    /// Longest time that one wait may take.
    fn deadline(&self) -> Duration {
        DEFAULT_DEADLINE
    }

    /// Returns after every rank has called it with the same tag.
    ///
    /// # Errors
    /// As [`Communicator::start`] and [`Ticket::wait`].
    fn barrier(&self, tag: Tag) -> Result<(), CommError> {
        let op = Collective::new(CollectiveKind::Barrier, DType::U8, tag);
        self.start(op, self.alloc(0)?)?.wait_read().map(drop)
    }

    /// Every rank's `value`, in rank order. All ranks pass the same number of elements.
    ///
    /// # Errors
    /// As [`Communicator::start`] and [`Ticket::wait`].
    fn all_gather_f64(&self, value: &[f64], tag: Tag) -> Result<Vec<Vec<f64>>, CommError> {
        let World { rank, size } = self.world();
        let count = value.len();
        let mut buffer = self.alloc(size * size_of_val(value))?;
        buffer.as_mut_slice::<f64>()[rank * count..][..count].copy_from_slice(value);
        let op = Collective::new(CollectiveKind::AllGather, DType::F64, tag);
        let all = self.start(op, buffer)?.wait_read()?;
        let all = all.as_slice::<f64>();
        Ok((0..size)
            .map(|r| all[r * count..][..count].to_vec())
            .collect())
    }

    /// Every rank's bytes, in rank order. Lengths may differ. It is meant for small messages, since every rank
    /// has all of them padded to the longest.
    ///
    /// # Errors
    /// As [`Communicator::start`] and [`Ticket::wait`].
    fn all_gather_bytes(&self, message: &[u8], tag: Tag) -> Result<Vec<Vec<u8>>, CommError> {
        let World { rank, size } = self.world();
        let op = Collective::new(CollectiveKind::AllGather, DType::U8, tag);
        let mut lengths = self.alloc(size * size_of::<u64>())?;
        lengths.as_mut_slice::<u64>()[rank] = message.len() as u64;
        let lengths = self.start(op, lengths)?.wait_read()?;
        let lengths: Vec<usize> = lengths
            .as_slice::<u64>()
            .iter()
            .map(|&bytes| bytes as usize)
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut buffer = self.alloc(size * longest)?;
        buffer.as_bytes_mut()[rank * longest..][..message.len()].copy_from_slice(message);
        let all = self.start(op, buffer)?.wait_read()?;
        let part =
            |(rank, bytes): (usize, &usize)| all.as_bytes()[rank * longest..][..*bytes].to_vec();
        Ok(lengths.iter().enumerate().map(part).collect())
    }
}
