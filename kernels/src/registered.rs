//! Host memory that a discrete device has page-locked.

use std::any::Any;
use std::sync::Arc;

/// Host memory that a discrete device has page-locked where it is. Copies to the device read it in place, without a
/// pinned chunk in between. Dropping it waits for these copies.
pub struct HostRegistration {
    bytes: u64,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl HostRegistration {
    /// Memory of `bytes` bytes that `owner` unregisters when it is dropped.
    #[cfg(feature = "cuda")]
    pub(crate) fn of(bytes: u64, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            bytes,
            _owner: owner,
        }
    }

    /// Size of the memory in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl std::fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostRegistration({} bytes)", self.bytes)
    }
}
