//! Transport of collectives between the GPUs of a run.

use crate::lang::{Both, Text, both, text};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Device, RunConfig};
use crate::error::Failure;

/// `--collectives`: transport by which the ranks gather weights and reduce gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collectives {
    /// GPUs that all reach each other's memory read it; others go through host memory.
    #[default]
    Auto,
    /// GPUs read each other's memory.
    Ipc,
    /// Host memory that the ranks share; between machines, TCP or MPI.
    Shm,
    /// NVIDIA's library, also between machines.
    Nccl,
}

impl Collectives {
    /// Name of the transport as a value of `--collectives`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ipc => "ipc",
            Self::Shm => "shm",
            Self::Nccl => "nccl",
        }
    }
}

const IN_STAGES: Both = both(
    "pipeline stages (--mp-size) exchange by peer access or through host memory",
    "流水线段（--mp-size）通过显存直接访问或主机内存交换数据",
);

impl RunConfig {
    /// Transport that the collectives use. `Auto` is resolved: `Ipc` if all GPUs have peer access to each other,
    /// otherwise `Shm`.
    pub(crate) fn resolved_collectives(&self) -> Collectives {
        match self.collectives {
            Collectives::Auto
                if self.device == Device::Cuda && self.missing_peer_access().is_none() =>
            {
                Collectives::Ipc
            }
            Collectives::Auto => Collectives::Shm,
            asked => asked,
        }
    }

    /// Most ranks on one GPU.
    pub(crate) fn ranks_per_gpu(&self) -> usize {
        let in_turn = || self.ranks_here().div_ceil(self.gpus.len().max(1));
        self.ranks_per_gpu.unwrap_or_else(in_turn)
    }

    /// Whether several ranks of this machine use the same GPU.
    pub(crate) fn shares_gpus(&self) -> bool {
        self.device == Device::Cuda && self.ranks_per_gpu() > 1
    }

    /// Why the GPUs of this run cannot all access each other's memory. `None` if they can.
    pub(crate) fn missing_peer_access(&self) -> Option<Text> {
        if self.world_size < 2 {
            return Some(both("there is one rank", "只有一个 rank").into());
        }
        if self.ranks_here() < self.world_size {
            return Some(
                both(
                    "the ranks are on several machines",
                    "各 rank 位于多台机器上",
                )
                .into(),
            );
        }
        let used = &self.gpus[..self.gpus.len().min(self.world_size)];
        for one in used {
            let others = used.iter().filter(|two| two.ordinal != one.ordinal);
            let mut missing_peer_access = others.filter(|two| !one.peers.contains(&two.ordinal));
            if let Some(two) = missing_peer_access.next() {
                let (one, two) = (one.ordinal, two.ordinal);
                return Some(text!(
                    "GPU {one} has no peer access to GPU {two}",
                    "GPU {one} 无法直接访问 GPU {two} 的显存"
                ));
            }
        }
        None
    }

    /// Refuses an explicit `--collectives` that this run cannot use (exit 2).
    pub(crate) fn check_collectives(&self) -> Result<(), Failure> {
        let asked = self.collectives;
        if matches!(asked, Collectives::Auto | Collectives::Shm) {
            return Ok(());
        }
        let why = if self.device == Device::Cpu {
            Some(
                both(
                    "it needs GPUs, and this run computes on the CPU",
                    "它需要 GPU，而本次运行在 CPU 上计算",
                )
                .into(),
            )
        } else if asked == Collectives::Ipc && self.world_size > 1 {
            self.missing_peer_access()
        } else if self.mp_size > 1 {
            Some(IN_STAGES.into())
        } else if asked == Collectives::Nccl && self.shard_group.is_some() {
            Some(
                both(
                    "NCCL has one group of all ranks here and none for --shard-group",
                    "在这里，NCCL 只有一个包含所有 rank 的组，不支持 --shard-group",
                )
                .into(),
            )
        } else {
            None
        };
        match why {
            None => Ok(()),
            Some(why) => Err(Failure::usage(
                text!(
                    "--collectives {} cannot be used",
                    "无法使用 --collectives {}",
                    asked.name()
                ),
                why,
            )
            .next(both(
                "--collectives auto selects a transport that works here; shm works everywhere",
                "--collectives auto 会选择在此可用的方式；shm 在任何环境都可用",
            ))),
        }
    }
}
