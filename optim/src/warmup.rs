//! DeepSpeed's schedules: a linear or logarithmic warmup, then a constant rate, a straight line, or a cosine.
//!
//! DeepSpeed counts steps from −1: the scheduler starts before the first update and advances after each one. So the
//! first two updates of a logarithmic warmup both use the lowest rate.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// Part of the curve after the warmup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum After {
    /// `WarmupLR`: the base rate.
    Constant,
    /// `WarmupDecayLR`: a straight line down to `min_lr`.
    Decay,
    /// `WarmupCosineLR`: half a cosine wave down to a share of the base rate.
    Cosine,
}

/// Shape of the learning rate's growth during a DeepSpeed warmup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmupShape {
    /// The learning rate grows with the logarithm of the step.
    #[default]
    Log,
    /// The learning rate grows linearly with the step.
    Linear,
}

/// Options of DeepSpeed's learning-rate schedules, besides steps and base rate. Other schedules ignore them.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WarmupOptions {
    /// Shape of the learning rate's growth during warmup: logarithmic or linear.
    pub shape: WarmupShape,
    /// Lowest learning rate of `WarmupLR` and `WarmupDecayLR`: that at the start of warmup and at the end of
    /// the decay.
    pub min_lr: f64,
    /// Learning rate at the start of `WarmupCosineLR`'s warmup, as a share of the base rate.
    pub min_ratio: f64,
    /// Learning rate at the end of `WarmupCosineLR`'s cosine, as a share of the base rate.
    pub end_ratio: f64,
}

impl Default for WarmupOptions {
    fn default() -> Self {
        Self {
            shape: WarmupShape::Log,
            min_lr: 0.0,
            min_ratio: 0.0,
            end_ratio: 1e-4,
        }
    }
}

/// Steps of a schedule and its highest rate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Course {
    pub(crate) warmup_steps: u64,
    pub(crate) total_steps: u64,
    pub(crate) base_lr: f64,
}

impl WarmupOptions {
    /// Learning rate of the update that follows `completed_steps` finished updates.
    pub(crate) fn lr(&self, after: After, course: Course, completed_steps: u64) -> f64 {
        let base = course.base_lr;
        let Some(step) = completed_steps.checked_sub(1) else {
            return match after {
                After::Constant | After::Decay => self.min_lr,
                After::Cosine => 0.0,
            };
        };
        // At least 2, as in DeepSpeed: a warmup of one step would divide by ln 1.
        let warmup = course.warmup_steps.max(2);
        let total = course.total_steps as f64;
        let (warm, at) = (warmup as f64, step as f64);
        if step < warmup {
            let share = match self.shape {
                WarmupShape::Log => (at + 1.0).ln() / warm.ln(),
                WarmupShape::Linear => at / warm,
            };
            return match after {
                After::Constant | After::Decay => self.min_lr + (base - self.min_lr) * share,
                After::Cosine => base * (self.min_ratio + (1.0 - self.min_ratio) * share),
            };
        }
        let length = (total - warm).max(1.0);
        match after {
            After::Constant => base,
            After::Decay => {
                let share = ((total - at) / length).max(0.0);
                self.min_lr + (base - self.min_lr) * share
            }
            After::Cosine => {
                let progress = ((at - warm + 1.0) / length).min(1.0);
                let wave = f64::midpoint(1.0, (PI * progress).cos());
                base * (self.end_ratio + (1.0 - self.end_ratio) * wave).max(0.0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COURSE: Course = Course {
        warmup_steps: 10,
        total_steps: 30,
        base_lr: 2e-4,
    };

    fn assert_rates(options: WarmupOptions, after: After, course: Course, expected: &[(u64, f64)]) {
        for &(completed, lr) in expected {
            let got = options.lr(after, course, completed);
            assert!(
                (got - lr).abs() <= 1e-18,
                "{after:?} after {completed}: {got:e} against {lr:e}"
            );
        }
    }

    #[test]
    fn warmup_rates_are_those_of_deepspeed() {
        // The learning rate in DeepSpeed 0.19.6's optimizer after a number of updates.
        let plain = WarmupOptions::default();
        assert_rates(
            WarmupOptions::default(),
            After::Constant,
            COURSE,
            &[
                (0, 0.0),
                (1, 0.0),
                (2, 6.020_599_913_279_623e-5),
                (6, 1.556_302_500_767_287_2e-4),
                (11, 2e-4),
                (40, 2e-4),
            ],
        );
        let low = WarmupOptions {
            min_lr: 1e-5,
            ..plain
        };
        assert_rates(
            low,
            After::Decay,
            COURSE,
            &[
                (0, 1e-5),
                (1, 1e-5),
                (3, 1.006_530_383_967_358_5e-4),
                (11, 2e-4),
                (12, 1.905e-4),
                (20, 1.145e-4),
                (31, 1e-5),
                (40, 1e-5),
            ],
        );
        assert_rates(
            plain,
            After::Cosine,
            COURSE,
            &[
                (0, 0.0),
                (2, 6.020_599_913_279_623e-5),
                (11, 1.987_689_571_761_078_4e-4),
                (20, 1.000_1e-4),
                (31, 2e-8),
                (40, 2e-8),
            ],
        );
    }

    #[test]
    fn linear_warmup_and_decay_have_the_given_ends() {
        let options = WarmupOptions {
            shape: WarmupShape::Linear,
            min_lr: 1e-5,
            min_ratio: 0.1,
            end_ratio: 0.05,
        };
        let growing = [
            (1, 1e-5),
            (2, 2.9e-5),
            (6, 1.05e-4),
            (10, 1.81e-4),
            (11, 2e-4),
        ];
        assert_rates(options, After::Constant, COURSE, &growing);
        let wave = [
            (0, 0.0),
            (1, 2e-5),
            (6, 1.1e-4),
            (11, 1.988_303_923_565_381_2e-4),
            (31, 1e-5),
        ];
        assert_rates(options, After::Cosine, COURSE, &wave);
    }

    #[test]
    fn a_warmup_of_one_step_is_treated_as_two() {
        let short = Course {
            warmup_steps: 1,
            total_steps: 2,
            base_lr: 2e-4,
        };
        let plain = WarmupOptions::default();
        assert_rates(
            plain,
            After::Cosine,
            short,
            &[(1, 0.0), (2, 2e-4), (3, 2e-8), (9, 2e-8)],
        );
        assert_rates(
            plain,
            After::Decay,
            short,
            &[(1, 0.0), (2, 2e-4), (3, 0.0), (9, 0.0)],
        );
    }
}
