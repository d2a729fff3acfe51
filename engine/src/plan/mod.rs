//! The plan: which rank owns which bytes, when each unit is gathered, and how much memory that takes.
//!
//! It is a pure function of the model, the configuration and the world size, and is equal on every rank.

pub(crate) mod blocks;
mod formats;
mod inventory;
mod layout;
mod memory;
mod optimizer_overlap;
mod recompute;
mod schedule;
mod shared;
mod slice;
mod spill;

pub use formats::Formats;
pub(crate) use inventory::disk_phase;
pub use inventory::{MASTER, Row, Stored};
pub use layout::{ALIGN_ELEMS, GroupKind, GroupLayout, QUANTIZED_ALIGN_BYTES, Slot, UnitPlan};
pub use memory::{MemoryReport, TierBytes};
pub(crate) use optimizer_overlap::JOBS;
pub use optimizer_overlap::OptimizerInBackward;
pub use schedule::{Entry, PassKind, Phase};
pub(crate) use schedule::{Pass, Visit};
pub use slice::Slice;

use crate::spec::{ModelSpec, ParamId, UnitId};
use kernels::DType;
use layout::plan_units;
use optim::Precision;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// ZeRO stage, numbered as in DeepSpeed: which model states are sharded among ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Stage {
    /// No state is sharded: plain data parallelism.
    Zero0,
    /// Optimizer state is sharded.
    Zero1,
    /// Optimizer state and gradients are sharded.
    Zero2,
    /// Optimizer state, gradients and parameters are sharded.
    Zero3,
}

impl Stage {
    /// Whether this stage shards the optimizer state among ranks (stage 1 and up).
    #[must_use]
    pub fn shards_optimizer(self) -> bool {
        self >= Self::Zero1
    }
    /// Whether this stage shards the accumulated gradients among ranks (stage 2 and up).
    #[must_use]
    pub fn shards_gradients(self) -> bool {
        self >= Self::Zero2
    }
    /// Whether this stage shards the weights among ranks (stage 3).
    #[must_use]
    pub fn shards_parameters(self) -> bool {
        self == Self::Zero3
    }
}

impl TryFrom<u8> for Stage {
    type Error = String;
    fn try_from(value: u8) -> Result<Self, String> {
        match value {
            0 => Ok(Self::Zero0),
            1 => Ok(Self::Zero1),
            2 => Ok(Self::Zero2),
            3 => Ok(Self::Zero3),
            _ => Err(format!(
                "ZeRO stage {value} does not exist; stages are 0 to 3"
            )),
        }
    }
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> Self {
        stage as Self
    }
}

/// Memory tier that stores a kind of state: device memory, host memory or disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// Device memory.
    #[default]
    Device,
    /// Host memory.
    Host,
    /// A spill file on a disk.
    Nvme,
}

/// Kind of state whose memory tier (device, host or disk) is chosen separately.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StateKind {
    /// Weights.
    Param,
    /// Master weights, optimizer state and accumulated gradients.
    Optimizer,
    /// Saved inputs of checkpointed segments, which backward recomputes.
    Activation,
}

impl StateKind {
    /// All kinds of state that have a memory tier of their own.
    pub const ALL: [Self; 3] = [Self::Param, Self::Optimizer, Self::Activation];

    /// Name of the kind of state on the command line and in file names: `param`, `optimizer` or `activation`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Param => "param",
            Self::Optimizer => "optimizer",
            Self::Activation => "activation",
        }
    }
}

/// Offload settings: the memory tier (device, host or disk) of each kind of state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
pub struct Offload {
    /// Tier that stores the weights.
    pub param: Tier,
    /// Tier that stores master weights, optimizer state and accumulated gradients.
    pub optimizer: Tier,
    /// Tier that stores saved activations: the inputs of checkpointed segments, from which backward
    /// recomputes.
    #[serde(default)]
    pub activation: Tier,
}

impl Offload {
    /// Settings that store weights and optimizer state in host memory, and activations on the device.
    pub const CPU: Self = Self::states(Tier::Host);

    /// Settings that store weights and optimizer state on `tier`, and activations on the device.
    #[must_use]
    pub const fn states(tier: Tier) -> Self {
        Self {
            param: tier,
            optimizer: tier,
            activation: Tier::Device,
        }
    }

    /// Memory tier of one kind of state in these settings.
    #[must_use]
    pub const fn tier(&self, kind: StateKind) -> Tier {
        match kind {
            StateKind::Param => self.param,
            StateKind::Optimizer => self.optimizer,
            StateKind::Activation => self.activation,
        }
    }
}

/// Element type in which gradients are accumulated over micro-batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GradDtype {
    /// Sums in f32.
    F32,
    /// bf16, stored with stochastic rounding after every micro-batch.
    Bf16,
}

/// Transport of weights and gradients between ranks whose devices are discrete (the host cannot address their
/// memory).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceTransport {
    /// Host memory: the communicator moves the data; every rank copies it from and to its device.
    #[default]
    Host,
    /// Devices read each other's memory. Each rank copies only its own shard over the host-to-device bus.
    Peers,
    /// NCCL collectives, also between machines. NCCL adds in an order of its own, so last bits of sums may differ.
    Nccl,
}

/// Settings of the engine: ZeRO stage, precision, offload, and overlap of communication and updates with
/// passes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ZeroConfig {
    /// ZeRO stage: which model states are sharded among ranks.
    pub stage: Stage,
    /// Precision scheme: element types of weights and optimizer state.
    pub precision: Precision,
    /// Element type of accumulated gradients. `None` means bf16 in pure bf16 precision and f32 otherwise.
    #[serde(default)]
    pub grad_dtype: Option<GradDtype>,
    /// Hybrid sharding: number of consecutive ranks that share one copy of the sharded states; `None` means all
    /// ranks.
    #[serde(default)]
    pub shard_group: Option<usize>,
    /// Division of the units among pipeline stages, and the stage of this rank. `None`: every rank has all units.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<Slice>,
    /// Memory tier (device, host or disk) of each kind of state.
    pub offload: Offload,
    /// Whether all ranks are on one machine and can map the same memory. Frozen weights that are not in device memory are
    /// then stored once on the machine ([`Plan::shares_frozen`]).
    #[serde(default)]
    pub shares_host_memory: bool,
    /// Transport of weights and gradients between the discrete devices (GPUs) of the ranks.
    #[serde(default)]
    pub device_transport: DeviceTransport,
    /// Prefetch depth: number of units (usually layers) whose weights ranks gather while earlier units
    /// compute; 0 gathers each unit only when it is used.
    pub prefetch_units: usize,
    /// Whether weights that a discrete device does not store are prefetched: they are copied or gathered to
    /// it while the previous unit computes. The device then holds one more unit's weights.
    #[serde(default)]
    #[serde(rename = "uploads_ahead")]
    pub prefetch_weights: bool,
    /// Maximal number of gradient buckets (the gradients of one unit each) whose reduction between ranks is
    /// in flight.
    pub buckets_in_flight: usize,
    /// Recompute groups: ranges of consecutive unit indices. Forward saves only the input of a group's first
    /// unit, and backward recomputes the other inputs from it ([`ModelSpec::layer_groups`]).
    #[serde(default)]
    pub recomputed: Vec<Range<u32>>,
    /// Maximal number of elements of a shard that the optimizer updates at once, as DeepSpeed's
    /// `sub_group_size`.
    pub sub_group_elems: usize,
    /// Maximal global L2 norm of the mean gradient per supervised token; larger gradients are scaled down to
    /// it. `None` never clips.
    pub max_grad_norm: Option<f32>,
    /// Settings of the optimizer in backward, which updates units while backward still runs. `None` begins
    /// all updates after backward.
    #[serde(default)]
    #[serde(rename = "early_step")]
    pub optimizer_in_backward: Option<OptimizerInBackward>,
    /// Whether optimizer updates may run during the next forward pass, each before its unit is used.
    /// [`Plan::updates_in_forward`] has further conditions.
    #[serde(default)]
    #[serde(rename = "late_step")]
    pub optimizer_in_forward: bool,
    /// Whether the layout of trainable parameters suits optimizer states in blocks ([`optim::adamw::BLOCK_ELEMS`]).
    /// Rules with such states need it; otherwise they store states element by element.
    #[serde(default)]
    pub states_in_blocks: bool,
    /// Seed of the run's stochastic rounding.
    pub seed: u64,
}

impl ZeroConfig {
    /// Element type of accumulated gradients: the configured one, else bf16 in pure bf16 precision and f32
    /// otherwise.
    #[must_use]
    pub fn grad_dtype(&self) -> DType {
        match (self.grad_dtype, self.precision) {
            (Some(GradDtype::F32), _) => DType::F32,
            (Some(GradDtype::Bf16), _) | (None, Precision::PureBf16) => DType::BF16,
            (None, _) => DType::F32,
        }
    }

    /// Whether each rank accumulates only its shard of the gradients: at stages 2 and 3, and at every stage
    /// if the sums are bf16. For bf16 sums every micro-batch is reduced before it is rounded, so that all
    /// stages give the same bits. A rank then needs only its shard.
    #[must_use]
    pub fn shards_gradients(&self) -> bool {
        self.stage.shards_gradients() || self.grad_dtype() == DType::BF16
    }
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self {
            stage: Stage::Zero3,
            precision: Precision::F32,
            grad_dtype: None,
            shard_group: None,
            slice: None,
            offload: Offload::default(),
            shares_host_memory: false,
            device_transport: DeviceTransport::Host,
            prefetch_units: 1,
            prefetch_weights: false,
            buckets_in_flight: 1,
            recomputed: Vec::new(),
            sub_group_elems: 1 << 24,
            max_grad_norm: None,
            optimizer_in_backward: None,
            optimizer_in_forward: false,
            states_in_blocks: false,
            seed: 0,
        }
    }
}

/// Error: the reason why a [`Plan`] cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The world size is 0.
    #[error("the world size is 0")]
    EmptyWorld,
    /// The shard groups do not divide the world, or the stage shards nothing.
    #[error("{world_size} ranks at stage {} cannot be divided into shard groups of {group}", *stage as u8)]
    ShardGroup {
        /// Number of ranks of a shard group.
        group: usize,
        /// Number of ranks in the world.
        world_size: usize,
        /// The ZeRO stage of the settings.
        stage: Stage,
    },
    /// Shard groups smaller than the world do not work with NCCL, which has one group of all ranks.
    #[error("collectives by NCCL run among all {world_size} ranks, not in shard groups of {group}")]
    GroupsInNccl {
        /// Number of ranks of a shard group.
        group: usize,
        /// Number of ranks in the world.
        world_size: usize,
    },
    /// A parameter is declared out of unit order or names a missing unit.
    #[error("parameter {name} belongs to unit {unit}, which is out of order or does not exist")]
    Unit {
        /// Name of the parameter.
        name: String,
        /// Index of the unit that the parameter names.
        unit: u32,
    },
    /// A recompute group is empty, overlaps another one, or has a unit that backward does not visit.
    #[error("recompute group {}..{} is not a run of consecutive units after the previous group", group.start, group.end)]
    Recomputed {
        /// Indices of the group's first unit and of the unit after its last.
        group: Range<u32>,
    },
    /// The pipeline stages do not divide the units, or this rank's stage does not exist.
    #[error(
        "{units} units cannot be divided into pipeline stages of {counts:?} units, of which this is number {stage}"
    )]
    Slice {
        /// Number of units of the model.
        units: usize,
        /// Number of units of each pipeline stage.
        counts: Vec<u32>,
        /// Index of this rank's pipeline stage.
        stage: usize,
    },
    /// Two parameters share a name.
    #[error("two parameters are called {name}")]
    DuplicateName {
        /// The name that two parameters have.
        name: String,
    },
}

/// Plan of a run: how parameters are sharded, in which order units are used, and which memory that takes. It
/// is equal on every rank.
#[derive(Clone, Debug)]
pub struct Plan {
    spec: ModelSpec,
    config: ZeroConfig,
    world_size: usize,
    units: Vec<UnitPlan>,
    /// Units of this rank's pipeline stage. The units of other stages are empty in `units`.
    own: Range<u32>,
    /// Recompute groups, cut at the borders of the pipeline stage.
    recomputed: Vec<Range<u32>>,
    first_element: Vec<u64>,
    /// By unit: whether it is updated in backward.
    early: Vec<bool>,
    /// By parameter: whether leases may read it in the map of its file. Empty if none is.
    in_files: Vec<bool>,
    /// Whether the device copies weights from where the host stores them.
    reads_host_in_place: bool,
    hash: String,
}

impl Plan {
    /// Makes the plan for the model `spec` on `world_size` data-parallel ranks.
    ///
    /// # Errors
    /// When the model's declaration or the settings are inconsistent.
    pub fn new(spec: ModelSpec, config: ZeroConfig, world_size: usize) -> Result<Self, PlanError> {
        if world_size == 0 {
            return Err(PlanError::EmptyWorld);
        }
        if let Some(group) = config.shard_group
            && (group == 0 || !world_size.is_multiple_of(group) || !config.stage.shards_optimizer())
        {
            return Err(PlanError::ShardGroup {
                group,
                world_size,
                stage: config.stage,
            });
        }
        let shards = config.shard_group.unwrap_or(world_size);
        if config.device_transport == DeviceTransport::Nccl && shards < world_size {
            let group = shards;
            return Err(PlanError::GroupsInNccl { group, world_size });
        }
        let mut names = std::collections::BTreeSet::new();
        let mut last_unit = 0;
        for p in &spec.params {
            if p.unit.0 < last_unit || p.unit.index() >= spec.units.len() {
                return Err(PlanError::Unit {
                    name: p.name.clone(),
                    unit: p.unit.0,
                });
            }
            last_unit = p.unit.0;
            if !names.insert(p.name.as_str()) {
                return Err(PlanError::DuplicateName {
                    name: p.name.clone(),
                });
            }
        }
        let mut at = 0;
        let first_element = spec
            .params
            .iter()
            .map(|p| {
                let first = at;
                at += p.shape.elems() as u64;
                first
            })
            .collect();
        let hash = slice::hash(&spec, &config, world_size);
        let mut units = plan_units(&spec, shards, config.states_in_blocks);
        recompute::check(&config.recomputed, &units)?;
        let (own, recomputed) = slice::cut(&config, &mut units)?;
        let early = optimizer_overlap::chosen(&config, world_size, &units);
        Ok(Self {
            spec,
            config,
            world_size,
            units,
            own,
            recomputed,
            first_element,
            early,
            in_files: Vec::new(),
            reads_host_in_place: false,
            hash,
        })
    }

    /// Declaration of the planned model: its units and parameters.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Engine settings from which the plan was made.
    #[must_use]
    pub fn config(&self) -> &ZeroConfig {
        &self.config
    }

    /// Number of data-parallel ranks for which the plan was made.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Number of shards into which sharded states are divided: the size of a shard group in hybrid sharding,
    /// otherwise the world size.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.config.shard_group.unwrap_or(self.world_size)
    }

    /// Index of the shard that `rank` stores; it is less than [`Plan::shards`].
    #[must_use]
    pub fn shard_of(&self, rank: usize) -> usize {
        rank % self.shards()
    }

    /// Layouts of all units, in forward order: the offsets of their parameters and shards in flat buffers. The units of
    /// other pipeline stages are empty.
    #[must_use]
    pub fn units(&self) -> &[UnitPlan] {
        &self.units
    }

    /// Layout of the unit `id`: the offsets of its parameters and shards in flat buffers.
    #[must_use]
    pub fn unit(&self, id: UnitId) -> &UnitPlan {
        &self.units[id.index()]
    }

    /// Global index of the parameter's first element: its offset in the concatenation of all parameters
    /// without padding. Stochastic rounding uses it as a key, so results do not depend on the world size.
    #[must_use]
    pub fn first_element(&self, id: ParamId) -> u64 {
        self.first_element[id.index()]
    }

    /// Schedule of a pass of this kind: the units to use, in order, each with its phase (forward, recompute
    /// or backward).
    #[must_use]
    pub fn schedule(&self, kind: PassKind) -> Vec<Entry> {
        schedule::schedule(&self.units, &self.own, &self.recomputed, kind)
    }

    /// Whether backward recomputes the input of `unit` from an earlier unit's input instead of loading a
    /// saved one.
    #[must_use]
    pub fn recomputes_input(&self, unit: UnitId) -> bool {
        let groups = &self.recomputed;
        let inner = |group: &Range<u32>| group.start < unit.0 && unit.0 < group.end;
        groups.iter().any(inner)
    }

    /// Hash of model, settings, division into pipeline stages and world size (BLAKE3, 16 hex digits), by which ranks
    /// check that their plans agree. All pipeline stages have the same one.
    #[must_use]
    pub fn hash(&self) -> String {
        self.hash.clone()
    }
}
