//! Setup of the ranks of a world, and their device.

use crate::golden::{AdamW, Trajectory};
use crate::tolerance::Shake;
use anyhow::Result;
use engine::{Offload, Precision};
use kernels::{Backend, CpuMath, DType};
use models::ModelOptions;
use models::selection::Selection;
use optim::GroupOptions;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sharding, tiers, precision and device of a world.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Layout {
    /// Number of data-parallel ranks.
    pub world: usize,
    /// Number of pipeline stages of each data-parallel rank; each stage is a thread.
    pub stages: usize,
    /// ZeRO stage.
    pub stage: u8,
    /// Tiers of the states.
    pub offload: Offload,
    /// Precision of weights, activations and states.
    pub precision: Precision,
    /// Device of the ranks.
    pub device: Device,
    /// Order of sums on the CPU.
    pub math: CpuMath,
    /// Perturbation of the weights when they are read.
    pub shake: Option<Shake>,
}

/// Device of the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// The device of [`compute_on`]; the CPU without one.
    Chosen,
    /// The CPU, whatever [`compute_on`] chose.
    Cpu,
}

impl Layout {
    /// One rank without sharding, in f32.
    pub const SINGLE: Self = Self {
        world: 1,
        stages: 1,
        stage: 0,
        offload: NO_OFFLOAD,
        precision: Precision::F32,
        device: Device::Chosen,
        math: CpuMath::Portable,
        shake: None,
    };

    /// The same layout in another precision.
    #[must_use]
    pub const fn in_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// The same layout with another order of sums on the CPU.
    #[must_use]
    pub const fn with_math(self, math: CpuMath) -> Self {
        Self { math, ..self }
    }

    /// The same layout with perturbed weights.
    #[must_use]
    pub const fn shaken(self, shake: Shake) -> Self {
        Self {
            shake: Some(shake),
            ..self
        }
    }

    /// The same layout on the CPU.
    #[must_use]
    pub const fn on_cpu(self) -> Self {
        Self {
            device: Device::Cpu,
            ..self
        }
    }
}

/// All states on the device.
pub const NO_OFFLOAD: Offload = Offload::states(engine::Tier::Device);

thread_local! {
    /// Device of all worlds that this thread starts, if not the CPU.
    static DEVICE: OnceCell<Arc<dyn Backend>> = const { OnceCell::new() };
}

/// Sets the device of all worlds that this thread starts, so that each test may have its own. Only the first call counts.
pub fn compute_on(backend: Arc<dyn Backend>) {
    DEVICE.with(|device| device.set(backend).ok());
}

/// The device that [`compute_on`] chose in this thread.
fn chosen() -> Option<Arc<dyn Backend>> {
    DEVICE.with(|device| device.get().cloned())
}

/// Whether [`compute_on`] chose a device in this thread.
#[must_use]
pub fn on_a_device() -> bool {
    chosen().is_some()
}

/// Model options and optimizer settings of a world.
#[derive(Debug)]
pub struct Setup<'a> {
    /// Options of the model.
    pub options: ModelOptions,
    /// Start values by parameter, where they differ from the base weights or the base has none.
    pub start: &'a BTreeMap<String, Vec<f32>>,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Global norm that gradients are clipped to.
    pub max_grad_norm: Option<f32>,
    /// Weight decay and learning-rate factor by parameter, where they differ from `optimizer`.
    pub groups: &'a BTreeMap<String, GroupOptions>,
}

impl Setup<'static> {
    /// Setup of a full fine-tune.
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

    /// Setup in which norms train alone. Losses and logits are those of [`Setup::full`].
    ///
    /// # Errors
    /// Never, since the selection is a word that exists.
    pub fn norms() -> Result<Self> {
        let mut setup = Self::full();
        setup.options.train = Some(Selection::parse("norm")?);
        Ok(setup)
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
    /// The device of all ranks of a world; `None` is the CPU.
    pub(super) fn backend(self) -> Option<Arc<dyn Backend>> {
        chosen().filter(|_| self.device == Device::Chosen)
    }
}
