//! Ranks started by MPI: frames between copies of the window are MPI messages.
//!
//! One thread of the process makes every call of MPI, so MPI needs no support for threads. It takes frames from a
//! channel, polls for messages, and passes them to their inboxes. Sums are computed by the window in rank order; MPI
//! only transfers bytes.
#![expect(
    unsafe_code,
    reason = "sends that outlive a scope have no safe form in the binding"
)]

use super::mesh::Group;
use super::mirror::{Inbox, Remote, Wire};
use super::{CommError, Communicator, World};
use ::mpi::Threading;
use ::mpi::datatype::Equivalence;
use ::mpi::environment::Universe;
use ::mpi::ffi;
use ::mpi::raw::AsRaw;
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Communicator as _, Source as _};
use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Tag of every message. Messages of one sender arrive in order.
const TAG: i32 = 7;
/// Bytes before a frame: world, sender, receiver.
const HEAD: usize = 8;
/// Pauses of an idle thread: the first soon after the last message, the second later.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(500));
/// Time after the last message during which the short pause applies.
const LIVELY: Duration = Duration::from_millis(5);
/// Longest time for sending the cause of a dead world.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Number of the world of all processes.
const PROCESSES: u32 = 0;

/// Rank of this process and number of processes, as MPI counts them. The first call starts MPI.
///
/// # Errors
/// When MPI cannot be started.
pub fn world() -> Result<World, CommError> {
    Ok(hub()?.world)
}

/// Name and version of the MPI library that this process loaded.
#[must_use]
pub fn library_version() -> String {
    let text = ::mpi::environment::library_version().unwrap_or_default();
    // The package and its build date follow.
    let first = text.split([',', '\n', '\0']).next().unwrap_or_default();
    first.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Joins the communicator of all processes that MPI started together; it may be called once. Each rank's part
/// of the shared window has `region_bytes` bytes, and a wait fails after `deadline`. MPI ends when the
/// communicator is dropped.
///
/// # Errors
/// [`CommError::InvalidWorld`], a refused memory map, or MPI cannot be started.
pub fn join(region_bytes: usize, deadline: Duration) -> Result<Arc<dyn Communicator>, CommError> {
    let hub = hub()?;
    let World { rank, size } = hub.world;
    let wires = Wires {
        hub,
        number: PROCESSES,
        rank,
        processes: (0..size as i32).collect(),
        deadline,
    };
    member(wires, region_bytes)
}

/// Joins a group of the processes that MPI started together, after [`join`]. A wait fails after `deadline`.
///
/// # Errors
/// As [`join`].
pub fn join_group(group: &Group, deadline: Duration) -> Result<Arc<dyn Communicator>, CommError> {
    let wires = Wires {
        hub: hub()?,
        number: PROCESSES + 1 + group.number as u32,
        rank: group.world.rank,
        processes: group.ranks.iter().map(|rank| *rank as i32).collect(),
        deadline,
    };
    member(wires, group.region_bytes)
}

/// A world of ranks in this process, for the conformance cases.
#[cfg(test)]
pub(super) fn worlds(
    size: usize,
    region_bytes: usize,
    deadline: Duration,
) -> Vec<Arc<dyn Communicator>> {
    let hub = hub().unwrap();
    let number = next_number();
    let rank = |rank| Wires {
        hub,
        number,
        rank,
        processes: vec![hub.world.rank as i32; size],
        deadline,
    };
    (0..size)
        .map(|r| member(rank(r), region_bytes).unwrap())
        .collect()
}

/// The ranks of this process in a world distributed over the processes in turn. All processes must make worlds in the
/// same order.
#[cfg(test)]
pub(super) fn dealt(
    size: usize,
    region_bytes: usize,
    deadline: Duration,
) -> Vec<Arc<dyn Communicator>> {
    let hub = hub().unwrap();
    let number = next_number();
    let rank = |rank| Wires {
        hub,
        number,
        rank,
        processes: (0..size).map(|r| (r % hub.world.size) as i32).collect(),
        deadline,
    };
    ranks_here(size)
        .map(|r| member(rank(r), region_bytes).unwrap())
        .collect()
}

/// The ranks that [`dealt`] gives this process.
#[cfg(test)]
pub(super) fn ranks_here(size: usize) -> impl Iterator<Item = usize> {
    let World { rank, size: step } = hub().unwrap().world;
    (rank..size).step_by(step)
}

#[cfg(test)]
fn next_number() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    // Beyond the numbers of a mesh's groups.
    static NEXT: AtomicU32 = AtomicU32::new(1 << 16);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn member(wires: Wires, region_bytes: usize) -> Result<Arc<dyn Communicator>, CommError> {
    let world = World {
        rank: wires.rank,
        size: wires.processes.len(),
    };
    let deadline = wires.deadline;
    let window = super::threads::window(world.size, region_bytes)?;
    let remote = Remote::new(world, Box::new(wires));
    super::mirror::member(window, world, deadline, Some(remote))
        .map_err(|source| failed("open", source))
}

fn failed(action: &'static str, source: io::Error) -> CommError {
    CommError::Io {
        action,
        path: PathBuf::from("MPI"),
        source,
    }
}

/// The channel to the thread that calls MPI, and the number of this process.
#[derive(Debug)]
struct Hub {
    world: World,
    orders: Sender<Order>,
}

#[derive(Debug)]
enum Order {
    /// Registers the inbox of a rank of a world.
    Open(u32, usize, Arc<Inbox>),
    /// Sends a message to a process.
    Send(i32, Vec<u8>),
    /// Ends a rank of a world, then drops `done`.
    Close {
        number: u32,
        rank: usize,
        is_dead: bool,
        done: Sender<()>,
    },
}

fn hub() -> Result<&'static Hub, CommError> {
    static HUB: OnceLock<Result<Hub, String>> = OnceLock::new();
    let hub = HUB.get_or_init(|| {
        let (orders, queue) = unbounded();
        let (tell, told) = unbounded();
        std::thread::spawn(
            move || match ::mpi::initialize_with_threading(Threading::Funneled) {
                None => tell
                    .send(Err("MPI was started before".to_owned()))
                    .unwrap_or(()),
                Some((universe, _)) => {
                    let world = universe.world();
                    let own = World {
                        rank: world.rank() as usize,
                        size: world.size() as usize,
                    };
                    tell.send(Ok(own)).unwrap_or(());
                    Pump::new(universe, world).run(&queue);
                }
            },
        );
        let world = told
            .recv()
            .map_err(|_| "MPI could not be started".to_owned())??;
        Ok(Hub { world, orders })
    });
    hub.as_ref()
        .map_err(|why| failed("start", io::Error::other(why.clone())))
}

/// One rank's connections to its peers.
#[derive(Debug)]
struct Wires {
    hub: &'static Hub,
    number: u32,
    rank: usize,
    /// The process of each rank.
    processes: Vec<i32>,
    deadline: Duration,
}

impl Wires {
    fn order(&self, order: Order) {
        // The thread ends with MPI, and nothing is sent afterwards.
        self.hub.orders.send(order).unwrap_or(());
    }
}

impl Wire for Wires {
    fn open(&self, inbox: Arc<Inbox>) -> io::Result<()> {
        self.order(Order::Open(self.number, self.rank, inbox));
        Ok(())
    }

    fn send(&self, peer: usize, frame: Arc<Vec<u8>>) {
        let mut bytes = Vec::with_capacity(HEAD + frame.len());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend((self.rank as u16).to_le_bytes());
        bytes.extend((peer as u16).to_le_bytes());
        // MPI transfers the length of a message itself.
        bytes.extend(&frame[4..]);
        self.order(Order::Send(self.processes[peer], bytes));
    }

    fn close(&self, is_dead: bool) {
        let (done, ended) = unbounded();
        self.order(Order::Close {
            number: self.number,
            rank: self.rank,
            is_dead,
            done,
        });
        let patience = if is_dead { LAST_WORDS } else { self.deadline };
        // Nothing is ever sent on this channel. The call returns when the order is done, or after the time.
        ended.recv_timeout(patience).unwrap_or(());
    }
}

/// A message being sent. MPI reads its bytes until the request is complete.
struct Sending {
    request: ffi::MPI_Request,
    _bytes: Vec<u8>,
}

struct Pump {
    /// Dropped to end MPI.
    universe: Option<Universe>,
    world: SimpleCommunicator,
    sending: Vec<Sending>,
    inboxes: BTreeMap<(u32, usize), Arc<Inbox>>,
    /// Frames for ranks of this process that have not opened yet, as sender and frame.
    early: BTreeMap<(u32, usize), Vec<(usize, Vec<u8>)>>,
    ended: BTreeSet<(u32, usize)>,
    closing: Vec<(u32, usize, Sender<()>)>,
}

impl Pump {
    fn new(universe: Universe, world: SimpleCommunicator) -> Self {
        Self {
            universe: Some(universe),
            world,
            sending: Vec::new(),
            inboxes: BTreeMap::new(),
            early: BTreeMap::new(),
            ended: BTreeSet::new(),
            closing: Vec::new(),
        }
    }

    fn run(mut self, queue: &Receiver<Order>) {
        let mut lively = Instant::now();
        loop {
            let mut busy = false;
            while let Ok(order) = queue.try_recv() {
                self.obey(order);
                busy = true;
            }
            busy |= self.receive();
            self.sending.retain_mut(|sending| !sending.is_complete());
            if self.close() {
                return;
            }
            if busy {
                lively = Instant::now();
                continue;
            }
            let pause = if lively.elapsed() < LIVELY || !self.sending.is_empty() {
                PAUSES.0
            } else {
                PAUSES.1
            };
            match queue.recv_timeout(pause) {
                Ok(order) => self.obey(order),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Open(number, rank, inbox) => {
                for (from, frame) in self.early.remove(&(number, rank)).unwrap_or_default() {
                    inbox.take(from, &frame);
                }
                self.inboxes.insert((number, rank), inbox);
            }
            Order::Send(process, bytes) => {
                self.sending
                    .push(Sending::start(&self.world, process, bytes));
            }
            Order::Close {
                number,
                rank,
                is_dead,
                done,
            } => {
                if number != PROCESSES || is_dead {
                    self.inboxes.remove(&(number, rank));
                    self.ended.insert((number, rank));
                }
                if is_dead {
                    // MPI is not ended, so the program that started it ends the other processes.
                    return;
                }
                self.closing.push((number, rank, done));
            }
        }
    }

    /// Receives every message that has arrived; false if there was none.
    fn receive(&mut self) -> bool {
        let mut any = false;
        while let Some((message, status)) = self.world.any_process().immediate_matched_probe() {
            any = true;
            let count = status.count(u8::equivalent_datatype());
            let mut bytes = vec![0; usize::try_from(count).unwrap_or(0)];
            message.matched_receive_into(&mut bytes[..]);
            let Some((head, frame)) = bytes.split_first_chunk::<HEAD>() else {
                continue;
            };
            let number = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
            let from = usize::from(u16::from_le_bytes([head[4], head[5]]));
            let to = usize::from(u16::from_le_bytes([head[6], head[7]]));
            if let Some(inbox) = self.inboxes.get(&(number, to)) {
                inbox.take(from, frame);
            } else if !self.ended.contains(&(number, to)) {
                let early = self.early.entry((number, to)).or_default();
                early.push((from, frame.to_vec()));
            }
        }
        any
    }

    /// Closes the ranks that can end; true after MPI has ended.
    fn close(&mut self) -> bool {
        if !self.sending.is_empty() {
            return false;
        }
        let processes = self
            .closing
            .iter()
            .find(|(number, ..)| *number == PROCESSES);
        let ends = processes.is_some_and(|(number, rank, _)| {
            // Frames that peers still send must be received before MPI ends.
            let inbox = self.inboxes.get(&(*number, *rank));
            inbox.is_none_or(|inbox| inbox.all_gone())
        });
        if ends {
            self.universe = None;
            self.closing.clear();
            return true;
        }
        self.closing.retain(|(number, ..)| *number == PROCESSES);
        false
    }
}

impl Sending {
    #[expect(
        clippy::borrow_as_ptr,
        reason = "the binding's own form of an out parameter"
    )]
    fn start(world: &SimpleCommunicator, process: i32, bytes: Vec<u8>) -> Self {
        // SAFETY: an all-zero request is only written to.
        let mut request: ffi::MPI_Request = unsafe { std::mem::zeroed() };
        // SAFETY: the bytes are on the heap, are not written, and stay until `is_complete` reports that MPI is done
        // with them. The count fits, since frames are far below 2 GiB.
        unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast(),
                bytes.len() as i32,
                u8::equivalent_datatype().as_raw(),
                process,
                TAG,
                world.as_raw(),
                &mut request,
            );
        }
        Self {
            request,
            _bytes: bytes,
        }
    }

    #[expect(
        clippy::borrow_as_ptr,
        reason = "the binding's own form of an out parameter"
    )]
    fn is_complete(&mut self) -> bool {
        let mut flag = 0;
        // SAFETY: the request was started by this thread and is not freed before it is complete.
        unsafe {
            ffi::MPI_Test(&mut self.request, &mut flag, ffi::RSMPI_STATUS_IGNORE);
        }
        flag != 0
    }
}
