//! Probe of this machine's CUDA support. It never panics or fails: what is missing is part of the result.
#![expect(unsafe_code, reason = "calls into the driver, which was found before")]

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cudarc::driver::CudaContext;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::library::{Found, Library, Search, find};

/// Oldest CUDA version (major, minor) whose driver has every function that this crate uses.
pub const MINIMUM_DRIVER: (u32, u32) = (12, 8);
/// Name of the oldest supported driver in messages: its release, and the CUDA version [`MINIMUM_DRIVER`].
pub const MINIMUM_DRIVER_TEXT: &str = "570 (CUDA 12.8)";

/// Properties of a GPU as the driver reports them, without opening the GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceFacts {
    /// Number of the GPU in this process, from 0 (CUDA's device ordinal).
    pub ordinal: u32,
    /// Product name of the GPU, e.g. `NVIDIA GeForce RTX 3090`.
    pub name: String,
    /// UUID of the GPU (`GPU-…`), the same in all of NVIDIA's tools.
    pub uuid: String,
    /// PCI bus id of the GPU, e.g. `0000:01:00.0`.
    pub pci_bus_id: String,
    /// Major and minor compute capability, e.g. `(8, 6)`.
    pub compute_capability: (u32, u32),
    /// Total device memory in bytes.
    pub memory_bytes: u64,
    /// Number of streaming multiprocessors of the GPU.
    pub multiprocessors: u32,
    /// Ordinals of the GPUs whose memory this GPU can access directly (peer access).
    pub peers: Vec<u32>,
}

/// Result of [`probe`]: driver, libraries, GPUs, and why none is usable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Probe {
    /// Highest CUDA version that the installed driver supports. `None` if no driver answered.
    pub driver_version: Option<(u32, u32)>,
    /// Search result of each library: the opened file, or the places where it was searched for in vain.
    pub libraries: Vec<Found>,
    /// GPUs that CUDA makes visible to this process, in order of their ordinals.
    pub devices: Vec<DeviceFacts>,
    /// Why no GPU is usable, as text for the user. `None` if there is no such problem.
    pub problem: Option<String>,
}

impl Probe {
    /// Search result of the library `library`. `None` only if it was not searched for.
    #[must_use]
    pub fn library(&self, library: Library) -> Option<&Found> {
        self.libraries.iter().find(|found| found.library == library)
    }
}

/// Searches for NVIDIA's libraries and asks the driver for its version and the visible GPUs.
#[must_use]
pub fn probe(search: &Search) -> Probe {
    probe_for(&Library::ALL, search)
}

/// As [`probe`], but searches for these libraries only. The driver must be among them. A library that is found stays
/// mapped into this process: some hundred megabytes of cuBLASLt and NCCL each.
#[must_use]
pub fn probe_for(libraries: &[Library], search: &Search) -> Probe {
    let found = libraries.iter().map(|library| find(*library, search));
    let mut libraries: Vec<Found> = found.collect();
    for found in &mut libraries {
        if found.path.is_some() {
            found.version = version(found);
        }
    }
    let mut answer = Probe {
        driver_version: None,
        libraries,
        devices: Vec::new(),
        problem: None,
    };
    if answer
        .library(Library::Driver)
        .is_none_or(|found| found.path.is_none())
    {
        answer.problem = Some(
            "the NVIDIA driver (libcuda.so.1) is not installed or not visible in this container"
                .into(),
        );
        return answer;
    }
    // The driver binding panics when the library lacks a function, which is possible with an old driver.
    let outcome = catch_unwind(AssertUnwindSafe(|| ask_driver(&mut answer)));
    answer.problem = match outcome {
        Ok(Ok(())) => too_old(answer.driver_version),
        Ok(Err(problem)) => Some(problem),
        Err(_) => Some(format!(
            "the driver lacks a function that is needed; drivers from {MINIMUM_DRIVER_TEXT} on have it"
        )),
    };
    answer
}

/// Free memory in bytes of the GPU with CUDA's device number `ordinal`, by the driver. It opens the GPU for the question,
/// so the context counts as used. `None` if that fails. For GPUs that NVML does not list, such as MIG instances.
#[must_use]
pub fn free_bytes(ordinal: u32) -> Option<u64> {
    let context = CudaContext::new(ordinal as usize).ok()?;
    let (free, _) = context.mem_get_info().ok()?;
    Some(free as u64)
}

/// Why a driver is too old, if it is.
fn too_old(version: Option<(u32, u32)>) -> Option<String> {
    let (major, minor) = version.filter(|version| *version < MINIMUM_DRIVER)?;
    Some(format!(
        "the driver supports CUDA {major}.{minor}; this program needs driver {MINIMUM_DRIVER_TEXT} or newer"
    ))
}

fn ask_driver(answer: &mut Probe) -> Result<(), String> {
    answer.driver_version = driver_version();
    if let Some(problem) = too_old(answer.driver_version) {
        return Err(problem);
    }
    result::init().map_err(|error| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            "the driver is installed but shows no GPU (CUDA_VISIBLE_DEVICES empty, or none in this container)".into()
        }
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "libcuda.so.1 is the toolkit's stub, not the driver's; put the driver's folder first".into()
        }
        other => format!("the driver does not start: {other:?}"),
    })?;
    let describe =
        |error: DriverError| format!("the driver does not describe its GPUs: {:?}", error.0);
    let count = result::device::get_count().map_err(describe)?;
    for ordinal in 0..count {
        answer
            .devices
            .push(device(ordinal, count).map_err(describe)?);
    }
    Ok(())
}

fn driver_version() -> Option<(u32, u32)> {
    let mut version = 0;
    // SAFETY: the driver's library is loaded; the call needs no initialization.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .ok()?;
    let version = u32::try_from(version).ok()?;
    Some((version / 1000, version % 1000 / 10))
}

fn device(ordinal: i32, count: i32) -> Result<DeviceFacts, DriverError> {
    let handle = result::device::get(ordinal)?;
    let attribute = |which| -> Result<u32, DriverError> {
        // SAFETY: the handle comes from the driver.
        let value = unsafe { result::device::get_attribute(handle, which) }?;
        Ok(value.unsigned_abs())
    };
    let mut peers = Vec::new();
    for other in (0..count).filter(|other| *other != ordinal) {
        let mut can = 0;
        let peer = result::device::get(other)?;
        // SAFETY: both handles come from the driver.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, handle, peer) }.result()?;
        if can != 0 {
            peers.push(other.unsigned_abs());
        }
    }
    Ok(DeviceFacts {
        ordinal: ordinal.unsigned_abs(),
        name: result::device::get_name(handle)?,
        uuid: uuid(result::device::get_uuid(handle)?),
        pci_bus_id: pci_bus_id(handle)?,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        // SAFETY: the handle comes from the driver.
        memory_bytes: unsafe { result::device::total_mem(handle) }? as u64,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        peers,
    })
}

fn uuid(id: sys::CUuuid) -> String {
    let hex: Vec<String> = id.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| hex[range].concat();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        part(0..4),
        part(4..6),
        part(6..8),
        part(8..10),
        part(10..16)
    )
}

fn pci_bus_id(handle: sys::CUdevice) -> Result<String, DriverError> {
    let mut text: [c_char; 32] = [0; 32];
    // SAFETY: the buffer is as long as stated and stays zero-terminated.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 31, handle) }.result()?;
    // SAFETY: the last byte is zero.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    Ok(text.to_string_lossy().to_lowercase())
}

fn version(found: &Found) -> Option<String> {
    match found.library {
        Library::Nvrtc => super::nvrtc::version().map(|(major, minor)| format!("{major}.{minor}")),
        Library::Driver => driver_version().map(|(major, minor)| format!("CUDA {major}.{minor}")),
        Library::CublasLt => super::matmul::version(),
        Library::Nccl => super::nccl::Nccl::from_file(found.path.as_deref()?)
            .ok()?
            .version()
            .ok(),
    }
}
