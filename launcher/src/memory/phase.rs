//! Phases of a run, and bytes by kind in one of them.

use crate::lang::{Both, both};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Map from a kind of memory (such as `parameters`, `gradients`, `activations`) to its bytes. Kinds with zero
/// bytes are absent.
pub type Kinds = BTreeMap<String, u64>;

/// Phase of a run. Time and peak memory are measured by phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Everything before the first step.
    Load,
    /// Waiting for samples.
    Data,
    /// Collating a micro-batch and its forward pass.
    Forward,
    /// Backward pass and reduction of gradients.
    Backward,
    /// Optimizer step.
    Step,
    /// Evaluation.
    Eval,
    /// Writing a checkpoint.
    Save,
}

impl Phase {
    /// Every phase, in the order of a run.
    pub const ALL: [Self; 7] = [
        Self::Load,
        Self::Data,
        Self::Forward,
        Self::Backward,
        Self::Step,
        Self::Eval,
        Self::Save,
    ];

    /// Name of the phase in lower case, as in `memory.jsonl`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Step => "step",
            Self::Eval => "eval",
            Self::Save => "save",
        }
    }

    /// The phase as messages name it.
    pub(crate) const fn title(self) -> Both {
        let zh = match self {
            Self::Load => "加载",
            Self::Data => "数据",
            Self::Forward => "前向",
            Self::Backward => "反向",
            Self::Step => "更新",
            Self::Eval => "评估",
            Self::Save => "保存",
        };
        both(self.name(), zh)
    }
}
