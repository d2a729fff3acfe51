//! A GPU without memory: the operations of the real one, with launches that nobody executes.
//!
//! It is the same code that takes outputs and scratch memory, so a plan knows the places that a run will get, whatever
//! an operation needs.

use super::{Cause, CudaBackend, Executor, Moment};
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::Multiply;
use crate::pool::Pool;
use std::sync::Arc;

/// Where the memory that is not there begins: aligned as a device's own.
const START: Address = Address(1 << 40);
/// More than any device has.
const BYTES: u64 = 1 << 50;

/// Accepts everything and does nothing.
#[derive(Debug)]
struct Nowhere {
    multiprocessors: u32,
    multiplies: bool,
}

impl CudaBackend {
    /// A GPU of `multiprocessors` that only counts, without a limit; `multiplies`: whether products go through a library,
    /// as [`Executor::multiplies`] of the GPU that it stands for. Row numbers and labels keep their values; all other
    /// tensors have none, as on the null device.
    #[must_use]
    pub fn counting(multiprocessors: u32, multiplies: bool) -> Self {
        let executor = Arc::new(Nowhere {
            multiprocessors,
            multiplies,
        });
        Self::at(executor, START, Pool::arena("GPU", BYTES))
    }
}

// SAFETY: there is no memory, and nothing is read or written.
unsafe impl Executor for Nowhere {
    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn has_values(&self) -> bool {
        false
    }

    fn allocate(&self, _bytes: u64) -> Result<Address, Cause> {
        Ok(START)
    }

    fn free(&self, _memory: Address) {}

    unsafe fn write(&self, _to: Address, _bytes: &[u8]) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn read(&self, _from: Address, _bytes: &mut [u8]) -> Result<(), Cause> {
        Err("a device that only counts has no values".into())
    }

    unsafe fn zero(&self, _at: Address, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn copy(&self, _from: Address, _to: Address, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    fn moment(&self) -> Result<Moment, Cause> {
        Ok(Arc::new(()))
    }

    unsafe fn upload(
        &self,
        _to: Address,
        _bytes: &[u8],
        _behind: Option<&Moment>,
    ) -> Result<(), Cause> {
        Ok(())
    }

    unsafe fn fetch(
        &self,
        _from: Address,
        _bytes: &mut [u8],
        _behind: &Moment,
    ) -> Result<(), Cause> {
        Err("a device that only counts has no values".into())
    }

    unsafe fn launch(&self, _launch: &Launch) -> Result<(), Cause> {
        Ok(())
    }

    fn multiplies(&self) -> bool {
        self.multiplies
    }

    unsafe fn multiply(
        &self,
        _product: &Multiply,
        _workspace: Address,
        _workspace_bytes: u64,
    ) -> Result<bool, Cause> {
        Ok(true)
    }
}
