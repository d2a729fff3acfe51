//! Static memory plan: an offset for each block of a pass, computed from the sizes and lifetimes that a dry run
//! recorded. XLA calls this buffer assignment.
//!
//! An online allocator sees one block at a time. It loses up to a third of the range to holes around the weights of
//! large units. The loss varies so much that a shorter batch may need more memory. The static plan needs only a few
//! percent more than the blocks alive at the same time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;

/// Recorded block: its size and place, and when it was allocated and freed. Times count allocations and frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lived {
    lines: usize,
    start: usize,
    born: usize,
    died: usize,
}

/// Static memory plan of a recorded sequence of allocations in a device pool: size and offset of each block,
/// in allocation order. Blocks that do not exist at the same time may overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Lines and start of each block. Starts count from the end of the blocks that exist before the pass.
    blocks: Vec<(usize, usize)>,
    lines: usize,
    /// Maximum lines alive at one time, a lower bound of any plan.
    live: usize,
}

impl MemoryPlan {
    /// Length of the plan in bytes, from its start to the highest end of a block: the device memory that its
    /// blocks need.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.lines * super::LINE_BYTES) as u64
    }

    /// Maximum number of bytes in blocks that are allocated at the same time. No plan for these blocks can be
    /// shorter.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        (self.live * super::LINE_BYTES) as u64
    }

    /// Number of lines and first line of block number `at`. `None` past the last block.
    pub(super) fn block(&self, at: usize) -> Option<(usize, usize)> {
        self.blocks.get(at).copied()
    }

    /// Number of blocks (recorded allocations) in the plan.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
}

/// Recorder of the blocks that come and go.
#[derive(Debug)]
pub(super) struct Recorder {
    base: usize,
    clock: usize,
    blocks: Vec<Lived>,
    /// Blocks that were not freed yet: index in `blocks` by first line.
    open: HashMap<usize, usize>,
}

impl Recorder {
    /// Records blocks from the line `base` on.
    pub(super) fn new(base: usize) -> Self {
        Self {
            base,
            clock: 0,
            blocks: Vec::new(),
            open: HashMap::new(),
        }
    }

    pub(super) fn took(&mut self, start: usize, lines: usize) {
        self.clock += 1;
        self.open.insert(start, self.blocks.len());
        self.blocks.push(Lived {
            lines,
            // Holes below the base belong to blocks that outlive the pass. A memory plan does not use them.
            start: start.saturating_sub(self.base),
            born: self.clock,
            died: usize::MAX,
        });
    }

    pub(super) fn gave_back(&mut self, start: usize) {
        self.clock += 1;
        if let Some(at) = self.open.remove(&start) {
            self.blocks[at].died = self.clock;
        }
    }

    /// The shortest of two packings and of the offsets that the blocks had while they were recorded.
    pub(super) fn memory_plan(self) -> MemoryPlan {
        let (mut blocks, end_of_pass) = (self.blocks, self.clock + 1);
        for block in &mut blocks {
            block.died = block.died.min(end_of_pass);
        }
        let as_seen: Vec<usize> = blocks.iter().map(|block| block.start).collect();
        let end = |starts: &[usize]| {
            let ends = starts.iter().zip(&blocks);
            ends.map(|(start, block)| start + block.lines)
                .max()
                .unwrap_or(0)
        };
        let lived = |block: &Lived| (block.died - block.born) as u128;
        let by_size = packed(&blocks, |block| Reverse(block.lines as u128));
        let by_area = packed(&blocks, |block| Reverse(block.lines as u128 * lived(block)));
        let mut best = by_size;
        for other in [by_area, as_seen] {
            if end(&other) < end(&best) && is_disjoint(&blocks, &other) {
                best = other;
            }
        }
        let mut changes: Vec<(usize, isize)> = Vec::with_capacity(2 * blocks.len());
        for block in &blocks {
            changes.push((block.born, block.lines as isize));
            changes.push((block.died, -(block.lines as isize)));
        }
        changes.sort_unstable();
        let (mut now, mut live) = (0, 0);
        for (_, change) in changes {
            now += change;
            live = live.max(now);
        }
        MemoryPlan {
            lines: end(&best),
            live: live.unsigned_abs(),
            blocks: blocks.iter().map(|block| block.lines).zip(best).collect(),
        }
    }
}

/// First-fit packing: takes blocks in the order of `key` and gives each the lowest offset that no earlier block with
/// an overlapping lifetime uses.
fn packed<K: Ord>(blocks: &[Lived], key: impl Fn(&Lived) -> K) -> Vec<usize> {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|at| (key(&blocks[*at]), blocks[*at].born));
    let mut starts = vec![0; blocks.len()];
    let mut packed = Packed::new(blocks);
    for at in order {
        let block = blocks[at];
        let mut start = 0;
        for (first, end) in packed.beside(&block) {
            if first >= start + block.lines {
                break;
            }
            start = start.max(end);
        }
        packed.add(start, block);
        starts[at] = start;
    }
    starts
}

/// Packed blocks with their starts, by spans of time. Most blocks of a pass live shortly, so a block overlaps with few of
/// all blocks, and those are in its spans.
struct Packed {
    spans: Vec<Vec<(usize, Lived)>>,
}

impl Packed {
    /// Allocations and frees of a span.
    const SPAN: usize = 64;

    fn new(blocks: &[Lived]) -> Self {
        let last = blocks.iter().map(|block| block.died).max().unwrap_or(0);
        Self {
            spans: vec![Vec::new(); last / Self::SPAN + 1],
        }
    }

    /// First and last line of the packed blocks whose lifetimes overlap with that of `block`, by their first lines.
    /// Blocks of several spans may come more than once.
    fn beside(&self, block: &Lived) -> Vec<(usize, usize)> {
        let all = self.spans[Self::spans(block)].iter().flatten();
        let beside = all.filter(|(_, other)| other.born < block.died && block.born < other.died);
        let mut beside: Vec<_> = beside
            .map(|(first, other)| (*first, first + other.lines))
            .collect();
        beside.sort_unstable();
        beside
    }

    fn add(&mut self, start: usize, block: Lived) {
        for span in &mut self.spans[Self::spans(&block)] {
            span.push((start, block));
        }
    }

    fn spans(block: &Lived) -> RangeInclusive<usize> {
        block.born / Self::SPAN..=block.died / Self::SPAN
    }
}

/// Whether blocks with overlapping lifetimes never share a line.
fn is_disjoint(blocks: &[Lived], starts: &[usize]) -> bool {
    // Time, whether the block comes, and its number: blocks go before others come.
    let mut changes: Vec<(usize, bool, usize)> = Vec::with_capacity(2 * blocks.len());
    for (at, block) in blocks.iter().enumerate() {
        changes.extend([(block.born, true, at), (block.died, false, at)]);
    }
    changes.sort_unstable();
    let mut live: BTreeMap<usize, usize> = BTreeMap::new();
    changes.into_iter().all(|(_, comes, at)| {
        let (start, end) = (starts[at], starts[at] + blocks[at].lines);
        if !comes {
            live.remove(&start);
            return true;
        }
        let before = live.range(..end).next_back();
        let free = before.is_none_or(|(_, end)| *end <= start);
        free && live.insert(start, end).is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// First-fit packing that looks at every packed block.
    fn packed_plainly(blocks: &[Lived]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_by_key(|at| (Reverse(blocks[*at].lines), blocks[*at].born));
        let mut starts = vec![0; blocks.len()];
        for (k, at) in order.iter().enumerate() {
            let block = blocks[*at];
            let together = |other: &Lived| other.born < block.died && block.born < other.died;
            let before = order[..k].iter().map(|at| (starts[*at], blocks[*at]));
            let mut beside: Vec<_> = before.filter(|(_, other)| together(other)).collect();
            beside.sort_by_key(|(first, _)| *first);
            let mut start = 0;
            for (first, other) in beside {
                if first < start + block.lines {
                    start = start.max(first + other.lines);
                }
            }
            starts[*at] = start;
        }
        starts
    }

    #[test]
    fn blocks_of_one_time_and_line_are_not_disjoint() {
        let block = |born, died| Lived {
            lines: 10,
            start: 0,
            born,
            died,
        };
        let blocks = [block(1, 4), block(2, 3), block(4, 5)];
        for (starts, disjoint) in [
            ([0, 10, 0], true),
            ([5, 15, 0], true),
            ([0, 9, 0], false),
            ([9, 0, 0], false),
            ([0, 0, 0], false),
        ] {
            assert_eq!(is_disjoint(&blocks, &starts), disjoint, "{starts:?}");
        }
    }

    proptest! {
        #[test]
        fn blocks_that_are_live_together_never_overlap(
            steps in prop::collection::vec((1usize..3000, any::<prop::sample::Index>(), any::<bool>()), 1..150)
        ) {
            // Recorded offsets are consecutive, so no reuse happens in them.
            let mut recorder = Recorder::new(0);
            let (mut live, mut next) = (Vec::new(), 0);
            for (lines, which, release) in steps {
                if release && !live.is_empty() {
                    recorder.gave_back(live.swap_remove(which.index(live.len())));
                } else {
                    recorder.took(next, lines);
                    live.push(next);
                    next += lines;
                }
            }
            let mut blocks = recorder.blocks.clone();
            for block in &mut blocks {
                block.died = block.died.min(recorder.clock + 1);
            }
            let by_size = packed(&blocks, |block| Reverse(block.lines));
            prop_assert_eq!(by_size, packed_plainly(&blocks));
            let memory_plan = recorder.memory_plan();
            let starts: Vec<usize> = memory_plan.blocks.iter().map(|(_, start)| *start).collect();
            prop_assert!(is_disjoint(&blocks, &starts));
            for (i, one) in blocks.iter().enumerate() {
                for (j, other) in blocks.iter().enumerate().skip(i + 1) {
                    let together = one.born < other.died && other.born < one.died;
                    let shared = starts[i] < starts[j] + other.lines && starts[j] < starts[i] + one.lines;
                    prop_assert!(!(together && shared), "{one:?} {other:?}");
                }
            }
            prop_assert!(memory_plan.live <= memory_plan.lines && memory_plan.lines <= next);
        }
    }

    /// An online allocator leaves a hole in front of a long block; the plan does not.
    #[test]
    fn a_memory_plan_leaves_no_hole_before_a_long_block() {
        let mut recorder = Recorder::new(7);
        // Short, long, the short one is freed, a longer one comes.
        recorder.took(7, 10);
        recorder.took(17, 100);
        recorder.gave_back(7);
        recorder.took(117, 50);
        let memory_plan = recorder.memory_plan();
        assert_eq!((memory_plan.lines, memory_plan.live), (150, 150));
        assert_eq!(memory_plan.blocks(), 3);
    }
}
