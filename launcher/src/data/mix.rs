//! Mix of several files: how many samples of each an epoch takes.
//!
//! A file of weight 1 gives each sample once an epoch, one of weight 2 twice, one of weight 0.5 half of them: in the next
//! epoch the other half. So each file has a stream of its own, every sample once before any comes again, and an epoch
//! takes the next part of it.

use crate::lang::{Text, text};
use std::ops::Range;

/// The samples of all files, and how many of each an epoch takes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mix {
    shares: Vec<Share>,
}

/// Samples of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Share {
    /// Indices of the usable samples.
    samples: Range<u64>,
    /// Places of the samples in an epoch.
    places: Range<u64>,
}

impl Mix {
    /// Mix of files with these numbers of usable samples and weights, in their order.
    pub(crate) fn of(files: impl IntoIterator<Item = (usize, f64)>) -> Self {
        let (mut sample, mut place) = (0, 0);
        let used = files.into_iter().filter(|(count, _)| *count > 0);
        let shares = used.map(|(count, weight)| {
            let count = count as u64;
            let taken = ((count as f64 * weight).round() as u64).max(1);
            let share = Share {
                samples: sample..sample + count,
                places: place..place + taken,
            };
            (sample, place) = (share.samples.end, share.places.end);
            share
        });
        Self {
            shares: shares.collect(),
        }
    }

    /// Number of samples that an epoch takes.
    pub(crate) fn per_epoch(&self) -> usize {
        self.shares
            .last()
            .map_or(0, |share| share.places.end as usize)
    }

    /// Whether an epoch takes every sample once.
    pub(crate) fn is_plain(&self) -> bool {
        self.shares
            .iter()
            .all(|share| share.samples == share.places)
    }

    /// Number of samples that an epoch takes of each file that has any.
    pub(crate) fn taken(&self) -> impl Iterator<Item = u64> {
        self.shares
            .iter()
            .map(|share| share.places.end - share.places.start)
    }

    /// Text that says how many samples an epoch takes of each file, if that is not each once.
    pub(crate) fn line(&self) -> Option<Text> {
        let taken: Vec<String> = self.taken().map(|count| count.to_string()).collect();
        let (taken, all) = (taken.join(" + "), self.per_epoch());
        (!self.is_plain()).then(|| {
            text!(
                "an epoch takes {taken} = {all} samples of the files, by their weights",
                "按权重，每个 epoch 从各文件取 {taken} = {all} 个样本"
            )
        })
    }

    /// The sample at `place` of `epoch`. `permuted(index, size, share, round)` is the image of `index` under a random
    /// permutation of `0..size`, one for each share and round.
    pub(super) fn at(
        &self,
        epoch: u64,
        place: u64,
        permuted: impl Fn(u64, u64, u64, u64) -> u64,
    ) -> u64 {
        let number = self
            .shares
            .partition_point(|share| share.places.end <= place);
        let Share { samples, places } = &self.shares[number];
        let (count, taken) = (samples.end - samples.start, places.end - places.start);
        let position = epoch * taken + (place - places.start);
        let index = permuted(position % count, count, number as u64, position / count);
        samples.start + index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(mix: &Mix, epoch: u64) -> Vec<u64> {
        let turned = |index: u64, size: u64, _: u64, round: u64| (index + round) % size;
        (0..mix.per_epoch() as u64)
            .map(|place| mix.at(epoch, place, turned))
            .collect()
    }

    #[test]
    fn an_epoch_takes_each_file_as_often_as_its_weight_says() {
        let mix = Mix::of([(4, 0.5), (0, 3.0), (2, 2.0), (3, 1.0)]);
        assert_eq!(mix.taken().collect::<Vec<_>>(), [2, 4, 3]);
        assert!(!mix.is_plain() && Mix::of([(4, 1.0), (2, 1.0)]).is_plain());
        assert_eq!(epoch(&mix, 0), [0, 1, 4, 5, 5, 4, 6, 7, 8]);
        // The other half of the first file.
        assert_eq!(epoch(&mix, 1)[..2], [2, 3]);
        assert_eq!(epoch(&mix, 2)[..2], [1, 2]);
    }

    #[test]
    fn a_small_share_takes_one_sample() {
        assert_eq!(Mix::of([(10, 0.01)]).per_epoch(), 1);
    }
}
