//! Segments: a bounded number of page-aligned buffers of one size.
//!
//! They are parts of one memory map that asks for huge pages. A request to the disk is a list of physically
//! contiguous ranges, and the queue of a virtual disk holds a few hundred ranges. With 4 KiB pages one request of 1
//! MiB fills the queue; with huge pages sixteen requests fit.
#![expect(unsafe_code, reason = "buffers handed out from one memory map")]

use super::Result;
use super::queue::Free;
use crate::error::SpillError;
use crate::plan::blocks::SEGMENT_BYTES;
use kernels::{Pool, Reservation, Tag};
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::sync::Arc;

/// Size in bytes of a huge page, to which the memory is aligned.
const HUGE_BYTES: usize = 2 << 20;

/// The pool of segments of one rank.
#[derive(Debug)]
pub(super) struct IoBufferPool {
    map: MmapRaw,
    /// Offset of the first segment in the map.
    first: usize,
    free: Free,
    _counted: Reservation,
}

impl IoBufferPool {
    /// A pool of `io_buffers` segments, counted as host memory.
    pub(super) fn new(
        io_buffers: usize,
        host: &Pool,
    ) -> Result<Arc<Self>, crate::error::EngineError> {
        let bytes = io_buffers * SEGMENT_BYTES;
        let counted = host.reserve(bytes as u64, Tag::Workspace)?;
        let map = MmapOptions::new()
            .len(bytes + HUGE_BYTES)
            .map_anon()
            .map(MmapRaw::from)
            .map_err(SpillError::io("map buffers for", "spill files"))?;
        let first = map.as_ptr().align_offset(HUGE_BYTES);
        // Only a hint: it also works without huge pages, slower.
        map.advise_range(Advice::HugePage, first, bytes).ok();
        Ok(Arc::new(Self {
            map,
            first,
            free: Free::new(io_buffers),
            _counted: counted,
        }))
    }

    /// Takes a free segment; waits until there is one.
    pub(super) fn take(self: &Arc<Self>) -> IoBuffer {
        self.io_buffer(self.free.take())
    }

    /// Takes a segment if more than `reserve` are free.
    pub(super) fn try_take(self: &Arc<Self>, reserve: usize) -> Option<IoBuffer> {
        let index = self.free.try_take(reserve)?;
        Some(self.io_buffer(index))
    }

    /// The segment of `index`, which was taken from the list of free ones.
    fn io_buffer(self: &Arc<Self>, index: usize) -> IoBuffer {
        IoBuffer {
            index,
            start: 0,
            len: 0,
            blocks: 0..0,
            pool: self.clone(),
        }
    }
}

/// Buffer of one disk request: the requested bytes of an extent, extended to whole disk blocks.
#[derive(Debug)]
pub struct IoBuffer {
    /// Its index in the pool, exclusive while it lives.
    index: usize,
    /// Offset of the requested bytes in the buffer.
    pub(super) start: usize,
    /// Number of bytes that the caller requested.
    pub(super) len: usize,
    /// The blocks in the buffer, as a range of bytes in the extent.
    pub(super) blocks: std::ops::Range<u64>,
    pool: Arc<IoBufferPool>,
}

impl IoBuffer {
    fn at(&self) -> *mut u8 {
        let offset = self.pool.first + self.index * SEGMENT_BYTES;
        self.pool.map.as_mut_ptr().wrapping_add(offset)
    }

    fn buffer(&self) -> &[u8] {
        // SAFETY: the map lives as long as the pool, which this segment keeps alive. No other segment has this index,
        // and the bytes are borrowed from `self`.
        unsafe { std::slice::from_raw_parts(self.at(), SEGMENT_BYTES) }
    }

    fn buffer_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, with an exclusive borrow.
        unsafe { std::slice::from_raw_parts_mut(self.at(), SEGMENT_BYTES) }
    }

    /// Requested bytes of the extent, without the rest of their disk blocks.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer()[self.start..self.start + self.len]
    }

    /// Requested bytes of the extent, without the rest of their disk blocks, writable.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        let own = self.start..self.start + self.len;
        &mut self.buffer_mut()[own]
    }

    /// Requested bytes of the extent, as elements of type `T`.
    ///
    /// # Panics
    /// If the bytes are not a whole number of elements, or not aligned for `T`.
    #[must_use]
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.as_bytes())
    }

    /// Requested bytes of the extent, as elements of type `T`, writable.
    ///
    /// # Panics
    /// If the bytes are not a whole number of elements, or not aligned for `T`.
    #[must_use]
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.as_bytes_mut())
    }

    fn block_len(&self) -> usize {
        (self.blocks.end - self.blocks.start) as usize
    }

    /// The whole blocks, as on the disk.
    pub(super) fn blocks_mut(&mut self) -> &mut [u8] {
        let len = self.block_len();
        &mut self.buffer_mut()[..len]
    }

    pub(super) fn block_bytes(&self) -> &[u8] {
        &self.buffer()[..self.block_len()]
    }

    /// Whether its blocks have bytes outside the request.
    pub(super) fn is_partial(&self) -> bool {
        self.len != self.block_len()
    }
}

impl Drop for IoBuffer {
    fn drop(&mut self) {
        self.pool.free.give_back(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_bounded_counted_and_reused() {
        let host = Pool::new("host", None);
        let pool = IoBufferPool::new(2, &host).unwrap();
        assert_eq!(host.stats().in_use, 2 * SEGMENT_BYTES as u64);
        let first = pool.take();
        // One segment is left, and it is reserved.
        assert!(pool.try_take(1).is_none());
        let second = pool.try_take(0).expect("one is left");
        assert!(pool.try_take(0).is_none());
        std::thread::scope(|s| {
            let waiting = s.spawn(|| drop(pool.take()));
            drop(first);
            waiting.join().expect("no panic");
        });
        drop((second, pool));
        assert_eq!(host.stats().in_use, 0);
    }

    #[test]
    fn segments_do_not_overlap_and_start_at_a_huge_page() {
        let pool = IoBufferPool::new(5, &Pool::new("host", None)).unwrap();
        let mut all: Vec<_> = (0..5).map(|_| pool.take()).collect();
        assert!(all[0].at().addr().is_multiple_of(HUGE_BYTES));
        for (i, io_buffer) in all.iter_mut().enumerate() {
            assert_eq!(io_buffer.at().addr() % SEGMENT_BYTES, 0);
            io_buffer.buffer_mut().fill(i as u8 + 1);
        }
        for (i, io_buffer) in all.iter().enumerate() {
            assert!(io_buffer.buffer().iter().all(|b| *b == i as u8 + 1));
        }
    }
}
