//! Parameter store of one rank: stored weights, leases, and the path of gradients.
//!
//! A unit is *sharded* (only the stored weights exist), *in flight* (its all-gather runs) or *resident* (readable). A
//! cursor walks the schedule of the pass, which the plan defines. The store also takes part in the collectives of units
//! that a batch does not use, so the sequence of collectives never depends on data.

mod backward_updates;
mod buckets;
pub(crate) mod device_comm;
mod forward_updates;
mod gradient_worker;
mod mapped_files;
pub(crate) mod open_devices;
mod prefetch_device;
mod prefetch_disk;
pub(crate) mod prefetch_upload;
pub(crate) mod registered;
pub(crate) mod route;
mod shared_weights;

use buckets::{Bucket, PendingReduce};

use crate::access::{Lease, LeaseOwner};
use crate::comm::{Collective, CollectiveKind, Communicator, ReadBuffer, Tag as CommTag, Ticket};
use crate::error::EngineError;
use crate::offload::tier::{Region, Tiers};
use crate::plan::{Entry, GroupKind, Pass, PassKind, Phase, Plan, Stored, Tier, UnitPlan, Visit};
use crate::spec::{ParamId, UnitId};
use crate::step::gradients::{Accumulator, RoundingKey};
use crate::step::optimizer_in_backward::BackwardUpdates;
use crate::step::optimizer_in_forward::ForwardUpdates;
use crate::step::state::UnitState;
use crate::timing::CopyClock;
use crate::trace::Lane;
use device_comm::{DeviceComm, Gathered, Own, OwnPart};
use gradient_worker::GradientAccumulator;
use kernels::{ForeignBytes, Reservation, Resident, Tag, Tensor};
use optim::Optimizer;
use prefetch_disk::WeightReads;
use registered::RegisteredWeights;
use route::{Computes, Flow, Gradients, Route, WeightRoute};
use shared_weights::SharedWeights;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Gathered weights in a communicator's buffer, counted as device memory.
struct InWindow {
    buffer: ReadBuffer,
    _counted: Reservation,
}

impl AsRef<[u8]> for InWindow {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_bytes()
    }
}

/// Weights that are read where they are stored, or from a copy.
struct InPlace(Arc<Region>);

/// Whole weights of a parameter group that the host can address.
#[derive(Clone)]
enum Readable {
    /// One flat buffer.
    Flat(ForeignBytes),
    /// The maps of their files, in a region of them.
    Files(Arc<Region>),
}

impl AsRef<[u8]> for InPlace {
    fn as_ref(&self) -> &[u8] {
        let bytes = self.0.leased();
        bytes.expect("only loaded weights in memory are leased in place")
    }
}

/// State of a unit's weights during a pass.
enum Residency {
    /// Only the stored weights exist.
    Sharded,
    /// The communicator's all-gathers run.
    InFlight(Vec<(GroupKind, Ticket, Reservation)>),
    /// Whole weights that the host can address, by parameter group.
    Resident(Vec<(GroupKind, Readable)>),
    /// Flat tensors on a discrete device: gathered by the devices, or views of the stored weights.
    OnDevice(Gathered),
}

/// Model states of one unit on this rank.
struct Unit {
    /// Routes by parameter group, in the order of [`GroupKind::ALL`].
    routes: [Route; 3],
    weights: Vec<(GroupKind, Arc<Region>)>,
    residency: Residency,
    bucket: Option<Bucket>,
    /// Accumulated gradients. `None`, as is `state`, while a thread updates the unit.
    gradients: Option<Accumulator>,
    state: Option<UnitState>,
    in_backward: BackwardUpdate,
    /// Index in `weights` of the trainable weights while the thread of the optimizer in forward has them.
    updating: Option<usize>,
}

/// Result of a unit's optimizer in backward since gradients were last cleared.
#[derive(Clone, Copy, Default)]
struct BackwardUpdate {
    /// Whether the second copy contains the updated unit.
    stepped: bool,
    /// Sum of the squares of the gradients that an update consumed.
    squares: Option<f64>,
}

/// Stored weights, leases and gradients of one rank.
pub(crate) struct Store {
    plan: Arc<Plan>,
    comm: Arc<dyn Communicator>,
    tiers: Tiers,
    units: Vec<Unit>,
    pending: VecDeque<PendingReduce>,
    /// Routes that all units share.
    flow: Flow,
    /// The unit whose backward was queued last; its bucket is closed after the next unit's backward is queued.
    closing: Option<UnitId>,
    /// Whether an event was recorded after the last write to the weights.
    writes_recorded: bool,
    /// Collectives between devices; `None` if the communicator runs them.
    device: Option<DeviceComm>,
    pass: Option<Pass>,
    reads: WeightReads,
    rounding_key: RoundingKey,
    copies: CopyClock,
    in_backward: Option<BackwardUpdates>,
    in_forward: Option<ForwardUpdates>,
    /// Thread that fetches gradients from a discrete device and adds them to their sums.
    sums: Option<GradientAccumulator>,
    /// Total time of the threads of the optimizer in backward and in forward.
    update_time: Duration,
    /// Free buffers of gradients that an update consumes.
    waiting: Vec<Region>,
    /// Frozen weights that the device's driver has page-locked.
    registered: RegisteredWeights,
}

impl Store {
    /// Allocates the rows of the plan's inventory, all zero. `rule` defines the optimizer's states.
    pub(crate) fn new(
        plan: Arc<Plan>,
        comm: Arc<dyn Communicator>,
        tiers: Tiers,
        rule: &dyn Optimizer,
        (computes, device): (Computes, Option<DeviceComm>),
    ) -> Result<Self> {
        let rank = comm.world().rank;
        let rounding_key = RoundingKey {
            step: 0,
            micro_batch: 0,
        };
        let units = plan.units().iter().map(|unit| Unit {
            routes: GroupKind::ALL.map(|kind| Route::new(&plan, unit, kind, computes)),
            weights: Vec::new(),
            residency: Residency::Sharded,
            bucket: None,
            gradients: None,
            state: (!unit.trainable.is_empty())
                .then(|| UnitState::new(plan.updated_range(unit.id, rank))),
            in_backward: BackwardUpdate::default(),
            updating: None,
        });
        let mut units: Vec<Unit> = units.collect();
        let mut waiting = Vec::new();
        let shared = SharedWeights::new(&plan, &*comm, &tiers)?;
        for row in plan.inventory(rank, rule.slots(plan.config().precision)) {
            let place = (row.kind(), row.tier);
            let elsewhere = match mapped_files::allocate(&plan, &row, &tiers)? {
                None => shared.allocate(&row, &tiers)?,
                files => files,
            };
            let region = match elsewhere {
                Some(region) => region,
                None => tiers.allocate(place, row.range.clone(), row.dtype, row.tag())?,
            };
            let Some(unit) = row.unit else {
                waiting.push(region);
                continue;
            };
            let unit = &mut units[unit.index()];
            match (row.what, &mut unit.state) {
                (Stored::Weights(kind), _) if !row.spare => {
                    unit.weights.push((kind, Arc::new(region)));
                }
                (Stored::Gradients, _) => unit.gradients = Some(Accumulator::new(&row, region)),
                (_, Some(state)) => state.add(&row, region),
                (_, None) => {}
            }
        }
        let flow = Flow::new(&plan, computes);
        let sums = match flow.defers_gradients {
            true => Some(GradientAccumulator::start(plan.clone(), &tiers)?),
            false => None,
        };
        Ok(Self {
            plan,
            comm,
            tiers,
            units,
            pending: VecDeque::new(),
            flow,
            closing: None,
            writes_recorded: false,
            device,
            pass: None,
            reads: WeightReads::default(),
            rounding_key,
            copies: CopyClock::default(),
            in_backward: None,
            in_forward: None,
            sums,
            update_time: Duration::ZERO,
            waiting,
            registered: RegisteredWeights::default(),
        })
    }

    fn unit_plan(&self, unit: UnitId) -> &UnitPlan {
        self.plan.unit(unit)
    }

    fn unit_name(&self, unit: UnitId) -> String {
        self.plan.spec().units[unit.index()].name.clone()
    }

    /// Route of the gradients of a unit; `None` if the unit has no trainable parameters.
    fn gradient_route(&self, unit: UnitId) -> Option<Gradients> {
        self.units[unit.index()].routes[GroupKind::Trainable as usize].gradients
    }

    /// Range of elements of a parameter group that this rank stores.
    pub(crate) fn resting(&self, unit: UnitId, kind: GroupKind) -> std::ops::Range<usize> {
        self.plan.stored_range(unit, kind, self.comm.world().rank)
    }

    /// Notes that weights will change, so that later events and copies between devices follow the change.
    fn weights_change(&mut self) {
        self.writes_recorded = false;
        let on_device = self.flow.weights_on_device;
        if let Some(device) = self.device.as_mut().filter(|_| on_device) {
            device.weights_change();
        }
    }

    /// The stored weights of a parameter group, writable; an error while a lease reads them.
    pub(crate) fn weights_mut(&mut self, unit: UnitId, kind: GroupKind) -> Result<&mut Region> {
        let name = self.unit_name(unit);
        self.weights_change();
        let state = &mut self.units[unit.index()];
        // Views of unsharded device weights share their memory with the region.
        state.residency = Residency::Sharded;
        sole(&mut state.weights, kind).ok_or(EngineError::WeightsBorrowed { unit: name })
    }

    /// The stored weights of a parameter group.
    pub(crate) fn weights(&self, unit: UnitId, kind: GroupKind) -> Option<&Region> {
        let state = &self.units[unit.index()];
        state
            .weights
            .iter()
            .find(|(k, _)| *k == kind)
            .map(|(_, region)| &**region)
    }

    /// Accumulated gradients, stored weights and state of a trainable group together, for an update.
    pub(crate) fn of_update(
        &mut self,
        unit: UnitId,
    ) -> Result<(&mut Accumulator, &mut Region, &mut UnitState)> {
        let name = self.unit_name(unit);
        self.weights_change();
        let parts = &mut self.units[unit.index()];
        parts.residency = Residency::Sharded;
        let Unit {
            weights,
            gradients,
            state,
            ..
        } = parts;
        let weights = sole(weights, GroupKind::Trainable);
        match (gradients, weights, state) {
            (Some(gradients), Some(weights), Some(state)) => Ok((gradients, weights, state)),
            _ => Err(EngineError::WeightsBorrowed { unit: name }),
        }
    }

    /// Master weights and optimizer state of a unit with trainable parameters.
    pub(crate) fn state(&self, unit: UnitId) -> Option<&UnitState> {
        self.units[unit.index()].state.as_ref()
    }

    /// Master weights and optimizer state of `unit`, for writing.
    pub(crate) fn state_mut(&mut self, unit: UnitId) -> Option<&mut UnitState> {
        self.units[unit.index()].state.as_mut()
    }

    /// Accumulated gradients of a unit with trainable parameters; zeros if no micro-batch has run.
    pub(crate) fn gradients_mut(&mut self, unit: UnitId) -> Result<Option<&mut Accumulator>> {
        let Some(gradients) = &mut self.units[unit.index()].gradients else {
            return Ok(None);
        };
        gradients.write_zeros()?;
        Ok(Some(gradients))
    }

    /// Accumulated gradients; the values are stale if no micro-batch has run since the last update.
    pub(crate) fn gradients(&self, unit: UnitId) -> Option<&Accumulator> {
        self.units[unit.index()].gradients.as_ref()
    }

    /// Clears all gradients. The next micro-batch is the first one after update `step`.
    pub(crate) fn clear_gradients(&mut self, step: u64) {
        self.rounding_key = RoundingKey {
            step,
            micro_batch: 0,
        };
        for unit in &mut self.units {
            if let Some(gradients) = &mut unit.gradients {
                gradients.clear();
            }
            unit.in_backward = BackwardUpdate::default();
        }
    }

    // ---- passes -------------------------------------------------------------------------------

    /// Starts a pass. With `visits` it reads those weights into host memory; without, it computes with all weights.
    pub(crate) fn begin_pass(&mut self, kind: PassKind, visits: Option<Visit>) {
        let schedule = self.plan.schedule(kind);
        let gathers = self.flow.gathers_on_device;
        self.pass = Some(Pass::new(schedule, self.plan.units(), visits, gathers));
    }

    fn reads(&self, kind: GroupKind) -> bool {
        self.pass.as_ref().is_none_or(|pass| pass.reads(kind))
    }

    fn on_device(&self) -> bool {
        self.pass.as_ref().is_some_and(|pass| pass.on_device)
    }

    /// Ends the pass: skips the remaining entries and waits for every reduction.
    pub(crate) fn end_pass(&mut self) -> Result<()> {
        if let Some(pass) = &mut self.pass {
            pass.want(None);
        }
        while let Some(entry) = self.entry_at_cursor() {
            self.skip(entry)?;
        }
        if let Some(unit) = self.closing.take() {
            self.close_bucket(unit)?;
        }
        self.take_sums()?;
        self.pass = None;
        self.reads.clear();
        if let Some(device) = &mut self.device {
            device.end_pass()?;
        }
        self.drain(0)?;
        self.collect()
    }

    /// Counts one more micro-batch of the current update.
    pub(crate) fn count_micro_batch(&mut self) {
        self.rounding_key.micro_batch += 1;
    }

    /// Drops a pass that failed, together with its gradients in flight.
    pub(crate) fn abandon_pass(&mut self) {
        self.pass = None;
        self.closing = None;
        self.reads.clear();
        self.abandon_sums();
        self.pending.clear();
        // The pass already returns an error. A failure of the thread is a consequence of it.
        self.end_in_backward().ok();
        if let Some(device) = &mut self.device {
            device.arrive().ok();
        }
        for unit in &mut self.units {
            unit.bucket = None;
            unit.residency = Residency::Sharded;
        }
    }

    /// Adds the time of copies between tiers that the step made.
    pub(crate) fn count_copies(&mut self, copies: &CopyClock) {
        self.copies.add(copies);
    }

    /// Total time of copies between tiers.
    pub(crate) fn copy_time(&self) -> Duration {
        self.copies.total()
    }

    /// Total time of the threads of the optimizer in backward and in forward.
    pub(crate) fn update_time(&self) -> Duration {
        self.update_time
    }

    fn entry_at_cursor(&self) -> Option<Entry> {
        self.pass
            .as_ref()
            .and_then(|p| p.schedule.get(p.position).copied())
    }

    /// Starts the gathers of the entries up to `prefetch_units` after the cursor. At the turn from forward to backward,
    /// a unit's next entry may be within that distance of its last one. Its weights then stay readable and are not
    /// gathered twice.
    fn start_gathers(&mut self) -> Result<()> {
        if self.on_device() {
            return Ok(());
        }
        let prefetched = self.plan.config().prefetch_units;
        loop {
            let Some(pass) = &mut self.pass else {
                return Ok(());
            };
            let at = pass.started;
            if at > pass.position + prefetched || at >= pass.schedule.len() {
                return Ok(());
            }
            pass.started += 1;
            let unit = pass.schedule[at].unit;
            if self.flow.gathers && !pass.keeps(at, prefetched) {
                self.start_gather(unit)?;
            }
        }
    }

    /// Starts to read weights that are stored on disk and needed soon, as long as buffers are free.
    fn read_ahead(&mut self) -> Result<()> {
        if !self.flow.weights_on_disk {
            return Ok(());
        }
        let Some(pass) = &self.pass else {
            return Ok(());
        };
        let prefetched = self.plan.config().prefetch_units;
        let started = !pass.on_device || self.flow.prefetches_gathers;
        let first = if self.flow.gathers && started {
            pass.started
        } else {
            pass.position
        };
        for at in first..(first + 1 + prefetched).min(pass.schedule.len()) {
            let unit = pass.schedule[at].unit;
            let resident = matches!(
                self.units[unit.index()].residency,
                Residency::Resident(_) | Residency::InFlight(_) | Residency::OnDevice(_)
            );
            if resident || pass.keeps(at, prefetched) {
                continue;
            }
            for (kind, region) in &self.units[unit.index()].weights {
                if pass.reads(*kind) && !self.reads.advance((unit, *kind), region)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Records an event after the last write to all weights stored on a device. This happens before the work of a pass
    /// is queued, so gathers through the host need not wait for that work.
    fn record_weight_writes(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.writes_recorded, true) || !self.flow.weights_on_device {
            return Ok(());
        }
        let regions = self.units.iter_mut().flat_map(|unit| &mut unit.weights);
        let regions = regions.filter_map(|(_, region)| Arc::get_mut(region));
        self.tiers.record_write(regions)
    }

    fn start_gather(&mut self, unit: UnitId) -> Result<()> {
        self.await_update(unit)?;
        self.record_weight_writes()?;
        let rank = self.plan.shard_of(self.comm.world().rank);
        let mut tickets = Vec::new();
        for (kind, region) in &self.units[unit.index()].weights {
            if !self.reads(*kind) || !self.plan.gathers(*kind) {
                continue;
            }
            let (group, dtype) = (self.plan.unit(unit).group(*kind), self.plan.dtype_of(*kind));
            let bytes = group.padded_elems * dtype.size_bytes();
            let counted = self.tiers.device.reserve(bytes as u64, Tag::Gathered)?;
            let mut buffer = self.comm.alloc(bytes)?;
            let shard = group.shard_elems * dtype.size_bytes();
            let own = buffer.part_mut(rank * shard..(rank + 1) * shard);
            let reads = &mut self.reads;
            self.copies
                .time(region.tier(), || reads.fetch((unit, *kind), region, own))?;
            let name = match kind {
                GroupKind::Trainable => "gather",
                GroupKind::Frozen => "gather-frozen",
                GroupKind::Quantized => "gather-quantized",
            };
            let tag = CommTag::new(name, unit.0);
            let op = Collective::new(CollectiveKind::AllGather, dtype, tag)
                .in_groups(self.plan.config().shard_group);
            tickets.push((*kind, self.comm.start(op, buffer)?, counted));
        }
        self.units[unit.index()].residency = Residency::InFlight(tickets);
        Ok(())
    }

    /// Takes part in the devices' gather of `unit`; drops the result unless `needed`.
    fn gather_on_device(&mut self, unit: UnitId, needed: bool) -> Result<()> {
        self.await_update(unit)?;
        let Some(device) = &mut self.device else {
            return Ok(());
        };
        let weights = &self.units[unit.index()].weights;
        // Weights on disk are copied to host memory first.
        let mut staged = Vec::new();
        for (kind, region) in weights {
            let reads = &mut self.reads;
            staged.push(match region.tier() {
                Tier::Device | Tier::Host => None,
                Tier::Nvme => {
                    let mut copy = self.tiers.copy(region.len())?;
                    self.copies.time(region.tier(), || {
                        reads.fetch((unit, *kind), region, copy.in_memory_mut())
                    })?;
                    Some(copy)
                }
            });
        }
        let unit_plan = self.plan.unit(unit);
        let parts = weights.iter().zip(&staged).map(|((kind, region), staged)| {
            let region = staged.as_ref().unwrap_or(region);
            let weights = match (region.resident(), region.in_memory()) {
                (Some(states), _) => Own::Device(states.part(0..states.elems())?),
                (None, Some(bytes)) => Own::Host(bytes),
                (None, None) => Own::Nowhere,
            };
            Ok(OwnPart {
                weights,
                group: unit_plan.group(*kind),
                dtype: self.plan.dtype_of(*kind),
            })
        });
        let parts = parts.collect::<Result<Vec<OwnPart<'_>>>>()?;
        if self.flow.updates_in_forward {
            let there = weights.iter().filter_map(|(_, region)| region.resident());
            device.see_updates(there)?;
        }
        let trace = self.tiers.trace();
        let started = trace.now();
        let gathered = device.gather(unit, &parts, needed)?;
        trace.end(started, Lane::Communication, || {
            format!("gather {}", self.plan.spec().units[unit.index()].name)
        });
        if needed {
            self.units[unit.index()].residency = Residency::OnDevice(gathered);
        }
        Ok(())
    }

    fn make_resident(&mut self, unit: UnitId) -> Result<()> {
        self.await_update(unit)?;
        self.gather_at_cursor()?;
        let state = &mut self.units[unit.index()];
        let resident = match std::mem::replace(&mut state.residency, Residency::Sharded) {
            Residency::Resident(groups) => groups,
            Residency::OnDevice(gathered) => {
                state.residency = Residency::OnDevice(gathered);
                return Ok(());
            }
            Residency::InFlight(tickets) => {
                let mut groups: Vec<(GroupKind, Readable)> = Vec::new();
                let trace = self.tiers.trace();
                for (kind, ticket, counted) in tickets {
                    let started = trace.now();
                    let buffer = ticket.wait_read()?;
                    trace.end(started, Lane::Communication, || {
                        format!("gather {}", self.plan.spec().units[unit.index()].name)
                    });
                    groups.push((
                        kind,
                        Readable::Flat(Arc::new(InWindow {
                            buffer,
                            _counted: counted,
                        })),
                    ));
                }
                if let Residency::Resident(others) = self.read_stored(unit, true)? {
                    groups.extend(others);
                }
                groups
            }
            Residency::Sharded => {
                let residency = self.read_stored(unit, false)?;
                self.units[unit.index()].residency = residency;
                return Ok(());
            }
        };
        self.units[unit.index()].residency = Residency::Resident(resident);
        Ok(())
    }

    /// Weights that need no gather: views of the stored weights, or of a copy. Those that were gathered are left out.
    fn read_stored(&mut self, unit: UnitId, gathered: bool) -> Result<Residency> {
        let (mut on_device, mut groups) = (Gathered::new(), Vec::new());
        let visits = self.pass.as_ref().and_then(|pass| pass.visits);
        let parts = &self.units[unit.index()];
        for (kind, region) in &parts.weights {
            let route = parts.routes[*kind as usize];
            let route = match visits {
                _ if gathered && self.plan.gathers(*kind) => continue,
                Some(visits) if !visits.reads(*kind) => continue,
                Some(_) => route.visited,
                None => route.weights,
            };
            let region = match route {
                WeightRoute::OnDevice => {
                    let states = region.resident().ok_or(EngineError::NotResident)?;
                    for slot in &self.plan.unit(unit).group(*kind).slots {
                        on_device.push((slot.param, states.part(slot.range())?));
                    }
                    continue;
                }
                WeightRoute::InPlace if region.files().is_some() => {
                    groups.push((*kind, Readable::Files(region.clone())));
                    continue;
                }
                WeightRoute::InPlace => region.clone(),
                WeightRoute::Copied | WeightRoute::Gathered | WeightRoute::GatheredOnDevice => {
                    let mut copy = self.tiers.copy(region.len())?;
                    let reads = &mut self.reads;
                    self.copies.time(region.tier(), || {
                        reads.fetch((unit, *kind), region, copy.in_memory_mut())
                    })?;
                    Arc::new(copy)
                }
            };
            groups.push((*kind, Readable::Flat(Arc::new(InPlace(region)))));
        }
        Ok(match on_device.is_empty() {
            true => Residency::Resident(groups),
            false => Residency::OnDevice(on_device),
        })
    }

    /// Moves the cursor to `entry`, and takes part in the collectives of all entries before it.
    fn advance_to(&mut self, entry: Entry) -> Result<()> {
        let target = self.pass.as_ref().and_then(|p| {
            p.schedule[p.position..]
                .iter()
                .position(|e| *e == entry)
                .map(|i| p.position + i)
        });
        let Some(target) = target else {
            return Err(EngineError::LeaseOrder {
                unit: self.unit_name(entry.unit),
                phase: entry.phase,
                position: self.pass.as_ref().map_or(0, |p| p.position),
            });
        };
        if let Some(pass) = &mut self.pass {
            pass.want(Some(target));
        }
        while self.pass.as_ref().is_some_and(|p| p.position < target) {
            if let Some(before) = self.entry_at_cursor() {
                self.skip(before)?;
            }
        }
        self.start_gathers()?;
        self.read_ahead()
    }

    /// Skips an entry whose unit this batch does not use. The store takes part in its gather and drops the result; its
    /// gradients are zeros.
    fn skip(&mut self, entry: Entry) -> Result<()> {
        self.start_gathers()?;
        self.gather_at_cursor()?;
        self.drop_gathered(entry.unit);
        self.prefetch_gather()?;
        self.take_sums()?;
        self.finish_entry(entry)
    }

    fn finish_entry(&mut self, entry: Entry) -> Result<()> {
        if entry.phase == Phase::Backward {
            self.mark_produced(entry.unit)?;
            let closing = if self.flow.defers_gradients {
                self.closing.replace(entry.unit)
            } else {
                Some(entry.unit)
            };
            if let Some(unit) = closing {
                self.close_bucket(unit)?;
            }
        }
        let Some(pass) = &mut self.pass else {
            return Ok(());
        };
        pass.position += 1;
        let prefetched = self.plan.config().prefetch_units.max(1);
        let next = pass.schedule.iter().skip(pass.position).take(prefetched);
        if !next.into_iter().any(|next| next.unit == entry.unit) {
            self.units[entry.unit.index()].residency = Residency::Sharded;
        }
        self.reads.forget_unless(|unit| {
            let mut coming = pass.schedule.iter().skip(pass.position);
            coming.any(|next| next.unit == unit)
        });
        self.read_ahead()
    }

    /// Makes the weights of `unit` readable: tensors in the shapes that parameters are stored in, ascending by
    /// parameter. Quantized ones are bytes.
    pub(crate) fn lease(&mut self, unit: UnitId, phase: Phase) -> Result<Vec<(ParamId, Tensor)>> {
        self.advance_to(Entry { unit, phase })?;
        self.make_resident(unit)?;
        self.prefetch_gather()?;
        match &self.units[unit.index()].residency {
            Residency::Resident(groups) => self.tensors(unit, groups),
            Residency::OnDevice(gathered) => shaped(&self.plan, gathered),
            _ => Ok(Vec::new()),
        }
    }

    fn tensors(
        &self,
        unit: UnitId,
        groups: &[(GroupKind, Readable)],
    ) -> Result<Vec<(ParamId, Tensor)>> {
        let mut params = Vec::new();
        for (kind, readable) in groups {
            let dtype = self.plan.dtype_of(*kind);
            for slot in &self.unit_plan(unit).group(*kind).slots {
                let spec = &self.plan.spec().params[slot.param.index()];
                let shape = spec.stored_shape();
                let foreign = |bytes: &ForeignBytes, start| {
                    Tensor::from_foreign(bytes.clone(), None, start, shape, dtype)
                };
                let tensor = match (self.tiers.counters(), readable) {
                    (Some(counters), _) => counters.leased(shape, dtype)?,
                    (None, Readable::Flat(bytes)) => foreign(bytes, slot.offset)?,
                    (None, Readable::Files(region)) => {
                        let map = region.files().and_then(|maps| maps.get(&slot.offset));
                        let map = map.ok_or_else(|| EngineError::NotMapped {
                            param: spec.name.clone(),
                        })?;
                        foreign(map, 0)?
                    }
                };
                params.push((slot.param, tensor));
            }
        }
        params.sort_by_key(|(id, _)| *id);
        Ok(params)
    }

    /// Ends a lease: moves the cursor, and after backward closes a bucket of gradients.
    pub(crate) fn end_lease(&mut self, unit: UnitId, phase: Phase) -> Result<()> {
        self.finish_entry(Entry { unit, phase })
    }
}

/// The stored weights of a parameter group; `None` while a lease reads them.
fn sole(weights: &mut [(GroupKind, Arc<Region>)], kind: GroupKind) -> Option<&mut Region> {
    let (_, region) = weights.iter_mut().find(|(other, _)| *other == kind)?;
    let region = Arc::get_mut(region)?;
    let read = region.resident().is_some_and(Resident::is_shared);
    (!read).then_some(region)
}

/// Gathered tensors in the shapes that parameters are stored in, ascending by parameter.
fn shaped(plan: &Plan, gathered: &[(ParamId, Tensor)]) -> Result<Gathered> {
    let shape = |id: ParamId| plan.spec().params[id.index()].stored_shape();
    let params = gathered.iter();
    let params = params.map(|(id, tensor)| Ok((*id, tensor.reshape(shape(*id))?)));
    let mut params = params.collect::<Result<Gathered>>()?;
    params.sort_by_key(|(id, _)| *id);
    Ok(params)
}

/// A lease over `params` that ends at `owner`.
pub(crate) fn lease_of<'e>(
    owner: &'e dyn LeaseOwner,
    unit: UnitId,
    phase: Phase,
    params: Vec<(ParamId, Tensor)>,
) -> Lease<'e> {
    Lease::new(owner, unit, phase, params)
}
