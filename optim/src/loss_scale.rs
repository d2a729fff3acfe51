//! The loss scale of fp16 training: the factor on the loss that keeps small gradients representable.
//!
//! A dynamic scale follows the rule that DeepSpeed publishes. After an overflow the step is skipped; the scale is
//! halved once the patience (`hysteresis`) is used up. Every `window` clean steps since the last overflow it is
//! doubled and the patience refilled. The state machine is pure: the same verdicts on every rank give the same scale.

use serde::{Deserialize, Serialize};

use crate::OptimError;

/// How the scale is chosen.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossScale {
    /// Always this factor; an overflow skips the step and changes nothing else.
    Static(f64),
    /// Found by trial.
    Dynamic(DynamicScale),
}

impl Default for LossScale {
    fn default() -> Self {
        Self::Dynamic(DynamicScale::default())
    }
}

/// The numbers of a dynamic scale.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicScale {
    /// The first scale.
    pub initial: f64,
    /// What the scale is divided by after overflows and multiplied with after clean steps.
    pub factor: f64,
    /// Clean steps since the last overflow after which the scale grows, and grows again.
    pub window: u64,
    /// Overflows until the scale falls: 1 lowers it at every one.
    pub hysteresis: u32,
    /// Whether every clean step refills the patience, not only the growth of the scale.
    pub consecutive_hysteresis: bool,
    /// The scale never falls below.
    pub minimum: f64,
}

impl Default for DynamicScale {
    fn default() -> Self {
        Self {
            initial: 65536.0,
            factor: 2.0,
            window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            minimum: 1.0,
        }
    }
}

/// What moves during training; goes into checkpoints.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// The scale of the next step.
    pub scale: f64,
    /// Overflows left until the scale falls.
    pub patience: u32,
    /// Steps since the last overflow, or since the start; only its remainder by the window counts.
    pub clean_steps: u64,
}

/// What becomes of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Verdict {
    /// All gradients are finite: apply them, divided by the scale that the loss was multiplied with.
    Apply,
    /// Some gradient overflowed: weights and optimizer state stay as they are.
    Skip,
}

/// Gradients overflow at the smallest scale allowed, so no scale helps.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("gradients overflow fp16 at the smallest loss scale {minimum}")]
pub struct MinimumReached {
    /// The smallest scale.
    pub minimum: f64,
}

/// The scale and its history.
///
/// ```
/// use optim::loss_scale::{LossScale, LossScaler, Verdict};
///
/// let mut scaler = LossScaler::new(LossScale::default())?;
/// assert_eq!(scaler.scale(), 65536.0);
/// // The first overflow uses up the patience, the second halves the scale.
/// assert_eq!(scaler.update(true)?, Verdict::Skip);
/// assert_eq!(scaler.update(true)?, Verdict::Skip);
/// assert_eq!(scaler.scale(), 32768.0);
/// assert_eq!(scaler.update(false)?, Verdict::Apply);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossScaler {
    rule: LossScale,
    state: ScalerState,
}

impl LossScaler {
    /// A scaler in its first state.
    ///
    /// # Errors
    /// [`OptimError::OutOfRange`] naming the number.
    pub fn new(rule: LossScale) -> Result<Self, OptimError> {
        let check = |what, value: f64, expected, fits: bool| {
            if fits && value.is_finite() {
                Ok(())
            } else {
                Err(OptimError::OutOfRange {
                    what,
                    expected,
                    got: value,
                })
            }
        };
        let state = match rule {
            LossScale::Static(scale) => {
                check("loss scale", scale, "finite and above 0", scale > 0.0)?;
                ScalerState {
                    scale,
                    patience: 0,
                    clean_steps: 0,
                }
            }
            LossScale::Dynamic(rule) => {
                let DynamicScale {
                    initial,
                    factor,
                    minimum,
                    ..
                } = rule;
                check(
                    "minimum loss scale",
                    minimum,
                    "finite and above 0",
                    minimum > 0.0,
                )?;
                let above = "finite and not below the minimum loss scale";
                check("initial loss scale", initial, above, initial >= minimum)?;
                check(
                    "loss scale factor",
                    factor,
                    "finite and above 1",
                    factor > 1.0,
                )?;
                let window = rule.window as f64;
                check("loss scale window", window, "at least 1", rule.window > 0)?;
                let hysteresis = rule.hysteresis.into();
                check("hysteresis", hysteresis, "at least 1", rule.hysteresis > 0)?;
                ScalerState {
                    scale: initial,
                    patience: rule.hysteresis,
                    clean_steps: 0,
                }
            }
        };
        Ok(Self { rule, state })
    }

    /// The factor on the next step's loss.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// How the scale is chosen.
    #[must_use]
    pub fn rule(&self) -> LossScale {
        self.rule
    }

    /// What a checkpoint keeps.
    #[must_use]
    pub fn state(&self) -> ScalerState {
        self.state
    }

    /// Goes on from a checkpoint. A static scale keeps its own factor.
    pub fn restore(&mut self, state: ScalerState) {
        if matches!(self.rule, LossScale::Dynamic(_)) {
            self.state = state;
        }
    }

    /// Takes in whether any gradient on any rank overflowed in this step.
    ///
    /// # Errors
    /// [`MinimumReached`] when the scale would have to fall below its minimum; nothing changes then.
    pub fn update(&mut self, overflow: bool) -> Result<Verdict, MinimumReached> {
        let verdict = if overflow {
            Verdict::Skip
        } else {
            Verdict::Apply
        };
        let LossScale::Dynamic(rule) = self.rule else {
            return Ok(verdict);
        };
        let state = &mut self.state;
        if overflow {
            if state.patience > 1 {
                state.patience -= 1;
            } else if state.scale <= rule.minimum {
                let minimum = rule.minimum;
                return Err(MinimumReached { minimum });
            } else {
                state.scale = (state.scale / rule.factor).max(rule.minimum);
            }
            state.clean_steps = 0;
        } else {
            state.clean_steps += 1;
            let grows = state.clean_steps.is_multiple_of(rule.window);
            if grows {
                state.scale *= rule.factor;
            }
            if grows || rule.consecutive_hysteresis {
                state.patience = rule.hysteresis;
            }
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(consecutive_hysteresis: bool) -> LossScaler {
        let rule = DynamicScale {
            initial: 16.0,
            window: 4,
            consecutive_hysteresis,
            ..DynamicScale::default()
        };
        LossScaler::new(LossScale::Dynamic(rule)).unwrap()
    }

    /// Runs a script of `x` (overflow) and `.` (clean step): scale and patience after each.
    fn trace(scaler: &mut LossScaler, script: &str) -> Vec<(f64, u32)> {
        script
            .chars()
            .map(|step| {
                let overflow = step == 'x';
                let verdict = scaler.update(overflow).unwrap();
                assert_eq!(verdict == Verdict::Skip, overflow);
                (scaler.scale(), scaler.state().patience)
            })
            .collect()
    }

    #[test]
    fn hysteresis_is_refilled_when_the_scale_grows() {
        let mut scaler = small(false);
        // Clean steps between overflows keep the patience used up: every further overflow halves.
        let seen = trace(&mut scaler, "x.x..x");
        let expected = [(16.0, 1), (16.0, 1), (8.0, 1), (8.0, 1), (8.0, 1), (4.0, 1)];
        assert_eq!(seen, expected);
        let seen = trace(&mut scaler, "....x....");
        let expected = [
            (4.0, 1),
            (4.0, 1),
            (4.0, 1),
            (8.0, 2),
            (8.0, 1),
            (8.0, 1),
            (8.0, 1),
            (8.0, 1),
            (16.0, 2),
        ];
        assert_eq!(seen, expected);
        // Without an overflow the scale grows every window.
        let seen = trace(&mut scaler, "........");
        assert_eq!(seen[3], (32.0, 2));
        assert_eq!(seen[7], (64.0, 2));
    }

    #[test]
    fn consecutive_hysteresis_refills_at_every_clean_step() {
        let seen = trace(&mut small(true), "x.x.xx..xxx");
        let expected = [
            (16.0, 1),
            (16.0, 2),
            (16.0, 1),
            (16.0, 2),
            (16.0, 1),
            (8.0, 1),
            (8.0, 2),
            (8.0, 2),
            (8.0, 1),
            (4.0, 1),
            (2.0, 1),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn the_published_defaults_grow_after_a_thousand_clean_steps() {
        let mut scaler = LossScaler::new(LossScale::default()).unwrap();
        let seen = trace(&mut scaler, &".".repeat(1000));
        assert_eq!(seen[998].0, 65536.0);
        assert_eq!(seen[999].0, 131_072.0);
    }

    #[test]
    fn an_overflow_at_the_minimum_scale_is_fatal_after_the_hysteresis() {
        let mut scaler = small(false);
        let seen = trace(&mut scaler, "xxxxx");
        assert_eq!(seen.last(), Some(&(1.0, 1)));
        let before = scaler.state();
        let error = scaler.update(true).unwrap_err();
        assert_eq!(error, MinimumReached { minimum: 1.0 });
        assert_eq!(scaler.state(), before);
        // At the minimum with patience left, an overflow is only skipped.
        let rule = DynamicScale {
            initial: 1.0,
            ..DynamicScale::default()
        };
        let mut scaler = LossScaler::new(LossScale::Dynamic(rule)).unwrap();
        assert_eq!(scaler.update(true), Ok(Verdict::Skip));
        assert!(scaler.update(true).is_err());
    }

    #[test]
    fn the_last_halving_stops_at_a_minimum_that_is_no_power_of_two() {
        let rule = DynamicScale {
            initial: 4.0,
            minimum: 1.5,
            hysteresis: 1,
            ..DynamicScale::default()
        };
        let mut scaler = LossScaler::new(LossScale::Dynamic(rule)).unwrap();
        assert_eq!(trace(&mut scaler, "xx"), [(2.0, 1), (1.5, 1)]);
        assert!(scaler.update(true).is_err());
    }

    #[test]
    fn a_static_scale_skips_and_never_moves() {
        let mut scaler = LossScaler::new(LossScale::Static(128.0)).unwrap();
        for overflow in [true, true, true, false] {
            assert_eq!(scaler.update(overflow).unwrap() == Verdict::Skip, overflow);
        }
        assert_eq!(scaler.scale(), 128.0);
    }

    #[test]
    fn a_restored_scaler_continues_identically() {
        let mut scaler = small(false);
        trace(&mut scaler, "x..");
        let text = serde_json::to_string(&scaler.state()).unwrap();
        let mut other = small(false);
        other.restore(serde_json::from_str(&text).unwrap());
        assert_eq!(trace(&mut scaler, "..x"), trace(&mut other, "..x"));
        assert_eq!(scaler, other);
    }

    #[test]
    fn loss_scale_options_out_of_range_are_refused() {
        let refused = |change: fn(&mut DynamicScale)| {
            let mut rule = DynamicScale::default();
            change(&mut rule);
            LossScaler::new(LossScale::Dynamic(rule))
                .unwrap_err()
                .to_string()
        };
        assert!(refused(|r| r.window = 0).contains("window"));
        assert!(refused(|r| r.hysteresis = 0).contains("hysteresis"));
        assert!(refused(|r| r.minimum = 0.0).contains("minimum loss scale"));
        assert!(refused(|r| r.initial = 0.5).contains("initial loss scale"));
        assert!(refused(|r| r.factor = 1.0).contains("factor"));
        assert!(LossScaler::new(LossScale::Static(0.0)).is_err());
    }
}
