//! One GPU: its memory, one stream of computation, and launches on it.
#![expect(unsafe_code, reason = "calls into the driver, which was probed before")]

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use cudarc::driver::sys::{self, CUfunction_attribute_enum as FunctionAttribute, CUresult};

use super::context::{Context, Stream};
use super::copies::Copies;
use super::device_kind::AttentionBackward;
use super::driver::{Driver, DriverError};
use super::error::{CudaError, DriverResult, Result};
use super::group::Group;
use super::image::{Cache, Code, Image, Images};
use super::launch::{Address, Launch};
use super::library::{Library, Search, find};
use super::matmul::CublasLt;
use super::module::Module;
use super::peers::Peers;
use super::probe::{DeviceFacts, probe_for};
use super::timeline::Timeline;

/// Dynamic shared memory that a block may use without opting in, in bytes.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// Opened NVIDIA GPU with its compute stream and loaded kernels. Work is queued on that stream, in order.
#[derive(Debug)]
pub struct Gpu {
    facts: DeviceFacts,
    context: Arc<Context>,
    stream: Arc<Stream>,
    images: Images,
    shared_limit: u32,
    loaded: RwLock<HashMap<Module, Loaded>>,
    /// Created at the first copy.
    copies: OnceLock<Copies>,
    /// Created when memory is first shared with other processes.
    peers: OnceLock<Peers>,
    group: Group,
    /// Where NCCL and other libraries are searched for.
    search: Search,
    /// Library for matrix products, if one is used.
    products: Option<CublasLt>,
    /// Whether host memory may be registered.
    registers: bool,
    attention_backward: AttentionBackward,
    pub(super) timeline: Timeline,
}

/// Module loaded by the driver. It is unloaded with the context at the end of the process.
#[derive(Debug)]
struct Loaded {
    module: sys::CUmodule,
    /// Functions by the names of their kernels. A module has a few.
    functions: Vec<(&'static str, sys::CUfunction)>,
}

impl Loaded {
    fn function(&self, kernel: &str) -> Option<sys::CUfunction> {
        let mut functions = self.functions.iter();
        functions
            .find(|(name, _)| *name == kernel)
            .map(|(_, function)| *function)
    }
}

// SAFETY: driver handles of a module are plain identifiers that any thread may use.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// Allocation of device memory. Dropping it waits for the device and frees the memory.
#[derive(Debug)]
pub struct Memory {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// Device address of the allocation's first byte, aligned to at least 256 bytes.
    #[must_use]
    pub const fn address(&self) -> Address {
        Address(self.address)
    }

    /// Size of the allocation in bytes, as requested.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by `Gpu::allocate`, freed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { self.context.driver().free(self.address) };
        }
    }
}

impl Gpu {
    /// Probes for GPUs and opens the one with CUDA's device number `ordinal`. `cache` stores compiled kernels
    /// on disk, if given.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`] with the reason and the next step, and errors of the driver.
    pub fn open(ordinal: u32, search: &Search, cache: Option<Cache>) -> Result<Self> {
        let answer = probe_for(&[Library::Driver], search);
        let version = answer.driver_version.unwrap_or_default();
        if let Some(reason) = answer.problem {
            return Err(CudaError::NoDevice { reason });
        }
        let count = answer.devices.len();
        let facts = answer.devices.into_iter().nth(ordinal as usize);
        let facts = facts.ok_or_else(|| CudaError::NoDevice {
            reason: format!("GPU {ordinal} was asked for, this process sees {count}"),
        })?;
        let driver = Driver::load(&find(Library::Driver, search))?;
        let context = Context::open(driver, ordinal).during("opening the GPU")?;
        let stream = context.stream().during("creating a stream")?;
        let attribute =
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared_limit = context
            .attribute(attribute)
            .during("reading the shared memory limit")?;
        Ok(Self {
            images: Images::new(facts.compute_capability, version, search, cache),
            facts,
            context,
            stream,
            shared_limit: shared_limit.unsigned_abs(),
            loaded: RwLock::default(),
            copies: OnceLock::new(),
            peers: OnceLock::new(),
            group: Group::default(),
            search: search.clone(),
            products: None,
            registers: true,
            attention_backward: AttentionBackward::default(),
            timeline: Timeline::default(),
        })
    }

    /// Makes matrix products use cuBLASLt instead of own kernels. `search` says where the library is searched
    /// for.
    ///
    /// # Errors
    /// When the library is missing or does not start.
    pub fn with_cublaslt(mut self, search: &Search) -> Result<Self> {
        self.products = Some(CublasLt::open(&self, search)?);
        Ok(self)
    }

    /// Selects which machine code the GPU runs: native code, or PTX that the driver translates.
    #[must_use]
    pub fn with_code(mut self, code: Code) -> Self {
        self.images = self.images.with_code(code);
        self
    }

    /// Sets whether [`Executor::register`](super::backend::Executor::register) page-locks memory; it does by default.
    #[must_use]
    pub fn with_host_registration(mut self, registers: bool) -> Self {
        self.registers = registers;
        self
    }

    /// Selects the kernels of attention's backward.
    #[must_use]
    pub fn with_attention_backward(mut self, kernels: AttentionBackward) -> Self {
        self.attention_backward = kernels;
        self
    }

    /// The kernels of attention's backward.
    pub(super) const fn attention_backward(&self) -> AttentionBackward {
        self.attention_backward
    }

    /// Whether host memory may be registered.
    pub(super) const fn registers(&self) -> bool {
        self.registers
    }

    /// The cuBLASLt handle for matrix products. `None` if own kernels compute them.
    #[must_use]
    pub const fn products(&self) -> Option<&CublasLt> {
        self.products.as_ref()
    }

    /// Properties of the GPU as the driver reports them, e.g. name, memory size and compute capability.
    #[must_use]
    pub const fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Provider of compiled code for kernel modules: from the cache, the compiler, or the built-in PTX.
    #[must_use]
    pub const fn images(&self) -> &Images {
        &self.images
    }

    /// Maximum shared memory per thread block in bytes, for kernels that opt in to more than 48 KB.
    #[must_use]
    pub const fn shared_limit(&self) -> u32 {
        self.shared_limit
    }

    /// CUDA stream that kernels run on. Copies and communication have their own streams.
    #[must_use]
    pub const fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The communication stream, if it exists already.
    pub(super) fn communication(&self) -> Option<&Stream> {
        self.copies.get().map(|copies| &*copies.communication)
    }

    /// Streams and pinned memory for copies, created on first use.
    pub(super) fn copies(&self) -> Result<&Copies> {
        self.bind()?;
        if let Some(copies) = self.copies.get() {
            return Ok(copies);
        }
        let stream = || self.context.stream().during("creating a stream");
        let copies = Copies::new(self, [stream()?, stream()?, stream()?, stream()?])?;
        Ok(self.copies.get_or_init(|| copies))
    }

    /// State for sharing memory with other processes, created on first use.
    pub(super) fn peers(&self) -> Result<&Peers> {
        self.bind()?;
        if let Some(peers) = self.peers.get() {
            return Ok(peers);
        }
        let peers = Peers::new(&self.context)?;
        Ok(self.peers.get_or_init(|| peers))
    }

    /// Directories in which NVIDIA's libraries are searched for.
    pub(super) const fn search(&self) -> &Search {
        &self.search
    }

    /// The NCCL process group that the GPU may be in.
    pub(super) const fn group_state(&self) -> &Group {
        &self.group
    }

    /// Ends waits that may depend on other ranks, and leaves what such a wait precedes to the end of the process.
    #[expect(
        clippy::mem_forget,
        reason = "the driver releases a context after all work on it, which may never end"
    )]
    pub(super) fn abandon_others(&self) {
        if self.group.abandon() {
            if let Some(products) = self.products() {
                products.abandon();
            }
            std::mem::forget(Arc::clone(&self.context));
        }
    }

    /// Free and total memory of the GPU in bytes at this time, in this order.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.bind()?;
        self.driver().memory_info().during("reading free memory")
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind().during("selecting the GPU")
    }

    /// Functions of the driver. They are called with the context [bound](Self::bind).
    pub(super) fn driver(&self) -> &Driver {
        self.context.driver()
    }

    /// Allocates `bytes` bytes of uninitialized device memory. Other processes can map it, because it is not
    /// from a stream-ordered pool.
    ///
    /// # Errors
    /// When the GPU does not have enough memory.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        self.bind()?;
        let address = self.driver().allocate(bytes.max(1));
        let address = address.during(format!("allocating {bytes} bytes on the GPU"))?;
        let context = Arc::clone(&self.context);
        Ok(Memory {
            context,
            address,
            bytes,
        })
    }

    /// Queues a fill of the whole allocation with one byte value, on the compute stream.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn fill(&self, memory: &Memory, value: u8) -> Result<()> {
        self.bind()?;
        // SAFETY: the range is the allocation.
        unsafe {
            self.driver()
                .fill(memory.address, value, memory.bytes, self.stream.raw())
        }
        .during("filling memory")
    }

    /// Copies host bytes into device memory, starting at its byte `offset`, and waits for the copy.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Panics
    /// When the range is out of bounds.
    pub fn write(&self, memory: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        assert!(
            offset + bytes.len() <= memory.bytes,
            "write outside the memory"
        );
        self.bind()?;
        let address = memory.address + offset as u64;
        // SAFETY: the range is inside the allocation, and the copy is waited for.
        unsafe { self.driver().copy_in(address, bytes, self.stream.raw()) }
            .during("copying to the GPU")?;
        self.synchronize()
    }

    /// Waits for the compute stream, then copies device memory from its byte `offset` on into the host buffer
    /// `bytes`.
    ///
    /// # Errors
    /// When the driver fails, or a kernel queued before failed.
    ///
    /// # Panics
    /// When the range is out of bounds.
    pub fn read(&self, memory: &Memory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        assert!(
            offset + bytes.len() <= memory.bytes,
            "read outside the memory"
        );
        self.bind()?;
        let address = memory.address + offset as u64;
        // SAFETY: the range is inside the allocation, and the copy is waited for.
        unsafe { self.driver().copy_out(bytes, address, self.stream.raw()) }
            .during("copying from the GPU")?;
        self.synchronize()
    }

    /// Waits for all work queued on the compute stream.
    ///
    /// # Errors
    /// When a queued kernel failed.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().during("waiting for the GPU")
    }

    /// Queues a kernel launch on the compute stream. The first launch of a module compiles and loads it.
    ///
    /// # Safety
    /// Every address in the arguments must point to memory of this GPU that is as large as the kernel's documentation
    /// says. It must stay allocated until the stream has passed the launch.
    ///
    /// # Errors
    /// When the module does not compile or load, or the driver refuses the launch.
    pub unsafe fn launch(&self, launch: &Launch) -> Result<()> {
        self.bind()?;
        let function = self.function(launch)?;
        let mut parameters = launch.parameters();
        let call = || format!("launching {} of {}", launch.kernel, launch.module.name());
        // SAFETY: the caller vouches for the addresses; the parameters are those of the kernel, and the call copies them.
        unsafe {
            self.driver().launch(
                function,
                launch.grid,
                launch.threads,
                launch.shared_bytes,
                self.stream.raw(),
                &mut parameters,
            )
        }
        .during_call(call)
    }

    /// Number of thread blocks of a launch that fit on one multiprocessor at the same time (occupancy).
    ///
    /// # Errors
    /// When the module does not load.
    pub fn resident_blocks(&self, launch: &Launch) -> Result<u32> {
        self.bind()?;
        let function = self.function(launch)?;
        // SAFETY: the function belongs to a loaded module.
        let blocks = unsafe {
            self.driver()
                .resident_blocks(function, launch.threads, launch.shared_bytes as usize)
        };
        blocks
            .map(i32::unsigned_abs)
            .during("asking for the occupancy")
    }

    fn function(&self, launch: &Launch) -> Result<sys::CUfunction> {
        let known = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        let function = known
            .get(&launch.module)
            .and_then(|module| module.function(launch.kernel));
        drop(known);
        match function {
            Some(function) => Ok(function),
            None => self.resolve(launch),
        }
    }

    /// Loads the module of a launch and resolves its kernel, at the first launch of each.
    fn resolve(&self, launch: &Launch) -> Result<sys::CUfunction> {
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        if !loaded.contains_key(&launch.module) {
            loaded.insert(launch.module.clone(), self.load(&launch.module)?);
        }
        let module = loaded
            .get_mut(&launch.module)
            .ok_or_else(|| CudaError::NoDevice {
                reason: "a module vanished while it was loaded".into(),
            })?;
        if let Some(function) = module.function(launch.kernel) {
            return Ok(function);
        }
        let call = || {
            format!(
                "finding the kernel {} in {}",
                launch.kernel,
                launch.module.name()
            )
        };
        let name = CString::new(launch.kernel).map_err(|error| CudaError::Driver {
            call: call(),
            code: error.to_string(),
        })?;
        // SAFETY: the module is loaded and never unloaded.
        let function = unsafe { self.driver().function(module.module, &name) }.during(call())?;
        let most = self.shared_limit;
        if most > DEFAULT_SHARED_BYTES {
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to a loaded module.
            unsafe {
                self.driver()
                    .set_attribute(function, attribute, most as i32)
            }
            .during("raising the shared memory limit")?;
        }
        module.functions.push((launch.kernel, function));
        Ok(function)
    }

    fn load(&self, module: &Module) -> Result<Loaded> {
        let image = self.images.get(module)?;
        let call = || format!("loading {}", module.name());
        let handle = match self.load_image(&image) {
            Err(error) if not_understood(&error) => {
                let reason = format!("the driver does not take it: {error}");
                self.load_image(&self.images.fallback(module, &reason)?)
                    .during(call())?
            }
            other => other.during(call())?,
        };
        Ok(Loaded {
            module: handle,
            functions: Vec::new(),
        })
    }

    fn load_image(&self, image: &Image) -> Result<sys::CUmodule, DriverError> {
        // SAFETY: a cubin from NVRTC with its own length inside, or PTX that ends with a zero byte.
        unsafe { self.driver().load_module(&image.bytes) }
    }
}

/// Whether the driver is too old for the machine code that the compiler made.
fn not_understood(error: &DriverError) -> bool {
    [
        CUresult::CUDA_ERROR_INVALID_IMAGE,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUresult::CUDA_ERROR_INVALID_SOURCE,
    ]
    .iter()
    .any(|code| error.is(*code))
}
