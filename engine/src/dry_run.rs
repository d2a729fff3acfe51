//! A dry run of one rank: [`Zero`] itself, over memory without bytes and a communicator that counts.
//!
//! A model's forward and backward run on it as on the real thing. The pools then say what a run needs by kind, and the
//! places they gave out which pages it will touch. Nobody updates anything: no thread is started, and jobs for one come
//! back as they were.

use crate::access::ParamAccess;
use crate::books::Books;
use crate::comm::dry::DryWindow;
use crate::comm::{WindowBytes, World};
use crate::error::EngineError;
use crate::plan::{Plan, StateKind, Tier, UnitPlan};
use crate::spill::BLOCK_BYTES;
use crate::tier::{Region, Tiers};
use crate::zero::{OptimizerConfig, Zero};
use kernels::{Backend, NullBackend, Pool, Tag};
use optim::{GroupOptions, Optimizer};
use std::ops::Deref;
use std::sync::Arc;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Rank 0 without bytes: passes run on the [`Zero`] that it dereferences to.
#[derive(Debug)]
pub struct DryRun {
    zero: Zero,
    window: DryWindow,
    books: Books,
    /// Buffers and headers of spill files, which exist before states do.
    _disk: Vec<Region>,
}

impl DryRun {
    /// Rank 0 of `plan` with the states of `rule`.
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub fn new(plan: Arc<Plan>, rule: Arc<dyn Optimizer>) -> Result<Self> {
        let [device, host] = ["device", "host"].map(|name| Pool::new(name, None));
        let backend = Arc::new(NullBackend::new(device.clone()));
        Self::over(Books::new(device, host), plan, rule, backend)
    }

    /// As [`DryRun::new`], with passes on `backend`: a discrete device that only counts. States of
    /// the device's tier lie there; what the communicator holds for it lies in host memory.
    ///
    /// # Errors
    /// When the device has no room for the states.
    pub fn apart(
        plan: Arc<Plan>,
        rule: Arc<dyn Optimizer>,
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let host = Pool::new("host", None);
        Self::over(Books::new(host.clone(), host), plan, rule, backend)
    }

    fn over(
        books: Books,
        plan: Arc<Plan>,
        rule: Arc<dyn Optimizer>,
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let world = World {
            rank: 0,
            size: plan.world_size(),
        };
        let window = DryWindow::new(world, plan.shards());
        let disk = opened_disk(&plan, &books)?;
        let same = GroupOptions {
            weight_decay: 0.0,
            lr_scale: 1.0,
        };
        let groups = vec![same; plan.spec().params.len()];
        let optimizer = OptimizerConfig { rule, groups };
        let (comm, tiers) = (Arc::new(window.clone()), Tiers::counted_in(books.clone()));
        let mut run = Self {
            zero: Zero::new(plan, comm, backend, tiers, optimizer)?,
            window,
            books,
            _disk: disk,
        };
        run.announce_next()?;
        Ok(run)
    }

    /// Gradients may be consumed in the next pass. Other units are not announced: all of them are updated after the pass,
    /// which takes most.
    fn announce_next(&mut self) -> Result<()> {
        let plan = self.zero.plan();
        let consumes = |unit: &UnitPlan| plan.consumes_gradients(unit.id);
        match plan.units().iter().any(consumes) {
            true => self.zero.announce_update(0.0, 1.0, 0),
            false => Ok(()),
        }
    }

    /// Whether passes run on a discrete device.
    #[must_use]
    pub fn is_apart(&self) -> bool {
        self.zero.backend().device().is_apart()
    }

    /// Spill files.
    #[must_use]
    pub fn nvme_pool(&self) -> &Pool {
        &self.books.nvme
    }

    /// Bytes of the host tier: maps in whole pages, and what blocks of its pool occupy.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.books.host_bytes()
    }

    /// The communicator's window so far.
    #[must_use]
    pub fn window(&self) -> WindowBytes {
        self.window.bytes()
    }

    /// Most bytes of the window in use at once since the last call.
    #[must_use]
    pub fn take_window_peak(&self) -> u64 {
        self.window.take_peak()
    }

    /// [`Zero::step`]; the passes after it are again the last of their update.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn take_step(&mut self) -> Result<()> {
        self.zero.step(0.0)?;
        self.announce_next()
    }

    /// What saving all weights gathers ([`Zero::visit_weights`]).
    ///
    /// # Errors
    /// When the device has no room.
    pub fn save_all(&self) -> Result<()> {
        self.zero.visit_weights(|_, _| Ok(()))
    }

    /// What saving those that train gathers ([`Zero::visit_trained_weights`]).
    ///
    /// # Errors
    /// When the device has no room.
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

/// The buffers in front of spill files, and the files' headers.
fn opened_disk(plan: &Plan, books: &Books) -> Result<Vec<Region>> {
    let take = |tier, bytes: u64| books.region(tier, bytes as usize, 0, Tag::Workspace);
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
