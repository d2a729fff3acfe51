//! A GPU in an NCCL communicator, with collectives on the communication stream.
//!
//! A dead rank would leave the others' collectives waiting on their GPUs forever. So a thread that waits for the
//! device also polls the library for errors, and aborts the communicator when a collective takes too long. Joining
//! has the same deadline.
#![expect(
    unsafe_code,
    reason = "queues operations on memory that the caller vouches for"
)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::backend::{Cause, GroupExecutor};
use super::context::Event;
use super::error::{CudaError, DriverResult, Result};
use super::gpu::Gpu;
use super::launch::Address;
use super::nccl::{Communicator, Kind, Nccl, UNIQUE_ID_BYTES};

/// Shortest and longest polling interval of a waiting host thread.
const LOOK: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// Polling interval of a thread that has waited so long. It adds at most an eighth to a wait of 400 us and more.
fn look(waited: Duration) -> Duration {
    (waited / 8).clamp(LOOK[0], LOOK[1])
}

/// NCCL membership of one GPU, and the deadline for waits that may depend on other ranks.
#[derive(Debug, Default)]
pub(super) struct Group {
    member: Mutex<Option<Member>>,
    /// Deadline for ranks that read each other's memory without NCCL.
    limit: OnceLock<Duration>,
    abandoned: Abandoned,
}

/// Whether this process no longer waits for the device, because the device waits for a lost rank. What a destructor
/// would free after a wait is then left to the end of the process.
#[derive(Clone, Debug, Default)]
pub(super) struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
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

    /// Whether the device is still waited for.
    pub(super) const fn abandoned(&self) -> &Abandoned {
        &self.abandoned
    }

    /// Ends all waits, present and later ones, if they may depend on other ranks. Returns whether they may.
    pub(super) fn abandon(&self) -> bool {
        // A thread that holds the lock is in a call of the process group.
        let is_member = || {
            self.member
                .try_lock()
                .map_or(true, |member| member.is_some())
        };
        let depends = self.limit.get().is_some() || is_member();
        if depends {
            self.abandoned.set();
        }
        depends
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
                _ if self.abandoned.is_set() => Some(ended("no longer waited for")),
                Some(member) => member.communicator.check().err(),
                None if in_group => Some(ended("the group has ended")),
                None => None,
            };
            if failed.is_some() || late {
                // Dropping the communicator ends collectives that still wait on the device.
                group.take();
                self.abandoned.set();
                let late = || ended(&format!("not done after {} s", deadline.as_secs()));
                return Err(failed.unwrap_or_else(late));
            }
            drop(group);
            std::thread::park_timeout(look(started.elapsed()));
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
