//! Model states in a device's own memory: what outlives a pass there, and is changed in place.
//!
//! Weights, sums of gradients and an optimizer's states may rest on a device that the host cannot address. The engine
//! fills and reads them through [`ResidentAccess`], and what happens at every step happens there: gradients are added
//! to their sums, their squares are summed, and the update runs, each with the bits of the host's code.

use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::error::{KernelError, shape_error};
use crate::pool::Tag;
use crate::{DType, Tensor};
use bytemuck::{Pod, Zeroable};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Elements that rest on a device. Tensors of a part of them share their memory: work that is queued on one sees every
/// change that was queued before it. Nothing is changed while one is held.
#[derive(Debug)]
pub struct Resident {
    all: Tensor,
    /// A moment behind the last change, where one was taken.
    settled: Option<Arc<dyn Any + Send + Sync>>,
    /// A moment behind the last use, while they are lent.
    lent: Option<Arc<dyn Any + Send + Sync>>,
}

impl Resident {
    /// All of a tensor's memory, which nobody else has.
    #[cfg(feature = "cuda")]
    pub(crate) const fn new(all: Tensor) -> Self {
        Self {
            all,
            settled: None,
            lent: None,
        }
    }

    /// A moment behind the last change, where [`ResidentAccess::settle`] took one.
    #[cfg(feature = "cuda")]
    pub(crate) const fn settled(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        self.settled.as_ref()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn settle(&mut self, behind: &Arc<dyn Any + Send + Sync>) {
        // An earlier one is as right, and waits for less.
        self.settled.get_or_insert_with(|| behind.clone());
    }

    /// A moment behind the last use, where they were lent.
    #[cfg(feature = "cuda")]
    pub(crate) const fn lent(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        self.lent.as_ref()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn lend(&mut self, behind: &Arc<dyn Any + Send + Sync>) {
        (self.settled, self.lent) = (None, Some(behind.clone()));
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn give_back(&mut self, behind: &Arc<dyn Any + Send + Sync>) {
        (self.settled, self.lent) = (Some(behind.clone()), None);
    }

    /// The elements are about to be changed by the device.
    #[cfg(feature = "cuda")]
    pub(crate) fn changes(&mut self, op: &'static str) -> Result<()> {
        if self.is_shared() || self.lent.is_some() {
            let cause = match self.lent {
                Some(_) => "the states are lent".into(),
                None => "a tensor of the states is still held".into(),
            };
            return Err(KernelError::Device { op, cause });
        }
        self.settled = None;
        Ok(())
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.all.dtype()
    }

    /// Number of elements.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.all.elems()
    }

    /// Bytes of the elements.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.all.size_bytes()
    }

    /// Whether there are no values: on a device that only counts.
    #[must_use]
    pub fn is_null(&self) -> bool {
        self.all.is_null()
    }

    /// A flat tensor of some elements, in their place.
    ///
    /// # Errors
    /// When they lie outside.
    pub fn part(&self, range: Range<usize>) -> Result<Tensor> {
        self.all.narrow(range.start, range.len())
    }

    /// Whether a tensor of a part is still held.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.all.is_shared()
    }
}

/// Where sums of a window stand in a stream of rounding bits: `optim::accumulate::RoundingPlace` for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Key of the stream.
    pub key: [u32; 2],
    /// Number of the addition: no two additions to one element share it.
    pub time: u64,
    /// Global, unpadded logical index of the first element.
    pub first_element: u64,
}

/// The constants of one step and parameter group, in device memory, so that a captured launch can be replayed with
/// others. `optim::AdamW::scalars` makes them with the code of the CPU's update.
///
/// The factor on every gradient is `grad_scale * clip.factor` (one f32 product): with a `grad_scale` of 1 it is the
/// factor that the norm kernel wrote, without a clip block it is `grad_scale`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
pub struct Scalars {
    /// Factor on every gradient, beside the clip block's.
    pub grad_scale: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// Added to the root of the second moment: `eps * sqrt(1 - beta2^step)`.
    pub eps: f32,
    /// `lr * sqrt(1 - beta2^step) / (1 - beta1^step)`.
    pub step_size: f32,
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// Key of the rounding stream.
    pub key: [u32; 2],
    /// Number of the update, counted from 1, low word first.
    pub step: [u32; 2],
}

/// How weights and moments are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Form {
    /// `f32` weights and moments.
    F32,
    /// `f32` master weights and moments; the `bf16` copy is written.
    MasterBf16,
    /// `f32` master weights and moments; the `f16` copy is written.
    MasterF16,
    /// `bf16` weights with stochastic rounding, `f32` moments.
    Bf16,
    /// `bf16` weights and moments with stochastic rounding.
    PureBf16,
}

impl Form {
    /// Every form, by the number of its define.
    pub const ALL: [Self; 5] = [
        Self::F32,
        Self::MasterBf16,
        Self::MasterF16,
        Self::Bf16,
        Self::PureBf16,
    ];

    /// Dtype of the weights that are updated.
    #[must_use]
    pub const fn weight(self) -> DType {
        match self {
            Self::F32 | Self::MasterBf16 | Self::MasterF16 => DType::F32,
            Self::Bf16 | Self::PureBf16 => DType::BF16,
        }
    }

    /// Dtype of the copy beside master weights.
    #[must_use]
    pub const fn copy(self) -> Option<DType> {
        match self {
            Self::MasterBf16 => Some(DType::BF16),
            Self::MasterF16 => Some(DType::F16),
            _ => None,
        }
    }

    /// Dtype of the moments.
    #[must_use]
    pub const fn moment(self) -> DType {
        match self {
            Self::PureBf16 => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Bytes read and written per element, the gradient included.
    #[must_use]
    pub fn bytes(self, grad: DType) -> usize {
        let written = self.copy().map_or(0, DType::size_bytes);
        grad.size_bytes()
            + 2 * self.weight().size_bytes()
            + 4 * self.moment().size_bytes()
            + written
    }
}

/// Elements of a [`Resident`] from `start` on, to be changed; how many, the other operands say.
#[derive(Debug)]
pub struct Part<'a> {
    /// The elements.
    pub of: &'a mut Resident,
    /// The first one.
    pub start: usize,
}

impl Part<'_> {
    /// `elems` elements as a tensor.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensor(&self, elems: usize) -> Result<Tensor> {
        self.of.part(self.start..self.start + elems)
    }
}

/// One `AdamW` update of a window. The gradient says how many elements it has.
#[derive(Debug)]
pub struct AdamWArgs<'a> {
    /// How weights and moments are stored.
    pub form: Form,
    /// The unscaled gradient, flat, in any float dtype.
    pub grad: &'a Tensor,
    /// Weights or master weights.
    pub weight: Part<'a>,
    /// The 16-bit copy beside master weights, written.
    pub copy: Option<Part<'a>>,
    /// First moment.
    pub exp_avg: Part<'a>,
    /// Second moment.
    pub exp_avg_sq: Part<'a>,
    /// [`Scalars`] in the device's memory, as [`ResidentAccess::write`] put them there, and which of them.
    pub scalars: (&'a Resident, usize),
    /// Global index of the window's first element: its position in the rounding stream.
    pub first_element: u64,
}

/// A device that keeps model states in its own memory. Calls queue and return, but for those that read.
pub trait ResidentAccess: Send + Sync + std::fmt::Debug {
    /// Elements that are zero.
    ///
    /// # Errors
    /// When the pool is full or the device fails.
    fn zeros(&self, elems: usize, dtype: DType, tag: Tag) -> Result<Resident>;

    /// Copies bytes from the byte `at` on to the host, behind everything queued so far, or where they are settled behind
    /// their last change.
    ///
    /// # Errors
    /// When they lie outside or the device fails.
    fn read(&self, from: &Resident, at: usize, out: &mut [u8]) -> Result<()>;

    /// Copies host bytes to the byte `at` on, behind everything queued so far.
    ///
    /// # Errors
    /// When they lie outside, a tensor of them is held, or the device fails.
    fn write(&self, to: &mut Resident, at: usize, bytes: &[u8]) -> Result<()>;

    /// Makes elements zero.
    ///
    /// # Errors
    /// As for [`ResidentAccess::write`].
    fn clear(&self, of: &mut Resident, range: Range<usize>) -> Result<()>;

    /// Adds f32 `values` to sums, which are f32, or bf16 and rounded stochastically at `place`; sums that are `fresh` are
    /// taken as zero.
    ///
    /// # Errors
    /// When dtypes or sizes do not fit, a tensor of the sums is held, or the device fails.
    fn add(&self, sums: Part<'_>, values: &Tensor, place: Option<Place>, fresh: bool)
    -> Result<()>;

    /// Takes a moment behind the last change of each: reads wait for that, and no longer for what is queued behind it.
    ///
    /// # Errors
    /// When the device fails.
    fn settle(&self, states: &mut [&mut Resident]) -> Result<()>;

    /// Lends states to whoever has them from here on, which may be another thread: until they are given back, reads and
    /// writes wait for what is queued now and for nothing behind it, and nothing queued waits for them. What was written
    /// meanwhile may be read when they are back.
    ///
    /// # Errors
    /// When a tensor of them is held, or the device fails.
    fn lend(&self, states: &mut [&mut Resident]) -> Result<()>;

    /// Ends that: what is queued from here on sees what was written, and later reads wait for it and no longer.
    ///
    /// # Errors
    /// When the device fails.
    fn give_back(&self, states: &mut [&mut Resident]) -> Result<()>;

    /// The sum of squares of each tensor, with the bits of `optim::clip::SquareSum`; waits for the device. One that only
    /// counts says zero.
    ///
    /// # Errors
    /// When the pool is full or the device fails.
    fn square_sums(&self, of: &[Tensor]) -> Result<Vec<f64>>;

    /// One update, with the bits of `optim::AdamW`.
    ///
    /// # Errors
    /// When dtypes or sizes do not fit, a tensor of what changes is held, or the device fails.
    fn adamw(&self, args: AdamWArgs<'_>) -> Result<()>;
}

/// Says which operand does not fit.
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
