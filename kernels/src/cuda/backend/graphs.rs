//! CUDA graphs of repeated command sequences.
//!
//! A training step queues the same kernels again and again. Commands are collected between two points that need the
//! host or another stream (copies, events). Such a sequence may be equal to an earlier one in every part: modules,
//! grids, arguments, addresses. It then becomes a CUDA graph, which one call launches. Offsets in the arena follow
//! from shapes alone, so equal batches give equal sequences. Commands run in their order with their own arguments, in
//! a graph or not. So results have the same bits.

use super::{Cause, Event, Executor, GroupExecutor, PeerExecutor, Take, Upload, filling};
use crate::cuda::device_kind::DeviceKind;
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::{Multiply, Shape};
use crate::cuda::module::Module;
use crate::peers::Lane;
use crate::timeline::DeviceSpan;
use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum commands per sequence. The device waits for the first one while the host collects. This many take about a
/// millisecond to collect, and a model's kernels run longer.
const LONGEST: usize = 256;
/// Maximum weight of all graphs: the sum of their commands, and `GRAPH_WEIGHT` for each. Each node of a graph takes
/// device memory. A layer's sequences have some tens of commands, so the graphs of a model with 300 layers fit.
const MOST_WEIGHT: usize = 1 << 15;
/// Weight of a graph beside its nodes.
const GRAPH_WEIGHT: usize = 8;
/// A graph that was not launched during this many sequences may give way to another. The number exceeds the sequences
/// of a step, so a step whose graphs do not all fit keeps launching those that do.
const STALE: u64 = 1 << 14;
/// Maximum hashes of sequences in each of two generations. The older one is dropped when the newer one is full.
const REMEMBERED: usize = 1 << 15;
/// After this many sequences without a repetition, `auto` queues commands as they come, for `REST` commands. Batches
/// of varying lengths and dropout keys never repeat.
const FRUITLESS: u32 = 1 << 13;
const REST: u64 = 1 << 20;
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
    /// Hashes of sequences queued before: the newer and the older generation.
    seen: [HashSet<u64>; 2],
    /// Graphs of sequences queued before, by the hash of their commands.
    graphs: HashMap<u64, Kept<G>>,
    /// Sum of the weights of all graphs.
    weight: usize,
    /// Whether the library supports a product of this shape.
    products: HashMap<Shape, bool>,
    /// Number of sequences so far, used as the clock of [`Kept::last`].
    runs: u64,
    /// Number of sequences since the last repetition.
    fruitless: u32,
    /// Number of commands that are still queued as they come.
    rest: u64,
    /// Whether the device refused a graph, so no more are captured.
    refused: bool,
    counts: Counts,
}

/// Sequence of commands that was queued at least twice, with its graph.
#[derive(Debug)]
struct Kept<G> {
    commands: Vec<Command>,
    graph: G,
    last: u64,
}

/// Share of a graph in `MOST_WEIGHT`.
const fn weight(commands: &[Command]) -> usize {
    commands.len() + GRAPH_WEIGHT
}

impl<E: Graphs> Replaying<E> {
    /// Wraps the executor `inner`. All later commands for `inner` must go through the wrapper.
    #[must_use]
    pub fn new(inner: Arc<E>, mode: Mode) -> Self {
        let state = State {
            pending: Vec::with_capacity(LONGEST),
            seen: Default::default(),
            graphs: HashMap::new(),
            weight: 0,
            products: HashMap::new(),
            runs: 0,
            fruitless: 0,
            rest: 0,
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

    /// Whether the next command is queued as it comes. If so, everything collected is queued before it.
    fn passes(&self, state: &mut State<E::Graph>) -> Result<bool, Cause> {
        if !state.refused && state.rest == 0 {
            return Ok(false);
        }
        self.queue(state)?;
        state.rest = state.rest.saturating_sub(1);
        state.counts.commands += 1;
        Ok(true)
    }

    fn collect(&self, command: Command) -> Result<(), Cause> {
        let mut state = self.lock();
        if self.passes(&mut state)? {
            // SAFETY: the caller vouched for the command when it passed it.
            return unsafe { queue_one(&*self.inner, &command) };
        }
        self.collect_more(&mut state, command)
    }

    fn collect_more(&self, state: &mut State<E::Graph>, command: Command) -> Result<(), Cause> {
        state.pending.push(command);
        match state.pending.len() < LONGEST {
            true => Ok(()),
            false => self.queue(state),
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
        if state.pending.is_empty() {
            return Ok(());
        }
        let mut commands = std::mem::take(&mut state.pending);
        let queued = self.queue_run(state, &mut commands);
        // The allocation is used again, unless a graph keeps it.
        commands.clear();
        state.pending = commands;
        queued
    }

    fn queue_run(
        &self,
        state: &mut State<E::Graph>,
        commands: &mut Vec<Command>,
    ) -> Result<(), Cause> {
        state.counts.commands += commands.len() as u64;
        if commands.len() < self.mode.shortest() || state.refused {
            return self.queue_each(commands);
        }
        let mut hasher = DefaultHasher::new();
        commands
            .iter()
            .for_each(|command| command.hash(&mut hasher));
        let key = hasher.finish();
        state.runs += 1;
        let now = state.runs;
        if let Some(kept) = state.graphs.get_mut(&key) {
            // Sequences of equal hashes may differ.
            if kept.commands != *commands {
                return self.queue_each(commands);
            }
            state.fruitless = 0;
            kept.last = now;
            state.counts.replays += 1;
            state.counts.replayed += commands.len() as u64;
            // SAFETY: callers vouched for the equal commands of this sequence.
            return unsafe { self.inner.replay(&kept.graph) };
        }
        if !state.repeats(key) {
            state.fruitless += 1;
            if self.mode == Mode::Auto && state.fruitless >= FRUITLESS {
                state.fruitless = 0;
                state.rest = REST;
                state.seen = Default::default();
            }
            return self.queue_each(commands);
        }
        state.fruitless = 0;
        if !state.make_room(weight(commands)) {
            return self.queue_each(commands);
        }
        // SAFETY: callers vouched for the commands. Their memory is the arena's, which is freed when this is dropped.
        let graph = match unsafe { self.inner.keep(commands) } {
            Ok(graph) => graph,
            Err(cause) if self.mode == Mode::On => return Err(cause),
            Err(_) => {
                state.refused = true;
                return self.queue_each(commands);
            }
        };
        state.counts.graphs += 1;
        state.counts.replays += 1;
        state.counts.replayed += commands.len() as u64;
        state.weight += weight(commands);
        // SAFETY: as above.
        let queued = unsafe { self.inner.replay(&graph) };
        let kept = Kept {
            commands: std::mem::take(commands),
            graph,
            last: now,
        };
        state.graphs.insert(key, kept);
        queued
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
    /// Whether a sequence with this hash was queued before. Remembers the hash.
    fn repeats(&mut self, key: u64) -> bool {
        if self.seen.iter().any(|seen| seen.contains(&key)) {
            return true;
        }
        if self.seen[0].len() >= REMEMBERED {
            self.seen.swap(0, 1);
            self.seen[0].clear();
        }
        self.seen[0].insert(key);
        false
    }

    /// Makes room for a graph of this weight, if graphs that are no longer launched take it.
    fn make_room(&mut self, weight_of_new: usize) -> bool {
        while self.weight + weight_of_new > MOST_WEIGHT {
            let oldest = self.graphs.iter().min_by_key(|(_, kept)| kept.last);
            let Some((&key, kept)) = oldest else {
                return false;
            };
            if self.runs - kept.last < STALE {
                return false;
            }
            self.weight -= weight(&kept.commands);
            self.graphs.remove(&key);
        }
        true
    }
}

// SAFETY: commands reach the inner executor in the order of their calls. All collected commands are queued, under the
// lock, before anything else that has an order.
unsafe impl<E: Graphs> Executor for Replaying<E> {
    fn kind(&self) -> DeviceKind {
        self.inner.kind()
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
        state.seen = Default::default();
        state.graphs.clear();
        state.weight = 0;
        self.inner.free(memory);
    }

    fn compile_ahead(&self, modules: &[Module]) {
        self.inner.compile_ahead(modules);
    }

    fn abandon(&self) {
        // A thread that waits may hold the lock.
        self.inner.abandon();
    }

    fn await_write(&self, bytes: u64) -> Result<(), Cause> {
        self.inner.await_write(bytes)
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        // Other threads queue work meanwhile.
        self.inner.await_write(bytes.len() as u64)?;
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

    unsafe fn upload(&self, uploads: &[Upload<'_>]) -> Result<(), Cause> {
        let _queued = self.queued()?;
        // SAFETY: the caller vouches for the ranges and the events.
        unsafe { self.inner.upload(uploads) }
    }

    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Event) -> Result<(), Cause> {
        // No collected command uses the range. The sequence continues, so its end depends on no other thread's
        // timing.
        // SAFETY: the caller vouches for the range and the event.
        unsafe { self.inner.deliver(to, bytes, behind) }
    }

    unsafe fn register(&self, bytes: &[u8]) -> Result<bool, Cause> {
        // SAFETY: the caller keeps the bytes.
        unsafe { self.inner.register(bytes) }
    }

    fn unregister(&self, bytes: &[u8]) -> bool {
        self.inner.unregister(bytes)
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
        let mut state = self.lock();
        if self.passes(&mut state)? {
            // SAFETY: the caller vouches for the addresses.
            return unsafe { self.inner.launch(launch) };
        }
        self.collect_more(&mut state, Command::Launch(launch.clone()))
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
            Lane::Compute | Lane::Boundary => Some(self.queued()?),
            Lane::Communication => None,
        };
        self.inner_peers()?.mark(lane)
    }

    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause> {
        let _queued = match lane {
            Lane::Compute | Lane::Boundary => Some(self.queued()?),
            Lane::Communication => None,
        };
        self.inner_peers()?.await_mark(lane, peer, of, number)
    }

    fn await_own(&self, number: u64) -> Result<(), Cause> {
        self.inner_peers()?.await_own(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device_kind::AttentionBackward;
    use std::sync::atomic::AtomicU64;
    use std::sync::{OnceLock, Weak};

    /// Executor that counts what reaches it. A graph is the number of its commands.
    #[derive(Debug, Default)]
    struct Counting {
        queued: AtomicU64,
        wrapper: OnceLock<Weak<Replaying<Self>>>,
        free_while_waiting: AtomicBool,
    }

    // SAFETY: no memory exists.
    unsafe impl Executor for Counting {
        fn kind(&self) -> DeviceKind {
            DeviceKind {
                multiprocessors: 1,
                compute_capability: None,
                has_library: false,
                attention_backward: AttentionBackward::Split,
            }
        }

        fn allocate(&self, _: u64) -> Result<Address, Cause> {
            Ok(Address::NULL)
        }

        fn free(&self, _: Address) {}

        fn await_write(&self, _: u64) -> Result<(), Cause> {
            let wrapper = self.wrapper.get().and_then(Weak::upgrade);
            let free = wrapper.is_some_and(|wrapper| wrapper.state.try_lock().is_ok());
            self.free_while_waiting.store(free, Ordering::Relaxed);
            Ok(())
        }

        unsafe fn write(&self, _: Address, _: &[u8]) -> Result<(), Cause> {
            Ok(())
        }

        unsafe fn read(&self, _: Address, _: &mut [u8]) -> Result<(), Cause> {
            Ok(())
        }

        unsafe fn zero(&self, _: Address, _: u64) -> Result<(), Cause> {
            self.queued.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        unsafe fn copy(&self, _: Address, _: Address, _: u64) -> Result<(), Cause> {
            Ok(())
        }

        fn record_event(&self) -> Result<Event, Cause> {
            Ok(Arc::new(()))
        }

        unsafe fn upload(&self, _: &[Upload<'_>]) -> Result<(), Cause> {
            Ok(())
        }

        unsafe fn deliver(&self, _: Address, _: &[u8], _: &Event) -> Result<(), Cause> {
            Ok(())
        }

        fn delivered(&self) -> Result<Event, Cause> {
            self.record_event()
        }

        unsafe fn fetch(
            &self,
            _: Address,
            _: u64,
            _: &Event,
            _: &mut Take<'_>,
        ) -> Result<(), Cause> {
            Ok(())
        }

        unsafe fn launch(&self, _: &Launch) -> Result<(), Cause> {
            Ok(())
        }
    }

    // SAFETY: as above.
    unsafe impl Graphs for Counting {
        type Graph = u64;

        unsafe fn keep(&self, commands: &[Command]) -> Result<u64, Cause> {
            Ok(commands.len() as u64)
        }

        unsafe fn replay(&self, graph: &u64) -> Result<(), Cause> {
            self.queued.fetch_add(*graph, Ordering::Relaxed);
            Ok(())
        }
    }

    fn replaying() -> Arc<Replaying<Counting>> {
        let replaying = Arc::new(Replaying::<Counting>::new(Arc::default(), Mode::Auto));
        let weak = Arc::downgrade(&replaying);
        replaying.inner.wrapper.set(weak).expect("set once");
        replaying
    }

    /// Queues sequence `run`, of this many commands.
    fn queue(replaying: &Replaying<Counting>, run: u64, commands: u64) {
        for i in 0..commands {
            // SAFETY: no memory exists.
            unsafe { replaying.zero(Address(run * 1000 + i), 1) }.expect("collected");
        }
        replaying.record_event().expect("queued");
    }

    /// A step has more sequences than a small cache of graphs would hold, in the same order each time.
    #[test]
    fn the_sequences_of_a_large_model_are_captured_once_and_launched_in_every_step() {
        let replaying = replaying();
        let (steps, runs, commands) = (5, 1000, 10);
        for _ in 0..steps {
            (0..runs).for_each(|run| queue(&replaying, run, commands));
        }
        let counts = replaying.counts();
        assert_eq!((counts.graphs, counts.replays), (runs, (steps - 1) * runs));
        assert_eq!(counts.commands, steps * runs * commands);
        let queued = replaying.inner.queued.load(Ordering::Relaxed);
        assert_eq!(queued, counts.commands);
    }

    /// The graphs of a step that do not all fit stay as they are, and are launched in every step.
    #[test]
    fn graphs_that_do_not_fit_displace_no_others() {
        let replaying = replaying();
        let (runs, commands) = (200, 250);
        let fit = (MOST_WEIGHT / (commands as usize + GRAPH_WEIGHT)) as u64;
        assert!(fit < runs);
        for step in 0..4 {
            (0..runs).for_each(|run| queue(&replaying, run, commands));
            let counts = replaying.counts();
            assert_eq!(counts.graphs, fit.min(step * runs), "step {step}");
            assert_eq!(counts.replays, step * fit, "step {step}");
        }
        // Another model's graphs take the place of those that are no longer launched.
        replaying.lock().runs += STALE;
        for _ in 0..2 {
            (0..100).for_each(|run| queue(&replaying, 1000 + run, commands));
        }
        assert_eq!(replaying.counts().graphs, fit + 100);
        assert!(replaying.lock().weight <= MOST_WEIGHT);
    }

    #[test]
    fn commands_that_never_repeat_are_not_collected_for_long() {
        let replaying = replaying();
        for run in 0..u64::from(FRUITLESS) {
            queue(&replaying, run, 8);
        }
        let queued = || replaying.inner.queued.load(Ordering::Relaxed);
        let before = queued();
        // SAFETY: no memory exists.
        unsafe { replaying.zero(Address(1), 1) }.expect("queued");
        assert_eq!(queued(), before + 1, "queued as it comes");
        assert_eq!(replaying.counts().commands, queued());
        // Later sequences are looked at again.
        replaying.lock().rest = 0;
        for _ in 0..3 {
            queue(&replaying, 7, 8);
        }
        assert_eq!(replaying.counts().replays, 2);
    }

    #[test]
    fn a_write_waits_for_its_chunk_without_the_lock() {
        let replaying = replaying();
        // SAFETY: no memory exists.
        unsafe { replaying.write(Address(1), &[1]) }.expect("written");
        assert!(replaying.inner.free_while_waiting.load(Ordering::Relaxed));
    }
}
