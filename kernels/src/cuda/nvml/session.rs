//! NVML's functions and their results as values.
#![expect(unsafe_code, reason = "calls the functions of a C library")]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::Library;

use super::super::library::{file_of, reason};
use super::{GpuMemory, GpuProcess, NvmlError, NvmlGpu, PcieLink, Reading, RemappedRows};

/// Buffer size for every name that NVML returns.
const TEXT_BYTES: u32 = 96;
/// Upper bound of the NVLinks of a GPU.
const MAX_LINKS: u32 = 64;
/// Maximum attempts to read a list that grows between calls.
const LIST_ATTEMPTS: u32 = 4;

/// `nvmlReturn_t`.
type Code = u32;
/// `nvmlDevice_t`.
type Handle = *mut c_void;

const SUCCESS: Code = 0;
const INSUFFICIENT_SIZE: Code = 7;
/// `NVML_MEMORY_ERROR_TYPE_UNCORRECTED`.
const UNCORRECTED: u32 = 1;
/// `NVML_VOLATILE_ECC`: since the driver was loaded.
const SINCE_LOAD: u32 = 0;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct RawMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`, as version 3 of its function fills it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawProcess {
    pid: u32,
    used_bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Default)]
struct RawUtilization {
    gpu: u32,
    memory: u32,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Default)]
struct RawPci {
    legacy_bus_id: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    bus_id: [u8; 32],
}

/// Function of the library, if the library has it.
struct Function<F> {
    name: &'static str,
    pointer: Option<F>,
}

impl<F: Copy> Function<F> {
    fn get(&self) -> Reading<F> {
        self.pointer.ok_or(NvmlError::Missing {
            function: self.name,
        })
    }
}

macro_rules! functions {
    ($($field:ident: $name:literal ($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions {
            $($field: Function<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl Functions {
            fn of(library: &Library) -> Self {
                Self {
                    $($field: Function {
                        name: $name,
                        // SAFETY: this is the function's type in NVML's header, where a changed signature gets a new
                        // name. The pointer lives as long as the library, which the session stores.
                        pointer: unsafe { library.get($name) }.ok().map(|symbol| *symbol),
                    },)*
                }
            }
        }
    };
}

functions! {
    init: "nvmlInit_v2" () -> Code;
    shutdown: "nvmlShutdown" () -> Code;
    error_string: "nvmlErrorString" (Code) -> *const c_char;
    driver_version: "nvmlSystemGetDriverVersion" (*mut c_char, u32) -> Code;
    count: "nvmlDeviceGetCount_v2" (*mut u32) -> Code;
    handle: "nvmlDeviceGetHandleByIndex_v2" (u32, *mut Handle) -> Code;
    name: "nvmlDeviceGetName" (Handle, *mut c_char, u32) -> Code;
    uuid: "nvmlDeviceGetUUID" (Handle, *mut c_char, u32) -> Code;
    pci: "nvmlDeviceGetPciInfo_v3" (Handle, *mut RawPci) -> Code;
    capability: "nvmlDeviceGetCudaComputeCapability" (Handle, *mut i32, *mut i32) -> Code;
    memory: "nvmlDeviceGetMemoryInfo" (Handle, *mut RawMemory) -> Code;
    processes: "nvmlDeviceGetComputeRunningProcesses_v3" (Handle, *mut u32, *mut RawProcess) -> Code;
    generation: "nvmlDeviceGetCurrPcieLinkGeneration" (Handle, *mut u32) -> Code;
    max_generation: "nvmlDeviceGetMaxPcieLinkGeneration" (Handle, *mut u32) -> Code;
    width: "nvmlDeviceGetCurrPcieLinkWidth" (Handle, *mut u32) -> Code;
    max_width: "nvmlDeviceGetMaxPcieLinkWidth" (Handle, *mut u32) -> Code;
    nvlink: "nvmlDeviceGetNvLinkState" (Handle, u32, *mut u32) -> Code;
    utilization: "nvmlDeviceGetUtilizationRates" (Handle, *mut RawUtilization) -> Code;
    ecc: "nvmlDeviceGetTotalEccErrors" (Handle, u32, u32, *mut u64) -> Code;
    remapped: "nvmlDeviceGetRemappedRows" (Handle, *mut u32, *mut u32, *mut u32, *mut u32) -> Code;
}

type NumberFunction = Function<unsafe extern "C" fn(Handle, *mut u32) -> Code>;
type TextFunction = Function<unsafe extern "C" fn(Handle, *mut c_char, u32) -> Code>;

/// The opened NVML library and its functions. Dropping it shuts NVML down if it was started.
pub(super) struct Session {
    functions: Functions,
    started: Cell<bool>,
    /// Last field, so that it is dropped after the pointers into it.
    library: Library,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let (true, Ok(shutdown)) = (self.started.get(), self.functions.shutdown.get()) {
            // SAFETY: `start` succeeded and no handle is used after this.
            unsafe { shutdown() };
        }
    }
}

impl Session {
    /// Opens the library at `path`, with the dynamic linker if `path` is a bare name.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: opening runs the library's initializers. NVIDIA's may run at any time. Another file of this name in
        // a directory named by the user is the user's own code.
        let library = unsafe { Library::new(path) }.map_err(|error| reason(&error))?;
        Ok(Self {
            functions: Functions::of(&library),
            started: Cell::new(false),
            library,
        })
    }

    /// Path of the opened file.
    pub(super) fn file(&self) -> Option<PathBuf> {
        file_of(&self.library, self.functions.init.name)
    }

    /// Starts the library. It must be called before any other function.
    pub(super) fn start(&self) -> Reading<()> {
        let function = &self.functions.init;
        let init = function.get()?;
        // SAFETY: takes nothing and may be called any number of times.
        self.check(function.name, unsafe { init() })?;
        self.started.set(true);
        Ok(())
    }

    pub(super) fn driver_version(&self) -> Reading<String> {
        let function = &self.functions.driver_version;
        let call = function.get()?;
        let mut text = [0u8; TEXT_BYTES as usize];
        // SAFETY: at most `TEXT_BYTES` are written, which is the size of `text`.
        let code = unsafe { call(text.as_mut_ptr().cast(), TEXT_BYTES) };
        self.check(function.name, code)?;
        Ok(text_of(&text))
    }

    pub(super) fn gpus(&self) -> Reading<Vec<NvmlGpu>> {
        let function = &self.functions.count;
        let call = function.get()?;
        let mut count = 0;
        // SAFETY: one number is written.
        let code = unsafe { call(&raw mut count) };
        self.check(function.name, code)?;
        Ok((0..count).map(|index| self.gpu(index)).collect())
    }

    fn gpu(&self, index: u32) -> NvmlGpu {
        let handle = self.handle(index);
        let with = |handle: &Reading<Handle>| handle.clone();
        let number = |function: &NumberFunction| self.number(function, with(&handle)?);
        let text = |function: &TextFunction| self.text(function, with(&handle)?);
        let functions = &self.functions;
        NvmlGpu {
            index,
            name: text(&functions.name),
            uuid: text(&functions.uuid),
            pci_bus_id: with(&handle).and_then(|handle| self.pci_bus_id(handle)),
            compute_capability: with(&handle).and_then(|handle| self.compute_capability(handle)),
            memory: with(&handle).and_then(|handle| self.memory(handle)),
            processes: with(&handle).and_then(|handle| self.processes(handle)),
            pcie: PcieLink {
                generation: number(&functions.generation),
                max_generation: number(&functions.max_generation),
                width: number(&functions.width),
                max_width: number(&functions.max_width),
            },
            active_nvlinks: with(&handle).and_then(|handle| self.active_nvlinks(handle)),
            utilization_percent: with(&handle).and_then(|handle| self.utilization(handle)),
            uncorrected_ecc_errors: with(&handle).and_then(|handle| self.ecc(handle)),
            remapped_rows: with(&handle).and_then(|handle| self.remapped_rows(handle)),
        }
    }

    fn handle(&self, index: u32) -> Reading<Handle> {
        let function = &self.functions.handle;
        let call = function.get()?;
        let mut handle = ptr::null_mut();
        // SAFETY: one handle is written; it stays valid until the session ends.
        let code = unsafe { call(index, &raw mut handle) };
        self.check(function.name, code)?;
        Ok(handle)
    }

    fn number(&self, function: &NumberFunction, handle: Handle) -> Reading<u32> {
        let call = function.get()?;
        let mut number = 0;
        // SAFETY: the handle is of this session; one number is written.
        let code = unsafe { call(handle, &raw mut number) };
        self.check(function.name, code)?;
        Ok(number)
    }

    fn text(&self, function: &TextFunction, handle: Handle) -> Reading<String> {
        let call = function.get()?;
        let mut text = [0u8; TEXT_BYTES as usize];
        // SAFETY: the handle is of this session; at most `TEXT_BYTES`, the size of `text`, are written.
        let code = unsafe { call(handle, text.as_mut_ptr().cast(), TEXT_BYTES) };
        self.check(function.name, code)?;
        Ok(text_of(&text))
    }

    fn pci_bus_id(&self, handle: Handle) -> Reading<String> {
        let function = &self.functions.pci;
        let call = function.get()?;
        let mut pci = RawPci::default();
        // SAFETY: the handle is of this session; `RawPci` has the layout of NVML's header.
        let code = unsafe { call(handle, &raw mut pci) };
        self.check(function.name, code)?;
        Ok(text_of(&pci.bus_id))
    }

    fn compute_capability(&self, handle: Handle) -> Reading<(u32, u32)> {
        let function = &self.functions.capability;
        let call = function.get()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the handle is of this session; two numbers are written.
        let code = unsafe { call(handle, &raw mut major, &raw mut minor) };
        self.check(function.name, code)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    fn memory(&self, handle: Handle) -> Reading<GpuMemory> {
        let function = &self.functions.memory;
        let call = function.get()?;
        let mut memory = RawMemory::default();
        // SAFETY: the handle is of this session; `RawMemory` has the layout of NVML's header.
        let code = unsafe { call(handle, &raw mut memory) };
        self.check(function.name, code)?;
        Ok(GpuMemory {
            total_bytes: memory.total,
            used_bytes: memory.used,
            free_bytes: memory.free,
        })
    }

    fn processes(&self, handle: Handle) -> Reading<Vec<GpuProcess>> {
        let function = &self.functions.processes;
        let call = function.get()?;
        let mut list = vec![RawProcess::default(); 32];
        for attempt in 1.. {
            let mut count = list.len() as u32;
            // SAFETY: the handle is of this session; at most `count` entries, all of the list,
            // are written, and `RawProcess` has the layout of NVML's header.
            let code = unsafe { call(handle, &raw mut count, list.as_mut_ptr()) };
            if code == INSUFFICIENT_SIZE && attempt < LIST_ATTEMPTS {
                // More processes may start before the next call.
                list.resize(count as usize + 32, RawProcess::default());
                continue;
            }
            self.check(function.name, code)?;
            list.truncate(count as usize);
            break;
        }
        Ok(list
            .iter()
            .map(|process| GpuProcess {
                pid: process.pid,
                // All bits set mean "not available".
                used_bytes: Some(process.used_bytes).filter(|bytes| *bytes != u64::MAX),
            })
            .collect())
    }

    fn active_nvlinks(&self, handle: Handle) -> Reading<u32> {
        let function = &self.functions.nvlink;
        let call = function.get()?;
        let mut active = 0;
        for link in 0..MAX_LINKS {
            let mut state = 0;
            // SAFETY: the handle is of this session; one number is written.
            let code = unsafe { call(handle, link, &raw mut state) };
            match self.check(function.name, code) {
                Ok(()) => active += u32::from(state == 1),
                // A GPU without NVLinks refuses the first link; other GPUs refuse the links that they lack.
                Err(error) if link == 0 => return Err(error),
                Err(_) => {}
            }
        }
        Ok(active)
    }

    fn utilization(&self, handle: Handle) -> Reading<u32> {
        let function = &self.functions.utilization;
        let call = function.get()?;
        let mut shares = RawUtilization::default();
        // SAFETY: the handle is of this session; `RawUtilization` has the layout of NVML's header.
        let code = unsafe { call(handle, &raw mut shares) };
        self.check(function.name, code)?;
        Ok(shares.gpu)
    }

    fn ecc(&self, handle: Handle) -> Reading<u64> {
        let function = &self.functions.ecc;
        let call = function.get()?;
        let mut errors = 0;
        // SAFETY: the handle is of this session; one number is written.
        let code = unsafe { call(handle, UNCORRECTED, SINCE_LOAD, &raw mut errors) };
        self.check(function.name, code)?;
        Ok(errors)
    }

    fn remapped_rows(&self, handle: Handle) -> Reading<RemappedRows> {
        let function = &self.functions.remapped;
        let call = function.get()?;
        let [mut corrected, mut uncorrected, mut pending, mut failed] = [0; 4];
        // SAFETY: the handle is of this session; four numbers are written.
        let code = unsafe {
            call(
                handle,
                &raw mut corrected,
                &raw mut uncorrected,
                &raw mut pending,
                &raw mut failed,
            )
        };
        self.check(function.name, code)?;
        Ok(RemappedRows {
            uncorrected,
            is_pending: pending != 0,
            has_failed: failed != 0,
        })
    }

    fn check(&self, function: &'static str, code: Code) -> Reading<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = self
            .functions
            .error_string
            .get()
            .map_or(ptr::null(), |call| {
                // SAFETY: takes any code; returns a constant text or nothing.
                unsafe { call(code) }
            });
        let text = if text.is_null() {
            "unknown error".to_owned()
        } else {
            // SAFETY: not null, so a constant string of the open library that ends with a zero.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        };
        Err(NvmlError::Failed {
            function,
            code,
            text,
        })
    }
}

/// The text before the first zero byte.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}
