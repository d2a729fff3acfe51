//! Own binding to NCCL. The library is found by full path, nothing panics, and operations may work in place.
#![expect(unsafe_code, reason = "calls into NCCL")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::context::Stream;
use super::error::{CudaError, DriverResult, Result};
use super::launch::Address;
use super::library::{Found, Library, Search, find, functions};

/// Size in bytes of NCCL's unique id, with which the ranks of a communicator find each other.
pub const UNIQUE_ID_BYTES: usize = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; UNIQUE_ID_BYTES]);

type RawCommunicator = *mut c_void;
type Status = c_int;

/// Element type of a collective's operands, as NCCL numbers it (`ncclDataType_t`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Bytes, for gathers and broadcasts of any type.
    U8 = 1,
    /// `half`.
    F16 = 6,
    /// `float`.
    F32 = 7,
    /// `__nv_bfloat16`.
    Bf16 = 9,
}

functions! {
    /// Functions of NCCL that this crate calls, as nccl.h declares them since version 2.2.
    Functions:
    ncclGetVersion(*mut c_int) -> Status;
    ncclGetUniqueId(*mut UniqueId) -> Status;
    ncclCommInitRank(*mut RawCommunicator, c_int, UniqueId, c_int) -> Status;
    ncclCommDestroy(RawCommunicator) -> Status;
    ncclCommAbort(RawCommunicator) -> Status;
    ncclCommGetAsyncError(RawCommunicator, *mut Status) -> Status;
    ncclGetErrorString(Status) -> *const c_char;
    ncclAllGather(
        *const c_void, *mut c_void, usize, c_int, RawCommunicator, *mut c_void
    ) -> Status;
    ncclReduceScatter(
        *const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, *mut c_void
    ) -> Status;
    ncclAllReduce(
        *const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, *mut c_void
    ) -> Status;
}

/// Opened NCCL library, with the addresses of its functions.
#[derive(Debug)]
pub struct Nccl(Functions);

/// `ncclSum`.
const SUM: c_int = 0;

impl Nccl {
    /// Finds and opens the NCCL library.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] with the places tried, and [`CudaError::FunctionMissing`].
    pub fn open(search: &Search) -> Result<Self> {
        Self::of(&find(Library::Nccl, search))
    }

    /// The library that was found.
    pub(super) fn of(found: &Found) -> Result<Self> {
        Functions::load(found).map(Self)
    }

    fn check(&self, call: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function returns a static string for every number.
        let text = unsafe { CStr::from_ptr((self.0.ncclGetErrorString)(status)) };
        let code = text.to_string_lossy().into_owned();
        Err(CudaError::Driver {
            call: format!("NCCL {call}"),
            code,
        })
    }

    /// Version of the opened NCCL library, e.g. `2.28.9`.
    ///
    /// # Errors
    /// When the library does not answer.
    pub fn version(&self) -> Result<String> {
        let mut code = 0;
        // SAFETY: the pointer is valid.
        self.check("version", unsafe { (self.0.ncclGetVersion)(&raw mut code) })?;
        // Version 2.9 changed the encoding from XYZZ to XYYZZ.
        let (major, minor) = match code {
            ..10_000 => (code / 1000, code % 1000 / 100),
            _ => (code / 10_000, code % 10_000 / 100),
        };
        Ok(format!("{major}.{minor}.{}", code % 100))
    }

    /// Creates the unique id of a new communicator, which one rank gives to every rank. Needs no GPU.
    ///
    /// # Errors
    /// When no network interface can be used.
    pub fn unique_id(&self) -> Result<[u8; UNIQUE_ID_BYTES]> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: the pointer is valid.
        self.check("unique id", unsafe {
            (self.0.ncclGetUniqueId)(&raw mut id)
        })?;
        Ok(id.0)
    }

    /// Joins the communicator `id` as `rank` of `world` and returns after all ranks joined. Its operations
    /// run on `stream`.
    ///
    /// # Errors
    /// When the ranks do not reach each other, or two ranks use one GPU, which NCCL refuses. [`CudaError::NotJoined`]
    /// after `deadline`.
    pub fn join(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        id: [u8; UNIQUE_ID_BYTES],
        (rank, world): (u32, u32),
        deadline: Duration,
    ) -> Result<Communicator> {
        let context = stream.context().clone();
        let bind = move || {
            let bound = context.bind().during("selecting the GPU");
            bound.map(|()| context)
        };
        stream.context().bind().during("selecting the GPU")?;
        stream.synchronize().during("waiting for the GPU")?;
        Ok(Communicator {
            member: self.meet(id, (rank, world), deadline, bind)?,
            stream: stream.clone(),
        })
    }

    /// Joins the communicator `id` as `rank` of `world`, on a separate thread, because NCCL waits for ranks without a
    /// limit. After `deadline` that thread is abandoned; if the ranks come later, it leaves the communicator again.
    /// `bind` makes the GPU's context current on the thread, and its result keeps the context alive.
    ///
    /// # Errors
    /// As [`Nccl::join`], and errors of `bind`.
    pub fn meet<G>(
        self: &Arc<Self>,
        id: [u8; UNIQUE_ID_BYTES],
        (rank, world): (u32, u32),
        deadline: Duration,
        bind: impl FnOnce() -> Result<G> + Send + 'static,
    ) -> Result<Member> {
        let nccl = self.clone();
        let (sender, receiver) = channel();
        let join = move || {
            let bound = bind();
            let (joined, _held) = match bound {
                Ok(held) => (nccl.init(id, rank, world, deadline), Some(held)),
                Err(error) => (Err(error), None),
            };
            // If nobody receives the result any more, it is dropped, which leaves the communicator.
            drop(sender.send(joined));
        };
        let failed = |code: String| CudaError::Driver {
            call: "NCCL joining the ranks".into(),
            code,
        };
        let thread = std::thread::Builder::new().name("nccl-join".into());
        thread.spawn(join).map_err(|e| failed(e.to_string()))?;
        receiver
            .recv_timeout(deadline)
            .unwrap_or_else(|error| match error {
                RecvTimeoutError::Timeout => Err(CudaError::NotJoined {
                    rank,
                    world,
                    waited: deadline,
                }),
                RecvTimeoutError::Disconnected => Err(failed("its thread panicked".into())),
            })
    }

    /// Joins the communicator. Returns after all ranks joined.
    fn init(
        self: Arc<Self>,
        id: [u8; UNIQUE_ID_BYTES],
        rank: u32,
        world: u32,
        deadline: Duration,
    ) -> Result<Member> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the caller made a GPU's context current; the handle is written on success.
        let status = unsafe {
            (self.0.ncclCommInitRank)(&raw mut raw, world as c_int, UniqueId(id), rank as c_int)
        };
        self.check("joining the ranks", status)?;
        let membership = Arc::new(Membership {
            nccl: self,
            raw,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        // If this fails, dropping `membership` leaves the communicator.
        let watch = Watch::over(membership.clone(), deadline)?;
        Ok(Member {
            membership,
            rank,
            _watch: watch,
        })
    }
}

/// Communicator handle that is destroyed exactly once.
#[derive(Debug)]
struct Membership {
    nccl: Arc<Nccl>,
    raw: RawCommunicator,
    state: Mutex<MembershipState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MembershipState {
    /// Start of the call that has not returned yet.
    called: Option<Instant>,
    /// Whether the communicator is destroyed and must not be used.
    left: bool,
    /// Whether no more calls will come.
    closed: bool,
}

// SAFETY: NCCL allows one call at a time, which the single owner of a place ensures. Only `abort` may run on another
// thread at the same time.
unsafe impl Send for Membership {}
// SAFETY: as above.
unsafe impl Sync for Membership {}

impl Membership {
    fn lock(&self) -> MutexGuard<'_, MembershipState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn abort(&self, state: &mut MembershipState) {
        if !std::mem::replace(&mut state.left, true) {
            // SAFETY: the communicator is alive and not used again; abort does not wait for other ranks.
            let _unused_outcome = unsafe { (self.nccl.0.ncclCommAbort)(self.raw) };
        }
    }

    /// Runs a call of the library and checks its status. The call may wait for other ranks, because the first
    /// operations of a communicator connect them.
    fn call(&self, name: &str, run: impl FnOnce(RawCommunicator) -> Status) -> Result<()> {
        let ended = || CudaError::Driver {
            call: format!("NCCL {name}"),
            code: "the group was left: a rank is gone, or did not take part in time".into(),
        };
        {
            let mut state = self.lock();
            if state.left {
                return Err(ended());
            }
            state.called = Some(Instant::now());
        }
        self.changed.notify_all();
        let status = run(self.raw);
        let mut state = self.lock();
        state.called = None;
        match state.left {
            true => Err(ended()),
            false => self.nccl.check(name, status),
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let left = state.unwrap_or_else(PoisonError::into_inner).left;
        self.abort(&mut MembershipState {
            left,
            ..MembershipState::default()
        });
    }
}

/// Watchdog thread: aborts the communicator if a call takes too long, so that the call returns.
#[derive(Debug)]
struct Watch {
    membership: Arc<Membership>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn over(membership: Arc<Membership>, deadline: Duration) -> Result<Self> {
        let watched = membership.clone();
        let watch = move || {
            let mut state = watched.lock();
            while !state.closed {
                let left = state
                    .called
                    .map(|since| deadline.saturating_sub(since.elapsed()));
                state = match left {
                    None => watched
                        .changed
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner),
                    // The caller needs this lock to finish, so it is still the same call.
                    Some(Duration::ZERO) => {
                        watched.abort(&mut state);
                        return;
                    }
                    Some(left) => {
                        let waited = watched.changed.wait_timeout(state, left);
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                };
            }
        };
        let thread = std::thread::Builder::new().name("nccl-watch".into());
        let thread = thread.spawn(watch).map_err(|e| CudaError::Driver {
            call: "watching the group".into(),
            code: e.to_string(),
        })?;
        Ok(Self {
            membership,
            thread: Some(thread),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.membership.lock().closed = true;
        self.membership.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread runs nothing that panics.
            drop(thread.join());
        }
    }
}

/// Membership of one rank in a communicator. Dropping it leaves the communicator.
#[derive(Debug)]
pub struct Member {
    membership: Arc<Membership>,
    rank: u32,
    _watch: Watch,
}

impl Member {
    /// Queues an all-gather on `stream`: `n` elements of every rank, in rank order, into `to`. Otherwise as
    /// [`Communicator::all_gather`].
    ///
    /// # Safety
    /// As there. The stream belongs to the GPU whose context was current when the rank joined.
    ///
    /// # Errors
    /// Errors of NCCL, and when the call does not return within the deadline of the join.
    pub unsafe fn all_gather(
        &self,
        (from, to): (Address, Address),
        n: usize,
        kind: Kind,
        stream: *mut c_void,
    ) -> Result<()> {
        let (from, to) = (from.0 as *const c_void, to.0 as *mut c_void);
        let call = self.membership.nccl.0.ncclAllGather;
        // SAFETY: the caller vouches for the memory and the stream.
        let run = |raw| unsafe { call(from, to, n, kind as c_int, raw, stream) };
        self.membership.call("all-gather", run)
    }

    unsafe fn reduce_scatter(
        &self,
        (from, to): (Address, Address),
        n: usize,
        kind: Kind,
        stream: *mut c_void,
    ) -> Result<()> {
        let (from, to) = (from.0 as *const c_void, to.0 as *mut c_void);
        let call = self.membership.nccl.0.ncclReduceScatter;
        // SAFETY: the caller vouches for the memory and the stream.
        let run = |raw| unsafe { call(from, to, n, kind as c_int, SUM, raw, stream) };
        self.membership.call("reduce-scatter", run)
    }

    unsafe fn all_reduce(
        &self,
        (from, to): (Address, Address),
        n: usize,
        kind: Kind,
        stream: *mut c_void,
    ) -> Result<()> {
        let (from, to) = (from.0 as *const c_void, to.0 as *mut c_void);
        let call = self.membership.nccl.0.ncclAllReduce;
        // SAFETY: the caller vouches for the memory and the stream.
        let run = |raw| unsafe { call(from, to, n, kind as c_int, SUM, raw, stream) };
        self.membership.call("all-reduce", run)
    }

    fn check(&self) -> Result<()> {
        let mut status = 0;
        let call = self.membership.nccl.0.ncclCommGetAsyncError;
        // SAFETY: the communicator is alive.
        let run = |raw| unsafe { call(raw, &raw mut status) };
        self.membership.call("asking for errors", run)?;
        self.membership
            .nccl
            .check("an operation of the group", status)
    }

    fn finish(self) -> Result<()> {
        let call = self.membership.nccl.0.ncclCommDestroy;
        // SAFETY: the communicator is alive and not used again.
        let run = |raw| unsafe { call(raw) };
        self.membership.call("leaving the group", run)?;
        self.membership.lock().left = true;
        Ok(())
    }
}

/// NCCL communicator of one rank, with the stream that its operations run on. Every rank must issue the same
/// operations in the same order.
#[derive(Debug)]
pub struct Communicator {
    member: Member,
    stream: Arc<Stream>,
}

impl Communicator {
    /// This rank's number in the communicator, from 0.
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.member.rank
    }

    fn stream(&self) -> *mut c_void {
        self.stream.handle()
    }

    /// Queues an all-gather: `n` elements from every rank's `from`, in rank order, into `to` on every rank.
    /// It is in place when `from` is this rank's part of `to`.
    ///
    /// # Safety
    /// `from` must hold `n` elements and `to` `world * n` elements, in memory of this GPU that stays allocated until
    /// the stream has passed the operation.
    ///
    /// # Errors
    /// Errors of NCCL.
    pub unsafe fn all_gather(
        &self,
        from: Address,
        to: Address,
        n: usize,
        kind: Kind,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the memory, and the stream is of the same GPU.
        unsafe { self.member.all_gather((from, to), n, kind, self.stream()) }
    }

    /// Queues a reduce-scatter: sums the `world * n` elements at `from` over all ranks, and writes this
    /// rank's `n` sums to `to`.
    ///
    /// # Safety
    /// `from` must hold `world * n` elements and `to` `n` elements, as for [`Communicator::all_gather`].
    ///
    /// # Errors
    /// Errors of NCCL.
    pub unsafe fn reduce_scatter(
        &self,
        from: Address,
        to: Address,
        n: usize,
        kind: Kind,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the memory, and the stream is of the same GPU.
        unsafe {
            self.member
                .reduce_scatter((from, to), n, kind, self.stream())
        }
    }

    /// Queues an all-reduce: sums the `n` elements at `from` over all ranks, and writes the sums to `to` on
    /// every rank.
    ///
    /// # Safety
    /// Both addresses must hold `n` elements, as for [`Communicator::all_gather`].
    ///
    /// # Errors
    /// Errors of NCCL.
    pub unsafe fn all_reduce(
        &self,
        from: Address,
        to: Address,
        n: usize,
        kind: Kind,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the memory, and the stream is of the same GPU.
        unsafe { self.member.all_reduce((from, to), n, kind, self.stream()) }
    }

    /// Asks NCCL whether an operation that was queued before has failed.
    ///
    /// # Errors
    /// The first error of such an operation.
    pub fn check(&self) -> Result<()> {
        self.member.check()
    }

    /// Waits for queued operations and leaves the communicator.
    ///
    /// # Errors
    /// Errors of operations that were queued before.
    pub fn finish(self) -> Result<()> {
        let done = self.stream.synchronize();
        done.during("waiting for the GPU")?;
        self.check()?;
        self.member.finish()
    }
}
