//! Transfers between pipeline stages whose devices read each other's memory.
//!
//! 1. The sender offers values: their offsets in its device's memory, and a mark after the work that writes them.
//! 2. The receiver's device waits for the mark and copies the values. The receiver answers with a mark after the copies.
//! 3. The sender reads the answer at its next transfer to the same neighbor, or before an update. Until then it keeps the
//!    values, which are *borrowed*. Its device waits for the answered mark before it reuses their memory.
//!
//! Only messages pass through host memory. Equal steps allocate device memory at equal offsets.

use super::Result;
use crate::access::BoundaryTensor;
use crate::comm::mesh::{Answer, Mesh, Neighbor};
use crate::store::open_devices::peers_of;
use kernels::{Backend, Lane, Tag};
use std::sync::Arc;

/// Values that a neighbor may still be reading.
#[derive(Debug)]
struct Borrowed {
    _values: Vec<BoundaryTensor>,
    answer: Answer,
}

/// The transfers of one pipeline stage.
#[derive(Debug)]
pub(super) struct DeviceTransfers {
    mesh: Mesh,
    backend: Arc<dyn Backend>,
    /// By [`Neighbor`]: the last transfer to it.
    borrowed: [Option<Borrowed>; 2],
}

impl DeviceTransfers {
    /// Transfers from and to `backend`, to which the devices of all ranks of `mesh` are open.
    pub(super) fn new(mesh: &Mesh, backend: Arc<dyn Backend>) -> Self {
        Self {
            mesh: mesh.clone(),
            backend,
            borrowed: [None, None],
        }
    }

    /// Starts a transfer, after the neighbor has queued its copies of the previous one.
    pub(super) fn send(&mut self, to: Neighbor, values: &[BoundaryTensor]) -> Result<()> {
        let peers = peers_of(&*self.backend)?;
        let offsets = values.iter().map(|passed| peers.offset(&passed.value));
        let mut words = offsets.collect::<Result<Vec<u64>, _>>()?;
        words.push(peers.mark(Lane::Boundary)?);
        self.synchronize(to)?;
        let described: Vec<_> = values.iter().map(BoundaryTensor::described).collect();
        let answer = self.mesh.offer(to, &described, &words)?;
        self.borrowed[to as usize] = Some(Borrowed {
            _values: values.to_vec(),
            answer,
        });
        Ok(())
    }

    /// Queues the copies of the values that a neighbor offers next.
    pub(super) fn receive(&self, from: Neighbor) -> Result<Vec<BoundaryTensor>> {
        let peers = peers_of(&*self.backend)?;
        let (values, words) = self.mesh.offered(from)?;
        let peer = self.mesh.rank_of(from);
        let written = words[values.len()];
        peers.await_mark(Lane::Communication, peer, Lane::Boundary, written)?;
        let mut received = Vec::with_capacity(values.len());
        for (sent, offset) in values.iter().zip(words) {
            let value = peers.incoming(sent.shape, sent.dtype, Tag::Activations)?;
            peers.pull(peer, offset, &value, 0..sent.bytes())?;
            received.push(BoundaryTensor {
                index: sent.index,
                wants_gradient: sent.wants_gradient,
                value,
            });
        }
        peers.arrive()?;
        self.mesh.answer(from, peers.mark(Lane::Boundary)?)?;
        Ok(received)
    }

    /// Waits until the neighbors have queued their copies of all transfers.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.synchronize(Neighbor::Previous)?;
        self.synchronize(Neighbor::Next)
    }

    /// Frees the values of the last transfer to a neighbor. Work that is queued from now on waits for their copies.
    fn synchronize(&mut self, to: Neighbor) -> Result<()> {
        if let Some(borrowed) = self.borrowed[to as usize].take() {
            let copied = borrowed.answer.wait()?;
            let peer = self.mesh.rank_of(to);
            peers_of(&*self.backend)?.await_mark(Lane::Compute, peer, Lane::Boundary, copied)?;
        }
        Ok(())
    }
}

impl Drop for DeviceTransfers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.mesh.abort("panicked with a transfer in flight");
        } else if self.mesh.failure().is_none() {
            // The neighbors may still be reading this rank's memory. A failure leaves nothing to wait for.
            self.wait().ok();
        }
    }
}
