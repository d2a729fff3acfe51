//! Allocator of one rank's part of the window: size classes over a bump pointer.
//!
//! A freed region is reused for its own class first, so that the layout of a training run settles
//! after one step; only when the bump pointer reaches the end are free neighbours merged.

use std::collections::BTreeMap;

/// Alignment of every region.
pub(super) const ALIGN: usize = 64;

/// Up to here classes are powers of two, so that messages of varying length share regions.
pub(super) const SMALL: usize = 4096;

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
}

#[derive(Debug)]
pub(super) struct Arena {
    capacity: usize,
    /// Everything from here on has never been handed out (or was merged back).
    top: usize,
    peak: usize,
    /// Free regions below `top`: bytes by offset.
    free: BTreeMap<usize, usize>,
}

impl Arena {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            top: 0,
            peak: 0,
            free: BTreeMap::new(),
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn peak(&self) -> usize {
        self.peak
    }

    /// Size of the region that serves a request.
    pub(super) fn class(bytes: usize) -> usize {
        match bytes {
            0 => 0,
            1..=SMALL => bytes.next_power_of_two().max(ALIGN),
            _ => bytes.checked_next_multiple_of(ALIGN).unwrap_or(bytes),
        }
    }

    /// A free region of exactly this class.
    pub(super) fn reuse(&mut self, class: usize) -> Option<Region> {
        let (&offset, &bytes) = self.free.iter().find(|&(_, &bytes)| bytes == class)?;
        self.free.remove(&offset);
        Some(Region { offset, bytes })
    }

    /// A region that was never used before.
    pub(super) fn bump(&mut self, class: usize) -> Option<Region> {
        let end = self
            .top
            .checked_add(class)
            .filter(|&end| end <= self.capacity)?;
        let region = Region {
            offset: self.top,
            bytes: class,
        };
        self.top = end;
        self.peak = self.peak.max(end);
        Some(region)
    }

    /// The last resort: merges free neighbours and takes the smallest hole that fits.
    pub(super) fn compact(&mut self, class: usize) -> Option<Region> {
        self.merge();
        let best = self.free.iter().filter(|&(_, &bytes)| bytes >= class);
        let Some((&offset, &bytes)) = best.min_by_key(|&(_, &bytes)| bytes) else {
            return self.bump(class);
        };
        self.free.remove(&offset);
        if bytes > class {
            self.free.insert(offset + class, bytes - class);
        }
        Some(Region {
            offset,
            bytes: class,
        })
    }

    pub(super) fn free(&mut self, region: Region) {
        if region.bytes == 0 {
            return;
        }
        debug_assert!(
            region.end() <= self.top,
            "{region:?} lies above {}",
            self.top
        );
        let twice = self.free.insert(region.offset, region.bytes);
        debug_assert!(twice.is_none(), "{region:?} was freed twice");
    }

    fn merge(&mut self) {
        let mut merged: Vec<Region> = Vec::with_capacity(self.free.len());
        for (&offset, &bytes) in &self.free {
            match merged.last_mut() {
                Some(last) if last.end() == offset => last.bytes += bytes,
                _ => merged.push(Region { offset, bytes }),
            }
        }
        if let Some(&last) = merged.last()
            && last.end() == self.top
        {
            self.top = last.offset;
            merged.pop();
        }
        self.free = merged.into_iter().map(|r| (r.offset, r.bytes)).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn take(arena: &mut Arena, bytes: usize) -> Option<Region> {
        let class = Arena::class(bytes);
        arena
            .reuse(class)
            .or_else(|| arena.bump(class))
            .or_else(|| arena.compact(class))
    }

    #[test]
    fn sizes_are_rounded_up_to_aligned_classes() {
        let classes = [0, 1, 64, 65, 1000, 4096, 4097, 5000].map(Arena::class);
        assert_eq!(classes, [0, 64, 64, 128, 1024, 4096, 4160, 5056]);
    }

    #[test]
    fn a_class_is_reused_before_fresh_memory() {
        let mut arena = Arena::new(1 << 20);
        let a = take(&mut arena, 8192).unwrap();
        let b = take(&mut arena, 10000).unwrap();
        arena.free(a);
        assert_eq!(take(&mut arena, 10000).unwrap().offset, b.end());
        assert_eq!(take(&mut arena, 8192).unwrap(), a);
    }

    #[test]
    fn merged_neighbours_serve_a_larger_request_when_the_end_is_reached() {
        let mut arena = Arena::new(4 * 8192);
        let regions: Vec<_> = (0..4).map(|_| take(&mut arena, 8192).unwrap()).collect();
        assert_eq!(take(&mut arena, 64), None);
        arena.free(regions[1]);
        arena.free(regions[2]);
        assert_eq!(take(&mut arena, 3 * 8192), None);
        assert_eq!(take(&mut arena, 2 * 8192).unwrap().offset, 8192);
        assert_eq!(arena.peak(), 4 * 8192);
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
                } else if let Some(region) = take(&mut arena, bytes) {
                    prop_assert!(region.bytes >= bytes && region.offset % ALIGN == 0);
                    prop_assert!(region.end() <= arena.capacity());
                    for other in &live {
                        prop_assert!(region.end() <= other.offset || other.end() <= region.offset);
                    }
                    live.push(region);
                }
            }
            live.into_iter().for_each(|region| arena.free(region));
            prop_assert_eq!(arena.compact(1 << 17), Some(Region { offset: 0, bytes: 1 << 17 }));
        }
    }
}
