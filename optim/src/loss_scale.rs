//! Loss scale of fp16 training: the factor on the loss that keeps small gradients representable in fp16.
//!
//! A dynamic scale follows DeepSpeed's rule. An overflow skips the step and uses up one unit of patience
//! (`hysteresis`). An overflow without patience left halves the scale. After every `window` clean steps since the
//! last overflow the scale doubles and the patience is refilled. The state machine is pure: the same sequence of
//! overflows on every rank gives the same scale.

use serde::{Deserialize, Serialize};

use crate::OptimError;

/// Rule that chooses the loss scale of fp16 training: static or dynamic.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossScale {
    /// Constant loss scale. An overflow skips the step and changes nothing else.
    Static(f64),
    /// Loss scale that shrinks after overflows and grows after steps without overflow.
    Dynamic(DynamicScale),
}

impl Default for LossScale {
    fn default() -> Self {
        Self::Dynamic(DynamicScale::default())
    }
}

/// Parameters of a dynamic loss scale, as in DeepSpeed. Patience is the number of overflows left until the
/// scale shrinks.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicScale {
    /// Loss scale of a run's first optimizer step.
    pub initial: f64,
    /// Factor by which the loss scale is divided when it shrinks and multiplied when it grows.
    pub factor: f64,
    /// Number of consecutive optimizer steps without overflow after which the loss scale grows. It grows
    /// again after every further `window` such steps.
    pub window: u64,
    /// Full patience: number of overflows after which the loss scale shrinks. With 1, every overflow shrinks
    /// it.
    pub hysteresis: u32,
    /// Whether every optimizer step without overflow refills the patience (overflows left until the loss
    /// scale shrinks). Otherwise only growth of the scale refills it.
    pub consecutive_hysteresis: bool,
    /// Lower bound of the loss scale. An overflow at this scale that would shrink it is an error
    /// ([`MinimumReached`]).
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

/// Variable state of a [`LossScaler`], as stored in checkpoints.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// Loss scale of the next optimizer step.
    pub scale: f64,
    /// Patience: number of overflows left until the loss scale shrinks.
    pub patience: u32,
    /// Number of optimizer steps without overflow since the last overflow, or since the start. Only the
    /// remainder modulo [`DynamicScale::window`] matters.
    pub clean_steps: u64,
}

/// Verdict on an optimizer step: whether the caller applies or skips its gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Verdict {
    /// Apply the gradients: all are finite. They still carry the scale by which the loss was multiplied.
    Apply,
    /// Skip the step: a gradient overflowed. Weights and optimizer state stay unchanged.
    Skip,
}

/// Error: gradients overflow at the minimum scale, so no allowed scale helps.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("gradients overflow fp16 at the smallest loss scale {minimum}")]
pub struct MinimumReached {
    /// Lower bound of the loss scale, at which gradients still overflow.
    pub minimum: f64,
}

/// Loss scale of fp16 training, and the state machine that adapts it after every optimizer step.
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
    /// Creates a scaler in its initial state.
    ///
    /// # Errors
    /// [`OptimError::OutOfRange`] with the name of the parameter that is out of range.
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

    /// Loss scale of the next optimizer step: the factor by which its losses are multiplied before backward.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Rule that chooses the loss scale, as given to [`LossScaler::new`].
    #[must_use]
    pub fn rule(&self) -> LossScale {
        self.rule
    }

    /// Current loss scale and counters, to be stored in a checkpoint.
    #[must_use]
    pub fn state(&self) -> ScalerState {
        self.state
    }

    /// Restores loss scale and counters from a checkpoint. A static scale ignores them and stays at its own
    /// factor.
    pub fn restore(&mut self, state: ScalerState) {
        if matches!(self.rule, LossScale::Dynamic(_)) {
            self.state = state;
        }
    }

    /// Adapts the loss scale after an optimizer step, and returns whether to apply or skip the step's
    /// gradients. `overflow` says that a gradient on some rank was not finite.
    ///
    /// # Errors
    /// [`MinimumReached`] when the scale would have to shrink below its minimum. The state is unchanged then.
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

    /// Feeds a string of `x` (overflow) and `.` (clean step). Returns scale and patience after each.
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
        // Clean steps between overflows do not refill the patience here, so every further overflow halves the scale.
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
        // Without an overflow the scale grows after every `window` steps.
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
