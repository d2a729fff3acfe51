//! `--early-step`: updates that begin while backward runs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{RunConfig, Tier};
use crate::units::parse_bytes;

/// Which units are updated while backward runs. They keep their states twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EarlyStep {
    /// All, where that costs only disk and saves traffic: the optimizer is on nvme, every update has one micro-batch and
    /// nothing is clipped. The check before a run decides: without room on the disk none are.
    #[default]
    Auto,
    /// None: updates run behind the pass.
    Off,
    /// All.
    All,
    /// Units nearest to the loss, as long as their second states take at most so many bytes of each rank.
    Most(u64),
}

impl FromStr for EarlyStep {
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

impl fmt::Display for EarlyStep {
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
    /// Most bytes of second states of each rank; `None` where no update is early.
    pub(crate) fn early_step_bytes(&self) -> Option<u64> {
        match self.early_step {
            EarlyStep::Off => None,
            EarlyStep::All => Some(u64::MAX),
            EarlyStep::Most(bytes) => Some(bytes),
            EarlyStep::Auto => {
                let on_disk = matches!(self.offload.optimizer, Tier::Nvme(_));
                let consumes =
                    self.optimizer.max_grad_norm.is_none() && self.batch.accumulation_steps == 1;
                (on_disk && consumes).then_some(u64::MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_bytes_are_read_as_they_are_printed() {
        for (text, expected) in [
            ("auto", EarlyStep::Auto),
            ("OFF", EarlyStep::Off),
            ("all", EarlyStep::All),
            ("512MiB", EarlyStep::Most(512 << 20)),
        ] {
            let read: EarlyStep = text.parse().unwrap();
            assert_eq!(read, expected);
            assert_eq!(read.to_string().parse(), Ok(expected));
        }
        assert!("sometimes".parse::<EarlyStep>().is_err());
    }
}
