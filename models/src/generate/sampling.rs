//! Sampling of the next token from logits.
//!
//! Random numbers are a function of (seed, sample, position). A draw does not depend on the rest of
//! the batch, on ranks or on the order of calls.

use crate::error::{ModelError, Result};
use optim::rng::RandomStream;
use std::cmp::Ordering;

/// How the next token is chosen from the logits: temperature, top-p, top-k and seed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Temperature, by which logits are divided. 0 takes the most likely token, the lowest id of equals.
    pub temperature: f32,
    /// Top-p: only the likeliest tokens that together reach this probability are drawn; 1 for all.
    pub top_p: f32,
    /// Top-k: only this many of the likeliest tokens are drawn; 0 for all.
    pub top_k: usize,
    /// Seed of the random draws.
    pub seed: u64,
}

impl Sampling {
    /// Greedy decoding: always the most likely token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        seed: 0,
    };

    /// Checks that temperature and top-p are in range.
    ///
    /// # Errors
    /// [`ModelError::Config`] with the setting that is out of range.
    pub fn check(&self) -> Result<()> {
        let refuse = |field, value: f32, reason| {
            Err(ModelError::Config {
                field,
                value: value.to_string(),
                reason,
            })
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "0 or a positive number");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", self.top_p, "above 0 and at most 1");
        }
        Ok(())
    }

    /// Chooses the next token of an answer and returns its id. `sample` is the index of the sample in its
    /// data set, and `position` is the number of tokens already generated. `logits` has one f32 per token id.
    #[must_use]
    pub fn next(&self, logits: &[f32], sample: u64, position: u64) -> i32 {
        if self.temperature == 0.0 || self.top_k == 1 {
            return argmax(logits) as i32;
        }
        let candidates = self.candidates(logits);
        let total: f64 = candidates.iter().map(|(_, p)| p).sum();
        // 53 bits, so that 0 <= u < 1.
        let bits = RandomStream::new(self.seed, "next-token").bits(sample, position) >> 11;
        let mut left = bits as f64 / (1u64 << 53) as f64 * total;
        for (token, p) in &candidates {
            if left < *p {
                return *token as i32;
            }
            left -= p;
        }
        // Rounding, or logits that are no numbers.
        candidates
            .last()
            .map_or(argmax(logits), |(token, _)| *token) as i32
    }

    /// Tokens that may be drawn with their unnormalized probabilities, the likeliest first and the
    /// lowest id first among equals.
    fn candidates(&self, logits: &[f32]) -> Vec<(usize, f64)> {
        let likelier =
            |a: &usize, b: &usize| -> Ordering { logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)) };
        let mut order: Vec<usize> = (0..logits.len()).filter(|i| !logits[*i].is_nan()).collect();
        if (1..order.len()).contains(&self.top_k) {
            order.select_nth_unstable_by(self.top_k - 1, likelier);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(likelier);
        let top = order.first().map_or(0.0, |i| f64::from(logits[*i]));
        let weight = |i: usize| ((f64::from(logits[i]) - top) / f64::from(self.temperature)).exp();
        let mut kept: Vec<(usize, f64)> = order.into_iter().map(|i| (i, weight(i))).collect();
        if self.top_p < 1.0 {
            let enough = f64::from(self.top_p) * kept.iter().map(|(_, p)| p).sum::<f64>();
            let mut sum = 0.0;
            // The token that reaches the bound stays.
            let reach = kept.iter().position(|(_, p)| {
                sum += p;
                sum >= enough
            });
            kept.truncate(reach.map_or(kept.len(), |last| last + 1));
        }
        kept
    }
}

/// Index of the largest value, the first of equals.
fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.5, 2.0, -1.0, 2.0, 1.0];

    fn drawn(sampling: Sampling) -> Sampling {
        Sampling {
            temperature: 1.0,
            seed: 3,
            ..sampling
        }
    }

    /// Shares of tokens over many samples.
    fn shares(sampling: Sampling, draws: u64) -> [f64; 5] {
        let mut counts = [0.0; 5];
        for sample in 0..draws {
            counts[sampling.next(&LOGITS, sample, 7) as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn softmax(temperature: f64, kept: &[usize]) -> [f64; 5] {
        let mut p = [0.0; 5];
        for i in kept {
            p[*i] = (f64::from(LOGITS[*i]) / temperature).exp();
        }
        let sum: f64 = p.iter().sum();
        p.map(|x| x / sum)
    }

    #[test]
    fn greedy_sampling_picks_the_first_of_equal_logits() {
        assert_eq!(argmax(&[-1.0, 3.0, 2.0, 3.0]), 1);
        assert_eq!(Sampling::GREEDY.next(&LOGITS, 0, 0), 1);
    }

    #[test]
    fn sampling_from_one_candidate_is_greedy() {
        let one = drawn(Sampling {
            top_k: 1,
            ..Sampling::GREEDY
        });
        let narrow = drawn(Sampling {
            top_p: 1e-6,
            ..Sampling::GREEDY
        });
        for sample in 0..200 {
            assert_eq!(one.next(&LOGITS, sample, 0), 1);
            assert_eq!(narrow.next(&LOGITS, sample, 0), 1);
        }
    }

    #[test]
    fn draws_follow_the_softmax_of_the_remaining_candidates() {
        const DRAWS: u64 = 100_000;
        // Four standard errors of a share of one half.
        let bound = 4.0 * 0.5 / (DRAWS as f64).sqrt();
        let all = Sampling::GREEDY;
        let cold = Sampling {
            temperature: 0.5,
            ..drawn(all)
        };
        for (sampling, want) in [
            (drawn(all), softmax(1.0, &[0, 1, 2, 3, 4])),
            (cold, softmax(0.5, &[0, 1, 2, 3, 4])),
            (
                drawn(Sampling { top_k: 3, ..all }),
                softmax(1.0, &[1, 3, 4]),
            ),
            // 1 and 3 hold 0.74 of the mass, with 4 it is 0.88.
            (
                drawn(Sampling { top_p: 0.8, ..all }),
                softmax(1.0, &[1, 3, 4]),
            ),
            (
                drawn(Sampling {
                    top_p: 0.55,
                    top_k: 3,
                    ..all
                }),
                softmax(1.0, &[1, 3]),
            ),
        ] {
            let got = shares(sampling, DRAWS);
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() <= bound, "{got} {want} of {sampling:?}");
                assert_eq!(*got == 0.0, want == 0.0, "{sampling:?}");
            }
        }
    }

    #[test]
    fn draws_depend_only_on_seed_sample_and_position() {
        let sampling = drawn(Sampling::GREEDY);
        let draw = |sampling: Sampling, sample, first| -> Vec<i32> {
            (first..first + 40)
                .map(|position| sampling.next(&LOGITS, sample, position))
                .collect()
        };
        let base = draw(sampling, 5, 0);
        assert_eq!(draw(sampling, 5, 0), base);
        assert_eq!(draw(sampling, 5, 10)[..30], base[10..]);
        assert_ne!(draw(sampling, 6, 0), base);
        let other = Sampling {
            seed: 4,
            ..sampling
        };
        assert_ne!(draw(other, 5, 0), base);
    }

    #[test]
    fn sampling_settings_out_of_range_are_named() {
        let fails = |change: &dyn Fn(&mut Sampling)| {
            let mut sampling = Sampling::GREEDY;
            change(&mut sampling);
            sampling.check().map_err(|e| e.to_string())
        };
        assert!(fails(&|_| ()).is_ok());
        for bad in [-0.5, f32::NAN, f32::INFINITY] {
            let error = fails(&|s| s.temperature = bad).unwrap_err();
            assert!(error.contains("temperature"), "{error}");
        }
        for bad in [0.0, 1.5, f32::NAN] {
            let error = fails(&|s| s.top_p = bad).unwrap_err();
            assert!(error.contains("top_p"), "{error}");
        }
    }
}
