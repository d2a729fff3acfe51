//! Collectives between devices, from the side of one: tensors that the inward lane fills from other ranks' memory.

use super::{Cause, CudaBackend, Moment};
use crate::cuda::launch::Address;
use crate::error::{KernelError, Result};
use crate::peers::{Lane, PeerAccess};
use crate::pool::Tag;
use crate::tensor::OnDevice;
use crate::{DType, Shape, Tensor};
use std::ops::Range;

/// Lanes of an executor that other ranks' executors read and wait for. Each lane is in order, and the two are ordered
/// by moments, arrivals and marks only.
pub trait PeerExecutor: Send + Sync {
    /// What other ranks need to reach the allocation that begins at `memory`, and the marks.
    ///
    /// # Errors
    /// When the device or its surroundings forbid sharing.
    fn name(&self, memory: Address) -> Result<Vec<u8>, Cause>;

    /// Opens the executors of all ranks, named in rank order; this one is `rank`.
    ///
    /// # Errors
    /// When one cannot be reached.
    fn join(&self, rank: usize, names: &[Vec<u8>]) -> Result<(), Cause>;

    /// The inward lane goes on behind the moment.
    ///
    /// # Errors
    /// When the device fails.
    fn inward_behind(&self, moment: &Moment) -> Result<(), Cause>;

    /// Inward: host bytes to the device.
    ///
    /// # Safety
    /// The range lies in allocated memory that nobody uses until the lane has passed.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn put(&self, to: Address, bytes: &[u8]) -> Result<(), Cause>;

    /// Inward: zeros.
    ///
    /// # Safety
    /// As for [`PeerExecutor::put`].
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn clear(&self, at: Address, bytes: u64) -> Result<(), Cause>;

    /// Inward: bytes at an offset of the named memory of rank `peer`.
    ///
    /// # Safety
    /// As for [`PeerExecutor::put`]; the peer's range lies in its memory, and what was there at the last mark waited for
    /// stays until this lane has passed.
    ///
    /// # Errors
    /// When the device fails or no such rank joined.
    unsafe fn pull(&self, peer: usize, offset: u64, to: Address, bytes: u64) -> Result<(), Cause>;

    /// Computing goes on behind everything inward.
    ///
    /// # Errors
    /// When the device fails.
    fn arrive(&self) -> Result<(), Cause>;

    /// Marks the end of a lane: a number from 1 on, ascending by lane.
    ///
    /// # Errors
    /// When the device fails.
    fn mark(&self, lane: Lane) -> Result<u64, Cause>;

    /// `lane` goes on behind a mark of rank `peer`.
    ///
    /// # Errors
    /// When the device fails or no such rank joined.
    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<(), Cause>;
}

impl CudaBackend {
    fn peer_executor(&self) -> Result<&dyn PeerExecutor> {
        self.executor.peers().ok_or_else(|| KernelError::Device {
            op: "peers",
            cause: "the device shares no memory".into(),
        })
    }

    /// The bytes `range` of a tensor.
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

    fn join(&self, rank: usize, names: &[Vec<u8>]) -> Result<()> {
        let joined = self.peer_executor()?.join(rank, names);
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
            let ordered = self.peer_executor()?.inward_behind(&behind);
            ordered.map_err(failed(OP))?;
        }
        Ok(out)
    }

    fn put(&self, to: &Tensor, at: usize, bytes: &[u8]) -> Result<()> {
        const OP: &str = "put";
        let (to, _) = self.part(OP, to, &(at..at + bytes.len()))?;
        // SAFETY: the range is the tensor's, whose place the inward lane entered behind its last use.
        unsafe { self.peer_executor()?.put(to, bytes) }.map_err(failed(OP))
    }

    fn clear(&self, to: &Tensor, range: Range<usize>) -> Result<()> {
        const OP: &str = "clear";
        let (to, bytes) = self.part(OP, to, &range)?;
        // SAFETY: as in `put`.
        unsafe { self.peer_executor()?.clear(to, bytes) }.map_err(failed(OP))
    }

    fn pull(&self, peer: usize, offset: u64, to: &Tensor, range: Range<usize>) -> Result<()> {
        const OP: &str = "pull";
        let (to, bytes) = self.part(OP, to, &range)?;
        // SAFETY: as in `put`; the peer lends what it has named until it is told otherwise.
        unsafe { self.peer_executor()?.pull(peer, offset, to, bytes) }.map_err(failed(OP))
    }

    fn arrive(&self) -> Result<()> {
        self.uses.count();
        self.peer_executor()?.arrive().map_err(failed("arrive"))
    }

    fn offset(&self, x: &Tensor) -> Result<u64> {
        Ok(self.address("offset", x)?.0 - self.memory.address())
    }

    fn mark(&self, lane: Lane) -> Result<u64> {
        self.peer_executor()?.mark(lane).map_err(failed("mark"))
    }

    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<()> {
        if lane == Lane::Compute {
            // A place that is given back behind this may be filled inward behind this only.
            self.uses.count();
        }
        let peers = self.peer_executor()?;
        let ordered = peers.await_mark(lane, peer, of, number);
        ordered.map_err(failed("wait for another rank's device"))
    }
}
