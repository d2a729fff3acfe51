//! A GPU as a [`Backend`]: every operation is a series of launches on one queue, and tensors are in one arena.
//!
//! The arena is allocated once; later nothing is allocated on the device. Dropping a tensor frees its range at once.
//! Launches run in order, so the range's next owner writes it after all earlier readers. Copies run beside the queue:
//! a host-to-device copy waits for the last use of its destination, and a device-to-host copy waits for the launches
//! that made its source.
//!
//! An [`Executor`] executes the launches: a [`Gpu`](super::gpu::Gpu), or the emulator of the tests. Plain matrix
//! products go through the executor's library if it has one. All other operations are own kernels.
//!
//! Differences from the CPU: products of 16-bit tensors sum in another order, on tensor cores. LoRA's intermediate
//! activation is rounded once to 16 bits. The gradient of the logits is rounded to the dtype of the hidden states
//! before its products. Elementwise operations, operations on rows and losses have the bits of the CPU.
#![expect(
    unsafe_code,
    reason = "launches read and write memory by address; tensors vouch for it"
)]

mod adapted;
mod counting;
mod foreign;
pub(super) mod gpu;
pub mod graphs;
mod grouped;
mod library_step;
mod loss;
mod peers;
mod products;
mod registered;
mod reserved_uploads;
mod residents;
mod rows;
mod uses;

pub use loss::LossCuts;
pub use peers::{GroupExecutor, PeerExecutor};

use super::copies::copy_bytes;
use super::device_kind::DeviceKind;
use super::launch::{Address, Launch};
use super::matmul::{LibraryUse, Multiply};
use super::module::Module;
use super::ops::norm::{self, Kind};
use super::ops::pointwise::{self, RopeShape};
use super::ops::{attention, cast, unpack, workspace::Workspace};
use crate::adapted::{
    AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs, AdaptedLinearGrads, AdapterSums,
};
use crate::backend::{
    AttentionArgs, AttentionGrads, AttentionOut, Backend, Device, Direction, DropoutArgs, Gelu,
    KernelList, LossGrads, LossNeeds, MatmulArgs, NormGrads, RopeLayout, SumPart,
};
use crate::check;
use crate::error::{KernelError, Result, shape_error};
use crate::grouped::GroupedMatmulArgs;
use crate::peers::{GroupAccess, PeerAccess};
use crate::pool::{Pool, Tag};
use crate::quantized::Quantization;
use crate::reserved_upload::ReservedUpload;
use crate::resident::ResidentAccess;
use crate::tensor::{DeviceMemory, OnDevice};
use crate::timeline::DeviceSpan;
use crate::{DType, ForeignBytes, HostRegistration, STRETCH_ROWS, Shape, Tensor};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use uses::Uses;

/// Error of a device call that an [`Executor`] made, e.g. from the CUDA driver.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Event (as in CUDA): a point in the queue of an [`Executor`]. The type inside is private to the executor.
pub type Event = Arc<dyn Any + Send + Sync>;

/// Callback that receives the bytes of a device-to-host copy in pieces, as they arrive.
pub type Take<'a> = dyn FnMut(&[u8]) + 'a;

/// A [`Take`] callback that copies consecutive pieces into `out`. It panics when the pieces together are
/// longer than `out`; if they are shorter, the rest of `out` stays as it is.
pub fn filling(out: &mut [u8]) -> impl FnMut(&[u8]) {
    let mut rest = out;
    move |piece| {
        let (here, behind) = std::mem::take(&mut rest).split_at_mut(piece.len());
        copy_bytes(piece, here);
        rest = behind;
    }
}

/// Minimum size of an upload that runs beside the compute queue, e.g. the images of a batch. The compute queue's
/// small chunks would make the host wait for queued work.
const LARGE_UPLOAD_BYTES: usize = 1 << 20;

/// A copy of host bytes to the device.
#[derive(Clone, Debug)]
pub struct Upload<'b> {
    /// Where they go.
    pub to: Address,
    /// The bytes.
    pub bytes: &'b [u8],
    /// Event after the last use of the memory by its previous owner, if it had one.
    pub behind: Option<Event>,
}

/// Device that executes launches and copies: its memory, one queue of work, and copies beside that queue.
///
/// # Safety
/// Memory of [`Executor::allocate`] must stay until [`Executor::free`]. Launches, copies, fills, reads and writes
/// must run in the order of their calls. Uploads must run in the order of their calls, each before everything queued
/// after it.
pub unsafe trait Executor: Send + Sync + std::fmt::Debug {
    /// Kind of GPU. It affects how work is divided, and which products a library computes.
    fn kind(&self) -> DeviceKind;

    /// Number of multiprocessors. It affects how work is divided, never results.
    fn multiprocessors(&self) -> u32 {
        self.kind().multiprocessors
    }

    /// Whether real memory exists; false on the meta device.
    fn has_values(&self) -> bool {
        true
    }

    /// Allocates memory with unspecified contents, aligned to 256 bytes.
    ///
    /// # Errors
    /// When the device does not have enough memory.
    fn allocate(&self, bytes: u64) -> Result<Address, Cause>;

    /// Frees memory of [`Executor::allocate`], after the work that uses it.
    fn free(&self, memory: Address);

    /// Modules launched so far, in a fixed order. Empty unless the executor only counts.
    fn launched(&self) -> Vec<Module> {
        Vec::new()
    }

    /// Compiles modules in parallel, before their first launch.
    fn compile_ahead(&self, _modules: &[Module]) {}

    /// Ends waits of other threads that may depend on lost ranks. Later calls do not wait either: they fail, and
    /// [`Executor::free`] leaves the memory to the end of the process.
    fn abandon(&self) {}

    /// Waits until [`Executor::write`] of this many bytes would probably not wait.
    ///
    /// # Errors
    /// When the device fails.
    fn await_write(&self, _bytes: u64) -> Result<(), Cause> {
        Ok(())
    }

    /// Copies host bytes to the device, in queue order.
    ///
    /// # Safety
    /// The range is in allocated memory.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause>;

    /// Waits for the device and copies bytes to the host.
    ///
    /// # Safety
    /// The range is in allocated memory.
    ///
    /// # Errors
    /// When the device fails, or work queued before failed.
    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause>;

    /// Fills a range with zeros.
    ///
    /// # Safety
    /// The range is in allocated memory.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause>;

    /// Copies within the device. The ranges must not overlap.
    ///
    /// # Safety
    /// Both ranges are in allocated memory.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause>;

    /// Records an event after everything queued so far.
    ///
    /// # Errors
    /// When the device fails.
    fn record_event(&self) -> Result<Event, Cause>;

    /// Copies host bytes to the device beside the queue, each after its event. Work queued later waits for all copies.
    ///
    /// # Safety
    /// The ranges are in allocated memory, and nothing queued between its event and this call uses a range.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn upload(&self, uploads: &[Upload<'_>]) -> Result<(), Cause>;

    /// As [`Executor::upload`], but queued work does not wait for the copy before [`Executor::delivered`]. Any thread
    /// may call this while others queue work.
    ///
    /// # Safety
    /// The range is in allocated memory, and nothing queued after the event and before the next
    /// [`Executor::delivered`] uses it.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Event) -> Result<(), Cause>;

    /// Page-locks host memory where it is. Uploads and deliveries of parts of it then read it in place, when they run.
    /// Returns `false` if the executor has no such memory.
    ///
    /// # Safety
    /// Nothing writes or frees the bytes until [`Executor::unregister`] returns true.
    ///
    /// # Errors
    /// When the driver refuses.
    unsafe fn register(&self, _bytes: &[u8]) -> Result<bool, Cause> {
        Ok(false)
    }

    /// Ends [`Executor::register`], after the copies that read the bytes. Returns `false` if copies may still do so, because
    /// they wait for a lost rank.
    fn unregister(&self, _bytes: &[u8]) -> bool {
        true
    }

    /// Makes work queued from here on wait for everything delivered. The returned event follows the deliveries, but
    /// no other work.
    ///
    /// # Errors
    /// When the device fails.
    fn delivered(&self) -> Result<Event, Cause>;

    /// Waits for the event `behind` only. Then passes bytes to `take` in pieces, in order, each aligned to four
    /// bytes. Any thread may call this while others queue work.
    ///
    /// # Safety
    /// The range is in allocated memory, and nothing queued after the event writes it.
    ///
    /// # Errors
    /// When the device fails, or work queued before the event failed.
    unsafe fn fetch(
        &self,
        from: Address,
        bytes: u64,
        behind: &Event,
        take: &mut Take<'_>,
    ) -> Result<(), Cause>;

    /// Starts recording a timeline, or stops and drops it.
    ///
    /// # Errors
    /// When the device fails.
    fn measure(&self, _on: bool) -> Result<(), Cause> {
        Ok(())
    }

    /// Sets the label of work queued from here on; `None` ends labeling.
    ///
    /// # Errors
    /// When the device fails.
    fn label(&self, _label: Option<u32>) -> Result<(), Cause> {
        Ok(())
    }

    /// Returns the spans recorded since the last call. Waits for the device.
    ///
    /// # Errors
    /// When the device fails.
    fn measured(&self) -> Result<Vec<DeviceSpan>, Cause> {
        Ok(Vec::new())
    }

    /// Queues a kernel launch.
    ///
    /// # Safety
    /// Every address in the arguments points to allocated memory as large as the kernel's documentation says.
    ///
    /// # Errors
    /// When the module does not compile or the device refuses the launch.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause>;

    /// Products for which [`Executor::multiply`] is used. Each of them allocates scratch memory for it, used or not,
    /// both in a plan and in the run.
    fn library(&self) -> LibraryUse {
        self.kind().library()
    }

    /// Queues a product through a library. Returns `false`, with nothing queued, if the library does not support the
    /// shape; the answer for one shape is always the same.
    ///
    /// # Safety
    /// Every address of the product points to allocated memory of the size it states. `workspace` points to
    /// `workspace_bytes` bytes that nothing else uses.
    ///
    /// # Errors
    /// When the workspace is smaller than [`WORKSPACE_BYTES`](super::matmul::WORKSPACE_BYTES), or the device fails.
    unsafe fn multiply(
        &self,
        _product: &Multiply,
        _workspace: Address,
        _workspace_bytes: u64,
    ) -> Result<bool, Cause> {
        Ok(false)
    }

    /// Access to the memory of other ranks' devices, if the executor supports it.
    fn peers(&self) -> Option<&dyn PeerExecutor> {
        None
    }

    /// Collectives of a library among ranks' devices, if the executor supports them.
    fn group(&self) -> Option<&dyn GroupExecutor> {
        None
    }
}

/// All memory of a backend, and its executor.
#[derive(Debug)]
struct Arena {
    executor: Arc<dyn Executor>,
    start: Address,
    uses: Arc<Uses>,
}

impl DeviceMemory for Arena {
    fn address(&self) -> u64 {
        self.start.0
    }

    fn has_values(&self) -> bool {
        self.executor.has_values()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        // SAFETY: tensors request bytes of ranges that the pool allocated inside the arena.
        let read = unsafe { self.executor.read(Address(self.start.0 + offset), out) };
        read.map_err(|cause| KernelError::Device { op: "read", cause })
    }

    fn record_event(&self) -> Result<Event> {
        let event = self.executor.record_event();
        event.map_err(|cause| KernelError::Device {
            op: "record an event",
            cause,
        })
    }

    fn fetch(&self, offset: u64, bytes: u64, behind: &Event, take: &mut Take<'_>) -> Result<()> {
        let from = Address(self.start.0 + offset);
        // SAFETY: as in `read`. A tensor is written before anything holds it, and a state does not change while a
        // tensor of it exists.
        let fetched = unsafe { self.executor.fetch(from, bytes, behind, take) };
        fetched.map_err(|cause| KernelError::Device { op: "fetch", cause })
    }

    fn release(&self, offset: u64, bytes: u64) {
        self.uses.release(offset..offset + bytes);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.executor.free(self.start);
    }
}

/// Tile table of the last attention call, which all layers of a model share. Later tables overwrite it in place if
/// they fit. It outlives a pass and is not allocated at the start. So it is at the other end of the arena; among the
/// blocks of a pass it would move those of the next pass.
type LastTable = Mutex<Option<(Vec<i32>, Tensor)>>;

/// [`Backend`] for NVIDIA GPUs. It allocates tensors in one arena (a single device allocation) and sends
/// kernel launches and copies to an [`Executor`].
#[derive(Clone, Debug)]
pub struct CudaBackend {
    pool: Pool,
    executor: Arc<dyn Executor>,
    memory: Arc<dyn DeviceMemory>,
    uses: Arc<Uses>,
    table: Arc<LastTable>,
    /// Key and time that gradient sums are rounded with, and the tensor that stores them. It is allocated with the
    /// first states, so it leaves no hole.
    rounding: Arc<Mutex<Option<([u32; 4], Tensor)>>>,
    cuts: LossCuts,
    /// Rows of a stretch of the feed-forward layers.
    stretch: usize,
    /// This device for feed-forward layers, whose products it computes in stretches. `None` in that one.
    feed_forward: Option<Box<Self>>,
}

impl CudaBackend {
    /// GPU backend with an arena of `bytes` bytes for its tensors, which is allocated now.
    ///
    /// # Errors
    /// When the device does not have enough memory.
    pub fn new(executor: Arc<dyn Executor>, bytes: u64) -> Result<Self> {
        let start = executor
            .allocate(bytes)
            .map_err(|cause| KernelError::Device {
                op: "allocate the arena",
                cause,
            })?;
        let pool = Pool::arena("GPU", bytes);
        Ok(Self::at(executor, start, pool))
    }

    /// Backend on an arena that is already allocated.
    fn at(executor: Arc<dyn Executor>, start: Address, pool: Pool) -> Self {
        let uses = Arc::<Uses>::default();
        let memory: Arc<dyn DeviceMemory> = Arc::new(Arena {
            executor: executor.clone(),
            start,
            uses: uses.clone(),
        });
        Self {
            pool,
            executor,
            memory,
            uses,
            table: Arc::default(),
            rounding: Arc::default(),
            cuts: LossCuts::default(),
            stretch: 0,
            feed_forward: None,
        }
        .with_stretch(STRETCH_ROWS)
    }

    /// Sets the rows of a stretch, [`STRETCH_ROWS`] by default: `rows` rounded up to a multiple of 16, which keeps the
    /// alignment of operands.
    #[must_use]
    pub fn with_stretch(mut self, rows: usize) -> Self {
        self.stretch = rows.max(1).next_multiple_of(16);
        self.feed_forward = None;
        self.feed_forward = Some(Box::new(self.clone()));
        self
    }

    /// First row and number of rows of each part in which `rows` rows are computed: one for all of them, or stretches in a
    /// feed-forward layer.
    fn stretches(&self, rows: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let step = match &self.feed_forward {
            Some(_) => rows.max(1),
            None => self.stretch,
        };
        let firsts = (0..rows.max(1)).step_by(step);
        firsts.map(move |first| (first, step.min(rows - first)))
    }

    /// Sets the sizes of the chunks in which the fused output projection and cross entropy are computed.
    #[must_use]
    pub fn with_loss_cuts(mut self, cuts: LossCuts) -> Self {
        self.cuts = cuts;
        self
    }

    /// Allocates a tensor with unspecified contents.
    fn uninit(&self, shape: impl Into<Shape>, dtype: DType, tag: Tag) -> Result<Tensor> {
        let shape = shape.into();
        let placed = self.pool.place(shape.elems() * dtype.size_bytes(), tag)?;
        let place = OnDevice {
            memory: self.memory.clone(),
            placed,
            known: None,
        };
        Ok(Tensor::on_device(place, shape, dtype))
    }

    /// As [`CudaBackend::uninit`], but at the other end of the arena, away from the blocks of a pass. For tensors
    /// that outlive a pass.
    fn apart(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        let bytes = shape.elems() * dtype.size_bytes();
        let place = OnDevice {
            memory: self.memory.clone(),
            placed: self.pool.place_apart(bytes, tag)?,
            known: None,
        };
        Ok(Tensor::on_device(place, shape, dtype))
    }

    fn output(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.uninit(shape, dtype, Tag::Activations)
    }

    fn gradient(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.uninit(shape, DType::F32, Tag::Gradients)
    }

    /// Scratch memory of one operation. Dropping it frees the range for work queued later.
    fn scratch(&self, bytes: u64) -> Result<Tensor> {
        self.uninit([bytes.div_ceil(4) as usize], DType::F32, Tag::Workspace)
    }

    fn address(&self, op: &'static str, x: &Tensor) -> Result<Address> {
        let shape = x.shape();
        match x.address_in(&self.memory) {
            Some(address) => Ok(Address(address)),
            None if x.is_meta() => Err(KernelError::NoValues { op, shape }),
            None => Err(KernelError::Elsewhere { op, shape }),
        }
    }

    fn device_error(op: &'static str) -> impl Fn(Cause) -> KernelError {
        move |cause| KernelError::Device { op, cause }
    }

    fn run(&self, op: &'static str, launches: impl IntoIterator<Item = Launch>) -> Result<()> {
        for launch in launches {
            // SAFETY: launches use addresses of tensors that the operation holds, whose sizes were checked against
            // the call, or of scratch memory of the size that the operation states. A range freed meanwhile is
            // written only by later launches, or by an upload that waits for this one.
            let queued = unsafe { self.executor.launch(&launch) };
            self.counted(op, queued)?;
        }
        Ok(())
    }

    /// Counts a use after it was queued. If another thread records an event in between, the event counts too few
    /// commands before it, never too many.
    fn counted<T>(&self, op: &'static str, queued: Result<T, Cause>) -> Result<T> {
        self.uses.count();
        queued.map_err(Self::device_error(op))
    }

    /// As [`CudaBackend::run`], for operations that may have no kernel (`None`).
    fn run_some<L: IntoIterator<Item = Launch>>(
        &self,
        op: &'static str,
        launches: Option<L>,
    ) -> Result<()> {
        self.run(op, self.possible(op, launches)?)
    }

    /// The launches of an operation. It is an error where there are none.
    fn possible<T>(&self, op: &'static str, launches: Option<T>) -> Result<T> {
        launches.ok_or_else(|| KernelError::Shape {
            op,
            detail: "the extents exceed those of a grid".into(),
        })
    }

    /// Writes bytes to the front of a tensor.
    fn write(&self, op: &'static str, to: &Tensor, bytes: &[u8]) -> Result<()> {
        let at = self.address(op, to)?;
        assert!(bytes.len() <= to.size_bytes(), "bytes outside the tensor");
        // SAFETY: `to` has at least as many bytes.
        let queued = unsafe { self.executor.write(at, bytes) };
        self.counted(op, queued)
    }

    /// Uploads integers such as row numbers. The host keeps a copy.
    fn integers(&self, op: &'static str, values: &[i32]) -> Result<Tensor> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let place = OnDevice {
            memory: self.memory.clone(),
            placed: self.pool.place(bytes.len(), Tag::Workspace)?,
            known: Some(bytes.into()),
        };
        let out = Tensor::on_device(place, [values.len()].into(), DType::I32);
        self.write(op, &out, bytes)?;
        Ok(out)
    }

    /// Copies bytes into a tensor at `offset` of the arena, beside the queue and after the last use of the range.
    fn upload_beside(&self, to: &Tensor, offset: u64, bytes: &[u8]) -> Result<()> {
        const OP: &str = "upload";
        let at = self.address(OP, to)?;
        let behind = self.last_use(OP, offset..offset + bytes.len() as u64)?;
        let upload = Upload {
            to: at,
            bytes,
            behind,
        };
        // SAFETY: `to` has as many bytes, and its range has no use after that event.
        let uploaded = unsafe { self.executor.upload(&[upload]) };
        uploaded.map_err(Self::device_error(OP))
    }

    /// Event after the last use of a range of the arena, if it was ever used.
    fn last_use(&self, op: &'static str, place: Range<u64>) -> Result<Option<Event>> {
        let now = || self.executor.record_event();
        // Records an event now, so that a later copy into a range freed before need not wait for work queued from
        // here on.
        let marked = self.uses.mark(now);
        marked.map_err(Self::device_error(op))?;
        let behind = self.uses.behind(place, now);
        behind.map_err(Self::device_error(op))
    }

    fn zero(&self, op: &'static str, x: &Tensor) -> Result<()> {
        if x.size_bytes() == 0 {
            return Ok(());
        }
        let at = self.address(op, x)?;
        // SAFETY: the range is the tensor's.
        let queued = unsafe { self.executor.zero(at, x.size_bytes() as u64) };
        self.counted(op, queued)
    }

    /// Copy of a tensor in its own memory.
    fn copy_of(&self, op: &'static str, x: &Tensor, tag: Tag) -> Result<Tensor> {
        let out = self.uninit(x.shape(), x.dtype(), tag)?;
        let (from, to) = (self.address(op, x)?, self.address(op, &out)?);
        // SAFETY: both tensors have as many bytes and are distinct.
        let queued = unsafe { self.executor.copy(from, to, x.size_bytes() as u64) };
        self.counted(op, queued)?;
        Ok(out)
    }

    /// `x` in `dtype` at a 16-byte-aligned address. Copied or converted only if necessary.
    fn operand(&self, op: &'static str, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let aligned = if self.address(op, x)?.0.is_multiple_of(16) {
            x.clone()
        } else {
            self.copy_of(op, x, Tag::Workspace)?
        };
        self.cast(&aligned, dtype)
    }

    /// Runs the launches of `build` with scratch memory. `build` is called twice: first to count the scratch memory,
    /// then with it.
    fn run_in_workspace(
        &self,
        op: &'static str,
        build: impl Fn(&mut Workspace) -> Option<Vec<Launch>>,
    ) -> Result<()> {
        let (_scratch, launches) = self.in_workspace(op, build)?;
        self.run_some(op, launches)
    }

    /// What `build` makes with scratch memory of the size it needs, and that memory. `None` where it makes nothing.
    fn in_workspace<T>(
        &self,
        op: &'static str,
        build: impl Fn(&mut Workspace) -> Option<T>,
    ) -> Result<(Option<Tensor>, Option<T>)> {
        let mut counted = Workspace::new(Address::NULL);
        if build(&mut counted).is_none() {
            return Ok((None, None));
        }
        let scratch = self.scratch(counted.bytes() + 256)?;
        let start = self.address(op, &scratch)?.0.next_multiple_of(256);
        Ok((Some(scratch), build(&mut Workspace::new(Address(start)))))
    }

    /// Runs an elementwise launch over `x` that writes one tensor like it.
    fn elements(
        &self,
        op: &'static str,
        x: &Tensor,
        launch: impl Fn(Address, u64) -> Option<Launch>,
    ) -> Result<Tensor> {
        let y = self.output(x.shape(), x.dtype())?;
        let launch = launch(self.address(op, &y)?, x.elems() as u64);
        self.run_some(op, launch.map(|l| [l]))?;
        Ok(y)
    }

    fn norm_shape(x: &Tensor, weight_dtype: DType, kind: Kind, eps: f32) -> Result<norm::Shape> {
        let c = u32::try_from(x.shape().last());
        Ok(norm::Shape {
            kind,
            dtype: x.dtype(),
            weight_dtype,
            rows: x.shape().rows() as u64,
            c: c.map_err(|_| KernelError::Shape {
                op: "norm",
                detail: format!("rows of {}", x.shape()),
            })?,
            eps,
        })
    }

    /// A norm's parameter in the dtype of the activations or in f32.
    fn parameter(&self, p: &Tensor, dtype: DType) -> Result<Tensor> {
        let kept = p.dtype() == dtype || p.dtype() == DType::F32;
        self.cast(p, if kept { p.dtype() } else { DType::F32 })
    }

    fn norm_forward(
        &self,
        op: &'static str,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        eps: f32,
    ) -> Result<Tensor> {
        let weight = self.parameter(weight, x.dtype())?;
        let bias = bias.map(|b| self.cast(b, weight.dtype())).transpose()?;
        let kind = if bias.is_some() {
            Kind::Layer
        } else {
            Kind::Rms
        };
        let shape = Self::norm_shape(x, weight.dtype(), kind, eps)?;
        let y = self.output(x.shape(), x.dtype())?;
        let at = norm::Forward {
            x: self.address(op, x)?,
            residual: Address::NULL,
            sum: Address::NULL,
            weight: self.address(op, &weight)?,
            bias: match &bias {
                Some(bias) => self.address(op, bias)?,
                None => Address::NULL,
            },
            y: self.address(op, &y)?,
        };
        self.run_some(op, norm::forward(&shape, &at).map(|l| [l]))?;
        Ok(y)
    }

    fn norm_backward(
        &self,
        op: &'static str,
        kind: Kind,
        [x, weight, dy]: [&Tensor; 3],
        eps: f32,
    ) -> Result<NormGrads> {
        let weight = self.parameter(weight, x.dtype())?;
        let shape = Self::norm_shape(x, weight.dtype(), kind, eps)?;
        let c = x.shape().last();
        let grads = NormGrads {
            dx: self.output(x.shape(), x.dtype())?,
            d_weight: self.gradient([c])?,
            d_bias: match kind {
                Kind::Layer => Some(self.gradient([c])?),
                Kind::Rms => None,
            },
        };
        let workspace = self.scratch(norm::workspace_bytes(&shape))?;
        let at = norm::Backward {
            x: self.address(op, x)?,
            weight: self.address(op, &weight)?,
            dy: self.address(op, dy)?,
            d_sum: Address::NULL,
            dx: self.address(op, &grads.dx)?,
            d_weight: self.address(op, &grads.d_weight)?,
            d_bias: match &grads.d_bias {
                Some(d_bias) => self.address(op, d_bias)?,
                None => Address::NULL,
            },
            workspace: self.address(op, &workspace)?,
        };
        self.run_some(op, norm::backward(&shape, &at))?;
        Ok(grads)
    }

    /// Tiling of an attention call, and its table on the device. `None` for a call without queries or keys.
    fn attention_plan(
        &self,
        op: &'static str,
        args: &AttentionArgs<'_>,
        sizes: check::AttentionSizes,
    ) -> Result<Option<(attention::Plan, Tensor)>> {
        if sizes.t == 0 || sizes.s == 0 {
            return Ok(None);
        }
        let plan = attention::Plan::new(&attention::Problem {
            dtype: args.q.dtype(),
            heads: sizes.h as u32,
            kv_heads: sizes.g as u32,
            head_dim: sizes.d as u32,
            q_starts: args.q_starts,
            k_starts: args.k_starts,
            causal: args.causal,
            scale: args.scale,
            multiprocessors: self.executor.multiprocessors(),
            shared_bytes: self.executor.kind().shared_bytes(),
            backward: self.executor.kind().attention_backward,
        });
        let Some(plan) = plan else {
            return Err(KernelError::Shape {
                op,
                detail: format!("no kernel for {sizes:?}"),
            });
        };
        let mut last = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let table = match last.take() {
            Some((values, table)) if values == plan.table() => table,
            // Another thread may hold the table for launches that it has not queued yet.
            Some((_, table)) if table.is_sole() && table.elems() >= plan.table().len() => {
                // The write is queued after the launches that read the old table.
                self.write(op, &table, bytemuck::cast_slice(plan.table()))?;
                table
            }
            old => {
                drop(old);
                let places = plan.table().len().next_power_of_two();
                let table = self.apart([places].into(), DType::I32, Tag::Workspace)?;
                self.write(op, &table, bytemuck::cast_slice(plan.table()))?;
                table
            }
        };
        *last = Some((plan.table().to_vec(), table.clone()));
        Ok(Some((plan, table)))
    }

    /// Queries, keys and values at 16-byte-aligned addresses.
    fn attention_operands(
        &self,
        op: &'static str,
        args: &AttentionArgs<'_>,
    ) -> Result<[Tensor; 3]> {
        let dtype = args.q.dtype();
        Ok([
            self.operand(op, args.q, dtype)?,
            self.operand(op, args.k, dtype)?,
            self.operand(op, args.v, dtype)?,
        ])
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> Device {
        Device::Cuda
    }

    fn has_values(&self) -> bool {
        self.executor.has_values()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn launched(&self) -> KernelList {
        KernelList {
            modules: self.executor.launched(),
        }
    }

    fn compile_ahead(&self, kernels: &KernelList) {
        self.executor.compile_ahead(&kernels.modules);
    }

    fn abandon(&self) {
        self.executor.abandon();
    }

    fn peers(&self) -> Option<&dyn PeerAccess> {
        self.executor.peers().map(|_| self as _)
    }

    fn group(&self) -> Option<&dyn GroupAccess> {
        self.executor.group().map(|_| self as _)
    }

    fn residents(&self) -> Option<&dyn ResidentAccess> {
        Some(self)
    }

    fn upload(&self, bytes: &[u8], shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        check::upload(bytes, shape, dtype)?;
        let placed = self.pool.place(bytes.len(), tag)?;
        let place = OnDevice {
            memory: self.memory.clone(),
            placed,
            known: (dtype == DType::I32).then(|| bytes.into()),
        };
        let offset = place.placed.offset();
        let out = Tensor::on_device(place, shape, dtype);
        if matches!(tag, Tag::Gathered | Tag::Parameters) || bytes.len() >= LARGE_UPLOAD_BYTES {
            self.upload_beside(&out, offset, bytes)?;
        } else {
            self.write("upload", &out, bytes)?;
        }
        Ok(out)
    }

    fn reserve_upload(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<ReservedUpload> {
        self.reserve_upload_op(shape, dtype, tag)
    }

    fn upload_into(&self, place: ReservedUpload, bytes: &[u8]) -> Result<Tensor> {
        let Some(tensor) = place.tensor else {
            return self.upload(bytes, place.shape, place.dtype, place.tag);
        };
        self.upload_reserved([(tensor.clone(), place.behind, bytes)])?;
        Ok(tensor)
    }

    fn upload_all(&self, uploads: Vec<(ReservedUpload, &[u8])>) -> Result<Vec<Tensor>> {
        self.upload_all_op(uploads)
    }

    fn register_host(&self, bytes: ForeignBytes) -> Result<Option<HostRegistration>> {
        HostRegistration::new(&self.executor, bytes)
    }

    fn measure(&self, on: bool) -> Result<()> {
        let started = self.executor.measure(on);
        started.map_err(Self::device_error("measure"))
    }

    fn label(&self, label: Option<u32>) -> Result<()> {
        let labelled = self.executor.label(label);
        labelled.map_err(Self::device_error("label"))
    }

    fn measured(&self) -> Result<Vec<DeviceSpan>> {
        let spans = self.executor.measured();
        spans.map_err(Self::device_error("measure"))
    }

    fn zeros(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        let out = self.uninit(shape, dtype, tag)?;
        self.zero("zeros", &out)?;
        Ok(out)
    }

    fn cast(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        const OP: &str = "cast";
        check::float(OP, x)?;
        check::float_dtype(OP, dtype)?;
        let mut from = self.address(OP, x)?;
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        let aligned;
        if !from.0.is_multiple_of(16) {
            aligned = self.copy_of(OP, x, Tag::Workspace)?;
            from = self.address(OP, &aligned)?;
        }
        let y = self.output(x.shape(), dtype)?;
        let to = self.address(OP, &y)?;
        let launch = cast::launch(x.dtype(), from, dtype, to, x.elems() as u64);
        self.run_some(OP, launch.map(|l| [l]))?;
        Ok(y)
    }

    fn dequantize(
        &self,
        quantized: &Tensor,
        quantization: Quantization,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor> {
        const OP: &str = "dequantize";
        check::dequantize(quantized, quantization, shape, dtype)?;
        let mut from = self.address(OP, quantized)?;
        let aligned;
        if !from.0.is_multiple_of(16) {
            aligned = self.copy_of(OP, quantized, Tag::Workspace)?;
            from = self.address(OP, &aligned)?;
        }
        let y = self.uninit(shape, dtype, Tag::Gathered)?;
        let to = self.address(OP, &y)?;
        let launch = unpack::launch(quantization, from, shape, dtype, to);
        self.run_some(OP, launch.map(|l| [l]))?;
        Ok(y)
    }

    fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        const OP: &str = "add";
        check::same(OP, a, b)?;
        let (p, q) = (self.address(OP, a)?, self.address(OP, b)?);
        self.elements(OP, a, |y, n| pointwise::add(a.dtype(), p, q, y, n))
    }

    fn scale(&self, x: &Tensor, factor: f32) -> Result<Tensor> {
        const OP: &str = "scale";
        check::float(OP, x)?;
        let from = self.address(OP, x)?;
        self.elements(OP, x, |y, n| {
            pointwise::scale(x.dtype(), from, factor, y, n)
        })
    }

    fn dropout(&self, args: DropoutArgs<'_>) -> Result<Tensor> {
        const OP: &str = "dropout";
        check::dropout(&args)?;
        let (x, rows) = (self.address(OP, args.x)?, self.address(OP, args.rows)?);
        let sizes = [args.x.shape().rows() as u64, args.x.shape().last() as u64];
        self.elements(OP, args.x, |y, _| {
            pointwise::dropout(args.x.dtype(), [x, rows, y], sizes, args.key, args.p)
        })
    }

    fn part_step(&self, _total: usize) -> usize {
        self.stretch
    }

    fn feed_forward(&self) -> Option<&dyn Backend> {
        Some(&**self.feed_forward.as_ref()?)
    }

    fn matmul(&self, args: MatmulArgs<'_>) -> Result<Tensor> {
        self.matmul_op(&args, check::matmul(&args)?, None)
    }

    fn matmul_part(
        &self,
        args: MatmulArgs<'_>,
        sum: Option<Tensor>,
        part: SumPart,
    ) -> Result<Tensor> {
        const OP: &str = "matmul_part";
        let sizes = check::matmul(&args)?;
        check::part(OP, part, sizes.k, self.stretch, sum.is_some())?;
        let shape = Shape::new(&[sizes.m, sizes.n]);
        if let Some(sum) = sum.as_ref().filter(|sum| sum.shape() != shape) {
            return shape_error(OP, format!("sum {} for {shape}", sum.shape()));
        }
        let out = DType::F32;
        let sum = sum.map(|sum| match sum.is_sole() {
            true => Ok(sum),
            false => self.copy_of(OP, &sum, Tag::Activations),
        });
        self.matmul_op(&MatmulArgs { out, ..args }, sizes, sum.transpose()?)
    }

    fn column_sum(&self, x: &Tensor) -> Result<Tensor> {
        self.column_sums(x, None)
    }

    fn column_sum_part(&self, x: &Tensor, sum: Option<Tensor>, part: SumPart) -> Result<Tensor> {
        let (rows, has_sum) = (x.shape().rows(), sum.is_some());
        check::part("column_sum_part", part, rows, self.stretch, has_sum)?;
        self.column_sums(x, sum)
    }

    fn partition_rows(&self, second: &[bool]) -> Result<[Tensor; 2]> {
        self.partition_rows_op(second)
    }

    fn grouped_matmul(&self, args: GroupedMatmulArgs<'_>) -> Result<Tensor> {
        self.grouped_op(&args, check::grouped(&args)?)
    }

    fn groups_adapters(&self) -> bool {
        true
    }

    fn adapted_linear(&self, args: AdaptedLinearArgs<'_>) -> Result<AdaptedLinear> {
        self.adapted_op(&args)
    }

    fn adapted_linear_backward(
        &self,
        args: AdaptedLinearGradArgs<'_>,
    ) -> Result<AdaptedLinearGrads> {
        let total = args.forward.x.shape().rows();
        self.adapted_backward_op(&args, Vec::new(), SumPart { first: 0, total })
    }

    fn adapted_linear_backward_part(
        &self,
        args: AdaptedLinearGradArgs<'_>,
        sums: AdapterSums,
        part: SumPart,
    ) -> Result<AdaptedLinearGrads> {
        const OP: &str = "adapted_linear_backward_part";
        let (rows, has_sum) = (args.forward.x.shape().rows(), part.first > 0);
        check::part(OP, part, rows, self.stretch, has_sum)?;
        self.adapted_backward_op(&args, sums, part)
    }

    fn matmul_of_rows(&self, a: &Tensor, b: &Tensor, rows: &Tensor) -> Result<Tensor> {
        self.of_rows_op(a, b, rows, check::matmul_of_rows(a, b, rows)?)
    }

    fn column_sum_of_rows(&self, x: &Tensor, rows: &Tensor) -> Result<Tensor> {
        self.column_sum_op(x, Some(rows))
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
        const OP: &str = "layer_norm";
        check::norm(OP, x, &[weight, bias])?;
        self.norm_forward(OP, x, weight, Some(bias), eps)
    }

    fn layer_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        eps: f32,
    ) -> Result<NormGrads> {
        const OP: &str = "layer_norm_backward";
        check::norm(OP, x, &[weight])?;
        check::same(OP, x, dy)?;
        self.norm_backward(OP, Kind::Layer, [x, weight, dy], eps)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
        const OP: &str = "rms_norm";
        check::norm(OP, x, &[weight])?;
        self.norm_forward(OP, x, weight, None, eps)
    }

    fn rms_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        eps: f32,
    ) -> Result<NormGrads> {
        const OP: &str = "rms_norm_backward";
        check::norm(OP, x, &[weight])?;
        check::same(OP, x, dy)?;
        self.norm_backward(OP, Kind::Rms, [x, weight, dy], eps)
    }

    fn gelu(&self, x: &Tensor, kind: Gelu) -> Result<Tensor> {
        const OP: &str = "gelu";
        check::float(OP, x)?;
        let from = self.address(OP, x)?;
        self.elements(OP, x, |y, n| pointwise::gelu(x.dtype(), kind, from, y, n))
    }

    fn gelu_backward(&self, x: &Tensor, dy: &Tensor, kind: Gelu) -> Result<Tensor> {
        const OP: &str = "gelu_backward";
        check::same(OP, x, dy)?;
        let from = [self.address(OP, x)?, self.address(OP, dy)?];
        self.elements(OP, x, |dx, n| {
            pointwise::gelu_backward(x.dtype(), kind, from, dx, n)
        })
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        const OP: &str = "swiglu";
        check::same(OP, gate, up)?;
        let (g, u) = (self.address(OP, gate)?, self.address(OP, up)?);
        self.elements(OP, gate, |y, n| pointwise::swiglu(gate.dtype(), g, u, y, n))
    }

    fn swiglu_backward(&self, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
        const OP: &str = "swiglu_backward";
        check::same(OP, gate, up)?;
        check::same(OP, gate, dy)?;
        let mut from = [Address::NULL; 3];
        for (to, x) in from.iter_mut().zip([gate, up, dy]) {
            *to = self.address(OP, x)?;
        }
        let d_up = self.output(up.shape(), up.dtype())?;
        let second = self.address(OP, &d_up)?;
        let d_gate = self.elements(OP, gate, |d_gate, n| {
            pointwise::swiglu_backward(gate.dtype(), from, [d_gate, second], n)
        })?;
        Ok((d_gate, d_up))
    }

    fn rope(
        &self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        layout: RopeLayout,
        direction: Direction,
    ) -> Result<Tensor> {
        const OP: &str = "rope";
        let w = check::rope(x, cos, sin)?;
        let shape = RopeShape {
            tokens: x.dim(0) as u64,
            heads: x.dim(1) as u32,
            d: x.dim(2) as u32,
            w: w as u32,
        };
        let from = [
            self.address(OP, x)?,
            self.address(OP, cos)?,
            self.address(OP, sin)?,
        ];
        self.elements(OP, x, |y, _| {
            let [x_at, cos, sin] = from;
            pointwise::rope(x.dtype(), [x_at, cos, sin, y], shape, layout, direction)
        })
    }

    fn rms_norm_rope(
        &self,
        x: &Tensor,
        weight: &Tensor,
        eps: f32,
        [cos, sin]: [&Tensor; 2],
        layout: RopeLayout,
    ) -> Result<Tensor> {
        const OP: &str = "rms_norm_rope";
        check::norm(OP, x, &[weight])?;
        let w = check::rope(x, cos, sin)?;
        let own = self.parameter(weight, x.dtype())?;
        let shape = Self::norm_shape(x, own.dtype(), Kind::Rms, eps)?;
        let y = self.output(x.shape(), x.dtype())?;
        let at = norm::Rotated {
            x: self.address(OP, x)?,
            weight: self.address(OP, &own)?,
            cos: self.address(OP, cos)?,
            sin: self.address(OP, sin)?,
            y: self.address(OP, &y)?,
        };
        let sizes = [x.dim(1) as u32, w as u32];
        if let Some(launch) = norm::rotated(&shape, &at, sizes, layout) {
            self.run(OP, [launch])?;
            return Ok(y);
        }
        drop(y);
        let normed = self.rms_norm(x, weight, eps)?;
        self.rope(&normed, cos, sin, layout, Direction::Forward)
    }

    fn attention(&self, args: AttentionArgs<'_>) -> Result<AttentionOut> {
        const OP: &str = "attention";
        let sizes = check::attention(&args)?;
        let saved = AttentionOut {
            out: self.output(args.q.shape(), args.q.dtype())?,
            lse: self.output([sizes.t, sizes.h], DType::F32)?,
        };
        let Some((plan, table)) = self.attention_plan(OP, &args, sizes)? else {
            self.zero(OP, &saved.out)?;
            return Ok(saved);
        };
        let [q, k, v] = self.attention_operands(OP, &args)?;
        let inputs = attention::Inputs {
            q: self.address(OP, &q)?,
            k: self.address(OP, &k)?,
            v: self.address(OP, &v)?,
            table: self.address(OP, &table)?,
        };
        let outputs = attention::Outputs {
            out: self.address(OP, &saved.out)?,
            lse: self.address(OP, &saved.lse)?,
        };
        self.run(OP, plan.forward(inputs, outputs))?;
        Ok(saved)
    }

    fn attention_backward(
        &self,
        args: AttentionArgs<'_>,
        saved: &AttentionOut,
        dout: &Tensor,
    ) -> Result<AttentionGrads> {
        const OP: &str = "attention_backward";
        let sizes = check::attention_backward(&args, &saved.out, &saved.lse, dout)?;
        let grads = AttentionGrads {
            dq: self.output(args.q.shape(), args.q.dtype())?,
            dk: self.output(args.k.shape(), args.k.dtype())?,
            dv: self.output(args.v.shape(), args.v.dtype())?,
        };
        let Some((plan, table)) = self.attention_plan(OP, &args, sizes)? else {
            for x in [&grads.dq, &grads.dk, &grads.dv] {
                self.zero(OP, x)?;
            }
            return Ok(grads);
        };
        let [q, k, v] = self.attention_operands(OP, &args)?;
        let out = self.operand(OP, &saved.out, saved.out.dtype())?;
        let lse = self.operand(OP, &saved.lse, DType::F32)?;
        let dout = self.operand(OP, dout, dout.dtype())?;
        let workspace = self.scratch(plan.workspace_bytes())?;
        let inputs = attention::Inputs {
            q: self.address(OP, &q)?,
            k: self.address(OP, &k)?,
            v: self.address(OP, &v)?,
            table: self.address(OP, &table)?,
        };
        let outputs = attention::Outputs {
            out: self.address(OP, &out)?,
            lse: self.address(OP, &lse)?,
        };
        let gradients = attention::Gradients {
            dout: self.address(OP, &dout)?,
            dq: self.address(OP, &grads.dq)?,
            dk: self.address(OP, &grads.dk)?,
            dv: self.address(OP, &grads.dv)?,
            workspace: self.address(OP, &workspace)?,
        };
        self.run(OP, plan.backward(inputs, outputs, gradients))?;
        Ok(grads)
    }

    fn gather_rows(&self, table: &Tensor, index: &Tensor) -> Result<Tensor> {
        self.gather_rows_op(table, index, check::gather_rows(table, index)?)
    }

    fn scatter_add_rows(
        &self,
        x: &Tensor,
        index: &Tensor,
        rows: usize,
        out: DType,
    ) -> Result<Tensor> {
        self.scatter_add_rows_op(x, index, check::scatter_add_rows(x, index, rows, out)?, out)
    }

    fn transpose_each(&self, x: &Tensor) -> Result<Tensor> {
        self.transpose_each_op(x, check::transpose_each(x)?)
    }

    fn replace_rows(&self, base: &Tensor, index: &Tensor, rows: Option<&Tensor>) -> Result<Tensor> {
        check::replace_rows(base, index, rows)?;
        self.replace_rows_op(base, index, rows)
    }

    fn write_rows(&self, base: Tensor, index: &Tensor, rows: &Tensor) -> Result<Tensor> {
        check::replace_rows(&base, index, Some(rows))?;
        self.write_rows_op(base, index, rows)
    }

    fn linear_cross_entropy(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
    ) -> Result<Tensor> {
        let sizes = check::loss(hidden, weight, labels)?;
        let grads = self.loss_op([hidden, weight, labels], sizes, None)?;
        Ok(grads.losses)
    }

    fn linear_cross_entropy_backward(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        factor: f32,
        need: LossNeeds,
    ) -> Result<LossGrads> {
        let sizes = check::loss(hidden, weight, labels)?;
        self.loss_op([hidden, weight, labels], sizes, Some((factor, need)))
    }
}
