//! A dry run of one rank: [`Zero`] itself, over empty regions and a communicator that counts.
//!
//! A model's forward and backward pass run on it as in training. The pools then hold the bytes a run needs by tag, and
//! the offsets they allocated say which pages it touches. No parameter is updated: a dry run starts no worker thread,
//! and jobs for a worker return unchanged.

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

/// Rank 0 of a run on the meta device: it dereferences to the [`Zero`] that passes run on.
#[derive(Debug)]
pub struct DryRun {
    zero: Zero,
    window: DryWindow,
    counters: Counters,
    /// I/O buffers and headers of spill files, allocated before the states.
    _disk: Vec<Count>,
}

impl DryRun {
    /// Rank 0 of `plan` with the states of `rule`.
    ///
    /// # Errors
    /// The plan is not valid for the rule. Counting itself has no limit.
    pub fn new(plan: Arc<Plan>, rule: Arc<dyn Optimizer>) -> Result<Self> {
        let [device, host] = ["device", "host"].map(|name| Pool::new(name, None));
        let backend = Arc::new(MetaBackend::new(device.clone()));
        Self::over(Counters::new(device, host), plan, rule, backend)
    }

    /// As [`DryRun::new`], with passes on `backend`, which stands for a discrete device and only counts. It stores the states of the
    /// device tier; buffers of the communicator are in host memory.
    ///
    /// # Errors
    /// The states exceed the device's memory.
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

    /// Lets the next pass update the units whose gradients are consumed bucket by bucket. All other units are updated
    /// after the pass, which is the case that needs the most memory.
    fn announce_next(&mut self) -> Result<()> {
        let plan = self.zero.plan();
        let consumes = |unit: &UnitPlan| plan.consumes_gradients(unit.id);
        match plan.units().iter().any(consumes) {
            true => self.zero.announce_update(0.0, 1.0, 0),
            false => Ok(()),
        }
    }

    /// Whether the host could address the memory of the device that passes run on.
    #[must_use]
    pub fn is_host_addressable(&self) -> bool {
        self.zero.backend().device().is_host_addressable()
    }

    /// Bytes of spill files.
    #[must_use]
    pub fn nvme_pool(&self) -> &Pool {
        &self.counters.nvme
    }

    /// Bytes of the host tier: memory maps in whole pages, and the blocks of its pool.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.counters.host_bytes()
    }

    /// Bytes of the communicator's window that were used so far.
    #[must_use]
    pub fn window(&self) -> WindowBytes {
        self.window.bytes()
    }

    /// Most bytes of the window in use at once since the last call.
    #[must_use]
    pub fn take_window_peak(&self) -> u64 {
        self.window.take_peak()
    }

    /// [`Zero::step`], then prepares the pass of the next update.
    ///
    /// # Errors
    /// The device's memory is exceeded.
    pub fn take_step(&mut self) -> Result<()> {
        self.zero.step(0.0)?;
        self.announce_next()
    }

    /// Gathers all weights, as a save does ([`Zero::visit_weights`]).
    ///
    /// # Errors
    /// The device's memory is exceeded.
    pub fn save_all(&self) -> Result<()> {
        self.zero.visit_weights(|_, _| Ok(()))
    }

    /// Gathers the trainable weights, as a save does ([`Zero::visit_trained_weights`]).
    ///
    /// # Errors
    /// The device's memory is exceeded.
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
