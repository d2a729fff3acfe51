//! `--optimizer-in-forward`: updates that run during the next forward pass.

use crate::lang::{Both, both};
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
                let is_undivided = self.device == Device::Cuda && self.mp_size == 1;
                is_undivided && self.not_in_forward().is_none()
            }
            OptimizerInForward::On => true,
            OptimizerInForward::Off => false,
        }
    }

    /// Why no update can run during the next pass. `None` if one can.
    fn not_in_forward(&self) -> Option<Both> {
        let (param, optimizer) = (&self.offload.param, &self.offload.optimizer);
        if [param, optimizer]
            .iter()
            .any(|tier| matches!(tier, Tier::Nvme(_)))
        {
            return Some(both(
                "weights or optimizer states are on nvme",
                "权重或优化器状态在 nvme 上",
            ));
        }
        if self.device == Device::Cuda && *optimizer != Tier::Cpu {
            return Some(both(
                "optimizer states are not in host memory (--offload optimizer=cpu)",
                "优化器状态不在主机内存中（--offload optimizer=cpu）",
            ));
        }
        match self.zero {
            3 => None,
            _ if self.data_ranks() == 1 => None,
            0 if self.precision != super::PrecisionChoice::PureBf16 => None,
            _ => Some(both(
                "below stage 3, ranks gather the updated weights before the next pass",
                "ZeRO 阶段低于 3 时，各 rank 会在下一次前向之前汇集更新后的权重",
            )),
        }
    }

    /// Refuses an explicit `on` that this run cannot use (exit 2).
    pub(crate) fn check_optimizer_in_forward(&self) -> Result<(), Failure> {
        match (self.optimizer_in_forward, self.not_in_forward()) {
            (OptimizerInForward::On, Some(why)) => Err(Failure::usage(
                both(
                    "--optimizer-in-forward on cannot be used",
                    "无法使用 --optimizer-in-forward on",
                ),
                why,
            )
            .next(both(
                "--optimizer-in-forward auto selects what works here",
                "--optimizer-in-forward auto 会选择在此可用的方式",
            ))),
            _ => Ok(()),
        }
    }
}
