//! Ranks that are threads of one process, over anonymous memory.

use super::endpoint::{Endpoint, Member};
use super::window::{Layout, Window};
use super::{CommError, Communicator, DEFAULT_DEADLINE, World};
use memmap2::MmapOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Creates communicators for `size` ranks that are threads of this process, and returns them in rank order. A
/// wait fails after [`DEFAULT_DEADLINE`]. Each rank's part of the shared memory has `region_bytes` bytes, of
/// which only used pages cost memory.
///
/// # Errors
/// [`CommError::InvalidWorld`] or a refused memory map.
pub fn world(size: usize, region_bytes: usize) -> Result<Vec<Arc<dyn Communicator>>, CommError> {
    world_with_deadline(size, region_bytes, DEFAULT_DEADLINE)
}

/// Creates communicators for threads as [`world`] does. A wait fails after `deadline`.
///
/// # Errors
/// As [`world`].
pub fn world_with_deadline(
    size: usize,
    region_bytes: usize,
    deadline: Duration,
) -> Result<Vec<Arc<dyn Communicator>>, CommError> {
    let window = window(size, region_bytes)?;
    let member = |rank| -> Arc<dyn Communicator> {
        let endpoint = Endpoint::new(window.clone(), World { rank, size }, deadline);
        Arc::new(Member(Arc::new(endpoint)))
    };
    Ok((0..size).map(member).collect())
}

/// A window in memory of this process.
pub(super) fn window(size: usize, region_bytes: usize) -> Result<Arc<Window>, CommError> {
    World { rank: 0, size }.check()?;
    let layout = Layout::new(size, region_bytes);
    let map = MmapOptions::new()
        .len(layout.total_bytes())
        .no_reserve_swap()
        .map_anon();
    let map = map.map_err(|source| CommError::Io {
        action: "map",
        path: PathBuf::from("anonymous memory"),
        source,
    })?;
    Ok(Arc::new(Window::new(map.into(), layout)))
}
