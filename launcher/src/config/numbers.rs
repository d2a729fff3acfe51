//! Numeric settings besides `--precision`: gradient dtype, pure bf16, loss scale of fp16.

use crate::lang::both;
use clap::ValueEnum;
use models::Family;
use optim::adamw::PureBf16;
use optim::loss_scale::LossScale;
use serde::{Deserialize, Serialize};

use super::{PrecisionChoice, RunConfig};
use crate::config::words::value_name;
use crate::error::Failure;

/// `--grad-dtype`: dtype in which gradients are accumulated over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GradDtype {
    /// f32.
    #[value(alias = "fp32")]
    F32,
    /// bf16, rounded at random after every micro-batch.
    Bf16,
}

/// `--pure-bf16-weights`: how updated weights are rounded to bf16 with `--precision pure-bf16`.
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

/// `--pure-bf16-moments`: dtype of Adam's moments with `--precision pure-bf16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PureBf16Moments {
    /// bf16.
    Bf16,
    /// f32.
    #[value(alias = "fp32")]
    F32,
}

/// `--moments`: storage of Adam's moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Moments {
    /// As the precision stores them: f32, with pure-bf16 what `--pure-bf16-moments` says.
    Full,
    /// 8 bits an element and an f32 per 256 elements, as bitsandbytes on a GPU.
    #[value(name = "8bit")]
    EightBit,
}

/// Numeric settings that `--precision` leaves open: gradient dtype, pure bf16, and loss scale.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numbers {
    /// Dtype in which gradients are accumulated. `None`: the default of the precision.
    pub grad_dtype: Option<GradDtype>,
    /// Rounding of the weights and dtype of Adam's moments with pure bf16. The other precisions do not use
    /// it.
    pub pure_bf16: PureBf16,
    /// Whether Adam's moments have 8 bits (`--moments 8bit`). The dtype in `pure_bf16` is unused then.
    #[serde(default)]
    pub eight_bit: bool,
    /// Loss scale of fp16, static or dynamic. The other precisions do not use it.
    pub loss_scale: LossScale,
}

impl Numbers {
    /// Flags that reproduce these settings in `precision`, as (name, value).
    pub(crate) fn flags(&self, precision: PrecisionChoice) -> Vec<(&'static str, String)> {
        let mut flags = Vec::new();
        flags.extend(
            self.grad_dtype
                .map(|dtype| ("grad-dtype", value_name(dtype))),
        );
        if precision == PrecisionChoice::PureBf16 {
            flags.push(("pure-bf16-weights", self.pure_bf16.weights.name().into()));
            if !self.eight_bit {
                flags.push(("pure-bf16-moments", self.pure_bf16.moments.name().into()));
            }
        }
        if self.eight_bit {
            flags.push(("moments", value_name(Moments::EightBit)));
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

/// Whether activations of `family` exceed the range of f16.
pub(crate) const fn exceeds_f16(family: Family) -> bool {
    matches!(family, Family::Glm4v | Family::Glm41v)
}

/// Checks that models of `family` can be trained in the configured precision.
///
/// # Errors
/// The precision is fp16 and the family is one of GLM-4, whose activations exceed the range of fp16 (exit 2).
pub fn check_family(config: &RunConfig, family: Family) -> Result<(), Failure> {
    if config.precision != PrecisionChoice::Fp16 || !exceeds_f16(family) {
        return Ok(());
    }
    Err(Failure::usage(
        both("this family cannot be trained in fp16", "该系列模型不能用 fp16 训练"),
        both("activations of the GLM-4 decoders exceed 65504, the largest fp16 number; their publisher does not support fp16", "GLM-4 解码器的激活会超过 fp16 的最大值 65504；其发布者不支持 fp16"),
    )
    .next(both("--precision bf16, which needs the same memory", "请使用 --precision bf16，它需要的内存相同")))
}
