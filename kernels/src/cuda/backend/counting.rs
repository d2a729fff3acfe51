//! Meta device of a GPU: the operations of the real one, with launches that are not executed.
//!
//! The same code allocates outputs and scratch memory, so a plan gets the offsets of the later run, whatever an
//! operation needs.

use super::{Cause, CudaBackend, Event, Executor, GroupExecutor, PeerExecutor, Take, Upload};
use crate::cuda::device_kind::DeviceKind;
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::Multiply;
use crate::cuda::module::Module;
use crate::peers::Lane;
use crate::pool::Pool;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Start of the imaginary memory, aligned like a device's.
const START: Address = Address(1 << 40);
/// Size of the imaginary memory in bytes, more than any device has.
const BYTES: u64 = 1 << 50;

/// Executor that accepts every call and does nothing.
#[derive(Debug)]
struct Nowhere {
    kind: DeviceKind,
    /// Modules of all launches.
    modules: Mutex<HashSet<Module>>,
    /// Number of ranks of the joined communicator.
    ranks: AtomicUsize,
}

impl CudaBackend {
    /// Meta device of a GPU of this kind, without a memory limit: launches are not executed, and bytes are
    /// counted as on the real GPU. Row numbers and labels have values; all other tensors have none.
    #[must_use]
    pub fn counting(kind: DeviceKind) -> Self {
        Self::counting_within(kind, BYTES)
    }

    /// Meta device as [`CudaBackend::counting`] makes, whose memory is limited to `bytes` bytes. Allocations beyond
    /// them fail.
    #[must_use]
    pub fn counting_within(kind: DeviceKind, bytes: u64) -> Self {
        let executor = Arc::new(Nowhere {
            kind,
            modules: Mutex::default(),
            ranks: AtomicUsize::new(0),
        });
        Self::at(executor, START, Pool::arena("GPU", bytes))
    }
}

// SAFETY: there is no memory, and nothing is read or written.
unsafe impl Executor for Nowhere {
    fn kind(&self) -> DeviceKind {
        self.kind
    }

    fn has_values(&self) -> bool {
        false
    }

    /// Always fails, so an operation that allocates outside the arena fails in every plan.
    fn allocate(&self, _bytes: u64) -> Result<Address, Cause> {
        Err("a device has one arena, which was taken".into())
    }

    fn free(&self, _memory: Address) {}

    unsafe fn write(&self, _to: Address, _bytes: &[u8]) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn read(&self, _from: Address, _bytes: &mut [u8]) -> Result<(), Cause> {
        Err("the meta device has no values".into())
    }

    unsafe fn zero(&self, _at: Address, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn copy(&self, _from: Address, _to: Address, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    fn record_event(&self) -> Result<Event, Cause> {
        Ok(Arc::new(()))
    }

    unsafe fn upload(&self, _uploads: &[Upload<'_>]) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn deliver(&self, _to: Address, _bytes: &[u8], _behind: &Event) -> Result<(), Cause> {
        Ok(())
    }

    fn delivered(&self) -> Result<Event, Cause> {
        Ok(Arc::new(()))
    }

    unsafe fn fetch(
        &self,
        _from: Address,
        _bytes: u64,
        _behind: &Event,
        _take: &mut Take<'_>,
    ) -> Result<(), Cause> {
        Err("the meta device has no values".into())
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if !modules.contains(&launch.module) {
            modules.insert(launch.module.clone());
        }
        Ok(())
    }

    fn launched(&self) -> Vec<Module> {
        let modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut modules: Vec<Module> = modules.iter().cloned().collect();
        modules.sort();
        modules
    }

    unsafe fn multiply(
        &self,
        _product: &Multiply,
        _workspace: Address,
        _workspace_bytes: u64,
    ) -> Result<bool, Cause> {
        Ok(true)
    }

    fn peers(&self) -> Option<&dyn PeerExecutor> {
        Some(self)
    }

    fn group(&self) -> Option<&dyn GroupExecutor> {
        Some(self)
    }
}

impl PeerExecutor for Nowhere {
    fn name(&self, _memory: Address) -> Result<Vec<u8>, Cause> {
        Ok(Vec::new())
    }

    fn join(&self, _rank: usize, _names: &[Vec<u8>], _: Duration) -> Result<(), Cause> {
        Ok(())
    }

    fn incoming_behind(&self, _event: &Event) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn put(&self, _to: Address, _bytes: &[u8]) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn clear(&self, _at: Address, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn take(&self, _from: Address, _to: Address, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn pull(&self, _: usize, _offset: u64, _to: Address, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    fn arrive(&self) -> Result<(), Cause> {
        Ok(())
    }

    fn mark(&self, _lane: Lane) -> Result<u64, Cause> {
        Ok(1)
    }

    fn await_mark(&self, _: Lane, _peer: usize, _of: Lane, _number: u64) -> Result<(), Cause> {
        Ok(())
    }

    fn await_own(&self, _number: u64) -> Result<(), Cause> {
        Ok(())
    }
}

impl GroupExecutor for Nowhere {
    fn version(&self) -> Result<String, Cause> {
        Ok(String::new())
    }

    fn id(&self) -> Result<Vec<u8>, Cause> {
        Ok(Vec::new())
    }

    fn join(&self, _: &[u8], _rank: usize, size: usize, _: Duration) -> Result<(), Cause> {
        self.ranks.store(size, Ordering::Relaxed);
        Ok(())
    }

    fn size(&self) -> usize {
        self.ranks.load(Ordering::Relaxed)
    }

    unsafe fn all_gather(&self, _whole: Address, _part: u64) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn reduce_scatter(&self, _: Address, _: Address, _elems: u64) -> Result<(), Cause> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device_kind::AttentionBackward;
    use crate::cuda::module::Family;
    use crate::{Backend, DType, Shape, Tag};

    #[test]
    fn a_meta_device_lists_the_modules_of_a_run() {
        let device = CudaBackend::counting(DeviceKind {
            multiprocessors: 2,
            compute_capability: None,
            has_library: false,
            attention_backward: AttentionBackward::Split,
        });
        assert!(device.launched().modules.is_empty());
        let shape = Shape::new(&[4, 8]);
        let x = device
            .zeros(shape, DType::F32, Tag::Activations)
            .expect("zeros");
        for _ in 0..2 {
            device.cast(&x, DType::BF16).expect("a cast");
            device.scale(&x, 2.0).expect("a product");
        }
        let modules = device.launched().modules;
        let families: Vec<_> = modules.iter().map(Module::family).collect();
        assert_eq!(families, [Some(Family::Cast), Some(Family::Pointwise)]);
    }
}
