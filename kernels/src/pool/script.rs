//! Places for a run of blocks that is known before it begins: sizes and lives come from a dry run, and with both at
//! hand blocks are packed, not placed as they come.
//!
//! A rule that sees one block at a time loses up to a third of the range to holes around the weights of large units,
//! and how much it loses jumps with the batch: a shorter one may need more. Packing comes to within a few hundredths
//! of what lives at once.

use std::cmp::Reverse;
use std::collections::HashMap;

/// A block that came and went; times count both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lived {
    lines: usize,
    start: usize,
    born: usize,
    died: usize,
}

/// Where each block of a known run lies, in the order in which they are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Lines and start of each, from the end of what rests on.
    blocks: Vec<(usize, usize)>,
    lines: usize,
    /// Most lines that live at once: no script is shorter.
    live: usize,
}

impl Script {
    /// Bytes from the first block's beginning to the last one's end.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.lines * super::LINE_BYTES) as u64
    }

    /// Most bytes of blocks that live at once: no places are shorter.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        (self.live * super::LINE_BYTES) as u64
    }

    /// Lines and start of a block.
    pub(super) fn block(&self, at: usize) -> Option<(usize, usize)> {
        self.blocks.get(at).copied()
    }

    /// Blocks of the run.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
}

/// Notes blocks as they come and go.
#[derive(Debug)]
pub(super) struct Recorder {
    base: usize,
    clock: usize,
    blocks: Vec<Lived>,
    /// Those that live, by start.
    open: HashMap<usize, usize>,
}

impl Recorder {
    /// Of blocks from the line `base` on.
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
            // Below the base lie holes of what rests; a script uses none of them.
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

    /// The shortest of several packings, and of the places that the blocks had while they were noted.
    pub(super) fn script(self) -> Script {
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
            if end(&other) < end(&best) && is_apart(&blocks, &other) {
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
        Script {
            lines: end(&best),
            live: live.unsigned_abs(),
            blocks: blocks.iter().map(|block| block.lines).zip(best).collect(),
        }
    }
}

/// The lowest place for each block beside those before it in the order of `key` that live with it.
fn packed<K: Ord>(blocks: &[Lived], key: impl Fn(&Lived) -> K) -> Vec<usize> {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|at| (key(&blocks[*at]), blocks[*at].born));
    let mut starts = vec![0; blocks.len()];
    // By start.
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

/// Whether no two blocks that live together share a line.
fn is_apart(blocks: &[Lived], starts: &[usize]) -> bool {
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
            // As seen: one behind the other, which is no place for anything else.
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
            let script = recorder.script();
            let starts: Vec<usize> = script.blocks.iter().map(|(_, start)| *start).collect();
            prop_assert!(is_apart(&blocks, &starts));
            for (i, one) in blocks.iter().enumerate() {
                for (j, other) in blocks.iter().enumerate().skip(i + 1) {
                    let together = one.born < other.died && other.born < one.died;
                    let shared = starts[i] < starts[j] + other.lines && starts[j] < starts[i] + one.lines;
                    prop_assert!(!(together && shared), "{one:?} {other:?}");
                }
            }
            prop_assert!(script.live <= script.lines && script.lines <= next);
        }
    }

    /// A hole that a rule without foresight leaves in front of a long block.
    #[test]
    fn a_memory_plan_leaves_no_hole_before_a_long_block() {
        let mut recorder = Recorder::new(7);
        // Short, long, the short one goes, a longer one comes.
        recorder.took(7, 10);
        recorder.took(17, 100);
        recorder.gave_back(7);
        recorder.took(117, 50);
        let script = recorder.script();
        assert_eq!((script.lines, script.live), (150, 150));
        assert_eq!(script.blocks(), 3);
    }
}
