//! Functions of the CUDA driver, loaded from the file that the search found. The types are those of `cudarc`, whose
//! own functions would load another file.
#![expect(unsafe_code, reason = "calls into the driver, which was found before")]

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::ptr::null_mut;

use cudarc::driver::sys::{
    CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT, CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT,
    CU_LAUNCH_PARAM_END_AS_INT, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent,
    CUfunction, CUfunction_attribute, CUgraph, CUgraphExec, CUipcEventHandle, CUipcMemHandle,
    CUmodule, CUpointer_attribute, CUresult, CUstream, CUstreamCaptureMode, CUuuid,
};

use super::library::{Found, functions};

/// `CUresult` as a number, because a newer driver may return codes that the enumeration lacks.
type Status = u32;
/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the default stream.
const NON_BLOCKING: c_uint = 1;
/// Buffer size for names that the driver returns.
const TEXT_BYTES: usize = 256;

functions! {
    /// Functions of the driver that this crate calls.
    pub(super) Driver:
    cuInit(c_uint) -> Status;
    cuGetErrorName(Status, *mut *const c_char) -> Status;
    cuDeviceGetCount(*mut c_int) -> Status;
    cuDeviceGet(*mut CUdevice, c_int) -> Status;
    cuDeviceGetName(*mut c_char, c_int, CUdevice) -> Status;
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice) -> Status;
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice) -> Status;
    cuDeviceTotalMem_v2(*mut usize, CUdevice) -> Status;
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice) -> Status;
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice) -> Status;
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice) -> Status;
    cuDevicePrimaryCtxRelease_v2(CUdevice) -> Status;
    cuCtxGetCurrent(*mut CUcontext) -> Status;
    cuCtxSetCurrent(CUcontext) -> Status;
    cuCtxSynchronize() -> Status;
    cuMemGetInfo_v2(*mut usize, *mut usize) -> Status;
    cuMemAlloc_v2(*mut CUdeviceptr, usize) -> Status;
    cuMemFree_v2(CUdeviceptr) -> Status;
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Status;
    cuMemFreeHost(*mut c_void) -> Status;
    cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> Status;
    cuMemHostUnregister(*mut c_void) -> Status;
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream) -> Status;
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream) -> Status;
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream) -> Status;
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream) -> Status;
    cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr) -> Status;
    cuStreamCreate(*mut CUstream, c_uint) -> Status;
    cuStreamDestroy_v2(CUstream) -> Status;
    cuStreamSynchronize(CUstream) -> Status;
    cuStreamWaitEvent(CUstream, CUevent, c_uint) -> Status;
    cuEventCreate(*mut CUevent, c_uint) -> Status;
    cuEventRecord(CUevent, CUstream) -> Status;
    cuEventQuery(CUevent) -> Status;
    cuEventSynchronize(CUevent) -> Status;
    cuEventElapsedTime(*mut f32, CUevent, CUevent) -> Status;
    cuEventDestroy_v2(CUevent) -> Status;
    cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode) -> Status;
    cuStreamEndCapture(CUstream, *mut CUgraph) -> Status;
    cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong) -> Status;
    cuGraphLaunch(CUgraphExec, CUstream) -> Status;
    cuGraphExecDestroy(CUgraphExec) -> Status;
    cuGraphDestroy(CUgraph) -> Status;
    cuModuleLoadData(*mut CUmodule, *const c_void) -> Status;
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char) -> Status;
    cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int) -> Status;
    cuLaunchKernel(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void
    ) -> Status;
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize) -> Status;
    cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr) -> Status;
    cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint) -> Status;
    cuIpcCloseMemHandle(CUdeviceptr) -> Status;
    cuIpcGetEventHandle(*mut CUipcEventHandle, CUevent) -> Status;
    cuIpcOpenEventHandle(*mut CUevent, CUipcEventHandle) -> Status;
}

functions! {
    /// The function that even the oldest driver has.
    Age:
    cuDriverGetVersion(*mut c_int) -> Status;
}

/// Error code of the driver, with its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DriverError {
    pub(super) code: Status,
    pub(super) name: String,
}

impl DriverError {
    /// Whether the code is `result`.
    pub(super) fn is(&self, result: CUresult) -> bool {
        self.code == result as Status
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Result of a call of the driver.
pub(super) type Answer<T> = Result<T, DriverError>;

/// Major and minor version of CUDA that the driver supports. `None` if it does not answer. Unlike [`Driver::load`],
/// it works with drivers that lack newer functions.
pub(super) fn version(found: &Found) -> Option<(u32, u32)> {
    let functions = Age::load(found).ok()?;
    let mut version = 0;
    // SAFETY: one number is written; the call needs no initialization.
    let status = unsafe { (functions.cuDriverGetVersion)(&raw mut version) };
    let version = u32::try_from(version).ok().filter(|_| status == 0)?;
    Some((version / 1000, version % 1000 / 10))
}

impl Driver {
    fn check(&self, status: Status) -> Answer<()> {
        if status == CUresult::CUDA_SUCCESS as Status {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: takes any number; a constant text is written for those that it knows.
        let named = unsafe { (self.cuGetErrorName)(status, &raw mut name) };
        let name = match named == 0 && !name.is_null() {
            // SAFETY: not null, so a constant string that ends with a zero.
            true => unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned(),
            false => format!("error {status}"),
        };
        Err(DriverError { code: status, name })
    }

    /// The value that a call writes over `value`, after it succeeded.
    fn written<T>(&self, mut value: T, call: impl FnOnce(*mut T) -> Status) -> Answer<T> {
        self.check(call(&raw mut value))?;
        Ok(value)
    }

    /// The text that a call writes into a buffer of that length.
    fn text(&self, call: impl FnOnce(*mut c_char, c_int) -> Status) -> Answer<String> {
        let mut text = [0u8; TEXT_BYTES];
        self.check(call(text.as_mut_ptr().cast(), TEXT_BYTES as c_int - 1))?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    pub(super) fn init(&self) -> Answer<()> {
        // SAFETY: may be called any number of times.
        self.check(unsafe { (self.cuInit)(0) })
    }

    pub(super) fn device_count(&self) -> Answer<c_int> {
        // SAFETY: one number is written.
        self.written(0, |to| unsafe { (self.cuDeviceGetCount)(to) })
    }

    pub(super) fn device(&self, ordinal: c_int) -> Answer<CUdevice> {
        // SAFETY: one handle is written.
        self.written(0, |to| unsafe { (self.cuDeviceGet)(to, ordinal) })
    }

    pub(super) fn name(&self, device: CUdevice) -> Answer<String> {
        // SAFETY: the buffer is as long as stated; a wrong device is an error.
        self.text(|text, bytes| unsafe { (self.cuDeviceGetName)(text, bytes, device) })
    }

    pub(super) fn uuid(&self, device: CUdevice) -> Answer<[u8; 16]> {
        let uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: 16 bytes are written; a wrong device is an error.
        let uuid = self.written(uuid, |to| unsafe { (self.cuDeviceGetUuid_v2)(to, device) });
        uuid.map(|uuid| uuid.bytes.map(i8::cast_unsigned))
    }

    pub(super) fn pci_bus_id(&self, device: CUdevice) -> Answer<String> {
        // SAFETY: as of a name.
        self.text(|text, bytes| unsafe { (self.cuDeviceGetPCIBusId)(text, bytes, device) })
    }

    pub(super) fn total_bytes(&self, device: CUdevice) -> Answer<usize> {
        // SAFETY: one number is written; a wrong device is an error.
        self.written(0, |to| unsafe { (self.cuDeviceTotalMem_v2)(to, device) })
    }

    pub(super) fn attribute(&self, device: CUdevice, which: CUdevice_attribute) -> Answer<c_int> {
        // SAFETY: one number is written; a wrong device is an error.
        self.written(0, |to| unsafe {
            (self.cuDeviceGetAttribute)(to, which, device)
        })
    }

    pub(super) fn can_access(&self, device: CUdevice, peer: CUdevice) -> Answer<bool> {
        // SAFETY: one number is written; a wrong device is an error.
        let can = self.written(0, |to| unsafe {
            (self.cuDeviceCanAccessPeer)(to, device, peer)
        });
        can.map(|can| can != 0)
    }

    pub(super) fn retain(&self, device: CUdevice) -> Answer<CUcontext> {
        // SAFETY: one handle is written; a wrong device is an error.
        self.written(null_mut(), |to| unsafe {
            (self.cuDevicePrimaryCtxRetain)(to, device)
        })
    }

    /// Ends a use of the device's context.
    ///
    /// # Safety
    /// It was retained, and nothing of this use remains.
    pub(super) unsafe fn release(&self, device: CUdevice) -> Answer<()> {
        // SAFETY: the caller vouches for it.
        self.check(unsafe { (self.cuDevicePrimaryCtxRelease_v2)(device) })
    }

    pub(super) fn current(&self) -> Answer<CUcontext> {
        // SAFETY: one handle is written.
        self.written(null_mut(), |to| unsafe { (self.cuCtxGetCurrent)(to) })
    }

    /// Makes a context current on this thread.
    ///
    /// # Safety
    /// The context is alive, as everything is that the following methods get: they take what the driver gave.
    pub(super) unsafe fn set_current(&self, context: CUcontext) -> Answer<()> {
        // SAFETY: the caller vouches for the context.
        self.check(unsafe { (self.cuCtxSetCurrent)(context) })
    }

    pub(super) fn synchronize(&self) -> Answer<()> {
        // SAFETY: without a current context it is an error.
        self.check(unsafe { (self.cuCtxSynchronize)() })
    }

    /// Free and total bytes of the current context's device.
    pub(super) fn memory_info(&self) -> Answer<(usize, usize)> {
        let mut total = 0;
        // SAFETY: two numbers are written.
        let free = self.written(0, |to| unsafe {
            (self.cuMemGetInfo_v2)(to, &raw mut total)
        });
        Ok((free?, total))
    }

    pub(super) fn allocate(&self, bytes: usize) -> Answer<CUdeviceptr> {
        // SAFETY: one address is written; zero bytes are an error.
        self.written(0, |to| unsafe { (self.cuMemAlloc_v2)(to, bytes) })
    }

    pub(super) unsafe fn free(&self, memory: CUdeviceptr) -> Answer<()> {
        // SAFETY: the caller allocated it.
        self.check(unsafe { (self.cuMemFree_v2)(memory) })
    }

    /// Pinned host memory. `flags` are those of `cuMemHostAlloc`.
    pub(super) fn allocate_host(&self, bytes: usize, flags: c_uint) -> Answer<*mut c_void> {
        // SAFETY: one address is written; zero bytes are an error.
        self.written(null_mut(), |to| unsafe {
            (self.cuMemHostAlloc)(to, bytes, flags)
        })
    }

    pub(super) unsafe fn free_host(&self, memory: *mut c_void) -> Answer<()> {
        // SAFETY: the caller allocated it.
        self.check(unsafe { (self.cuMemFreeHost)(memory) })
    }

    /// Page-locks host memory where it is. `flags` are those of `cuMemHostRegister`.
    ///
    /// # Safety
    /// The memory stays until [`Driver::unregister_host`].
    pub(super) unsafe fn register_host(&self, memory: &[u8], flags: c_uint) -> Answer<()> {
        let (at, bytes) = (memory.as_ptr().cast_mut().cast(), memory.len());
        // SAFETY: the driver checks the range; the caller keeps it.
        self.check(unsafe { (self.cuMemHostRegister_v2)(at, bytes, flags) })
    }

    /// Ends [`Driver::register_host`].
    ///
    /// # Safety
    /// No queued copy uses the memory.
    pub(super) unsafe fn unregister_host(&self, memory: &[u8]) -> Answer<()> {
        // SAFETY: the driver checks the address; the caller vouches for queued copies.
        self.check(unsafe { (self.cuMemHostUnregister)(memory.as_ptr().cast_mut().cast()) })
    }

    /// Queues a fill.
    ///
    /// # Safety
    /// As of the other commands that follow: ranges are allocated and used by nothing else until `stream` has passed.
    pub(super) unsafe fn fill(
        &self,
        at: CUdeviceptr,
        value: u8,
        bytes: usize,
        stream: CUstream,
    ) -> Answer<()> {
        // SAFETY: the caller vouches for range and stream.
        self.check(unsafe { (self.cuMemsetD8Async)(at, value, bytes, stream) })
    }

    pub(super) unsafe fn copy_in(
        &self,
        to: CUdeviceptr,
        from: &[u8],
        stream: CUstream,
    ) -> Answer<()> {
        let (bytes, from) = (from.len(), from.as_ptr().cast());
        // SAFETY: the caller vouches for ranges and stream.
        self.check(unsafe { (self.cuMemcpyHtoDAsync_v2)(to, from, bytes, stream) })
    }

    pub(super) unsafe fn copy_out(
        &self,
        to: &mut [u8],
        from: CUdeviceptr,
        stream: CUstream,
    ) -> Answer<()> {
        let (bytes, to) = (to.len(), to.as_mut_ptr().cast());
        // SAFETY: the caller vouches for ranges and stream.
        self.check(unsafe { (self.cuMemcpyDtoHAsync_v2)(to, from, bytes, stream) })
    }

    pub(super) unsafe fn copy(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Answer<()> {
        // SAFETY: the caller vouches for ranges and stream.
        self.check(unsafe { (self.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) })
    }

    /// Value of an attribute of an address whose type is an unsigned number.
    pub(super) fn pointer_attribute(
        &self,
        which: CUpointer_attribute,
        of: CUdeviceptr,
    ) -> Answer<c_uint> {
        // SAFETY: one number is written; a wrong address is an error.
        self.written(0, |to: *mut c_uint| unsafe {
            (self.cuPointerGetAttribute)(to.cast(), which, of)
        })
    }

    pub(super) fn stream(&self) -> Answer<CUstream> {
        // SAFETY: one handle is written.
        self.written(null_mut(), |to| unsafe {
            (self.cuStreamCreate)(to, NON_BLOCKING)
        })
    }

    pub(super) unsafe fn destroy_stream(&self, stream: CUstream) -> Answer<()> {
        // SAFETY: the caller vouches for the stream.
        self.check(unsafe { (self.cuStreamDestroy_v2)(stream) })
    }

    pub(super) unsafe fn synchronize_stream(&self, stream: CUstream) -> Answer<()> {
        // SAFETY: the caller vouches for the stream.
        self.check(unsafe { (self.cuStreamSynchronize)(stream) })
    }

    pub(super) unsafe fn wait(&self, stream: CUstream, event: CUevent) -> Answer<()> {
        // SAFETY: the caller vouches for stream and event.
        self.check(unsafe { (self.cuStreamWaitEvent)(stream, event, 0) })
    }

    /// A new event. `flags` are those of `cuEventCreate`.
    pub(super) fn event(&self, flags: c_uint) -> Answer<CUevent> {
        // SAFETY: one handle is written.
        self.written(null_mut(), |to| unsafe { (self.cuEventCreate)(to, flags) })
    }

    pub(super) unsafe fn record(&self, event: CUevent, stream: CUstream) -> Answer<()> {
        // SAFETY: the caller vouches for event and stream.
        self.check(unsafe { (self.cuEventRecord)(event, stream) })
    }

    /// Whether the work before an event is done.
    pub(super) unsafe fn is_done(&self, event: CUevent) -> Answer<bool> {
        // SAFETY: the caller vouches for the event.
        match self.check(unsafe { (self.cuEventQuery)(event) }) {
            Ok(()) => Ok(true),
            Err(error) if error.is(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) unsafe fn synchronize_event(&self, event: CUevent) -> Answer<()> {
        // SAFETY: the caller vouches for the event.
        self.check(unsafe { (self.cuEventSynchronize)(event) })
    }

    pub(super) unsafe fn milliseconds(&self, from: CUevent, to: CUevent) -> Answer<f32> {
        // SAFETY: one number is written; the caller vouches for the events.
        self.written(0.0, |out| unsafe {
            (self.cuEventElapsedTime)(out, from, to)
        })
    }

    pub(super) unsafe fn destroy_event(&self, event: CUevent) -> Answer<()> {
        // SAFETY: the caller vouches for the event.
        self.check(unsafe { (self.cuEventDestroy_v2)(event) })
    }

    pub(super) unsafe fn begin_capture(
        &self,
        stream: CUstream,
        mode: CUstreamCaptureMode,
    ) -> Answer<()> {
        // SAFETY: the caller vouches for the stream.
        self.check(unsafe { (self.cuStreamBeginCapture_v2)(stream, mode) })
    }

    pub(super) unsafe fn end_capture(&self, stream: CUstream) -> Answer<CUgraph> {
        // SAFETY: one handle is written; the caller vouches for the stream.
        self.written(null_mut(), |to| unsafe {
            (self.cuStreamEndCapture)(stream, to)
        })
    }

    pub(super) unsafe fn instantiate(&self, graph: CUgraph) -> Answer<CUgraphExec> {
        // SAFETY: one handle is written; the caller vouches for the graph.
        self.written(null_mut(), |to| unsafe {
            (self.cuGraphInstantiateWithFlags)(to, graph, 0)
        })
    }

    pub(super) unsafe fn launch_graph(&self, graph: CUgraphExec, stream: CUstream) -> Answer<()> {
        // SAFETY: the caller vouches for graph and stream.
        self.check(unsafe { (self.cuGraphLaunch)(graph, stream) })
    }

    pub(super) unsafe fn destroy_executable(&self, graph: CUgraphExec) -> Answer<()> {
        // SAFETY: the caller vouches for the graph.
        self.check(unsafe { (self.cuGraphExecDestroy)(graph) })
    }

    pub(super) unsafe fn destroy_graph(&self, graph: CUgraph) -> Answer<()> {
        // SAFETY: the caller vouches for the graph.
        self.check(unsafe { (self.cuGraphDestroy)(graph) })
    }

    /// Loads machine code into the current context.
    ///
    /// # Safety
    /// `image` is a cubin, or PTX that ends with a zero byte.
    pub(super) unsafe fn load_module(&self, image: &[u8]) -> Answer<CUmodule> {
        // SAFETY: one handle is written; the caller vouches for the image.
        self.written(null_mut(), |to| unsafe {
            (self.cuModuleLoadData)(to, image.as_ptr().cast())
        })
    }

    pub(super) unsafe fn function(&self, module: CUmodule, name: &CString) -> Answer<CUfunction> {
        // SAFETY: one handle is written; the caller vouches for the module.
        self.written(null_mut(), |to| unsafe {
            (self.cuModuleGetFunction)(to, module, name.as_ptr())
        })
    }

    pub(super) unsafe fn set_attribute(
        &self,
        function: CUfunction,
        which: CUfunction_attribute,
        value: c_int,
    ) -> Answer<()> {
        // SAFETY: the caller vouches for the function.
        self.check(unsafe { (self.cuFuncSetAttribute)(function, which, value) })
    }

    /// Queues a kernel with `threads` threads in each block of `grid`.
    ///
    /// # Safety
    /// `parameters` are the bytes of the kernel's parameters, each aligned as its type.
    pub(super) unsafe fn launch(
        &self,
        function: CUfunction,
        [x, y, z]: [c_uint; 3],
        threads: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: &mut [u8],
    ) -> Answer<()> {
        let marker = |number: u32| std::ptr::without_provenance_mut::<c_void>(number as usize);
        let mut size = parameters.len();
        let mut extra = [
            marker(CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT),
            parameters.as_mut_ptr().cast(),
            marker(CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT),
            std::ptr::from_mut(&mut size).cast(),
            marker(CU_LAUNCH_PARAM_END_AS_INT),
        ];
        // SAFETY: the caller vouches for function, parameters and stream.
        let status = unsafe {
            (self.cuLaunchKernel)(
                function,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                null_mut(),
                extra.as_mut_ptr(),
            )
        };
        self.check(status)
    }

    pub(super) unsafe fn resident_blocks(
        &self,
        function: CUfunction,
        threads: c_uint,
        shared_bytes: usize,
    ) -> Answer<c_int> {
        let threads = threads as c_int;
        // SAFETY: one number is written; the caller vouches for the function.
        self.written(0, |to| unsafe {
            (self.cuOccupancyMaxActiveBlocksPerMultiprocessor)(to, function, threads, shared_bytes)
        })
    }

    pub(super) unsafe fn memory_handle(&self, memory: CUdeviceptr) -> Answer<CUipcMemHandle> {
        let handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: one handle is written; the caller allocated the memory.
        self.written(handle, |to| unsafe { (self.cuIpcGetMemHandle)(to, memory) })
    }

    pub(super) fn open_memory(&self, handle: CUipcMemHandle, flags: c_uint) -> Answer<CUdeviceptr> {
        // SAFETY: one address is written; a wrong handle is an error.
        self.written(0, |to| unsafe {
            (self.cuIpcOpenMemHandle_v2)(to, handle, flags)
        })
    }

    pub(super) unsafe fn close_memory(&self, memory: CUdeviceptr) -> Answer<()> {
        // SAFETY: the caller opened it.
        self.check(unsafe { (self.cuIpcCloseMemHandle)(memory) })
    }

    pub(super) unsafe fn event_handle(&self, event: CUevent) -> Answer<CUipcEventHandle> {
        let handle = CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: one handle is written; the caller vouches for the event.
        self.written(handle, |to| unsafe {
            (self.cuIpcGetEventHandle)(to, event)
        })
    }

    pub(super) fn open_event(&self, handle: CUipcEventHandle) -> Answer<CUevent> {
        // SAFETY: one handle is written; a wrong handle is an error.
        self.written(null_mut(), |to| unsafe {
            (self.cuIpcOpenEventHandle)(to, handle)
        })
    }
}
