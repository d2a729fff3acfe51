//! `--prefetch-weights`: weights that come to a GPU one unit before they are used.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Device, RunConfig};
use crate::error::Failure;

/// Whether weights that do not stay on a GPU come there one unit ahead. It holds one more unit's weights then.
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
    /// Whether weights come ahead where any are uploaded; `auto` is tried first.
    pub(crate) fn prefetch_weights(&self) -> bool {
        self.device == Device::Cuda && self.prefetch_weights != PrefetchWeights::Off
    }

    /// Refuses what was asked for by name and cannot be.
    pub(crate) fn check_prefetch_weights(&self) -> Result<(), Failure> {
        if self.prefetch_weights != PrefetchWeights::On || self.device == Device::Cuda {
            return Ok(());
        }
        Err(Failure::usage(
            "--prefetch-weights on cannot be used",
            "it needs GPUs, and this run computes on the CPU",
        )
        .next("--prefetch-weights auto selects what works here"))
    }
}
