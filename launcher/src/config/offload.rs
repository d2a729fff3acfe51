//! `--offload`: tiers that store states while they are not in use.

use crate::lang::{Text, both, text};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Tier that stores a kind of state while it is not in use: device memory, host memory or disk (offload
/// target).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Tier {
    /// Device memory.
    #[default]
    None,
    /// Host memory.
    Cpu,
    /// Spill files under this directory.
    Nvme(PathBuf),
}

impl Tier {
    /// Directory of the spill files of a disk tier. `None` for device and host memory.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Nvme(directory) => Some(directory),
            Self::None | Self::Cpu => None,
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Cpu => f.write_str("cpu"),
            Self::Nvme(directory) => write!(f, "nvme:{}", directory.display()),
        }
    }
}

impl FromStr for Tier {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim() {
            "none" => Ok(Self::None),
            "cpu" => Ok(Self::Cpu),
            "nvme" | "nvme:" => Err(both(
                "nvme needs a directory: nvme:DIR",
                "nvme 需要一个目录：nvme:DIR",
            )
            .into()),
            other => match other.strip_prefix("nvme:") {
                Some(directory) => Ok(Self::Nvme(directory.into())),
                None => Err(text!(
                    "'{other}' is not none, cpu or nvme:DIR",
                    "'{other}' 不是 none、cpu 或 nvme:DIR"
                )),
            },
        }
    }
}

impl TryFrom<String> for Tier {
    type Error = Text;

    fn try_from(text: String) -> Result<Self, Text> {
        text.parse()
    }
}

impl From<Tier> for String {
    fn from(tier: Tier) -> Self {
        tier.to_string()
    }
}

/// `--offload`: tier that stores each kind of state while it is not in use.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offload {
    /// Tier of the optimizer: master weights, Adam's moments, and the gradients they are updated from.
    pub optimizer: Tier,
    /// Tier of the parameters: the weights that forward and backward compute with.
    pub param: Tier,
    /// Tier of the stored activations: inputs of checkpointed segments, from which backward recomputes.
    #[serde(default)]
    pub activation: Tier,
}

impl Offload {
    /// Whether nothing is offloaded: all states stay in device memory.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Kinds of state in the syntax of `--offload`, with their tiers, in output order.
    fn tiers(&self) -> [(&'static str, &Tier); 3] {
        [
            ("optimizer", &self.optimizer),
            ("param", &self.param),
            ("activation", &self.activation),
        ]
    }

    /// Directories of the spill files of all disk tiers, without duplicates.
    #[must_use]
    pub fn directories(&self) -> Vec<&Path> {
        let mut directories: Vec<&Path> = Vec::new();
        for (_, tier) in self.tiers() {
            if let Some(directory) = tier.directory()
                && !directories.contains(&directory)
            {
                directories.push(directory);
            }
        }
        directories
    }

    /// Same setting with the directory of every disk tier replaced by the result of `absolute`, which makes a
    /// path absolute.
    ///
    /// # Errors
    /// Those of `absolute`.
    pub fn resolved<E>(
        mut self,
        absolute: impl Fn(&Path) -> Result<PathBuf, E>,
    ) -> Result<Self, E> {
        for tier in [&mut self.optimizer, &mut self.param, &mut self.activation] {
            if let Tier::Nvme(directory) = tier {
                *directory = absolute(directory)?;
            }
        }
        Ok(self)
    }
}

impl FromStr for Offload {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if !text.contains('=') {
            let tier: Tier = text.parse()?;
            return Ok(Self {
                optimizer: tier.clone(),
                param: tier,
                activation: Tier::None,
            });
        }
        let mut offload = Self::default();
        let mut named: Vec<&str> = Vec::new();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                text!(
                    "'{part}' is not of the form name=tier",
                    "'{part}' 不是 name=tier 的形式"
                )
            })?;
            let tier: Tier = value.parse()?;
            let name = match name.trim() {
                "parameter" => "param",
                name => name,
            };
            if named.contains(&name) {
                return Err(text!("{name} is given twice", "{name} 给出了两次"));
            }
            named.push(name);
            match name {
                "optimizer" => offload.optimizer = tier,
                "param" => offload.param = tier,
                "activation" => offload.activation = tier,
                other => {
                    return Err(text!(
                        "'{other}' is not optimizer, param or activation",
                        "'{other}' 不是 optimizer、param 或 activation"
                    ));
                }
            }
        }
        Ok(offload)
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.optimizer == self.param && self.activation == Tier::None {
            return write!(f, "{}", self.param);
        }
        let tiers = self.tiers();
        let named = tiers.iter().filter(|(_, tier)| **tier != Tier::None);
        let named: Vec<String> = named.map(|(name, tier)| format!("{name}={tier}")).collect();
        f.write_str(&named.join(","))
    }
}

/// `--nvme-io`: I/O method for spill files (states offloaded to disk).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvmeIo {
    /// Whichever a short measurement finds faster.
    #[default]
    Auto,
    /// Past the page cache (`O_DIRECT`).
    Direct,
    /// Through a memory map.
    Mapped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offload_reads_short_and_long_form() {
        let disk = || Tier::Nvme("/fast/disk".into());
        let of = |optimizer, param, activation| Offload {
            optimizer,
            param,
            activation,
        };
        let both = of(Tier::Cpu, Tier::Cpu, Tier::None);
        assert_eq!("cpu".parse(), Ok(both.clone()));
        assert_eq!("optimizer=cpu,param=cpu".parse(), Ok(both.clone()));
        let optimizer = of(Tier::Cpu, Tier::None, Tier::None);
        assert_eq!("optimizer=cpu".parse(), Ok(optimizer.clone()));
        let spilled = of(disk(), disk(), Tier::None);
        assert_eq!("nvme:/fast/disk".parse(), Ok(spilled.clone()));
        let mixed = of(Tier::Cpu, disk(), Tier::Cpu);
        assert_eq!(
            "param=nvme:/fast/disk,optimizer=cpu,activation=cpu".parse(),
            Ok(mixed.clone())
        );
        assert_eq!(mixed.directories(), [Path::new("/fast/disk")]);
        let activation = of(Tier::None, Tier::None, Tier::Cpu);
        for offload in [
            both,
            optimizer,
            spilled,
            mixed,
            activation,
            Offload::default(),
        ] {
            assert_eq!(offload.to_string().parse(), Ok(offload.clone()));
            let json = serde_json::to_string(&offload).expect("written");
            assert_eq!(
                serde_json::from_str::<Offload>(&json).expect("read"),
                offload
            );
        }
        for bad in [
            "gpu",
            "nvme",
            "nvme:",
            "disk:/x",
            "optimizer=cpu,optimizer=none",
            "param=cpu,parameter=cpu",
            "weights=cpu",
            "cpu,param=cpu",
        ] {
            assert!(bad.parse::<Offload>().is_err(), "{bad}");
        }
    }
}
