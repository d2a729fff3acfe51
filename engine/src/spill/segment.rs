//! Page-aligned buffers of one size, a bounded number of them.

use super::Result;
use super::error::SpillError;
use kernels::{Pool, Reservation, Tag};
use memmap2::MmapMut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of a segment: the largest request to the disk.
pub const SEGMENT_BYTES: usize = 1 << 20;

#[derive(Debug)]
struct Inner {
    free: Vec<MmapMut>,
    /// Segments that may still be mapped.
    unmapped: usize,
}

/// The segments of one rank.
#[derive(Debug)]
pub(super) struct SegmentPool {
    inner: Mutex<Inner>,
    given_back: Condvar,
    _counted: Reservation,
}

impl SegmentPool {
    /// A pool of `segments` segments, counted as host memory.
    pub(super) fn new(segments: usize, host: &Pool) -> Result<Arc<Self>, kernels::KernelError> {
        let bytes = (segments * SEGMENT_BYTES) as u64;
        Ok(Arc::new(Self {
            inner: Mutex::new(Inner {
                free: Vec::new(),
                unmapped: segments,
            }),
            given_back: Condvar::new(),
            _counted: host.reserve(bytes, Tag::Workspace)?,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves a list of buffers, which stays usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free segment.
    pub(super) fn take(self: &Arc<Self>) -> Result<Segment> {
        let mut inner = self.lock();
        loop {
            if let Some(segment) = self.pop(&mut inner)? {
                return Ok(segment);
            }
            inner = self
                .given_back
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A segment, if more than `reserve` are free.
    pub(super) fn try_take(self: &Arc<Self>, reserve: usize) -> Result<Option<Segment>> {
        let mut inner = self.lock();
        if inner.free.len() + inner.unmapped <= reserve {
            return Ok(None);
        }
        self.pop(&mut inner)
    }

    fn pop(self: &Arc<Self>, inner: &mut Inner) -> Result<Option<Segment>> {
        let map = match inner.free.pop() {
            Some(map) => map,
            None if inner.unmapped == 0 => return Ok(None),
            None => {
                let map = MmapMut::map_anon(SEGMENT_BYTES)
                    .map_err(SpillError::io("map a buffer for", "spill files"))?;
                inner.unmapped -= 1;
                map
            }
        };
        Ok(Some(Segment {
            map: Some(map),
            start: 0,
            len: 0,
            blocks: 0..0,
            pool: self.clone(),
        }))
    }
}

/// Bytes of an extent on their way from or to the disk, with the rest of the blocks they lie in.
#[derive(Debug)]
pub struct Segment {
    map: Option<MmapMut>,
    /// Where the bytes asked for begin in the buffer.
    pub(super) start: usize,
    /// How many there are.
    pub(super) len: usize,
    /// The blocks of the extent that the buffer stands for, in bytes.
    pub(super) blocks: std::ops::Range<u64>,
    pool: Arc<SegmentPool>,
}

impl Segment {
    fn map(&self) -> &MmapMut {
        self.map
            .as_ref()
            .expect("a map until the segment is dropped")
    }

    /// The bytes asked for.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.map()[self.start..self.start + self.len]
    }

    /// The bytes asked for, writable.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        let map = self.map.as_mut();
        &mut map.expect("a map until the segment is dropped")[self.start..self.start + self.len]
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

    /// Whole blocks, as they are on the disk.
    pub(super) fn blocks_mut(&mut self) -> &mut [u8] {
        let len = (self.blocks.end - self.blocks.start) as usize;
        &mut self
            .map
            .as_mut()
            .expect("a map until the segment is dropped")[..len]
    }

    pub(super) fn block_bytes(&self) -> &[u8] {
        &self.map()[..(self.blocks.end - self.blocks.start) as usize]
    }

    /// Whether bytes of its blocks lie outside of what was asked for.
    pub(super) fn is_partial(&self) -> bool {
        self.len as u64 != self.blocks.end - self.blocks.start
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Some(map) = self.map.take() {
            self.pool.lock().free.push(map);
            self.pool.given_back.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_bounded_counted_and_reused() {
        let host = Pool::new("host", None);
        let pool = SegmentPool::new(2, &host).unwrap();
        assert_eq!(host.stats().in_use, 2 << 20);
        let first = pool.take().unwrap();
        // One is left, and it is reserved.
        assert!(pool.try_take(1).unwrap().is_none());
        let second = pool.try_take(0).unwrap().expect("one is left");
        assert!(pool.try_take(0).unwrap().is_none());
        let waiting = std::thread::scope(|s| {
            let waiting = s.spawn(|| pool.take().map(drop));
            drop(first);
            waiting.join().expect("no panic")
        });
        waiting.unwrap();
        drop((second, pool));
        assert_eq!(host.stats().in_use, 0);
    }
}
