//! The handle of a collective in flight.

use super::endpoint::Endpoint;
use super::op::Op;
use super::{Buffer, CommError, ReadBuffer};
use std::sync::Arc;

/// Handle of a collective in flight, which owns its buffer.
///
/// Peers can read this rank's data from the start on. This rank reads theirs during its waits, including
/// those for its other tickets. Dropping a ticket gives up the result without effect on the peers. For an
/// all-reduce the drop waits, since the peers need this rank's sum.
#[derive(Debug)]
#[must_use = "dropping a ticket gives up the result"]
pub struct Ticket {
    /// `None` in a dry run.
    flight: Option<(Arc<Endpoint>, Arc<Op>)>,
    /// `None` after it was handed out.
    buffer: Option<Buffer>,
}

impl Ticket {
    pub(super) fn new(endpoint: Arc<Endpoint>, op: Arc<Op>, buffer: Buffer) -> Self {
        Self {
            flight: Some((endpoint, op)),
            buffer: Some(buffer),
        }
    }

    /// A ticket of a dry run, which never waits.
    pub(super) const fn done(buffer: Buffer) -> Self {
        Self {
            flight: None,
            buffer: Some(buffer),
        }
    }

    /// Whether [`Ticket::wait_read`] would return at once. The call first advances the collective as far as
    /// possible without waiting. A dead communicator counts as done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        let flight = self.flight.as_ref();
        flight.is_none_or(|(endpoint, op)| endpoint.poll(op).unwrap_or(true))
    }

    /// Waits for the collective's result, and until every peer has finished reading this rank's data. Returns
    /// the buffer with the result, which may be overwritten.
    ///
    /// # Errors
    /// [`CommError::Timeout`], [`CommError::Mismatch`] or [`CommError::Aborted`].
    pub fn wait(self) -> Result<Buffer, CommError> {
        self.wait_read()?.reclaim()
    }

    /// Waits for the collective's result only, and returns it in a read-only buffer, since slower peers may
    /// still be reading it.
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
