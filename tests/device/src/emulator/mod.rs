//! A CPU machine that executes launches. Kernel sources are compiled as C++ with emulated primitives.
//! `kernels/emulator/README.md` describes the model.
#![expect(
    unsafe_code,
    reason = "loads compiled kernels and gives them raw memory"
)]

mod compile;
mod library;
mod multiply;

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use kernels::cuda::launch::{Address, Arg, Launch};
use kernels::cuda::matmul::Multiply;

use self::compile::Watch;
pub use self::compile::{build_all, build_modules, object_name, write_objects};
use self::library::{RawBuffer, RawLaunch};
use crate::compile::is_unlisted;
use crate::machine::{Buffer, GUARD_BYTES, Machine, POISON};

/// Shared memory of a block in bytes, as sm_86 and sm_89 have it.
const SHARED_LIMIT: u32 = 101_376;

/// Distance to the next buffer, so that an address slightly outside is in no other buffer. It is never touched, so it
/// costs only address space.
const GAP_BYTES: usize = 16 << 20;

/// Execution order of blocks, warps and lanes. Kernels must not depend on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// The first block, warp, lane first.
    Ascending,
    /// The last block, warp, lane first.
    Descending,
    /// Blocks shuffled; warps and lanes alternate at random.
    Random(u64),
}

impl Order {
    /// The two orders that together reveal a missing barrier.
    pub const BOTH: [Self; 2] = [Self::Ascending, Self::Descending];
}

/// A CPU that emulates a GPU.
#[derive(Debug)]
pub struct Emulator {
    order: Order,
    watch: Watch,
    /// Directory of compiled modules; `None` compiles them.
    directory: Option<PathBuf>,
    allocations: Vec<Allocation>,
}

impl Emulator {
    /// Compiles modules with `$CXX` or `c++` when they are first launched.
    #[must_use]
    pub const fn new(order: Order) -> Self {
        Self {
            order,
            watch: Watch::Everything,
            directory: None,
            allocations: Vec::new(),
        }
    }

    /// An emulator for passes of whole models. It does not check memory accesses unless `TESSERA_WATCH=1` asks for it,
    /// which takes several times as long. The kernels' suites always check the same kernels.
    #[must_use]
    pub fn of_passes(order: Order) -> Self {
        Self {
            watch: Watch::of_passes(),
            ..Self::new(order)
        }
    }

    /// Takes modules from a directory that [`build_all`] filled.
    #[must_use]
    pub fn prebuilt(directory: &Path, order: Order) -> Self {
        Self {
            directory: Some(directory.to_owned()),
            ..Self::new(order)
        }
    }

    /// Copies bytes into a buffer, from byte `start` on.
    ///
    /// # Errors
    /// When the bytes do not fit.
    pub fn write_at(&mut self, buffer: Buffer, start: usize, bytes: &[u8]) -> Result<()> {
        let end = start.checked_add(bytes.len()).context("a long range")?;
        ensure!(end <= buffer.len, "the bytes do not fit the buffer");
        let allocation = self.allocation(buffer)?;
        // SAFETY: the allocation has at least as many bytes, and nobody else holds a reference into it.
        unsafe {
            let to = allocation.start().add(start);
            to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
        Ok(())
    }

    /// Bytes of a buffer from `start` on, guards included.
    fn read_at(&self, buffer: Buffer, start: isize, len: usize) -> Result<Vec<u8>> {
        let allocation = self.allocation(buffer)?;
        let guard = GUARD_BYTES as isize;
        let end = start.checked_add_unsigned(len).context("a long range")?;
        let inside = start >= -guard && end <= buffer.len as isize + guard;
        ensure!(inside, "outside the buffer and its guards");
        let mut bytes = vec![0; len];
        // SAFETY: the range is in the buffer and its guards, which were all written at allocation.
        unsafe {
            let from = allocation.start().offset(start);
            from.copy_to_nonoverlapping(bytes.as_mut_ptr(), len);
        }
        Ok(bytes)
    }

    /// The buffer that contains a range, and the range's offset in it.
    fn place(&self, at: Address, bytes: usize) -> Result<(Buffer, usize)> {
        let mut all = self.allocations.iter().map(Allocation::buffer);
        let inside = |buffer: &Buffer| {
            let end = buffer.address.0 + buffer.len as u64;
            at.0 >= buffer.address.0 && at.0 + bytes as u64 <= end
        };
        let found = all.find(inside);
        let buffer = found.with_context(|| format!("{at:?} + {bytes} lies in no buffer"))?;
        Ok((buffer, (at.0 - buffer.address.0) as usize))
    }

    fn allocation(&self, buffer: Buffer) -> Result<&Allocation> {
        let found = self.allocations.iter().find(|a| a.buffer() == buffer);
        found.context("a buffer of another machine, or from before a reset")
    }
}

impl multiply::Memory for Emulator {
    fn load(&self, at: Address, bytes: usize) -> Result<Vec<u8>> {
        let (buffer, start) = self.place(at, bytes)?;
        self.read_at(buffer, start as isize, bytes)
    }

    fn store(&mut self, at: Address, bytes: &[u8]) -> Result<()> {
        let (buffer, start) = self.place(at, bytes.len())?;
        self.write_at(buffer, start, bytes)
    }
}

impl Machine for Emulator {
    fn name(&self) -> String {
        format!("emulator, {:?} order", self.order)
    }

    fn shared_limit(&self) -> u32 {
        SHARED_LIMIT
    }

    fn allocate(&mut self, len: usize) -> Result<Buffer> {
        let allocation = Allocation::new(len)?;
        let buffer = allocation.buffer();
        self.allocations.push(allocation);
        Ok(buffer)
    }

    fn write(&mut self, buffer: Buffer, bytes: &[u8]) -> Result<()> {
        self.write_at(buffer, 0, bytes)
    }

    fn read(&mut self, buffer: Buffer, start: isize, len: usize) -> Result<Vec<u8>> {
        self.read_at(buffer, start, len)
    }

    fn multiply(
        &mut self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool> {
        multiply::run(self, product, workspace, workspace_bytes)?;
        Ok(true)
    }

    fn launch(&mut self, launch: &Launch) -> Result<()> {
        ensure!(
            launch.shared_bytes <= SHARED_LIMIT,
            "{} wants {} bytes of shared memory, at most {SHARED_LIMIT} are there",
            launch.kernel,
            launch.shared_bytes
        );
        // Without a compiler, a GPU has only the listed modules.
        ensure!(
            !is_unlisted(&launch.module),
            "no family lists {}",
            launch.module.name()
        );
        let library = library::of(&launch.module, self.watch, self.directory.as_deref())?;
        let words: Vec<u64> = launch.args.iter().map(|arg| arg.word()).collect();
        let mut kinds: Vec<u8> = launch.args.iter().map(|arg| kind(*arg)).collect();
        kinds.push(0);
        let buffers: Vec<RawBuffer> = self.allocations.iter().map(Allocation::raw).collect();
        let (order, seed) = match self.order {
            Order::Ascending => (0, 0),
            Order::Descending => (1, 0),
            Order::Random(seed) => (2, seed),
        };
        let raw = RawLaunch {
            grid: launch.grid,
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            order,
            seed,
            words: words.as_ptr(),
            kinds: kinds.as_ptr(),
            buffers: buffers.as_ptr(),
            buffer_count: buffers.len() as u64,
        };
        // SAFETY: the pointers outlive the call. Kernels stay in the buffers, which nobody else references: the
        // emulator checks this here or has checked it in the kernels' suites.
        unsafe { library.run(launch.kernel, &raw) }
            .with_context(|| format!("module {}", launch.module.name()))
    }

    fn reset(&mut self) -> Result<()> {
        let buffers: Vec<Buffer> = self.allocations.iter().map(Allocation::buffer).collect();
        let result = buffers
            .into_iter()
            .try_for_each(|buffer| (self as &mut dyn Machine).check_guards(buffer));
        self.allocations.clear();
        result
    }
}

/// The letter of `KindOf` in `emulator.h` for a parameter of this type.
const fn kind(arg: Arg) -> u8 {
    match arg {
        Arg::Address(_) => b'p',
        Arg::I32(_) => b'i',
        Arg::U32(_) => b'u',
        Arg::U64(_) => b'l',
        Arg::F32(_) => b'f',
    }
}

/// A buffer between its guards, followed by a gap.
#[derive(Debug)]
struct Allocation {
    base: NonNull<u8>,
    layout: Layout,
    len: usize,
}

// SAFETY: it is the only owner of its memory.
unsafe impl Send for Allocation {}

impl Allocation {
    fn new(len: usize) -> Result<Self> {
        let touched = len.checked_add(2 * GUARD_BYTES).context("a huge buffer")?;
        let size = touched.checked_add(GAP_BYTES).context("a huge buffer")?;
        let layout = Layout::from_size_align(size, GUARD_BYTES)?;
        // SAFETY: the size is not zero.
        let base = unsafe { alloc(layout) };
        let Some(base) = NonNull::new(base) else {
            handle_alloc_error(layout)
        };
        // SAFETY: more bytes were allocated.
        unsafe { base.write_bytes(POISON, touched) };
        Ok(Self { base, layout, len })
    }

    /// The first byte after the front guard.
    fn start(&self) -> *mut u8 {
        // SAFETY: the guard is in the allocation.
        unsafe { self.base.as_ptr().add(GUARD_BYTES) }
    }

    fn buffer(&self) -> Buffer {
        Buffer {
            address: Address(self.start().expose_provenance() as u64),
            len: self.len,
        }
    }

    fn raw(&self) -> RawBuffer {
        RawBuffer {
            address: self.buffer().address.0,
            len: self.len as u64,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
