//! Measurement of a disk's rates with each I/O path.

use super::directory::SpillDirectory;
use super::file::{IoPath, SpillFile};
use super::io::SpillIo;
use crate::error::EngineError;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::plan::blocks::SEGMENT_BYTES;

/// Measured disk rates of one I/O path of spill files.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The I/O path that was measured.
    pub io: IoPath,
    /// Read rate in bytes per second.
    pub read: f64,
    /// Write rate in bytes per second, until the data is on disk.
    pub write: f64,
}

/// Measures the rates at which a file of `bytes` in `directory` is written and read with the I/O path `io`,
/// in requests of the engine's largest size (512 KiB). The file's size is rounded up to whole requests.
/// `None` if the file cannot be created, e.g. on a file system without direct I/O.
///
/// # Errors
/// When the disk fails or is full.
pub fn measure(
    directory: &Arc<SpillDirectory>,
    io: IoPath,
    bytes: u64,
    queue: &SpillIo,
) -> Result<Option<Measured>, EngineError> {
    let name = format!("measure-{}", std::process::id());
    let Ok(mut file) = SpillFile::create(directory, 0, &name, io) else {
        return Ok(None);
    };
    let io_buffer = SEGMENT_BYTES as u64;
    let bytes = bytes.next_multiple_of(io_buffer);
    let extent = file.allocate(bytes, 0)?;
    let ranges = || (0..bytes / io_buffer).map(|i| i * io_buffer..(i + 1) * io_buffer);
    // The first pass is not measured: it turns reserved blocks into written ones, as for states that are overwritten
    // many times, and fills the buffers.
    let mut write = 0.0;
    for pass in 0..2 {
        let started = Instant::now();
        for range in ranges() {
            let mut piece = queue.fresh(&extent, range)?;
            if pass == 0 {
                piece.as_bytes_mut().fill(0x5a);
            }
            queue.write(&extent, piece)?;
        }
        queue.flush()?;
        // Direct I/O reaches the disk without a sync.
        if io == IoPath::Mapped {
            file.sync()?;
        }
        write = bytes as f64 / started.elapsed().as_secs_f64();
    }
    file.forget_cache()?;
    let started = Instant::now();
    let mut ahead = VecDeque::new();
    let mut todo = ranges();
    let mut next = todo.next();
    while next.is_some() || !ahead.is_empty() {
        while let Some(range) = next.clone() {
            let Some(read) = queue.read_ahead(&extent, range)? else {
                break;
            };
            ahead.push_back(read);
            next = todo.next();
        }
        match ahead.pop_front() {
            Some(read) => drop(read.wait()?),
            // Other users hold the buffers, so only one range is read at a time.
            None => {
                if let Some(range) = next.take() {
                    drop(queue.read(&extent, range)?.wait()?);
                    next = todo.next();
                }
            }
        }
    }
    let read = bytes as f64 / started.elapsed().as_secs_f64();
    Ok(Some(Measured { io, read, write }))
}
