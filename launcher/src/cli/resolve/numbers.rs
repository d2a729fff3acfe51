//! The flags of number formats beside `--precision`.

use crate::cli::Args;
use crate::config::words::value_name;
use crate::config::{Moments, Numbers, PrecisionChoice, PureBf16Moments, PureBf16Weights};
use crate::error::Failure;
use crate::lang::{Both, both, text};
use optim::adamw::{Bf16Storage, MomentDtype, PureBf16};
use optim::loss_scale::{DynamicScale, LossScale};

/// Checks the flags against `precision`.
pub(super) fn resolve(args: &Args, precision: PrecisionChoice) -> Result<Numbers, Failure> {
    let only = |flag: &str, given: bool, needed: PrecisionChoice| {
        if given && precision != needed {
            return Err(Failure::usage(
                text!(
                    "{flag} needs --precision {}",
                    "{flag} 需要 --precision {}",
                    value_name(needed)
                ),
                text!(
                    "this run's precision is {}",
                    "本次运行的精度是 {}",
                    value_name(precision)
                ),
            )
            .next(text!(
                "omit {flag}, or change --precision",
                "请去掉 {flag}，或更改 --precision"
            )));
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
    let eight_bit = args.moments == Some(Moments::EightBit);
    if eight_bit && args.pure_bf16_moments.is_some() {
        return Err(Failure::usage(
            both(
                "--pure-bf16-moments and --moments 8bit exclude each other",
                "--pure-bf16-moments 和 --moments 8bit 互斥",
            ),
            both(
                "both choose the number format of Adam's moments",
                "两者都决定 Adam 动量的数值格式",
            ),
        )
        .next(both(
            "omit --pure-bf16-moments, or use --moments full",
            "请去掉 --pure-bf16-moments，或使用 --moments full",
        )));
    }
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
        eight_bit,
        loss_scale: loss_scale(args)?,
    })
}

/// DeepSpeed's words: a scale of 0 is a dynamic one.
fn loss_scale(args: &Args) -> Result<LossScale, Failure> {
    let bad = |flag: &str, why: Both| {
        Failure::usage(text!("{flag} is out of range", "{flag} 超出范围"), why).next(both(
            "use the defaults of the loss scale: dynamic, from 2^16",
            "请使用损失缩放的默认值：动态，从 2^16 开始",
        ))
    };
    if let Some(scale) = args.loss_scale.filter(|scale| *scale != 0.0) {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(bad(
                "--loss-scale",
                both(
                    "0 means dynamic; a fixed scale must be above 0",
                    "0 表示动态；固定的缩放必须大于 0",
                ),
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
            both(
                "it must be above 0 and at most the first scale",
                "它必须大于 0，且不大于初始缩放",
            ),
        ));
    }
    Ok(LossScale::Dynamic(rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match crate::cli::parse(&words).expect("parses") {
            crate::cli::Command::Train { args, .. } => *args,
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
        let both = args("--moments 8bit --pure-bf16-moments f32");
        assert!(resolve(&both, PrecisionChoice::PureBf16).is_err());
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
    fn numbers_read_what_they_print() {
        for (line, precision) in [
            ("--grad-dtype bf16", PrecisionChoice::Bf16),
            (
                "--pure-bf16-weights kahan --pure-bf16-moments f32 --grad-dtype f32",
                PrecisionChoice::PureBf16,
            ),
            ("--loss-scale 1024", PrecisionChoice::Fp16),
            ("--moments 8bit", PrecisionChoice::Bf16),
            (
                "--moments 8bit --pure-bf16-weights kahan",
                PrecisionChoice::PureBf16,
            ),
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
