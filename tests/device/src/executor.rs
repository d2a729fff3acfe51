//! The emulator as the executor of a [`CudaBackend`].
//!
//! Commands run as late as allowed: when somebody reads their result. So a copy beside the queue runs before earlier
//! commands that it need not wait for (ascending order), or after all of them (other orders). A fetch sees no command
//! queued after its event.
//!
//! With [`Delays`] a seed draws each of these times within the limits of the events. Any timing that a device may have
//! must give the same bits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kernels::DeviceSpan;
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::graphs::{self, Graphs, Mode, Replaying};
use kernels::cuda::backend::{Cause, Event, Executor, Take, Upload};
use kernels::cuda::device_kind::{AttentionBackward, DeviceKind};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::Multiply;

use crate::clock::Clock;
use crate::draws::Draws;
use crate::emulator::{Emulator, Order};
use crate::machine::{Buffer, Machine};

/// Number of multiprocessors that launches are sized for. It is small, so small commands make several rounds.
pub const MULTIPROCESSORS: u32 = 4;

/// A backend on an emulated GPU with `bytes` of memory.
///
/// # Errors
/// When the memory cannot be allocated.
pub fn emulated_backend(bytes: u64, order: Order) -> kernels::Result<CudaBackend> {
    CudaBackend::new(Arc::new(EmulatedGpu::new(order)), bytes)
}

/// As [`emulated_backend`], on a GPU with this library.
///
/// # Errors
/// When the memory cannot be allocated.
pub fn emulated_backend_with(
    bytes: u64,
    order: Order,
    library: Library,
) -> kernels::Result<CudaBackend> {
    let gpu = EmulatedGpu::new(order).with_library(library);
    CudaBackend::new(Arc::new(gpu), bytes)
}

/// A backend on `gpu` with `bytes` of memory that queues graphs as `mode` says, and the counters of its graphs.
///
/// # Errors
/// When the memory cannot be allocated.
pub fn with_graphs(
    gpu: Arc<EmulatedGpu>,
    bytes: u64,
    mode: Mode,
) -> kernels::Result<(CudaBackend, Arc<Replaying<EmulatedGpu>>)> {
    let replaying = Arc::new(Replaying::new(gpu, mode));
    Ok((CudaBackend::new(replaying.clone(), bytes)?, replaying))
}

/// The library for products on an emulated GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Library {
    /// None: our own kernels compute all products.
    Absent,
    /// A library that computes every product of one sum.
    Multiplies,
    /// A library that also computes adapted layers, as on compute capability 9 and 10.
    Adapts,
    /// The same without an algorithm for any product.
    Refuses,
}

impl Library {
    /// Kind of an emulated GPU with this library.
    #[must_use]
    pub const fn kind(self) -> DeviceKind {
        DeviceKind {
            multiprocessors: MULTIPROCESSORS,
            compute_capability: match self {
                Self::Absent | Self::Multiplies => None,
                Self::Adapts | Self::Refuses => Some((9, 0)),
            },
            has_library: !matches!(self, Self::Absent),
            attention_backward: AttentionBackward::Split,
        }
    }
}

/// A machine whose buffers belong to one backend.
#[derive(Debug)]
pub struct EmulatedGpu {
    state: Mutex<State>,
    library: Library,
    attention_backward: AttentionBackward,
    crossing: Option<Arc<Crossing>>,
}

/// Delays fetches and uploads until one of each is in flight. It shows whether both bus directions can be busy at once.
#[derive(Debug, Default)]
pub struct Crossing {
    rendezvous: Mutex<Rendezvous>,
    came: Condvar,
}

#[derive(Debug, Default)]
struct Rendezvous {
    /// Whether the first fetch has come. Uploads before it have no counterpart.
    fetches: bool,
    /// The direction that waits for the other one.
    waiting: Option<Direction>,
    seen: bool,
    missed: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Upload,
    Fetch,
}

impl Crossing {
    /// How long one direction waits for the other.
    const PATIENCE: Duration = Duration::from_secs(4);
    /// Number of failed waits after which no direction waits.
    const MOST_MISSED: usize = 6;

    fn lock(&self) -> MutexGuard<'_, Rendezvous> {
        self.rendezvous
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn begins(&self, direction: Direction) {
        let mut rendezvous = self.lock();
        let first = direction == Direction::Fetch && !rendezvous.fetches;
        rendezvous.fetches |= first;
        if first || !rendezvous.fetches || rendezvous.seen || rendezvous.missed == Self::MOST_MISSED
        {
            return;
        }
        if rendezvous
            .waiting
            .is_some_and(|waiting| waiting != direction)
        {
            rendezvous.seen = true;
            self.came.notify_all();
            return;
        }
        rendezvous.waiting = Some(direction);
        let alone = |rendezvous: &mut Rendezvous| !rendezvous.seen;
        let waited = self
            .came
            .wait_timeout_while(rendezvous, Self::PATIENCE, alone);
        let (mut rendezvous, _) = waited.unwrap_or_else(PoisonError::into_inner);
        rendezvous.waiting = None;
        rendezvous.missed += usize::from(!rendezvous.seen);
    }

    /// Whether an upload and a fetch were in flight at once.
    pub fn was_seen(&self) -> bool {
        self.lock().seen
    }
}

/// Execution times of commands.
#[derive(Debug)]
enum Timing {
    /// Commands as late as allowed, uploads as early as allowed.
    BackwardUploads,
    /// All as late as allowed.
    ForwardUploads,
    /// At random times.
    Drawn(Draws, Option<Lost>),
}

/// Random timing drawn from a seed: the device's progress when the host acts, and the position of a copy among the
/// queued commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Each seed gives another timing.
    pub seed: u64,
    /// An event that nothing waits for, on purpose.
    pub lost: Option<Lost>,
}

/// A missing wait, which must change the bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Uploads do not wait for the event after the last use of their range.
    Uploads,
    /// Commands queued after an upload do not wait for it.
    Joins,
    /// Fetches do not wait for their event.
    Fetches,
    /// Commands do not wait for delivered data.
    Deliveries,
}

/// Number of commands by which an upload without its wait may be late.
const LATE: u64 = 16;

#[derive(Debug)]
struct State {
    machine: Emulator,
    buffers: Vec<Buffer>,
    timing: Timing,
    /// Commands ascending by number. An upload has the number of the command it follows.
    queue: VecDeque<(u64, Command)>,
    /// Commands queued so far, without uploads: the number of the last one.
    queued: u64,
    /// Number of finished commands.
    done: u64,
    /// Number of commands queued when the last label (a unit) began.
    unit: u64,
    /// Number of the last upload.
    uploaded: u64,
    /// Delivered data that waits for its first reader.
    delivering: Vec<Command>,
    uploads: Beside,
    fetches: Beside,
    /// Products computed by the library.
    products: BTreeMap<String, u64>,
    clock: Clock,
}

/// Copies beside the queue in one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beside {
    /// Calls of [`Executor::upload`].
    pub calls: u64,
    /// Copies.
    pub copies: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bytes that need not wait for the end of the queue: a device copies them while it computes.
    pub overlapping: u64,
    /// Bytes of uploads that need not wait for any command of the unit queued last.
    pub early: u64,
}

impl Beside {
    fn count(&mut self, bytes: usize, overlaps: bool) {
        self.copies += 1;
        self.bytes += bytes as u64;
        self.overlapping += u64::from(overlaps) * bytes as u64;
    }
}

#[derive(Debug)]
enum Command {
    Launch(Box<Launch>),
    Write(Address, Vec<u8>),
    Zero(Address, u64),
    Copy(Address, Address, u64),
    Multiply(Box<Multiply>, Address, u64),
}

/// Largest number of waiting commands, since they own copies of the data they write.
const QUEUE: usize = 512;

impl State {
    fn push(&mut self, command: Command) -> Result<(), Cause> {
        self.queued += 1;
        self.clock.command(match &command {
            Command::Launch(launch) => launch.grid.iter().map(|n| u64::from(*n)).product(),
            Command::Write(..) | Command::Zero(..) | Command::Copy(..) | Command::Multiply(..) => 1,
        });
        // Only an upload without its wait may have a higher number.
        let place = self
            .queue
            .partition_point(|(other, _)| *other < self.queued);
        self.queue.insert(place, (self.queued, command));
        if let Timing::Drawn(draws, _) = &mut self.timing
            && draws.moves()
        {
            let until = draws.between(self.done, self.queued);
            self.run_to(until)?;
        }
        if let (true, Some((first, _))) = (self.queue.len() > QUEUE, self.queue.front()) {
            self.run_to(*first)?;
        }
        Ok(())
    }

    /// Executes all commands up to this number.
    fn run_to(&mut self, last: u64) -> Result<(), Cause> {
        self.done = self.done.max(last.min(self.queued));
        while self
            .queue
            .front()
            .is_some_and(|(number, _)| *number <= last)
            && let Some((_, command)) = self.queue.pop_front()
        {
            match command {
                Command::Launch(launch) => self.machine.launch(&launch)?,
                Command::Write(to, bytes) => self.write(to, &bytes)?,
                Command::Zero(at, bytes) => self.write(at, &vec![0; bytes as usize])?,
                Command::Copy(from, to, bytes) => {
                    let bytes = self.read(from, bytes as usize)?;
                    self.write(to, &bytes)?;
                }
                Command::Multiply(product, workspace, bytes) => {
                    self.machine.multiply(&product, workspace, bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Inserts an upload into the queue, after earlier uploads.
    fn insert(&mut self, number: u64, write: Command) {
        let number = number.max(self.uploaded);
        self.uploaded = number;
        let place = self.queue.partition_point(|(other, _)| *other <= number);
        self.queue.insert(place, (number, write));
    }

    /// Whether delivered data arrives before anybody waits for it.
    fn delivers_now(&mut self) -> bool {
        match &mut self.timing {
            Timing::BackwardUploads => true,
            Timing::ForwardUploads => false,
            Timing::Drawn(draws, _) => draws.between(0, 1) == 1,
        }
    }

    /// Queue position of an upload that may run after the first `behind` commands.
    fn upload_number(&mut self, behind: u64) -> u64 {
        let (done, queued) = (self.done, self.queued);
        match &mut self.timing {
            Timing::BackwardUploads => behind,
            Timing::ForwardUploads => queued,
            Timing::Drawn(draws, lost) => match lost {
                Some(Lost::Uploads) => draws.between(done, queued),
                Some(Lost::Joins) => draws.between(behind.max(done), queued + LATE),
                _ => draws.between(behind.max(done), queued),
            },
        }
    }

    /// Progress of the device when a fetch after the first `behind` commands reads.
    fn fetch_number(&mut self, behind: u64) -> u64 {
        let (done, queued) = (self.done, self.queued);
        match &mut self.timing {
            Timing::BackwardUploads | Timing::ForwardUploads => behind,
            Timing::Drawn(draws, lost) => match lost {
                Some(Lost::Fetches) => draws.between(done, queued),
                _ => draws.between(behind.max(done), queued.max(behind)),
            },
        }
    }

    /// The buffer that contains a range, and the range's offset in it.
    fn place(&self, at: Address, bytes: usize) -> Result<(Buffer, usize), Cause> {
        let inside = |buffer: &&Buffer| {
            let end = buffer.address.0 + buffer.len as u64;
            at.0 >= buffer.address.0 && at.0 + bytes as u64 <= end
        };
        let found = self.buffers.iter().find(inside);
        let buffer = found.ok_or_else(|| format!("{at:?} + {bytes} lies in no memory"))?;
        Ok((*buffer, (at.0 - buffer.address.0) as usize))
    }

    fn read(&mut self, at: Address, bytes: usize) -> Result<Vec<u8>, Cause> {
        let (buffer, start) = self.place(at, bytes)?;
        Ok(self.machine.read(buffer, start as isize, bytes)?)
    }

    fn write(&mut self, at: Address, bytes: &[u8]) -> Result<(), Cause> {
        let (buffer, start) = self.place(at, bytes.len())?;
        Ok(self.machine.write_at(buffer, start, bytes)?)
    }
}

/// Bytes of a chunk of a fetch, small enough that tests have several.
const PIECE_BYTES: usize = 12 << 10;

/// Passes bytes on as a ring of chunks does: one after another, from word-aligned memory.
pub(crate) fn give_in_pieces(bytes: &[u8], take: &mut Take<'_>) {
    let mut words = [0u32; PIECE_BYTES / 4];
    for piece in bytes.chunks(PIECE_BYTES) {
        let chunk = &mut bytemuck::cast_slice_mut(&mut words)[..piece.len()];
        chunk.copy_from_slice(piece);
        take(chunk);
    }
}

impl EmulatedGpu {
    /// A machine without memory.
    #[must_use]
    pub fn new(order: Order) -> Self {
        let timing = match order {
            Order::Ascending => Timing::BackwardUploads,
            _ => Timing::ForwardUploads,
        };
        Self::timed(order, timing)
    }

    /// The same machine with all memory accesses checked, with and without `TESSERA_WATCH=1`.
    #[must_use]
    pub fn watched(order: Order) -> Self {
        let gpu = Self::new(order);
        gpu.lock().machine = Emulator::new(order);
        gpu
    }

    /// A machine without memory that executes commands at random allowed times.
    #[must_use]
    pub fn delayed(order: Order, delays: Delays) -> Self {
        Self::timed(
            order,
            Timing::Drawn(Draws::new(delays.seed, "delays"), delays.lost),
        )
    }

    fn timed(order: Order, timing: Timing) -> Self {
        let machine = match &timing {
            // Late data leaves arbitrary row numbers, which only checked kernels refuse.
            Timing::Drawn(_, Some(_)) => Emulator::new(order),
            _ => Emulator::of_passes(order),
        };
        let state = State {
            machine,
            buffers: Vec::new(),
            timing,
            queue: VecDeque::new(),
            queued: 0,
            done: 0,
            unit: 0,
            uploaded: 0,
            delivering: Vec::new(),
            uploads: Beside::default(),
            fetches: Beside::default(),
            products: BTreeMap::new(),
            clock: Clock::default(),
        };
        Self {
            state: Mutex::new(state),
            library: Library::Absent,
            attention_backward: AttentionBackward::Split,
            crossing: None,
        }
    }

    /// The same machine, whose first fetch waits for an upload.
    #[must_use]
    pub fn with_crossing(mut self, crossing: Arc<Crossing>) -> Self {
        self.crossing = Some(crossing);
        self
    }

    /// The same machine with this library.
    #[must_use]
    pub fn with_library(mut self, library: Library) -> Self {
        self.library = library;
        self
    }

    /// The same machine with these kernels of attention's backward.
    #[must_use]
    pub fn with_attention_backward(mut self, kernels: AttentionBackward) -> Self {
        self.attention_backward = kernels;
        self
    }

    /// Memory of another library on the same device, with these bytes.
    ///
    /// # Errors
    /// When the machine lacks memory.
    pub fn foreign(&self, bytes: &[u8]) -> anyhow::Result<Address> {
        let mut state = self.lock();
        let buffer = state.machine.allocate(bytes.len())?;
        state.machine.write(buffer, bytes)?;
        state.buffers.push(buffer);
        Ok(buffer.address)
    }

    /// Number of products computed by the library so far.
    pub fn multiplied(&self) -> u64 {
        self.lock().products.values().sum()
    }

    /// Shape and factors of each product that the library computed so far, and how often.
    pub fn products(&self) -> BTreeMap<String, u64> {
        self.lock().products.clone()
    }

    /// Uploads so far.
    pub fn uploads(&self) -> Beside {
        self.lock().uploads
    }

    /// Fetches so far.
    pub fn fetches(&self) -> Beside {
        self.lock().fetches
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of commands before an event.
fn commands(event: &Event) -> Result<u64, Cause> {
    let commands = event.downcast_ref::<u64>();
    commands
        .copied()
        .ok_or_else(|| "an event of another device".into())
}

// SAFETY: buffers live as long as the machine. Commands run in order, an upload as the trait documents.
unsafe impl Executor for EmulatedGpu {
    fn kind(&self) -> DeviceKind {
        DeviceKind {
            attention_backward: self.attention_backward,
            ..self.library.kind()
        }
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        let mut state = self.lock();
        // The trait promises that no step allocates device memory.
        if !state.buffers.is_empty() {
            return Err("a device has one arena, which was taken".into());
        }
        let buffer = state.machine.allocate(bytes as usize)?;
        state.buffers.push(buffer);
        Ok(buffer.address)
    }

    fn free(&self, memory: Address) {
        let mut state = self.lock();
        // Remaining commands have no reader. The machine keeps its memory, and nothing may use it any more.
        state.queue.clear();
        state.buffers.retain(|b| b.address != memory);
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.lock().push(Command::Write(to, bytes.to_vec()))
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        let mut state = self.lock();
        state.run_to(u64::MAX)?;
        bytes.copy_from_slice(&state.read(from, bytes.len())?);
        Ok(())
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.lock().push(Command::Zero(at, bytes))
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.lock().push(Command::Copy(from, to, bytes))
    }

    fn record_event(&self) -> Result<Event, Cause> {
        Ok(Arc::new(self.lock().queued))
    }

    unsafe fn upload(&self, uploads: &[Upload<'_>]) -> Result<(), Cause> {
        if let Some(crossing) = &self.crossing {
            crossing.begins(Direction::Upload);
        }
        let mut state = self.lock();
        state.uploads.calls += 1;
        for Upload { to, bytes, behind } in uploads {
            let behind = behind.as_ref().map(commands).transpose()?.unwrap_or(0);
            let overlaps = behind < state.queued;
            state.uploads.count(bytes.len(), overlaps);
            let early = overlaps && behind <= state.unit;
            state.uploads.early += u64::from(early) * bytes.len() as u64;
            state.clock.upload(bytes.len(), behind);
            let number = state.upload_number(behind);
            state.insert(number, Command::Write(*to, bytes.to_vec()));
        }
        Ok(())
    }

    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Event) -> Result<(), Cause> {
        let mut state = self.lock();
        let behind = commands(behind)?;
        let overlaps = behind < state.queued;
        state.uploads.count(bytes.len(), overlaps);
        state.clock.upload(bytes.len(), behind);
        let write = Command::Write(to, bytes.to_vec());
        if state.delivers_now() {
            let number = state.upload_number(behind);
            state.insert(number, write);
        } else {
            state.delivering.push(write);
        }
        Ok(())
    }

    fn delivered(&self) -> Result<Event, Cause> {
        let mut state = self.lock();
        let queued = state.queued;
        for write in std::mem::take(&mut state.delivering) {
            let number = state.upload_number(queued);
            let lost = matches!(state.timing, Timing::Drawn(_, Some(Lost::Deliveries)));
            let number = number + if lost { LATE } else { 0 };
            state.insert(number, write);
        }
        Ok(Arc::new(state.uploaded))
    }

    unsafe fn fetch(
        &self,
        from: Address,
        bytes: u64,
        behind: &Event,
        take: &mut Take<'_>,
    ) -> Result<(), Cause> {
        if let Some(crossing) = &self.crossing {
            crossing.begins(Direction::Fetch);
        }
        let mut state = self.lock();
        let until = commands(behind)?;
        let overlaps = until < state.queued;
        let bytes = bytes as usize;
        state.fetches.count(bytes, overlaps);
        state.clock.fetch(bytes, until);
        let until = state.fetch_number(until);
        state.run_to(until)?;
        let there = state.read(from, bytes)?;
        drop(state);
        give_in_pieces(&there, take);
        Ok(())
    }

    fn measure(&self, on: bool) -> Result<(), Cause> {
        self.lock().clock.measure(on);
        Ok(())
    }

    fn label(&self, label: Option<u32>) -> Result<(), Cause> {
        let mut state = self.lock();
        if label.is_some() {
            state.unit = state.queued;
        }
        state.clock.label(label);
        Ok(())
    }

    fn measured(&self) -> Result<Vec<DeviceSpan>, Cause> {
        Ok(self.lock().clock.take())
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        self.lock().push(Command::Launch(Box::new(launch.clone())))
    }

    unsafe fn multiply(
        &self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool, Cause> {
        if matches!(self.library, Library::Absent | Library::Refuses) {
            return Ok(false);
        }
        let mut state = self.lock();
        let Multiply {
            shape, alpha, beta, ..
        } = product;
        let key = format!("{shape:?} {alpha} {beta}");
        *state.products.entry(key).or_default() += 1;
        state.push(Command::Multiply(
            Box::new(*product),
            workspace,
            workspace_bytes,
        ))?;
        Ok(true)
    }
}

// SAFETY: commands of a graph are queued one by one, in order.
unsafe impl Graphs for EmulatedGpu {
    type Graph = Vec<graphs::Command>;

    unsafe fn keep(&self, commands: &[graphs::Command]) -> Result<Self::Graph, Cause> {
        Ok(commands.to_vec())
    }

    unsafe fn replay(&self, graph: &Self::Graph) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the commands.
        graph
            .iter()
            .try_for_each(|command| unsafe { graphs::queue_one(self, command) })
    }
}
