//! Allocator of one rank's part of the window: best fit, with slots of their own for small messages.
//!
//! The offset of a region depends only on the sequence of requests, never on the progress of the peers. A region that
//! peers may still read counts as free here, and its next owner waits for them. So all ranks that run one program have
//! one layout, which is known before the program starts.

use std::collections::{BTreeMap, VecDeque};

/// Alignment in bytes of every allocated region.
pub(super) const ALIGN: usize = 64;
/// Largest request that is rounded up to a power of two and served from a small slot.
const SMALL: usize = 4096;
/// Slots of each small size: the number of messages in flight before one waits for its readers.
const SMALL_PLACES: usize = 8;
const SMALL_CLASSES: usize = (SMALL / ALIGN).ilog2() as usize + 1;
/// Bytes of the small slots at the start of the region, in whole pages.
pub(super) const SMALL_BYTES: usize = (SMALL_PLACES * (2 * SMALL - ALIGN)).next_multiple_of(4096);

/// A piece of a rank's part of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

impl Region {
    pub(super) const EMPTY: Self = Self {
        offset: 0,
        bytes: 0,
    };

    fn end(self) -> usize {
        self.offset + self.bytes
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

#[derive(Debug)]
pub(super) struct Arena {
    /// Bytes after the small slots.
    capacity: usize,
    /// Offset at which the highest region in use ends.
    top: usize,
    peak: usize,
    /// Free ranges, bytes by offset, all below `top`. Adjacent free ranges are merged.
    holes: BTreeMap<usize, usize>,
    /// Free slots of each small size. The one freed longest ago is taken first.
    small: [VecDeque<usize>; SMALL_CLASSES],
}

/// Index of the small size that serves a request, if any.
fn small_class(bytes: usize) -> Option<usize> {
    (bytes <= SMALL).then(|| bytes.div_ceil(ALIGN).next_power_of_two().ilog2() as usize)
}

impl Arena {
    /// An arena of `capacity` bytes after [`SMALL_BYTES`] for small slots.
    pub(super) fn new(capacity: usize) -> Self {
        let mut start = 0;
        let small = std::array::from_fn(|class| {
            let bytes = ALIGN << class;
            let places = (0..SMALL_PLACES).map(|i| start + i * bytes).collect();
            start += SMALL_PLACES * bytes;
            places
        });
        Self {
            capacity,
            top: SMALL_BYTES,
            peak: SMALL_BYTES,
            holes: BTreeMap::new(),
            small,
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Largest extent ever used, in bytes after the small slots.
    pub(super) fn peak(&self) -> usize {
        self.peak - SMALL_BYTES
    }

    /// A region of at least `bytes` bytes; `None` if no free range is long enough.
    pub(super) fn alloc(&mut self, bytes: usize) -> Option<Region> {
        if bytes == 0 {
            return Some(Region::EMPTY);
        }
        if let Some(class) = small_class(bytes)
            && let Some(offset) = self.small[class].pop_front()
        {
            let bytes = ALIGN << class;
            return Some(Region { offset, bytes });
        }
        let bytes = bytes.checked_next_multiple_of(ALIGN)?;
        // There are few free ranges at a time. Of equal ones the first is taken.
        let long_enough = self.holes.iter().filter(|&(_, &len)| len >= bytes);
        let best = long_enough.min_by_key(|&(_, &len)| len);
        let Some((&offset, &len)) = best else {
            return self.extend(bytes);
        };
        self.holes.remove(&offset);
        if len > bytes {
            self.holes.insert(offset + bytes, len - bytes);
        }
        Some(Region { offset, bytes })
    }

    fn extend(&mut self, bytes: usize) -> Option<Region> {
        let offset = self.top;
        let end = offset.checked_add(bytes)?;
        if end - SMALL_BYTES > self.capacity {
            return None;
        }
        self.top = end;
        self.peak = self.peak.max(end);
        Some(Region { offset, bytes })
    }

    pub(super) fn free(&mut self, region: Region) {
        let Region { offset, bytes } = region;
        if bytes == 0 {
            return;
        }
        if offset < SMALL_BYTES {
            let places = small_class(bytes).map(|class| &mut self.small[class]);
            debug_assert!(places.as_ref().is_some_and(|p| !p.contains(&offset)));
            return places.into_iter().for_each(|p| p.push_back(offset));
        }
        let (mut start, mut end) = (offset, region.end());
        debug_assert!(end <= self.top, "{region:?} lies above {}", self.top);
        if let Some((&before, &len)) = self.holes.range(..offset).next_back() {
            debug_assert!(before + len <= offset, "{region:?} was freed twice");
            if before + len == offset {
                self.holes.remove(&before);
                start = before;
            }
        }
        if let Some(&len) = self.holes.get(&end) {
            self.holes.remove(&end);
            end += len;
        }
        if end == self.top {
            self.top = start;
        } else {
            self.holes.insert(start, end - start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_requests_have_slots_of_their_own_and_rotate_through_them() {
        let mut arena = Arena::new(1 << 20);
        let sizes = [1, 64, 65, 1000, 4096].map(|bytes| arena.alloc(bytes).unwrap().bytes);
        assert_eq!(sizes, [64, 64, 128, 1024, 4096]);
        assert_eq!(arena.alloc(0).unwrap(), Region::EMPTY);
        assert_eq!(arena.peak(), 0);
        let mut arena = Arena::new(1 << 20);
        let first = arena.alloc(3000).unwrap();
        arena.free(first);
        let others: Vec<_> = (1..SMALL_PLACES)
            .map(|_| arena.alloc(3000).unwrap())
            .collect();
        assert!(!others.contains(&first));
        assert_eq!(arena.alloc(3000).unwrap(), first);
        let beside = arena.alloc(3000).unwrap();
        assert_eq!((beside.offset, beside.bytes), (SMALL_BYTES, 3008));
        arena.free(beside);
        assert_eq!(arena.peak(), 3008);
    }

    #[test]
    fn adjacent_free_ranges_serve_larger_and_smaller_requests() {
        let mut arena = Arena::new(4 * 8192);
        let regions: Vec<_> = (0..4).map(|_| arena.alloc(8192).unwrap()).collect();
        assert_eq!(arena.alloc(5000), None);
        arena.free(regions[1]);
        arena.free(regions[2]);
        assert_eq!(arena.alloc(3 * 8192), None);
        let inside = arena.alloc(5000).unwrap();
        assert_eq!((inside.offset, inside.bytes), (SMALL_BYTES + 8192, 5056));
        arena.free(inside);
        assert_eq!(arena.alloc(2 * 8192).unwrap().offset, SMALL_BYTES + 8192);
        assert_eq!(arena.peak(), 4 * 8192);
    }

    #[test]
    fn the_smallest_free_range_that_fits_is_taken() {
        let mut arena = Arena::new(1 << 20);
        let [wide, _, narrow, _] = [20_000, 5000, 10_000, 5000].map(|b| arena.alloc(b).unwrap());
        arena.free(wide);
        arena.free(narrow);
        assert_eq!(arena.alloc(9000).unwrap().offset, narrow.offset);
        assert_eq!(arena.alloc(9000).unwrap().offset, wide.offset);
    }

    proptest! {
        #[test]
        fn live_regions_never_overlap_and_all_memory_comes_back(
            steps in prop::collection::vec((1usize..20_000, any::<prop::sample::Index>(), any::<bool>()), 1..200)
        ) {
            let mut arena = Arena::new(1 << 17);
            let mut live: Vec<Region> = Vec::new();
            for (bytes, which, release) in steps {
                if release && !live.is_empty() {
                    arena.free(live.swap_remove(which.index(live.len())));
                } else if let Some(region) = arena.alloc(bytes) {
                    prop_assert!(region.bytes >= bytes && region.offset % ALIGN == 0);
                    prop_assert!(region.end() <= SMALL_BYTES + arena.capacity());
                    for other in &live {
                        prop_assert!(!region.overlaps(*other));
                    }
                    live.push(region);
                }
            }
            live.into_iter().for_each(|region| arena.free(region));
            let all = Region { offset: SMALL_BYTES, bytes: 1 << 17 };
            prop_assert_eq!(arena.alloc(1 << 17), Some(all));
        }
    }
}
