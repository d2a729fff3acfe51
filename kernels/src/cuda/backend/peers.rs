//! One device's side of collectives between devices: tensors that communication fills from other ranks' memory.

use super::{Cause, CudaBackend, Event};
use crate::cuda::launch::Address;
use crate::error::{KernelError, Result};
use crate::peers::{GroupAccess, Lane, PeerAccess};
use crate::pool::Tag;
use crate::resident::Resident;
use crate::tensor::OnDevice;
use crate::{DType, Shape, Tensor};
use std::ops::Range;
use std::time::Duration;

/// Executor with a compute queue and a communication queue that other ranks' executors read from and wait
/// for. Each queue is in order. Only events, [`PeerExecutor::arrive`] and marks order the two queues against
/// each other.
pub trait PeerExecutor: Send + Sync {
    /// Handle that other ranks need to open the allocation starting at `memory`, and the marks.
    ///
    /// # Errors
    /// When the device or its environment forbids sharing.
    fn name(&self, memory: Address) -> Result<Vec<u8>, Cause>;

    /// Opens the executors of all ranks; `names` are their handles in rank order, and `rank` is this one. From here
    /// on waits for this executor fail after `deadline`.
    ///
    /// # Errors
    /// When a rank's executor cannot be reached.
    fn join(&self, rank: usize, names: &[Vec<u8>], deadline: Duration) -> Result<(), Cause>;

    /// Makes host-to-device copies and communication wait for an event.
    ///
    /// # Errors
    /// When the device fails.
    fn incoming_behind(&self, event: &Event) -> Result<(), Cause>;

    /// Copies host bytes to the device. Communication queued later waits for the copy.
    ///
    /// # Safety
    /// The range is in allocated memory, and nothing else uses it until the communication queue has passed.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn put(&self, to: Address, bytes: &[u8]) -> Result<(), Cause>;

    /// Sets bytes to zero, on the communication queue.
    ///
    /// # Safety
    /// As for [`PeerExecutor::put`].
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn clear(&self, at: Address, bytes: u64) -> Result<(), Cause>;

    /// Copies bytes of this device, on the communication queue.
    ///
    /// # Safety
    /// As for [`PeerExecutor::put`], and `from` is memory of this device.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn take(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause>;

    /// Copies bytes from offset `offset` of rank `peer`'s shared allocation, on the communication queue.
    ///
    /// # Safety
    /// As for [`PeerExecutor::put`]. The peer's range is in its allocation. Its contents, valid at the last mark
    /// waited for, do not change until this queue has passed.
    ///
    /// # Errors
    /// When the device fails or no such rank joined.
    unsafe fn pull(&self, peer: usize, offset: u64, to: Address, bytes: u64) -> Result<(), Cause>;

    /// Makes computation wait for all communication queued so far.
    ///
    /// # Errors
    /// When the device fails.
    fn arrive(&self) -> Result<(), Cause>;

    /// Marks the current end of a queue. The result is the mark's number: 1, 2, … per queue.
    ///
    /// # Errors
    /// When the device fails.
    fn mark(&self, lane: Lane) -> Result<u64, Cause>;

    /// Makes `lane` wait for mark `number` of the queue `of` on rank `peer`.
    ///
    /// # Errors
    /// When the device fails or no such rank joined.
    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause>;

    /// Makes communication wait for this executor's own mark `number` of the compute queue.
    ///
    /// # Errors
    /// When the device fails.
    fn await_own(&self, number: u64) -> Result<(), Cause>;
}

/// Collectives of a library such as NCCL, on the communication queue of an executor.
pub trait GroupExecutor: Send + Sync {
    /// Version of the library that provides the collectives.
    ///
    /// # Errors
    /// When the library is missing.
    fn version(&self) -> Result<String, Cause>;

    /// Creates a unique id for a communicator.
    ///
    /// # Errors
    /// When the library is missing or finds no network interface.
    fn id(&self) -> Result<Vec<u8>, Cause>;

    /// Joins the communicator `id` as `rank` of `size`. Returns after all ranks joined, at the latest after
    /// `deadline`.
    ///
    /// # Errors
    /// When the ranks do not reach each other in time.
    fn join(&self, id: &[u8], rank: usize, size: usize, deadline: Duration) -> Result<(), Cause>;

    /// Number of ranks of the joined communicator; 0 before a join.
    fn size(&self) -> usize;

    /// All-gather in place: `part` bytes per rank, in rank order, from `whole` on. This rank's part is already there.
    ///
    /// # Safety
    /// The memory has `part` bytes per rank, and nothing else uses it until the queue has passed.
    ///
    /// # Errors
    /// When the library fails.
    unsafe fn all_gather(&self, whole: Address, part: u64) -> Result<(), Cause>;

    /// Reduce-scatter: writes this rank's `elems` f32 of the sum of all ranks' `from` to `to`.
    ///
    /// # Safety
    /// As for [`GroupExecutor::all_gather`], with one part per rank at `from` and one part at `to`.
    ///
    /// # Errors
    /// When the library fails.
    unsafe fn reduce_scatter(&self, from: Address, to: Address, elems: u64) -> Result<(), Cause>;
}

impl CudaBackend {
    fn peer_executor(&self) -> Result<&dyn PeerExecutor> {
        self.executor.peers().ok_or_else(|| KernelError::Device {
            op: "peers",
            cause: "the device shares no memory".into(),
        })
    }

    /// Address and length of the bytes `range` of a tensor.
    fn part(&self, op: &'static str, x: &Tensor, range: &Range<usize>) -> Result<(Address, u64)> {
        if range.start > range.end || range.end > x.size_bytes() {
            return Err(KernelError::Shape {
                op,
                detail: format!("bytes {range:?} of {x:?}"),
            });
        }
        let at = self.address(op, x)?.0 + range.start as u64;
        Ok((Address(at), range.len() as u64))
    }
}

fn failed(op: &'static str) -> impl Fn(Cause) -> KernelError {
    move |cause| KernelError::Device { op, cause }
}

impl PeerAccess for CudaBackend {
    fn name(&self) -> Result<Vec<u8>> {
        let start = Address(self.memory.address());
        let name = self.peer_executor()?.name(start);
        name.map_err(failed("share memory"))
    }

    fn join(&self, rank: usize, names: &[Vec<u8>], deadline: Duration) -> Result<()> {
        let joined = self.peer_executor()?.join(rank, names, deadline);
        joined.map_err(failed("open memory of other ranks"))
    }

    fn incoming(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        const OP: &str = "incoming";
        let bytes = shape.elems() * dtype.size_bytes();
        let placed = self.pool.place(bytes, tag)?;
        let start = placed.offset();
        let place = OnDevice {
            memory: self.memory.clone(),
            placed,
            known: None,
        };
        let out = Tensor::on_device(place, shape, dtype);
        if let Some(behind) = self.last_use(OP, start..start + bytes as u64)? {
            let ordered = self.peer_executor()?.incoming_behind(&behind);
            ordered.map_err(failed(OP))?;
        }
        Ok(out)
    }

    fn put(&self, to: &Tensor, at: usize, bytes: &[u8]) -> Result<()> {
        const OP: &str = "put";
        let (to, _) = self.part(OP, to, &(at..at + bytes.len()))?;
        // SAFETY: the range is the tensor's. Copies and communication already wait for the last use of its memory.
        unsafe { self.peer_executor()?.put(to, bytes) }.map_err(failed(OP))
    }

    fn clear(&self, to: &Tensor, range: Range<usize>) -> Result<()> {
        const OP: &str = "clear";
        let (to, bytes) = self.part(OP, to, &range)?;
        // SAFETY: as in `put`.
        unsafe { self.peer_executor()?.clear(to, bytes) }.map_err(failed(OP))
    }

    fn take(&self, from: &Tensor, at: usize, to: &Tensor, range: Range<usize>) -> Result<()> {
        const OP: &str = "take";
        let (from, _) = self.part(OP, from, &(at..at + range.len()))?;
        let (to, bytes) = self.part(OP, to, &range)?;
        // SAFETY: as in `put`; the caller holds `from`.
        unsafe { self.peer_executor()?.take(from, to, bytes) }.map_err(failed(OP))
    }

    fn pull(&self, peer: usize, offset: u64, to: &Tensor, range: Range<usize>) -> Result<()> {
        const OP: &str = "pull";
        let (to, bytes) = self.part(OP, to, &range)?;
        // SAFETY: as in `put`; the peer keeps the memory of its handle unchanged until it is told otherwise.
        unsafe { self.peer_executor()?.pull(peer, offset, to, bytes) }.map_err(failed(OP))
    }

    fn await_written(&self, of: &Resident) -> Result<()> {
        let Some(behind) = of.written() else {
            return Ok(());
        };
        let ordered = self.peer_executor()?.incoming_behind(behind);
        ordered.map_err(failed("order communication after states"))
    }

    fn arrive(&self) -> Result<()> {
        let queued = self.peer_executor()?.arrive();
        self.counted("arrive", queued)
    }

    fn offset(&self, x: &Tensor) -> Result<u64> {
        Ok(self.address("offset", x)?.0 - self.memory.address())
    }

    fn mark(&self, lane: Lane) -> Result<u64> {
        self.peer_executor()?
            .mark(lane)
            .map_err(failed("record an event"))
    }

    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<()> {
        const OP: &str = "wait for another rank's device";
        let peers = self.peer_executor()?;
        let ordered = peers.await_mark(lane, peer, of, number);
        match lane {
            // A range freed after this wait may be filled only after it, so the wait counts as a use.
            Lane::Compute | Lane::Boundary => self.counted(OP, ordered),
            Lane::Communication => ordered.map_err(failed(OP)),
        }
    }

    fn await_own(&self, number: u64) -> Result<()> {
        let ordered = self.peer_executor()?.await_own(number);
        ordered.map_err(failed("order a copy after work"))
    }
}

impl CudaBackend {
    fn group_executor(&self) -> Result<&dyn GroupExecutor> {
        self.executor.group().ok_or_else(|| KernelError::Device {
            op: "group",
            cause: "no library runs collectives of this device".into(),
        })
    }
}

impl GroupAccess for CudaBackend {
    fn version(&self) -> Result<String> {
        let version = self.group_executor()?.version();
        version.map_err(failed("ask NCCL for its version"))
    }

    fn id(&self) -> Result<Vec<u8>> {
        let id = self.group_executor()?.id();
        id.map_err(failed("name an NCCL group"))
    }

    fn join(&self, id: &[u8], rank: usize, size: usize, deadline: Duration) -> Result<()> {
        let joined = self.group_executor()?.join(id, rank, size, deadline);
        joined.map_err(failed("join the NCCL group"))
    }

    fn all_gather(&self, whole: &Tensor) -> Result<()> {
        const OP: &str = "NCCL all-gather";
        let group = self.group_executor()?;
        let (at, bytes) = self.part(OP, whole, &(0..whole.size_bytes()))?;
        let part = self.divided(OP, whole, bytes, group.size())?;
        // SAFETY: the range is the tensor's. Copies and communication already wait for the last use of its memory.
        unsafe { group.all_gather(at, part) }.map_err(failed(OP))
    }

    fn reduce_scatter(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        const OP: &str = "NCCL reduce-scatter";
        let group = self.group_executor()?;
        let elems = self.divided(OP, from, from.elems() as u64, group.size())?;
        let f32s = [from, to].iter().all(|x| x.dtype() == DType::F32);
        if elems != to.elems() as u64 || !f32s {
            let detail = format!("{from:?} into {to:?} on {} ranks", group.size());
            return Err(KernelError::Shape { op: OP, detail });
        }
        let (from, to) = (self.address(OP, from)?, self.address(OP, to)?);
        // SAFETY: as above; the sizes were compared.
        unsafe { group.reduce_scatter(from, to, elems) }.map_err(failed(OP))
    }
}

impl CudaBackend {
    /// One rank's share of `all`, which the number of ranks must divide.
    fn divided(&self, op: &'static str, x: &Tensor, all: u64, ranks: usize) -> Result<u64> {
        let ranks = ranks as u64;
        if ranks == 0 || !all.is_multiple_of(ranks) {
            let detail = format!("{x:?} on {ranks} ranks");
            return Err(KernelError::Shape { op, detail });
        }
        Ok(all / ranks)
    }
}
