//! Allocator of offsets: a memory plan's offset, else the best-fitting hole, else the end of the used range.
//!
//! It is pure bookkeeping in lines of 64 bytes. So the meta device gets the same offsets as a real device, and the
//! pages a run will touch are known before it runs. Adjacent free ranges are merged, so batches of changing lengths
//! reuse the same memory.

use std::collections::{BTreeMap, BTreeSet};

/// Smallest segment, 64 MiB. Pages that no block has used cost nothing.
const SEGMENT_LINES: usize = (64 << 20) / 64;

/// Range of one block, in lines of 64 bytes: the segment, the first line, and the number of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    pub(super) segment: usize,
    pub(super) start: usize,
    pub(super) lines: usize,
}

/// One contiguous range of addresses (a segment), with its free and used lines.
#[derive(Debug)]
struct AddressRange {
    lines: usize,
    /// End of the used range. All lines from here on are free.
    end: usize,
    /// Highest value of `end` so far.
    reached: usize,
    /// Holes below `end`, as length by start. No hole ends at `end`.
    holes: BTreeMap<usize, usize>,
}

/// Allocated and free ranges of all blocks of a pool.
#[derive(Debug, Default)]
pub(super) struct Allocator {
    segments: Vec<AddressRange>,
    /// All holes as (length, segment, start).
    by_size: BTreeSet<(usize, usize, usize)>,
    touched: usize,
    /// Whether the number of segments is fixed, as in an arena.
    fixed: bool,
    /// Blocks at the upper end of an arena: lines by start.
    upper: BTreeMap<usize, usize>,
    /// High-water mark of the lines at the upper end, holes included.
    #[cfg(any(test, feature = "cuda"))]
    upper_reached: usize,
}

impl Allocator {
    /// Allocator of an arena of `lines` lines.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn within(lines: usize) -> Self {
        let whole = AddressRange {
            lines,
            end: 0,
            reached: 0,
            holes: BTreeMap::new(),
        };
        Self {
            segments: vec![whole],
            fixed: true,
            ..Self::default()
        }
    }

    /// Number of 64-byte lines that blocks have occupied so far, holes included. Freeing a block does not reduce it.
    pub(super) fn touched(&self) -> usize {
        self.touched
    }

    /// Length of a segment in lines.
    pub(super) fn segment_lines(&self, segment: usize) -> usize {
        self.segments[segment].lines
    }

    /// The range that a block of `lines` lines would get. It depends only on the blocks in use, not on earlier ones.
    /// So a step that begins like the previous one gets the same offsets.
    fn find(&self, lines: usize) -> Allocation {
        let hole = self.by_size.range((lines, 0, 0)..).next();
        let (segment, start) = match hole {
            Some(&(_, segment, start)) => (segment, start),
            None => {
                let mut ends = self
                    .segments
                    .iter()
                    .map(|s| (s.end, s.lines - self.upper()));
                let fits = ends.position(|(end, all)| end + lines <= all);
                fits.map_or((self.segments.len(), 0), |i| (i, self.segments[i].end))
            }
        };
        Allocation {
            segment,
            start,
            lines,
        }
    }

    fn growth_at(&self, allocation: Allocation) -> usize {
        let reached = self
            .segments
            .get(allocation.segment)
            .map_or(0, |s| s.reached);
        (allocation.start + allocation.lines).saturating_sub(reached)
    }

    /// Lines from the lowest block at the upper end to the end of the arena, holes included.
    fn upper(&self) -> usize {
        let first = self.upper.first_key_value();
        first.map_or(0, |(start, _)| self.segments[0].lines - start)
    }

    /// End of the used range of the first segment, without the blocks at the upper end.
    pub(super) fn end(&self) -> usize {
        self.segments.first().map_or(0, |s| s.end)
    }

    /// Whether the `lines` lines from `start` on are free in an arena.
    pub(super) fn is_free(&self, start: usize, lines: usize) -> bool {
        let Some(segment) = self.segments.first() else {
            return false;
        };
        let end = start + lines;
        if start >= segment.end {
            return end <= segment.lines - self.upper();
        }
        let hole = segment.holes.range(..=start).next_back();
        hole.is_some_and(|(at, len)| end <= at + len)
    }

    /// Lines by which the pool would grow if a block were placed at `start` in an arena.
    pub(super) fn growth_from(&self, start: usize, lines: usize) -> usize {
        self.growth_at(Allocation {
            segment: 0,
            start,
            lines,
        })
    }

    /// Allocates the free range from `start` on in an arena.
    pub(super) fn take_at(&mut self, start: usize, lines: usize) -> Allocation {
        let allocation = Allocation {
            segment: 0,
            start,
            lines,
        };
        self.touched += self.growth_at(allocation);
        let segment = &mut self.segments[0];
        let end = start + lines;
        if start >= segment.end {
            if start > segment.end {
                let (at, len) = (segment.end, start - segment.end);
                segment.holes.insert(at, len);
                self.by_size.insert((len, 0, at));
            }
            segment.end = end;
            segment.reached = segment.reached.max(end);
            return allocation;
        }
        let hole = segment.holes.range(..=start).next_back();
        if let Some((&at, &len)) = hole {
            segment.holes.remove(&at);
            self.by_size.remove(&(len, 0, at));
            for (at, len) in [(at, start - at), (end, at + len - end)] {
                if len > 0 {
                    segment.holes.insert(at, len);
                    self.by_size.insert((len, 0, at));
                }
            }
        }
        allocation
    }

    /// Lines by which the pool would grow for a block at the upper end of an arena. `None` if it does not fit.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn upper_growth(&self, lines: usize) -> Option<usize> {
        let upper = self.upper() + lines;
        let all = self.segments.first()?.lines;
        let fits = upper <= all && self.end() <= all - upper;
        fits.then(|| upper.saturating_sub(self.upper_reached))
    }

    /// Allocates a range at the upper end of an arena, which must have enough free lines.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn take_upper(&mut self, lines: usize) -> Allocation {
        let upper = self.upper() + lines;
        let start = self.segments[0].lines - upper;
        self.upper.insert(start, lines);
        self.touched += upper.saturating_sub(self.upper_reached);
        self.upper_reached = self.upper_reached.max(upper);
        Allocation {
            segment: 0,
            start,
            lines,
        }
    }

    /// Lines by which the pool would grow for a block of `lines` lines. `None` if no free range is long enough.
    pub(super) fn growth(&self, lines: usize) -> Option<usize> {
        let allocation = self.find(lines);
        let there = allocation.segment < self.segments.len() || !self.fixed;
        there.then(|| self.growth_at(allocation))
    }

    /// Allocates `lines` lines, at least 1.
    pub(super) fn take(&mut self, lines: usize) -> Allocation {
        let allocation = self.find(lines);
        self.touched += self.growth_at(allocation);
        if allocation.segment == self.segments.len() {
            let quarter = self.segments.iter().map(|s| s.lines).sum::<usize>() / 4;
            let wanted = lines.max(SEGMENT_LINES).max(quarter);
            self.segments.push(AddressRange {
                lines: wanted.next_multiple_of(SEGMENT_LINES),
                end: 0,
                reached: 0,
                holes: BTreeMap::new(),
            });
        }
        let segment = &mut self.segments[allocation.segment];
        let end = allocation.start + lines;
        if let Some(hole) = segment.holes.remove(&allocation.start) {
            self.by_size
                .remove(&(hole, allocation.segment, allocation.start));
            if hole > lines {
                segment.holes.insert(end, hole - lines);
                self.by_size.insert((hole - lines, allocation.segment, end));
            }
        }
        segment.end = segment.end.max(end);
        segment.reached = segment.reached.max(end);
        allocation
    }

    /// Frees the range of a block and merges it with adjacent free ranges.
    pub(super) fn give_back(&mut self, allocation: Allocation) {
        let Allocation {
            segment: index,
            mut start,
            mut lines,
        } = allocation;
        if self.upper.remove(&start).is_some() {
            return;
        }
        let segment = &mut self.segments[index];
        let before = segment.holes.range(..start).next_back();
        if let Some((&at, &len)) = before
            && at + len == start
        {
            segment.holes.remove(&at);
            self.by_size.remove(&(len, index, at));
            (start, lines) = (at, lines + len);
        }
        if let Some(len) = segment.holes.remove(&(start + lines)) {
            self.by_size.remove(&(len, index, start + lines));
            lines += len;
        }
        if start + lines == segment.end {
            segment.end = start;
        } else {
            segment.holes.insert(start, lines);
            self.by_size.insert((lines, index, start));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn adjacent_freed_blocks_serve_a_longer_block() {
        let mut allocator = Allocator::default();
        let a = allocator.take(10);
        let b = allocator.take(20);
        let c = allocator.take(5);
        allocator.give_back(a);
        allocator.give_back(b);
        assert_eq!(
            (allocator.growth(30), allocator.growth(31)),
            (Some(0), Some(31))
        );
        assert_eq!(allocator.take(28).start, 0);
        allocator.give_back(c);
        // The hole at the end is extended.
        assert_eq!(allocator.growth(8), Some(1));
        assert_eq!(allocator.take(8).start, 28);
        assert_eq!(allocator.touched(), 36);
    }

    #[test]
    fn a_block_too_long_for_the_segment_gets_its_own() {
        let mut allocator = Allocator::default();
        allocator.take(SEGMENT_LINES - 1);
        let long = allocator.take(3 * SEGMENT_LINES);
        assert_eq!((long.segment, long.start), (1, 0));
        assert_eq!(allocator.take(1).segment, 0);
        assert_eq!(allocator.touched(), 4 * SEGMENT_LINES);
    }

    #[test]
    fn a_fixed_range_does_not_grow() {
        let mut allocator = Allocator::within(10);
        let a = allocator.take(4);
        let b = allocator.take(4);
        assert_eq!((allocator.growth(2), allocator.growth(3)), (Some(2), None));
        allocator.give_back(a);
        // Four free lines at the front and two at the back do not fit a block of six.
        assert_eq!((allocator.growth(4), allocator.growth(6)), (Some(0), None));
        allocator.give_back(b);
        assert_eq!(allocator.growth(10), Some(2));
    }

    #[test]
    fn blocks_at_the_upper_end_do_not_move_those_below() {
        let mut allocator = Allocator::within(100);
        let table = allocator.take_upper(10);
        assert_eq!((table.start, allocator.touched()), (90, 10));
        let low = allocator.take(60);
        assert_eq!((low.start, allocator.touched()), (0, 70));
        assert_eq!(
            (allocator.growth(30), allocator.growth(31)),
            (Some(30), None)
        );
        assert_eq!(
            (allocator.upper_growth(30), allocator.upper_growth(31)),
            (Some(30), None)
        );
        // A longer block in place of the old one grows the pool by the difference.
        allocator.give_back(table);
        assert_eq!(allocator.upper_growth(25), Some(15));
        assert_eq!(allocator.take_upper(25).start, 75);
        assert_eq!(allocator.touched(), 85);
        assert!(
            allocator.is_free(60, 15) && !allocator.is_free(60, 16) && !allocator.is_free(59, 2)
        );
    }

    #[test]
    fn a_block_at_a_requested_offset_leaves_the_ranges_around_it_free() {
        let mut allocator = Allocator::within(100);
        let first = allocator.take_at(20, 10);
        assert_eq!((allocator.touched(), allocator.end()), (30, 30));
        assert!(allocator.is_free(0, 20) && !allocator.is_free(0, 21));
        let second = allocator.take_at(5, 10);
        assert!(allocator.is_free(0, 5) && allocator.is_free(15, 5) && !allocator.is_free(14, 2));
        assert_eq!(
            (allocator.growth_from(15, 5), allocator.growth_from(30, 5)),
            (0, 5)
        );
        allocator.give_back(first);
        // Free lines after the last block are not a hole.
        assert_eq!((allocator.end(), allocator.take(80).start), (15, 15));
        allocator.give_back(second);
        assert_eq!(allocator.take(15).start, 0);
    }

    proptest! {
        #[test]
        fn live_blocks_never_overlap_and_repeated_runs_touch_nothing_new(
            steps in prop::collection::vec((1usize..5000, any::<prop::sample::Index>(), any::<bool>()), 1..200)
        ) {
            let mut allocator = Allocator::default();
            let mut touched = Vec::new();
            for _ in 0..3 {
                let mut live: Vec<Allocation> = Vec::new();
                for (lines, which, release) in &steps {
                    if *release && !live.is_empty() {
                        allocator.give_back(live.swap_remove(which.index(live.len())));
                        continue;
                    }
                    let grown = allocator.touched() + allocator.growth(*lines).unwrap();
                    let allocation = allocator.take(*lines);
                    prop_assert_eq!(allocator.touched(), grown);
                    for other in live.iter().filter(|o| o.segment == allocation.segment) {
                        let apart = allocation.start + allocation.lines <= other.start
                            || other.start + other.lines <= allocation.start;
                        prop_assert!(apart, "{allocation:?} {other:?}");
                    }
                    live.push(allocation);
                }
                live.into_iter().for_each(|allocation| allocator.give_back(allocation));
                touched.push(allocator.touched());
            }
            prop_assert_eq!(touched[0], touched[1]);
            prop_assert_eq!(touched[1], touched[2]);
        }
    }
}
