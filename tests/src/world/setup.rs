//! How ranks of a world are set up, and on which device.

use crate::golden::{AdamW, Trajectory};
use crate::tolerance::Shake;
use engine::{Offload, Precision};
use kernels::{Backend, CpuBackend, DType, Pool};
use models::ModelOptions;
use optim::GroupOptions;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// How a world shards, where its states live, and how it computes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Layout {
    /// Ranks, each a thread.
    pub world: usize,
    /// ZeRO stage.
    pub stage: u8,
    /// Tiers.
    pub offload: Offload,
    /// Of weights, activations and states.
    pub precision: Precision,
    /// What its ranks compute on.
    pub device: Device,
    /// What its weights are moved by when they are read.
    pub shake: Option<Shake>,
}

/// What ranks compute on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// The device of [`compute_on`], else the CPU.
    Chosen,
    /// The CPU, whatever was chosen.
    Cpu,
}

impl Layout {
    /// One rank that shards nothing, in f32.
    pub const SINGLE: Self = Self {
        world: 1,
        stage: 0,
        offload: NO_OFFLOAD,
        precision: Precision::F32,
        device: Device::Chosen,
        shake: None,
    };

    /// The same in another precision.
    #[must_use]
    pub const fn in_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The same with moved weights.
    #[must_use]
    pub const fn shaken(self, shake: Shake) -> Self {
        Self {
            shake: Some(shake),
            ..self
        }
    }

    /// The same on the CPU.
    #[must_use]
    pub const fn on_cpu(self) -> Self {
        Self {
            device: Device::Cpu,
            ..self
        }
    }
}

/// Everything on the device.
pub const NO_OFFLOAD: Offload = Offload::states(engine::Tier::Device);

/// What all ranks of this process compute on, where that is not the CPU.
static DEVICE: OnceLock<Arc<dyn Backend>> = OnceLock::new();

/// Lets every world of this process compute on `backend`. Only the first call counts.
pub fn compute_on(backend: Arc<dyn Backend>) {
    DEVICE.set(backend).ok();
}

/// Whether [`compute_on`] chose a device.
#[must_use]
pub fn on_a_device() -> bool {
    DEVICE.get().is_some()
}

/// How ranks of a world are set up.
#[derive(Debug)]
pub struct Setup<'a> {
    /// Options of the model.
    pub options: ModelOptions,
    /// Start values that the base does not have, or has otherwise.
    pub start: &'a BTreeMap<String, Vec<f32>>,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Global norm that gradients are clipped to.
    pub max_grad_norm: Option<f32>,
    /// Decay and learning-rate factor of parameters by name, where they differ.
    pub groups: &'a BTreeMap<String, GroupOptions>,
}

impl Setup<'static> {
    /// A full fine-tune.
    #[must_use]
    pub fn full() -> Self {
        static NOTHING: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        static NO_GROUPS: BTreeMap<String, GroupOptions> = BTreeMap::new();
        Self {
            options: ModelOptions::new(DType::F32),
            start: &NOTHING,
            optimizer: AdamW {
                lr: 1e-3,
                betas: [0.9, 0.95],
                eps: 1e-8,
                weight_decay: 0.1,
            },
            max_grad_norm: None,
            groups: &NO_GROUPS,
        }
    }
}

impl<'a> From<&'a Trajectory> for Setup<'a> {
    fn from(run: &'a Trajectory) -> Self {
        Self {
            options: run.options.clone(),
            start: &run.start,
            optimizer: run.optimizer.clone(),
            max_grad_norm: run.max_grad_norm,
            groups: &run.groups,
        }
    }
}

impl Layout {
    /// A back end for a rank, whose memory on a CPU is `pool`.
    pub(super) fn backend(self, pool: &Pool) -> Arc<dyn Backend> {
        match DEVICE.get().filter(|_| self.device == Device::Chosen) {
            Some(chosen) => chosen.clone(),
            None => Arc::new(CpuBackend::new(pool.clone())),
        }
    }
}
