//! State on disk (spill files).
//!
//! A job has one directory, locked while one of its processes lives. In it each rank has one file per kind of state.
//! Each region of state is one *extent* of a file. Files get their size when states are allocated, so a disk that is
//! too small is detected before training. Files never outlive the job: they are removed at its end, and the next job
//! sweeps directories of killed ones.
//!
//! All traffic goes through [`SpillIo`]: a bounded pool of page-aligned [`Segment`]s, and threads that prefetch and
//! write asynchronously. A read that overlaps an earlier submitted write waits for it, so callers see their own
//! writes. The two I/O paths ([`IoPath`]) are direct I/O, which bypasses the page cache, and a memory map.

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
