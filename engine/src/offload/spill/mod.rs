//! State on disk (spill files).
//!
//! A job has one directory, locked while one of its processes lives. In it each rank has one file per kind of state.
//! Each region of state is one *extent* of a file. Files get their size when states are allocated, so a disk that is
//! too small is detected before training. Files never outlive the job: they are removed at its end, and the next job
//! sweeps directories of killed ones.
//!
//! All traffic goes through [`SpillIo`]: a bounded pool of page-aligned [`IoBuffer`]s, and threads that prefetch and
//! write asynchronously. A read that overlaps an earlier submitted write waits for it, so callers see their own
//! writes. The two I/O paths ([`IoPath`]) are direct I/O, which bypasses the page cache, and a memory map.

mod directory;
mod file;
mod io;
mod io_buffer;
mod measure;
mod queue;

pub use crate::error::SpillError;
pub use crate::plan::blocks::{BLOCK_BYTES, SEGMENT_BYTES};
pub use directory::{DIRECTORY_PREFIX, SpillDirectory};
pub use file::{Extent, IoPath, SpillFile};
pub use io::{PendingRead, SpillIo};
pub use io_buffer::IoBuffer;
pub use measure::{Measured, measure};
pub use queue::SpillStats;

pub(crate) type Result<T, E = SpillError> = std::result::Result<T, E>;
