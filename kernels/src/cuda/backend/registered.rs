//! Host memory that stays page-locked where it is while an owner holds it.
#![expect(unsafe_code, reason = "the executor reads memory that the owner keeps")]

use super::{CudaBackend, Executor};
use crate::error::Result;
use crate::{ForeignBytes, HostRegistration};
use std::sync::Arc;

/// Registered memory, and the executor that reads it.
struct Registered {
    executor: Arc<dyn Executor>,
    bytes: ForeignBytes,
}

impl Drop for Registered {
    #[expect(clippy::mem_forget, reason = "the GPU may still read the memory")]
    fn drop(&mut self) {
        if !self.executor.unregister((*self.bytes).as_ref()) {
            std::mem::forget(self.bytes.clone());
        }
    }
}

impl HostRegistration {
    /// Registers `bytes`; `None` if the executor has no such memory.
    pub(super) fn new(executor: &Arc<dyn Executor>, bytes: ForeignBytes) -> Result<Option<Self>> {
        let all = (*bytes).as_ref();
        let len = all.len() as u64;
        // SAFETY: foreign bytes are read-only, and `Registered` holds them until they are unregistered.
        let registered = unsafe { executor.register(all) };
        let registered = registered.map_err(CudaBackend::device_error("register host memory"))?;
        let executor = executor.clone();
        Ok(registered.then(|| Self::of(len, Arc::new(Registered { executor, bytes }))))
    }
}
