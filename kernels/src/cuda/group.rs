//! A GPU in an NCCL communicator, with collectives on the communication stream.
//!
//! A dead rank would leave the others' collectives waiting on their GPUs forever. So a thread that waits for the
//! device also polls the library for errors, and aborts the communicator when a collective takes too long. Joining
//! has the same deadline.
#![expect(
    unsafe_code,
    reason = "queues operations on memory that the caller vouches for"
)]

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::backend::{Cause, GroupExecutor};
use super::context::Event;
use super::error::{CudaError, DriverResult, Result};
use super::gpu::Gpu;
use super::launch::Address;
use super::nccl::{Communicator, Kind, Nccl, UNIQUE_ID_BYTES};

/// Polling interval of a waiting host thread.
const LOOK: Duration = Duration::from_micros(50);

/// NCCL membership of one GPU, and the deadline for waits that may depend on other ranks.
#[derive(Debug, Default)]
pub(super) struct Group {
    member: Mutex<Option<Member>>,
    /// Deadline for ranks that read each other's memory without NCCL.
    limit: OnceLock<Duration>,
}

#[derive(Debug)]
struct Member {
    communicator: Communicator,
    size: usize,
    deadline: Duration,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Option<Member>> {
        self.member.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the deadline of all later waits. Only the first call has an effect.
    pub(super) fn limit(&self, deadline: Duration) {
        self.limit.get_or_init(|| deadline);
    }

    /// Waits for an event, at most for the deadline of the communicator or of reads from other ranks.
    pub(super) fn wait(&self, cuda_event: &Event) -> Result<()> {
        let deadline = self.lock().as_ref().map(|member| member.deadline);
        let in_group = deadline.is_some();
        let Some(deadline) = deadline.or_else(|| self.limit.get().copied()) else {
            return cuda_event.synchronize().during("waiting for the GPU");
        };
        let started = Instant::now();
        while !cuda_event.is_done().during("waiting for the GPU")? {
            let late = started.elapsed() > deadline;
            let mut group = self.lock();
            let failed = match group.as_ref() {
                Some(member) => member.communicator.check().err(),
                None if in_group => Some(ended("the group has ended")),
                None => None,
            };
            if failed.is_some() || late {
                // Dropping the communicator ends collectives that still wait on the device.
                group.take();
                let late = || ended(&format!("not done after {} s", deadline.as_secs()));
                return Err(failed.unwrap_or_else(late));
            }
            drop(group);
            std::thread::park_timeout(LOOK);
        }
        Ok(())
    }
}

fn ended(why: &str) -> CudaError {
    CudaError::Driver {
        call: "what comes from other ranks".into(),
        code: why.into(),
    }
}

impl Gpu {
    fn nccl(&self) -> Result<Arc<Nccl>> {
        Ok(Arc::new(Nccl::open(self.search())?))
    }

    fn in_group(&self, run: impl FnOnce(&Communicator) -> Result<()>) -> Result<(), Cause> {
        let group = self.group_state().lock();
        let member = group.as_ref().ok_or_else(|| ended("there is no group"))?;
        self.communicate(|_| run(&member.communicator))?;
        Ok(member.communicator.check()?)
    }
}

impl GroupExecutor for Gpu {
    fn version(&self) -> Result<String, Cause> {
        Ok(self.nccl()?.version()?)
    }

    fn id(&self) -> Result<Vec<u8>, Cause> {
        Ok(self.nccl()?.unique_id()?.to_vec())
    }

    fn join(&self, id: &[u8], rank: usize, size: usize, deadline: Duration) -> Result<(), Cause> {
        let id: [u8; UNIQUE_ID_BYTES] = id.try_into()?;
        let (rank, world) = (u32::try_from(rank)?, u32::try_from(size)?);
        let stream = &self.copies()?.communication;
        let communicator = self.nccl()?.join(stream, id, (rank, world), deadline)?;
        *self.group_state().lock() = Some(Member {
            communicator,
            size,
            deadline,
        });
        Ok(())
    }

    fn size(&self) -> usize {
        let group = self.group_state().lock();
        group.as_ref().map_or(0, |member| member.size)
    }

    unsafe fn all_gather(&self, whole: Address, part: u64) -> Result<(), Cause> {
        self.bind()?;
        self.in_group(|group| {
            let own = Address(whole.0 + u64::from(group.rank()) * part);
            // SAFETY: the caller vouches for the memory.
            unsafe { group.all_gather(own, whole, part as usize, Kind::U8) }
        })
    }

    unsafe fn reduce_scatter(&self, from: Address, to: Address, elems: u64) -> Result<(), Cause> {
        self.bind()?;
        // SAFETY: the caller vouches for the memory.
        self.in_group(|group| unsafe { group.reduce_scatter(from, to, elems as usize, Kind::F32) })
    }
}
