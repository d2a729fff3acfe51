//! Several emulated GPUs that read each other's memory, each with a lane that computes and one that brings bytes in.
//!
//! What a driver leaves open is decided here: copies run as soon as they may (*early*), or only when somebody waits for
//! them (*late*). Computing is always late. So a wait that is missing reads what is not there yet, or what is there no more.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::Lane;
use kernels::cuda::backend::{Cause, Executor, Moment, PeerExecutor};
use kernels::cuda::launch::{Address, Launch};

use crate::emulator::{Emulator, Order};
use crate::executor::MULTIPROCESSORS;
use crate::machine::{Buffer, Machine};

/// Works of computing that wait at most: they hold copies of what they write.
const QUEUE: usize = 512;

/// When copies run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// As soon as what they wait for is there.
    Early,
    /// When somebody waits for them.
    Late,
}

/// One of the GPUs.
#[derive(Debug)]
pub struct LinkedGpu {
    node: Arc<Mutex<Vec<Device>>>,
    index: usize,
    copies: Copies,
}

#[derive(Debug)]
struct Device {
    machine: Emulator,
    buffers: Vec<Buffer>,
    shared: Option<Address>,
    lanes: [Queue; 2],
    /// By rank, the place among the devices.
    members: Vec<usize>,
    pulled_bytes: u64,
    put_bytes: u64,
}

#[derive(Debug, Default)]
struct Queue {
    works: VecDeque<Work>,
    queued: u64,
    done: u64,
    /// At a work that waits for another lane.
    waiting: bool,
    /// By number - 1: works before the mark.
    marks: Vec<u64>,
}

#[derive(Debug)]
enum Work {
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
    /// Until a lane of a device has done so many works.
    Await(usize, Lane, u64),
}

impl Device {
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

/// Executes the works of a lane, and whatever they wait for, until `count` are done.
fn run(devices: &mut [Device], at: usize, lane: Lane, count: u64) -> Result<(), Cause> {
    loop {
        let queue = &mut devices[at].lanes[lane as usize];
        if queue.done >= count {
            return Ok(());
        }
        if queue.waiting {
            return Err(format!("{lane:?} of GPU {at} waits for itself").into());
        }
        let Some(work) = queue.works.pop_front() else {
            return Err(format!("{lane:?} of GPU {at} waits for work that nobody queued").into());
        };
        let device = &mut devices[at];
        match work {
            Work::Launch(launch) => device.machine.launch(&launch)?,
            Work::Write(to, bytes) => device.write(to, &bytes)?,
            Work::Zero(at, bytes) => device.write(at, &vec![0; bytes as usize])?,
            Work::Copy(from, to, bytes) => {
                let bytes = device.read(from, bytes as usize)?;
                device.write(to, &bytes)?;
            }
            Work::Pull {
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
            Work::Await(other, of, works) => {
                devices[at].lanes[lane as usize].waiting = true;
                run(devices, other, of, works)?;
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
        let device = |_| Device {
            machine: Emulator::new(order),
            buffers: Vec::new(),
            shared: None,
            lanes: Default::default(),
            members: Vec::new(),
            pulled_bytes: 0,
            put_bytes: 0,
        };
        let node = Arc::new(Mutex::new((0..count).map(device).collect::<Vec<_>>()));
        let gpu = |index| Self {
            node: node.clone(),
            index,
            copies,
        };
        (0..count).map(gpu).collect()
    }

    /// Bytes that came from other GPUs, and from the host beside computing.
    #[must_use]
    pub fn traffic(&self) -> (u64, u64) {
        let devices = self.lock();
        let own = &devices[self.index];
        (own.pulled_bytes, own.put_bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Device>> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, devices: &mut [Device], lane: Lane, work: Work) -> Result<(), Cause> {
        let queue = &mut devices[self.index].lanes[lane as usize];
        queue.queued += 1;
        queue.works.push_back(work);
        let (queued, done) = (queue.queued, queue.done);
        match lane {
            Lane::Inward if self.copies == Copies::Early => run(devices, self.index, lane, queued),
            Lane::Compute if queue.works.len() > QUEUE => run(devices, self.index, lane, done + 1),
            _ => Ok(()),
        }
    }

    fn queue(&self, lane: Lane, work: Work) -> Result<(), Cause> {
        self.push(&mut self.lock(), lane, work)
    }

    fn inward(&self, to: Address, bytes: &[u8], behind: Option<&Moment>) -> Result<(), Cause> {
        let mut devices = self.lock();
        if let Some(behind) = behind {
            let wait = Work::Await(self.index, Lane::Compute, works(behind)?);
            self.push(&mut devices, Lane::Inward, wait)?;
        }
        devices[self.index].put_bytes += bytes.len() as u64;
        self.push(&mut devices, Lane::Inward, Work::Write(to, bytes.to_vec()))
    }

    fn device_of(devices: &[Device], index: usize, peer: usize) -> Result<usize, Cause> {
        let member = devices[index].members.get(peer).copied();
        member.ok_or_else(|| format!("rank {peer} has not joined").into())
    }
}

/// Works that are behind.
fn works(moment: &Moment) -> Result<u64, Cause> {
    let works = moment.downcast_ref::<u64>();
    works
        .copied()
        .ok_or_else(|| "a moment of another device".into())
}

// SAFETY: buffers live as long as the machines; works run in their order, an upload as the trait says.
unsafe impl Executor for LinkedGpu {
    fn multiprocessors(&self) -> u32 {
        MULTIPROCESSORS
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
        // As a driver, behind the work on it; a failed work has failed its reader already.
        for lane in Lane::ALL {
            let queued = devices[self.index].lanes[lane as usize].queued;
            run(&mut devices, self.index, lane, queued).ok();
        }
        devices[self.index].buffers.retain(|b| b.address != memory);
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.queue(Lane::Compute, Work::Write(to, bytes.to_vec()))
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        let behind = self.moment()?;
        // SAFETY: the caller vouches for the range.
        unsafe { self.fetch(from, bytes, &behind) }
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.queue(Lane::Compute, Work::Zero(at, bytes))
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.queue(Lane::Compute, Work::Copy(from, to, bytes))
    }

    fn moment(&self) -> Result<Moment, Cause> {
        let devices = self.lock();
        Ok(Arc::new(
            devices[self.index].lanes[Lane::Compute as usize].queued,
        ))
    }

    unsafe fn upload(
        &self,
        to: Address,
        bytes: &[u8],
        behind: Option<&Moment>,
    ) -> Result<(), Cause> {
        self.inward(to, bytes, behind)?;
        self.arrive()
    }

    unsafe fn fetch(&self, from: Address, bytes: &mut [u8], behind: &Moment) -> Result<(), Cause> {
        let mut devices = self.lock();
        run(&mut devices, self.index, Lane::Compute, works(behind)?)?;
        bytes.copy_from_slice(&devices[self.index].read(from, bytes.len())?);
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        self.queue(Lane::Compute, Work::Launch(Box::new(launch.clone())))
    }

    fn peers(&self) -> Option<&dyn PeerExecutor> {
        Some(self)
    }
}

impl PeerExecutor for LinkedGpu {
    fn name(&self, memory: Address) -> Result<Vec<u8>, Cause> {
        self.lock()[self.index].shared = Some(memory);
        Ok(self.index.to_le_bytes().to_vec())
    }

    fn join(&self, _rank: usize, names: &[Vec<u8>]) -> Result<(), Cause> {
        let index = |name: &Vec<u8>| Ok(usize::from_le_bytes(name.as_slice().try_into()?));
        let members = names.iter().map(index).collect::<Result<_, Cause>>()?;
        self.lock()[self.index].members = members;
        Ok(())
    }

    fn inward_behind(&self, moment: &Moment) -> Result<(), Cause> {
        let wait = Work::Await(self.index, Lane::Compute, works(moment)?);
        self.queue(Lane::Inward, wait)
    }

    unsafe fn put(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.inward(to, bytes, None)
    }

    unsafe fn clear(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.queue(Lane::Inward, Work::Zero(at, bytes))
    }

    unsafe fn pull(&self, peer: usize, offset: u64, to: Address, bytes: u64) -> Result<(), Cause> {
        let mut devices = self.lock();
        let device = Self::device_of(&devices, self.index, peer)?;
        if device != self.index {
            devices[self.index].pulled_bytes += bytes;
        }
        let pull = Work::Pull {
            device,
            offset,
            to,
            bytes,
        };
        self.push(&mut devices, Lane::Inward, pull)
    }

    fn arrive(&self) -> Result<(), Cause> {
        let mut devices = self.lock();
        let queued = devices[self.index].lanes[Lane::Inward as usize].queued;
        let wait = Work::Await(self.index, Lane::Inward, queued);
        self.push(&mut devices, Lane::Compute, wait)
    }

    fn mark(&self, lane: Lane) -> Result<u64, Cause> {
        let mut devices = self.lock();
        let queue = &mut devices[self.index].lanes[lane as usize];
        queue.marks.push(queue.queued);
        Ok(queue.marks.len() as u64)
    }

    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause> {
        let mut devices = self.lock();
        let device = Self::device_of(&devices, self.index, peer)?;
        let marks = &devices[device].lanes[of as usize].marks;
        // An event that was never recorded makes nobody wait.
        let count = match number {
            0 => 0,
            number => *marks.get(number as usize - 1).unwrap_or(&0),
        };
        self.push(&mut devices, lane, Work::Await(device, of, count))
    }
}
