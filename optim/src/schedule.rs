//! Learning rate as a pure function of the step, with the semantics of Hugging Face's and DeepSpeed's schedulers.
//!
//! Nothing is stored between steps, so resuming needs the step number only.

use std::f64::consts::PI;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::OptimError;
use crate::warmup::{After, Course, WarmupOptions};

/// Kind of a learning-rate schedule: the shape of its curve, including warmup.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Base rate at every step. Warmup is ignored, as in Hugging Face's `constant`.
    Constant,
    /// Linear warmup, then the base rate.
    ConstantWithWarmup,
    /// Linear warmup, then a straight line that reaches zero at `total_steps`.
    Linear,
    /// Linear warmup, then half a cosine wave that reaches zero at `total_steps`.
    Cosine,
    /// SwissArmyTransformer's schedule. The first 100 updates use a twentieth of the base rate, or the linear
    /// warmup's rate while that is lower. Then half a cosine wave falls from the base rate to a tenth of it.
    SatCosine,
    /// DeepSpeed's `WarmupLR`: warmup, then the base rate.
    WarmupLr(WarmupOptions),
    /// DeepSpeed's `WarmupDecayLR`: warmup, then a straight line to `min_lr`.
    WarmupDecayLr(WarmupOptions),
    /// DeepSpeed's `WarmupCosineLR`: warmup, then half a cosine wave down to `end_ratio` of the base rate.
    WarmupCosineLr(WarmupOptions),
}

/// Updates at the start of [`ScheduleKind::SatCosine`] that use at most [`SAT_AUTO_RATE`] of the base rate.
const SAT_AUTO_STEPS: u64 = 100;
const SAT_AUTO_RATE: f64 = 0.05;
/// Final rate of [`ScheduleKind::SatCosine`] as a share of the base rate.
const SAT_DECAY_RATIO: f64 = 0.1;

impl ScheduleKind {
    const NAMES: &'static str = "constant, constant_with_warmup, linear, cosine, sat_cosine, warmup_lr, warmup_decay_lr, warmup_cosine_lr";

    /// Name of the schedule on command lines and in configuration files, e.g. `warmup_lr`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::ConstantWithWarmup => "constant_with_warmup",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::SatCosine => "sat_cosine",
            Self::WarmupLr(_) => "warmup_lr",
            Self::WarmupDecayLr(_) => "warmup_decay_lr",
            Self::WarmupCosineLr(_) => "warmup_cosine_lr",
        }
    }
}

impl ScheduleKind {
    /// Part after the warmup and options, if the schedule is one of DeepSpeed's.
    const fn deepspeed(self) -> Option<(After, WarmupOptions)> {
        match self {
            Self::WarmupLr(options) => Some((After::Constant, options)),
            Self::WarmupDecayLr(options) => Some((After::Decay, options)),
            Self::WarmupCosineLr(options) => Some((After::Cosine, options)),
            _ => None,
        }
    }
}

impl FromStr for ScheduleKind {
    type Err = OptimError;

    fn from_str(word: &str) -> Result<Self, OptimError> {
        let snake_case = word.replace('-', "_");
        [
            Self::Constant,
            Self::ConstantWithWarmup,
            Self::Linear,
            Self::Cosine,
            Self::SatCosine,
            Self::WarmupLr(WarmupOptions::default()),
            Self::WarmupDecayLr(WarmupOptions::default()),
            Self::WarmupCosineLr(WarmupOptions::default()),
        ]
        .into_iter()
        .find(|kind| kind.name() == snake_case)
        .ok_or_else(|| OptimError::UnknownWord {
            what: "learning-rate schedule",
            got: word.into(),
            expected: Self::NAMES,
        })
    }
}

/// Learning-rate schedule over the optimizer updates of a run.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Kind of the schedule: the shape of its curve.
    pub kind: ScheduleKind,
    /// Number of optimizer updates in the warmup.
    pub warmup_steps: u64,
    /// Number of optimizer updates in the whole run, warmup included.
    pub total_steps: u64,
    /// Base learning rate: that at the end of warmup.
    pub base_lr: f64,
}

impl Schedule {
    /// Learning rate of the update that follows `completed_steps` finished updates. The first update of a run uses
    /// `lr(0)`, which is zero if the warmup starts at zero.
    #[must_use]
    pub fn lr(&self, completed_steps: u64) -> f64 {
        match self.kind.deepspeed() {
            Some((after, options)) => options.lr(after, self.course(), completed_steps),
            None => self.base_lr * self.factor(completed_steps),
        }
    }

    const fn course(&self) -> Course {
        Course {
            warmup_steps: self.warmup_steps,
            total_steps: self.total_steps,
            base_lr: self.base_lr,
        }
    }

    fn factor(&self, step: u64) -> f64 {
        if self.kind == ScheduleKind::Constant {
            return 1.0;
        }
        if self.kind == ScheduleKind::SatCosine {
            return self.sat_cosine(step + 1);
        }
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let decay_steps = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        match self.kind {
            ScheduleKind::Linear => self.total_steps.saturating_sub(step) as f64 / decay_steps,
            ScheduleKind::Cosine | ScheduleKind::SatCosine => {
                let progress = (step - self.warmup_steps) as f64 / decay_steps;
                (0.5 * (1.0 + (PI * progress).cos())).max(0.0)
            }
            _ => 1.0,
        }
    }
}

impl Schedule {
    /// Factor on the base rate for update `iteration`, counted from 1. The wave begins at the end of warmup but its
    /// half-period is the whole run, so the run ends before the wave does.
    fn sat_cosine(&self, iteration: u64) -> f64 {
        if iteration <= SAT_AUTO_STEPS {
            let warm = iteration as f64 / self.warmup_steps.max(1) as f64;
            return warm.min(SAT_AUTO_RATE);
        }
        let since = iteration as f64 - self.warmup_steps as f64;
        let progress = since / self.total_steps.max(1) as f64;
        let span = 1.0 / SAT_DECAY_RATIO - 1.0;
        SAT_DECAY_RATIO * (((PI * progress).cos() + 1.0) * span / 2.0 + 1.0)
    }
}

/// Number of warmup updates: `warmup_steps` if it is positive, otherwise the share `warmup_ratio` of
/// `total_steps`, rounded up.
///
/// # Errors
/// [`OptimError::OutOfRange`] unless `warmup_ratio` is in 0..=1.
pub fn warmup_steps(
    total_steps: u64,
    warmup_steps: u64,
    warmup_ratio: f64,
) -> Result<u64, OptimError> {
    if !(0.0..=1.0).contains(&warmup_ratio) {
        return Err(OptimError::OutOfRange {
            what: "the warmup ratio",
            expected: "between 0 and 1",
            got: warmup_ratio,
        });
    }
    if warmup_steps > 0 {
        return Ok(warmup_steps);
    }
    Ok((total_steps as f64 * warmup_ratio).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WarmupShape;

    fn schedule(kind: ScheduleKind, warmup_steps: u64, total_steps: u64) -> Schedule {
        Schedule {
            kind,
            warmup_steps,
            total_steps,
            base_lr: 2e-5,
        }
    }

    fn assert_lrs(schedule: Schedule, expected: &[(u64, f64)]) {
        for &(step, factor) in expected {
            let lr = schedule.lr(step);
            assert!(
                (lr - 2e-5 * factor).abs() <= 1e-20,
                "step {step}: {lr} against {factor}"
            );
        }
    }

    #[test]
    fn constant_ignores_warmup() {
        assert_lrs(
            schedule(ScheduleKind::Constant, 5, 10),
            &[(0, 1.0), (3, 1.0), (99, 1.0)],
        );
    }

    #[test]
    fn constant_with_warmup_grows_linearly_then_stays() {
        let expected = [(0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (50, 1.0)];
        assert_lrs(schedule(ScheduleKind::ConstantWithWarmup, 4, 10), &expected);
    }

    #[test]
    fn linear_reaches_zero_at_the_last_step_and_stays_there() {
        let expected = [
            (0, 0.0),
            (1, 0.5),
            (2, 1.0),
            (4, 0.75),
            (6, 0.5),
            (9, 0.125),
            (10, 0.0),
            (11, 0.0),
        ];
        assert_lrs(schedule(ScheduleKind::Linear, 2, 10), &expected);
    }

    #[test]
    fn cosine_is_half_a_wave() {
        // cos(pi/4) = 0.7071…: factor 0.8535533905932737 a quarter of the way down.
        let expected = [
            (0, 0.0),
            (1, 0.5),
            (2, 1.0),
            (4, 0.853_553_390_593_273_7),
            (6, 0.5),
            (8, 0.146_446_609_406_726_27),
            (10, 0.0),
        ];
        assert_lrs(schedule(ScheduleKind::Cosine, 2, 10), &expected);
    }

    #[test]
    fn sat_cosine_jumps_after_a_hundred_updates() {
        // Values that SwissArmyTransformer computes for 800 updates, 16 of them warmup, and a base rate of 1e-5.
        let expected = [
            (1, 5.0e-7),
            (100, 5.0e-7),
            (101, 9.751_627_209_100_954e-6),
            (200, 8.875_499_813_337_07e-6),
            (400, 5.782_557_337_881_911e-6),
            (799, 1.010_023_948_607_243_1e-6),
            (800, 1.008_879_722_072_778e-6),
        ];
        let schedule = Schedule {
            base_lr: 1e-5,
            ..schedule(ScheduleKind::SatCosine, 16, 800)
        };
        for (iteration, lr) in expected {
            let got = schedule.lr(iteration - 1);
            assert!((got / lr - 1.0).abs() < 1e-12, "{iteration}: {got:e}");
        }
    }

    #[test]
    fn deepspeed_schedules_begin_one_update_later() {
        let options = WarmupOptions {
            shape: WarmupShape::Linear,
            ..WarmupOptions::default()
        };
        assert_lrs(
            schedule(ScheduleKind::WarmupDecayLr(options), 2, 10),
            &[(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (7, 0.5), (11, 0.0)],
        );
    }

    #[test]
    fn schedules_of_length_zero_do_not_divide_by_zero() {
        assert_lrs(schedule(ScheduleKind::Linear, 0, 0), &[(0, 0.0)]);
        assert_lrs(
            schedule(ScheduleKind::Linear, 10, 10),
            &[(5, 0.5), (10, 0.0)],
        );
        assert_lrs(schedule(ScheduleKind::Cosine, 10, 10), &[(10, 1.0)]);
    }

    #[test]
    fn a_warmup_ratio_is_rounded_up_and_loses_to_steps() {
        assert_eq!(warmup_steps(101, 0, 0.03).unwrap(), 4);
        assert_eq!(warmup_steps(100, 0, 0.0).unwrap(), 0);
        assert_eq!(warmup_steps(100, 7, 0.5).unwrap(), 7);
        assert!(warmup_steps(100, 0, 1.5).is_err());
        assert!(warmup_steps(100, 0, f64::NAN).is_err());
    }

    #[test]
    fn names_parse_in_both_spellings_and_match_serde() {
        for kind in [
            ScheduleKind::Constant,
            ScheduleKind::ConstantWithWarmup,
            ScheduleKind::Cosine,
        ] {
            assert_eq!(kind.name().parse::<ScheduleKind>().unwrap(), kind);
            assert_eq!(
                kind.name()
                    .replace('_', "-")
                    .parse::<ScheduleKind>()
                    .unwrap(),
                kind
            );
            assert_eq!(
                serde_json::to_string(&kind).unwrap(),
                format!("\"{}\"", kind.name())
            );
        }
        assert!("inverse_sqrt".parse::<ScheduleKind>().is_err());
    }
}
