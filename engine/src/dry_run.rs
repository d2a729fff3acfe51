//! Dry run of one rank: [`Zero`] itself, over regions that only count their bytes and a communicator that counts.
//!
//! A model's forward and backward run on it as in training. The memory pools then contain the bytes that a run needs,
//! by tag, and the offsets of its allocations. No parameter is updated: a dry run starts no worker thread, and jobs for
//! a worker return unchanged.

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

/// Dry run of rank 0. It dereferences to the [`Zero`] on which passes run.
#[derive(Debug)]
pub struct DryRun {
    zero: Zero,
    window: DryWindow,
    counters: Counters,
    /// I/O buffers and headers of spill files, allocated before the states.
    _disk: Vec<Count>,
}

impl DryRun {
    /// Creates rank 0 of `plan` on the meta device, with the optimizer state of `rule`.
    ///
    /// # Errors
    /// When the plan is not valid for the rule. Memory is unlimited.
    pub fn new(plan: Arc<Plan>, rule: Arc<dyn Optimizer>) -> Result<Self> {
        let [device, host] = ["device", "host"].map(|name| Pool::new(name, None));
        let backend = Arc::new(MetaBackend::new(device.clone()));
        Self::over(Counters::new(device, host), plan, rule, backend)
    }

    /// Creates rank 0 of `plan` on `backend`, which counts like a discrete device and has no values. The device stores
    /// the states of the device tier; buffers of the communicator are in host memory.
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

    /// Whether the host can address the memory of the device that passes run on.
    #[must_use]
    pub fn is_host_addressable(&self) -> bool {
        self.zero.backend().device().is_host_addressable()
    }

    /// Pool that counts the bytes in spill files.
    #[must_use]
    pub fn nvme_pool(&self) -> &Pool {
        &self.counters.nvme
    }

    /// Bytes of the host tier: memory maps in whole pages, and pages that its pool has touched.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.counters.host_bytes()
    }

    /// Bytes of the communicator's window that were used so far.
    #[must_use]
    pub fn window(&self) -> WindowBytes {
        self.window.bytes()
    }

    /// Maximal bytes of the window in use at once since the last call.
    #[must_use]
    pub fn take_window_peak(&self) -> u64 {
        self.window.take_peak()
    }

    /// Runs [`Zero::step`], then prepares the pass of the next update.
    ///
    /// # Errors
    /// When the device's memory is exceeded.
    pub fn take_step(&mut self) -> Result<()> {
        self.zero.step(0.0)?;
        self.announce_next()
    }

    /// Gathers all weights, as saving a model does ([`Zero::visit_weights`]).
    ///
    /// # Errors
    /// When the device's memory is exceeded.
    pub fn save_all(&self) -> Result<()> {
        self.zero.visit_weights(|_, _| Ok(()))
    }

    /// Gathers the trainable weights, as saving only them does ([`Zero::visit_trained_weights`]).
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
