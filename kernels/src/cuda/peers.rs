//! Memory and events of one GPU that the driver shares between processes (CUDA IPC).
#![expect(unsafe_code, reason = "calls into the driver through an opened GPU")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{self, CUevent_flags, CUipcMem_flags_enum};

use super::backend::gpu::{cuda_event, event, order};
use super::backend::{Cause, Event, PeerExecutor, Upload};
use super::context::Context;
use super::error::{DriverResult, Result};
use super::gpu::Gpu;
use super::group::Abandoned;
use super::launch::Address;
use super::transfer::HANDLE_BYTES;
use crate::peers::Lane;
use crate::timeline::DeviceLane;

/// Number of [`Lane`]s.
const LANES: usize = 3;
/// Events per lane, used in turn. Ranks exchange messages between marks, so only a few marks are ever waited for.
const MARKS: usize = 64;
/// Flags of an event without timing that other processes can wait for.
const SHARED: u32 =
    CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 | CUevent_flags::CU_EVENT_INTERPROCESS as u32;

/// Event created by this process or opened from another one.
#[derive(Debug)]
struct IpcEvent {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: an event is a plain identifier that any thread may use.
unsafe impl Send for IpcEvent {}
// SAFETY: as above; the driver orders calls on it.
unsafe impl Sync for IpcEvent {}

impl IpcEvent {
    fn create(context: &Arc<Context>) -> Result<Self> {
        let raw = context
            .driver()
            .event(SHARED)
            .during("creating an event for other processes")?;
        let context = context.clone();
        Ok(Self { context, raw })
    }

    fn open(context: &Arc<Context>, handle: &[u8; HANDLE_BYTES]) -> Result<Self> {
        let handle = sys::CUipcEventHandle {
            reserved: handle.map(u8::cast_signed),
        };
        let raw = context
            .driver()
            .open_event(handle)
            .during("opening an event of another process")?;
        let context = context.clone();
        Ok(Self { context, raw })
    }

    fn handle(&self) -> Result<[u8; HANDLE_BYTES]> {
        // SAFETY: the event was created with the interprocess flag and is alive.
        let handle = unsafe { self.context.driver().event_handle(self.raw) }
            .during("naming an event for another process")?;
        Ok(handle.reserved.map(i8::cast_unsigned))
    }
}

impl Drop for IpcEvent {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created above, destroyed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { self.context.driver().destroy_event(self.raw) };
        }
    }
}

/// Events of one lane that mark points in its queue, used in turn. Other processes can wait for them.
type Marks = Vec<IpcEvent>;

/// Events that this process shares, and other ranks' GPUs that it opened.
#[derive(Debug)]
pub(super) struct Peers {
    marks: [Marks; LANES],
    counts: [AtomicU64; LANES],
    /// Opened GPUs by rank; `None` for this process.
    members: Mutex<Vec<Option<Arc<Member>>>>,
}

/// GPU of another rank, opened by this process: its memory and the marks of its queues.
#[derive(Debug)]
struct Member {
    memory: Mapped,
    marks: [Marks; LANES],
}

/// GPU memory of another process, mapped into this one. Dropping it unmaps it.
#[derive(Debug)]
struct Mapped {
    context: Arc<Context>,
    abandoned: Abandoned,
    start: sys::CUdeviceptr,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // The driver unmaps memory after the copies that read it.
        if !self.abandoned.is_set() && self.context.bind().is_ok() {
            // SAFETY: opened once, closed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { self.context.driver().close_memory(self.start) };
        }
    }
}

impl Peers {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let lane = || -> Result<Marks> { (0..MARKS).map(|_| IpcEvent::create(context)).collect() };
        Ok(Self {
            marks: [lane()?, lane()?, lane()?],
            counts: Default::default(),
            members: Mutex::default(),
        })
    }
}

fn place(number: u64) -> usize {
    (number % MARKS as u64) as usize
}

impl Gpu {
    fn member(&self, peer: usize) -> Result<Arc<Member>, Cause> {
        let members = self.peers()?.members.lock();
        let members = members.unwrap_or_else(PoisonError::into_inner);
        let member = members.get(peer).cloned().flatten();
        member.ok_or_else(|| format!("rank {peer} has not joined").into())
    }

    fn lane(&self, lane: Lane) -> Result<sys::CUstream, Cause> {
        Ok(match lane {
            Lane::Compute | Lane::Boundary => self.stream().raw(),
            Lane::Communication => self.copies()?.communication.raw(),
        })
    }

    fn wait_for(&self, lane: Lane, cuda_event: &IpcEvent) -> Result<(), Cause> {
        // SAFETY: the event is alive, and the stream this GPU's.
        unsafe { self.driver().wait(self.lane(lane)?, cuda_event.raw) }
            .during("ordering queues of GPUs")?;
        Ok(())
    }

    /// Queues work on the communication stream.
    pub(super) fn communicate(
        &self,
        queue: impl FnOnce(sys::CUstream) -> Result<()>,
    ) -> Result<(), Cause> {
        let stream = &self.copies()?.communication;
        let began = self.timeline.stamp(stream)?;
        queue(stream.raw())?;
        let lane = DeviceLane::Communication;
        Ok(self.timeline.end(lane, began, stream, 0)?)
    }

    fn open_peer(&self, name: &[u8]) -> Result<Member, Cause> {
        let mut handles = name.chunks_exact(HANDLE_BYTES);
        let mut next = || -> Result<[u8; HANDLE_BYTES], Cause> {
            let handle = handles.next().ok_or("the name of a GPU's memory is cut")?;
            Ok(handle.try_into()?)
        };
        let handle = sys::CUipcMemHandle {
            reserved: next()?.map(u8::cast_signed),
        };
        let flags = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let context = self.stream().context();
        let start = context
            .driver()
            .open_memory(handle, flags)
            .during("mapping GPU memory of another rank")?;
        let memory = Mapped {
            context: context.clone(),
            abandoned: self.group_state().abandoned().clone(),
            start,
        };
        let mut marks = || -> Result<Marks, Cause> {
            let open = |_| Ok(IpcEvent::open(context, &next()?)?);
            (0..MARKS).map(open).collect()
        };
        let marks = [marks()?, marks()?, marks()?];
        Ok(Member { memory, marks })
    }
}

impl PeerExecutor for Gpu {
    fn name(&self, memory: Address) -> Result<Vec<u8>, Cause> {
        self.bind()?;
        // SAFETY: the address is the start of a live allocation that is not stream-ordered.
        let handle = unsafe { self.driver().memory_handle(memory.0) }
            .during("naming GPU memory for another process")?;
        let mut name = handle.reserved.map(i8::cast_unsigned).to_vec();
        for cuda_event in self.peers()?.marks.iter().flatten() {
            name.extend(cuda_event.handle()?);
        }
        Ok(name)
    }

    fn join(&self, rank: usize, names: &[Vec<u8>], deadline: Duration) -> Result<(), Cause> {
        self.bind()?;
        self.group_state().limit(deadline);
        let mut members = Vec::with_capacity(names.len());
        for (peer, name) in names.iter().enumerate() {
            let member = || self.open_peer(name).map(Arc::new);
            let member = (peer != rank).then(member).transpose();
            members.push(member.map_err(|cause| format!("rank {peer}: {cause}"))?);
        }
        let joined = self.peers()?.members.lock();
        *joined.unwrap_or_else(PoisonError::into_inner) = members;
        Ok(())
    }

    fn incoming_behind(&self, event: &Event) -> Result<(), Cause> {
        let copies = self.copies()?;
        let behind = cuda_event(event)?;
        order(&copies.inward, behind)?;
        order(&copies.communication, behind)
    }

    unsafe fn put(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        let behind = None;
        // SAFETY: the caller vouches for the range.
        unsafe { self.copy_in(&[Upload { to, bytes, behind }]) }?;
        let copies = self.copies()?;
        order(&copies.communication, &event(&copies.inward)?)
    }

    unsafe fn clear(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        let lane = self.lane(Lane::Communication)?;
        // SAFETY: the caller vouches for the range.
        unsafe { self.driver().fill(at.0, 0, bytes as usize, lane) }.during("clearing memory")?;
        Ok(())
    }

    unsafe fn take(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        let lane = self.lane(Lane::Communication)?;
        // SAFETY: the caller vouches for both ranges.
        unsafe { self.driver().copy(to.0, from.0, bytes as usize, lane) }
            .during("copying on the GPU")?;
        Ok(())
    }

    unsafe fn pull(&self, peer: usize, offset: u64, to: Address, bytes: u64) -> Result<(), Cause> {
        let start = self.member(peer)?.memory.start;
        self.communicate(|lane| {
            // SAFETY: the caller vouches for both ranges.
            unsafe {
                self.driver()
                    .copy(to.0, start + offset, bytes as usize, lane)
            }
            .during("copying from another rank's GPU")
        })
    }

    fn arrive(&self) -> Result<(), Cause> {
        self.work_behind(&self.copies()?.communication)
    }

    fn mark(&self, lane: Lane) -> Result<u64, Cause> {
        let peers = self.peers()?;
        let number = peers.counts[lane as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let cuda_event = &peers.marks[lane as usize][place(number)];
        // SAFETY: event and stream belong to this GPU's context and are alive.
        unsafe { self.driver().record(cuda_event.raw, self.lane(lane)?) }
            .during("recording an event")?;
        Ok(number)
    }

    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause> {
        let member = self.member(peer)?;
        self.wait_for(lane, &member.marks[of as usize][place(number)])
    }

    fn await_own(&self, number: u64) -> Result<(), Cause> {
        let marks = &self.peers()?.marks[Lane::Compute as usize];
        self.wait_for(Lane::Communication, &marks[place(number)])
    }
}
