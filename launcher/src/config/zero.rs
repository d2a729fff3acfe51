//! `--zero`: the ZeRO stage of a run, or `auto`.
//!
//! `auto` takes stage 2 or 3, the lower one if its plan fits. Both give the same bits, so no result depends on the
//! memory of the machine. Stages 0 and 1 sum accumulated gradients in another order.

use crate::lang::{Text, both};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

use super::{OptimizerInForward, RunConfig, defaults};

/// `--zero`: a stage, or `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroChoice {
    /// Stage 2 if its plan fits, else 3.
    Auto,
    /// This stage, 0 to 3.
    Stage(u8),
}

impl FromStr for ZeroChoice {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Text> {
        let why = both("it is auto or a stage, 0 to 3", "可取 auto 或阶段 0 到 3");
        match text.parse() {
            Ok(stage @ 0..=3) => Ok(Self::Stage(stage)),
            Err(_) if text == "auto" => Ok(Self::Auto),
            _ => Err(why.into()),
        }
    }
}

impl fmt::Display for ZeroChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Stage(stage) => stage.fmt(f),
        }
    }
}

/// State of `--zero auto` in a configuration: still open, or the reason for the stage that it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZeroAuto {
    /// Planning chooses. Until then the stage is 3.
    Open,
    /// Stage 2: its plan fits.
    LowestFits,
    /// Stage 3: the plan of stage 2 does not fit.
    LowestExceeds,
    /// Stage 3: ranks that plan one by one cannot agree on what fits.
    PlannedApart,
    /// Stage 3: `--optimizer-in-forward on` needs it.
    OptimizerInForward,
}

impl RunConfig {
    /// The run with the stage of `--zero`. Without the flag, runs with adapters take `auto`; the demo and full
    /// fine-tuning take the default stage.
    pub(crate) fn with_zero(self, asked: Option<ZeroChoice>) -> Self {
        let has_adapters = self.trainable.lora.is_some() && !self.is_demo();
        let zero_auto = match asked {
            Some(ZeroChoice::Stage(zero)) => {
                return Self {
                    zero,
                    zero_auto: None,
                    ..self
                };
            }
            None if !has_adapters => None,
            Some(ZeroChoice::Auto) | None => Some(match self.optimizer_in_forward {
                OptimizerInForward::On => ZeroAuto::OptimizerInForward,
                OptimizerInForward::Auto | OptimizerInForward::Off => ZeroAuto::Open,
            }),
        };
        Self {
            zero: defaults::ZERO,
            zero_auto,
            ..self
        }
    }

    /// Value of `--zero` for this configuration. A stage that `auto` took is chosen again by another run.
    pub(crate) const fn zero_choice(&self) -> ZeroChoice {
        match self.zero_auto {
            Some(_) => ZeroChoice::Auto,
            None => ZeroChoice::Stage(self.zero),
        }
    }
}
