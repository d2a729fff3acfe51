//! A GPU as a [`Backend`]: every operation as launches on one queue, tensors in one arena.
//!
//! The arena is taken from the device once; after that nothing is allocated there. A tensor that is dropped gives its
//! place back at once: launches run in their order, so who gets the place next writes it after all earlier readers.
//! Weights come in beside that queue, behind the last use of the place they get, and gradients go out beside it, behind
//! the launches that made them.
//! What executes the launches is an [`Executor`]: a [`Gpu`](super::gpu::Gpu), or the emulator of the tests. Products
//! of one sum go through the executor's library, where it has one; the others, and all elsewhere, are our own.
//!
//! Differences from the CPU: products of 16-bit tensors sum on tensor cores in another order; LoRA's inner activation
//! is rounded once to 16 bits; the gradient of the logits is rounded to the dtype of the hidden states before its
//! products. Elements, rows and losses have the bits of the CPU.
#![expect(
    unsafe_code,
    reason = "launches read and write memory by address; tensors vouch for it"
)]

mod adapted;
mod arrivals;
mod counting;
pub(super) mod gpu;
pub mod graphs;
mod grouped;
mod loss;
mod peers;
mod products;
mod residents;
mod rows;
mod uses;

pub use loss::LossCuts;
pub use peers::{GroupExecutor, PeerExecutor};

use super::copies::copy_bytes;
use super::launch::{Address, Launch};
use super::matmul::Multiply;
use super::ops::norm::{self, Kind};
use super::ops::pointwise::{self, RopeShape};
use super::ops::{attention, cast, workspace::Workspace};
use crate::adapted::{AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs, AdaptedLinearGrads};
use crate::arrival::Arrival;
use crate::backend::{
    AttentionArgs, AttentionGrads, AttentionOut, Backend, Device, Direction, DropoutArgs, Gelu,
    LossGrads, LossNeeds, MatmulArgs, NormGrads, RopeLayout,
};
use crate::check;
use crate::error::{KernelError, Result};
use crate::grouped::GroupedMatmulArgs;
use crate::peers::{GroupAccess, PeerAccess};
use crate::pool::{Pool, Tag};
use crate::resident::ResidentAccess;
use crate::tensor::{DeviceMemory, OnDevice};
use crate::timeline::DeviceSpan;
use crate::{DType, Shape, Tensor};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use uses::Uses;

/// What a device's own calls fail with.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A point in the queue of an [`Executor`], which alone knows what it is.
pub type Moment = Arc<dyn Any + Send + Sync>;

/// What takes bytes as they come to the host.
pub type Take<'a> = dyn FnMut(&[u8]) + 'a;

/// Puts pieces behind one another; those together must have the length of `out`.
pub fn filling(out: &mut [u8]) -> impl FnMut(&[u8]) {
    let mut rest = out;
    move |piece| {
        let (here, behind) = std::mem::take(&mut rest).split_at_mut(piece.len());
        copy_bytes(piece, here);
        rest = behind;
    }
}

/// Uploads of so many bytes go beside the work, whatever they are: pictures of a batch, through the small chunks that the
/// work itself carries, would make the host wait for it.
const LARGE_UPLOAD_BYTES: usize = 1 << 20;

/// Memory of a device, one queue of work on it, and copies beside that queue.
///
/// # Safety
/// An implementor keeps the memory of [`Executor::allocate`] until [`Executor::free`], and executes launches, copies,
/// fills, reads and writes in the order of their calls; uploads in the order of theirs, each before everything that is
/// queued behind it.
pub unsafe trait Executor: Send + Sync + std::fmt::Debug {
    /// Multiprocessors of the device: a hint for the cut of work, never for its results.
    fn multiprocessors(&self) -> u32;

    /// Whether there is memory behind the addresses.
    fn has_values(&self) -> bool {
        true
    }

    /// Memory with unspecified contents, aligned to 256 bytes.
    ///
    /// # Errors
    /// When the device has no room.
    fn allocate(&self, bytes: u64) -> Result<Address, Cause>;

    /// Gives memory back that [`Executor::allocate`] returned, after the work on it.
    fn free(&self, memory: Address);

    /// Copies host bytes to the device.
    ///
    /// # Safety
    /// The range lies in allocated memory.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause>;

    /// Waits for the device and copies bytes to the host.
    ///
    /// # Safety
    /// The range lies in allocated memory.
    ///
    /// # Errors
    /// When the device fails, or work queued before did.
    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause>;

    /// Fills a range with zeros.
    ///
    /// # Safety
    /// The range lies in allocated memory.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause>;

    /// Copies within the device; the ranges do not overlap.
    ///
    /// # Safety
    /// Both ranges lie in allocated memory.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause>;

    /// The moment when everything queued so far is done.
    ///
    /// # Errors
    /// When the device fails.
    fn moment(&self) -> Result<Moment, Cause>;

    /// Copies host bytes to the device beside the queue, not before the moment `behind`.
    ///
    /// # Safety
    /// The range lies in allocated memory, and nothing queued between that moment and this call uses it.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn upload(
        &self,
        to: Address,
        bytes: &[u8],
        behind: Option<&Moment>,
    ) -> Result<(), Cause>;

    /// As [`Executor::upload`], for nothing that is queued: who wants the bytes waits by [`Executor::delivered`]. Any thread
    /// may deliver while others queue.
    ///
    /// # Safety
    /// The range lies in allocated memory, and nothing queued behind that moment and before the next call of
    /// [`Executor::delivered`] uses it.
    ///
    /// # Errors
    /// When the device fails.
    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Moment) -> Result<(), Cause>;

    /// What is queued from here on has everything that was delivered. A moment behind that and behind no work.
    ///
    /// # Errors
    /// When the device fails.
    fn delivered(&self) -> Result<Moment, Cause>;

    /// Waits for the moment `behind`, and no longer, and gives bytes to `take` in pieces, in their order, each aligned to
    /// four bytes. Any thread may fetch while others queue.
    ///
    /// # Safety
    /// The range lies in allocated memory, and nothing queued after that moment writes it.
    ///
    /// # Errors
    /// When the device fails, or work queued before the moment did.
    unsafe fn fetch(
        &self,
        from: Address,
        bytes: u64,
        behind: &Moment,
        take: &mut Take<'_>,
    ) -> Result<(), Cause>;

    /// Starts to measure what happens when, or stops and forgets.
    ///
    /// # Errors
    /// When the device fails.
    fn measure(&self, _on: bool) -> Result<(), Cause> {
        Ok(())
    }

    /// What is queued from here on belongs to `label`; with `None` to nothing.
    ///
    /// # Errors
    /// When the device fails.
    fn label(&self, _label: Option<u32>) -> Result<(), Cause> {
        Ok(())
    }

    /// What was measured since the last call; waits for the device.
    ///
    /// # Errors
    /// When the device fails.
    fn measured(&self) -> Result<Vec<DeviceSpan>, Cause> {
        Ok(Vec::new())
    }

    /// Queues a launch.
    ///
    /// # Safety
    /// Every address in the arguments points to allocated memory that is as large as the kernel's documentation says.
    ///
    /// # Errors
    /// When the module does not compile or the device refuses.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause>;

    /// Whether [`Executor::multiply`] is asked for products: then each has scratch memory for it, used or not, in a plan
    /// as in its run.
    fn multiplies(&self) -> bool {
        false
    }

    /// Queues a product through a library; `false` where that has no way to do it, and nothing was queued: always the
    /// same answer for one shape.
    ///
    /// # Safety
    /// Every address of the product points to allocated memory of the size that it says, and `workspace` to
    /// `workspace_bytes` of it that nothing else uses.
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

    /// How other ranks' devices reach this one's memory, where they can.
    fn peers(&self) -> Option<&dyn PeerExecutor> {
        None
    }

    /// How a library runs collectives between ranks' devices, where one can.
    fn group(&self) -> Option<&dyn GroupExecutor> {
        None
    }
}

/// All memory of a backend.
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
        // SAFETY: tensors ask for bytes of places that the pool gave them inside the arena.
        let read = unsafe { self.executor.read(Address(self.start.0 + offset), out) };
        read.map_err(|cause| KernelError::Device { op: "read", cause })
    }

    fn moment(&self) -> Result<Moment> {
        let moment = self.executor.moment();
        moment.map_err(|cause| KernelError::Device {
            op: "moment",
            cause,
        })
    }

    fn fetch(&self, offset: u64, bytes: u64, behind: &Moment, take: &mut Take<'_>) -> Result<()> {
        let from = Address(self.start.0 + offset);
        // SAFETY: as in `read`; a tensor is written before anybody has it, and states are not changed while one of them is
        // held.
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

/// The tile table of the last attention call: the layers of a model share it. Later ones are written where it lies, as
/// far as they fit. It is all that outlives a pass and is not taken at the start, so it lies at the arena's other end:
/// among the blocks of a pass it would move those of the next.
type LastTable = Mutex<Option<(Vec<i32>, Tensor)>>;

/// Operations on a GPU.
#[derive(Clone, Debug)]
pub struct CudaBackend {
    pool: Pool,
    executor: Arc<dyn Executor>,
    memory: Arc<dyn DeviceMemory>,
    uses: Arc<Uses>,
    table: Arc<LastTable>,
    /// Key and time of the rounding of sums, and where they lie: taken with the first states, so that it leaves no hole.
    rounding: Arc<Mutex<Option<([u32; 4], Tensor)>>>,
    cuts: LossCuts,
}

impl CudaBackend {
    /// A device with `bytes` of memory for everything, taken now.
    ///
    /// # Errors
    /// When the device has no such room.
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

    /// On memory that was taken.
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
        }
    }

    /// The same device with losses cut otherwise.
    #[must_use]
    pub fn with_loss_cuts(mut self, cuts: LossCuts) -> Self {
        self.cuts = cuts;
        self
    }

    /// A tensor with unspecified contents.
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

    /// As [`CudaBackend::uninit`], apart from the blocks of passes: what lasts there would lie in their way.
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

    /// Scratch memory of one operation: given back when dropped, behind the launches that use it.
    fn scratch(&self, bytes: u64) -> Result<Tensor> {
        self.uninit([bytes.div_ceil(4) as usize], DType::F32, Tag::Workspace)
    }

    fn address(&self, op: &'static str, x: &Tensor) -> Result<Address> {
        let shape = x.shape();
        match x.address_in(&self.memory) {
            Some(address) => Ok(Address(address)),
            None if x.is_null() => Err(KernelError::NoValues { op, shape }),
            None => Err(KernelError::Elsewhere { op, shape }),
        }
    }

    fn device_error(op: &'static str) -> impl Fn(Cause) -> KernelError {
        move |cause| KernelError::Device { op, cause }
    }

    fn run(&self, op: &'static str, launches: impl IntoIterator<Item = Launch>) -> Result<()> {
        for launch in launches {
            // SAFETY: operations build launches from addresses of tensors that they hold, whose sizes were checked
            // against those of the call, or of scratch memory of the size that the operation states. A place that is
            // given back meanwhile is written by later launches, or by an upload behind this one.
            let queued = unsafe { self.executor.launch(&launch) };
            self.counted(op, queued)?;
        }
        Ok(())
    }

    /// Counts a use when it was queued and not before: of a moment that another thread takes in between, too few works
    /// may be said to be behind it, never too many.
    fn counted<T>(&self, op: &'static str, queued: Result<T, Cause>) -> Result<T> {
        self.uses.count();
        queued.map_err(Self::device_error(op))
    }

    /// As [`CudaBackend::run`] of what an operation may have no kernel for.
    fn run_some<L: IntoIterator<Item = Launch>>(
        &self,
        op: &'static str,
        launches: Option<L>,
    ) -> Result<()> {
        match launches {
            Some(launches) => self.run(op, launches),
            None => Err(KernelError::Shape {
                op,
                detail: "the extents exceed those of a grid".into(),
            }),
        }
    }

    /// Writes the front of a tensor.
    fn write(&self, op: &'static str, to: &Tensor, bytes: &[u8]) -> Result<()> {
        let at = self.address(op, to)?;
        assert!(bytes.len() <= to.size_bytes(), "bytes outside the tensor");
        // SAFETY: `to` has at least as many bytes.
        let queued = unsafe { self.executor.write(at, bytes) };
        self.counted(op, queued)
    }

    /// Row numbers and the like, which the host keeps too.
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

    /// Writes a tensor at `offset` of the arena beside what is queued, behind the last use of its place.
    fn upload_beside(&self, to: &Tensor, offset: u64, bytes: &[u8]) -> Result<()> {
        const OP: &str = "upload";
        let at = self.address(OP, to)?;
        let behind = self.last_use(OP, offset..offset + bytes.len() as u64)?;
        // SAFETY: `to` has as many bytes, and its place has no use behind that moment.
        let uploaded = unsafe { self.executor.upload(at, bytes, behind.as_ref()) };
        uploaded.map_err(Self::device_error(OP))
    }

    /// A moment behind the last use of a place of the arena.
    fn last_use(&self, op: &'static str, place: Range<u64>) -> Result<Option<Moment>> {
        let now = || self.executor.moment();
        // A later copy into a place that was given back before need not wait for what is queued from here on.
        let marked = self.uses.mark(now);
        marked.map_err(Self::device_error(op))?;
        let behind = self.uses.behind(place, now);
        behind.map_err(Self::device_error(op))
    }

    fn zero(&self, op: &'static str, x: &Tensor) -> Result<()> {
        let at = self.address(op, x)?;
        // SAFETY: the range is the tensor's.
        let queued = unsafe { self.executor.zero(at, x.size_bytes() as u64) };
        self.counted(op, queued)
    }

    /// The same values in memory of their own.
    fn copy_of(&self, op: &'static str, x: &Tensor, tag: Tag) -> Result<Tensor> {
        let out = self.uninit(x.shape(), x.dtype(), tag)?;
        let (from, to) = (self.address(op, x)?, self.address(op, &out)?);
        // SAFETY: both tensors have as many bytes, and they are different ones.
        let queued = unsafe { self.executor.copy(from, to, x.size_bytes() as u64) };
        self.counted(op, queued)?;
        Ok(out)
    }

    /// `x` in `dtype` at an address of 16-byte words: itself, where it is that already.
    fn operand(&self, op: &'static str, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let aligned = if self.address(op, x)?.0.is_multiple_of(16) {
            x.clone()
        } else {
            self.copy_of(op, x, Tag::Workspace)?
        };
        self.cast(&aligned, dtype)
    }

    /// The launches of `build`, which is called twice: to count scratch memory, and with it.
    fn run_in_workspace(
        &self,
        op: &'static str,
        build: impl Fn(&mut Workspace) -> Option<Vec<Launch>>,
    ) -> Result<()> {
        let mut counted = Workspace::new(Address::NULL);
        if build(&mut counted).is_none() {
            return self.run_some(op, None::<Vec<Launch>>);
        }
        let scratch = self.scratch(counted.bytes() + 256)?;
        let start = self.address(op, &scratch)?.0.next_multiple_of(256);
        self.run_some(op, build(&mut Workspace::new(Address(start))))
    }

    /// Runs a launch over elements of `x` that writes one tensor like it.
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

    /// How an attention call is cut, and its table on the device. `None` for a call without queries or keys.
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
            // Another thread may hold it for launches that it has not queued.
            Some((_, table)) if table.is_sole() && table.elems() >= plan.table().len() => {
                // Behind the launches that read the old one, as all works are.
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

    /// Queries, keys and values at addresses of 16-byte words.
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

    fn pool(&self) -> &Pool {
        &self.pool
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

    fn reserve_upload(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Arrival> {
        self.reserve_upload_op(shape, dtype, tag)
    }

    fn upload_into(&self, place: Arrival, bytes: &[u8]) -> Result<Tensor> {
        match place.tensor {
            Some(tensor) => self.upload_into_op(tensor, place.behind.as_ref(), bytes),
            None => self.upload(bytes, place.shape, place.dtype, place.tag),
        }
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

    fn matmul(&self, args: MatmulArgs<'_>) -> Result<Tensor> {
        self.matmul_op(&args, check::matmul(&args)?)
    }

    fn column_sum(&self, x: &Tensor) -> Result<Tensor> {
        self.column_sum_op(x, None)
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
        self.adapted_backward_op(&args)
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
