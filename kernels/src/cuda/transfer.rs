//! Pinned host memory, memory shared between processes, and timing on the device.
#![expect(unsafe_code, reason = "calls into the driver through an opened GPU")]

use std::sync::Arc;

use cudarc::driver::sys::{self, CUipcMem_flags_enum, CUmemorytype};

use super::context::{Context, Event};
use super::error::{DriverResult, Result};
use super::gpu::{Gpu, Memory};
use super::group::Abandoned;
use super::launch::Address;

/// Size in bytes of a CUDA IPC handle, with which another process maps device memory.
pub const HANDLE_BYTES: usize = 64;
/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context. Write-combined memory is not used, because reading it is
/// very slow.
const PORTABLE: u32 = 1;

/// Page-locked host memory. Copies to and from it run at the full bus rate and overlap with kernels.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    abandoned: Abandoned,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; only this value owns the pointer.
unsafe impl Send for Pinned {}
// SAFETY: shared access is read-only.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The whole pinned memory, for reading.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the allocation is `bytes` long and was zeroed.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The whole pinned memory, for writing.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the allocation is `bytes` long and was zeroed; `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // The driver frees pinned memory after all work of the context.
        if !self.abandoned.is_set() && self.context.bind().is_ok() {
            // SAFETY: allocated by `Gpu::pinned`, freed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { self.context.driver().free_host(self.start.cast()) };
        }
    }
}

/// Device memory of another process, mapped into this one (CUDA IPC). Dropping it unmaps the memory.
#[derive(Debug)]
pub struct Mapped {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
}

impl Mapped {
    /// Address of the mapped memory's first byte, valid in this process.
    #[must_use]
    pub const fn address(&self) -> Address {
        Address(self.address)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: opened by `Gpu::map`, closed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { self.context.driver().close_memory(self.address) };
        }
    }
}

/// Timing event on the compute stream. It records the device's time when the stream reaches it.
#[derive(Debug)]
pub struct Mark(Event);

impl Mark {
    /// Milliseconds of device time from this event to a later one. Waits for the later one.
    ///
    /// # Errors
    /// When the driver fails, or a kernel queued before failed.
    pub fn milliseconds_to(&self, later: &Self) -> Result<f64> {
        let milliseconds = self.0.milliseconds_to(&later.0).during("reading a time")?;
        Ok(f64::from(milliseconds))
    }
}

impl Gpu {
    /// Allocates page-locked host memory of `bytes` bytes, filled with zeros.
    ///
    /// # Errors
    /// When the operating system has too little memory or forbids locking it.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        self.bind()?;
        let start = self.driver().allocate_host(bytes.max(1), PORTABLE);
        let start: *mut u8 = start
            .during(format!("pinning {bytes} bytes of host memory"))?
            .cast();
        // SAFETY: the allocation is that long.
        unsafe { start.write_bytes(0, bytes) };
        let context = Arc::clone(self.stream().context());
        Ok(Pinned {
            context,
            abandoned: self.group_state().abandoned().clone(),
            start,
            bytes,
        })
    }

    /// Queues a copy of pinned host memory to device memory of the same size, on the compute stream.
    ///
    /// # Safety
    /// Both must live, and the host bytes must not change, until the stream has passed the copy.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Panics
    /// When the sizes differ.
    pub unsafe fn queue_upload(&self, from: &Pinned, to: &Memory) -> Result<()> {
        assert_eq!(from.bytes, to.bytes(), "sizes of an upload");
        self.bind()?;
        // SAFETY: both ranges are whole allocations; the caller keeps them.
        unsafe {
            self.driver()
                .copy_in(to.address().0, from.as_slice(), self.stream().raw())
        }
        .during("copying to the GPU")
    }

    /// Queues a copy of device memory to pinned host memory of the same size, on the compute stream.
    ///
    /// # Safety
    /// Both must live, and nothing may access the host bytes, until the stream has passed the copy.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Panics
    /// When the sizes differ.
    pub unsafe fn queue_download(&self, from: &Memory, to: &mut Pinned) -> Result<()> {
        assert_eq!(from.bytes(), to.bytes, "sizes of a download");
        self.bind()?;
        let stream = self.stream().raw();
        // SAFETY: both ranges are whole allocations; the caller keeps them.
        unsafe {
            self.driver()
                .copy_out(to.as_mut_slice(), from.address().0, stream)
        }
        .during("copying from the GPU")
    }

    /// Queues a copy of `bytes` bytes on the compute stream, within the device or from mapped memory of
    /// another process.
    ///
    /// # Safety
    /// Both ranges must be device memory of that size and stay allocated until the stream has passed the copy.
    ///
    /// # Errors
    /// When the driver fails.
    pub unsafe fn queue_copy(&self, from: Address, to: Address, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller vouches for both ranges.
        unsafe { self.driver().copy(to.0, from.0, bytes, self.stream().raw()) }
            .during("copying on the GPU")
    }

    /// CUDA IPC handle of an allocation, for [`Gpu::map`] in another process. It is valid while this process
    /// keeps the memory.
    ///
    /// # Errors
    /// When the driver does not support sharing, as in some containers and virtual GPUs.
    pub fn export(&self, memory: &Memory) -> Result<[u8; HANDLE_BYTES]> {
        self.bind()?;
        // SAFETY: the address is the start of a live allocation that is not stream-ordered.
        let handle = unsafe { self.driver().memory_handle(memory.address().0) }
            .during("naming GPU memory for another process")?;
        Ok(handle.reserved.map(i8::cast_unsigned))
    }

    /// Maps device memory into this process, given the handle that [`Gpu::export`] returned in another
    /// process.
    ///
    /// # Errors
    /// When the handle comes from this process, or its owner has exited.
    pub fn map(&self, handle: [u8; HANDLE_BYTES]) -> Result<Mapped> {
        self.bind()?;
        let handle = sys::CUipcMemHandle {
            reserved: handle.map(u8::cast_signed),
        };
        let flags = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let address = self
            .driver()
            .open_memory(handle, flags)
            .during("mapping GPU memory of another process")?;
        Ok(Mapped {
            context: Arc::clone(self.stream().context()),
            address,
        })
    }

    /// Records a timing event on the compute stream.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn mark(&self) -> Result<Mark> {
        self.bind()?;
        self.stream().timed_event().map(Mark)
    }

    /// Whether an address is in GPU memory, as opposed to pinned host memory.
    ///
    /// # Errors
    /// When the driver does not know the address.
    pub fn is_device_memory(&self, address: Address) -> Result<bool> {
        self.bind()?;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        let kind = self
            .driver()
            .pointer_attribute(attribute, address.0)
            .during("asking what an address is")?;
        Ok(kind == CUmemorytype::CU_MEMORYTYPE_DEVICE as u32)
    }
}
