//! Memory of a device that the devices of other ranks read: what collectives between devices are made of.
//!
//! Ranks pull. Who has something that others need says where it lies and marks the point in its queue behind which it is
//! there; the others wait for the mark, copy, and mark in turn that they are done. Nothing is pushed into memory of
//! another rank, and every wait is the device's: the host only queues.

use crate::error::Result;
use crate::pool::Tag;
use crate::resident::Resident;
use crate::{DType, Shape, Tensor};
use std::ops::Range;
use std::time::Duration;

/// The queues of a device that ranks order against each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Lane {
    /// What computes.
    Compute,
    /// What ranks tell each other, beside computing and beside copies from the host.
    Communication,
}

/// A device among those of other ranks. Calls queue and return, but for [`PeerAccess::name`] and [`PeerAccess::join`].
pub trait PeerAccess: Send + Sync + std::fmt::Debug {
    /// What other ranks need to reach this device's memory and marks.
    ///
    /// # Errors
    /// When the driver or the container forbids sharing.
    fn name(&self) -> Result<Vec<u8>>;

    /// Opens the devices of all ranks, named in rank order; this one is `rank`. A wait for this device that takes longer than
    /// `deadline` fails from here on: it may wait for a device whose rank is gone.
    ///
    /// # Errors
    /// When a device cannot be reached from this one.
    fn join(&self, rank: usize, names: &[Vec<u8>], deadline: Duration) -> Result<()>;

    /// A tensor with unspecified contents, for communication and copies from the host to fill.
    ///
    /// # Errors
    /// When the pool is full or the device fails.
    fn incoming(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor>;

    /// Host bytes into an incoming tensor, from its byte `at` on; communication goes on behind them.
    ///
    /// # Errors
    /// When they do not fit or the device fails.
    fn put(&self, to: &Tensor, at: usize, bytes: &[u8]) -> Result<()>;

    /// Communication: zeros into the bytes `range` of an incoming tensor.
    ///
    /// # Errors
    /// When they lie outside or the device fails.
    fn clear(&self, to: &Tensor, range: Range<usize>) -> Result<()>;

    /// Communication: the bytes `range` of an incoming tensor from those of a tensor of this device, from its byte `at` on.
    ///
    /// # Errors
    /// When they lie outside or the device fails.
    fn take(&self, from: &Tensor, at: usize, to: &Tensor, range: Range<usize>) -> Result<()>;

    /// Communication: the bytes `range` of an incoming tensor from those at `offset` of the memory of another rank.
    ///
    /// # Errors
    /// When they lie outside or the device fails.
    fn pull(&self, peer: usize, offset: u64, to: &Tensor, range: Range<usize>) -> Result<()>;

    /// Communication goes on behind the last change of states, where a moment behind it was taken.
    ///
    /// # Errors
    /// When the device fails.
    fn await_settled(&self, of: &Resident) -> Result<()>;

    /// Computing goes on behind all communication that is queued.
    ///
    /// # Errors
    /// When the device fails.
    fn arrive(&self) -> Result<()>;

    /// Where a tensor begins in this device's memory.
    ///
    /// # Errors
    /// When it lies elsewhere.
    fn offset(&self, x: &Tensor) -> Result<u64>;

    /// Marks the end of a lane as it is: a number from 1 on, ascending by lane. Some dozen marks are kept; a peer must
    /// have queued its wait by then.
    ///
    /// # Errors
    /// When the device fails.
    fn mark(&self, lane: Lane) -> Result<u64>;

    /// `lane` goes on behind the mark `number` of a lane of another rank.
    ///
    /// # Errors
    /// When the device fails.
    fn await_mark(&self, lane: Lane, peer: usize, of: Lane, number: u64) -> Result<()>;

    /// Communication goes on behind this device's own mark `number` of what computes.
    ///
    /// # Errors
    /// When the device fails.
    fn await_own(&self, number: u64) -> Result<()>;
}

/// A device in a group whose collectives a library runs, beside its computing (NCCL). Every rank issues the same ones in
/// the same order.
pub trait GroupAccess: Send + Sync + std::fmt::Debug {
    /// The library's version.
    ///
    /// # Errors
    /// When there is no library.
    fn version(&self) -> Result<String>;

    /// A fresh name for a group, made by one rank for all.
    ///
    /// # Errors
    /// When there is no library, or no network to meet on.
    fn id(&self) -> Result<Vec<u8>>;

    /// Joins the group `id` as `rank` of `size`; returns when all have come. What is not done after `deadline` fails, this
    /// call and every operation.
    ///
    /// # Errors
    /// When the ranks do not reach each other, or do not come in time.
    fn join(&self, id: &[u8], rank: usize, size: usize, deadline: Duration) -> Result<()>;

    /// Communication: every rank's part of an incoming tensor, one rank's behind the other's; its own is there.
    ///
    /// # Errors
    /// When it cannot be divided or the library fails.
    fn all_gather(&self, whole: &Tensor) -> Result<()>;

    /// Communication: into the incoming tensor `to` this rank's part of the sum over all ranks of `from`, both f32.
    ///
    /// # Errors
    /// When `from` has not as many parts as there are ranks or the library fails.
    fn reduce_scatter(&self, from: &Tensor, to: &Tensor) -> Result<()>;
}
