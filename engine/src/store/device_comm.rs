//! Collectives between devices: by peer access, or by NCCL.
//!
//! *Peers*: devices read each other's memory.
//!
//! 1. A rank sends one message: the offsets of its tensors in its device's memory, and an event of its device.
//! 2. The other devices wait for the event and pull the data. Only the message passes through host memory.
//! 3. The sender keeps these tensors, which are *borrowed*, until the next message.
//! 4. That message carries an event after all pulls of its sender. The device waits for these events before it
//!    reuses the memory.
//! 5. Sums are added in rank order in f32, with the same bits as the communicator's.
//!
//! *Group*: NCCL moves and adds, in an order of its own. An empty message precedes every operation. It carries the
//! communicator's fingerprint and deadline, so the host reports ranks that disagree or are gone, and no device hangs.
//!
//! A dry run executes the same code on the meta device and sends no messages.

use super::open_devices::peers_of;
use crate::comm::mesh::Mesh;
use crate::comm::{Collective, CollectiveKind, Communicator, Tag as CommTag, World};
use crate::error::EngineError;
use crate::plan::{DeviceTransport, GroupLayout, Plan};
use crate::spec::{ParamId, UnitId};
use kernels::{
    Backend, DType, GroupAccess, KernelError, Lane, PeerAccess, Resident, Shape, Tag, Tensor,
};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Number of sub-groups of an update that are reduced at once. The pulls of a chunk wait for the memory of the previous
/// chunk, whose sums are queued after the next unit's backward. On few ranks a unit is one or two chunks.
const CHUNK_SUB_GROUPS: usize = 4;
/// Word of a message for a gradient that this rank does not have.
const ABSENT: u64 = u64::MAX;

/// Location of this rank's shard of a parameter group's weights.
pub(crate) enum Own<'a> {
    /// In no memory: a dry run.
    Nowhere,
    /// In host memory.
    Host(&'a [u8]),
    /// In the memory of the discrete device.
    Device(Tensor),
}

impl Own<'_> {
    /// Queues a copy of the shard's bytes `range` into `to`, starting at its byte `at`.
    fn put(
        &self,
        peers: &dyn PeerAccess,
        range: Range<usize>,
        to: &Tensor,
        at: usize,
    ) -> Result<()> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Host(bytes) => Ok(peers.put(to, at, &bytes[range])?),
            Self::Device(shard) => Ok(peers.take(shard, range.start, to, at..at + range.len())?),
        }
    }
}

/// This rank's contribution to the gather of one parameter group.
pub(crate) struct OwnPart<'a> {
    /// Location of this rank's shard of the weights.
    pub(crate) weights: Own<'a>,
    pub(crate) group: &'a GroupLayout,
    pub(crate) dtype: DType,
}

/// Gathered parameters, each as a flat tensor.
pub(crate) type Gathered = Vec<(ParamId, Tensor)>;

/// Gradients of one unit on the device, and the event after their last write (`mark`).
pub(crate) struct Produced<'a> {
    /// Gradients by slot of the trainable group; `None` for those that were not deposited.
    pub(crate) slots: &'a [Option<Tensor>],
    pub(crate) mark: u64,
}

/// Settings of the collectives between devices.
#[derive(Clone, Copy)]
pub(crate) struct How {
    transport: DeviceTransport,
    shards: usize,
    /// Number of elements of a shard that are reduced at once. A device holds that many of each rank's gradients.
    chunk_elems: usize,
}

impl How {
    pub(crate) fn of(plan: &Plan) -> Self {
        let config = plan.config();
        Self {
            transport: config.device_transport,
            shards: plan.shards(),
            chunk_elems: CHUNK_SUB_GROUPS * config.sub_group_elems,
        }
    }
}

/// One rank's device as a participant in the collectives between the devices of all ranks.
pub(crate) struct DeviceComm {
    /// Whether NCCL runs the collectives.
    grouped: bool,
    backend: Arc<dyn Backend>,
    world: World,
    /// By rank: index of its device among those that were opened ([`open_devices`](super::open_devices)).
    devices: Vec<usize>,
    /// Number of ranks that share one copy of the sharded states.
    shards: usize,
    chunk_elems: usize,
    /// `None` in a dry run.
    comm: Option<Arc<dyn Communicator>>,
    /// Tensors that peers may read until the next message.
    borrowed: Vec<Tensor>,
    /// Event of the communication stream after the last pulls; 0 before the first.
    pulled: u64,
    /// By rank: the event after its pulls that this device already waits for.
    awaited: Vec<u64>,
    /// Whether weights in device memory have changed since the last gather.
    changed: bool,
    /// Whether a gather is queued that the compute stream does not wait for yet.
    arriving: bool,
    /// Tensors of gathers whose result is not needed. They are freed after the compute stream waits for their gather.
    unused: Vec<Tensor>,
}

impl DeviceComm {
    /// Connects the devices of the data-parallel ranks of `mesh`. For peer access the devices of all its ranks are open.
    ///
    /// # Errors
    /// Errors of NCCL if the ranks cannot form its group.
    pub(crate) fn join(backend: Arc<dyn Backend>, mesh: &Mesh, how: How) -> Result<Self> {
        let (comm, at) = (mesh.data().clone(), mesh.coordinates());
        let joined = Self {
            grouped: how.transport == DeviceTransport::Nccl,
            devices: (0..at.data.size).map(|d| at.rank(d, at.stage)).collect(),
            comm: Some(comm.clone()),
            ..Self::alone(backend, at.data, how)
        };
        if joined.grouped {
            joined.join_group(&*comm)?;
        }
        Ok(joined)
    }

    /// Joins the NCCL group of all ranks, after a check that all have the same version of NCCL.
    fn join_group(&self, comm: &dyn Communicator) -> Result<()> {
        let World { rank, size } = self.world;
        let group = self.group()?;
        let own = group.version()?;
        let versions = comm.all_gather_bytes(own.as_bytes(), CommTag::new("nccl", 0))?;
        for (rank, theirs) in versions.iter().enumerate() {
            let theirs = String::from_utf8_lossy(theirs).into_owned();
            if theirs != own {
                let ours = own;
                return Err(EngineError::LibraryDiffers { rank, theirs, ours });
            }
        }
        let id = if rank == 0 { group.id()? } else { Vec::new() };
        let ids = comm.all_gather_bytes(&id, CommTag::new("nccl", 1))?;
        Ok(group.join(&ids[0], rank, size, comm.deadline())?)
    }

    /// The device of a dry run, whose other ranks do not exist.
    ///
    /// # Errors
    /// When the device has no collectives.
    pub(crate) fn dry_run(backend: Arc<dyn Backend>, world: World, how: How) -> Result<Self> {
        let joined = Self {
            grouped: how.transport == DeviceTransport::Nccl,
            ..Self::alone(backend, world, how)
        };
        if joined.grouped {
            let (rank, deadline) = (world.rank, Duration::ZERO);
            joined.group()?.join(&[], rank, world.size, deadline)?;
        }
        Ok(joined)
    }

    fn alone(backend: Arc<dyn Backend>, world: World, how: How) -> Self {
        Self {
            grouped: false,
            chunk_elems: how.chunk_elems,
            backend,
            world,
            devices: (0..world.size).collect(),
            shards: how.shards,
            comm: None,
            borrowed: Vec::new(),
            pulled: 0,
            awaited: vec![0; world.size],
            changed: true,
            arriving: false,
            unused: Vec::new(),
        }
    }

    fn peers(&self) -> Result<&dyn PeerAccess> {
        peers_of(&*self.backend)
    }

    fn group(&self) -> Result<&dyn GroupAccess> {
        let missing = || KernelError::Device {
            op: "join the NCCL group",
            cause: "no library runs collectives of the device".into(),
        };
        Ok(self.backend.group().ok_or_else(missing)?)
    }

    /// Notes that weights in device memory change from now on. Copies that read them are already complete, because the
    /// compute stream waited for them at the end of their pass.
    pub(crate) const fn weights_change(&mut self) {
        self.changed = true;
    }

    /// Makes copies that are queued from now on wait for the last change of the weights.
    fn see_changes(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.changed, false) {
            let peers = self.peers()?;
            peers.await_own(peers.mark(Lane::Compute)?)?;
        }
        Ok(())
    }

    /// Makes copies that are queued from now on wait for updates of these weights that run during this pass.
    pub(crate) fn see_updates<'r>(&self, of: impl Iterator<Item = &'r Resident>) -> Result<()> {
        let peers = self.peers()?;
        for states in of {
            peers.await_written(states)?;
        }
        Ok(())
    }

    /// Records an event after all gradient computations queued so far.
    pub(crate) fn produced(&self) -> Result<u64> {
        Ok(self.peers()?.mark(Lane::Compute)?)
    }

    /// Sends `words` to all ranks and returns every rank's words, in rank order. The compute
    /// stream waits for the events of the other ranks' pulls, so the tensors of earlier messages are released.
    fn exchange(&mut self, tag: CommTag, words: &[u64]) -> Result<Vec<Vec<u64>>> {
        let World { rank, size } = self.world;
        let mut own = vec![self.pulled];
        own.extend(words);
        let all: Vec<Vec<u64>> = match &self.comm {
            None => vec![own; size],
            Some(comm) => {
                let count = own.len();
                let mut buffer = comm.alloc(size * count * size_of::<u64>())?;
                let values = bytemuck::cast_slice_mut(buffer.as_bytes_mut());
                values[rank * count..][..count].copy_from_slice(&own);
                let op = Collective::new(CollectiveKind::AllGather, DType::U8, tag);
                let buffer = comm.start(op, buffer)?.wait_read()?;
                let values: &[u64] = bytemuck::cast_slice(buffer.as_bytes());
                values.chunks_exact(count).map(<[u64]>::to_vec).collect()
            }
        };
        let peers = self.backend.peers();
        for (peer, words) in all.iter().enumerate() {
            if peer != rank && words[0] != self.awaited[peer] {
                if let Some(peers) = peers {
                    let device = self.devices[peer];
                    peers.await_mark(Lane::Compute, device, Lane::Communication, words[0])?;
                }
                self.awaited[peer] = words[0];
            }
        }
        self.borrowed.clear();
        Ok(all.into_iter().map(|words| words[1..].to_vec()).collect())
    }

    /// Gathers the parameters of a unit from every rank's `own` shard; returns nothing unless `needed`. With peer
    /// access each parameter has a tensor of its own, since many small tensors fragment device memory less than whole
    /// parameter groups. The tensors may be used or freed after [`DeviceComm::arrive`].
    pub(crate) fn gather(
        &mut self,
        unit: UnitId,
        own: &[OwnPart<'_>],
        needed: bool,
    ) -> Result<Gathered> {
        self.see_changes()?;
        if self.grouped {
            return self.gather_in_group(unit, own, needed);
        }
        let (rank, shards) = (self.world.rank, self.shards);
        let peers = self.peers()?;
        let (mut gathered, mut borrowed, mut words) = (Gathered::new(), Vec::new(), Vec::new());
        for part in own {
            let (group, size) = (part.group, part.dtype.size_bytes());
            let shard = group.shard(rank % shards);
            let incoming = |elems| {
                let shape = Shape::new(&[elems]);
                peers.incoming(shape, part.dtype, Tag::Gathered)
            };
            if !needed {
                let whole = incoming(group.shard_elems)?;
                part.weights.put(peers, 0..whole.size_bytes(), &whole, 0)?;
                // Words are the offsets at which each parameter would start; peers pull only the parts in the shard.
                let start = peers.offset(&whole)?;
                words.extend(group.slots.iter().map(|slot| {
                    let behind = (slot.offset * size) as u64;
                    start
                        .wrapping_add(behind)
                        .wrapping_sub((shard.start * size) as u64)
                }));
                borrowed.push(whole);
                continue;
            }
            for slot in &group.slots {
                let tensor = incoming(slot.len)?;
                words.push(peers.offset(&tensor)?);
                let kept = slot.offset.max(shard.start)..slot.range().end.min(shard.end);
                if !kept.is_empty() {
                    let of = |elem: usize| (elem - shard.start) * size;
                    let at = (kept.start - slot.offset) * size;
                    let own = of(kept.start)..of(kept.end);
                    part.weights.put(peers, own, &tensor, at)?;
                }
                borrowed.push(tensor.clone());
                gathered.push((slot.param, tensor));
            }
        }
        words.push(peers.mark(Lane::Communication)?);
        let all = self.exchange(CommTag::new("gather", unit.0), &words)?;
        self.arriving = true;
        if !needed {
            self.unused.extend(borrowed.iter().cloned());
            self.borrowed.extend(borrowed);
            return Ok(Gathered::new());
        }
        self.borrowed.extend(borrowed);
        let peers = self.peers()?;
        let first = rank / shards * shards;
        for peer in (first..first + shards).filter(|peer| *peer != rank) {
            let (words, device) = (&all[peer], self.devices[peer]);
            peers.await_mark(
                Lane::Communication,
                device,
                Lane::Communication,
                words[gathered.len()],
            )?;
            let mut tensors = gathered.iter().zip(words);
            for part in own {
                let size = part.dtype.size_bytes();
                let shard = part.group.shard(peer - first);
                for slot in &part.group.slots {
                    let Some(((_, tensor), offset)) = tensors.next() else {
                        break;
                    };
                    let theirs = slot.offset.max(shard.start)..slot.range().end.min(shard.end);
                    if !theirs.is_empty() {
                        let of = |elem: usize| (elem - slot.offset) * size;
                        let place = of(theirs.start)..of(theirs.end);
                        let from = offset.wrapping_add(place.start as u64);
                        peers.pull(device, from, tensor, place)?;
                    }
                }
            }
        }
        self.pulled = peers.mark(Lane::Communication)?;
        Ok(gathered)
    }

    /// Makes work that is queued from now on wait for all gathers so far.
    pub(crate) fn arrive(&mut self) -> Result<()> {
        if std::mem::take(&mut self.arriving) {
            self.peers()?.arrive()?;
        }
        self.unused.clear();
        Ok(())
    }

    /// Reduce-scatters a unit's gradients: returns this rank's shard of their sum over all ranks, f32, in chunks.
    /// Gradients that no rank has are zero.
    pub(crate) fn reduce(
        &mut self,
        unit: UnitId,
        group: &GroupLayout,
        produced: Produced<'_>,
    ) -> Result<Vec<Tensor>> {
        if self.grouped {
            let sum = self.reduce_in_group(unit, group, produced)?;
            return Ok(vec![sum]);
        }
        let peers = self.peers()?;
        let mut words = vec![produced.mark];
        for gradient in produced.slots {
            words.push(match gradient {
                Some(gradient) => peers.offset(gradient)?,
                None => ABSENT,
            });
        }
        let all = self.exchange(CommTag::new("reduce", unit.0), &words)?;
        self.borrowed
            .extend(produced.slots.iter().flatten().cloned());
        let shard = group.shard(self.world.rank % self.shards);
        let mut sums = Vec::new();
        let mut start = shard.start;
        while start < shard.end {
            let chunk = start..shard.end.min(start + self.chunk_elems);
            start = chunk.end;
            sums.push(self.add_up(group, &produced, &all, chunk)?);
        }
        self.pulled = self.peers()?.mark(Lane::Communication)?;
        Ok(sums)
    }

    /// Pulls one chunk of this rank's shard from all ranks and adds it up.
    fn add_up(
        &self,
        group: &GroupLayout,
        produced: &Produced<'_>,
        all: &[Vec<u64>],
        chunk: Range<usize>,
    ) -> Result<Tensor> {
        let peers = self.peers()?;
        let (size, elems) = (self.world.size, chunk.len());
        let shape = Shape::new(&[size * elems]);
        let all_ranks = peers.incoming(shape, DType::F32, Tag::Communication)?;
        for (peer, words) in all.iter().enumerate() {
            let (own, device) = (peer == self.world.rank, self.devices[peer]);
            if own {
                peers.await_own(produced.mark)?;
            } else {
                peers.await_mark(Lane::Communication, device, Lane::Compute, words[0])?;
            }
            let place = |part: Range<usize>| {
                let at = |elem: usize| (peer * elems + elem - chunk.start) * 4;
                at(part.start)..at(part.end)
            };
            let mut done = chunk.start;
            for (slot, part) in group.parts(chunk.clone()) {
                let Some(index) = group.slots.iter().position(|s| s.param == slot.param) else {
                    continue;
                };
                let offset = words[1 + index];
                if offset == ABSENT {
                    continue;
                }
                if done < part.start {
                    peers.clear(&all_ranks, place(done..part.start))?;
                }
                let at = 4 * (part.start - slot.offset);
                match &produced.slots[index] {
                    Some(gradient) if own => {
                        peers.take(gradient, at, &all_ranks, place(part.clone()))?;
                    }
                    _ => peers.pull(device, offset + at as u64, &all_ranks, place(part.clone()))?,
                }
                done = part.end;
            }
            if done < chunk.end {
                peers.clear(&all_ranks, place(done..chunk.end))?;
            }
        }
        peers.arrive()?;
        let of = |rank: usize| all_ranks.narrow(rank * elems, elems);
        let mut sum = of(0)?;
        for rank in 1..size {
            sum = self.backend.add(&sum, &of(rank)?)?;
        }
        Ok(sum)
    }

    fn gather_in_group(
        &mut self,
        unit: UnitId,
        own: &[OwnPart<'_>],
        needed: bool,
    ) -> Result<Gathered> {
        let rank = self.world.rank;
        self.exchange(CommTag::new("gather", unit.0), &[])?;
        let (peers, library) = (self.peers()?, self.group()?);
        let (mut gathered, mut unused) = (Gathered::new(), Vec::new());
        for part in own {
            let shape = Shape::new(&[part.group.padded_elems]);
            let whole = peers.incoming(shape, part.dtype, Tag::Gathered)?;
            let own = part.group.shard_elems * part.dtype.size_bytes();
            part.weights.put(peers, 0..own, &whole, rank * own)?;
            library.all_gather(&whole)?;
            if !needed {
                unused.push(whole);
                continue;
            }
            for slot in &part.group.slots {
                gathered.push((slot.param, whole.narrow(slot.offset, slot.len)?));
            }
        }
        self.unused.extend(unused);
        self.arriving = true;
        Ok(gathered)
    }

    fn reduce_in_group(
        &mut self,
        unit: UnitId,
        group: &GroupLayout,
        produced: Produced<'_>,
    ) -> Result<Tensor> {
        self.exchange(CommTag::new("reduce", unit.0), &[])?;
        let (peers, library) = (self.peers()?, self.group()?);
        let tag = Tag::Communication;
        let all = peers.incoming(Shape::new(&[group.padded_elems]), DType::F32, tag)?;
        let sum = peers.incoming(Shape::new(&[group.shard_elems]), DType::F32, tag)?;
        peers.await_own(produced.mark)?;
        let place = |elems: Range<usize>| elems.start * 4..elems.end * 4;
        let mut done = 0;
        for (slot, gradient) in group.slots.iter().zip(produced.slots) {
            if let Some(gradient) = gradient {
                if done < slot.offset {
                    peers.clear(&all, place(done..slot.offset))?;
                }
                peers.take(gradient, 0, &all, place(slot.range()))?;
                done = slot.range().end;
            }
        }
        if done < group.padded_elems {
            peers.clear(&all, place(done..group.padded_elems))?;
        }
        library.reduce_scatter(&all, &sum)?;
        peers.arrive()?;
        Ok(sum)
    }

    /// Ends a pass: afterwards peers read none of this rank's tensors.
    pub(crate) fn end_pass(&mut self) -> Result<()> {
        // Tensors of unneeded gathers are freed only after their gather.
        self.arrive()?;
        self.exchange(CommTag::new("settle", 0), &[]).map(drop)
    }
}
