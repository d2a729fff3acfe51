//! Disk queue of a rank: threads that prefetch and write asynchronously.

use super::Result;
use super::file::Extent;
use super::io_buffer::{IoBuffer, IoBufferPool};
use super::queue::{Book, Requests, SpillStats};
use crate::error::SpillError;
use crate::plan::blocks::{RESERVED_SEGMENTS, SEGMENT_BYTES, io_buffers};
use crate::trace::{Lane, Trace};
use crossbeam::channel::{Receiver, Sender, bounded};
use kernels::Pool;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// Maximal number of requests in flight. Disks reach their full rate at a queue depth of 16.
const THREADS: usize = 16;

#[derive(Debug)]
struct Shared {
    book: Book<SpillError>,
    trace: OnceLock<Trace>,
}

enum DiskRequest {
    Read {
        extent: Extent,
        order: u64,
        io_buffer: IoBuffer,
        reply: Sender<Result<IoBuffer>>,
    },
    Write {
        extent: Extent,
        id: u64,
        io_buffer: IoBuffer,
    },
}

/// Handle of a read from a spill file that was requested and may still run.
#[derive(Debug)]
pub struct PendingRead(Receiver<Result<IoBuffer>>);

impl PendingRead {
    /// Waits until the read has ended, and returns a buffer with the bytes.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn wait(self) -> Result<IoBuffer> {
        self.0.recv().map_err(|_| SpillError::Closed)?
    }
}

/// The disk queue of one rank: threads that read and write its spill files.
#[derive(Debug)]
pub struct SpillIo {
    io_buffers: Arc<IoBufferPool>,
    jobs: Requests<DiskRequest>,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl SpillIo {
    /// Creates a disk queue with its threads and about `buffer_bytes` of buffers (at least 16 MiB), which the
    /// pool `host` counts.
    ///
    /// # Errors
    /// When the host pool or the system has no memory.
    pub fn new(buffer_bytes: u64, host: &Pool) -> Result<Self, crate::error::EngineError> {
        let io_buffers = IoBufferPool::new(io_buffers(buffer_bytes), host)?;
        let (jobs, queue) = Requests::<DiskRequest>::new();
        let shared = Arc::new(Shared {
            book: Book::new(),
            trace: OnceLock::new(),
        });
        let mut threads = Vec::with_capacity(THREADS);
        for i in 0..THREADS {
            let (queue, shared) = (queue.clone(), shared.clone());
            let thread = std::thread::Builder::new()
                .name(format!("spill-{i}"))
                .stack_size(128 << 10)
                .spawn(move || queue.iter().for_each(|job| run(job, &shared, i as u16)))
                .map_err(SpillError::io("start a thread for", "spill files"))?;
            threads.push(thread);
        }
        Ok(Self {
            io_buffers,
            jobs,
            threads,
            shared,
        })
    }

    /// Bytes and busy time of the requests to this disk queue since it was created.
    #[must_use]
    pub fn stats(&self) -> SpillStats {
        self.shared.book.stats()
    }

    /// Records requests to `trace` from now on. Later calls have no effect.
    pub(crate) fn record(&self, trace: &Trace) {
        self.shared.trace.get_or_init(|| trace.clone());
    }

    /// Submits the request that `numbered` makes. `numbered` assigns its place in the order of writes.
    fn submit(&self, writes: usize, numbered: impl FnOnce() -> DiskRequest) -> Result<()> {
        self.shared.book.begin(writes);
        match self.jobs.submit(numbered) {
            true => Ok(()),
            false => Err(SpillError::Closed),
        }
    }

    /// Starts to read the bytes `range` of the extent. The disk blocks of the range must fit in one buffer of
    /// [`SEGMENT_BYTES`]. Waits for a free buffer.
    ///
    /// # Errors
    /// When an earlier write failed.
    pub fn read(&self, extent: &Extent, range: Range<u64>) -> Result<PendingRead> {
        self.check()?;
        self.read_into(self.io_buffers.take(), extent, range)
    }

    /// Starts to read the bytes `range` of the extent as a prefetch. Returns `None` instead of waiting if few
    /// buffers are free.
    ///
    /// # Errors
    /// When an earlier write failed.
    pub fn read_ahead(&self, extent: &Extent, range: Range<u64>) -> Result<Option<PendingRead>> {
        self.check()?;
        match self.io_buffers.try_take(RESERVED_SEGMENTS) {
            Some(io_buffer) => self.read_into(io_buffer, extent, range).map(Some),
            None => Ok(None),
        }
    }

    fn read_into(
        &self,
        mut io_buffer: IoBuffer,
        extent: &Extent,
        range: Range<u64>,
    ) -> Result<PendingRead> {
        let (reply, result) = bounded(1);
        place(&mut io_buffer, extent, &range);
        self.submit(0, || DiskRequest::Read {
            extent: extent.clone(),
            order: extent.writes().order(),
            io_buffer,
            reply,
        })?;
        Ok(PendingRead(result))
    }

    /// Returns a buffer in which the caller writes the new bytes `range` of the extent. If the disk blocks of
    /// the range also contain other bytes of the extent, the blocks are read first.
    ///
    /// # Errors
    /// When an earlier write failed.
    pub fn fresh(&self, extent: &Extent, range: Range<u64>) -> Result<IoBuffer> {
        if extent.shares_blocks(&range) {
            return self.read(extent, range)?.wait();
        }
        self.check()?;
        let mut io_buffer = self.io_buffers.take();
        place(&mut io_buffer, extent, &range);
        // No range owns the rest of the blocks.
        if io_buffer.is_partial() {
            let (start, len) = (io_buffer.start, io_buffer.len);
            let blocks = io_buffer.blocks_mut();
            blocks[..start].fill(0);
            blocks[start + len..].fill(0);
        }
        Ok(io_buffer)
    }

    /// Assigns the bytes in `io_buffer` to `range` of another extent, so that [`SpillIo::write`] writes them
    /// there. They are copied only if their offset in a disk block differs, or if blocks also contain other
    /// bytes.
    ///
    /// # Errors
    /// When an earlier write failed.
    pub fn moved(
        &self,
        mut io_buffer: IoBuffer,
        extent: &Extent,
        range: Range<u64>,
    ) -> Result<IoBuffer> {
        if extent.blocks(&range).1 == io_buffer.start && !extent.shares_blocks(&range) {
            place(&mut io_buffer, extent, &range);
            return Ok(io_buffer);
        }
        let mut fresh = self.fresh(extent, range)?;
        fresh.as_bytes_mut().copy_from_slice(io_buffer.as_bytes());
        Ok(fresh)
    }

    /// Starts to write the buffer `io_buffer` to its range of the extent. A later call returns the error if
    /// the write fails.
    ///
    /// # Errors
    /// When an earlier write failed.
    pub fn write(&self, extent: &Extent, io_buffer: IoBuffer) -> Result<()> {
        self.check()?;
        self.submit(1, || DiskRequest::Write {
            extent: extent.clone(),
            id: extent.writes().note(io_buffer.blocks.clone()),
            io_buffer,
        })
    }

    /// Reads bytes of the extent, from byte `offset` on, into `out` until it is full. Waits for them.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn copy_out(&self, extent: &Extent, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut pieces = pieces(extent, offset, out.len()).into_iter();
        let mut ahead: VecDeque<PendingRead> = VecDeque::new();
        let mut at = 0;
        let mut first = pieces.next();
        while first.is_some() || !ahead.is_empty() {
            while let Some(piece) = first.clone() {
                let read = if ahead.is_empty() {
                    Some(self.read(extent, piece)?)
                } else {
                    self.read_ahead(extent, piece)?
                };
                let Some(read) = read else {
                    break;
                };
                ahead.push_back(read);
                first = pieces.next();
            }
            if let Some(read) = ahead.pop_front() {
                let io_buffer = read.wait()?;
                let bytes = io_buffer.as_bytes();
                out[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            }
        }
        Ok(())
    }

    /// Copies `bytes` to buffers and starts to write them to the extent, from byte `offset` on.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn copy_in(&self, extent: &Extent, offset: u64, bytes: &[u8]) -> Result<()> {
        for piece in pieces(extent, offset, bytes.len()) {
            let mut io_buffer = self.fresh(extent, piece.clone())?;
            let own = (piece.start - offset) as usize..(piece.end - offset) as usize;
            io_buffer.as_bytes_mut().copy_from_slice(&bytes[own]);
            self.write(extent, io_buffer)?;
        }
        Ok(())
    }

    /// Waits until all writes that were started have ended.
    ///
    /// # Errors
    /// When a write failed.
    pub fn flush(&self) -> Result<()> {
        self.shared.book.wait_for_writes();
        self.check()
    }

    /// Returns the first failure of a write, once.
    fn check(&self) -> Result<()> {
        match self.shared.book.take_failure() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}

impl Drop for SpillIo {
    fn drop(&mut self) {
        self.jobs.close();
        for thread in self.threads.drain(..) {
            // A thread that panicked dropped its request, which its caller has noticed.
            thread.join().ok();
        }
    }
}

fn place(io_buffer: &mut IoBuffer, extent: &Extent, range: &Range<u64>) {
    let (blocks, start) = extent.blocks(range);
    debug_assert!(blocks.end - blocks.start <= SEGMENT_BYTES as u64);
    io_buffer.start = start;
    io_buffer.len = (range.end - range.start) as usize;
    io_buffer.blocks = blocks;
}

/// Divides `len` bytes at `offset` into ranges that fit a segment.
fn pieces(extent: &Extent, offset: u64, len: usize) -> Vec<Range<u64>> {
    let end = offset + len as u64;
    let mut pieces = Vec::new();
    let mut start = offset;
    while start < end {
        let stop = extent.piece_end(start, end, SEGMENT_BYTES as u64);
        pieces.push(start..stop);
        start = stop;
    }
    pieces
}

fn run(job: DiskRequest, shared: &Shared, thread: u16) {
    let trace = shared.trace.get();
    let lane = Lane::Disk(thread);
    match job {
        DiskRequest::Read {
            extent,
            order,
            mut io_buffer,
            reply,
        } => {
            let blocks = io_buffer.blocks.clone();
            extent.writes().wait_for(order, &blocks);
            let started = trace.and_then(Trace::now);
            let result = extent.read_blocks(&blocks, io_buffer.blocks_mut());
            if let Some(trace) = trace {
                trace.end(started, lane, || "read".into());
            }
            shared.book.end(blocks.end - blocks.start, 0, None);
            // The caller may be gone.
            reply.send(result.map(|()| io_buffer)).ok();
        }
        DiskRequest::Write {
            extent,
            id,
            io_buffer,
        } => {
            let blocks = io_buffer.blocks.clone();
            extent.writes().wait_for(id, &blocks);
            let started = trace.and_then(Trace::now);
            let result = extent.write_blocks(&blocks, io_buffer.block_bytes());
            if let Some(trace) = trace {
                trace.end(started, lane, || "write".into());
            }
            drop(io_buffer);
            extent.writes().end(id);
            shared.book.end(0, blocks.end - blocks.start, result.err());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{IoPath, SpillDirectory, SpillFile};
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    /// Spill files on this machine's disk, one for each supported I/O path.
    fn files(directory: &Arc<SpillDirectory>) -> Vec<SpillFile> {
        [IoPath::Mapped, IoPath::Direct]
            .into_iter()
            .filter_map(|io| SpillFile::create(directory, 0, io.name(), io).ok())
            .collect()
    }

    fn world() -> (tempfile::TempDir, Arc<SpillDirectory>, SpillIo) {
        // The build directory: /tmp may have no direct I/O.
        let exe = std::env::current_exe().unwrap();
        let parent = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
        let directory = Arc::new(SpillDirectory::join(parent.path(), "io").unwrap());
        let io = SpillIo::new(0, &Pool::new("host", None)).unwrap();
        (parent, directory, io)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn any_order_of_reads_and_writes_equals_memory(
            len in 1u64..3_000_000,
            phase in 0u64..4096,
            ops in proptest::collection::vec((any::<bool>(), 0.0..1.0f64, 0.0..1.0f64, any::<u8>()), 1..40),
        ) {
            let (_parent, directory, io) = world();
            for mut file in files(&directory) {
                // Neighbors that must not change.
                let before = file.allocate(5000, 0).unwrap();
                let extent = file.allocate(len, phase).unwrap();
                let after = file.allocate(5000, 100).unwrap();
                for neighbour in [&before, &after] {
                    io.copy_in(neighbour, 0, &[7; 5000]).unwrap();
                }
                let mut memory = vec![0u8; len as usize];
                let mut out = Vec::new();
                for (write, from, part, value) in &ops {
                    let start = (from * len as f64) as usize;
                    let end = start + ((len as usize - start) as f64 * part) as usize;
                    if *write {
                        for (i, byte) in memory[start..end].iter_mut().enumerate() {
                            *byte = value.wrapping_add(i as u8);
                        }
                        io.copy_in(&extent, start as u64, &memory[start..end]).unwrap();
                    } else {
                        out.resize(end - start, 0);
                        io.copy_out(&extent, start as u64, &mut out).unwrap();
                        prop_assert!(out == memory[start..end]);
                    }
                }
                out.resize(memory.len(), 0);
                io.copy_out(&extent, 0, &mut out).unwrap();
                prop_assert!(out == memory);
                for neighbour in [&before, &after] {
                    let mut bytes = [0; 5000];
                    io.copy_out(neighbour, 0, &mut bytes).unwrap();
                    prop_assert_eq!(bytes, [7; 5000]);
                }
                let size = std::fs::metadata(directory.path().join(format!("rank-0.{}", extent.io().name())));
                prop_assert_eq!(size.unwrap().len(), file.bytes());
            }
        }
    }

    #[test]
    fn a_new_extent_is_zero_and_traffic_is_counted() {
        let (_parent, directory, io) = world();
        for mut file in files(&directory) {
            let extent = file.allocate(10_000, 0).unwrap();
            let mut out = vec![1; 10_000];
            let earlier = io.stats();
            io.copy_out(&extent, 0, &mut out).unwrap();
            assert!(out.iter().all(|b| *b == 0));
            io.copy_in(&extent, 0, &out).unwrap();
            io.flush().unwrap();
            let stats = io.stats().since(earlier);
            assert_eq!((stats.read_bytes, stats.written_bytes), (12_288, 12_288));
            assert!(stats.busy > Duration::ZERO && stats.bytes_per_second() > 0.0);
        }
    }

    #[test]
    fn an_extent_larger_than_the_disk_is_refused_at_once() {
        let (_parent, directory, _io) = world();
        let mut file = SpillFile::create(&directory, 0, "big", IoPath::Mapped).unwrap();
        let error = file.allocate(1 << 50, 0).unwrap_err();
        assert!(
            matches!(error, SpillError::NoSpace { asked_bytes, .. } if asked_bytes == 1 << 50)
                || matches!(
                    &error,
                    SpillError::Io {
                        action: "extend",
                        ..
                    }
                ),
            "{error}"
        );
    }

    #[test]
    fn read_ahead_leaves_buffers_for_other_requests() {
        let (_parent, directory, io) = world();
        let mut file = SpillFile::create(&directory, 0, "ahead", IoPath::Mapped).unwrap();
        let extent = file.allocate(1 << 20, 0).unwrap();
        let mut held = Vec::new();
        while let Some(read) = io.read_ahead(&extent, 0..4096).unwrap() {
            held.push(read);
        }
        assert_eq!(held.len(), RESERVED_SEGMENTS);
        // Writers are not stopped by it.
        io.copy_in(&extent, 0, &vec![3; 1 << 20]).unwrap();
        io.flush().unwrap();
        drop(held);
        assert!(io.read_ahead(&extent, 0..4096).unwrap().is_some());
    }
}
