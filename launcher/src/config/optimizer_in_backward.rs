//! `--optimizer-in-backward`: updates that run during the backward pass.

use crate::lang::{Text, text};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Device, RunConfig, Tier};
use crate::units::parse_bytes;

/// `--optimizer-in-backward`: units (parameters gathered together, usually one layer) whose optimizer update
/// runs during the backward pass. Such units hold two copies of their states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerInBackward {
    /// Chosen by the memory check before a run. With the optimizer on nvme, one micro-batch per update and no
    /// clipping: all units if the disk has space. With weights and optimizer in host memory and compute on GPUs: as
    /// many units as spare host memory allows. Otherwise none.
    #[default]
    Auto,
    /// No units: all updates run after the backward pass.
    Off,
    /// All units.
    All,
    /// Units nearest to the loss, as long as the second copies of their states take at most this many bytes per rank.
    Most(u64),
}

impl FromStr for OptimizerInBackward {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Text> {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "off" | "none" | "false" => Ok(Self::Off),
            "all" | "true" => Ok(Self::All),
            _ => parse_bytes(text).map(Self::Most).map_err(|why| {
                text!(
                    "{why}; it is auto, off, all or a number of bytes",
                    "{why}；可取 auto、off、all 或字节数"
                )
            }),
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
    /// Maximum bytes per rank for second copies of states. `None`: no unit is updated in backward. `auto` resolves to
    /// all units here if the states are on nvme and gradients are consumed; planning decides the rest.
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

    /// Whether a unit updated in backward consumes its gradients at once, so that none are stored. This needs no
    /// clipping and one micro-batch per update.
    pub(crate) fn consumes_gradients(&self) -> bool {
        self.optimizer.max_grad_norm.is_none() && self.batch.accumulation_steps == 1
    }

    /// Whether host memory holds both weights and optimizer states of a GPU run. Then the otherwise idle CPU can
    /// update units during backward. Elsewhere second copies of weights would take GPU memory or disk space that
    /// nobody asked for.
    pub(crate) fn updates_beside_gpus(&self) -> bool {
        let beside = self.device == Device::Cuda && self.offload.optimizer == Tier::Cpu;
        beside && self.offload.param == Tier::Cpu
    }

    /// The configuration without the updates that `auto` adds only if host memory is spare. Its need is the minimum.
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
