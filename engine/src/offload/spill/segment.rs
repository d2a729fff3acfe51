//! Page-aligned buffers of one size, a bounded number of them.
//!
//! They are pieces of one map that asks for huge pages. A request to the disk is a list of stretches of physical
//! memory, and a virtual disk's queue holds a few hundred stretches: of 4 KiB pages one request of 1 MiB fills it, of
//! huge pages sixteen requests fit.
#![expect(unsafe_code, reason = "buffers handed out from one memory map")]

use super::Result;
use super::queue::Free;
use crate::error::SpillError;
use crate::plan::blocks::SEGMENT_BYTES;
use kernels::{Pool, Reservation, Tag};
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::sync::Arc;

/// Huge pages begin at multiples of this.
const HUGE_BYTES: usize = 2 << 20;

/// The segments of one rank.
#[derive(Debug)]
pub(super) struct SegmentPool {
    map: MmapRaw,
    /// Where the first segment begins in the map.
    first: usize,
    free: Free,
    _counted: Reservation,
}

impl SegmentPool {
    /// A pool of `segments` segments, counted as host memory.
    pub(super) fn new(
        segments: usize,
        host: &Pool,
    ) -> Result<Arc<Self>, crate::error::EngineError> {
        let bytes = segments * SEGMENT_BYTES;
        let counted = host.reserve(bytes as u64, Tag::Workspace)?;
        let map = MmapOptions::new()
            .len(bytes + HUGE_BYTES)
            .map_anon()
            .map(MmapRaw::from)
            .map_err(SpillError::io("map buffers for", "spill files"))?;
        let first = map.as_ptr().align_offset(HUGE_BYTES);
        // A wish: without huge pages everything works, slower.
        map.advise_range(Advice::HugePage, first, bytes).ok();
        Ok(Arc::new(Self {
            map,
            first,
            free: Free::new(segments),
            _counted: counted,
        }))
    }

    /// Waits for a free segment.
    pub(super) fn take(self: &Arc<Self>) -> Segment {
        self.segment(self.free.take())
    }

    /// A segment, if more than `reserve` are free.
    pub(super) fn try_take(self: &Arc<Self>, reserve: usize) -> Option<Segment> {
        let index = self.free.try_take(reserve)?;
        Some(self.segment(index))
    }

    /// `index` has been taken from the list.
    fn segment(self: &Arc<Self>, index: usize) -> Segment {
        Segment {
            index,
            start: 0,
            len: 0,
            blocks: 0..0,
            pool: self.clone(),
        }
    }
}

/// Bytes of an extent on their way from or to the disk, with the rest of the blocks they lie in.
#[derive(Debug)]
pub struct Segment {
    /// Its place in the pool, which nobody else has while this lives.
    index: usize,
    /// Where the bytes asked for begin in the buffer.
    pub(super) start: usize,
    /// How many there are.
    pub(super) len: usize,
    /// The blocks of the extent that the buffer stands for, in bytes.
    pub(super) blocks: std::ops::Range<u64>,
    pool: Arc<SegmentPool>,
}

impl Segment {
    fn at(&self) -> *mut u8 {
        let offset = self.pool.first + self.index * SEGMENT_BYTES;
        self.pool.map.as_mut_ptr().wrapping_add(offset)
    }

    fn buffer(&self) -> &[u8] {
        // SAFETY: the map holds all segments of the pool, which this one keeps; no other segment has this index, and
        // the bytes are borrowed as this is.
        unsafe { std::slice::from_raw_parts(self.at(), SEGMENT_BYTES) }
    }

    fn buffer_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.at(), SEGMENT_BYTES) }
    }

    /// The bytes asked for.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer()[self.start..self.start + self.len]
    }

    /// The bytes asked for, writable.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        let own = self.start..self.start + self.len;
        &mut self.buffer_mut()[own]
    }

    /// The elements asked for.
    #[must_use]
    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self.as_bytes())
    }

    /// The elements asked for, writable.
    #[must_use]
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.as_bytes_mut())
    }

    fn block_len(&self) -> usize {
        (self.blocks.end - self.blocks.start) as usize
    }

    /// Whole blocks, as they are on the disk.
    pub(super) fn blocks_mut(&mut self) -> &mut [u8] {
        let len = self.block_len();
        &mut self.buffer_mut()[..len]
    }

    pub(super) fn block_bytes(&self) -> &[u8] {
        &self.buffer()[..self.block_len()]
    }

    /// Whether bytes of its blocks lie outside of what was asked for.
    pub(super) fn is_partial(&self) -> bool {
        self.len != self.block_len()
    }
}

impl Drop for Segment {
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
        let pool = SegmentPool::new(2, &host).unwrap();
        assert_eq!(host.stats().in_use, 2 * SEGMENT_BYTES as u64);
        let first = pool.take();
        // One is left, and it is reserved.
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
        let pool = SegmentPool::new(5, &Pool::new("host", None)).unwrap();
        let mut all: Vec<_> = (0..5).map(|_| pool.take()).collect();
        assert!(all[0].at().addr().is_multiple_of(HUGE_BYTES));
        for (i, segment) in all.iter_mut().enumerate() {
            assert_eq!(segment.at().addr() % SEGMENT_BYTES, 0);
            segment.buffer_mut().fill(i as u8 + 1);
        }
        for (i, segment) in all.iter().enumerate() {
            assert!(segment.buffer().iter().all(|b| *b == i as u8 + 1));
        }
    }
}
