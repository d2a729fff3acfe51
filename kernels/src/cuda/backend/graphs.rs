//! CUDA graphs of repeated command sequences.
//!
//! A training step queues the same kernels again and again. Commands are collected between two points that need the
//! host or another stream (copies, events). Such a sequence may be equal to an earlier one in every part: modules,
//! grids, arguments, addresses. It then becomes a CUDA graph, which one call launches. Offsets in the arena follow
//! from shapes alone, so equal batches give equal sequences. Commands run in their order with their own arguments, in
//! a graph or not. So results have the same bits.

use super::{Cause, Event, Executor, GroupExecutor, PeerExecutor, Take, filling};
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::{Multiply, Shape};
use crate::peers::Lane;
use crate::timeline::DeviceSpan;
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum commands per sequence. The device waits for the first one while the host collects. This many take about a
/// millisecond to collect, and a model's kernels run longer.
const LONGEST: usize = 256;
/// Maximum sequences remembered, and maximum graphs among them. Each node of a graph takes device memory.
const REMEMBERED: usize = 1024;
const GRAPHS: usize = 128;
/// Maximum product shapes for which the library's answer is remembered.
const PRODUCTS: usize = 4096;

/// Command that an executor queues on the device: a kernel launch, a fill, a copy, or a library's matrix
/// product.
#[derive(Clone, PartialEq, Debug)]
pub enum Command {
    /// Launches a kernel.
    Launch(Launch),
    /// Sets a number of bytes to zero.
    Zero(Address, u64),
    /// Copies a number of bytes from the first address to the second.
    Copy(Address, Address, u64),
    /// Matrix product by the library, with its workspace and the workspace's bytes.
    Multiply(Multiply, Address, u64),
}

impl Command {
    /// Hashes a command. Equal commands have equal hashes.
    fn hash(&self, hasher: &mut DefaultHasher) {
        match self {
            Self::Launch(launch) => {
                (0, &launch.module, launch.kernel, launch.grid).hash(hasher);
                (launch.threads, launch.shared_bytes).hash(hasher);
                launch.args.iter().for_each(|arg| arg.word().hash(hasher));
            }
            Self::Zero(at, bytes) => (1, at, bytes).hash(hasher),
            Self::Copy(from, to, bytes) => (2, from, to, bytes).hash(hasher),
            Self::Multiply(product, workspace, _) => {
                let Multiply { shape, a, b, y, .. } = product;
                (3, shape, a, b, y, workspace).hash(hasher);
            }
        }
    }
}

/// Executor that can capture commands as a CUDA graph and launch the graph.
///
/// # Safety
/// A launched graph executes its commands as if each had been queued alone, in their order, after everything queued
/// before.
pub unsafe trait Graphs: Executor {
    /// Commands captured as a graph, which [`Graphs::replay`] launches.
    type Graph: Send + Debug;

    /// Captures commands without executing them. Each was executed before, so its code is loaded.
    ///
    /// # Safety
    /// As of the commands. Their memory stays allocated as long as the graph is used.
    ///
    /// # Errors
    /// When the device cannot capture them.
    unsafe fn keep(&self, commands: &[Command]) -> Result<Self::Graph, Cause>;

    /// Launches a graph that [`Graphs::keep`] of this executor captured.
    ///
    /// # Safety
    /// The memory of its commands is still allocated.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn replay(&self, graph: &Self::Graph) -> Result<(), Cause>;
}

/// Which repeated sequences of commands are captured as CUDA graphs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Sequences of at least eight commands: a graph launch costs about four kernel launches, and capturing costs as
    /// much as the commands. If the device refuses a graph, all later commands are queued one by one.
    Auto,
    /// All sequences. A graph that the device refuses is an error.
    On,
}

impl Mode {
    const fn shortest(self) -> usize {
        match self {
            Self::Auto => 8,
            Self::On => 1,
        }
    }
}

/// Numbers of commands and CUDA graph launches that a [`Replaying`] executor has queued.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Number of commands queued so far, one by one or as part of a graph launch.
    pub commands: u64,
    /// Number of CUDA graphs captured so far.
    pub graphs: u64,
    /// Number of CUDA graph launches so far.
    pub replays: u64,
    /// How many of the `commands` were part of a graph launch.
    pub replayed: u64,
}

/// Executor that captures repeated sequences of commands as CUDA graphs of another executor and launches
/// these.
#[derive(Debug)]
pub struct Replaying<E: Graphs> {
    inner: Arc<E>,
    mode: Mode,
    state: Mutex<State<E::Graph>>,
    /// Whether the inner executor records a timeline.
    measured: AtomicBool,
}

#[derive(Debug)]
struct State<G> {
    /// Commands collected but not yet queued.
    pending: Vec<Command>,
    /// Sequences of commands queued before, by the hash of their commands.
    seen: HashMap<u64, Seen<G>>,
    /// Whether the library supports a product of this shape.
    products: HashMap<Shape, bool>,
    /// Number of sequences so far, used as the clock of [`Seen::last`].
    runs: u64,
    /// Whether the device refused a graph, so no more are captured.
    refused: bool,
    counts: Counts,
}

/// Sequence of commands that was queued at least once.
#[derive(Debug)]
struct Seen<G> {
    commands: Vec<Command>,
    graph: Option<G>,
    last: u64,
}

impl<E: Graphs> Replaying<E> {
    /// Wraps the executor `inner`. All later commands for `inner` must go through the wrapper.
    #[must_use]
    pub fn new(inner: Arc<E>, mode: Mode) -> Self {
        let state = State {
            pending: Vec::with_capacity(LONGEST),
            seen: HashMap::new(),
            products: HashMap::new(),
            runs: 0,
            refused: false,
            counts: Counts::default(),
        };
        Self {
            inner,
            mode,
            state: Mutex::new(state),
            measured: AtomicBool::new(false),
        }
    }

    /// Numbers of commands and graph launches since this executor was created.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    fn lock(&self) -> MutexGuard<'_, State<E::Graph>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn collect(&self, command: Command) -> Result<(), Cause> {
        let mut state = self.lock();
        state.pending.push(command);
        match state.pending.len() < LONGEST {
            true => Ok(()),
            false => self.queue(&mut state),
        }
    }

    /// Queues everything collected. Nothing else can be queued while the guard lives.
    fn queued(&self) -> Result<MutexGuard<'_, State<E::Graph>>, Cause> {
        let mut state = self.lock();
        self.queue(&mut state)?;
        Ok(state)
    }

    /// Queues the collected commands, as a graph if the same sequence was queued before.
    fn queue(&self, state: &mut State<E::Graph>) -> Result<(), Cause> {
        let commands = std::mem::take(&mut state.pending);
        state.counts.commands += commands.len() as u64;
        if commands.is_empty() || commands.len() < self.mode.shortest() || state.refused {
            return self.queue_each(&commands);
        }
        let mut hasher = DefaultHasher::new();
        commands
            .iter()
            .for_each(|command| command.hash(&mut hasher));
        let key = hasher.finish();
        state.runs += 1;
        let now = state.runs;
        if !state
            .seen
            .get(&key)
            .is_some_and(|seen| seen.commands == commands)
        {
            self.queue_each(&commands)?;
            state.make_room(REMEMBERED, |_| true);
            let graph = None;
            let last = now;
            state.seen.insert(
                key,
                Seen {
                    commands,
                    graph,
                    last,
                },
            );
            return Ok(());
        }
        if state
            .seen
            .get(&key)
            .is_some_and(|seen| seen.graph.is_none())
        {
            state.make_room(GRAPHS, |seen| seen.graph.is_some());
            // SAFETY: callers vouched for the commands. Their memory is the arena's, which is freed when this is
            // dropped.
            match unsafe { self.inner.keep(&commands) } {
                Ok(graph) => {
                    state.counts.graphs += 1;
                    if let Some(seen) = state.seen.get_mut(&key) {
                        seen.graph = Some(graph);
                    }
                }
                Err(cause) if self.mode == Mode::On => return Err(cause),
                Err(_) => {
                    state.refused = true;
                    return self.queue_each(&commands);
                }
            }
        }
        let Some(Seen {
            graph: Some(graph),
            last,
            ..
        }) = state.seen.get_mut(&key)
        else {
            return self.queue_each(&commands);
        };
        *last = now;
        state.counts.replays += 1;
        state.counts.replayed += commands.len() as u64;
        // SAFETY: callers vouched for the equal commands of this sequence.
        unsafe { self.inner.replay(graph) }
    }

    fn queue_each(&self, commands: &[Command]) -> Result<(), Cause> {
        for command in commands {
            // SAFETY: callers vouched for each command when they passed it. Their memory is the arena's. A range
            // freed since then is used only by later commands, or by copies that first queue everything collected.
            unsafe { queue_one(&*self.inner, command) }?;
        }
        Ok(())
    }
}

/// Queues one command on the executor `on`.
///
/// # Safety
/// As of the command.
///
/// # Errors
/// As of the command, and when a product is refused that the library supported before.
pub unsafe fn queue_one(on: &(impl Executor + ?Sized), command: &Command) -> Result<(), Cause> {
    match command {
        // SAFETY: the caller vouches for the command.
        Command::Launch(launch) => unsafe { on.launch(launch) },
        // SAFETY: as above.
        Command::Zero(at, bytes) => unsafe { on.zero(*at, *bytes) },
        // SAFETY: as above.
        Command::Copy(from, to, bytes) => unsafe { on.copy(*from, *to, *bytes) },
        Command::Multiply(product, workspace, bytes) => {
            // SAFETY: as above.
            match unsafe { on.multiply(product, *workspace, *bytes) }? {
                true => Ok(()),
                false => Err("a product that was taken before is refused".into()),
            }
        }
    }
}

impl<G> State<G> {
    /// Removes the least recently seen of the sequences that `counts` selects, if there are at least `most` of them.
    fn make_room(&mut self, most: usize, counts: impl Fn(&Seen<G>) -> bool) {
        let counted = || self.seen.iter().filter(|(_, seen)| counts(seen));
        if counted().count() >= most
            && let Some((oldest, _)) = counted().min_by_key(|(_, seen)| seen.last)
        {
            let oldest = *oldest;
            self.seen.remove(&oldest);
        }
    }
}

// SAFETY: commands reach the inner executor in the order of their calls. All collected commands are queued, under the
// lock, before anything else that has an order.
unsafe impl<E: Graphs> Executor for Replaying<E> {
    fn multiprocessors(&self) -> u32 {
        self.inner.multiprocessors()
    }

    fn has_values(&self) -> bool {
        self.inner.has_values()
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        self.inner.allocate(bytes)
    }

    fn free(&self, memory: Address) {
        let mut state = self.lock();
        // Nothing reads the results of the collected commands any more, and graphs contain addresses of the freed
        // memory.
        state.pending.clear();
        state.seen.clear();
        self.inner.free(memory);
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        let _queued = self.queued()?;
        // SAFETY: the caller vouches for the range.
        unsafe { self.inner.write(to, bytes) }
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        let behind = self.record_event()?;
        // SAFETY: the caller vouches for the range; the event follows everything queued.
        unsafe {
            self.inner
                .fetch(from, bytes.len() as u64, &behind, &mut filling(bytes))
        }
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.collect(Command::Zero(at, bytes))
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.collect(Command::Copy(from, to, bytes))
    }

    fn record_event(&self) -> Result<Event, Cause> {
        let _queued = self.queued()?;
        self.inner.record_event()
    }

    unsafe fn upload(
        &self,
        to: Address,
        bytes: &[u8],
        behind: Option<&Event>,
    ) -> Result<(), Cause> {
        let _queued = self.queued()?;
        // SAFETY: the caller vouches for the range and the event.
        unsafe { self.inner.upload(to, bytes, behind) }
    }

    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Event) -> Result<(), Cause> {
        // No collected command uses the range. The sequence continues, so its end depends on no other thread's
        // timing.
        // SAFETY: the caller vouches for the range and the event.
        unsafe { self.inner.deliver(to, bytes, behind) }
    }

    fn delivered(&self) -> Result<Event, Cause> {
        let _queued = self.queued()?;
        self.inner.delivered()
    }

    unsafe fn fetch(
        &self,
        from: Address,
        bytes: u64,
        behind: &Event,
        take: &mut Take<'_>,
    ) -> Result<(), Cause> {
        // An event follows everything collected before it. The lock is not held, so other threads may queue
        // meanwhile.
        // SAFETY: the caller vouches for the range and the event.
        unsafe { self.inner.fetch(from, bytes, behind, take) }
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        self.collect(Command::Launch(launch.clone()))
    }

    fn multiplies(&self) -> bool {
        self.inner.multiplies()
    }

    unsafe fn multiply(
        &self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool, Cause> {
        let known = self.lock().products.get(&product.shape).copied();
        if let Some(taken) = known {
            if taken {
                self.collect(Command::Multiply(*product, workspace, workspace_bytes))?;
            }
            return Ok(taken);
        }
        // Only the library knows whether it supports the shape, and it answers when it is asked to multiply.
        let mut state = self.queued()?;
        // SAFETY: the caller vouches for the addresses.
        let taken = unsafe { self.inner.multiply(product, workspace, workspace_bytes) }?;
        state.counts.commands += u64::from(taken);
        if state.products.len() >= PRODUCTS {
            state.products.clear();
        }
        state.products.insert(product.shape, taken);
        Ok(taken)
    }

    fn measure(&self, on: bool) -> Result<(), Cause> {
        let _queued = self.queued()?;
        self.measured.store(on, Ordering::Relaxed);
        self.inner.measure(on)
    }

    fn label(&self, label: Option<u32>) -> Result<(), Cause> {
        // Labels split sequences only while a timeline is recorded.
        let _queued = match self.measured.load(Ordering::Relaxed) {
            true => Some(self.queued()?),
            false => None,
        };
        self.inner.label(label)
    }

    fn measured(&self) -> Result<Vec<DeviceSpan>, Cause> {
        let _queued = self.queued()?;
        self.inner.measured()
    }

    fn peers(&self) -> Option<&dyn PeerExecutor> {
        self.inner.peers().map(|_| self as _)
    }

    fn group(&self) -> Option<&dyn GroupExecutor> {
        self.inner.group()
    }
}

impl<E: Graphs> Replaying<E> {
    fn inner_peers(&self) -> Result<&dyn PeerExecutor, Cause> {
        let peers = self.inner.peers();
        peers.ok_or_else(|| "the device shares no memory".into())
    }
}

/// Only calls that involve the compute queue first queue the collected commands.
impl<E: Graphs> PeerExecutor for Replaying<E> {
    fn name(&self, memory: Address) -> Result<Vec<u8>, Cause> {
        self.inner_peers()?.name(memory)
    }

    fn join(&self, rank: usize, names: &[Vec<u8>], deadline: Duration) -> Result<(), Cause> {
        self.inner_peers()?.join(rank, names, deadline)
    }

    fn incoming_behind(&self, event: &Event) -> Result<(), Cause> {
        // An event follows everything collected before it.
        self.inner_peers()?.incoming_behind(event)
    }

    unsafe fn put(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the range.
        unsafe { self.inner_peers()?.put(to, bytes) }
    }

    unsafe fn clear(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the range.
        unsafe { self.inner_peers()?.clear(at, bytes) }
    }

    unsafe fn take(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the ranges.
        unsafe { self.inner_peers()?.take(from, to, bytes) }
    }

    unsafe fn pull(&self, peer: usize, offset: u64, to: Address, bytes: u64) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the ranges.
        unsafe { self.inner_peers()?.pull(peer, offset, to, bytes) }
    }

    fn arrive(&self) -> Result<(), Cause> {
        let _queued = self.queued()?;
        self.inner_peers()?.arrive()
    }

    fn mark(&self, lane: Lane) -> Result<u64, Cause> {
        let _queued = match lane {
            Lane::Compute => Some(self.queued()?),
            Lane::Communication => None,
        };
        self.inner_peers()?.mark(lane)
    }

    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause> {
        let _queued = match lane {
            Lane::Compute => Some(self.queued()?),
            Lane::Communication => None,
        };
        self.inner_peers()?.await_mark(lane, peer, of, number)
    }

    fn await_own(&self, number: u64) -> Result<(), Cause> {
        self.inner_peers()?.await_own(number)
    }
}
