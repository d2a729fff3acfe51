//! `--optimizer-in-backward`: updates that begin while backward runs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Device, RunConfig, Tier};
use crate::units::parse_bytes;

/// Which units are updated while backward runs. They keep their states twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerInBackward {
    /// All, where that costs only disk and saves traffic: the optimizer is on nvme, every update has one micro-batch and
    /// nothing is clipped. On GPUs with weights and optimizer in host memory, as many as have room in what the plan leaves of
    /// it. The check before a run decides: without room none are.
    #[default]
    Auto,
    /// None: updates run behind the pass.
    Off,
    /// All.
    All,
    /// Units nearest to the loss, as long as their second states take at most so many bytes of each rank.
    Most(u64),
}

impl FromStr for OptimizerInBackward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "off" | "none" | "false" => Ok(Self::Off),
            "all" | "true" => Ok(Self::All),
            _ => parse_bytes(text)
                .map(Self::Most)
                .map_err(|why| format!("{why}; it is auto, off, all or a number of bytes")),
        }
    }
}

impl fmt::Display for OptimizerInBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::All => f.write_str("all"),
            Self::Most(bytes) => bytes.fmt(f),
        }
    }
}

impl RunConfig {
    /// Most bytes of second states of each rank; `None` where no update is early. `auto` is tried first where it is for
    /// the disk; what it takes of host memory is what a plan without it leaves.
    pub(crate) fn optimizer_in_backward_bytes(&self) -> Option<u64> {
        match self.optimizer_in_backward {
            OptimizerInBackward::Off => None,
            OptimizerInBackward::All => Some(u64::MAX),
            OptimizerInBackward::Most(bytes) => Some(bytes),
            OptimizerInBackward::Auto => {
                let on_disk = matches!(self.offload.optimizer, Tier::Nvme(_));
                (on_disk && self.consumes_gradients()).then_some(u64::MAX)
            }
        }
    }

    /// Whether gradients of units that are updated early are kept nowhere.
    pub(crate) fn consumes_gradients(&self) -> bool {
        self.optimizer.max_grad_norm.is_none() && self.batch.accumulation_steps == 1
    }

    /// Whether a processor that has time during backward updates states in host memory, the weights among them: second
    /// weights would take memory that is scarce on a GPU, and a disk's unasked.
    pub(crate) fn updates_beside_gpus(&self) -> bool {
        let beside = self.device == Device::Cuda && self.offload.optimizer == Tier::Cpu;
        beside && self.offload.param == Tier::Cpu
    }

    /// The same without what `auto` would take because it is to spare: what has to fit.
    pub(crate) fn without_spare(mut self) -> Self {
        if self.optimizer_in_backward == OptimizerInBackward::Auto
            && self.optimizer_in_backward_bytes().is_none()
        {
            self.optimizer_in_backward = OptimizerInBackward::Off;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_byte_counts_parse_what_they_print() {
        for (text, expected) in [
            ("auto", OptimizerInBackward::Auto),
            ("OFF", OptimizerInBackward::Off),
            ("all", OptimizerInBackward::All),
            ("512MiB", OptimizerInBackward::Most(512 << 20)),
        ] {
            let read: OptimizerInBackward = text.parse().unwrap();
            assert_eq!(read, expected);
            assert_eq!(read.to_string().parse(), Ok(expected));
        }
        assert!("sometimes".parse::<OptimizerInBackward>().is_err());
    }
}
