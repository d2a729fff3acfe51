//! Choice of the best checkpoint by a metric of the held-out samples, as in Hugging Face's `Trainer`.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// `--metric-for-best-model`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BestMetric {
    /// Mean loss per supervised token.
    #[default]
    #[value(alias = "eval_loss")]
    Loss,
    /// Share of generated answers that match exactly.
    #[value(name = "exact_match", alias = "eval_exact_match")]
    ExactMatch,
}

impl BestMetric {
    /// Its name in `eval_results.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loss => "eval_loss",
            Self::ExactMatch => "exact_match",
        }
    }
}

/// Rule by which one evaluation is better than another, and what follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// The metric that is compared.
    pub metric: BestMetric,
    /// Whether a greater value of the metric is better.
    pub greater_is_better: bool,
    /// Number of evaluations in a row without a better one after which training ends; `None`: training takes all steps.
    pub patience: Option<u64>,
    /// Whether the best checkpoint survives and stands for the run after its end.
    pub load: bool,
}

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestSoFar {
    /// Training steps done at the evaluation.
    pub step: u64,
    /// Value of the metric.
    pub value: f64,
    /// Evaluations after it.
    pub since: u64,
}

impl Best {
    /// The best evaluation after one at `step` with `value`. A value that is not a number is never the best.
    #[must_use]
    pub fn after(&self, best: Option<BestSoFar>, step: u64, value: f64) -> Option<BestSoFar> {
        let is_better = |old: f64| match self.greater_is_better {
            true => value > old,
            false => value < old,
        };
        match best {
            Some(old) if !is_better(old.value) => Some(BestSoFar {
                since: old.since + 1,
                ..old
            }),
            _ if value.is_finite() => Some(BestSoFar {
                step,
                value,
                since: 0,
            }),
            none => none,
        }
    }

    /// Whether training ends because no evaluation was better for long enough.
    #[must_use]
    pub fn ends(&self, best: Option<BestSoFar>) -> bool {
        let (Some(patience), Some(best)) = (self.patience, best) else {
            return false;
        };
        best.since >= patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_evaluation_is_kept_and_patience_counts_the_others() {
        for (greater_is_better, values, expected) in [
            (false, [3.0, 1.0, 2.0, 1.0], (2, 1.0, 2)),
            (true, [3.0, 1.0, 2.0, 4.0], (4, 4.0, 0)),
            (false, [f64::NAN, 2.0, f64::NAN, 3.0], (2, 2.0, 2)),
        ] {
            let rule = Best {
                metric: BestMetric::Loss,
                greater_is_better,
                patience: Some(2),
                load: true,
            };
            let mut best = None;
            for (step, value) in (1..).zip(values) {
                best = rule.after(best, step, value);
            }
            let found = best.expect("an evaluation");
            assert_eq!((found.step, found.value, found.since), expected);
            assert_eq!(rule.ends(best), expected.2 >= 2);
        }
    }
}
