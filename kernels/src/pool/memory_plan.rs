//! Static memory plan: an offset for each block of a pass, computed from the sizes and lifetimes that a dry run
//! recorded. XLA calls this buffer assignment.
//!
//! An online allocator sees one block at a time. It loses up to a third of the range to holes around the weights of
//! large units. The loss varies so much that a shorter batch may need more memory. The static plan needs only a few
//! percent more than the blocks alive at the same time.

use std::cmp::Reverse;
use std::collections::HashMap;

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
        let blocks = self.blocks;
        let as_seen: Vec<usize> = blocks.iter().map(|block| block.start).collect();
        let end = |starts: &[usize]| {
            let ends = starts.iter().zip(&blocks);
            ends.map(|(start, block)| start + block.lines)
                .max()
                .unwrap_or(0)
        };
        let clock = self.clock;
        let lived = |block: &Lived| (block.died.min(clock + 1) - block.born) as u128;
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
    // Packed blocks, sorted by start.
    let mut there: Vec<(usize, Lived)> = Vec::with_capacity(blocks.len());
    for at in order {
        let block = blocks[at];
        let mut start = 0;
        for (first, other) in &there {
            if other.born < block.died && block.born < other.died {
                if *first >= start + block.lines {
                    break;
                }
                start = start.max(first + other.lines);
            }
        }
        let before = there.partition_point(|(first, _)| *first <= start);
        there.insert(before, (start, block));
        starts[at] = start;
    }
    starts
}

/// Whether blocks with overlapping lifetimes never share a line.
fn is_disjoint(blocks: &[Lived], starts: &[usize]) -> bool {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|at| starts[*at]);
    order.iter().enumerate().all(|(k, at)| {
        let (one, end) = (&blocks[*at], starts[*at] + blocks[*at].lines);
        let above = order[k + 1..].iter();
        let mut near = above.take_while(|other| starts[**other] < end);
        near.all(|other| blocks[*other].born >= one.died || one.born >= blocks[*other].died)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
            let blocks = recorder.blocks.clone();
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
