//! State on a disk.
//!
//! A job has one folder, locked while one of its processes lives; each rank has one file per kind of state in it, each
//! region of state one *extent* of a file. Files are sized when the states are allocated, so that a disk that is too
//! small is found before training. Nothing in them outlives the job: they are removed at its end, and folders of jobs
//! that were killed are swept by the next one.
//!
//! All traffic goes through [`SpillIo`]: a bounded pool of page-aligned [`Segment`]s and threads that read ahead and
//! write behind. A read that overlaps a write submitted before it waits for that write, so callers see their own
//! writes. There are two ways to the disk ([`IoPath`]): direct I/O past the page cache, and a memory map.

mod file;
mod folder;
mod io;
mod measure;
mod queue;
mod segment;

pub use crate::error::SpillError;
pub use crate::plan::blocks::{BLOCK_BYTES, SEGMENT_BYTES};
pub use file::{Extent, IoPath, SpillFile};
pub use folder::{FOLDER_PREFIX, SpillFolder};
pub use io::{PendingRead, SpillIo};
pub use measure::{Measured, measure};
pub use queue::SpillStats;
pub use segment::Segment;

pub(crate) type Result<T, E = SpillError> = std::result::Result<T, E>;
