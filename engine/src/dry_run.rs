//! Dry run of one rank: [`Zero`] itself, over regions that only count their bytes and a communicator that counts.
//!
//! A model's forward and backward run on it as in training. The memory pools then contain the bytes that a run
//! needs, by tag, and the offsets of its allocations. No parameter is updated: a dry run starts no worker
//! thread, and jobs for a worker return unchanged.

use crate::access::ParamAccess;
use crate::comm::dry::DryWindow;
use crate::comm::{WindowBytes, World};
use crate::error::EngineError;
use crate::offload::counters::{Count, Counters};
use crate::offload::tier::Tiers;
use crate::plan::blocks::BLOCK_BYTES;
use crate::plan::{Plan, StateKind, Tier, UnitPlan};
use crate::step::OptimizerConfig;
use crate::zero::Zero;
use kernels::{Backend, MetaBackend, Pool, Tag};
use optim::{GroupOptions, Optimizer};
use std::ops::Deref;
use std::sync::Arc;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Dry run of rank 0: it runs passes and steps of a plan without values and counts the memory that they need.
/// It dereferences to the [`Zero`] on which passes run.
#[derive(Debug)]
pub struct DryRun {
    zero: Zero,
    window: DryWindow,
    counters: Counters,
    /// I/O buffers and headers of spill files, allocated before the states.
    _disk: Vec<Count>,
}

impl DryRun {
    /// Creates the dry run of rank 0 of `plan` on the meta device (no values), with the optimizer states that
    /// `rule` declares. No limit on memory applies.
    ///
    /// # Errors
    /// When the plan is not valid for the rule.
    pub fn new(plan: Arc<Plan>, rule: Arc<dyn Optimizer>) -> Result<Self> {
        let [device, host] = ["device", "host"].map(|name| Pool::new(name, None));
        let backend = Arc::new(MetaBackend::new(device.clone()));
        Self::over(Counters::new(device, host), plan, rule, backend)
    }

    /// Creates the dry run of rank 0 of `plan` on `backend`, a discrete device (the host cannot address its
    /// memory) that counts allocations and has no values. Its memory contains the states that the plan stores
    /// on the device. Buffers of the communicator count as host memory.
    ///
    /// # Errors
    /// When the states exceed the device's memory.
    pub fn on_discrete_device(
        plan: Arc<Plan>,
        rule: Arc<dyn Optimizer>,
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let host = Pool::new("host", None);
        Self::over(Counters::new(host.clone(), host), plan, rule, backend)
    }

    fn over(
        counters: Counters,
        plan: Arc<Plan>,
        rule: Arc<dyn Optimizer>,
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let world = World {
            rank: 0,
            size: plan.world_size(),
        };
        let window = DryWindow::new(world, plan.shards());
        let disk = opened_disk(&plan, &counters)?;
        let same = GroupOptions {
            weight_decay: 0.0,
            lr_scale: 1.0,
        };
        let groups = vec![same; plan.spec().params.len()];
        let optimizer = OptimizerConfig { rule, groups };
        let (comm, tiers) = (
            Arc::new(window.clone()),
            Tiers::in_dry_run(counters.clone()),
        );
        let mut run = Self {
            zero: Zero::new(plan, comm, backend, tiers, optimizer)?,
            window,
            counters,
            _disk: disk,
        };
        run.announce_next()?;
        Ok(run)
    }

    /// Announces the next update if it consumes gradients, which only an announced update can. Otherwise units are
    /// updated after the pass, which needs the most memory.
    fn announce_next(&mut self) -> Result<()> {
        let plan = self.zero.plan();
        let consumes = |unit: &UnitPlan| plan.consumes_gradients(unit.id);
        match plan.units().iter().any(consumes) {
            true => self.zero.announce_update(0.0, 1.0, 0),
            false => Ok(()),
        }
    }

    /// Whether the host can address the memory of the device on which passes run. It cannot for a discrete
    /// GPU.
    #[must_use]
    pub fn is_host_addressable(&self) -> bool {
        self.zero.backend().device().is_host_addressable()
    }

    /// Pool that counts the bytes that the rank would store in spill files on disk.
    #[must_use]
    pub fn nvme_pool(&self) -> &Pool {
        &self.counters.nvme
    }

    /// Bytes of host memory that the rank alone would occupy: its private memory maps, in whole pages, and the pages of
    /// its host pool that it has touched so far.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.counters.host_bytes()
    }

    /// Bytes of host memory that all ranks would map, in whole pages. They exist once on the machine
    /// ([`Plan::shared_bytes`]).
    #[must_use]
    pub fn shared_bytes(&self) -> u64 {
        self.counters.shared_bytes()
    }

    /// Byte counts of the communicator's window (the memory through which ranks exchange data), since the dry
    /// run began.
    #[must_use]
    pub fn window(&self) -> WindowBytes {
        self.window.bytes()
    }

    /// Peak number of bytes in use at once in this rank's part of the communicator's window, since the
    /// previous call, or since the dry run began.
    #[must_use]
    pub fn take_window_peak(&self) -> u64 {
        self.window.take_peak()
    }

    /// Runs [`Zero::step`] with learning rate 0. It then announces the next update
    /// ([`Zero::announce_update`]) if the plan has units whose update consumes gradients during backward.
    ///
    /// # Errors
    /// When the device's memory is exceeded.
    pub fn take_step(&mut self) -> Result<()> {
        self.zero.step(0.0)?;
        self.announce_next()
    }

    /// Gathers the weights of every unit, as a run does when it saves the whole model
    /// ([`Zero::visit_weights`]). Memory pools count the bytes.
    ///
    /// # Errors
    /// When the device's memory is exceeded.
    pub fn save_all(&self) -> Result<()> {
        self.zero.visit_weights(|_, _| Ok(()))
    }

    /// Gathers the trainable weights, as a run does when it saves only them
    /// ([`Zero::visit_trained_weights`]). Memory pools count the bytes.
    ///
    /// # Errors
    /// When the device's memory is exceeded.
    pub fn save_trained(&self) -> Result<()> {
        self.zero.visit_trained_weights(|_, _| Ok(()))
    }
}

impl Deref for DryRun {
    type Target = Zero;

    fn deref(&self) -> &Zero {
        &self.zero
    }
}

/// Counts the I/O buffers and headers of spill files.
fn opened_disk(plan: &Plan, counters: &Counters) -> Result<Vec<Count>> {
    let take = |tier, bytes: u64| counters.count(tier, bytes as usize, 0, Tag::Workspace);
    let mut disk = Vec::new();
    let buffers = plan.spill_buffer_bytes();
    if buffers > 0 {
        disk.push(take(Tier::Host, buffers)?);
    }
    for kind in StateKind::ALL {
        if plan.config().offload.tier(kind) == Tier::Nvme {
            disk.push(take(Tier::Nvme, BLOCK_BYTES)?);
        }
    }
    Ok(disk)
}
