//! Probe of this machine's CUDA support. It never panics or fails: what is missing is part of the result.

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUresult};

use super::context::Context;
use super::driver::{self, Answer, Driver, DriverError};
use super::library::{Found, Library, Search, find};

/// Oldest CUDA version (major, minor) whose driver has every function that this crate uses.
pub const MINIMUM_DRIVER: (u32, u32) = (12, 2);
/// Name of the oldest supported driver in messages: its release, and the CUDA version [`MINIMUM_DRIVER`].
pub const MINIMUM_DRIVER_TEXT: &str = "535 (CUDA 12.2)";

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
    answer.problem = ask_driver(&mut answer).err();
    answer
}

/// Free memory in bytes of the GPU with CUDA's device number `ordinal`, by the driver. It opens the GPU for the question,
/// so the context counts as used. `None` if that fails. For GPUs that NVML does not list, such as MIG instances.
#[must_use]
pub fn free_bytes(ordinal: u32, search: &Search) -> Option<u64> {
    let driver = Driver::load(&find(Library::Driver, search)).ok()?;
    let context = Context::open(driver, ordinal).ok()?;
    let (free, _) = context.driver().memory_info().ok()?;
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
    let found = answer.library(Library::Driver);
    let found = found.filter(|found| found.path.is_some()).ok_or(
        "the NVIDIA driver (libcuda.so.1) is not installed or not visible in this container",
    )?;
    let version = driver::version(found);
    let driver = match too_old(version) {
        Some(problem) => Err(problem),
        None => Driver::load(found).map_err(|error| {
            format!("{error}; drivers from {MINIMUM_DRIVER_TEXT} on have all that are needed")
        }),
    };
    answer.driver_version = version;
    let driver = driver?;
    driver.init().map_err(|error| {
        if error.is(CUresult::CUDA_ERROR_NO_DEVICE) {
            "the driver is installed but shows no GPU (CUDA_VISIBLE_DEVICES empty, or none in this container)".into()
        } else if error.is(CUresult::CUDA_ERROR_STUB_LIBRARY) {
            "libcuda.so.1 is the toolkit's stub, not the driver's; put the driver's folder first".into()
        } else {
            format!("the driver does not start: {error}")
        }
    })?;
    let describe = |error: DriverError| format!("the driver does not describe its GPUs: {error}");
    let count = driver.device_count().map_err(describe)?;
    for ordinal in 0..count {
        let device = device(&driver, ordinal, count).map_err(describe)?;
        answer.devices.push(device);
    }
    Ok(())
}

fn device(driver: &Driver, ordinal: i32, count: i32) -> Answer<DeviceFacts> {
    let handle = driver.device(ordinal)?;
    let attribute = |which| -> Answer<u32> { Ok(driver.attribute(handle, which)?.unsigned_abs()) };
    let mut peers = Vec::new();
    for other in (0..count).filter(|other| *other != ordinal) {
        if driver.can_access(handle, driver.device(other)?)? {
            peers.push(other.unsigned_abs());
        }
    }
    Ok(DeviceFacts {
        ordinal: ordinal.unsigned_abs(),
        name: driver.name(handle)?,
        uuid: uuid(driver.uuid(handle)?),
        pci_bus_id: driver.pci_bus_id(handle)?.to_lowercase(),
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory_bytes: driver.total_bytes(handle)? as u64,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        peers,
    })
}

fn uuid(id: [u8; 16]) -> String {
    let hex: Vec<String> = id.iter().map(|byte| format!("{byte:02x}")).collect();
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

fn version(found: &Found) -> Option<String> {
    match found.library {
        Library::Nvrtc => {
            super::nvrtc::version(found).map(|(major, minor)| format!("{major}.{minor}"))
        }
        Library::Driver => {
            driver::version(found).map(|(major, minor)| format!("CUDA {major}.{minor}"))
        }
        Library::CublasLt => super::matmul::version(found),
        Library::Nccl => super::nccl::Nccl::of(found).ok()?.version().ok(),
    }
}
