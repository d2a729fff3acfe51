//! Number formats beside `--precision`: gradients, pure bf16, the loss scale of fp16.

use clap::ValueEnum;
use models::Family;
use optim::adamw::{Bf16Storage, MomentDtype, PureBf16};
use optim::loss_scale::{DynamicScale, LossScale};
use serde::{Deserialize, Serialize};

use super::{PrecisionChoice, RunConfig};
use crate::args::{Args, value_name};
use crate::exit::Failure;

/// `--grad-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GradDtype {
    /// f32.
    #[value(alias = "fp32")]
    F32,
    /// bf16, rounded at random after every micro-batch.
    Bf16,
}

/// `--pure-bf16-weights`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum PureBf16Weights {
    /// Rounded up or down at random, in the mean to the exact value.
    #[default]
    Stochastic,
    /// Rounded to the nearest; the error is kept in a third bf16 number and added back.
    Kahan,
    /// Rounded to the nearest: small updates are lost. For comparisons.
    Nearest,
}

/// `--pure-bf16-moments`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PureBf16Moments {
    /// bf16.
    Bf16,
    /// f32.
    #[value(alias = "fp32")]
    F32,
}

/// What `--precision` leaves open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numbers {
    /// Format of accumulated gradients; `None` is the precision's own.
    pub grad_dtype: Option<GradDtype>,
    /// Weights and moments of pure bf16.
    pub pure_bf16: PureBf16,
    /// The loss scale of fp16.
    pub loss_scale: LossScale,
}

/// Checks the flags against `precision`.
pub(super) fn resolve(args: &Args, precision: PrecisionChoice) -> Result<Numbers, Failure> {
    let only = |flag: &str, given: bool, needed: PrecisionChoice| {
        if given && precision != needed {
            return Err(Failure::usage(
                format!("{flag} needs --precision {}", value_name(needed)),
                format!("this run's precision is {}", value_name(precision)),
            )
            .next(format!("omit {flag}, or change --precision")));
        }
        Ok(())
    };
    let pure = PrecisionChoice::PureBf16;
    only(
        "--pure-bf16-weights",
        args.pure_bf16_weights.is_some(),
        pure,
    )?;
    only(
        "--pure-bf16-moments",
        args.pure_bf16_moments.is_some(),
        pure,
    )?;
    let fp16 = PrecisionChoice::Fp16;
    only("--loss-scale", args.loss_scale.is_some(), fp16)?;
    let power = args.initial_scale_power;
    only("--initial-scale-power", power.is_some(), fp16)?;
    only(
        "--loss-scale-window",
        args.loss_scale_window.is_some(),
        fp16,
    )?;
    only("--hysteresis", args.hysteresis.is_some(), fp16)?;
    only("--min-loss-scale", args.min_loss_scale.is_some(), fp16)?;
    Ok(Numbers {
        grad_dtype: args.grad_dtype,
        pure_bf16: PureBf16 {
            weights: match args.pure_bf16_weights {
                None | Some(PureBf16Weights::Stochastic) => Bf16Storage::Stochastic,
                Some(PureBf16Weights::Kahan) => Bf16Storage::Kahan,
                Some(PureBf16Weights::Nearest) => Bf16Storage::Nearest,
            },
            moments: match args.pure_bf16_moments {
                None | Some(PureBf16Moments::Bf16) => MomentDtype::Bf16,
                Some(PureBf16Moments::F32) => MomentDtype::F32,
            },
        },
        loss_scale: loss_scale(args)?,
    })
}

/// DeepSpeed's words: a scale of 0 is a dynamic one.
fn loss_scale(args: &Args) -> Result<LossScale, Failure> {
    let bad = |flag: &str, why: &str| {
        Failure::usage(format!("{flag} is out of range"), why.to_owned())
            .next("use the defaults of the loss scale: dynamic, from 2^16")
    };
    if let Some(scale) = args.loss_scale.filter(|scale| *scale != 0.0) {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(bad(
                "--loss-scale",
                "0 means dynamic; a fixed scale must be above 0",
            ));
        }
        return Ok(LossScale::Static(scale));
    }
    let mut rule = DynamicScale::default();
    if let Some(power) = args.initial_scale_power {
        rule.initial = 2f64.powi(power as i32);
    }
    rule.window = args.loss_scale_window.unwrap_or(rule.window);
    rule.hysteresis = args.hysteresis.unwrap_or(rule.hysteresis);
    rule.minimum = args.min_loss_scale.unwrap_or(rule.minimum);
    if !(rule.minimum > 0.0 && rule.minimum <= rule.initial) {
        return Err(bad(
            "--min-loss-scale",
            "it must be above 0 and at most the first scale",
        ));
    }
    Ok(LossScale::Dynamic(rule))
}

impl Numbers {
    /// The flags that give these numbers in `precision`.
    pub(super) fn flags(&self, precision: PrecisionChoice) -> Vec<(&'static str, String)> {
        let mut flags = Vec::new();
        flags.extend(
            self.grad_dtype
                .map(|dtype| ("grad-dtype", value_name(dtype))),
        );
        if precision == PrecisionChoice::PureBf16 {
            flags.push(("pure-bf16-weights", self.pure_bf16.weights.name().into()));
            flags.push(("pure-bf16-moments", self.pure_bf16.moments.name().into()));
        }
        if precision != PrecisionChoice::Fp16 {
            return flags;
        }
        match self.loss_scale {
            LossScale::Static(scale) => flags.push(("loss-scale", scale.to_string())),
            LossScale::Dynamic(rule) => {
                let power = rule.initial.log2().round();
                flags.push(("initial-scale-power", power.to_string()));
                flags.push(("loss-scale-window", rule.window.to_string()));
                flags.push(("hysteresis", rule.hysteresis.to_string()));
                flags.push(("min-loss-scale", rule.minimum.to_string()));
            }
        }
        flags
    }
}

/// Refuses what a family cannot be trained in.
///
/// # Errors
/// fp16 for the families whose activations leave its range.
pub fn check_family(config: &RunConfig, family: Family) -> Result<(), Failure> {
    let overflows = matches!(family, Family::Glm4v | Family::Glm41v);
    if config.precision != PrecisionChoice::Fp16 || !overflows {
        return Ok(());
    }
    Err(Failure::usage(
        "this family cannot be trained in fp16",
        "activations of the GLM-4 decoders exceed 65504, the largest fp16 number; their publisher does not support fp16",
    )
    .next("--precision bf16, which needs the same memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match crate::args::parse(&words).expect("parses") {
            crate::args::Command::Train { args, .. } => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flags_of_another_precision_are_refused() {
        for (line, precision) in [
            ("--pure-bf16-weights kahan", PrecisionChoice::Bf16),
            ("--loss-scale 128", PrecisionChoice::PureBf16),
            ("--hysteresis 1", PrecisionChoice::F32),
        ] {
            let failure = resolve(&args(line), precision).expect_err(line);
            assert!(failure.title.contains("needs --precision"), "{line}");
        }
        for line in [
            "--loss-scale -1",
            "--min-loss-scale 0",
            "--min-loss-scale 1e9",
        ] {
            assert!(
                resolve(&args(line), PrecisionChoice::Fp16).is_err(),
                "{line}"
            );
        }
    }

    #[test]
    fn precisions_parse_what_they_print() {
        for (line, precision) in [
            ("--grad-dtype bf16", PrecisionChoice::Bf16),
            (
                "--pure-bf16-weights kahan --pure-bf16-moments f32 --grad-dtype f32",
                PrecisionChoice::PureBf16,
            ),
            ("--loss-scale 1024", PrecisionChoice::Fp16),
            (
                "--loss-scale 0 --initial-scale-power 10 --hysteresis 1 --loss-scale-window 50 --min-loss-scale 2",
                PrecisionChoice::Fp16,
            ),
        ] {
            let numbers = resolve(&args(line), precision).expect(line);
            let printed = numbers.flags(precision);
            let printed: Vec<String> = printed
                .iter()
                .map(|(flag, value)| format!("--{flag} {value}"))
                .collect();
            let again = resolve(&args(&printed.join(" ")), precision).expect("resolves");
            assert_eq!(numbers, again, "{line}");
        }
    }
}
