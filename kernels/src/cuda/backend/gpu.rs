//! A GPU as an executor: its driver's calls, on its one stream.

use super::{Cause, Executor};
use crate::cuda::error::DriverResult;
use crate::cuda::gpu::Gpu;
use crate::cuda::launch::{Address, Launch};
use cudarc::driver::result;

// SAFETY: memory stays until `free`, which waits for the device; everything goes to one stream, in the order of calls.
unsafe impl Executor for Gpu {
    fn multiprocessors(&self) -> u32 {
        self.facts().multiprocessors
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        self.bind()?;
        // SAFETY: the size is not zero.
        let memory = unsafe { result::malloc_sync((bytes as usize).max(1)) };
        Ok(Address(
            memory.during(format!("allocating {bytes} bytes on the GPU"))?,
        ))
    }

    fn free(&self, memory: Address) {
        if self.bind().is_ok() {
            // SAFETY: allocated above, freed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { result::free_sync(memory.0) };
        }
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().cu_stream();
        // SAFETY: the caller vouches for the range, and the copy is waited for.
        unsafe { result::memcpy_htod_async(to.0, bytes, stream) }.during("copying to the GPU")?;
        Ok(self.synchronize()?)
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().cu_stream();
        // SAFETY: the caller vouches for the range, and the copy is waited for.
        unsafe { result::memcpy_dtoh_async(bytes, from.0, stream) }
            .during("copying from the GPU")?;
        Ok(self.synchronize()?)
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().cu_stream();
        // SAFETY: the caller vouches for the range.
        unsafe { result::memset_d8_async(at.0, 0, bytes as usize, stream) }
            .during("clearing memory")?;
        Ok(())
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().cu_stream();
        // SAFETY: the caller vouches for both ranges.
        unsafe { result::memcpy_dtod_async(to.0, from.0, bytes as usize, stream) }
            .during("copying on the GPU")?;
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the addresses, whose memory stays until the arena is dropped.
        Ok(unsafe { Self::launch(self, launch) }?)
    }
}
