//! Memory of a pool's segments: anonymous maps, whose pages exist once they are written.
#![expect(
    unsafe_code,
    reason = "blocks are disjoint parts of one map, which the borrow checker cannot see"
)]

use super::allocator::Allocation;
use memmap2::{MmapOptions, MmapRaw};
use std::ops::Range;

/// Bytes per line, the alignment of every block.
pub(super) const LINE_BYTES: usize = 64;

/// One segment of a pool. It is page-aligned, so every line is aligned to 64 bytes.
#[derive(Debug)]
pub(super) struct Mapping(MmapRaw);

impl Mapping {
    pub(super) fn map(lines: usize) -> std::io::Result<Self> {
        let map = MmapOptions::new()
            .len(lines * LINE_BYTES)
            .no_reserve_swap()
            .map_anon()?;
        Ok(Self(map.into()))
    }

    fn range(&self, place: Allocation, len: usize) -> Range<usize> {
        let start = place.start * LINE_BYTES;
        assert!(
            len <= place.lines * LINE_BYTES && start + place.lines * LINE_BYTES <= self.0.len(),
            "{place:?} holds no {len} bytes of a segment of {}",
            self.0.len()
        );
        start..start + len
    }

    /// The first `len` bytes of the range `place`.
    ///
    /// # Safety
    /// Nothing writes them while the slice lives.
    pub(super) unsafe fn bytes(&self, place: Allocation, len: usize) -> &[u8] {
        let range = self.range(place, len);
        // SAFETY: the range is inside the map, which is zero-filled when new and lives as long as `self`. The caller
        // excludes writers.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().add(range.start), len) }
    }

    /// The first `len` bytes of a range, for writing.
    ///
    /// # Safety
    /// Nothing else reads or writes them while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "exclusive access is the caller's promise"
    )]
    pub(super) unsafe fn bytes_mut(&self, place: Allocation, len: usize) -> &mut [u8] {
        let range = self.range(place, len);
        // SAFETY: as in `bytes`; the map is writable and the caller excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().add(range.start), len) }
    }
}
