//! One rank's model states without bytes: what [`Zero`](crate::Zero) takes, in the same order, on
//! a device that only counts.
//!
//! A model's forward and backward run on it as on the real thing. The pools then say what a run
//! needs by kind, and the places they gave out which pages it will touch.

use crate::access::{Lease, LeaseOwner, ParamAccess, Phase};
use crate::activations::Activations;
use crate::ahead::{Ahead, next_upload};
use crate::comm::dry::{DryBuffer, DryWindow};
use crate::comm::{CollectiveKind, WindowBytes, World};
use crate::device_comm::{DeviceComm, How, Own, OwnPart, Produced};
use crate::device_step::DeviceStep;
use crate::error::EngineError;
use crate::plan::{Entry, GroupKind, Pass, PassKind, Plan, StateKind, Tier, UnitPlan, Visit};
use crate::spec::{ParamId, UnitId};
use crate::spill::{BLOCK_BYTES, SpillFile};
use crate::store::shaped;
use crate::tier::{COPY_ELEMS, Tiers, WINDOW_ALIGN, access, windows};
use crate::update::chunks;
use kernels::{
    Arrival, Backend, DType, NullBackend, Pool, Reservation, Resident, Shape, Tag, Tensor,
};
use optim::StateSlot;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

type Result<T, E = EngineError> = std::result::Result<T, E>;

const PAGE: u64 = 4096;

/// Memory that outlives a pass.
enum Resting {
    Device(#[expect(dead_code, reason = "held for its place")] Tensor),
    Apart(#[expect(dead_code, reason = "held for its place")] Resident),
    Elsewhere(#[expect(dead_code, reason = "held for its count")] Reservation),
}

/// Weights readable on the device.
enum Readable {
    InWindow(
        #[expect(dead_code, reason = "held for its place")] DryBuffer,
        #[expect(dead_code, reason = "held for its count")] Reservation,
    ),
    Copied(#[expect(dead_code, reason = "held for its place")] Tensor),
    /// Gathered by the devices; flat.
    OnDevice(ParamId, Tensor),
}

/// A sum of gradients that is not yet taken.
enum Sum {
    InWindow(
        #[expect(dead_code, reason = "held for its place")] DryBuffer,
        #[expect(dead_code, reason = "held for its count")] Reservation,
    ),
    OnDevice(#[expect(dead_code, reason = "held for their places")] Vec<Tensor>),
}

#[derive(Default)]
struct Unit {
    /// `None` while sharded.
    readable: Option<Vec<Readable>>,
    bucket: Option<(DryBuffer, Reservation)>,
    /// Gradients on a device apart.
    deposited: Vec<(ParamId, Tensor)>,
}

/// What a unit's gradients on a device apart hold until they are taken back.
struct Brought {
    unit: UnitId,
    deposited: Vec<(ParamId, Tensor)>,
    bucket: Option<(DryBuffer, Reservation)>,
}

struct State {
    units: Vec<Unit>,
    pending: VecDeque<(UnitId, Sum)>,
    /// Collectives between devices.
    device: Option<DeviceComm>,
    /// The unit whose gradients are still to be fetched.
    closing: Option<UnitId>,
    /// Gradients that are being fetched, and where they go.
    brought: Option<Brought>,
    /// On a device apart, the weights leased last.
    uploaded: Option<(UnitId, Vec<(ParamId, Tensor)>)>,
    /// On a device apart, places for those that are leased next.
    ahead: Ahead,
    pass: Option<Pass>,
}

/// One rank without bytes.
pub struct Rehearsal {
    plan: Arc<Plan>,
    backend: Arc<dyn Backend>,
    device: Pool,
    host: Pool,
    /// Spill files.
    nvme: Pool,
    /// Bytes of host maps, whole pages.
    host_mapped: u64,
    activations: Option<Activations>,
    window: DryWindow,
    resting: Vec<Resting>,
    /// Weights on a device apart, by unit and group.
    weights: Vec<(UnitId, GroupKind, Resident)>,
    /// Sums of gradients there, by unit.
    sums: Vec<(UnitId, Resident)>,
    device_step: Option<DeviceStep>,
    /// Handles of weights while they are leased: their bytes are counted elsewhere.
    handles: Pool,
    state: RefCell<State>,
}

impl std::fmt::Debug for Rehearsal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rehearsal")
            .field("config", self.plan.config())
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Rehearsal {
    /// Rank 0 of `plan` with the states of an optimizer that keeps `slots`.
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub fn new(plan: Arc<Plan>, slots: &[StateSlot]) -> Result<Self> {
        let [device, host] = ["device", "host"].map(|name| Pool::new(name, None));
        let backend = Arc::new(NullBackend::new(device.clone()));
        Self::on(plan, slots, backend, Tiers::new(device, host))
    }

    /// As [`Rehearsal::new`], with passes on `backend`: a device apart that only counts. States of
    /// the device's tier lie there; what the communicator holds for it lies in host memory.
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub fn apart(plan: Arc<Plan>, slots: &[StateSlot], backend: Arc<dyn Backend>) -> Result<Self> {
        let host = Pool::new("host", None);
        Self::on(plan, slots, backend, Tiers::new(host.clone(), host))
    }

    fn on(
        plan: Arc<Plan>,
        slots: &[StateSlot],
        backend: Arc<dyn Backend>,
        tiers: Tiers,
    ) -> Result<Self> {
        let world = World {
            rank: 0,
            size: plan.world_size(),
        };
        let away = plan.config().offload.activation;
        let activations = Activations::new(away, tiers.clone()).map(|keeper| keeper.of(&*backend));
        let Tiers { device, host, .. } = tiers;
        let nvme = match &activations {
            Some(keeper) if away == Tier::Nvme => keeper.books().clone(),
            _ => Pool::new("nvme", None),
        };
        let mut rehearsal = Self {
            backend,
            activations,
            device,
            host,
            nvme,
            host_mapped: 0,
            window: DryWindow::new(world, plan.shards()),
            resting: Vec::new(),
            weights: Vec::new(),
            sums: Vec::new(),
            device_step: None,
            handles: Pool::new("handles", None),
            state: RefCell::new(State {
                units: plan.units().iter().map(|_| Unit::default()).collect(),
                pending: VecDeque::new(),
                device: None,
                closing: None,
                brought: None,
                uploaded: None,
                ahead: Ahead::default(),
                pass: None,
            }),
            plan,
        };
        if rehearsal.plan.devices_talk() {
            let plan = &rehearsal.plan;
            let how = How::of(plan);
            let device = DeviceComm::rehearsed(rehearsal.backend.clone(), world, how)?;
            rehearsal.state.get_mut().device = Some(device);
        }
        rehearsal.allocate_states(slots)?;
        Ok(rehearsal)
    }

    /// In the order of [`Zero::new`](crate::Zero::new).
    fn allocate_states(&mut self, slots: &[StateSlot]) -> Result<()> {
        let plan = self.plan.clone();
        let config = plan.config();
        let kept = |unit: &UnitPlan, kind, sharded: bool| {
            let group = unit.group(kind);
            if sharded {
                group.shard(0)
            } else {
                0..group.padded_elems
            }
        };
        let buffers = plan.spill_buffer_bytes();
        if buffers > 0 {
            self.count_host(buffers, Tag::Workspace)?;
        }
        for kind in StateKind::ALL {
            if config.offload.tier(kind) == Tier::Nvme {
                let header = self.nvme.reserve(BLOCK_BYTES, Tag::Workspace)?;
                self.resting.push(Resting::Elsewhere(header));
            }
        }
        for unit in plan.units() {
            for kind in GroupKind::ALL {
                if !unit.group(kind).is_empty() {
                    let range = kept(unit, kind, config.stage.shards_parameters());
                    let dtype = config.precision.weight_dtype();
                    if config.offload.param == Tier::Device && self.keeps_states() {
                        let weights = access(&self.backend)?;
                        let weights = weights.zeros(range.len(), dtype, Tag::Parameters)?;
                        self.weights.push((unit.id, kind, weights));
                    } else {
                        self.rest(config.offload.param, &range, dtype, Tag::Parameters)?;
                    }
                }
            }
            if !unit.trainable.is_empty() && !plan.consumes_gradients(unit.id) {
                let range = kept(unit, GroupKind::Trainable, config.shards_gradients());
                let (dtype, tier) = (config.grad_dtype(), config.offload.optimizer);
                if tier == Tier::Device && self.keeps_states() {
                    let sums = access(&self.backend)?;
                    let sums = sums.zeros(range.len(), dtype, Tag::Gradients)?;
                    self.sums.push((unit.id, sums));
                } else {
                    self.rest(tier, &range, dtype, Tag::Gradients)?;
                }
            }
        }
        for unit in plan.units().iter().filter(|u| !u.trainable.is_empty()) {
            let range = kept(unit, GroupKind::Trainable, config.stage.shards_optimizer());
            let early = plan.steps_early(unit.id);
            for _copy in 0..1 + usize::from(early) {
                let master = config.precision.has_master().then_some(DType::F32);
                for dtype in master
                    .into_iter()
                    .chain(slots.iter().map(|slot| slot.dtype))
                {
                    self.rest(config.offload.optimizer, &range, dtype, Tag::Optimizer)?;
                }
            }
            if early {
                let dtype = config.precision.weight_dtype();
                self.rest(config.offload.param, &range, dtype, Tag::Parameters)?;
            }
        }
        for _ in 0..plan.waiting_buffers() {
            self.count_host(4 * plan.waiting_elems() as u64, Tag::Gradients)?;
        }
        if self.keeps_states() && plan.steps_on_device() {
            self.device_step = Some(DeviceStep::new(&plan, self.backend.clone())?);
        }
        Ok(())
    }

    /// Whether the device has states in its own memory, which the host cannot address.
    fn keeps_states(&self) -> bool {
        self.backend.residents().is_some()
    }

    /// The elements `range` of a group, on `tier` from now on.
    fn rest(&mut self, tier: Tier, range: &Range<usize>, dtype: DType, tag: Tag) -> Result<()> {
        let size = dtype.size_bytes();
        let bytes = range.len() * size;
        match tier {
            Tier::Device if self.keeps_states() => {
                let states = access(&self.backend)?.zeros(range.len(), dtype, tag)?;
                self.resting.push(Resting::Apart(states));
            }
            Tier::Device => {
                let block = Tensor::null(&self.device, tag, [bytes], DType::U8)?;
                self.resting.push(Resting::Device(block));
            }
            Tier::Host => self.count_host(bytes as u64, tag)?,
            Tier::Nvme => {
                let phase = (range.start % WINDOW_ALIGN * size) as u64;
                let extent = SpillFile::extent_bytes(bytes as u64, phase);
                let counted = self.nvme.reserve(extent, tag)?;
                self.resting.push(Resting::Elsewhere(counted));
            }
        }
        Ok(())
    }

    fn count_host(&mut self, bytes: u64, tag: Tag) -> Result<()> {
        self.host_mapped += bytes.next_multiple_of(PAGE);
        let counted = self.host.reserve(bytes, tag)?;
        self.resting.push(Resting::Elsewhere(counted));
        Ok(())
    }

    /// The pool of the device that computes.
    #[must_use]
    pub fn device_pool(&self) -> &Pool {
        self.backend.pool()
    }

    /// Whether that is a device apart.
    #[must_use]
    pub fn is_apart(&self) -> bool {
        self.backend.device().is_apart()
    }

    /// The host pool.
    #[must_use]
    pub fn host_pool(&self) -> &Pool {
        &self.host
    }

    /// Spill files.
    #[must_use]
    pub fn nvme_pool(&self) -> &Pool {
        &self.nvme
    }

    /// Bytes of the host tier: maps in whole pages, and what blocks of its pool occupy.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        self.host_mapped + self.host.stats().touched
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

    /// As [`Zero::begin_pass`](crate::Zero::begin_pass).
    pub fn begin_pass(&self, kind: PassKind) {
        self.begin(kind, None);
    }

    fn begin(&self, kind: PassKind, visits: Option<Visit>) {
        let mut state = self.state.borrow_mut();
        let gathers = state.device.is_some() && self.plan.gathers_parameters();
        let schedule = self.plan.schedule(kind);
        state.pass = Some(Pass::new(schedule, self.plan.units(), visits, gathers));
    }

    /// As [`Zero::end_pass`](crate::Zero::end_pass).
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub fn end_pass(&self) -> Result<()> {
        let mut state = self.state.borrow_mut();
        // As the run: before what is left of the pass.
        state.uploaded = None;
        state.ahead.clear();
        if let Some(pass) = &mut state.pass {
            pass.want(None);
        }
        while let Some(entry) = state.at_cursor() {
            self.skip(&mut state, entry)?;
        }
        if let Some(unit) = state.closing.take() {
            self.close_bucket(&mut state, unit)?;
        }
        self.take_sums(&mut state)?;
        state.pass = None;
        if let Some(device) = &mut state.device {
            device.settle()?;
        }
        self.drain(&mut state.pending, 0)?;
        Ok(())
    }

    /// As [`Zero::visit_weights`](crate::Zero::visit_weights): what saving all weights gathers.
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub fn visit_weights(&self) -> Result<()> {
        self.visit(Visit::All)
    }

    /// As [`Zero::visit_trained_weights`](crate::Zero::visit_trained_weights): what saving those that train gathers.
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub fn visit_trained_weights(&self) -> Result<()> {
        self.visit(Visit::Trained)
    }

    fn visit(&self, visits: Visit) -> Result<()> {
        self.begin(PassKind::Infer, Some(visits));
        let read = |kind: GroupKind| visits.reads(kind);
        let units = self.plan.units().iter();
        for unit in units.filter(|unit| self.groups(unit.id).any(read)) {
            self.take_lease(unit.id, Phase::Forward)?;
            self.end_lease(unit.id, Phase::Forward, true)?;
        }
        self.end_pass()
    }

    /// What [`Zero::step`](crate::Zero::step) takes of the window, and of a device apart.
    ///
    /// # Errors
    /// Never today; counting has no limit.
    pub fn step(&self) -> Result<()> {
        let config = self.plan.config();
        let trained = || self.plan.units().iter().filter(|u| !u.trainable.is_empty());
        let sharded_state = config.stage.shards_optimizer();
        // One rank's sums are those of all ranks.
        if !config.shards_gradients() && self.plan.world_size() > 1 {
            for unit in trained() {
                let buffer = self.window.take(unit.trainable.padded_elems * 4);
                buffer.run(CollectiveKind::ReduceScatter);
                if !sharded_state {
                    buffer.run(CollectiveKind::AllGather);
                }
            }
        } else if config.shards_gradients() && !sharded_state {
            let mut held = None;
            for unit in trained() {
                let bytes = unit.trainable.padded_elems * config.grad_dtype().size_bytes();
                let buffer = self.window.take(bytes);
                buffer.run(CollectiveKind::AllGather);
                // The one before is in use until this one is there.
                drop(held.replace(buffer));
            }
        }
        if self.plan.shares_updates() {
            let size = config.precision.weight_dtype().size_bytes();
            for unit in trained() {
                let bytes = unit.trainable.padded_elems * size;
                self.window.take(bytes).run(CollectiveKind::AllGather);
            }
        }
        self.step_on_device()
    }

    fn step_on_device(&self) -> Result<()> {
        let sums = self.sums.iter();
        let sums = sums.map(|(unit, sums)| {
            let shard = self.plan.unit(*unit).trainable.shard_elems;
            sums.part(0..shard)
        });
        let sums = sums.collect::<Result<Vec<_>, _>>()?;
        if !sums.is_empty() {
            access(&self.backend)?.square_sums(&sums)?;
        }
        let Some(device) = &self.device_step else {
            return Ok(());
        };
        let config = self.plan.config();
        let gathered = config.shards_gradients() && !config.stage.shards_optimizer();
        let elsewhere = config.offload.param != Tier::Device;
        let ranges = self.sums.iter().map(|(unit, _)| {
            let elems = self.plan.updated_elems(self.plan.unit(*unit));
            (*unit, 0..elems)
        });
        let on_disk = config.offload.param == Tier::Nvme;
        for chunk in chunks(ranges, config.sub_group_elems, on_disk) {
            device.rehearse(&self.plan, &chunk.range, gathered, elsewhere)?;
        }
        Ok(())
    }

    // ---- as in the store --------------------------------------------------------------------

    fn weight_bytes(&self, unit: UnitId, kind: GroupKind) -> usize {
        let size = self.plan.config().precision.weight_dtype().size_bytes();
        self.plan.unit(unit).group(kind).padded_elems * size
    }

    fn groups(&self, unit: UnitId) -> impl Iterator<Item = GroupKind> + '_ {
        let plan = self.plan.unit(unit);
        GroupKind::ALL
            .into_iter()
            .filter(move |kind| !plan.group(*kind).is_empty())
    }

    fn start_gathers(&self, state: &mut State) -> Result<()> {
        let ahead = self.plan.config().prefetch_units;
        let State { units, pass, .. } = state;
        let Some(pass) = pass else {
            return Ok(());
        };
        loop {
            let at = pass.started;
            if pass.on_device || at > pass.position + ahead || at >= pass.schedule.len() {
                return Ok(());
            }
            pass.started += 1;
            let unit = pass.schedule[at].unit;
            if pass.keeps(at, ahead) || !self.plan.gathers_parameters() {
                continue;
            }
            let mut gathered = Vec::new();
            for kind in self.groups(unit).filter(|kind| pass.reads(*kind)) {
                let bytes = self.weight_bytes(unit, kind);
                let counted = self.device.reserve(bytes as u64, Tag::Gathered)?;
                let buffer = self.window.take(bytes);
                buffer.run(CollectiveKind::AllGather);
                gathered.push(Readable::InWindow(buffer, counted));
            }
            units[unit.index()].readable = Some(gathered);
        }
    }

    fn skip(&self, state: &mut State, entry: Entry) -> Result<()> {
        self.start_gathers(state)?;
        self.gather_at_cursor(state)?;
        if state.pass.as_ref().is_some_and(|pass| pass.on_device) {
            state.units[entry.unit.index()].readable = None;
        }
        self.gather_ahead(state)?;
        self.take_sums(state)?;
        self.finish_entry(state, entry)
    }

    fn gather_at_cursor(&self, state: &mut State) -> Result<()> {
        let Some(pass) = state.pass.as_ref().filter(|pass| pass.on_device) else {
            return Ok(());
        };
        self.gather_up_to(state, pass.position)?;
        match &mut state.device {
            Some(device) => device.arrive(),
            None => Ok(()),
        }
    }

    fn gather_ahead(&self, state: &mut State) -> Result<()> {
        let next = state.pass.as_ref().and_then(Pass::next_unit);
        match next.filter(|_| self.plan.gathers_ahead()) {
            Some(next) => self.gather_up_to(state, next),
            None => Ok(()),
        }
    }

    fn gather_up_to(&self, state: &mut State, last: usize) -> Result<()> {
        let ahead = self.plan.config().prefetch_units;
        while let Some(pass) = &mut state.pass
            && let Some((unit, needed)) = pass.next_gather(last, ahead)
        {
            self.gather_on_device(state, unit, needed)?;
        }
        Ok(())
    }

    fn gather_on_device(&self, state: &mut State, unit: UnitId, needed: bool) -> Result<()> {
        let config = self.plan.config();
        let dtype = config.precision.weight_dtype();
        let (mut staged, mut parts) = (Vec::new(), Vec::new());
        for kind in self.groups(unit) {
            let group = self.plan.unit(unit).group(kind);
            if config.offload.param == Tier::Nvme {
                let bytes = group.shard_elems * dtype.size_bytes();
                staged.push(Tensor::null(
                    &self.device,
                    Tag::Gathered,
                    [bytes],
                    DType::U8,
                )?);
            }
            let weights = Own::Nowhere;
            parts.push(OwnPart {
                weights,
                group,
                dtype,
            });
        }
        if let Some(device) = &mut state.device {
            let gathered = device.gather(unit, &parts, needed)?.into_iter();
            let gathered = gathered.map(|(id, tensor)| Readable::OnDevice(id, tensor));
            if needed {
                state.units[unit.index()].readable = Some(gathered.collect());
            }
        }
        Ok(())
    }

    fn make_resident(&self, state: &mut State, unit: UnitId) -> Result<()> {
        if state.pass.as_ref().is_some_and(|pass| pass.on_device) {
            return self.gather_at_cursor(state);
        }
        let readable = &mut state.units[unit.index()].readable;
        if readable.is_none() {
            let mut copies = Vec::new();
            let there = !self.plan.leases_copy() && self.keeps_states();
            let visits = state.pass.as_ref().and_then(|pass| pass.visits);
            let sent = self.is_apart() && self.plan.sends_from_rest();
            if !sent && (self.plan.leases_copy() || there && visits.is_some()) {
                let read = |kind: &GroupKind| visits.is_none_or(|visits| visits.reads(*kind));
                for kind in self.groups(unit).filter(read) {
                    let bytes = self.weight_bytes(unit, kind);
                    let copy = Tensor::null(&self.device, Tag::Gathered, [bytes], DType::U8)?;
                    copies.push(Readable::Copied(copy));
                }
            }
            *readable = Some(copies);
        }
        Ok(())
    }

    /// Takes part in what comes before an entry, and makes its unit readable where it is leased.
    fn take_lease(&self, unit: UnitId, phase: Phase) -> Result<()> {
        let wanted = Entry { unit, phase };
        let mut state = self.state.borrow_mut();
        if let Some(pass) = &mut state.pass {
            let left = pass.position..pass.schedule.len();
            let target = left.into_iter().find(|at| pass.schedule[*at] == wanted);
            pass.want(target);
        }
        while let Some(entry) = state.at_cursor()
            && entry != wanted
        {
            self.skip(&mut state, entry)?;
        }
        self.start_gathers(&mut state)?;
        self.make_resident(&mut state, unit)?;
        self.gather_ahead(&mut state)
    }

    fn finish_entry(&self, state: &mut State, entry: Entry) -> Result<()> {
        let closing = match (entry.phase, self.is_apart()) {
            (Phase::Forward | Phase::Recompute, _) => None,
            (Phase::Backward, true) => state.closing.replace(entry.unit),
            (Phase::Backward, false) => Some(entry.unit),
        };
        if let Some(unit) = closing {
            self.close_bucket(state, unit)?;
        }
        let State { units, pass, .. } = state;
        let Some(pass) = pass else {
            return Ok(());
        };
        pass.position += 1;
        let ahead = self.plan.config().prefetch_units.max(1);
        let mut next = pass.schedule.iter().skip(pass.position).take(ahead);
        if !next.any(|next| next.unit == entry.unit) {
            units[entry.unit.index()].readable = None;
        }
        Ok(())
    }

    fn adds_on_device(&self, unit: UnitId) -> bool {
        self.keeps_states() && self.plan.adds_where_computed(unit)
    }

    /// Takes sums until `keep` are in flight; where they rest on the device, those of the window come back in pieces.
    fn drain(&self, pending: &mut VecDeque<(UnitId, Sum)>, keep: usize) -> Result<()> {
        while pending.len() > keep {
            let Some((unit, sum)) = pending.pop_front() else {
                break;
            };
            let comes_back = matches!(sum, Sum::InWindow(..));
            if comes_back && self.keeps_states() && self.plan.sums_on_device(unit) {
                let elems = self.plan.unit(unit).trainable.shard_elems;
                for part in windows(0..elems, COPY_ELEMS) {
                    let shape = Shape::new(&[part.len()]);
                    let tag = Tag::Communication;
                    self.backend.zeros(shape, DType::F32, tag)?;
                }
            }
        }
        Ok(())
    }

    /// The parameters of a unit where they rest on the device.
    fn at_rest(&self, unit: UnitId) -> Result<Vec<(ParamId, Tensor)>> {
        let mut flat = Vec::new();
        for (_, kind, weights) in self.weights.iter().filter(|(of, ..)| *of == unit) {
            for slot in &self.plan.unit(unit).group(*kind).slots {
                flat.push((slot.param, weights.part(slot.range())?));
            }
        }
        shaped(&self.plan, &flat)
    }

    /// As the run, before the unit's work.
    fn make_room(&self, state: &mut State) -> Result<()> {
        self.take_sums(state)?;
        let next = next_upload(&self.plan, state.pass.as_ref());
        state.ahead.reserve(next, &self.plan, &*self.backend)
    }

    /// The parameters of a unit that the devices gathered.
    fn gathered(&self, state: &State, unit: UnitId) -> Result<Vec<(ParamId, Tensor)>> {
        let readable = state.units[unit.index()].readable.iter().flatten();
        let flat = readable.filter_map(|readable| match readable {
            Readable::OnDevice(id, tensor) => Some((*id, tensor.clone())),
            _ => None,
        });
        shaped(&self.plan, &flat.collect::<Vec<_>>())
    }

    fn open_bucket(&self, unit: UnitId) -> Result<Option<(DryBuffer, Reservation)>> {
        if !self.plan.buckets_gradients(unit) {
            return Ok(None);
        }
        let bytes = self.plan.unit(unit).trainable.padded_elems * 4;
        let counted = self.device.reserve(bytes as u64, Tag::Communication)?;
        Ok(Some((self.window.take(bytes), counted)))
    }

    fn close_bucket(&self, state: &mut State, unit: UnitId) -> Result<()> {
        let group = &self.plan.unit(unit).trainable;
        if group.is_empty() {
            return Ok(());
        }
        self.take_sums(state)?;
        let config = self.plan.config();
        let keep = config.buckets_in_flight.saturating_sub(1);
        let State {
            units,
            pending,
            device,
            ..
        } = state;
        if let Some(device) = device
            && config.shards_gradients()
        {
            let deposited = std::mem::take(&mut units[unit.index()].deposited);
            let of = |param| deposited.iter().find(|(id, _)| *id == param);
            let slots = group.slots.iter().map(|slot| of(slot.param));
            let slots: Vec<_> = slots.map(|found| Some(found?.1.clone())).collect();
            let mark = device.produced()?;
            let slots = &slots;
            let sum = device.reduce(unit, group, Produced { slots, mark })?;
            drop(deposited);
            // Added where they are.
            if !self.keeps_states() || !self.plan.sums_on_device(unit) {
                self.drain(pending, keep)?;
                pending.push_back((unit, Sum::OnDevice(sum)));
            }
            return Ok(());
        }
        let bucket = match state.units[unit.index()].bucket.take() {
            Some(bucket) => Some(bucket),
            None if self.adds_on_device(unit) => None,
            None => self.open_bucket(unit)?,
        };
        let deposited = std::mem::take(&mut state.units[unit.index()].deposited);
        if !self.is_apart() || self.adds_on_device(unit) {
            return self.end_bucket(state, unit, bucket);
        }
        state.brought = Some(Brought {
            unit,
            deposited,
            bucket,
        });
        Ok(())
    }

    /// Gives back the places of gradients that were fetched.
    fn take_sums(&self, state: &mut State) -> Result<()> {
        match state.brought.take() {
            Some(Brought {
                unit,
                deposited,
                bucket,
            }) => {
                drop(deposited);
                self.end_bucket(state, unit, bucket)
            }
            None => Ok(()),
        }
    }

    fn end_bucket(
        &self,
        state: &mut State,
        unit: UnitId,
        bucket: Option<(DryBuffer, Reservation)>,
    ) -> Result<()> {
        let config = self.plan.config();
        if let Some((bucket, counted)) = bucket
            && config.shards_gradients()
        {
            let keep = config.buckets_in_flight.saturating_sub(1);
            self.drain(&mut state.pending, keep)?;
            bucket.run(CollectiveKind::ReduceScatter);
            let sum = Sum::InWindow(bucket, counted);
            state.pending.push_back((unit, sum));
        }
        Ok(())
    }
}

impl State {
    fn at_cursor(&self) -> Option<Entry> {
        let pass = self.pass.as_ref()?;
        pass.schedule.get(pass.position).copied()
    }
}

impl ParamAccess for Rehearsal {
    fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    fn lease(&self, unit: UnitId, phase: Phase) -> Result<Lease<'_>> {
        if self.plan.config().prefetch_units == 0 || self.plan.gathers_ahead() {
            let mut state = self.state.borrow_mut();
            state.uploaded.take_if(|(there, _)| *there != unit);
        }
        self.take_lease(unit, phase)?;
        let dtype = self.plan.config().precision.weight_dtype();
        let groups = GroupKind::ALL.into_iter();
        let slots = groups.flat_map(|kind| &self.plan.unit(unit).group(kind).slots);
        let mut ids: Vec<ParamId> = slots.map(|slot| slot.param).collect();
        ids.sort_unstable();
        let mut state = self.state.borrow_mut();
        if self.is_apart() && !self.plan.leases_copy() && self.keeps_states() {
            self.make_room(&mut state)?;
            return Ok(Lease::new(self, unit, phase, self.at_rest(unit)?));
        }
        let there = state.uploaded.as_ref().filter(|(there, _)| *there == unit);
        if let Some((_, params)) = there {
            let params = params.clone();
            self.make_room(&mut state)?;
            return Ok(Lease::new(self, unit, phase, params));
        }
        let mut places = state.ahead.take(unit);
        let gathered = self.gathered(&state, unit)?;
        let mut params = Vec::new();
        for id in ids {
            if let Some(there) = gathered.iter().find(|(other, _)| *other == id) {
                params.push(there.clone());
                continue;
            }
            let shape = self.plan.spec().params[id.index()].shape;
            let place = places.remove(&id).and_then(Arrival::into_tensor);
            let weight = if let Some(place) = place {
                place
            } else if self.is_apart() {
                // In the order of uploads: places depend on it.
                self.backend.zeros(shape, dtype, Tag::Gathered)?
            } else {
                Tensor::null(&self.handles, Tag::Gathered, shape, dtype)?
            };
            params.push((id, weight));
        }
        if self.is_apart() {
            state.uploaded = Some((unit, params.clone()));
            self.make_room(&mut state)?;
        }
        drop(state);
        Ok(Lease::new(self, unit, phase, params))
    }

    fn deposit(&self, id: ParamId, grad: &Tensor) -> Result<()> {
        let unit = self.plan.spec().params[id.index()].unit;
        let mut state = self.state.borrow_mut();
        if self.adds_on_device(unit) {
            return Ok(());
        }
        if self.is_apart() {
            let deposited = &mut state.units[unit.index()].deposited;
            deposited.push((id, grad.clone()));
            return Ok(());
        }
        if state.units[unit.index()].bucket.is_none() {
            state.units[unit.index()].bucket = self.open_bucket(unit)?;
        }
        Ok(())
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
}

impl LeaseOwner for Rehearsal {
    fn end_lease(&self, unit: UnitId, phase: Phase, _completed: bool) -> Result<()> {
        let mut state = self.state.borrow_mut();
        self.finish_entry(&mut state, Entry { unit, phase })
    }
}
