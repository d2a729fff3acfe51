//! Statistics over samples.

use serde::Serialize;

use crate::data::Sampler;

/// Minimum, mean, median, 95th percentile and maximum of a list of counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) min: usize,
    pub(super) mean: f64,
    pub(super) p50: usize,
    pub(super) p95: usize,
    pub(super) max: usize,
}

impl Spread {
    /// Statistics of `values`; all zero if there are none. Percentiles use the nearest rank.
    pub(super) fn of(values: impl IntoIterator<Item = usize>) -> Self {
        let mut values: Vec<usize> = values.into_iter().collect();
        values.sort_unstable();
        let (Some(min), Some(max)) = (values.first(), values.last()) else {
            return Self::default();
        };
        let rank = |percent: usize| values[(values.len() * percent).div_ceil(100).max(1) - 1];
        Self {
            min: *min,
            mean: values.iter().sum::<usize>() as f64 / values.len() as f64,
            p50: rank(50),
            p95: rank(95),
            max: *max,
        }
    }
}

/// Micro-batches of an update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Batches {
    pub(super) ranks: usize,
    pub(super) micro_batch: usize,
    /// Most tokens of a micro-batch (`--tokens-per-batch`), if they fill it instead of a number of samples.
    pub(super) tokens_per_batch: Option<usize>,
    pub(super) accumulation_steps: usize,
}

/// How evenly one epoch's tokens are divided among the ranks, in the sampler's order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Balance {
    #[serde(flatten)]
    pub(super) batches: Batches,
    /// Mean share of `tokens_per_batch` that the micro-batches have.
    pub(super) fill: Option<f64>,
    pub(super) steps_per_epoch: u64,
    /// Tokens of the rank with the most, divided by the mean of the ranks, averaged over the steps. A step takes
    /// longer by about this factor.
    pub(super) mean_imbalance: f64,
    /// Largest value over all steps of this ratio: tokens of the rank with the most, divided by the mean of the
    /// ranks.
    pub(super) worst_imbalance: f64,
    /// Step in which `worst_imbalance` occurs, counted from 1.
    pub(super) worst_step: u64,
}

/// Computes the balance for samples whose lengths are `tokens`, in the order of `sampler`.
pub(super) fn balance(sampler: &Sampler, tokens: &[usize], batches: Batches) -> Balance {
    let ranks = batches.ranks;
    let steps = sampler.steps_per_epoch().max(1);
    let loads = |step: u64| -> Vec<usize> {
        let of_rank = |rank: usize| -> usize {
            let micro = 0..batches.accumulation_steps as u64;
            micro
                .flat_map(|micro| sampler.indices(step, micro, rank))
                .map(|index| tokens[index])
                .sum()
        };
        (0..ranks).map(of_rank).collect()
    };
    let imbalance = |step: u64| {
        let loads = loads(step);
        let mean = loads.iter().sum::<usize>() as f64 / ranks as f64;
        loads
            .iter()
            .max()
            .map_or(1.0, |most| *most as f64 / mean.max(1.0))
    };
    let fill = batches.tokens_per_batch.map(|most| {
        let all: usize = (0..steps).flat_map(loads).sum();
        let micro_batches = steps * (ranks * batches.accumulation_steps) as u64;
        all as f64 / (micro_batches as f64 * most as f64)
    });
    let all: Vec<f64> = (0..steps).map(imbalance).collect();
    let (worst_step, worst_imbalance) =
        all.iter()
            .copied()
            .enumerate()
            .fold((0, 0.0), |worst, (step, value)| {
                if value > worst.1 {
                    (step, value)
                } else {
                    worst
                }
            });
    Balance {
        batches,
        fill,
        steps_per_epoch: steps,
        mean_imbalance: all.iter().sum::<f64>() / steps as f64,
        worst_imbalance,
        worst_step: worst_step as u64 + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::SamplerSizes;
    use crate::data::Until;

    #[test]
    fn percentiles_use_the_nearest_rank() {
        let spread = Spread::of(1..=20);
        assert_eq!(
            (spread.min, spread.p50, spread.p95, spread.max),
            (1, 10, 19, 20)
        );
        assert!((spread.mean - 10.5).abs() < 1e-12);
        assert_eq!(Spread::of([7]).p95, 7);
        assert_eq!(Spread::of([]), Spread::default());
    }

    #[test]
    fn equal_samples_are_balanced_and_one_long_one_is_not() {
        let sizes = SamplerSizes {
            samples: 8,
            world_size: 2,
            micro_batch: 1,
            accumulation_steps: 2,
        };
        let batches = Batches {
            ranks: 2,
            micro_batch: 1,
            tokens_per_batch: None,
            accumulation_steps: 2,
        };
        let sampler = Sampler::new(sizes, 42);
        let even = balance(&sampler, &[10; 8], batches);
        assert_eq!((even.steps_per_epoch, even.mean_imbalance), (2, 1.0));
        let mut tokens = [10; 8];
        tokens[3] = 170;
        let uneven = balance(&sampler, &tokens, batches);
        // A long and a short sample on one rank, two short ones on the other: 180 against a mean of 100.
        assert!((uneven.worst_imbalance - 1.8).abs() < 1e-12, "{uneven:?}");
        assert!((uneven.mean_imbalance - 1.4).abs() < 1e-12, "{uneven:?}");
        assert_eq!(uneven.fill, None);
        // The long sample fills one rank; the others, and the first of the next epoch, are on the other one.
        let batches = Batches {
            tokens_per_batch: Some(170),
            accumulation_steps: 1,
            ..batches
        };
        let sizes = SamplerSizes {
            accumulation_steps: 1,
            ..sizes
        };
        let sampler = Sampler::new(sizes, 42).filling(170, tokens.to_vec(), Until::Samples(8));
        let filled = balance(&sampler, &tokens, batches);
        assert_eq!(filled.steps_per_epoch, 1);
        let own = |rank| {
            sampler
                .indices(0, 0, rank)
                .iter()
                .map(|i| tokens[*i])
                .sum::<usize>()
        };
        let (most, least) = (own(0) as f64, own(1) as f64);
        assert!(most == 170.0 && least >= 70.0, "{most} {least}");
        assert_eq!(filled.fill, Some((most + least) / 340.0));
    }
}
