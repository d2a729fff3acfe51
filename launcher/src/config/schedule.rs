//! Arguments of DeepSpeed's learning-rate schedules.

use crate::lang::{Both, Text, both, text};
use std::fmt;
use std::str::FromStr;

use optim::{ScheduleKind, WarmupOptions, WarmupShape};
use serde::{Deserialize, Serialize};

use super::Scheduler;

/// `--lr-scheduler-kwargs`: arguments of the schedules `warmup_lr`, `warmup_decay_lr` and `warmup_cosine_lr`, with
/// DeepSpeed's names.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerKwargs {
    /// Shape of the warmup, and the learning rates at the start of warmup and at the end of the decay.
    pub warmup: WarmupOptions,
    /// Optimizer updates until the end of the decay; `None` means the length of the run.
    pub total_num_steps: Option<u64>,
}

/// Names of the arguments, in output order.
const NAMES: [&str; 5] = [
    "warmup_type",
    "warmup_min_lr",
    "warmup_min_ratio",
    "cos_min_ratio",
    "total_num_steps",
];

impl SchedulerKwargs {
    /// Learning-rate schedule of type `scheduler`. Those of DeepSpeed get `warmup` of these arguments; the
    /// others ignore it. The result does not contain `total_num_steps`.
    #[must_use]
    pub fn kind(&self, scheduler: Scheduler) -> ScheduleKind {
        match scheduler {
            Scheduler::Linear => ScheduleKind::Linear,
            Scheduler::Cosine => ScheduleKind::Cosine,
            Scheduler::SatCosine => ScheduleKind::SatCosine,
            Scheduler::Constant => ScheduleKind::Constant,
            Scheduler::ConstantWithWarmup => ScheduleKind::ConstantWithWarmup,
            Scheduler::WarmupLr => ScheduleKind::WarmupLr(self.warmup),
            Scheduler::WarmupDecayLr => ScheduleKind::WarmupDecayLr(self.warmup),
            Scheduler::WarmupCosineLr => ScheduleKind::WarmupCosineLr(self.warmup),
        }
    }
}

impl FromStr for SchedulerKwargs {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut kwargs = Self::default();
        let pairs;
        let text = match text.trim_start().starts_with('{') {
            true => {
                pairs = of_json(text)?;
                &pairs
            }
            false => text,
        };
        for part in text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                text!(
                    "'{part}' is not of the form name=value",
                    "'{part}' 不是 name=value 的形式"
                )
            })?;
            let bad = |what: Both| {
                text!(
                    "{name} must be {what}, not '{value}'",
                    "{name} 必须{what}，不能是 '{value}'"
                )
            };
            let number = || {
                let number = value.parse().ok();
                number.filter(|x: &f64| x.is_finite() && *x >= 0.0)
            };
            let share = || {
                number()
                    .filter(|x| *x <= 1.0)
                    .ok_or_else(|| bad(both("in 0..=1", "在 0..=1 之内")))
            };
            match name {
                "warmup_type" => {
                    kwargs.warmup.shape = match value {
                        "log" => WarmupShape::Log,
                        "linear" => WarmupShape::Linear,
                        _ => return Err(bad(both("log or linear", "是 log 或 linear"))),
                    }
                }
                "warmup_min_lr" => {
                    kwargs.warmup.min_lr = number()
                        .ok_or_else(|| bad(both("a number of at least 0", "是不小于 0 的数")))?;
                }
                "warmup_min_ratio" => kwargs.warmup.min_ratio = share()?,
                "cos_min_ratio" => kwargs.warmup.end_ratio = share()?,
                "total_num_steps" => {
                    let steps = value.parse().ok().filter(|steps| *steps > 0);
                    kwargs.total_num_steps =
                        Some(steps.ok_or_else(|| bad(both("at least 1", "至少为 1")))?);
                }
                other => {
                    return Err(text!(
                        "'{other}' is not one of {}",
                        "'{other}' 不在 {} 之中",
                        NAMES.join(", ")
                    ));
                }
            }
        }
        Ok(kwargs)
    }
}

/// The pairs `name=value` of a JSON object, as the Hugging Face trainers take these arguments.
fn of_json(text: &str) -> Result<String, Text> {
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|_| {
            text!(
                "'{text}' is neither name=value nor a JSON object",
                "'{text}' 既不是 name=value，也不是 JSON 对象"
            )
        })?;
    let pair = |(name, value): (&String, &serde_json::Value)| match value {
        serde_json::Value::String(word) => format!("{name}={word}"),
        other => format!("{name}={other}"),
    };
    Ok(object.iter().map(pair).collect::<Vec<_>>().join(","))
}

impl fmt::Display for SchedulerKwargs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = match self.warmup.shape {
            WarmupShape::Log => "log",
            WarmupShape::Linear => "linear",
        };
        let WarmupOptions {
            min_lr,
            min_ratio,
            end_ratio,
            ..
        } = self.warmup;
        write!(
            f,
            "warmup_type={shape},warmup_min_lr={min_lr},warmup_min_ratio={min_ratio},cos_min_ratio={end_ratio}"
        )?;
        match self.total_num_steps {
            Some(steps) => write!(f, ",total_num_steps={steps}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduler_arguments_parse_what_they_print() {
        for text in [
            "",
            "warmup_type=linear",
            "warmup_min_lr=1e-7, cos_min_ratio=0.1,total_num_steps=500",
            "{}",
            r#"{"warmup_type": "linear", "cos_min_ratio": 0.1}"#,
        ] {
            let read: SchedulerKwargs = text.parse().expect(text);
            assert_eq!(read.to_string().parse(), Ok(read), "{text}");
        }
        let linear: SchedulerKwargs = "warmup_type=linear".parse().expect("reads");
        assert_eq!(linear.warmup.shape, WarmupShape::Linear);
        let json = r#"{"warmup_type": "linear"}"#.parse();
        assert_eq!(json, Ok(linear));
        for bad in [
            "linear",
            "warmup_type=cosine",
            "warmup_min_lr=-1",
            "cos_min_ratio=2",
            "total_num_steps=0",
            "num_cycles=2",
            r#"{"num_cycles": 2}"#,
            r#"{"warmup_type": "#,
        ] {
            assert!(bad.parse::<SchedulerKwargs>().is_err(), "{bad}");
        }
    }
}
