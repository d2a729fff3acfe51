//! Access to the memory of other ranks' devices, the basis of collectives between devices.
//!
//! Ranks pull. A rank that has data for others publishes its offset, and marks the point in its queue after which the
//! data is valid. The others wait for the mark, copy the data, and then mark their own queue. No rank writes into
//! another rank's memory. Every wait happens on the device; the host only queues.

use crate::error::Result;
use crate::pool::Tag;
use crate::resident::Resident;
use crate::{DType, Shape, Tensor};
use std::ops::Range;
use std::time::Duration;

/// Queue (CUDA stream) of a device. A rank marks points in its queues, and queues of other ranks wait for
/// these marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Lane {
    /// Queue that computation runs on.
    Compute,
    /// Queue of communication between ranks. It runs beside computation and host-to-device copies.
    Communication,
    /// The compute queue with marks of its own, for transfers between pipeline stages. A pass makes too few of them to
    /// reuse one that a neighbor has not waited for.
    Boundary,
}

/// Device that copies data from other ranks' devices (peer access), without a library such as NCCL. Calls
/// queue work and return, except [`PeerAccess::name`] and [`PeerAccess::join`].
pub trait PeerAccess: Send + Sync + std::fmt::Debug {
    /// Handle that other ranks need to open this device's memory and marks.
    ///
    /// # Errors
    /// When the driver or the container forbids sharing.
    fn name(&self) -> Result<Vec<u8>>;

    /// Opens the devices of all ranks; `names` are their handles in rank order, and `rank` is this one. From here on
    /// a wait for this device that takes longer than `deadline` fails, because it may depend on a rank that died.
    ///
    /// # Errors
    /// When a device cannot be reached from this one.
    fn join(&self, rank: usize, names: &[Vec<u8>], deadline: Duration) -> Result<()>;

    /// Allocates a tensor with unspecified contents, to be filled by communication or host-to-device copies.
    ///
    /// # Errors
    /// When the pool is full or the device fails.
    fn incoming(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor>;

    /// Copies host bytes into an incoming tensor, starting at its byte `at`. Communication queued later waits for the
    /// copy.
    ///
    /// # Errors
    /// When the range is out of bounds or the device fails.
    fn put(&self, to: &Tensor, at: usize, bytes: &[u8]) -> Result<()>;

    /// Sets the bytes `range` of an incoming tensor to zero, on the communication queue.
    ///
    /// # Errors
    /// When the range is out of bounds or the device fails.
    fn clear(&self, to: &Tensor, range: Range<usize>) -> Result<()>;

    /// Copies from a tensor of this device, starting at byte `at`, into the bytes `range` of an incoming tensor, on
    /// the communication queue.
    ///
    /// # Errors
    /// When the range is out of bounds or the device fails.
    fn take(&self, from: &Tensor, at: usize, to: &Tensor, range: Range<usize>) -> Result<()>;

    /// Copies from byte `offset` of rank `peer`'s memory into the bytes `range` of an incoming tensor, on the
    /// communication queue.
    ///
    /// # Errors
    /// When the range is out of bounds or the device fails.
    fn pull(&self, peer: usize, offset: u64, to: &Tensor, range: Range<usize>) -> Result<()>;

    /// Makes communication wait for the last change of a state, if [`crate::ResidentAccess::record_write`]
    /// recorded an event for it.
    ///
    /// # Errors
    /// When the device fails.
    fn await_written(&self, of: &Resident) -> Result<()>;

    /// Makes computation wait for all communication queued so far.
    ///
    /// # Errors
    /// When the device fails.
    fn arrive(&self) -> Result<()>;

    /// Byte offset of a tensor in this device's memory, for [`PeerAccess::pull`] by other ranks.
    ///
    /// # Errors
    /// When the tensor is not in this device's memory.
    fn offset(&self, x: &Tensor) -> Result<u64>;

    /// Marks the current end of a queue. The result is the mark's number: 1, 2, … per queue. Only some dozen marks
    /// are stored, so a peer must queue its wait before they are reused.
    ///
    /// # Errors
    /// When the device fails.
    fn mark(&self, lane: Lane) -> Result<u64>;

    /// Makes `lane` wait for mark `number` of the queue `of` on rank `peer`.
    ///
    /// # Errors
    /// When the device fails.
    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<()>;

    /// Makes communication wait for this device's own mark `number` of the compute queue.
    ///
    /// # Errors
    /// When the device fails.
    fn await_own(&self, number: u64) -> Result<()>;
}

/// Collectives of a device through a library such as NCCL, in one communicator. They run beside computation.
/// Every rank must issue the same collectives in the same order.
pub trait GroupAccess: Send + Sync + std::fmt::Debug {
    /// Version of the library that provides the collectives.
    ///
    /// # Errors
    /// When the library is missing.
    fn version(&self) -> Result<String>;

    /// Creates a unique id for a communicator. One rank calls it for all.
    ///
    /// # Errors
    /// When the library is missing or finds no network interface.
    fn id(&self) -> Result<Vec<u8>>;

    /// Joins the communicator `id` as `rank` of `size`, and returns after all ranks joined. From here on this call
    /// and every operation fail after `deadline`.
    ///
    /// # Errors
    /// When the ranks do not reach each other in time.
    fn join(&self, id: &[u8], rank: usize, size: usize, deadline: Duration) -> Result<()>;

    /// All-gather in place on an incoming tensor: equal parts in rank order. This rank's part must already be there.
    ///
    /// # Errors
    /// When the tensor cannot be divided by the number of ranks, or the library fails.
    fn all_gather(&self, whole: &Tensor) -> Result<()>;

    /// Reduce-scatter (sum): writes this rank's part of the sum of all ranks' `from` into the incoming tensor `to`.
    /// Both are f32.
    ///
    /// # Errors
    /// When `from` is not `to` times the number of ranks, or the library fails.
    fn reduce_scatter(&self, from: &Tensor, to: &Tensor) -> Result<()>;
}
