//! `--prefetch-weights`: host-to-device copies of weights one unit before their use.

use crate::lang::both;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Device, RunConfig};
use crate::error::Failure;

/// `--prefetch-weights`: whether offloaded weights are copied to the GPU one unit (usually one layer) before
/// their use. The GPU then holds the weights of one more unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrefetchWeights {
    /// Where the plan then fits the GPU. The check before a run decides.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never: they come when they are used.
    Off,
}

impl RunConfig {
    /// Whether offloaded weights are prefetched. `auto` counts as on here; planning turns it off if memory lacks.
    pub(crate) fn prefetch_weights(&self) -> bool {
        self.device == Device::Cuda && self.prefetch_weights != PrefetchWeights::Off
    }

    /// Refuses an explicit `on` that this run cannot use (exit 2).
    pub(crate) fn check_prefetch_weights(&self) -> Result<(), Failure> {
        if self.prefetch_weights != PrefetchWeights::On || self.device == Device::Cuda {
            return Ok(());
        }
        Err(Failure::usage(
            both(
                "--prefetch-weights on cannot be used",
                "无法使用 --prefetch-weights on",
            ),
            both(
                "it needs GPUs, and this run computes on the CPU",
                "它需要 GPU，而本次运行在 CPU 上计算",
            ),
        )
        .next(both(
            "--prefetch-weights auto selects what works here",
            "--prefetch-weights auto 会选择在此可用的方式",
        )))
    }
}
