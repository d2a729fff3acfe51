//! Micro-batches by a budget of tokens (`--tokens-per-batch`).
//!
//! A step takes the longest run of samples, in the order of the stream, that fits its micro-batches. Longest first, each
//! goes to the micro-batch with the fewest tokens. The micro-batches with the most tokens are the first, so ranks that
//! work side by side have about as many. All of it depends on the number of micro-batches per step, not on their ranks.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Length of a run whose steps take as many samples as fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Number of steps.
    Steps(u64),
    /// Number of samples that the steps take together, at least.
    Samples(u64),
}

/// Tokens of the samples, and where the steps begin in the stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Budget {
    /// Tokens of each sample.
    tokens: Vec<usize>,
    /// Position of the first sample of each step, and the position after the last step.
    starts: Vec<u64>,
}

impl Budget {
    /// Budget of `most` tokens for each of the `count` micro-batches of a step. `sample` is the sample at a position.
    pub(super) fn new(
        most: usize,
        tokens: Vec<usize>,
        count: usize,
        until: Until,
        sample: impl Fn(u64) -> usize,
    ) -> Self {
        let mut starts = vec![0];
        loop {
            let (steps, start) = (starts.len() as u64 - 1, starts[starts.len() - 1]);
            let ends = match until {
                Until::Steps(wanted) => steps >= wanted,
                Until::Samples(wanted) => start >= wanted && steps > 0,
            };
            if ends {
                return Self { tokens, starts };
            }
            let of = |position| tokens[sample(position)];
            starts.push(start + taken(most, count, (start..).map(of)));
        }
    }

    pub(super) fn steps(&self) -> u64 {
        self.starts.len() as u64 - 1
    }

    /// Number of steps that take the first `samples` samples, at most all.
    pub(super) fn steps_for(&self, samples: u64) -> u64 {
        let steps = self.starts.partition_point(|start| *start < samples) as u64;
        steps.min(self.steps())
    }

    /// Number of samples in the steps before `step`.
    pub(super) fn before(&self, step: u64) -> u64 {
        self.starts[step.min(self.steps()) as usize]
    }

    /// Most samples in one step.
    pub(super) fn largest_step(&self) -> u64 {
        let steps = self.starts.windows(2).map(|ends| ends[1] - ends[0]);
        steps.max().unwrap_or(0)
    }

    /// Positions of the samples in each of the `count` micro-batches of `step`.
    pub(super) fn micro_batches(
        &self,
        step: u64,
        count: usize,
        sample: impl Fn(u64) -> usize,
    ) -> Vec<Vec<u64>> {
        let Range { start, end } = self.before(step)..self.before(step + 1);
        let tokens: Vec<usize> = (start..end).map(|at| self.tokens[sample(at)]).collect();
        let batches = packed(&tokens, count).into_iter();
        batches
            .map(|(_, places)| places.iter().map(|place| start + *place as u64).collect())
            .collect()
    }
}

/// Number of samples that a step takes of the endless `tokens`; at least one.
fn taken(most: usize, count: usize, tokens: impl Iterator<Item = usize>) -> u64 {
    let mut sum = 0;
    let mut run: Vec<usize> = tokens
        .take_while(|tokens| {
            sum += tokens.max(&1);
            sum <= most * count
        })
        .collect();
    let fits = |run: &[usize]| packed(run, count).iter().all(|(load, _)| *load <= most);
    while run.len() > 1 && !fits(&run) {
        run.pop();
    }
    run.len().max(1) as u64
}

/// Tokens and places of the samples of `count` micro-batches, those with the most tokens first.
fn packed(tokens: &[usize], count: usize) -> Vec<(usize, Vec<usize>)> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|place| (Reverse(tokens[*place]), *place));
    let mut loads: BinaryHeap<Reverse<(usize, usize)>> =
        (0..count).map(|batch| Reverse((0, batch))).collect();
    let mut batches = vec![(0, Vec::new()); count];
    for place in order {
        let Some(Reverse((load, batch))) = loads.pop() else {
            break;
        };
        let load = load + tokens[place];
        batches[batch].0 = load;
        batches[batch].1.push(place);
        loads.push(Reverse((load, batch)));
    }
    for (_, places) in &mut batches {
        places.sort_unstable();
    }
    batches.sort_by_key(|(load, _)| Reverse(*load));
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn steps_take_every_sample_in_order_and_no_micro_batch_exceeds_the_budget(
            lengths in prop::collection::vec(1usize..50, 1..60), count in 1usize..7, steps in 1u64..9,
        ) {
            let of = |position: u64| position as usize % lengths.len();
            let budget = Budget::new(50, lengths.clone(), count, Until::Steps(steps), of);
            prop_assert_eq!(budget.steps(), steps);
            let mut all = Vec::new();
            for step in 0..steps {
                let batches = budget.micro_batches(step, count, of);
                prop_assert_eq!(batches.len(), count);
                let loads: Vec<usize> = batches
                    .iter()
                    .map(|batch| batch.iter().map(|at| lengths[of(*at)]).sum())
                    .collect();
                prop_assert!(loads.iter().all(|load| (1..=50).contains(load)), "{:?}", loads);
                prop_assert!(loads.is_sorted_by_key(|load| Reverse(*load)));
                // The next sample would not have fit.
                let next = budget.before(step + 1);
                let more: Vec<usize> =
                    (budget.before(step)..=next).map(|at| lengths[of(at)]).collect();
                let sum: usize = more.iter().sum();
                let over = packed(&more, count).iter().any(|(load, _)| *load > 50);
                prop_assert!(sum > 50 * count || over);
                let mut own: Vec<u64> = batches.concat();
                own.sort_unstable();
                all.extend(own);
            }
            prop_assert_eq!(all, (0..budget.before(steps)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn micro_batches_are_balanced() {
        let loads: Vec<usize> = packed(&[9, 1, 8, 2, 7, 3, 5, 5], 4)
            .iter()
            .map(|(load, _)| *load)
            .collect();
        assert_eq!(loads, [10, 10, 10, 10]);
    }

    #[test]
    fn a_run_of_epochs_ends_with_the_step_that_takes_their_last_sample() {
        let of = |position: u64| position as usize % 3;
        let budget = Budget::new(4, vec![4, 1, 3], 1, Until::Samples(6), of);
        assert_eq!(budget.starts, [0, 1, 3, 4, 6]);
        assert_eq!(
            [1, 3, 4, 9].map(|samples| budget.steps_for(samples)),
            [1, 2, 3, 4]
        );
    }
}
