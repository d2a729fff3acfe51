//! Several emulated GPUs that read each other's memory. Each has three lanes: compute, copies from the host, and
//! communication with the other GPUs.
//!
//! Timing that a driver leaves open is decided here. Copies run as soon as they may (*early*) or only when somebody
//! waits for them (*late*), and compute always runs late. Or every lane proceeds at random times drawn from a seed, or
//! one lane races ahead of the others. So a missing wait reads data that is not yet written or already overwritten.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::executor::give_in_pieces;
use kernels::Lane;
use kernels::cuda::backend::graphs::{self, Graphs};
use kernels::cuda::backend::{
    Cause, Event, Executor, GroupExecutor, PeerExecutor, Take, Upload, filling,
};
use kernels::cuda::device_kind::DeviceKind;
use kernels::cuda::launch::{Address, Launch};

use crate::draws::Draws;
use crate::emulator::{Emulator, Order};
use crate::executor::Library;
use crate::machine::{Buffer, Machine};

/// Largest number of waiting compute commands, since they own copies of the data they write.
const QUEUE: usize = 512;

/// The lanes of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Kernels, and what they read and write.
    Compute,
    /// Copies from the host.
    Inward,
    /// Exchange with the other GPUs.
    Communication,
}

impl Stream {
    /// All lanes.
    pub const ALL: [Self; 3] = [Self::Compute, Self::Inward, Self::Communication];
}

impl From<Lane> for Stream {
    fn from(lane: Lane) -> Self {
        match lane {
            Lane::Compute | Lane::Boundary => Self::Compute,
            Lane::Communication => Self::Communication,
        }
    }
}

/// Time at which copies run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// As soon as their waits are satisfied.
    Early,
    /// When somebody waits for them.
    Late,
    /// At random times between the two, like the other commands of the lanes. Each seed gives another timing.
    Drawn(u64),
    /// When somebody waits for them, as every other command. The exception is this lane of GPU 0: it runs a command as soon
    /// as the command's own waits are satisfied, so it overtakes every lane that it does not wait for.
    Racing(Stream),
}

/// A missing wait of one lane for another, which must change the bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lost {
    /// Copies from the host do not wait for the last use of their range.
    Uses,
    /// Communication does not wait for copies from the host.
    Puts,
    /// Communication does not wait for this GPU's compute.
    Own,
    /// A lane does not wait for a lane of another GPU.
    Marks(Lane, Lane),
    /// Compute does not wait for data from other GPUs.
    ReservedUploads,
    /// Communication does not wait for weights updated at the same time.
    Deliveries,
}

/// A failure when a GPU joins others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// The driver does not open memory of other ranks.
    Refuses,
    /// It opens other memory than the requested one.
    OpensOther,
    /// It never joins the library's process group.
    StaysAway,
    /// Its library has another version, [`OTHER_VERSION`].
    OtherVersion,
}

/// Version of the library that forms process groups.
pub const VERSION: &str = "2.27.5";
/// See [`Trouble::OtherVersion`].
pub const OTHER_VERSION: &str = "2.26.2";

/// Error text of a driver that refuses.
pub const REFUSAL: &str = "mapping GPU memory of another rank failed: CUDA_ERROR_MAP_FAILED";

/// One of the GPUs.
#[derive(Debug)]
pub struct LinkedGpu {
    node: Arc<Node>,
    index: usize,
    copies: Copies,
    trouble: Option<Trouble>,
    lost: Option<Lost>,
}

/// Shared state of the GPUs of a node.
#[derive(Debug)]
struct Node {
    devices: Mutex<Vec<Device>>,
    /// Notified when a rank reaches a collective of the process group.
    came: Condvar,
}

#[derive(Debug)]
struct Device {
    machine: Emulator,
    buffers: Vec<Buffer>,
    shared: Option<Address>,
    lanes: [Queue; 3],
    /// By [`Lane`]: number of commands in its queue before each mark, by the mark's number - 1.
    marks: [Vec<u64>; 3],
    /// Source of random times.
    draws: Option<Draws>,
    /// Device index of each rank.
    members: Vec<usize>,
    pulled_bytes: u64,
    put_bytes: u64,
    /// Bytes pulled since compute last waited for them, and bytes that overlapped with compute.
    coming_bytes: u64,
    beside_bytes: u64,
    /// For each collective: the memory of this GPU, and its communication commands before and after it.
    brought: Vec<Brought>,
}

#[derive(Clone, Copy, Debug)]
struct Brought {
    offset: u64,
    before: u64,
    behind: Option<u64>,
}

#[derive(Debug, Default)]
struct Queue {
    commands: VecDeque<Command>,
    queued: u64,
    done: u64,
    /// Whether it is at a command that waits for another lane.
    waiting: bool,
}

#[derive(Debug)]
enum Command {
    Launch(Box<Launch>),
    Write(Address, Vec<u8>),
    Zero(Address, u64),
    Copy(Address, Address, u64),
    Pull {
        device: usize,
        offset: u64,
        to: Address,
        bytes: u64,
    },
    /// The f32 sum over offsets of devices' shared memory, in rank order.
    Sum {
        from: Vec<(usize, u64)>,
        to: Address,
        elems: u64,
    },
    /// Wait until a lane of a device has finished so many commands.
    Await(usize, Stream, u64),
}

impl Device {
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

/// Executes the commands of a lane, and those they wait for, until `count` are finished.
fn run(devices: &mut [Device], at: usize, lane: Stream, count: u64) -> Result<(), Cause> {
    loop {
        let queue = &mut devices[at].lanes[lane as usize];
        if queue.done >= count {
            return Ok(());
        }
        if queue.waiting {
            return Err(format!("{lane:?} of GPU {at} waits for itself").into());
        }
        let Some(command) = queue.commands.pop_front() else {
            return Err(format!("{lane:?} of GPU {at} waits for work that nobody queued").into());
        };
        let device = &mut devices[at];
        match command {
            Command::Launch(launch) => device.machine.launch(&launch)?,
            Command::Write(to, bytes) => device.write(to, &bytes)?,
            Command::Zero(at, bytes) => device.write(at, &vec![0; bytes as usize])?,
            Command::Copy(from, to, bytes) => {
                let bytes = device.read(from, bytes as usize)?;
                device.write(to, &bytes)?;
            }
            Command::Pull {
                device: peer,
                offset,
                to,
                bytes,
            } => {
                let start = devices[peer].shared.ok_or("a GPU that shares nothing")?;
                let from = Address(start.0 + offset);
                let bytes = devices[peer].read(from, bytes as usize)?;
                devices[at].write(to, &bytes)?;
            }
            Command::Sum { from, to, elems } => {
                let mut sum: Vec<f32> = Vec::new();
                for (peer, offset) in from {
                    let start = devices[peer].shared.ok_or("a GPU that shares nothing")?;
                    let bytes =
                        devices[peer].read(Address(start.0 + offset), 4 * elems as usize)?;
                    let values: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
                    if sum.is_empty() {
                        sum = values;
                    } else {
                        sum.iter_mut().zip(values).for_each(|(s, x)| *s += x);
                    }
                }
                devices[at].write(to, bytemuck::cast_slice(&sum))?;
            }
            Command::Await(other, of, commands) => {
                devices[at].lanes[lane as usize].waiting = true;
                run(devices, other, of, commands)?;
                devices[at].lanes[lane as usize].waiting = false;
            }
        }
        devices[at].lanes[lane as usize].done += 1;
    }
}

impl LinkedGpu {
    /// `count` GPUs on one node.
    #[must_use]
    pub fn node(count: usize, order: Order, copies: Copies) -> Vec<Self> {
        let draws = |index| match copies {
            Copies::Early | Copies::Late | Copies::Racing(_) => None,
            Copies::Drawn(seed) => Some(Draws::new(seed, &format!("GPU {index}"))),
        };
        let device = |index| Device {
            machine: Emulator::of_passes(order),
            buffers: Vec::new(),
            shared: None,
            lanes: Default::default(),
            marks: Default::default(),
            draws: draws(index),
            members: Vec::new(),
            pulled_bytes: 0,
            put_bytes: 0,
            coming_bytes: 0,
            beside_bytes: 0,
            brought: Vec::new(),
        };
        let node = Arc::new(Node {
            devices: Mutex::new((0..count).map(device).collect()),
            came: Condvar::new(),
        });
        let gpu = |index| Self {
            node: node.clone(),
            index,
            copies,
            trouble: None,
            lost: None,
        };
        (0..count).map(gpu).collect()
    }

    /// The same GPU with a failure.
    #[must_use]
    pub fn with_trouble(self, trouble: Trouble) -> Self {
        Self {
            trouble: Some(trouble),
            ..self
        }
    }

    /// The same GPU without this wait. All accesses of its kernels are checked, since late data leaves arbitrary row
    /// numbers.
    #[must_use]
    pub fn without(self, lost: Lost) -> Self {
        self.lock()[self.index].machine = Emulator::new(Order::Ascending);
        Self {
            lost: Some(lost),
            ..self
        }
    }

    /// Bytes from other GPUs, and bytes from the host copied beside compute.
    #[must_use]
    pub fn traffic(&self) -> (u64, u64) {
        let devices = self.lock();
        let own = &devices[self.index];
        (own.pulled_bytes, own.put_bytes)
    }

    /// Bytes from other GPUs that arrived while launches queued after them did not wait for them.
    #[must_use]
    pub fn beside(&self) -> u64 {
        self.lock()[self.index].beside_bytes
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Device>> {
        let devices = self.node.devices.lock();
        devices.unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, devices: &mut [Device], lane: Stream, command: Command) -> Result<(), Cause> {
        let own = &mut devices[self.index];
        match &command {
            Command::Pull { bytes, .. } => own.coming_bytes += bytes,
            Command::Launch(_) => own.beside_bytes += std::mem::take(&mut own.coming_bytes),
            _ => {}
        }
        let queue = &mut devices[self.index].lanes[lane as usize];
        queue.queued += 1;
        queue.commands.push_back(command);
        let queued = queue.queued;
        let own = &mut devices[self.index];
        if let Some(draws) = &mut own.draws
            && draws.moves()
        {
            let lane = Stream::ALL[draws.between(0, 2) as usize];
            let Queue { done, queued, .. } = own.lanes[lane as usize];
            let until = draws.between(done, queued);
            run(devices, self.index, lane, until)?;
        }
        let Queue {
            done, ref commands, ..
        } = devices[self.index].lanes[lane as usize];
        let soon = match self.copies {
            Copies::Early => lane != Stream::Compute,
            Copies::Racing(first) => self.index == 0 && lane == first,
            Copies::Late | Copies::Drawn(_) => false,
        };
        match lane {
            _ if soon => run(devices, self.index, lane, queued),
            Stream::Compute if commands.len() > QUEUE => run(devices, self.index, lane, done + 1),
            _ => Ok(()),
        }
    }

    fn queue(&self, lane: Stream, command: Command) -> Result<(), Cause> {
        self.push(&mut self.lock(), lane, command)
    }

    fn inward(&self, to: Address, bytes: &[u8], behind: Option<&Event>) -> Result<(), Cause> {
        let mut devices = self.lock();
        if let Some(behind) = behind {
            let (lane, count) = point(behind)?;
            let wait = Command::Await(self.index, lane, count);
            self.push(&mut devices, Stream::Inward, wait)?;
        }
        devices[self.index].put_bytes += bytes.len() as u64;
        self.push(
            &mut devices,
            Stream::Inward,
            Command::Write(to, bytes.to_vec()),
        )
    }

    /// A lane waits for everything queued in another lane.
    fn follow(&self, lane: Stream, other: Stream) -> Result<(), Cause> {
        let mut devices = self.lock();
        let queued = devices[self.index].lanes[other as usize].queued;
        self.push(
            &mut devices,
            lane,
            Command::Await(self.index, other, queued),
        )
    }

    /// A lane waits for an event of a rank.
    fn follow_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause> {
        let mut devices = self.lock();
        let device = Self::device_of(&devices, self.index, peer)?;
        let marks = &devices[device].marks[of as usize];
        let (lane, of) = (Stream::from(lane), Stream::from(of));
        // An event that was never recorded makes nobody wait.
        let count = match number {
            0 => 0,
            number => *marks.get(number as usize - 1).unwrap_or(&0),
        };
        self.push(&mut devices, lane, Command::Await(device, of, count))
    }

    fn device_of(devices: &[Device], index: usize, peer: usize) -> Result<usize, Cause> {
        let member = devices[index].members.get(peer).copied();
        member.ok_or_else(|| format!("rank {peer} has not joined").into())
    }
}

/// The lane of an event, and the number of its commands before the event.
fn point(event: &Event) -> Result<(Stream, u64), Cause> {
    let point = event.downcast_ref::<(Stream, u64)>();
    point
        .copied()
        .ok_or_else(|| "an event of another device".into())
}

// SAFETY: commands of a graph are queued one by one, in order.
unsafe impl Graphs for LinkedGpu {
    type Graph = Vec<graphs::Command>;

    unsafe fn keep(&self, commands: &[graphs::Command]) -> Result<Self::Graph, Cause> {
        Ok(commands.to_vec())
    }

    unsafe fn replay(&self, graph: &Self::Graph) -> Result<(), Cause> {
        let mut commands = graph.iter();
        // SAFETY: the caller vouches for the commands.
        commands.try_for_each(|command| unsafe { graphs::queue_one(self, command) })
    }
}

// SAFETY: buffers live as long as the machine. Commands run in order, an upload as the trait documents.
unsafe impl Executor for LinkedGpu {
    fn kind(&self) -> DeviceKind {
        Library::Absent.kind()
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        let mut devices = self.lock();
        let own = &mut devices[self.index];
        let buffer = own.machine.allocate(bytes as usize)?;
        own.buffers.push(buffer);
        Ok(buffer.address)
    }

    fn free(&self, memory: Address) {
        let mut devices = self.lock();
        // As a driver does, after the commands on it. A failed command has already failed its reader.
        for lane in Stream::ALL {
            let queued = devices[self.index].lanes[lane as usize].queued;
            run(&mut devices, self.index, lane, queued).ok();
        }
        devices[self.index].buffers.retain(|b| b.address != memory);
        self.node.came.notify_all();
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.queue(Stream::Compute, Command::Write(to, bytes.to_vec()))
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        let behind = self.record_event()?;
        // SAFETY: the caller vouches for the range.
        unsafe { self.fetch(from, bytes.len() as u64, &behind, &mut filling(bytes)) }
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.queue(Stream::Compute, Command::Zero(at, bytes))
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.queue(Stream::Compute, Command::Copy(from, to, bytes))
    }

    fn record_event(&self) -> Result<Event, Cause> {
        let devices = self.lock();
        let queued = devices[self.index].lanes[Stream::Compute as usize].queued;
        Ok(Arc::new((Stream::Compute, queued)))
    }

    unsafe fn upload(&self, uploads: &[Upload<'_>]) -> Result<(), Cause> {
        for Upload { to, bytes, behind } in uploads {
            self.inward(*to, bytes, behind.as_ref())?;
        }
        self.follow(Stream::Compute, Stream::Inward)
    }

    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Event) -> Result<(), Cause> {
        self.inward(to, bytes, Some(behind))
    }

    fn delivered(&self) -> Result<Event, Cause> {
        let queued = self.lock()[self.index].lanes[Stream::Inward as usize].queued;
        self.follow(Stream::Compute, Stream::Inward)?;
        Ok(Arc::new((Stream::Inward, queued)))
    }

    unsafe fn fetch(
        &self,
        from: Address,
        bytes: u64,
        behind: &Event,
        take: &mut Take<'_>,
    ) -> Result<(), Cause> {
        let mut devices = self.lock();
        let (lane, count) = point(behind)?;
        run(&mut devices, self.index, lane, count)?;
        let there = devices[self.index].read(from, bytes as usize)?;
        drop(devices);
        give_in_pieces(&there, take);
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        self.queue(Stream::Compute, Command::Launch(Box::new(launch.clone())))
    }

    fn peers(&self) -> Option<&dyn PeerExecutor> {
        Some(self)
    }

    fn group(&self) -> Option<&dyn GroupExecutor> {
        Some(self)
    }
}

impl PeerExecutor for LinkedGpu {
    fn name(&self, memory: Address) -> Result<Vec<u8>, Cause> {
        self.lock()[self.index].shared = Some(memory);
        Ok(self.index.to_le_bytes().to_vec())
    }

    fn join(&self, rank: usize, names: &[Vec<u8>], _: Duration) -> Result<(), Cause> {
        let index = |name: &Vec<u8>| Ok(usize::from_le_bytes(name.as_slice().try_into()?));
        let mut members: Vec<usize> = names.iter().map(index).collect::<Result<_, Cause>>()?;
        match self.trouble {
            Some(Trouble::Refuses) => {
                let peer = usize::from(rank == 0);
                return Err(format!("rank {peer}: {REFUSAL}").into());
            }
            Some(Trouble::OpensOther) => members.fill(self.index),
            Some(Trouble::StaysAway | Trouble::OtherVersion) | None => {}
        }
        self.lock()[self.index].members = members;
        Ok(())
    }

    fn incoming_behind(&self, event: &Event) -> Result<(), Cause> {
        if self.lost == Some(Lost::Uses) {
            return Ok(());
        }
        let (lane, behind) = point(event)?;
        let wait = || Command::Await(self.index, lane, behind);
        if lane == Stream::Inward {
            if self.lost == Some(Lost::Deliveries) {
                return Ok(());
            }
        } else {
            self.queue(Stream::Inward, wait())?;
        }
        self.queue(Stream::Communication, wait())
    }

    unsafe fn put(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.inward(to, bytes, None)?;
        match self.lost {
            Some(Lost::Puts) => Ok(()),
            _ => self.follow(Stream::Communication, Stream::Inward),
        }
    }

    unsafe fn clear(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.queue(Stream::Communication, Command::Zero(at, bytes))
    }

    unsafe fn take(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.queue(Stream::Communication, Command::Copy(from, to, bytes))
    }

    unsafe fn pull(&self, peer: usize, offset: u64, to: Address, bytes: u64) -> Result<(), Cause> {
        let mut devices = self.lock();
        let device = Self::device_of(&devices, self.index, peer)?;
        if device != self.index {
            devices[self.index].pulled_bytes += bytes;
        }
        let pull = Command::Pull {
            device,
            offset,
            to,
            bytes,
        };
        self.push(&mut devices, Stream::Communication, pull)
    }

    fn arrive(&self) -> Result<(), Cause> {
        self.lock()[self.index].coming_bytes = 0;
        match self.lost {
            Some(Lost::ReservedUploads) => Ok(()),
            _ => self.follow(Stream::Compute, Stream::Communication),
        }
    }

    fn mark(&self, lane: Lane) -> Result<u64, Cause> {
        let mut devices = self.lock();
        let device = &mut devices[self.index];
        let marks = &mut device.marks[lane as usize];
        marks.push(device.lanes[Stream::from(lane) as usize].queued);
        Ok(marks.len() as u64)
    }

    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause> {
        match self.lost {
            Some(lost) if lost == Lost::Marks(lane, of) => Ok(()),
            _ => self.follow_mark(lane, peer, of, number),
        }
    }

    fn await_own(&self, number: u64) -> Result<(), Cause> {
        match self.lost {
            Some(Lost::Own) => Ok(()),
            _ => self.follow_mark(Lane::Communication, self.rank()?, Lane::Compute, number),
        }
    }
}

impl LinkedGpu {
    /// Its rank among those that joined.
    fn rank(&self) -> Result<usize, Cause> {
        let devices = self.lock();
        let mut members = devices[self.index].members.iter();
        let rank = members.position(|member| *member == self.index);
        rank.ok_or_else(|| "no rank has joined".into())
    }

    /// Waits until a member acts in the process group. It is an error if a member has left.
    fn wait_for<'a>(
        &self,
        devices: MutexGuard<'a, Vec<Device>>,
        members: &[usize],
    ) -> Result<MutexGuard<'a, Vec<Device>>, Cause> {
        let gone = |member: &&usize| devices[**member].buffers.is_empty();
        if let Some(gone) = members.iter().find(gone) {
            return Err(format!("GPU {gone} has left the group").into());
        }
        let devices = self.node.came.wait(devices);
        Ok(devices.unwrap_or_else(PoisonError::into_inner))
    }

    /// Brings memory to the next collective of the process group and waits on the host until all ranks have done so.
    /// `queue` queues this rank's commands; it gets the ranks' devices and the offset of each one's memory. A
    /// collective is finished when all ranks have read the others' memory, as in the real library.
    fn collective(
        &self,
        at: Address,
        queue: impl Fn(&Self, &mut [Device], &[(usize, u64)]) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let mut devices = self.lock();
        let own = &mut devices[self.index];
        let sequence = own.brought.len();
        let start = own.shared.ok_or("a GPU that shares nothing")?;
        own.brought.push(Brought {
            offset: at.0 - start.0,
            before: own.lanes[Stream::Communication as usize].queued,
            behind: None,
        });
        self.node.came.notify_all();
        let members = own.members.clone();
        let all = |devices: &[Device], is: fn(&Brought) -> bool| {
            let mut members = members.iter();
            members.all(|member| devices[*member].brought.get(sequence).is_some_and(is))
        };
        while !all(&devices, |_| true) {
            devices = self.wait_for(devices, &members)?;
        }
        let mut places = Vec::new();
        for member in &members {
            let Brought { offset, before, .. } = devices[*member].brought[sequence];
            places.push((*member, offset));
            self.push(
                &mut devices,
                Stream::Communication,
                Command::Await(*member, Stream::Communication, before),
            )?;
        }
        queue(self, &mut devices, &places)?;
        let behind = devices[self.index].lanes[Stream::Communication as usize].queued;
        devices[self.index].brought[sequence].behind = Some(behind);
        self.node.came.notify_all();
        while !all(&devices, |brought| brought.behind.is_some()) {
            devices = self.wait_for(devices, &members)?;
        }
        for member in members {
            let behind = devices[member].brought[sequence].behind.unwrap_or(0);
            if member != self.index {
                self.push(
                    &mut devices,
                    Stream::Communication,
                    Command::Await(member, Stream::Communication, behind),
                )?;
            }
        }
        Ok(())
    }
}

impl GroupExecutor for LinkedGpu {
    fn version(&self) -> Result<String, Cause> {
        Ok(match self.trouble {
            Some(Trouble::OtherVersion) => OTHER_VERSION,
            _ => VERSION,
        }
        .into())
    }

    fn id(&self) -> Result<Vec<u8>, Cause> {
        Ok(vec![1])
    }

    fn join(&self, id: &[u8], _: usize, size: usize, deadline: Duration) -> Result<(), Cause> {
        if *id != [1] {
            return Err("the name of no group".into());
        }
        if self.trouble == Some(Trouble::StaysAway) {
            return Err("the network is down".into());
        }
        let mut devices = self.lock();
        let own = &mut devices[self.index];
        own.members = (0..size).collect();
        own.shared = own.buffers.first().map(|buffer| buffer.address);
        self.node.came.notify_all();
        let missing = |devices: &mut Vec<Device>| devices.iter().any(|d| d.members.len() < size);
        let waited = self
            .node
            .came
            .wait_timeout_while(devices, deadline, missing);
        let (devices, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match devices.iter().position(|d| d.members.len() < size) {
            Some(absent) => Err(format!("GPU {absent} has not come after {deadline:?}").into()),
            None => Ok(()),
        }
    }

    fn size(&self) -> usize {
        self.lock()[self.index].members.len()
    }

    unsafe fn all_gather(&self, whole: Address, part: u64) -> Result<(), Cause> {
        self.collective(whole, |own, devices, places| {
            for (rank, (device, offset)) in places.iter().enumerate() {
                let at = rank as u64 * part;
                if *device != own.index {
                    devices[own.index].pulled_bytes += part;
                    let pull = Command::Pull {
                        device: *device,
                        offset: offset + at,
                        to: Address(whole.0 + at),
                        bytes: part,
                    };
                    own.push(devices, Stream::Communication, pull)?;
                }
            }
            Ok(())
        })
    }

    unsafe fn reduce_scatter(&self, from: Address, to: Address, elems: u64) -> Result<(), Cause> {
        let rank = self.rank()? as u64;
        self.collective(from, |own, devices, places| {
            devices[own.index].pulled_bytes += (places.len() as u64 - 1) * 4 * elems;
            let from = places.iter();
            let from = from.map(|(device, offset)| (*device, offset + 4 * rank * elems));
            let from = from.collect();
            own.push(
                devices,
                Stream::Communication,
                Command::Sum { from, to, elems },
            )
        })
    }
}
