//! Arguments of learning-rate schedules.

use crate::lang::{Both, Text, both, text};
use std::fmt;
use std::str::FromStr;

use optim::{CurveOptions, ScheduleKind, WarmupOptions, WarmupShape};
use serde::{Deserialize, Serialize};

use super::Scheduler;

/// `--lr-scheduler-kwargs`: arguments of DeepSpeed's schedules (`warmup_lr`, `warmup_decay_lr`, `warmup_cosine_lr`) and of
/// Hugging Face's, with the names there.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerKwargs {
    /// Shape of the warmup, and the learning rates at the start of warmup and at the end of the decay.
    pub warmup: WarmupOptions,
    /// Optimizer updates until the end of the decay; `None` means the length of the run.
    pub total_num_steps: Option<u64>,
    /// Arguments of Hugging Face's schedules.
    pub curve: CurveOptions,
}

/// Names of the arguments, in output order.
const NAMES: [&str; 11] = [
    "warmup_type",
    "warmup_min_lr",
    "warmup_min_ratio",
    "cos_min_ratio",
    "total_num_steps",
    "num_cycles",
    "power",
    "lr_end",
    "min_lr",
    "min_lr_rate",
    "timescale",
];

impl SchedulerKwargs {
    /// Learning-rate schedule of type `scheduler`. Those of DeepSpeed get `warmup` of these arguments, those of Hugging
    /// Face `curve`. The result does not contain `total_num_steps`.
    #[must_use]
    pub fn kind(&self, scheduler: Scheduler) -> ScheduleKind {
        match scheduler {
            Scheduler::Linear => ScheduleKind::Linear,
            Scheduler::Cosine => ScheduleKind::Cosine,
            Scheduler::CosineWithRestarts => ScheduleKind::CosineWithRestarts(self.curve),
            Scheduler::CosineWithMinLr => ScheduleKind::CosineWithMinLr(self.curve),
            Scheduler::Polynomial => ScheduleKind::Polynomial(self.curve),
            Scheduler::InverseSqrt => ScheduleKind::InverseSqrt(self.curve),
            Scheduler::SatCosine => ScheduleKind::SatCosine,
            Scheduler::SatLinear => ScheduleKind::SatLinear,
            Scheduler::SatConstant => ScheduleKind::SatConstant,
            Scheduler::Constant => ScheduleKind::Constant,
            Scheduler::ConstantWithWarmup => ScheduleKind::ConstantWithWarmup,
            Scheduler::WarmupLr => ScheduleKind::WarmupLr(self.warmup),
            Scheduler::WarmupDecayLr => ScheduleKind::WarmupDecayLr(self.warmup),
            Scheduler::WarmupCosineLr => ScheduleKind::WarmupCosineLr(self.warmup),
        }
    }
}

impl SchedulerKwargs {
    /// Arguments with another value than their default, as name and value.
    fn changed(&self) -> Vec<(&'static str, String)> {
        let (own, plain) = (self.warmup, WarmupOptions::default());
        let other = |own: f64, plain: f64| (own.to_bits() != plain.to_bits()).then_some(own);
        let shape = (own.shape != plain.shape).then(|| "linear".to_owned());
        let CurveOptions {
            num_cycles,
            power,
            lr_end,
            min_lr,
            min_lr_rate,
            timescale,
        } = self.curve;
        let warmup = [
            other(own.min_lr, plain.min_lr),
            other(own.min_ratio, plain.min_ratio),
            other(own.end_ratio, plain.end_ratio),
        ];
        let curve = [num_cycles, power, lr_end, min_lr, min_lr_rate];
        let typed = |number: Option<f64>| number.map(|x| x.to_string());
        let steps = |steps: Option<u64>| steps.map(|x| x.to_string());
        let values = std::iter::once(shape)
            .chain(warmup.map(typed))
            .chain([steps(self.total_num_steps)])
            .chain(curve.map(typed))
            .chain([steps(timescale)]);
        let named = NAMES.into_iter().zip(values);
        named
            .filter_map(|(name, value)| Some((name, value?)))
            .collect()
    }

    /// The first argument that is given and that `scheduler` does not take.
    pub(crate) fn stranger(&self, scheduler: Scheduler) -> Option<&'static str> {
        let known = scheduler.arguments();
        let mut names = self.changed().into_iter().map(|(name, _)| name);
        names.find(|name| !known.contains(name))
    }

    /// The arguments as typed for `scheduler`; `None` if it takes none, or all of Hugging Face's have their default.
    pub(crate) fn typed(&self, scheduler: Scheduler) -> Option<String> {
        let is_deepspeed = scheduler.arguments().contains(&NAMES[0]);
        let text = match is_deepspeed {
            true => self.to_string(),
            false => pairs(self.changed()),
        };
        (!text.is_empty()).then_some(text)
    }
}

fn pairs(values: Vec<(&str, String)>) -> String {
    let pairs = values
        .into_iter()
        .map(|(name, value)| format!("{name}={value}"));
    pairs.collect::<Vec<_>>().join(",")
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
                "num_cycles" | "power" => {
                    let number = number().filter(|x| *x > 0.0);
                    let number =
                        number.ok_or_else(|| bad(both("a number above 0", "是大于 0 的数")))?;
                    match name {
                        "power" => kwargs.curve.power = Some(number),
                        _ => kwargs.curve.num_cycles = Some(number),
                    }
                }
                "lr_end" | "min_lr" => {
                    let rate = number()
                        .ok_or_else(|| bad(both("a number of at least 0", "是不小于 0 的数")))?;
                    match name {
                        "lr_end" => kwargs.curve.lr_end = Some(rate),
                        _ => kwargs.curve.min_lr = Some(rate),
                    }
                }
                "min_lr_rate" => kwargs.curve.min_lr_rate = Some(share()?),
                "timescale" => {
                    let steps = value.parse().ok().filter(|steps| *steps > 0);
                    kwargs.curve.timescale =
                        Some(steps.ok_or_else(|| bad(both("at least 1", "至少为 1")))?);
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
        let rest = Self {
            warmup: WarmupOptions::default(),
            ..*self
        };
        match &*pairs(rest.changed()) {
            "" => Ok(()),
            rest => write!(f, ",{rest}"),
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
            r#"{"min_lr": 1e-6, "num_cycles": 0.5}"#,
            "power=2,lr_end=1e-7,min_lr_rate=0.1,timescale=8",
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
            "num_stable_steps=2",
            "num_cycles=0",
            "timescale=0",
            "min_lr_rate=2",
            r#"{"decay_type": "linear"}"#,
            r#"{"warmup_type": "#,
        ] {
            assert!(bad.parse::<SchedulerKwargs>().is_err(), "{bad}");
        }
    }
}
