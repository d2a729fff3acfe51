//! Threads that send values to the neighboring pipeline stages while the rank computes, one for each neighbor.
//!
//! A transfer's tensors move to the thread and back. The rank receives them at its next transfer to the same neighbor, or
//! before an update, not when the thread is done. Equal steps therefore allocate device memory at equal offsets; the
//! threads affect only time.

use super::Result;
use crate::access::BoundaryTensor;
use crate::comm::mesh::{Mesh, Neighbor, Sent};
use crate::error::EngineError;
use crate::offload::tier::Tiers;
use crate::offload::worker::Worker;
use crate::trace::Lane;
use kernels::Fetch;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Values on their way to a neighbor.
#[derive(Debug)]
struct Transfer {
    to: Neighbor,
    /// Descriptions, and the copies to the host that wait only for the work queued before the transfer.
    values: Vec<(Sent, Fetch)>,
    outcome: Result<()>,
}

impl Transfer {
    fn of(to: Neighbor, values: &[BoundaryTensor]) -> Result<Self> {
        let described = values
            .iter()
            .map(|passed| Ok((passed.described(), passed.value.fetch()?)));
        Ok(Self {
            to,
            values: described.collect::<Result<_>>()?,
            outcome: Ok(()),
        })
    }

    fn send(&self, mesh: &Mesh) -> Result<()> {
        let sent: Vec<Sent> = self.values.iter().map(|(sent, _)| *sent).collect();
        mesh.send(self.to, &sent, |position, bytes| {
            Ok(self.values[position].1.bytes_into(bytes)?)
        })
    }
}

/// The threads of one pipeline stage.
#[derive(Debug)]
pub(super) struct Senders {
    mesh: Mesh,
    previous: Worker<Transfer, ()>,
    next: Worker<Transfer, ()>,
    /// Whether a transfer failed and ended all groups of this rank.
    failed: Arc<AtomicBool>,
}

impl Senders {
    /// Starts the threads; none without pipeline stages.
    pub(super) fn start(mesh: &Mesh, tiers: &Tiers) -> Result<Self> {
        let at = mesh.coordinates();
        let failed = Arc::new(AtomicBool::new(false));
        let worker = |lane: Lane, exists: bool| {
            if !exists {
                return Ok(Worker::idle());
            }
            let (mesh, trace) = (mesh.clone(), tiers.trace().clone());
            let failed = failed.clone();
            tiers.worker("boundary", move |job: &mut Transfer, (): ()| {
                let started = trace.now();
                job.outcome = job.send(&mesh);
                trace.end(started, lane, || "boundary".into());
                // Otherwise the neighbor would wait for values that do not come.
                if let (Err(error), None) = (&job.outcome, mesh.failure()) {
                    failed.store(true, Ordering::SeqCst);
                    mesh.abort(&error.to_string());
                }
            })
        };
        Ok(Self {
            mesh: mesh.clone(),
            previous: worker(Lane::ToPrevious, at.stage > 0)?,
            next: worker(Lane::ToNext, !at.is_last())?,
            failed,
        })
    }

    /// Starts a transfer, after the previous one to the same neighbor.
    pub(super) fn send(&mut self, to: Neighbor, values: &[BoundaryTensor]) -> Result<()> {
        let transfer = Transfer::of(to, values)?;
        let worker = match to {
            Neighbor::Previous => &mut self.previous,
            Neighbor::Next => &mut self.next,
        };
        receive(worker)?;
        Ok(worker.send(transfer, ())?)
    }

    /// Waits for the transfers that were started.
    pub(super) fn wait(&mut self) -> Result<()> {
        let outcome = receive(&mut self.previous);
        outcome.and(receive(&mut self.next))
    }

    /// The error of the transfer that ended all groups of this rank, or `error` if none did.
    pub(super) fn cause_of(&mut self, error: EngineError) -> EngineError {
        match self.failed.load(Ordering::SeqCst) {
            true => self.wait().err().unwrap_or(error),
            false => error,
        }
    }
}

impl Drop for Senders {
    fn drop(&mut self) {
        // A thread that waits for a neighbor would wait until its deadline.
        if std::thread::panicking() {
            self.mesh.abort("panicked with a transfer in flight");
        }
    }
}

/// Waits for the last transfer of a thread, if any.
fn receive(worker: &mut Worker<Transfer, ()>) -> Result<()> {
    match worker.open() {
        0 => Ok(()),
        _ => worker.receive()?.outcome,
    }
}
