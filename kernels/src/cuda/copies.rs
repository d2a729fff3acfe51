//! Copies between host and device through pinned chunks, overlapping with the device's work.
//!
//! The driver copies from pageable memory only after waiting for the stream. So bytes go through pinned chunks in
//! turn: while the bus transfers one chunk, the host fills (or empties) the next. Memory that never changes may be
//! registered instead: the driver page-locks it where it is, and the bus reads it there.
#![expect(unsafe_code, reason = "queues copies to and from pinned memory")]

use super::backend::Take;
use super::context::{Event, Stream};
use super::error::{DriverResult, Result};
use super::gpu::Gpu;
use super::launch::Address;
use super::transfer::Pinned;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{
    Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};

/// Bytes per chunk of large copies: much more than a copy's start-up cost, much less than a unit's weights.
const LARGE: usize = 8 << 20;
/// Chunks in the ring of large copies. Two would be enough if the host were never late.
const LARGE_CHUNKS: usize = 4;
/// Bytes per chunk of copies of small weights: biases, norms, adapters. Those of a layer share chunks.
const MEDIUM: usize = 1 << 20;
/// Alignment of each small weight in its chunk, in bytes: a cache line of the processor.
const PIECE_ALIGNMENT: usize = 64;
/// Chunks in the ring of copies of small weights: about those of a layer.
const MEDIUM_CHUNKS: usize = 12;
/// Bytes per chunk of small copies: row numbers, labels, images; losses and norms.
const SMALL: usize = 128 << 10;
/// Chunks in the ring of small copies. These copies run on the compute stream, so a chunk is free only after earlier
/// work is done. The ring holds what the host queues for several units of a model.
const SMALL_CHUNKS: usize = 96;

/// Chunks in the ring of small copies to the host, each of which waits for nothing on the device.
const READ_CHUNKS: usize = 4;

/// Bytes that one thread copies at a time. A single thread is slower than the bus.
const TASK: usize = 1 << 20;

/// Threads for copies. More are not faster than the host's memory.
const THREADS: usize = 4;

/// `CU_MEMHOSTREGISTER_PORTABLE`: page-locked for every context.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_READ_ONLY`: the device only reads.
const READ_ONLY: u32 = 8;

/// Separate thread pool, because the threads of other pools may be busy with long work such as an update.
static POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = ThreadPoolBuilder::new().num_threads(cores.min(THREADS));
    pool.thread_name(|i| format!("copies-{i}")).build().ok()
});

/// Copies bytes at the rate of the host's memory, with several threads.
///
/// # Panics
/// When the lengths differ.
pub(crate) fn copy_bytes(from: &[u8], to: &mut [u8]) {
    if to.len() <= TASK {
        return to.copy_from_slice(from);
    }
    let Some(pool) = &*POOL else {
        return to.copy_from_slice(from);
    };
    let parts = to.par_chunks_mut(TASK).zip(from.par_chunks(TASK));
    pool.install(|| parts.for_each(|(to, from)| to.copy_from_slice(from)));
}

/// Streams and pinned memory for one GPU's copies.
#[derive(Debug)]
pub(super) struct Copies {
    /// Stream for host-to-device copies of weights.
    pub(super) inward: Arc<Stream>,
    /// Stream for device-to-host copies of gradients.
    outward: Arc<Stream>,
    /// Stream for copies and collectives between ranks.
    pub(super) communication: Arc<Stream>,
    /// Stream for small device-to-host copies, which do not wait behind gradients.
    readings: Arc<Stream>,
    large: Ring,
    medium: Ring,
    pub(super) small: Ring,
    back: Ring,
    small_back: Ring,
    pub(super) registered: Registered,
}

impl Copies {
    pub(super) fn new(gpu: &Gpu, streams: [Arc<Stream>; 4]) -> Result<Self> {
        let [inward, outward, communication, readings] = streams;
        Ok(Self {
            inward,
            outward,
            communication,
            readings,
            large: Ring::new(gpu, LARGE_CHUNKS, LARGE)?,
            medium: Ring::new(gpu, MEDIUM_CHUNKS, MEDIUM)?,
            small: Ring::new(gpu, SMALL_CHUNKS, SMALL)?,
            back: Ring::new(gpu, LARGE_CHUNKS, LARGE)?,
            small_back: Ring::new(gpu, READ_CHUNKS, SMALL)?,
            registered: Registered::default(),
        })
    }

    /// Ring and stream for copies of `bytes` bytes to the host.
    pub(super) fn outgoing(&self, bytes: u64) -> (&Ring, &Stream) {
        match bytes <= SMALL as u64 {
            true => (&self.small_back, &self.readings),
            false => (&self.back, &self.outward),
        }
    }

    /// Chunks for the small weights of one call.
    pub(super) fn small_weights(&self) -> Shared<'_> {
        Shared {
            chunks: self.medium.lock(),
            filled: None,
        }
    }

    /// Queues a copy of weights to the device, on the host-to-device stream. Registered memory is read when the copy runs,
    /// other memory before this returns.
    ///
    /// # Safety
    /// As [`Ring::send`].
    pub(super) unsafe fn send(
        &self,
        gpu: &Gpu,
        small: &mut Shared<'_>,
        to: Address,
        bytes: &[u8],
    ) -> Result<()> {
        let ranges = self.registered.ranges();
        if !Registered::contain(&ranges, bytes) {
            drop(ranges);
            return match bytes.len() <= MEDIUM {
                // SAFETY: the caller vouches for the range.
                true => unsafe { small.send(gpu, &self.inward, to, bytes) },
                // SAFETY: as above.
                false => unsafe { self.large.send(gpu, &self.inward, to, bytes) },
            };
        }
        gpu.bind()?;
        // SAFETY: the caller vouches for the range. The lock is held, so who unregisters the memory waits for this copy.
        unsafe { gpu.driver().copy_in(to.0, bytes, self.inward.raw()) }.during("copying to the GPU")
    }
}

/// Ranges of host memory that the driver has page-locked where they are.
#[derive(Debug, Default)]
pub(super) struct Registered(RwLock<Ranges>);

/// Ends of ranges of addresses, by their starts.
type Ranges = BTreeMap<usize, usize>;

impl Registered {
    fn ranges(&self) -> RwLockReadGuard<'_, Ranges> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn ranges_mut(&self) -> RwLockWriteGuard<'_, Ranges> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all of `bytes` are in one of the ranges.
    fn contain(ranges: &Ranges, bytes: &[u8]) -> bool {
        let at = bytes.as_ptr_range();
        let before = ranges.range(..=at.start as usize).next_back();
        before.is_some_and(|(_, end)| at.end as usize <= *end)
    }

    /// Page-locks `bytes`.
    ///
    /// # Safety
    /// Nothing writes or frees them until they are unregistered.
    pub(super) unsafe fn add(&self, gpu: &Gpu, bytes: &[u8]) -> Result<()> {
        gpu.bind()?;
        // SAFETY: the caller keeps the bytes.
        let register = |flags| unsafe { gpu.driver().register_host(bytes, flags) };
        // A map of a file that this process may not write needs the second form.
        let registered = register(PORTABLE).or_else(|_| register(PORTABLE | READ_ONLY));
        registered.during(format!("registering {} bytes of host memory", bytes.len()))?;
        let at = bytes.as_ptr_range();
        self.ranges_mut().insert(at.start as usize, at.end as usize);
        Ok(())
    }

    /// Makes later copies of `bytes` use pinned chunks.
    pub(super) fn forget(&self, bytes: &[u8]) {
        self.ranges_mut().remove(&(bytes.as_ptr() as usize));
    }
}

/// Pinned chunks of a ring that the small copies of one call share, one copy behind the other. A chunk is free again after
/// one event, which follows all of its copies.
#[derive(Debug)]
pub(super) struct Shared<'r> {
    chunks: MutexGuard<'r, VecDeque<Chunk>>,
    /// Bytes in use of the last chunk.
    filled: Option<usize>,
}

impl Shared<'_> {
    /// Queues a copy to the device. Returns after `bytes` were read.
    ///
    /// # Safety
    /// As [`Ring::send`], with at most a chunk of bytes.
    unsafe fn send(&mut self, gpu: &Gpu, stream: &Stream, to: Address, bytes: &[u8]) -> Result<()> {
        gpu.bind()?;
        if self
            .filled
            .is_some_and(|filled| filled + bytes.len() > MEDIUM)
        {
            self.end_chunk(stream)?;
        }
        let start = self.filled.unwrap_or(0);
        if self.filled.is_none() {
            self.chunks.rotate_left(1);
        }
        let Some(chunk) = self.chunks.back_mut() else {
            return Ok(());
        };
        if self.filled.is_none() {
            chunk.wait(gpu)?;
        }
        let end = start + bytes.len();
        let pinned = &mut chunk.memory.as_mut_slice()[start..end];
        copy_bytes(bytes, pinned);
        self.filled = Some(end.next_multiple_of(PIECE_ALIGNMENT));
        // SAFETY: the caller vouches for the range; nothing uses these bytes of the chunk until its event.
        unsafe { gpu.driver().copy_in(to.0, pinned, stream.raw()) }.during("copying to the GPU")
    }

    fn end_chunk(&mut self, stream: &Stream) -> Result<()> {
        if self.filled.take().is_some()
            && let Some(chunk) = self.chunks.back_mut()
        {
            chunk.busy = Some(stream.awaited_event()?);
        }
        Ok(())
    }

    /// Ends the last chunk.
    pub(super) fn end(mut self, stream: &Stream) -> Result<()> {
        self.end_chunk(stream)
    }
}

/// Ring of pinned chunks, used in turn.
#[derive(Debug)]
pub(super) struct Ring {
    chunk_bytes: usize,
    chunks: Mutex<VecDeque<Chunk>>,
}

#[derive(Debug)]
struct Chunk {
    memory: Pinned,
    /// Event after which the bus no longer uses the chunk.
    busy: Option<Event>,
}

impl Chunk {
    fn wait(&mut self, gpu: &Gpu) -> Result<()> {
        match self.busy.take() {
            Some(cuda_event) => gpu.group_state().wait(&cuda_event),
            None => Ok(()),
        }
    }
}

impl Ring {
    fn new(gpu: &Gpu, count: usize, chunk_bytes: usize) -> Result<Self> {
        let chunk = |_| {
            let memory = gpu.pinned(chunk_bytes)?;
            Ok(Chunk { memory, busy: None })
        };
        let chunks = (0..count).map(chunk).collect::<Result<_>>()?;
        Ok(Self {
            chunk_bytes,
            chunks: Mutex::new(chunks),
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Chunk>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the next chunks for `bytes` bytes are free.
    pub(super) fn await_chunks(&self, gpu: &Gpu, bytes: u64) -> Result<()> {
        gpu.bind()?;
        let mut chunks = self.lock();
        let next = (bytes as usize).div_ceil(self.chunk_bytes);
        chunks
            .iter_mut()
            .take(next)
            .try_for_each(|chunk| chunk.wait(gpu))
    }

    /// Queues a copy to the device. Returns after all of `bytes` was read.
    ///
    /// # Safety
    /// The range at `to` must be memory of this GPU that stays allocated until the stream has passed the copy.
    pub(super) unsafe fn send(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        to: Address,
        bytes: &[u8],
    ) -> Result<()> {
        gpu.bind()?;
        let mut chunks = self.lock();
        for (part, bytes) in bytes.chunks(self.chunk_bytes).enumerate() {
            // The least recently used chunk. It stays in the ring if something fails.
            chunks.rotate_left(1);
            let Some(chunk) = chunks.back_mut() else {
                return Ok(());
            };
            chunk.wait(gpu)?;
            let pinned = &mut chunk.memory.as_mut_slice()[..bytes.len()];
            copy_bytes(bytes, pinned);
            let at = to.0 + (part * self.chunk_bytes) as u64;
            // SAFETY: the caller vouches for the range; nothing uses the chunk until its event.
            unsafe { gpu.driver().copy_in(at, pinned, stream.raw()) }
                .during("copying to the GPU")?;
            chunk.busy = Some(stream.awaited_event()?);
        }
        Ok(())
    }

    /// Copies `bytes` bytes from the device and passes each chunk to `take` as it arrives. The copies wait for nothing
    /// on the device, so another receiver waits at most for the bus.
    ///
    /// # Safety
    /// The range at `from` must be memory of this GPU, and its values are there.
    pub(super) unsafe fn receive(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        from: Address,
        bytes: u64,
        take: &mut Take<'_>,
    ) -> Result<()> {
        gpu.bind()?;
        let mut chunks = self.lock();
        let all = bytes as usize;
        let count = all.div_ceil(self.chunk_bytes);
        let ahead = chunks.len();
        let range = |part: usize| {
            let start = part * self.chunk_bytes;
            start..(start + self.chunk_bytes).min(all)
        };
        for part in 0..count + ahead {
            // This chunk contains part `part - ahead`. It is emptied, then filled with part `part`.
            chunks.rotate_left(1);
            let Some(chunk) = chunks.back_mut() else {
                return Ok(());
            };
            chunk.wait(gpu)?;
            if part >= ahead && part - ahead < count {
                take(&chunk.memory.as_slice()[..range(part - ahead).len()]);
            }
            if part < count {
                let wanted = range(part);
                let at = from.0 + wanted.start as u64;
                let pinned = &mut chunk.memory.as_mut_slice()[..wanted.len()];
                // SAFETY: the caller vouches for the range; the chunk is left alone until its event.
                unsafe { gpu.driver().copy_out(pinned, at, stream.raw()) }
                    .during("copying from the GPU")?;
                chunk.busy = Some(stream.awaited_event()?);
            }
        }
        Ok(())
    }
}
