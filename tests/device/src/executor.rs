//! The emulator as what a [`CudaBackend`] works on.
//!
//! Work is executed as late as it may be: when somebody looks. So a copy beside the queue really runs before what was
//! queued earlier and need not wait for it (ascending order), or behind all of that (every other order), and a fetch
//! sees nothing that was queued after its moment. With [`Delays`] every one of these moments is drawn from a seed, within
//! what events allow: what a device may do on any day must leave the same bits.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kernels::DeviceSpan;
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::graphs::{self, Graphs, Mode, Replaying};
use kernels::cuda::backend::{Cause, Executor, Moment, Take};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::Multiply;

use crate::clock::Clock;
use crate::draws::Draws;
use crate::emulator::{Emulator, Order};
use crate::machine::{Buffer, Machine};

/// Multiprocessors that launches are cut for: few, so that small work makes several rounds.
pub const MULTIPROCESSORS: u32 = 4;

/// A backend on an emulated GPU with `bytes` of memory.
///
/// # Errors
/// When there is no such room.
pub fn emulated_backend(bytes: u64, order: Order) -> kernels::Result<CudaBackend> {
    CudaBackend::new(Arc::new(EmulatedGpu::new(order)), bytes)
}

/// As [`emulated_backend`], on a GPU with this library.
///
/// # Errors
/// When there is no such room.
pub fn emulated_backend_with(
    bytes: u64,
    order: Order,
    library: Library,
) -> kernels::Result<CudaBackend> {
    let gpu = EmulatedGpu::new(order).with_library(library);
    CudaBackend::new(Arc::new(gpu), bytes)
}

/// A backend on `gpu` with `bytes` of memory, that queues graphs as `mode` says, and what tells how many it did.
///
/// # Errors
/// When there is no such room.
pub fn with_graphs(
    gpu: Arc<EmulatedGpu>,
    bytes: u64,
    mode: Mode,
) -> kernels::Result<(CudaBackend, Arc<Replaying<EmulatedGpu>>)> {
    let replaying = Arc::new(Replaying::new(gpu, mode));
    Ok((CudaBackend::new(replaying.clone(), bytes)?, replaying))
}

/// What an emulated GPU has for products.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Library {
    /// Nothing: our own kernels do all.
    Absent,
    /// A library that does every product that it is asked for.
    Multiplies,
    /// A library that has no algorithm for anything.
    Refuses,
}

/// One machine whose buffers belong to one backend.
#[derive(Debug)]
pub struct EmulatedGpu {
    state: Mutex<State>,
    library: Library,
    crossing: Option<Arc<Crossing>>,
    /// Bytes that it gives at most at once.
    room: u64,
}

/// Holds fetches and uploads until one of each is under way: whether two directions of the bus can be busy at once.
#[derive(Debug, Default)]
pub struct Crossing {
    meeting: Mutex<Meeting>,
    came: Condvar,
}

#[derive(Debug, Default)]
struct Meeting {
    /// The first fetch has come: uploads before it have nothing to meet.
    fetches: bool,
    /// What waits for the other direction.
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
    /// How long one waits for the other.
    const PATIENCE: Duration = Duration::from_secs(4);
    /// Waits in vain after which nobody waits.
    const MOST_MISSED: usize = 6;

    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begins(&self, direction: Direction) {
        let mut meeting = self.lock();
        let first = direction == Direction::Fetch && !meeting.fetches;
        meeting.fetches |= first;
        if first || !meeting.fetches || meeting.seen || meeting.missed == Self::MOST_MISSED {
            return;
        }
        if meeting.waiting.is_some_and(|waiting| waiting != direction) {
            meeting.seen = true;
            self.came.notify_all();
            return;
        }
        meeting.waiting = Some(direction);
        let alone = |meeting: &mut Meeting| !meeting.seen;
        let waited = self.came.wait_timeout_while(meeting, Self::PATIENCE, alone);
        let (mut meeting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        meeting.waiting = None;
        meeting.missed += usize::from(!meeting.seen);
    }

    /// Whether an upload and a fetch were under way at once.
    pub fn was_seen(&self) -> bool {
        self.lock().seen
    }
}

/// When works are executed.
#[derive(Debug)]
enum Timing {
    /// As late as they may be; uploads as early as they may.
    EarlyUploads,
    /// All as late as they may be.
    LateUploads,
    /// At moments that are drawn.
    Drawn(Draws, Option<Lost>),
}

/// Moments that are drawn from a seed: how far the device is when the host does something, and where among the queued
/// works a copy beside them runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Another seed is another day.
    pub seed: u64,
    /// An event that is not waited for, on purpose.
    pub lost: Option<Lost>,
}

/// What somebody forgot: other bits must be the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Uploads do not wait for the moment behind the last use of their place.
    Uploads,
    /// What is queued behind an upload does not wait for it.
    Joins,
    /// Fetches do not wait for their moment.
    Fetches,
    /// What is queued does not wait for what was delivered.
    Deliveries,
}

/// Works of the queue that a join that was lost is late by at most.
const LATE: u64 = 16;

#[derive(Debug)]
struct State {
    machine: Emulator,
    buffers: Vec<Buffer>,
    timing: Timing,
    /// Ascending by number; an upload has that of the work it follows.
    queue: VecDeque<(u64, Work)>,
    /// Works queued so far, without uploads: the number of the last.
    queued: u64,
    /// Works that are done.
    done: u64,
    /// Works that were queued when the last labelled ones began: a unit's.
    unit: u64,
    /// Number of the last upload.
    uploaded: u64,
    /// What was delivered and waits until somebody wants it.
    delivering: Vec<Work>,
    uploads: Beside,
    fetches: Beside,
    /// Products by the library.
    multiplied: u64,
    clock: Clock,
}

/// What was copied beside the queue in one direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beside {
    /// Bytes.
    pub bytes: u64,
    /// Those that need not wait for the end of the queue: a device copies them while it computes.
    pub overlapping: u64,
    /// Of uploads, those that need not wait for any work of the unit queued last.
    pub early: u64,
}

impl Beside {
    fn count(&mut self, bytes: usize, overlaps: bool) {
        self.bytes += bytes as u64;
        self.overlapping += u64::from(overlaps) * bytes as u64;
    }
}

#[derive(Debug)]
enum Work {
    Launch(Box<Launch>),
    Write(Address, Vec<u8>),
    Zero(Address, u64),
    Copy(Address, Address, u64),
    Multiply(Box<Multiply>, Address, u64),
}

/// Works that wait at most: they hold copies of what they write.
const QUEUE: usize = 512;

impl State {
    fn push(&mut self, work: Work) -> Result<(), Cause> {
        self.queued += 1;
        self.clock.work(match &work {
            Work::Launch(launch) => launch.grid.iter().map(|n| u64::from(*n)).product(),
            Work::Write(..) | Work::Zero(..) | Work::Copy(..) | Work::Multiply(..) => 1,
        });
        // Only an upload that nobody waits for may have a higher number.
        let place = self
            .queue
            .partition_point(|(other, _)| *other < self.queued);
        self.queue.insert(place, (self.queued, work));
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

    /// Executes all works up to this number.
    fn run_to(&mut self, last: u64) -> Result<(), Cause> {
        self.done = self.done.max(last.min(self.queued));
        while self
            .queue
            .front()
            .is_some_and(|(number, _)| *number <= last)
            && let Some((_, work)) = self.queue.pop_front()
        {
            match work {
                Work::Launch(launch) => self.machine.launch(&launch)?,
                Work::Write(to, bytes) => self.write(to, &bytes)?,
                Work::Zero(at, bytes) => self.write(at, &vec![0; bytes as usize])?,
                Work::Copy(from, to, bytes) => {
                    let bytes = self.read(from, bytes as usize)?;
                    self.write(to, &bytes)?;
                }
                Work::Multiply(product, workspace, bytes) => {
                    self.machine.multiply(&product, workspace, bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Puts what comes from the host into the queue, behind what came before it.
    fn insert(&mut self, number: u64, write: Work) {
        let number = number.max(self.uploaded);
        self.uploaded = number;
        let place = self.queue.partition_point(|(other, _)| *other <= number);
        self.queue.insert(place, (number, write));
    }

    /// Whether what is delivered comes before anybody waits for it.
    fn delivers_now(&mut self) -> bool {
        match &mut self.timing {
            Timing::EarlyUploads => true,
            Timing::LateUploads => false,
            Timing::Drawn(draws, _) => draws.between(0, 1) == 1,
        }
    }

    /// Where an upload that may run from the moment `behind` on stands in the queue.
    fn upload_number(&mut self, behind: u64) -> u64 {
        let (done, queued) = (self.done, self.queued);
        match &mut self.timing {
            Timing::EarlyUploads => behind,
            Timing::LateUploads => queued,
            Timing::Drawn(draws, lost) => match lost {
                Some(Lost::Uploads) => draws.between(done, queued),
                Some(Lost::Joins) => draws.between(behind.max(done), queued + LATE),
                _ => draws.between(behind.max(done), queued),
            },
        }
    }

    /// How far the device is when a fetch behind the moment `behind` reads.
    fn fetch_number(&mut self, behind: u64) -> u64 {
        let (done, queued) = (self.done, self.queued);
        match &mut self.timing {
            Timing::EarlyUploads | Timing::LateUploads => behind,
            Timing::Drawn(draws, lost) => match lost {
                Some(Lost::Fetches) => draws.between(done, queued),
                _ => draws.between(behind.max(done), queued.max(behind)),
            },
        }
    }

    /// The buffer that holds a range, and where in it the range begins.
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

/// Bytes of a piece of what is fetched: small enough that tests have several.
const PIECE_BYTES: usize = 12 << 10;

/// Gives bytes as a ring of chunks does, each behind the other and from memory that is aligned to words.
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
            Order::Ascending => Timing::EarlyUploads,
            _ => Timing::LateUploads,
        };
        Self::timed(order, timing)
    }

    /// The same, every access of whose kernels is looked at whether or not `TESSERA_WATCH=1` asks for it.
    #[must_use]
    pub fn watched(order: Order) -> Self {
        let gpu = Self::new(order);
        gpu.lock().machine = Emulator::new(order);
        gpu
    }

    /// A machine without memory that does everything at some moment at which it may.
    #[must_use]
    pub fn delayed(order: Order, delays: Delays) -> Self {
        Self::timed(
            order,
            Timing::Drawn(Draws::new(delays.seed, "delays"), delays.lost),
        )
    }

    fn timed(order: Order, timing: Timing) -> Self {
        let machine = match &timing {
            // What comes too late leaves numbers of rows that lie anywhere, which only a watched kernel refuses.
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
            multiplied: 0,
            clock: Clock::default(),
        };
        Self {
            state: Mutex::new(state),
            library: Library::Absent,
            crossing: None,
            room: u64::MAX,
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

    /// The same with so many bytes left.
    #[must_use]
    pub fn with_room(mut self, bytes: u64) -> Self {
        self.room = bytes;
        self
    }

    /// Products that went through the library so far.
    pub fn multiplied(&self) -> u64 {
        self.lock().multiplied
    }

    /// What was uploaded so far.
    pub fn uploads(&self) -> Beside {
        self.lock().uploads
    }

    /// What was fetched so far.
    pub fn fetches(&self) -> Beside {
        self.lock().fetches
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Works that are behind.
fn works(moment: &Moment) -> Result<u64, Cause> {
    let works = moment.downcast_ref::<u64>();
    works
        .copied()
        .ok_or_else(|| "a moment of another device".into())
}

// SAFETY: buffers live as long as the machine; works run in their order, an upload as the trait says.
unsafe impl Executor for EmulatedGpu {
    fn multiprocessors(&self) -> u32 {
        MULTIPROCESSORS
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        if bytes > self.room {
            let call = format!("allocating {bytes} bytes on the GPU");
            return Err(format!("{call} failed: CUDA_ERROR_OUT_OF_MEMORY").into());
        }
        let mut state = self.lock();
        // As a run promises: nothing that a step does takes memory of the device.
        if !state.buffers.is_empty() {
            return Err("a device has one arena, which was taken".into());
        }
        let buffer = state.machine.allocate(bytes as usize)?;
        state.buffers.push(buffer);
        Ok(buffer.address)
    }

    fn free(&self, memory: Address) {
        let mut state = self.lock();
        // What is left has no reader. The machine keeps its memory; nothing may use it any more.
        state.queue.clear();
        state.buffers.retain(|b| b.address != memory);
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.lock().push(Work::Write(to, bytes.to_vec()))
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        let mut state = self.lock();
        state.run_to(u64::MAX)?;
        bytes.copy_from_slice(&state.read(from, bytes.len())?);
        Ok(())
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.lock().push(Work::Zero(at, bytes))
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.lock().push(Work::Copy(from, to, bytes))
    }

    fn moment(&self) -> Result<Moment, Cause> {
        Ok(Arc::new(self.lock().queued))
    }

    unsafe fn upload(
        &self,
        to: Address,
        bytes: &[u8],
        behind: Option<&Moment>,
    ) -> Result<(), Cause> {
        if let Some(crossing) = &self.crossing {
            crossing.begins(Direction::Upload);
        }
        let mut state = self.lock();
        let behind = behind.map(works).transpose()?.unwrap_or(0);
        let overlaps = behind < state.queued;
        state.uploads.count(bytes.len(), overlaps);
        let early = overlaps && behind <= state.unit;
        state.uploads.early += u64::from(early) * bytes.len() as u64;
        state.clock.upload(bytes.len(), behind);
        let number = state.upload_number(behind);
        state.insert(number, Work::Write(to, bytes.to_vec()));
        Ok(())
    }

    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Moment) -> Result<(), Cause> {
        let mut state = self.lock();
        let behind = works(behind)?;
        let overlaps = behind < state.queued;
        state.uploads.count(bytes.len(), overlaps);
        state.clock.upload(bytes.len(), behind);
        let write = Work::Write(to, bytes.to_vec());
        if state.delivers_now() {
            let number = state.upload_number(behind);
            state.insert(number, write);
        } else {
            state.delivering.push(write);
        }
        Ok(())
    }

    fn delivered(&self) -> Result<Moment, Cause> {
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
        behind: &Moment,
        take: &mut Take<'_>,
    ) -> Result<(), Cause> {
        if let Some(crossing) = &self.crossing {
            crossing.begins(Direction::Fetch);
        }
        let mut state = self.lock();
        let until = works(behind)?;
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
        self.lock().push(Work::Launch(Box::new(launch.clone())))
    }

    fn multiplies(&self) -> bool {
        self.library != Library::Absent
    }

    unsafe fn multiply(
        &self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool, Cause> {
        if self.library != Library::Multiplies {
            return Ok(false);
        }
        let mut state = self.lock();
        state.multiplied += 1;
        state.push(Work::Multiply(
            Box::new(*product),
            workspace,
            workspace_bytes,
        ))?;
        Ok(true)
    }
}

// SAFETY: works of a graph are queued one by one, in their order.
unsafe impl Graphs for EmulatedGpu {
    type Graph = Vec<graphs::Work>;

    unsafe fn keep(&self, works: &[graphs::Work]) -> Result<Self::Graph, Cause> {
        Ok(works.to_vec())
    }

    unsafe fn replay(&self, graph: &Self::Graph) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the works.
        graph
            .iter()
            .try_for_each(|work| unsafe { graphs::queue_one(self, work) })
    }
}
