//! Model states in a device's own memory, which outlive a pass and are changed in place.
//!
//! Weights, gradient sums and optimizer states may be resident on a device whose memory the host cannot address. The
//! engine fills and reads them through [`ResidentAccess`]. The work of every step happens on the device: gradients
//! are added to their sums, their squares are summed, and the optimizer update runs. Each gives the same bits as the
//! host's code.

use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::error::{KernelError, shape_error};
use crate::pool::Tag;
use crate::{DType, Tensor};
use bytemuck::{Pod, Zeroable};
#[cfg(feature = "cuda")]
use std::any::Any;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Flat array in a device's memory that is changed in place: one model state (weights, gradient sums or
/// optimizer moments), e.g. of this rank's shard of a layer. Tensors of its parts share its memory; work
/// queued on such a tensor sees every change that was queued before. A state cannot be changed while a tensor
/// of it exists.
#[derive(Debug)]
pub struct Resident {
    all: Tensor,
    /// Event recorded after the last change, if any. Reads wait for it only.
    #[cfg(feature = "cuda")]
    written: Option<Arc<dyn Any + Send + Sync>>,
    /// Event recorded after the last use, while the state is borrowed.
    #[cfg(feature = "cuda")]
    borrowed: Option<Arc<dyn Any + Send + Sync>>,
}

impl Resident {
    /// Wraps a tensor that owns all of its memory alone.
    #[cfg(feature = "cuda")]
    pub(crate) const fn new(all: Tensor) -> Self {
        Self {
            all,
            written: None,
            borrowed: None,
        }
    }

    /// Event recorded after the last change by [`ResidentAccess::record_write`], if any.
    #[cfg(feature = "cuda")]
    pub(crate) const fn written(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        self.written.as_ref()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn record_write(&mut self, behind: &Arc<dyn Any + Send + Sync>) {
        // An earlier event is equally correct and waits for less work.
        self.written.get_or_insert_with(|| behind.clone());
    }

    /// Event recorded after the last use, while the state is borrowed.
    #[cfg(feature = "cuda")]
    pub(crate) const fn borrowed(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        self.borrowed.as_ref()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn lend(&mut self, behind: &Arc<dyn Any + Send + Sync>) {
        (self.written, self.borrowed) = (None, Some(behind.clone()));
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn give_back(&mut self, behind: &Arc<dyn Any + Send + Sync>) {
        (self.written, self.borrowed) = (Some(behind.clone()), None);
    }

    /// Prepares for a change by the device: checks that the state is neither borrowed nor shared, and drops its
    /// event.
    #[cfg(feature = "cuda")]
    pub(crate) fn changes(&mut self, op: &'static str) -> Result<()> {
        if self.is_shared() || self.borrowed.is_some() {
            let cause = match self.borrowed {
                Some(_) => "another thread has borrowed the states".into(),
                None => "a tensor of the states is still held".into(),
            };
            return Err(KernelError::Device { op, cause });
        }
        self.written = None;
        Ok(())
    }

    /// Element type of the state.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.all.dtype()
    }

    /// Number of elements of the state.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.all.elems()
    }

    /// Size of the state in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.all.size_bytes()
    }

    /// Whether the state has no values, as on the meta device.
    #[must_use]
    pub fn is_meta(&self) -> bool {
        self.all.is_meta()
    }

    /// Flat tensor of the elements `range` of the state. It shares the state's memory.
    ///
    /// # Errors
    /// When the range is out of bounds.
    pub fn part(&self, range: Range<usize>) -> Result<Tensor> {
        self.all.narrow(range.start, range.len())
    }

    /// Whether a tensor that [`Resident::part`] returned still exists. The state cannot be changed until it
    /// is dropped.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.all.is_shared()
    }
}

/// Position of one addition to bf16 gradient sums in the random stream of its stochastic rounding. It is
/// `optim::accumulate::RoundingPosition` in the form that a device's kernels read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoundingCounter {
    /// Key of the random stream that rounds the sums.
    pub key: [u32; 2],
    /// Number of the addition, e.g. that of the micro-batch. It selects the random numbers, so no two
    /// additions to one element may have the same number.
    pub time: u64,
    /// Global index of the first element that is added to: its offset in the concatenation of all parameters
    /// without padding.
    pub first_element: u64,
}

/// Constants of the `AdamW` update of one parameter group in one optimizer step. They are stored in device
/// memory, so a captured CUDA graph can run again with other values. `optim::AdamW::scalars` computes them
/// with the code of the CPU's update.
///
/// The factor on every gradient is `grad_scale * clip.factor` (one f32 product). Without a clip block it is
/// `grad_scale`. With a `grad_scale` of 1 it is the factor that the norm kernel wrote.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
pub struct Scalars {
    /// Factor on every gradient before the update. It is multiplied by the clip factor, if there is one.
    pub grad_scale: f32,
    /// Weight of the old value in Adam's first moment, `beta1`. Updates of 8-bit moments use it, and compute `1 - beta1`
    /// and `1 - beta2` from both betas in f32.
    pub beta1: f32,
    /// Weight of the new gradient in Adam's first moment, `1 - beta1`.
    pub one_minus_beta1: f32,
    /// Weight of the old value in Adam's second moment, `beta2`.
    pub beta2: f32,
    /// Weight of the new squared gradient in Adam's second moment, `1 - beta2`.
    pub one_minus_beta2: f32,
    /// Term added to the square root of Adam's second moment: `eps * sqrt(1 - beta2^step)`.
    pub eps: f32,
    /// Learning rate with both bias corrections: `lr * sqrt(1 - beta2^step) / (1 - beta1^step)`.
    pub step_size: f32,
    /// Factor on the weights for decoupled weight decay, `1 - lr * weight_decay`.
    pub decay: f32,
    /// Key of the random stream from which the update's stochastic rounding takes its bits.
    pub key: [u32; 2],
    /// Number of the optimizer step in the run, counted from 1, as a 64-bit integer: low word, then high
    /// word.
    pub step: [u32; 2],
}

/// Dtypes in which an `AdamW` update stores weights and moments, and whether there are master weights.
///
/// Moments of 8 bits are codes of [`dynamic_map`](crate::dynamic_map), with one `f32` absmax for every
/// [`BLOCK_ELEMS`](Self::BLOCK_ELEMS) elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Form {
    /// `f32` weights and moments.
    F32,
    /// `f32` master weights and moments, and a `bf16` copy that is only written.
    MasterBf16,
    /// `f32` master weights and moments, and an `f16` copy that is only written.
    MasterF16,
    /// `bf16` weights with stochastic rounding, `f32` moments.
    Bf16,
    /// `bf16` weights and moments with stochastic rounding.
    PureBf16,
    /// [`F32`](Self::F32) weights, moments of 8 bits.
    F32Blocks,
    /// [`MasterBf16`](Self::MasterBf16) weights, moments of 8 bits.
    MasterBf16Blocks,
    /// [`MasterF16`](Self::MasterF16) weights, moments of 8 bits.
    MasterF16Blocks,
    /// [`Bf16`](Self::Bf16) weights, moments of 8 bits.
    Bf16Blocks,
}

impl Form {
    /// Every combination of dtypes that the `AdamW` update supports. The index of a form is the number that
    /// stands for it in the CUDA source.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::MasterBf16,
        Self::MasterF16,
        Self::Bf16,
        Self::PureBf16,
        Self::F32Blocks,
        Self::MasterBf16Blocks,
        Self::MasterF16Blocks,
        Self::Bf16Blocks,
    ];
    /// Elements that share an absmax of 8-bit moments.
    pub const BLOCK_ELEMS: usize = 256;

    /// The form with the same weights whose moments have one number per element.
    #[must_use]
    pub const fn elementwise(self) -> Self {
        match self {
            Self::F32Blocks => Self::F32,
            Self::MasterBf16Blocks => Self::MasterBf16,
            Self::MasterF16Blocks => Self::MasterF16,
            Self::Bf16Blocks => Self::Bf16,
            other => other,
        }
    }

    /// Dtype of the weights that the update changes.
    #[must_use]
    pub const fn weight(self) -> DType {
        match self.elementwise() {
            Self::Bf16 | Self::PureBf16 => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Dtype of the 16-bit copy of the master weights. `None` for a form without such a copy.
    #[must_use]
    pub const fn copy(self) -> Option<DType> {
        match self.elementwise() {
            Self::MasterBf16 => Some(DType::BF16),
            Self::MasterF16 => Some(DType::F16),
            _ => None,
        }
    }

    /// Dtype of Adam's first and second moments: `U8` for codes of 8 bits.
    #[must_use]
    pub const fn moment_dtype(self) -> DType {
        match self {
            Self::F32 | Self::MasterBf16 | Self::MasterF16 | Self::Bf16 => DType::F32,
            Self::PureBf16 => DType::BF16,
            Self::F32Blocks | Self::MasterBf16Blocks | Self::MasterF16Blocks | Self::Bf16Blocks => {
                DType::U8
            }
        }
    }

    /// Memory traffic of the update in bytes per element: all reads and writes, including the gradient, whose
    /// dtype is `grad`. The absmax of 8-bit moments do not count.
    #[must_use]
    pub fn bytes(self, grad: DType) -> usize {
        let written = self.copy().map_or(0, DType::size_bytes);
        grad.size_bytes()
            + 2 * self.weight().size_bytes()
            + 4 * self.moment_dtype().size_bytes()
            + written
    }
}

/// Consecutive elements of a [`Resident`] that an operation changes. They begin at `start`, and there are as
/// many as in the operation's tensor operand (gradient or values).
#[derive(Debug)]
pub struct Part<'a> {
    /// State whose elements are changed.
    pub of: &'a mut Resident,
    /// Index of the first element to change, counted from the start of the state.
    pub start: usize,
}

impl Part<'_> {
    /// Flat tensor of `elems` elements from `start` on, which shares the state's memory. Fails out of bounds.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensor(&self, elems: usize) -> Result<Tensor> {
        self.of.part(self.start..self.start + elems)
    }
}

/// Operands of one `AdamW` update of a chunk of a model's weights. The chunk has as many elements as the gradient.
#[derive(Debug)]
pub struct AdamWArgs<'a> {
    /// Dtypes of weights and moments, and whether `weight` is a master weight.
    pub form: Form,
    /// Gradient of the chunk before scaling and clipping: a flat tensor in any float dtype.
    pub grad: &'a Tensor,
    /// Weights to update, or master weights if the form has them.
    pub weight: Part<'a>,
    /// 16-bit copy of the master weights, which the update writes. `None` if the form has none.
    pub copy: Option<Part<'a>>,
    /// First moment of each element (running mean of gradients), updated.
    pub exp_avg: Part<'a>,
    /// Second moment of each element (running mean of squared gradients), updated.
    pub exp_avg_sq: Part<'a>,
    /// Absmax of both moments, one for each block of the chunk's elements, if the form has moments of 8 bits. The chunk
    /// begins at a block border of its tensor.
    pub absmax: Option<[Part<'a>; 2]>,
    /// Constants of the optimizer step: a state with an array of [`Scalars`], filled with
    /// [`ResidentAccess::write`], and the index of the entry to use.
    pub scalars: (&'a Resident, usize),
    /// Global index of the chunk's first element in the model. It selects the random numbers of stochastic
    /// rounding.
    pub first_element: u64,
}

/// Operations on model states that a device stores in its own memory. Calls queue work and return, except
/// [`ResidentAccess::read`] and [`ResidentAccess::square_sums`], which wait for their results.
pub trait ResidentAccess: Send + Sync + std::fmt::Debug {
    /// Allocates a state of `elems` elements, filled with zeros, on the device.
    ///
    /// # Errors
    /// When the pool is full or the device fails.
    fn zeros(&self, elems: usize, dtype: DType, tag: Tag) -> Result<Resident>;

    /// Copies bytes from byte `at` on to the host. Waits for the state's last change if
    /// [`ResidentAccess::record_write`] recorded an event, else for everything queued so far.
    ///
    /// # Errors
    /// When the range is out of bounds or the device fails.
    fn read(&self, from: &Resident, at: usize, out: &mut [u8]) -> Result<()>;

    /// Copies host bytes to byte `at` on, after everything queued so far. For a borrowed state see
    /// [`ResidentAccess::lend`].
    ///
    /// # Errors
    /// When the range is out of bounds, a tensor of the state exists, or the device fails.
    fn write(&self, to: &mut Resident, at: usize, bytes: &[u8]) -> Result<()>;

    /// Sets the elements `range` of a state to zero.
    ///
    /// # Errors
    /// As for [`ResidentAccess::write`].
    fn clear(&self, of: &mut Resident, range: Range<usize>) -> Result<()>;

    /// Adds f32 `values` to gradient sums. Sums are f32, or bf16 with stochastic rounding at `place`. With `fresh`
    /// the old sums count as zero.
    ///
    /// # Errors
    /// When dtypes or sizes do not match, a tensor of the sums exists, or the device fails.
    fn add(
        &self,
        sums: Part<'_>,
        values: &Tensor,
        place: Option<RoundingCounter>,
        fresh: bool,
    ) -> Result<()>;

    /// Records an event after the last change of each state. Later reads wait for this event only, not for work
    /// queued after it.
    ///
    /// # Errors
    /// When the device fails.
    fn record_write(&self, states: &mut [&mut Resident]) -> Result<()>;

    /// Lets another user borrow states, possibly on another thread, until [`ResidentAccess::give_back`]. Meanwhile
    /// reads and writes wait for the work queued before this call only, and queued work does not wait for them. Bytes
    /// written in between can be read after the return.
    ///
    /// # Errors
    /// When a tensor of the states exists, or the device fails.
    fn lend(&self, states: &mut [&mut Resident]) -> Result<()>;

    /// Returns borrowed states. Work queued from here on sees what was written, and later reads wait for those writes
    /// only.
    ///
    /// # Errors
    /// When the device fails.
    fn give_back(&self, states: &mut [&mut Resident]) -> Result<()>;

    /// Sum of squares of each tensor, with the bits of `optim::clip::SquareSum`. Waits for the device. The meta
    /// device returns zeros.
    ///
    /// # Errors
    /// When the pool is full or the device fails.
    fn square_sums(&self, of: &[Tensor]) -> Result<Vec<f64>>;

    /// Performs one `AdamW` update. The result has the bits of `optim::AdamW` on the CPU.
    ///
    /// # Errors
    /// When dtypes or sizes do not match, a tensor of a changed state exists, or the device fails.
    fn adamw(&self, args: AdamWArgs<'_>) -> Result<()>;
}

/// Checks dtype and number of elements of an operand.
#[cfg(feature = "cuda")]
pub(crate) fn fits(op: &'static str, x: &Tensor, dtype: DType, elems: usize) -> Result<()> {
    if x.dtype() == dtype && x.elems() == elems {
        return Ok(());
    }
    shape_error(
        op,
        format!("{x:?} where {elems} elements of {dtype} belong"),
    )
}
