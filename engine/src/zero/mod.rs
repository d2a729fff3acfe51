//! [`Zero`]: model states of one rank under ZeRO, as passes and the training loop use them.

mod device;
mod device_transfers;
mod pipeline;
mod senders;
mod snapshot;
mod step;
mod update;

pub use snapshot::check_trained;

use self::device_transfers::DeviceTransfers;
use self::pipeline::Transfers;
use self::senders::Senders;
use crate::access::{Lease, LeaseOwner, ParamAccess, PipelineStage};
use crate::comm::mesh::Mesh;
use crate::comm::{Communicator, Tag as CommTag};
use crate::error::EngineError;
use crate::offload::activations::Activations;
use crate::offload::activations::placed;
use crate::offload::spill::SpillStats;
use crate::offload::tier::{Tiers, region_chunks};
use crate::plan::{DeviceTransport, GroupKind, PassKind, Phase, Plan, Tier, UnitPlan, Visit};
use crate::spec::{ParamId, UnitId};
use crate::step::OptimizerConfig;
use crate::step::device_step::DeviceStep;
use crate::store::device_comm::{DeviceComm, How};
use crate::store::open_devices::open_devices;
use crate::store::prefetch_upload::Prefetched;
use crate::store::registered::HostRegistered;
use crate::store::route::Computes;
use crate::store::{Store, lease_of};
use crate::timing::{DeviceTimes, Times};
use crate::trace::{Lane, Trace};
use kernels::{Backend, CpuBackend, MetaBackend, Pool, Tag, Tensor};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Maximal number of elements of a weight that are read at once while loading.
const LOAD_CHUNK_ELEMS: usize = 1 << 20;

/// Result of one optimizer step, equal on all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepReport {
    /// Number of optimizer updates applied in the run so far, also before a resume, and including this one if
    /// it was applied.
    pub step: u64,
    /// Mean loss per supervised token over all ranks and micro-batches.
    pub loss: f64,
    /// Number of supervised tokens over all ranks and micro-batches.
    pub supervised_tokens: u64,
    /// Global L2 norm of the mean gradient per supervised token, before clipping.
    pub grad_norm: f64,
    /// Whether the update was applied. It is skipped, and nothing changes, if a gradient or the loss is not
    /// finite.
    pub applied: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    loss_sum: f64,
    supervised: u64,
}

/// Weights of a unit on a discrete device.
type Uploaded = (UnitId, Vec<(ParamId, Tensor)>);

/// Engine of one rank under ZeRO: it stores the rank's weights, gradients and optimizer states, and runs
/// their collectives and updates.
///
/// A micro-batch runs between [`Zero::begin_pass`] and [`Zero::end_micro_batch`]. In between, the model's
/// forward and backward lease weights and deposit gradients ([`ParamAccess`]). After the last micro-batch of
/// an update, [`Zero::step`] applies it.
pub struct Zero {
    plan: Arc<Plan>,
    mesh: Mesh,
    /// Communicator of the data-parallel ranks of this pipeline stage.
    comm: Arc<dyn Communicator>,
    /// Transfers to the neighboring pipeline stages.
    transfers: RefCell<Transfers>,
    backend: Arc<dyn Backend>,
    optimizer: Arc<OptimizerConfig>,
    tiers: Tiers,
    activations: Option<Activations>,
    /// Optimizer step on the device; `None` if the host updates.
    device_step: Option<DeviceStep>,
    /// Whether updates run during the next forward pass.
    updates_in_forward: bool,
    exchange: step::Exchange,
    /// Whether the device is discrete: the host cannot address its memory.
    discrete: bool,
    /// Whether a lease frees the previous unit's weights on the device before it allocates its own.
    frees_first: bool,
    pub(crate) store: RefCell<Store>,
    pub(crate) step: u64,
    totals: Totals,
    /// Weights leased last on a discrete device. They stay while the next ones are copied, because the device still
    /// uses them.
    uploaded: RefCell<Option<Uploaded>>,
    /// Reserved memory on a discrete device for the weights leased next.
    prefetched: RefCell<Prefetched>,
    /// Last unit leased in the current pass, or in a pass that failed.
    leased: Cell<Option<(UnitId, Phase)>>,
    /// Time at which that lease began; `None` unless a trace is recorded.
    leased_at: Cell<Option<Instant>>,
    non_finite: Option<UnitId>,
    device_times: DeviceTimes,
    /// Whether the current pass trains.
    trains: Cell<bool>,
}

impl std::fmt::Debug for Zero {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Zero")
            .field("world", &self.comm.world())
            .field("config", self.plan.config())
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl Zero {
    /// Allocates this rank's weights, gradients and optimizer states, all zero; [`Zero::load`] fills the
    /// weights. It first compares the hash of the plan between the ranks. All ranks of `comm` are data-parallel.
    ///
    /// # Errors
    /// [`EngineError::PlanDiffers`] if the ranks' plans differ; other errors if memory, a disk or a device is
    /// missing.
    pub fn new(
        plan: Arc<Plan>,
        comm: Arc<dyn Communicator>,
        backend: Arc<dyn Backend>,
        tiers: Tiers,
        optimizer: OptimizerConfig,
    ) -> Result<Self> {
        Self::in_mesh(plan, comm.into(), backend, tiers, optimizer)
    }

    /// As [`Zero::new`], for a rank of a mesh of pipeline stages ([`ZeroConfig::slice`](crate::ZeroConfig::slice)).
    ///
    /// # Errors
    /// As [`Zero::new`].
    pub fn in_mesh(
        plan: Arc<Plan>,
        mesh: Mesh,
        backend: Arc<dyn Backend>,
        tiers: Tiers,
        optimizer: OptimizerConfig,
    ) -> Result<Self> {
        compare_plans(&plan, &**mesh.world())?;
        let comm = mesh.data().clone();
        let tiers = tiers.on(&backend);
        let is_dry = tiers.counters().is_some();
        let have_peers = plan.config().device_transport == DeviceTransport::Peers;
        let crosses_devices = have_peers && mesh.coordinates().stages > 1;
        if !is_dry && (crosses_devices || have_peers && plan.devices_talk()) {
            open_devices(&*backend, &**mesh.world())?;
        }
        let device = if plan.devices_talk() {
            let (backend, how) = (backend.clone(), How::of(&plan));
            Some(match is_dry {
                true => DeviceComm::dry_run(backend, comm.world(), how)?,
                false => DeviceComm::join(backend, &mesh, how)?,
            })
        } else {
            None
        };
        let transfers = match crosses_devices {
            true => Transfers::BetweenDevices(DeviceTransfers::new(&mesh, backend.clone())),
            false => Transfers::ThroughHost(Senders::start(&mesh, &tiers)?),
        };
        let computes = Computes {
            discrete: !backend.device().is_host_addressable(),
            stores: tiers.are_resident(),
            collects: device.is_some(),
        };
        let store = Store::new(
            plan.clone(),
            comm.clone(),
            tiers.clone(),
            &*optimizer.rule,
            (computes, device),
        )?;
        let device_step = if computes.stores && plan.steps_on_device() {
            Some(DeviceStep::new(&plan, backend.clone())?)
        } else {
            None
        };
        // A device updates in its own order of work, so no thread does.
        let there = computes.stores && plan.config().offload.optimizer == Tier::Device;
        let updates_in_forward = plan.updates_in_forward() && !there;
        // Prefetched gathers already have memory of their own.
        let frees_first = plan.config().prefetch_units == 0 || plan.prefetches_gathers();
        let activations = Activations::new(plan.config().offload.activation, tiers.clone())
            .map(|keeper| keeper.of(&*backend));
        let exchange = step::Exchange::new(&plan);
        Ok(Self {
            transfers: RefCell::new(transfers),
            plan,
            mesh,
            comm,
            backend,
            optimizer: Arc::new(optimizer),
            activations,
            tiers,
            device_step,
            updates_in_forward,
            exchange,
            discrete: computes.discrete,
            frees_first,
            store: RefCell::new(store),
            step: 0,
            totals: Totals::default(),
            uploaded: RefCell::new(None),
            prefetched: RefCell::default(),
            leased: Cell::new(None),
            leased_at: Cell::new(None),
            non_finite: None,
            device_times: DeviceTimes::default(),
            trains: Cell::new(false),
        })
    }

    /// Makes sure that this rank has at least `bytes` reserved on disk for saved activations, if they are
    /// stored on disk; otherwise does nothing.
    ///
    /// # Errors
    /// When the disk is full.
    pub fn reserve_activations(&self, bytes: u64) -> Result<()> {
        match &self.activations {
            Some(activations) => activations.reserve(bytes),
            None => Ok(()),
        }
    }

    /// Plan of the run: how states are sharded among ranks, and in which order units (usually layers) are
    /// gathered.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Communicators of this rank's mesh of pipeline stages.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Communicator of the data-parallel ranks, through which this rank runs its collectives.
    #[must_use]
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// Number of optimizer updates applied in the run so far, also before a resume. Skipped updates do not
    /// count.
    #[must_use]
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// Position of a pass, for error messages: name of the unit leased last, and the phase of that lease.
    /// After a failed pass it remains until the next one. `None` between passes.
    #[must_use]
    pub fn position(&self) -> Option<(&str, Phase)> {
        let (unit, phase) = self.leased.get()?;
        Some((self.unit_name(unit), phase))
    }

    /// Name of the unit nearest to the loss that had a non-finite gradient in the last [`Zero::step`]; `None`
    /// if all were finite. It covers only the gradients that this rank sums.
    #[must_use]
    pub fn non_finite_gradient(&self) -> Option<&str> {
        let unit = self.non_finite?;
        Some(self.unit_name(unit))
    }

    /// Fills this rank's weights and master weights with f32 values from the callback `read`. A call receives
    /// a parameter, a range of its elements, and the buffer to fill with their values. It is called only for
    /// elements that this rank stores, at most 2^20 at a time. Of a quantized parameter it reads all elements and quantizes
    /// them, so a rank has one such parameter whole in memory at a time. If the ranks share frozen weights
    /// ([`Plan::shares_frozen`]), all must call it.
    ///
    /// # Errors
    /// When `read` or a write fails, or a lease still borrows the weights.
    pub fn load<E>(
        &mut self,
        read: impl FnMut(ParamId, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.load_quantized(read, |_, _| Ok(false))
    }

    /// As [`Zero::load`], for weights that may be quantized in their files. The callback `quantized` receives a quantized
    /// parameter and its bytes. It fills them and returns true, or returns false if the file has plain values.
    ///
    /// # Errors
    /// As [`Zero::load`], and when `quantized` fails.
    pub fn load_quantized<E>(
        &mut self,
        read: impl FnMut(ParamId, Range<usize>, &mut [f32]) -> Result<(), E>,
        quantized: impl FnMut(ParamId, &mut [u8]) -> Result<bool, E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.finish_updates()?;
        self.store.get_mut().open_shared()?;
        let loaded = self.load_units(read, quantized);
        loaded.inspect_err(|error| {
            // Otherwise the other ranks would wait for this one.
            if self.plan.shared_bytes() > 0 {
                self.mesh.abort(&error.to_string());
            }
        })?;
        let store = self.store.get_mut();
        store.close_shared()?;
        store.register_frozen(&*self.backend);
        self.tiers.flush()
    }

    /// Maps the weights that the plan reads in their files ([`Plan::mapped_params`]). The callback `open` names the file of
    /// a parameter and its bytes there. It must be called before [`Zero::load`], which still reads these weights once, but
    /// does not store them.
    ///
    /// # Errors
    /// When `open` fails, the file has not as many bytes, or a lease still borrows the weights.
    pub fn map_files<E>(
        &mut self,
        mut open: impl FnMut(ParamId) -> Result<(File, Range<u64>), E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let plan = self.plan.clone();
        for param in plan.mapped_params() {
            let (file, range) = open(param).map_err(|source| self.load_error(param, source))?;
            let unit = plan.spec().params[param.index()].unit;
            self.store.get_mut().map_file((unit, param), &file, range)?;
        }
        Ok(())
    }

    fn load_units<E>(
        &mut self,
        mut read: impl FnMut(ParamId, Range<usize>, &mut [f32]) -> Result<(), E>,
        mut quantized: impl FnMut(ParamId, &mut [u8]) -> Result<bool, E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let plan = self.plan.clone();
        let mut chunk = Vec::new();
        for unit in plan.units() {
            self.load_quantized_group(unit, &mut read, &mut quantized)?;
            for kind in [GroupKind::Trainable, GroupKind::Frozen] {
                let resting = self.store.get_mut().resting(unit.id, kind);
                let pieces: Vec<_> = unit
                    .group(kind)
                    .parts(resting.clone())
                    .flat_map(|(slot, part)| {
                        region_chunks(part, LOAD_CHUNK_ELEMS).map(|p| (slot.param, slot.offset, p))
                    })
                    .collect();
                for (param, offset, part) in pieces {
                    chunk.resize(part.len(), 0.0);
                    let elements = part.start - offset..part.end - offset;
                    let loaded = read(param, elements, &mut chunk);
                    loaded.map_err(|source| self.load_error(param, source))?;
                    if plan.maps_files(unit.id, kind) {
                        continue;
                    }
                    let weights = self.store.get_mut().weights_mut(unit.id, kind)?;
                    let dtype = plan.dtype_of(kind);
                    weights.write_rounded(dtype, resting.start, part.clone(), &chunk)?;
                    if let (GroupKind::Trainable, Some(state)) =
                        (kind, self.store.get_mut().state_mut(unit.id))
                    {
                        state.set_master(part, &chunk)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Fills this rank's part of a unit's quantized parameters, one parameter after the other.
    fn load_quantized_group<E>(
        &mut self,
        unit: &UnitPlan,
        read: &mut impl FnMut(ParamId, Range<usize>, &mut [f32]) -> Result<(), E>,
        quantized: &mut impl FnMut(ParamId, &mut [u8]) -> Result<bool, E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let resting = self.store.get_mut().resting(unit.id, GroupKind::Quantized);
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for (slot, part) in unit.quantized.parts(resting.clone()) {
            let spec = &self.plan.spec().params[slot.param.index()];
            let (shape, quantization) = (spec.shape, spec.stored_quantization());
            bytes.clear();
            bytes.resize(slot.len, 0);
            let filled = quantized(slot.param, &mut bytes);
            let filled = filled.map_err(|source| self.load_error(slot.param, source))?;
            if let (false, Some(quantization)) = (filled, quantization) {
                values.resize(shape.elems(), 0.0);
                for elements in region_chunks(0..shape.elems(), LOAD_CHUNK_ELEMS) {
                    let loaded = read(slot.param, elements.clone(), &mut values[elements]);
                    loaded.map_err(|source| self.load_error(slot.param, source))?;
                }
                quantization.quantize(&values, shape, &mut bytes);
            }
            let own = part.start - slot.offset..part.end - slot.offset;
            let weights = self.store.get_mut();
            let weights = weights.weights_mut(unit.id, GroupKind::Quantized)?;
            weights.write(part.start - resting.start, &bytes[own])?;
        }
        Ok(())
    }

    fn load_error(
        &self,
        param: ParamId,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> EngineError {
        EngineError::Load {
            param: self.plan.spec().params[param.index()].name.clone(),
            source: source.into(),
        }
    }

    // ---- passes -------------------------------------------------------------------------------

    /// Starts a pass of the model, for training or inference, before any unit is leased. All ranks must start
    /// the same kind.
    pub fn begin_pass(&self, kind: PassKind) {
        self.leased.set(None);
        self.trains.set(kind != PassKind::Infer);
        // A failed pass may have left these.
        self.uploaded.take();
        self.prefetched.borrow_mut().clear();
        self.store.borrow_mut().begin_pass(kind, None);
    }

    /// Ends a pass: takes part in the collectives of units that this rank did not lease, and waits for all
    /// gradient reductions.
    ///
    /// # Errors
    /// When communication fails.
    pub fn end_pass(&self) -> Result<()> {
        self.uploaded.take();
        self.prefetched.take();
        self.store.borrow_mut().end_pass()?;
        self.leased.set(None);
        Ok(())
    }

    /// Ends the training pass of one micro-batch and counts it for the next [`Zero::step`]. `loss_sum` is the
    /// sum of the token losses on this rank, `supervised` the number of its tokens that have a loss.
    ///
    /// # Errors
    /// When communication fails.
    pub fn end_micro_batch(&mut self, loss_sum: f64, supervised: u64) -> Result<()> {
        self.uploaded.take();
        self.prefetched.take();
        let store = self.store.get_mut();
        store.end_pass()?;
        store.count_micro_batch();
        self.leased.set(None);
        self.totals.loss_sum += loss_sum;
        self.totals.supervised += supervised;
        Ok(())
    }

    /// Waits for optimizer updates that still run in threads during forward (optimizer in forward). Methods
    /// of this type that read or write states call it themselves.
    ///
    /// # Errors
    /// When an update failed.
    pub fn finish_updates(&mut self) -> Result<()> {
        self.store.get_mut().finish_updates()
    }

    /// Gathers the weights of one unit after another in host memory, in forward order, and calls `visit` with
    /// each parameter and its whole weight. All ranks must call it.
    ///
    /// # Errors
    /// When communication or `visit` fails.
    pub fn visit_weights<E: From<EngineError>>(
        &self,
        visit: impl FnMut(ParamId, &Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit(Visit::All, visit)
    }

    /// Calls `visit` with every whole trainable weight, as [`Zero::visit_weights`] does with all. Frozen
    /// weights are not gathered or copied.
    ///
    /// # Errors
    /// When communication or `visit` fails.
    pub fn visit_trained_weights<E: From<EngineError>>(
        &self,
        visit: impl FnMut(ParamId, &Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit(Visit::Trained, visit)
    }

    fn visit<E: From<EngineError>>(
        &self,
        visits: Visit,
        mut visit: impl FnMut(ParamId, &Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.mesh.coordinates().stages > 1 {
            return self.visit_stages(visits, visit);
        }
        self.leased.set(None);
        self.trains.set(false);
        let mut store = self.store.borrow_mut();
        store.begin_pass(PassKind::Infer, Some(visits));
        drop(store);
        let kinds = GroupKind::ALL
            .into_iter()
            .filter(|kind| visits.reads(*kind));
        let units = self.plan.units().iter();
        let holds = |unit: &&UnitPlan| kinds.clone().any(|kind| !unit.group(kind).is_empty());
        for unit in units.filter(holds) {
            let lease = self.lease_on_host(unit.id, Phase::Forward)?;
            for kind in kinds.clone() {
                // In the model's order, which layouts need not have.
                let slots = unit.group(kind).slots.iter();
                let mut params: Vec<ParamId> = slots.map(|slot| slot.param).collect();
                params.sort_unstable();
                for param in params {
                    visit(param, lease.param(param)?)?;
                }
            }
            lease.end()?;
        }
        self.end_pass()?;
        Ok(())
    }

    /// Content of all master weights and optimizer states that this rank stores, concatenated in unit order.
    /// Tests compare it, e.g. before and after a skipped step.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn state_bytes(&self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        let mut store = self.store.borrow_mut();
        store.finish_updates()?;
        let states = self.plan.units().iter().filter_map(|u| store.state(u.id));
        for kind in states.flat_map(|state| state.kinds()) {
            let region = &kind.region;
            let start = all.len();
            all.resize(start + region.len(), 0);
            region.read(0, &mut all[start..])?;
        }
        Ok(all)
    }

    /// Trace recorder of this rank.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        self.tiers.trace()
    }

    fn unit_name(&self, unit: UnitId) -> &str {
        &self.plan.spec().units[unit.index()].name
    }

    /// Total time that this rank has spent in collectives and in copies of states and saved activations
    /// between tiers, since its states were allocated.
    #[must_use]
    pub fn times(&self) -> Times {
        Times {
            communication: self.mesh.time_spent(),
            offload: self.store.borrow().copy_time()
                + self
                    .activations
                    .as_ref()
                    .map_or(Duration::ZERO, Activations::copy_time),
        }
    }

    /// Frozen weights in host memory that the discrete device's driver has page-locked. Copies read them in place.
    #[must_use]
    pub fn host_registered(&self) -> HostRegistered {
        self.store.borrow().host_registered()
    }

    /// Bytes and busy time of this rank's spill files (states on disk); `None` without spill files.
    #[must_use]
    pub fn spill_stats(&self) -> Option<SpillStats> {
        self.tiers.spill().map(|spill| spill.stats())
    }

    /// Pool that counts the memory of the device on which passes run.
    #[must_use]
    pub fn device_pool(&self) -> &Pool {
        if self.discrete {
            return self.backend.pool();
        }
        &self.tiers.device
    }

    /// Pool that counts this rank's host memory.
    #[must_use]
    pub fn host_pool(&self) -> &Pool {
        &self.tiers.host
    }

    /// Pool that counts the bytes in this rank's spill files; `None` without spill files.
    #[must_use]
    pub fn spill_pool(&self) -> Option<&Pool> {
        self.tiers.spill().map(|spill| spill.pool())
    }

    /// Copies the weights of a unit to a discrete device. The previous unit keeps its weights until then, so the
    /// buffers never alias and the copy need not wait for the previous unit's work.
    fn upload(
        &self,
        unit: UnitId,
        params: Vec<(ParamId, Tensor)>,
    ) -> Result<Vec<(ParamId, Tensor)>> {
        let mut uploaded = self.uploaded.borrow_mut();
        if let Some((_, there)) = uploaded.as_ref().filter(|(there, _)| *there == unit) {
            let there = there.clone();
            self.make_room()?;
            return Ok(there);
        }
        let mut places = self.prefetched.borrow_mut().take(unit);
        let backend = &*self.backend;
        let mut there = Vec::with_capacity(params.len());
        let (mut ids, mut reserved, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for (id, weight) in &params {
            let (shape, dtype, place) = (weight.shape(), weight.dtype(), places.remove(id));
            if weight.is_on_device() {
                there.push((*id, weight.clone()));
            } else if weight.is_meta() {
                let weight = placed(backend, place, shape, dtype, Tag::Gathered)?;
                there.push((*id, weight));
            } else {
                let reserve = || backend.reserve_upload(shape, dtype, Tag::Gathered);
                ids.push(*id);
                reserved.push(place.map_or_else(reserve, Ok)?);
                bytes.push(weight.host_bytes()?);
            }
        }
        let copies = reserved.into_iter().zip(bytes.iter().map(|all| &**all));
        there.extend(ids.into_iter().zip(backend.upload_all(copies.collect())?));
        there.sort_unstable_by_key(|(id, _)| *id);
        *uploaded = Some((unit, there.clone()));
        self.make_room()?;
        Ok(there)
    }

    /// Prepares device memory before the work of the leased unit is queued: receives gradients that left the device,
    /// then reserves memory for the weights of the next unit.
    fn make_room(&self) -> Result<()> {
        self.store.borrow_mut().take_sums()?;
        let next = self.store.borrow().next_upload();
        let mut prefetched = self.prefetched.borrow_mut();
        prefetched.reserve(next, &self.plan, &*self.backend)
    }

    /// Dequantizes the quantized weights of a lease. They exist until the lease and what uses them end.
    fn dequantize(
        &self,
        backend: &dyn Backend,
        mut params: Vec<(ParamId, Tensor)>,
    ) -> Result<Vec<(ParamId, Tensor)>> {
        let dtype = self.plan.config().precision.weight_dtype();
        for (id, weight) in &mut params {
            let spec = &self.plan.spec().params[id.index()];
            if let Some(quantization) = spec.stored_quantization() {
                *weight = backend.dequantize(weight, quantization, spec.shape, dtype)?;
            }
        }
        Ok(params)
    }

    /// A lease whose weights are not copied to a discrete device.
    pub(crate) fn lease_on_host(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>> {
        self.leased.set(Some((unit, phase)));
        let mut params = self.store.borrow_mut().lease(unit, phase)?;
        let pool = self.tiers.device.clone();
        params = match self.tiers.counters() {
            Some(_) => self.dequantize(&MetaBackend::new(pool), params)?,
            None => self.dequantize(&CpuBackend::new(pool), params)?,
        };
        Ok(lease_of(self, unit, phase, params))
    }

    /// Range of elements of the trainable group whose weights this rank stores.
    pub(crate) fn resting_range(&self, unit: UnitId) -> Range<usize> {
        self.store.borrow().resting(unit, GroupKind::Trainable)
    }

    pub(crate) fn set_step(&mut self, step: u64) {
        self.step = step;
        self.totals = Totals::default();
        self.store.get_mut().clear_gradients(step);
    }
}

impl ParamAccess for Zero {
    fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>> {
        self.leased.set(Some((unit, phase)));
        if self.frees_first {
            self.uploaded
                .borrow_mut()
                .take_if(|(there, _)| *there != unit);
        }
        let mut params = self.store.borrow_mut().lease(unit, phase)?;
        if self.discrete {
            params = self.upload(unit, params)?;
        }
        params = self.dequantize(&*self.backend, params)?;
        self.label_device(Some((unit, phase)))?;
        self.leased_at.set(self.trace().now());
        Ok(lease_of(self, unit, phase, params))
    }

    fn deposit(&self, id: ParamId, grad: &Tensor) -> Result<()> {
        self.store.borrow_mut().deposit(id, grad)
    }

    fn activations(&self) -> Option<&Activations> {
        self.activations.as_ref()
    }

    fn is_trainable(&self, id: ParamId) -> bool {
        self.plan.spec().params[id.index()].trainable
    }

    fn needs_backward(&self, unit: UnitId) -> bool {
        self.plan.unit(unit).needs_backward
    }

    fn recomputes_input(&self, unit: UnitId) -> bool {
        self.plan.recomputes_input(unit)
    }

    fn pipeline(&self) -> Option<&dyn PipelineStage> {
        (self.mesh.coordinates().stages > 1).then_some(self)
    }

    fn own_units(&self) -> Option<Range<u32>> {
        (self.plan.stages() > 1).then(|| self.plan.own_units())
    }
}

impl LeaseOwner for Zero {
    fn end_lease(&self, unit: UnitId, phase: Phase, completed: bool) -> Result<()> {
        self.trace().end(self.leased_at.take(), Lane::Compute, || {
            format!("{} {}", phase.name(), self.unit_name(unit))
        });
        self.label_device(None)?;
        let mut store = self.store.borrow_mut();
        if completed {
            store.end_lease(unit, phase)
        } else {
            store.abandon_pass();
            self.uploaded.take();
            self.prefetched.take();
            Ok(())
        }
    }
}

fn compare_plans(plan: &Plan, comm: &dyn Communicator) -> Result<()> {
    let ours = plan.hash();
    let all = comm.all_gather_bytes(ours.as_bytes(), CommTag::new("plan", 0))?;
    for (rank, bytes) in all.iter().enumerate() {
        if bytes != ours.as_bytes() {
            let theirs = String::from_utf8_lossy(bytes).into_owned();
            return Err(EngineError::PlanDiffers { rank, theirs, ours });
        }
    }
    Ok(())
}
