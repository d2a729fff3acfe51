//! A communicator that calls a function before each collective.

use engine::comm::{Buffer, Collective, CommError, Communicator, Ticket, WindowUsage, World};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The communicator `inner`, with a call of `before` when this rank starts a collective.
pub struct Hooked<F> {
    pub inner: Arc<dyn Communicator>,
    pub before: F,
}

impl<F> fmt::Debug for Hooked<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

impl<F: Fn(&Collective) + Send + Sync> Communicator for Hooked<F> {
    fn world(&self) -> World {
        self.inner.world()
    }
    fn alloc(&self, bytes: usize) -> Result<Buffer, CommError> {
        self.inner.alloc(bytes)
    }
    fn start(&self, op: Collective, buffer: Buffer) -> Result<Ticket, CommError> {
        (self.before)(&op);
        self.inner.start(op, buffer)
    }
    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
    fn failure(&self) -> Option<CommError> {
        self.inner.failure()
    }
    fn memory(&self) -> WindowUsage {
        self.inner.memory()
    }
    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }
    fn time_spent(&self) -> Duration {
        self.inner.time_spent()
    }
}
