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
    /// Hugging Face's `cosine_with_restarts`: linear warmup, then `num_cycles` half cosine waves (1), each down to zero.
    CosineWithRestarts(CurveOptions),
    /// Hugging Face's `cosine_with_min_lr`: linear warmup, then `num_cycles` cosine waves (0.5) down to `min_lr`, or to the
    /// share `min_lr_rate` of the base rate.
    CosineWithMinLr(CurveOptions),
    /// Hugging Face's `polynomial`: linear warmup, then a curve of the power `power` (1) down to the rate `lr_end` (1e-7).
    Polynomial(CurveOptions),
    /// Hugging Face's `inverse_sqrt`: linear warmup, then the base rate over the root of the steps. It counts them in
    /// `timescale`, by default the warmup, or 10 000 without one.
    InverseSqrt(CurveOptions),
    /// SwissArmyTransformer's `cosine`. The first 100 updates use a twentieth of the base rate. Then the linear warmup goes on,
    /// if it is longer, and half a cosine wave falls from the base rate to a tenth of it.
    SatCosine,
    /// SwissArmyTransformer's `linear`: the same start, then a straight line that would reach zero `warmup_steps` after the
    /// run.
    SatLinear,
    /// SwissArmyTransformer's `constant`: the same start, then the base rate.
    SatConstant,
    /// DeepSpeed's `WarmupLR`: warmup, then the base rate.
    WarmupLr(WarmupOptions),
    /// DeepSpeed's `WarmupDecayLR`: warmup, then a straight line to `min_lr`.
    WarmupDecayLr(WarmupOptions),
    /// DeepSpeed's `WarmupCosineLR`: warmup, then half a cosine wave down to `end_ratio` of the base rate.
    WarmupCosineLr(WarmupOptions),
}

/// Arguments of Hugging Face's schedules, besides steps and base rate. `None` takes their default. Each schedule ignores
/// those of the others.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CurveOptions {
    /// Waves of the two cosines.
    pub num_cycles: Option<f64>,
    /// Power of the polynomial.
    pub power: Option<f64>,
    /// Rate at the end of the polynomial.
    pub lr_end: Option<f64>,
    /// Rate at the end of `cosine_with_min_lr`.
    pub min_lr: Option<f64>,
    /// The same as a share of the base rate, where `min_lr` is absent.
    pub min_lr_rate: Option<f64>,
    /// Steps in which the inverse root falls from 1 to 1/√2.
    pub timescale: Option<u64>,
}

/// Updates at the start of SwissArmyTransformer's schedules that use [`SAT_AUTO_RATE`] of the base rate.
const SAT_AUTO_STEPS: u64 = 100;
const SAT_AUTO_RATE: f64 = 0.05;
/// Final rate of [`ScheduleKind::SatCosine`] as a share of the base rate.
const SAT_DECAY_RATIO: f64 = 0.1;

impl ScheduleKind {
    const NAMES: &'static str = "constant, constant_with_warmup, linear, cosine, cosine_with_restarts, cosine_with_min_lr, polynomial, inverse_sqrt, sat_cosine, sat_linear, sat_constant, warmup_lr, warmup_decay_lr, warmup_cosine_lr";

    /// Name of the schedule on command lines and in configuration files, e.g. `warmup_lr`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::ConstantWithWarmup => "constant_with_warmup",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::CosineWithRestarts(_) => "cosine_with_restarts",
            Self::CosineWithMinLr(_) => "cosine_with_min_lr",
            Self::Polynomial(_) => "polynomial",
            Self::InverseSqrt(_) => "inverse_sqrt",
            Self::SatCosine => "sat_cosine",
            Self::SatLinear => "sat_linear",
            Self::SatConstant => "sat_constant",
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

impl ScheduleKind {
    /// Part after the warmup, if the schedule is one of SwissArmyTransformer's.
    const fn sat(self) -> Option<After> {
        match self {
            Self::SatConstant => Some(After::Constant),
            Self::SatLinear => Some(After::Decay),
            Self::SatCosine => Some(After::Cosine),
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
            Self::CosineWithRestarts(CurveOptions::default()),
            Self::CosineWithMinLr(CurveOptions::default()),
            Self::Polynomial(CurveOptions::default()),
            Self::InverseSqrt(CurveOptions::default()),
            Self::SatCosine,
            Self::SatLinear,
            Self::SatConstant,
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
        if let Some(after) = self.kind.sat() {
            return self.sat(after, step + 1);
        }
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let decay_steps = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = (step - self.warmup_steps) as f64 / decay_steps;
        match self.kind {
            ScheduleKind::CosineWithRestarts(options) => {
                let cycles = options.num_cycles.unwrap_or(1.0);
                match progress < 1.0 {
                    true => half_wave((cycles * progress) % 1.0),
                    false => 0.0,
                }
            }
            ScheduleKind::CosineWithMinLr(options) => {
                let cycles = options.num_cycles.unwrap_or(0.5);
                let end = options.min_lr.map(|rate| rate / self.base_lr);
                let end = end.or(options.min_lr_rate).unwrap_or(0.0);
                half_wave(2.0 * cycles * progress) * (1.0 - end) + end
            }
            ScheduleKind::Polynomial(options) => {
                let end = options.lr_end.unwrap_or(1e-7) / self.base_lr;
                let left = (1.0 - progress).max(0.0);
                (1.0 - end) * left.powf(options.power.unwrap_or(1.0)) + end
            }
            ScheduleKind::InverseSqrt(options) => {
                let scale = options.timescale.unwrap_or(match self.warmup_steps {
                    0 => 10_000,
                    steps => steps,
                });
                let since = (step - self.warmup_steps) as f64 / scale.max(1) as f64;
                1.0 / (since + 1.0).sqrt()
            }
            ScheduleKind::Linear => self.total_steps.saturating_sub(step) as f64 / decay_steps,
            ScheduleKind::Cosine => half_wave(progress),
            _ => 1.0,
        }
    }
}

/// A cosine from 1 at 0 to 0 at 1.
fn half_wave(progress: f64) -> f64 {
    (0.5 * (1.0 + (PI * progress).cos())).max(0.0)
}

impl Schedule {
    /// Factor on the base rate for update `iteration`, counted from 1, in SwissArmyTransformer. The decay begins at the end of
    /// the warmup but takes as long as the whole run, so the run ends before the decay does.
    fn sat(&self, after: After, iteration: u64) -> f64 {
        if iteration <= SAT_AUTO_STEPS {
            return SAT_AUTO_RATE;
        }
        if iteration <= self.warmup_steps {
            return iteration as f64 / self.warmup_steps as f64;
        }
        let since = (iteration - self.warmup_steps) as f64;
        let progress = (since / self.total_steps.max(1) as f64).min(1.0);
        match after {
            After::Constant => 1.0,
            After::Decay => 1.0 - progress,
            After::Cosine => {
                let span = 1.0 / SAT_DECAY_RATIO - 1.0;
                SAT_DECAY_RATIO * (((PI * progress).cos() + 1.0) * span / 2.0 + 1.0)
            }
        }
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

    /// Factors that the functions of transformers' `optimization.py` give for 10 updates, 2 of them warmup, and a base rate
    /// of 2e-5.
    #[test]
    fn schedules_of_hugging_face_with_arguments_have_its_values() {
        let close = |kind: ScheduleKind, expected: [f64; 5]| {
            for (step, factor) in [1, 3, 5, 7, 10].into_iter().zip(expected) {
                let got = schedule(kind, 2, 10).lr(step) / 2e-5;
                assert!((got - factor).abs() < 1e-12, "{kind:?} {step}: {got}");
            }
        };
        let options = CurveOptions::default();
        let restarts = |num_cycles| {
            ScheduleKind::CosineWithRestarts(CurveOptions {
                num_cycles,
                ..options
            })
        };
        let expected = [
            0.5,
            0.961_939_766_255_643_4,
            0.691_341_716_182_544_9,
            0.308_658_283_817_455_1,
            0.0,
        ];
        close(restarts(None), expected);
        let expected = [
            0.5,
            0.853_553_390_593_273_7,
            0.146_446_609_406_726_3,
            0.853_553_390_593_273_7,
            0.0,
        ];
        close(restarts(Some(2.0)), expected);
        let expected = [
            0.5,
            0.965_745_789_630_079_1,
            0.722_207_544_564_290_4,
            0.377_792_455_435_709_6,
            0.1,
        ];
        for (min_lr, min_lr_rate) in [(Some(2e-6), None), (None, Some(0.1))] {
            let options = CurveOptions {
                min_lr,
                min_lr_rate,
                ..options
            };
            close(ScheduleKind::CosineWithMinLr(options), expected);
        }
        let expected = [0.5, 0.875_625, 0.626_875, 0.378_125, 0.005];
        close(ScheduleKind::Polynomial(options), expected);
        let squared = CurveOptions {
            power: Some(2.0),
            lr_end: Some(1e-6),
            ..options
        };
        let expected = [0.5, 0.777_343_75, 0.421_093_75, 0.183_593_75, 0.05];
        close(ScheduleKind::Polynomial(squared), expected);
        let expected = [
            0.5,
            0.816_496_580_927_726_1,
            0.632_455_532_033_675_9,
            0.534_522_483_824_848_8,
            0.447_213_595_499_957_9,
        ];
        close(ScheduleKind::InverseSqrt(options), expected);
        let slow = CurveOptions {
            timescale: Some(8),
            ..options
        };
        let expected = [
            0.5,
            0.942_809_041_582_063_5,
            0.852_802_865_422_441_7,
            0.784_464_540_552_737,
            std::f64::consts::FRAC_1_SQRT_2,
        ];
        close(ScheduleKind::InverseSqrt(slow), expected);
        // Without a warmup it takes ten thousand steps.
        let long = schedule(ScheduleKind::InverseSqrt(options), 0, 10).lr(10_000) / 2e-5;
        assert!((long - 0.5_f64.sqrt()).abs() < 1e-12, "{long}");
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
    fn sat_schedules_go_on_with_a_warmup_longer_than_a_hundred_updates() {
        // `AnnealingLR.get_lr` of SwissArmyTransformer for 240 updates, 200 of them warmup, and a base rate of 1e-4.
        let starts = [
            (1, 5e-6),
            (100, 5e-6),
            (101, 5.05e-5),
            (150, 7.5e-5),
            (200, 1e-4),
        ];
        let ends = [
            (ScheduleKind::SatCosine, 9.397_114_317_029_975e-5),
            (ScheduleKind::SatLinear, 8.333_333_333_333_334e-5),
            (ScheduleKind::SatConstant, 1e-4),
        ];
        for (kind, end) in ends {
            let schedule = Schedule {
                base_lr: 1e-4,
                ..schedule(kind, 200, 240)
            };
            for (iteration, lr) in starts.into_iter().chain([(240, end)]) {
                let got = schedule.lr(iteration - 1);
                assert!(
                    (got / lr - 1.0).abs() < 1e-12,
                    "{kind:?} {iteration}: {got:e}"
                );
            }
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
        for kind in [
            ScheduleKind::CosineWithMinLr(CurveOptions::default()),
            ScheduleKind::Polynomial(CurveOptions::default()),
        ] {
            assert_eq!(kind.name().parse::<ScheduleKind>().unwrap(), kind);
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(serde_json::from_str::<ScheduleKind>(&json).unwrap(), kind);
        }
        assert!("reduce_lr_on_plateau".parse::<ScheduleKind>().is_err());
    }
}
