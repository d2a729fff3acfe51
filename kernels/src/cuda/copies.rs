//! Copies between host and device through pinned chunks, beside the work of the device.
//!
//! The driver copies from plain memory only after it has waited for the stream. So bytes go through chunks of pinned
//! memory in turn: while the bus takes one, the host fills (or empties) the next.
#![expect(unsafe_code, reason = "queues copies to and from pinned memory")]

use super::backend::Take;
use super::error::{DriverResult, Result};
use super::gpu::Gpu;
use super::launch::Address;
use super::transfer::Pinned;
use cudarc::driver::{CudaEvent, CudaStream, result};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Bytes of a chunk of large copies: long beside what a copy costs to start, short beside a unit's weights.
const LARGE: usize = 8 << 20;
/// Chunks of their rings: two would do, if the host were never late.
const LARGE_CHUNKS: usize = 4;
/// Bytes of a chunk of small copies: tables of row numbers, labels, pictures.
const SMALL: usize = 128 << 10;
/// They are taken in the order of the work, so that chunks come back as late as that is done: as many as the host
/// queues for some units of a model.
const SMALL_CHUNKS: usize = 96;

/// Bytes that one thread copies at once: one alone is slower than the bus.
const TASK: usize = 1 << 20;

/// Threads of copies: more are not faster than the host's memory.
const THREADS: usize = 4;

/// Of their own, since those of everybody else may be busy with long work, such as an update.
static POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = ThreadPoolBuilder::new().num_threads(cores.min(THREADS));
    pool.thread_name(|i| format!("copies-{i}")).build().ok()
});

/// Copies as fast as the host's memory goes.
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

/// Streams and pinned memory of one GPU's copies.
#[derive(Debug)]
pub(super) struct Copies {
    /// Weights to the device.
    pub(super) inward: Arc<CudaStream>,
    /// Gradients from it.
    pub(super) outward: Arc<CudaStream>,
    /// Other ranks' bytes, by the devices or a library.
    pub(super) communication: Arc<CudaStream>,
    pub(super) large: Ring,
    pub(super) small: Ring,
    pub(super) back: Ring,
}

impl Copies {
    pub(super) fn new(gpu: &Gpu, streams: [Arc<CudaStream>; 3]) -> Result<Self> {
        let [inward, outward, communication] = streams;
        Ok(Self {
            inward,
            outward,
            communication,
            large: Ring::new(gpu, LARGE_CHUNKS, LARGE)?,
            small: Ring::new(gpu, SMALL_CHUNKS, SMALL)?,
            back: Ring::new(gpu, LARGE_CHUNKS, LARGE)?,
        })
    }
}

/// Chunks of pinned memory, used in turn.
#[derive(Debug)]
pub(super) struct Ring {
    chunk_bytes: usize,
    chunks: Mutex<VecDeque<Chunk>>,
}

#[derive(Debug)]
struct Chunk {
    memory: Pinned,
    /// When the bus is done with it.
    busy: Option<CudaEvent>,
}

impl Chunk {
    fn wait(&mut self, gpu: &Gpu) -> Result<()> {
        match self.busy.take() {
            Some(event) => gpu.group_state().wait(&event),
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

    /// Queues a copy to the device; returns when all bytes were taken from `bytes`.
    ///
    /// # Safety
    /// The range at `to` must be memory of this GPU that stays until the stream has passed the copy.
    pub(super) unsafe fn send(
        &self,
        gpu: &Gpu,
        stream: &CudaStream,
        to: Address,
        bytes: &[u8],
    ) -> Result<()> {
        gpu.bind()?;
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        for (part, bytes) in bytes.chunks(self.chunk_bytes).enumerate() {
            // The one used longest ago; it stays in the ring when something fails.
            chunks.rotate_left(1);
            let Some(chunk) = chunks.back_mut() else {
                return Ok(());
            };
            chunk.wait(gpu)?;
            let pinned = &mut chunk.memory.as_mut_slice()[..bytes.len()];
            copy_bytes(bytes, pinned);
            let at = to.0 + (part * self.chunk_bytes) as u64;
            // SAFETY: the caller vouches for the range; the chunk is left alone until its event.
            unsafe { result::memcpy_htod_async(at, pinned, stream.cu_stream()) }
                .during("copying to the GPU")?;
            let busy = stream.record_event(None).during("marking a moment")?;
            chunk.busy = Some(busy);
        }
        Ok(())
    }

    /// Gives `bytes` bytes of the device, behind what `stream` waits for once `begin` is called, to `take`, each chunk where it
    /// arrives. Who else wants to receive waits with its moment: it would hold back the rest of this.
    ///
    /// # Safety
    /// The range at `from` must be memory of this GPU.
    pub(super) unsafe fn receive(
        &self,
        gpu: &Gpu,
        stream: &CudaStream,
        from: Address,
        bytes: u64,
        begin: impl FnOnce() -> Result<()>,
        take: &mut Take<'_>,
    ) -> Result<()> {
        gpu.bind()?;
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        begin()?;
        let all = bytes as usize;
        let count = all.div_ceil(self.chunk_bytes);
        let ahead = chunks.len();
        let range = |part: usize| {
            let start = part * self.chunk_bytes;
            start..(start + self.chunk_bytes).min(all)
        };
        for part in 0..count + ahead {
            // The chunk of part `part - ahead`, which is emptied, and filled with part `part`.
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
                unsafe { result::memcpy_dtoh_async(pinned, at, stream.cu_stream()) }
                    .during("copying from the GPU")?;
                let busy = stream.record_event(None).during("marking a moment")?;
                chunk.busy = Some(busy);
            }
        }
        Ok(())
    }
}
