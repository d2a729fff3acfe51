//! The handle of a collective in flight.

use super::endpoint::Endpoint;
use super::op::Op;
use super::{Buffer, CommError, ReadBuffer};
use std::sync::Arc;

/// A collective in flight, and the buffer it works in.
///
/// Peers can read this rank's data from the start on; this rank's own reading happens in the waits,
/// in those of its other tickets too. A dropped ticket gives up the result without harm to the
/// peers; only for an all-reduce does the drop wait, because the peers need this rank's sum.
#[derive(Debug)]
#[must_use = "dropping a ticket gives up the result"]
pub struct Ticket {
    /// `None` in a dry run.
    flight: Option<(Arc<Endpoint>, Arc<Op>)>,
    /// `None` once handed out.
    buffer: Option<Buffer>,
}

impl Ticket {
    pub(super) fn new(endpoint: Arc<Endpoint>, op: Arc<Op>, buffer: Buffer) -> Self {
        Self {
            flight: Some((endpoint, op)),
            buffer: Some(buffer),
        }
    }

    /// Of a dry run, where nothing is waited for.
    pub(super) const fn done(buffer: Buffer) -> Self {
        Self {
            flight: None,
            buffer: Some(buffer),
        }
    }

    /// Whether [`Ticket::wait_read`] would return at once. Does the reading that is possible
    /// without waiting; a dead communicator counts as done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        let flight = self.flight.as_ref();
        flight.is_none_or(|(endpoint, op)| endpoint.poll(op).unwrap_or(true))
    }

    /// Waits for the result and until every peer has finished reading this rank's data: the buffer
    /// may then be overwritten.
    ///
    /// # Errors
    /// [`CommError::Timeout`], [`CommError::Mismatch`] or [`CommError::Aborted`].
    pub fn wait(self) -> Result<Buffer, CommError> {
        self.wait_read()?.reclaim()
    }

    /// Waits for the result only. Slower peers may still be reading, so that the buffer is
    /// read-only; this rank need not wait for them.
    ///
    /// # Errors
    /// [`CommError::Timeout`], [`CommError::Mismatch`] or [`CommError::Aborted`].
    pub fn wait_read(mut self) -> Result<ReadBuffer, CommError> {
        if let Some((endpoint, op)) = &self.flight {
            endpoint.complete(op)?;
        }
        let buffer = self
            .buffer
            .take()
            .expect("a ticket holds its buffer until it is consumed");
        Ok(ReadBuffer::new(buffer))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let (Some(_), Some((endpoint, op))) = (&self.buffer, &self.flight) {
            endpoint.abandon(op);
        }
    }
}
