//! Data order: a pure function of seed, epoch, step and rank.
//!
//! The samples of all epochs form one endless stream, each epoch in its own random order. Step `s` takes the next
//! `global batch` entries, and ranks take consecutive parts of them. So the same samples are used in the same steps
//! at any world size with the same global batch. No sample repeats before all others were used. If one step takes
//! more samples than the data has, the stream continues with the next epoch within the step. Resuming needs the step
//! number only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::SampleSet;
use super::budget::{Budget, Until};
use super::mix::Mix;
use crate::config::{Length, RunConfig};

/// Rounds of the Feistel network; each mixes one half into the other.
const ROUNDS: u64 = 6;

/// Map from (step, micro-batch, rank) to the indices of the samples that the rank trains on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sampler {
    samples: u64,
    world_size: u64,
    micro_batch: u64,
    accumulation_steps: u64,
    seed: u64,
    /// The files that the samples come from; absent if an epoch takes every sample once.
    mix: Option<Arc<Mix>>,
    /// Swaps in the order of the first epoch, as a map from the sample of the shuffled order to the one used instead.
    moved: Arc<BTreeMap<u64, u64>>,
    /// Where steps begin that take as many samples as a budget of tokens allows.
    budget: Option<Arc<Budget>>,
}

/// Sizes that determine the data order of a [`Sampler`]. Each is at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerSizes {
    /// Number of usable training samples.
    pub samples: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Samples per rank and micro-batch.
    pub micro_batch: usize,
    /// Number of micro-batches per rank and optimizer step (gradient accumulation).
    pub accumulation_steps: usize,
}

impl Sampler {
    /// Sampler for a run of these sizes. Each epoch has its own random order, which `seed` determines.
    ///
    /// # Panics
    /// When a size is zero.
    pub fn new(sizes: SamplerSizes, seed: u64) -> Self {
        let SamplerSizes {
            samples,
            world_size,
            micro_batch,
            accumulation_steps,
        } = sizes;
        assert!(
            samples > 0 && world_size > 0 && micro_batch > 0 && accumulation_steps > 0,
            "every size of a sampler is at least 1, got {sizes:?}"
        );
        Self {
            samples: samples as u64,
            world_size: world_size as u64,
            micro_batch: micro_batch as u64,
            accumulation_steps: accumulation_steps as u64,
            seed,
            mix: None,
            moved: Arc::default(),
            budget: None,
        }
    }

    /// Sampler of a run over `set`, whose samples are measured if a budget of tokens fills the micro-batches. The first
    /// update takes the samples `first`.
    pub(crate) fn of(config: &RunConfig, set: &SampleSet, first: &[usize]) -> Self {
        let mix = set.mix();
        let sizes = SamplerSizes {
            samples: mix.per_epoch(),
            world_size: config.data_ranks(),
            micro_batch: config.batch.micro_batch,
            accumulation_steps: config.batch.accumulation_steps,
        };
        let sampler = Self::new(sizes, config.seed)
            .mixing(mix)
            .beginning_with(first);
        let Some(most) = config.batch.tokens_per_batch else {
            return sampler;
        };
        let until = match config.length {
            Length::Steps(steps) => Until::Steps(steps),
            Length::Epochs(epochs) => {
                let samples = (epochs * sizes.samples as f64 - 1e-9).ceil();
                Until::Samples(samples as u64)
            }
        };
        let tokens = set.sizes.iter().map(|size| size.tokens).collect();
        sampler.filling(most, tokens, until)
    }

    /// Fills each micro-batch with samples of at most `most` tokens together. `tokens` are those of each sample.
    #[must_use]
    pub fn filling(mut self, most: usize, tokens: Vec<usize>, until: Until) -> Self {
        let count = self.micro_batches();
        let budget = Budget::new(most, tokens, count, until, |position| self.at(position));
        self.budget = Some(Arc::new(budget));
        self
    }

    /// Number of updates of the run that `config` describes.
    pub(crate) fn total_steps(&self, config: &RunConfig) -> u64 {
        match &self.budget {
            Some(budget) => budget.steps(),
            None => config.total_steps(self.samples as usize),
        }
    }

    /// The samples of every micro-batch of a run with a budget of tokens; none without.
    pub(crate) fn all_micro_batches(&self) -> impl Iterator<Item = Vec<usize>> {
        let budget = self.budget.iter();
        budget
            .flat_map(|budget| (0..budget.steps()).map(move |step| (budget, step)))
            .flat_map(|(budget, step)| {
                budget.micro_batches(step, self.micro_batches(), |at| self.at(at))
            })
            .map(|positions| positions.iter().map(|at| self.at(*at)).collect())
    }

    /// Takes each file of `mix` as often as its weight says. The sampler's number of samples is that of an epoch.
    ///
    /// # Panics
    /// When the two numbers differ.
    #[must_use]
    pub fn mixing(mut self, mix: Mix) -> Self {
        assert_eq!(mix.per_epoch() as u64, self.samples, "samples of an epoch");
        self.mix = (!mix.is_plain()).then(|| Arc::new(mix));
        self
    }

    /// Changes the data order so that the first epoch begins with the samples of these indices, in this
    /// order. They are swapped with the samples that were at those positions. Samples that a mix leaves out of the
    /// first epoch are passed over.
    ///
    /// # Panics
    /// When an index is not below the number of samples, or occurs twice.
    #[must_use]
    pub fn beginning_with(self, first: &[usize]) -> Self {
        if self.mix.is_none() {
            return self.beginning_at(first);
        }
        let mut places = BTreeMap::new();
        for place in 0..self.samples {
            places
                .entry(self.mixed(0, place) as usize)
                .or_insert(place as usize);
        }
        let first: Vec<usize> = first
            .iter()
            .filter_map(|index| places.get(index).copied())
            .collect();
        self.beginning_at(&first)
    }

    /// Indices of the samples that the first epoch takes.
    #[must_use]
    pub fn of_first_epoch(&self) -> BTreeSet<usize> {
        (0..self.samples)
            .map(|place| self.mixed(0, place) as usize)
            .collect()
    }

    /// As [`Self::beginning_with`], by places in the epoch instead of samples.
    fn beginning_at(mut self, first: &[usize]) -> Self {
        let (mut moved, mut origin) = (BTreeMap::new(), BTreeMap::new());
        let mut seen = BTreeSet::new();
        for (position, wanted) in first.iter().enumerate() {
            assert!(
                (*wanted as u64) < self.samples && seen.insert(*wanted),
                "sample {wanted} begins the order of {} samples, or begins it twice",
                self.samples
            );
            let (wanted, own) = (*wanted as u64, self.shuffled(position as u64));
            let stands = *moved.get(&own).unwrap_or(&own);
            // The entry that maps to `wanted` so far gets the sample at this position instead.
            let other = *origin.get(&wanted).unwrap_or(&wanted);
            moved.insert(own, wanted);
            origin.insert(wanted, own);
            if other != own {
                moved.insert(other, stands);
                origin.insert(stands, other);
            }
        }
        self.moved = Arc::new(moved);
        self
    }

    /// Positions of one rank's micro-batch in the endless stream of samples over all epochs; `step` and
    /// `micro_step` count from 0. A position identifies one use of a sample.
    pub fn positions(&self, step: u64, micro_step: u64, rank: usize) -> Vec<u64> {
        let number = micro_step * self.world_size + rank as u64;
        if let Some(budget) = &self.budget {
            let mut batches =
                budget.micro_batches(step, self.micro_batches(), |position| self.at(position));
            return batches.swap_remove(number as usize);
        }
        let start = step * self.global_batch() + number * self.micro_batch;
        (start..start + self.micro_batch).collect()
    }

    const fn micro_batches(&self) -> usize {
        (self.accumulation_steps * self.world_size) as usize
    }

    /// Indices, among the training samples, of the samples in one micro-batch of one rank. `step` and
    /// `micro_step` count from 0.
    pub fn indices(&self, step: u64, micro_step: u64, rank: usize) -> Vec<usize> {
        let positions = self.positions(step, micro_step, rank).into_iter();
        positions.map(|position| self.at(position)).collect()
    }

    /// Number of samples that an epoch takes.
    pub(crate) const fn per_epoch(&self) -> u64 {
        self.samples
    }

    /// Number of samples in the first `steps` steps of the run.
    pub fn used(&self, steps: u64) -> u64 {
        match &self.budget {
            Some(budget) => budget.before(steps),
            None => steps * self.global_batch(),
        }
    }

    /// Number of steps that the first epoch takes, the last of which may go beyond it.
    pub(crate) fn steps_per_epoch(&self) -> u64 {
        match &self.budget {
            Some(budget) => budget.steps_for(self.samples),
            None => self.samples.div_ceil(self.global_batch()),
        }
    }

    /// Number of samples per optimizer step without a budget of tokens (global batch size): over all ranks and their
    /// micro-batches.
    pub const fn global_batch(&self) -> u64 {
        self.micro_batch * self.accumulation_steps * self.world_size
    }

    /// Number of samples per optimizer step over all ranks, if the dataset has fewer, so that samples repeat
    /// within a step. `None` otherwise.
    pub fn wraps_around(&self) -> Option<usize> {
        let budget = self.budget.as_ref();
        let batch = budget.map_or(self.global_batch(), |budget| budget.largest_step());
        (batch > self.samples).then_some(batch as usize)
    }

    /// Number of passes over the training samples after `steps` steps of the run; 1.5 is halfway through the
    /// second epoch.
    pub fn epochs_after(&self, steps: u64) -> f64 {
        self.used(steps) as f64 / self.samples as f64
    }

    /// Whether an epoch ended within step number `steps` of the run, counted from 1; false for 0.
    pub fn epoch_ended(&self, steps: u64) -> bool {
        if steps == 0 {
            return false;
        }
        let epoch = |steps: u64| self.used(steps) / self.samples;
        epoch(steps) > epoch(steps - 1)
    }

    fn at(&self, position: u64) -> usize {
        let sample = self.shuffled(position);
        let first_epoch = position < self.samples;
        let moved = self.moved.get(&sample).filter(|_| first_epoch);
        self.mixed(position / self.samples, *moved.unwrap_or(&sample)) as usize
    }

    /// The sample at `place` among those that `epoch` takes.
    fn mixed(&self, epoch: u64, place: u64) -> u64 {
        let Some(mix) = &self.mix else {
            return place;
        };
        mix.at(epoch, place, |index, size, share, round| {
            let key = mix_bits(share.wrapping_add(0x517c_c1b7_2722_0a95) ^ mix_bits(round));
            permute(index, size, mix_bits(self.seed ^ key))
        })
    }

    fn shuffled(&self, position: u64) -> u64 {
        let epoch = position / self.samples;
        let key = mix_bits(self.seed ^ mix_bits(epoch.wrapping_add(0x9e37_79b9_7f4a_7c15)));
        permute(position % self.samples, self.samples, key)
    }
}

/// Image of `index` under a random permutation of `0..size` selected by `key`.
///
/// A Feistel network permutes the smallest square power of two that is at least `size`. Values of `size` or more pass
/// through it again until they are smaller, which keeps it a permutation (cycle walking).
fn permute(index: u64, size: u64, key: u64) -> u64 {
    let bits = (64 - (size - 1).leading_zeros()).max(2).div_ceil(2);
    let mask = (1u64 << bits) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> bits, value & mask);
        for round in 0..ROUNDS {
            let mixed =
                mix_bits(right ^ key.wrapping_add(round.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            (left, right) = (right, left ^ (mixed & mask));
        }
        value = left << bits | right;
        if value < size {
            return value;
        }
    }
}

/// Finalizer of splitmix64: every input bit affects every output bit.
const fn mix_bits(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(
        samples: usize,
        world_size: usize,
        micro_batch: usize,
        accumulation_steps: usize,
    ) -> Sampler {
        Sampler::new(
            SamplerSizes {
                samples,
                world_size,
                micro_batch,
                accumulation_steps,
            },
            42,
        )
    }

    fn stream(sampler: &Sampler, steps: u64) -> Vec<usize> {
        let mut all = Vec::new();
        for step in 0..steps {
            for micro in 0..sampler.accumulation_steps {
                for rank in 0..sampler.world_size as usize {
                    all.extend(sampler.indices(step, micro, rank));
                }
            }
        }
        all
    }

    proptest! {
        #[test]
        fn every_epoch_sees_every_sample_once(samples in 1usize..300, world in 1usize..5, micro in 1usize..5, accumulation in 1usize..4) {
            let sampler = sampler(samples, world, micro, accumulation);
            let steps = (2 * samples as u64).div_ceil(sampler.global_batch());
            let stream = stream(&sampler, steps);
            for epoch in stream.chunks_exact(samples).take(2) {
                let mut seen = epoch.to_vec();
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..samples).collect::<Vec<_>>());
            }
        }

        #[test]
        fn the_order_depends_on_the_global_batch_only(samples in 1usize..200, step in 0u64..1000) {
            let of = |world, micro, accumulation| {
                let sampler = sampler(samples, world, micro, accumulation);
                let mut all = Vec::new();
                for micro_step in 0..accumulation as u64 {
                    for rank in 0..world {
                        all.extend(sampler.indices(step, micro_step, rank));
                    }
                }
                all
            };
            prop_assert_eq!(of(1, 12, 1), of(3, 2, 2));
            prop_assert_eq!(of(1, 12, 1), of(2, 6, 1));
        }
    }

    proptest! {
        #[test]
        fn the_first_epoch_begins_with_the_chosen_samples(samples in 1usize..60, seed: u64, count in 0usize..60) {
            let sizes = SamplerSizes { samples, world_size: 1, micro_batch: 1, accumulation_steps: 1 };
            let plain = Sampler::new(sizes, 42);
            let mut first: Vec<usize> = (0..samples).collect();
            first.sort_by_key(|i| mix_bits(seed ^ *i as u64));
            first.truncate(count);
            let sampler = plain.clone().beginning_with(&first);
            let order = stream(&sampler, 2 * samples as u64);
            prop_assert_eq!(&order[..first.len()], &first[..]);
            let mut seen = order[..samples].to_vec();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..samples).collect::<Vec<_>>());
            prop_assert_eq!(&order[samples..], &stream(&plain, 2 * samples as u64)[samples..]);
        }
    }

    #[test]
    fn a_mix_takes_its_files_by_weight_and_depends_on_the_global_batch_only() {
        let mix = || Mix::of([(10, 0.5), (4, 2.0), (6, 1.0)]);
        let of = |world, micro, accumulation| {
            let sampler = sampler(mix().per_epoch(), world, micro, accumulation).mixing(mix());
            stream(&sampler.beginning_with(&[13, 2, 19]), 40)
        };
        let all = of(1, 4, 1);
        assert_eq!(all, of(2, 1, 2));
        for epoch in all.chunks_exact(19) {
            let among =
                |range: std::ops::Range<usize>| epoch.iter().filter(|i| range.contains(i)).count();
            assert_eq!([among(0..10), among(10..14), among(14..20)], [5, 8, 6]);
        }
        assert_eq!(all[0], 13);
        assert!(all[..3].contains(&19), "{:?}", &all[..3]);
        // Two epochs of a half take every sample once.
        let mut halves: Vec<usize> = all[..38].iter().copied().filter(|i| *i < 10).collect();
        halves.sort_unstable();
        assert_eq!(halves, (0..10).collect::<Vec<_>>());
        assert_ne!(all[..19], all[19..38]);
    }

    #[test]
    fn epochs_and_seeds_have_different_orders() {
        let a = sampler(100, 1, 100, 1);
        let b = Sampler {
            seed: 43,
            ..a.clone()
        };
        assert_ne!(a.indices(0, 0, 0), a.indices(1, 0, 0));
        assert_ne!(a.indices(0, 0, 0), b.indices(0, 0, 0));
        assert_ne!(a.indices(0, 0, 0), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn first_samples_are_uniformly_distributed() {
        let mut counts = [0u32; 7];
        for seed in 0..7000 {
            counts[permute(0, 7, mix_bits(seed)) as usize] += 1;
        }
        // The standard deviation of each count is 29.
        assert!(
            counts.iter().all(|&count| (880..1120).contains(&count)),
            "{counts:?}"
        );
    }

    #[test]
    fn a_budget_of_tokens_takes_the_same_samples_at_any_number_of_ranks() {
        let lengths: Vec<usize> = (0..40).map(|i| 1 + i * i % 23).collect();
        let of = |world, accumulation| {
            sampler(40, world, 1, accumulation).filling(30, lengths.clone(), Until::Samples(80))
        };
        let (one, two) = (of(1, 4), of(2, 2));
        assert_eq!(one.used(9), two.used(9));
        let stream = stream(&one, 12);
        assert_eq!(stream, tests::stream(&two, 12));
        // A batch of four samples would have up to 92 tokens.
        for rank in 0..2 {
            let batch = two.indices(5, 1, rank);
            assert!(batch.iter().map(|i| lengths[*i]).sum::<usize>() <= 30);
        }
        let plain = sampler(40, 1, 1, 1);
        let first: Vec<usize> = (0..one.used(1)).map(|at| plain.at(at)).collect();
        let mut own: Vec<usize> = stream[..first.len()].to_vec();
        own.sort_unstable();
        let mut first_sorted = first;
        first_sorted.sort_unstable();
        assert_eq!(own, first_sorted, "the first samples of the stream");
        assert!(one.epochs_after(one.budget.as_ref().expect("a budget").steps()) >= 2.0);
    }

    #[test]
    fn epochs_are_counted_in_steps() {
        let sampler = sampler(10, 2, 2, 1);
        let ends: Vec<u64> = (0..=8).filter(|&step| sampler.epoch_ended(step)).collect();
        assert_eq!(ends, [3, 5, 8]);
        assert_eq!(sampler.epochs_after(5), 2.0);
        assert_eq!(sampler.wraps_around(), None);
        assert_eq!(tests::sampler(3, 2, 2, 1).wraps_around(), Some(4));
    }
}
