//! `--optimizer-in-forward`: updates that run during the next forward pass.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Device, RunConfig, Tier};
use crate::error::Failure;

/// `--optimizer-in-forward`: whether the optimizer update of a unit (usually one layer) may run during the
/// next pass, before that pass uses the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerInForward {
    /// On GPUs with the optimizer in host memory: a GPU computes while the processor updates. On the CPU both want
    /// the same cores.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never: a pass begins behind the whole update.
    Off,
}

impl RunConfig {
    /// Whether updates run during the next pass.
    pub(crate) fn updates_in_forward(&self) -> bool {
        match self.optimizer_in_forward {
            OptimizerInForward::Auto => {
                self.device == Device::Cuda && self.not_in_forward().is_none()
            }
            OptimizerInForward::On => true,
            OptimizerInForward::Off => false,
        }
    }

    /// Why no update can run during the next pass. `None` if one can.
    fn not_in_forward(&self) -> Option<&'static str> {
        let (param, optimizer) = (&self.offload.param, &self.offload.optimizer);
        if [param, optimizer]
            .iter()
            .any(|tier| matches!(tier, Tier::Nvme(_)))
        {
            return Some("weights or optimizer states are on nvme");
        }
        if self.device == Device::Cuda && *optimizer != Tier::Cpu {
            return Some("optimizer states are not in host memory (--offload optimizer=cpu)");
        }
        match self.zero {
            3 => None,
            _ if self.world_size == 1 => None,
            0 if self.precision != super::PrecisionChoice::PureBf16 => None,
            _ => Some("below stage 3, ranks gather the updated weights before the next pass"),
        }
    }

    /// Refuses an explicit `on` that this run cannot use (exit 2).
    pub(crate) fn check_optimizer_in_forward(&self) -> Result<(), Failure> {
        match (self.optimizer_in_forward, self.not_in_forward()) {
            (OptimizerInForward::On, Some(why)) => Err(Failure::usage(
                "--optimizer-in-forward on cannot be used",
                why,
            )
            .next("--optimizer-in-forward auto selects what works here")),
            _ => Ok(()),
        }
    }
}
