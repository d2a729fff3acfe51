//! One rank's end of a window: allocation, start, progress and waiting.

use super::arena::{Arena, Region, SMALL_BYTES};
use super::fingerprint::Fingerprint;
use super::op::{Op, State};
use super::window::{Failure, RING, RingPhase, Window};
use super::{
    Buffer, Collective, CollectiveKind, CommError, Communicator, Ticket, WindowUsage, World,
};
use kernels::DType;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) window: Arc<Window>,
    pub(super) world: World,
    deadline: Duration,
    /// Whether waits spin, which pays only if every rank has a core of its own.
    spin: bool,
    /// Sequence number of the next collective. Locked during a publication, so collectives appear in order.
    next: Mutex<u64>,
    local: Mutex<Local>,
    /// Total nanoseconds that this rank spent in waits.
    spent: AtomicU64,
}

#[derive(Debug)]
struct Local {
    arena: Arena,
    /// Free regions that peers may still be reading: none overlaps a region in use.
    deferred: Vec<Deferred>,
    /// Collectives for which this rank still reads its peers' buffers.
    pending: Vec<Arc<Op>>,
    in_use_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
struct Deferred {
    region: Region,
    readers: Readers,
}

/// A collective whose peers may still be reading a buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Readers {
    sequence: u64,
    print: Fingerprint,
    /// Bit mask of those peers.
    ranks: u64,
}

impl Readers {
    pub(super) fn of(op: &Op, world: World) -> Option<Self> {
        op.is_read_by_peers(world).then(|| Self::new(op, world))
    }

    fn new(op: &Op, world: World) -> Self {
        Self {
            sequence: op.sequence,
            print: op.print,
            ranks: op.readers(world),
        }
    }
}

/// Locks a mutex, ignoring poison: code under these locks leaves consistent state wherever it could panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of processor cores that this process could use when it first asked. A rank asks before it binds itself to its
/// share of them.
pub fn cores_at_start() -> usize {
    static CORES: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
    *CORES
}

impl Endpoint {
    pub(super) fn new(window: Arc<Window>, world: World, deadline: Duration) -> Self {
        let arena = Arena::new(window.layout().region_bytes - SMALL_BYTES);
        let local = Local {
            arena,
            deferred: Vec::new(),
            pending: Vec::new(),
            in_use_bytes: 0,
        };
        Self {
            window,
            world,
            deadline,
            spin: world.size <= cores_at_start(),
            next: Mutex::new(0),
            local: Mutex::new(local),
            spent: AtomicU64::new(0),
        }
    }

    fn check_alive(&self) -> Result<(), CommError> {
        self.window
            .failure()
            .map_or(Ok(()), |failure| Err(failure.error(&self.window)))
    }

    /// Calls `ready` after every change of the window until it returns a value. Meanwhile the other collectives of this
    /// rank progress, so tickets may be waited for in any order.
    fn block_on<T>(
        &self,
        wanted: Readers,
        ready: impl FnMut() -> Result<Option<T>, CommError>,
    ) -> Result<T, CommError> {
        let started = Instant::now();
        let outcome = self.wait_until(started, wanted, ready);
        let spent = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // An independent counter: no other memory access depends on its value.
        self.spent.fetch_add(spent, Ordering::Relaxed);
        outcome
    }

    fn wait_until<T>(
        &self,
        started: Instant,
        wanted: Readers,
        mut ready: impl FnMut() -> Result<Option<T>, CommError>,
    ) -> Result<T, CommError> {
        let mut look = || {
            // In this order, a failure of a later collective does not revoke a finished one.
            if let Some(value) = ready()? {
                return Ok(ControlFlow::Break(value));
            }
            self.check_alive()?;
            self.check_present(wanted.sequence)?;
            self.advance_pending()?;
            let elapsed = started.elapsed();
            if elapsed >= self.deadline {
                return Err(self.time_out(wanted, elapsed));
            }
            Ok(ControlFlow::Continue(self.deadline - elapsed))
        };
        self.window.bell().until(self.spin, || match look() {
            Ok(ControlFlow::Continue(limit)) => Err(limit),
            Ok(ControlFlow::Break(value)) => Ok(Ok(value)),
            Err(error) => Ok(Err(error)),
        })
    }

    /// An error if a rank has ended before the collective `sequence`, so that nobody waits for it.
    fn check_present(&self, sequence: u64) -> Result<(), CommError> {
        let gone = self.window.gone();
        let left = |peer: &usize| gone >> peer & 1 == 1 && self.window.started(*peer) <= sequence;
        let Some(by_rank) = self.world.peers().find(left) else {
            return Ok(());
        };
        let reason = format!("it ended before collective #{sequence}");
        let failure = Failure::Abort { by_rank, reason };
        Err(self.window.fail(failure).error(&self.window))
    }

    fn time_out(&self, wanted: Readers, elapsed: Duration) -> CommError {
        let Readers {
            sequence, print, ..
        } = wanted;
        let failure = Failure::Timeout {
            by_rank: self.world.rank,
            sequence,
            print,
            elapsed,
        };
        self.window.fail(failure).error(&self.window)
    }

    fn advance_pending(&self) -> Result<(), CommError> {
        let pending = lock(&self.local).pending.clone();
        for op in pending {
            // Another thread advances a locked one.
            if let Ok(mut state) = op.state.try_lock() {
                op.advance(self, &mut state)?;
            }
        }
        Ok(())
    }

    /// Tells the peers that this rank has finished reading for `op`.
    pub(super) fn finish(&self, op: &Op, state: &mut State) {
        state.finished = true;
        self.reach(op, RingPhase::Done);
        self.forget(op);
    }

    /// Tells the peers this rank's phase in `op`.
    pub(super) fn reach(&self, op: &Op, phase: RingPhase) {
        self.window.set_phase(self.world.rank, op.sequence, phase);
        if let Some(remote) = self.window.remote() {
            remote.reached(&self.window, op, phase);
        }
    }

    fn forget(&self, op: &Op) {
        lock(&self.local)
            .pending
            .retain(|other| other.sequence != op.sequence);
    }

    /// Advances `op` without waiting. Returns true after this rank has finished it.
    pub(super) fn poll(&self, op: &Op) -> Result<bool, CommError> {
        op.advance(self, &mut lock(&op.state))
    }

    /// Waits until this rank has finished `op`.
    pub(super) fn complete(&self, op: &Op) -> Result<(), CommError> {
        self.block_on(Readers::new(op, self.world), || {
            Ok(self.poll(op)?.then_some(()))
        })
    }

    /// Waits until no peer reads buffers of that collective.
    pub(super) fn reclaim(&self, readers: Readers) -> Result<(), CommError> {
        self.block_on(readers, || Ok(self.peers_done(readers).then_some(())))
    }

    fn peers_done(&self, readers: Readers) -> bool {
        self.window.all_done(readers.ranks, readers.sequence)
    }

    /// Gives up the result of `op` without effect on the peers.
    pub(super) fn abandon(&self, op: &Op) {
        let mut state = lock(&op.state);
        if state.finished {
            return;
        }
        if self.window.failure().is_some() {
            state.finished = true;
            self.forget(op);
        } else if !op.shares_sums(self.world) {
            self.finish(op, &mut state);
        } else if std::thread::panicking() {
            state.finished = true;
            self.forget(op);
            drop(state);
            self.abort("panicked with a sum in flight that others wait for");
        } else {
            // The peers need the sum of this rank's part.
            drop(state);
            if self.complete(op).is_err() {
                lock(&op.state).finished = true;
                self.forget(op);
            }
        }
    }

    fn abort(&self, reason: &str) {
        let by_rank = self.world.rank;
        let reason = reason.to_owned();
        self.window.fail(Failure::Abort { by_rank, reason });
    }

    /// A region that nobody reads. Its offset does not depend on the progress of the peers.
    fn alloc(&self, bytes: usize) -> Result<Region, CommError> {
        let region = self.place(bytes)?;
        while let Some(readers) = self.readers_of(region) {
            self.reclaim(readers).inspect_err(|_| {
                // The peers may continue reading, so the region stays among the deferred ones.
                lock(&self.local).take_back(region);
            })?;
        }
        Ok(region)
    }

    fn place(&self, asked_bytes: usize) -> Result<Region, CommError> {
        let mut local = lock(&self.local);
        let Some(region) = local.arena.alloc(asked_bytes) else {
            return Err(CommError::WindowFull {
                asked_bytes,
                in_use_bytes: local.in_use_bytes,
                capacity_bytes: local.arena.capacity(),
            });
        };
        local.in_use_bytes += region.bytes;
        Ok(region)
    }

    /// A collective in which peers may still be reading a part of the region.
    fn readers_of(&self, region: Region) -> Option<Readers> {
        let mut local = lock(&self.local);
        local.deferred.retain(|d| !self.peers_done(d.readers));
        let mut deferred = local.deferred.iter();
        let there = deferred.find(|d| d.region.overlaps(region))?;
        Some(there.readers)
    }

    /// Frees a region that `readers` may still be reading.
    pub(super) fn release(&self, region: Region, readers: Option<Readers>) {
        let mut local = lock(&self.local);
        local.take_back(region);
        if let Some(readers) = readers.filter(|_| region.bytes > 0) {
            local.deferred.push(Deferred { region, readers });
        }
    }

    fn usage(&self) -> WindowUsage {
        let local = lock(&self.local);
        WindowUsage {
            in_use_bytes: local.in_use_bytes,
            peak_bytes: local.arena.peak(),
            capacity_bytes: local.arena.capacity(),
        }
    }

    /// Publishes a collective. On an error after publication `buffer` keeps its readers, so that
    /// dropping it does not free memory that a peer may be reading.
    fn publish(
        &self,
        collective: Collective,
        offset: usize,
        buffer: &mut Buffer,
    ) -> Result<Arc<Op>, CommError> {
        let Collective { kind, tag, .. } = collective;
        let print = Fingerprint::new(&collective, buffer.len())?;
        let mut next = lock(&self.next);
        let sequence = *next;
        if let Some(reused) = sequence.checked_sub(RING) {
            // The record of `reused` is free after every rank, including this one, is done with it.
            self.block_on(
                Readers {
                    sequence: reused,
                    print,
                    ranks: u64::MAX,
                },
                || {
                    let all = (0..self.world.size)
                        .all(|r| self.window.reached(r, reused, RingPhase::Done));
                    Ok(all.then_some(()))
                },
            )?;
        }
        self.check_alive()?;
        let op = Arc::new(Op {
            sequence,
            print,
            collective,
            bytes: buffer.len(),
            offset,
            state: Mutex::new(State::default()),
        });
        *next += 1;
        buffer.set_readers(Readers::of(&op, self.world));
        // Locked until the comparison is done, so that no other thread finishes the collective before it.
        let mut state = lock(&op.state);
        lock(&self.local).pending.push(op.clone());
        self.window
            .publish(self.world.rank, sequence, print, op.offset);
        if let Some(remote) = self.window.remote() {
            remote.published(&self.window, &op);
        }
        drop(next);
        tracing::trace!(rank = self.world.rank, sequence, %kind, bytes = op.bytes, %tag, "started");
        self.compare(&op).inspect_err(|_| {
            state.finished = true;
            self.forget(&op);
        })?;
        if op.needs_no_peer(self.world) {
            self.finish(&op, &mut state);
        }
        drop(state);
        Ok(op)
    }

    /// Compares with the peers that published earlier. The later ones compare with this rank.
    fn compare(&self, op: &Op) -> Result<(), CommError> {
        for peer in self.world.peers() {
            op.peer(&self.window, self.world, peer)?;
        }
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(remote) = self.window.remote() {
            remote.close(self.window.failure().as_ref());
        }
    }
}

impl Local {
    fn take_back(&mut self, region: Region) {
        self.in_use_bytes -= region.bytes;
        self.arena.free(region);
    }
}

fn check_arguments(op: Collective, bytes: usize, size: usize) -> Result<(), CommError> {
    let Collective {
        kind, dtype, tag, ..
    } = op;
    if let Some(group) = op.group {
        let knows = matches!(
            kind,
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter
        );
        if !knows || group == 0 || !size.is_multiple_of(group) {
            return Err(CommError::InvalidGroup {
                kind,
                tag,
                group,
                size,
            });
        }
    }
    if kind.sums() && !matches!(dtype, DType::F32 | DType::F64) {
        return Err(CommError::UnsupportedDType { kind, tag, dtype });
    }
    let ranks = match kind {
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => op.group.unwrap_or(size),
        _ => 1,
    };
    if !bytes.is_multiple_of(ranks * dtype.size_bytes()) {
        return Err(CommError::Indivisible {
            kind,
            tag,
            bytes,
            ranks,
            dtype,
        });
    }
    match kind {
        CollectiveKind::Broadcast { root } if root >= size => {
            Err(CommError::InvalidRoot { tag, root, size })
        }
        _ => Ok(()),
    }
}

/// The communicator of one rank over a window.
#[derive(Debug)]
pub(super) struct Member(pub(super) Arc<Endpoint>);

impl Communicator for Member {
    fn world(&self) -> World {
        self.0.world
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, CommError> {
        let region = self.0.alloc(bytes)?;
        Ok(Buffer::new(self.0.clone(), region, bytes))
    }

    fn start(&self, op: Collective, mut buffer: Buffer) -> Result<Ticket, CommError> {
        let Some(offset) = buffer.offset_in(&self.0) else {
            return Err(CommError::ForeignBuffer { tag: op.tag });
        };
        check_arguments(op, buffer.len(), self.0.world.size)?;
        let published = self.0.publish(op, offset, &mut buffer)?;
        Ok(Ticket::new(self.0.clone(), published, buffer))
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }

    fn failure(&self) -> Option<CommError> {
        self.0.check_alive().err()
    }

    fn memory(&self) -> WindowUsage {
        self.0.usage()
    }

    fn deadline(&self) -> Duration {
        self.0.deadline
    }

    fn time_spent(&self) -> Duration {
        Duration::from_nanos(self.0.spent.load(Ordering::Relaxed))
    }
}
