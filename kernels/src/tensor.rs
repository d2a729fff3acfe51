//! Immutable contiguous tensors.

#[cfg(feature = "cuda")]
use crate::cuda::backend::{Event, Take, filling};
use crate::error::{KernelError, Result, shape_error};
use crate::pool::{Allocated, Block, Pool, Reservation, Tag};
use crate::{DType, Element, Shape};
use std::borrow::Cow;
use std::sync::Arc;

/// Read-only host memory that does not come from a [`Pool`] but backs a tensor, such as a communicator's
/// buffer or a memory map. It must be aligned to the element type.
pub type ForeignBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Memory of a discrete device in which tensors are located.
#[cfg(feature = "cuda")]
pub(crate) trait DeviceMemory: Send + Sync + std::fmt::Debug {
    /// Device address of the first byte of the memory.
    fn address(&self) -> u64;

    /// Whether the memory exists; false on the meta device.
    fn has_values(&self) -> bool;

    /// Waits for the device and copies bytes from `offset` on.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Records an event after everything queued so far.
    fn record_event(&self) -> Result<Event>;

    /// Waits for the event `behind` only. Passes `bytes` bytes from `offset` on to `take`, in pieces and in order.
    fn fetch(&self, offset: u64, bytes: u64, behind: &Event, take: &mut Take<'_>) -> Result<()>;

    /// Frees a range whose uses are all queued.
    fn release(&self, offset: u64, bytes: u64);
}

#[cfg(feature = "cuda")]
impl Drop for OnDevice {
    fn drop(&mut self) {
        self.memory
            .release(self.placed.offset(), self.placed.bytes());
    }
}

/// Device-to-host copy of a tensor, to be made later. It waits only for work that was queued before
/// [`Tensor::fetch`]. It keeps the tensor alive.
#[derive(Debug)]
pub struct Fetch {
    tensor: Tensor,
    #[cfg(feature = "cuda")]
    behind: Option<Event>,
}

impl Fetch {
    /// Number of elements to be copied.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.tensor.elems()
    }

    /// Tensor that is to be copied to the host.
    #[must_use]
    pub const fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Copies all bytes of the tensor into the host buffer `out`. Waits until the device has computed the
    /// values.
    ///
    /// # Errors
    /// As [`Tensor::to_bytes`].
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn bytes_into(&self, out: &mut [u8]) -> Result<()> {
        let tensor = &self.tensor;
        assert_eq!(tensor.size_bytes(), out.len(), "as many bytes as places");
        #[cfg(feature = "cuda")]
        if self.behind.is_some() {
            return self.give_pieces(&mut filling(out));
        }
        out.copy_from_slice(&tensor.host_bytes()?);
        Ok(())
    }

    /// Passes the bytes to `take` in pieces, in order.
    #[cfg(feature = "cuda")]
    fn give_pieces(&self, take: &mut Take<'_>) -> Result<()> {
        let tensor = &self.tensor;
        if let (Storage::Device(place), Some(behind)) = (&*tensor.storage, &self.behind) {
            let start = (tensor.start_elems * tensor.dtype.size_bytes()) as u64;
            let (start, bytes) = (place.placed.offset() + start, tensor.size_bytes() as u64);
            return place.memory.fetch(start, bytes, behind, take);
        }
        Ok(())
    }

    /// Calls `take` with the elements of an f32 tensor on the host, in pieces and in order. Later pieces of a
    /// device tensor are copied while `take` handles earlier ones, and no second host buffer is needed. Stops
    /// at the first error of `take`.
    ///
    /// # Errors
    /// As [`Tensor::to_f32_vec`], and those of `take`.
    ///
    /// # Panics
    /// When the dtype is not f32.
    pub fn for_each_f32<E: From<KernelError>>(
        &self,
        mut take: impl FnMut(&[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let dtype = self.tensor.dtype;
        assert_eq!(dtype, DType::F32, "tensor is {dtype}");
        #[cfg(feature = "cuda")]
        if self.behind.is_some() {
            let mut outcome = Ok(());
            self.give_pieces(&mut |piece| {
                if outcome.is_ok() {
                    outcome = take(bytemuck::cast_slice(piece));
                }
            })?;
            return outcome;
        }
        take(&self.tensor.host_f32()?)
    }

    /// Copies the elements of an f32 tensor into the host buffer `out`. Waits until the device has computed
    /// the values.
    ///
    /// # Errors
    /// As [`Tensor::to_f32_vec`].
    ///
    /// # Panics
    /// When the dtype is not f32, or `out` has another length.
    pub fn f32_into(&self, out: &mut [f32]) -> Result<()> {
        let dtype = self.tensor.dtype;
        assert_eq!(dtype, DType::F32, "tensor is {dtype}");
        self.bytes_into(bytemuck::cast_slice_mut(out))
    }

    /// Elements of an f32 tensor on the host: borrowed if the tensor is in host memory, else copied from the
    /// device.
    ///
    /// # Errors
    /// As [`Tensor::to_f32_vec`].
    ///
    /// # Panics
    /// When the dtype is not f32.
    pub fn f32(&self) -> Result<Cow<'_, [f32]>> {
        let tensor = &self.tensor;
        #[cfg(feature = "cuda")]
        if self.behind.is_some() {
            let mut out = vec![0.0; tensor.elems()];
            self.f32_into(&mut out)?;
            return Ok(Cow::Owned(out));
        }
        tensor.host_f32()
    }
}

/// Range in a device's memory that backs a tensor.
#[cfg(feature = "cuda")]
pub(crate) struct OnDevice {
    pub(crate) memory: Arc<dyn DeviceMemory>,
    pub(crate) placed: Allocated,
    /// Copy of the values on the host, where the host knew them anyway (row numbers and labels).
    pub(crate) known: Option<Box<[u8]>>,
}

enum Storage {
    Block(Block),
    #[cfg(feature = "cuda")]
    Device(OnDevice),
    Foreign {
        bytes: ForeignBytes,
        _counted: Option<Reservation>,
    },
    Meta {
        _placed: Allocated,
    },
}

/// Immutable, reference-counted, contiguous, row-major tensor. The dtype is a run-time value. Cloning, reshaping and
/// taking a range of the outermost axis do not copy.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    start_elems: usize,
    shape: Shape,
    dtype: DType,
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} {})", self.dtype, self.shape)
    }
}

impl Tensor {
    /// Tensor in host memory with a copy of `values`, allocated from `pool`.
    ///
    /// # Errors
    /// When the pool is full or the length does not match the shape.
    pub fn from_slice<T: Element>(
        pool: &Pool,
        tag: Tag,
        shape: impl Into<Shape>,
        values: &[T],
    ) -> Result<Self> {
        let mut out = TensorMut::new(pool, tag, shape, T::DTYPE)?;
        if out.shape().elems() != values.len() {
            return shape_error("from_slice", format!("{} <- {}", out.shape(), values.len()));
        }
        out.as_mut_slice().copy_from_slice(values);
        Ok(out.freeze())
    }

    /// Tensor over host memory outside a pool, starting `start_elems` elements after the start of `bytes`.
    /// `counted` is the reservation by which a pool counts that memory, or `None`. It is dropped with the
    /// last tensor over the memory.
    ///
    /// # Errors
    /// When the bytes are too short or misaligned for the dtype.
    pub fn from_foreign(
        bytes: ForeignBytes,
        counted: Option<Reservation>,
        start_elems: usize,
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<Self> {
        let shape = shape.into();
        let all = (*bytes).as_ref();
        let end = (start_elems + shape.elems()) * dtype.size_bytes();
        if all.len() < end || !(all.as_ptr() as usize).is_multiple_of(dtype.size_bytes()) {
            return shape_error(
                "from_foreign",
                format!(
                    "{shape} of {dtype} at element {start_elems} in {} bytes",
                    all.len()
                ),
            );
        }
        let storage = Arc::new(Storage::Foreign {
            bytes,
            _counted: counted,
        });
        Ok(Self {
            storage,
            start_elems,
            shape,
            dtype,
        })
    }

    /// Tensor of the meta device: it has no values, but `pool` counts its bytes as those of a real tensor.
    ///
    /// # Errors
    /// When the pool is full.
    pub fn null(pool: &Pool, tag: Tag, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into();
        let placed = pool.place(shape.elems() * dtype.size_bytes(), tag)?;
        let storage = Arc::new(Storage::Meta { _placed: placed });
        Ok(Self {
            storage,
            start_elems: 0,
            shape,
            dtype,
        })
    }

    /// Tensor over a range of a device's memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(place: OnDevice, shape: Shape, dtype: DType) -> Self {
        Self {
            storage: Arc::new(Storage::Device(place)),
            start_elems: 0,
            shape,
            dtype,
        }
    }

    /// Device address of its first element, if it is located in the memory `of`.
    #[cfg(feature = "cuda")]
    pub(crate) fn address_in(&self, of: &Arc<dyn DeviceMemory>) -> Option<u64> {
        match &*self.storage {
            Storage::Device(place) if Arc::ptr_eq(&place.memory, of) => {
                let start = self.start_elems * self.dtype.size_bytes();
                Some(of.address() + place.placed.offset() + start as u64)
            }
            _ => None,
        }
    }

    /// Whether this is the only handle to its memory and starts at its beginning.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_sole(&self) -> bool {
        Arc::strong_count(&self.storage) == 1 && self.start_elems == 0
    }

    /// Whether other handles to its memory exist.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.storage) > 1
    }

    /// Whether the tensor's values are in device memory that the host cannot address.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        #[cfg(feature = "cuda")]
        return matches!(*self.storage, Storage::Device(_));
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Prepares a copy of the tensor to the host, to be made later. It waits for the work queued so far and
    /// for nothing else.
    ///
    /// # Errors
    /// When the device fails.
    pub fn fetch(&self) -> Result<Fetch> {
        Ok(Fetch {
            tensor: self.clone(),
            #[cfg(feature = "cuda")]
            behind: match &*self.storage {
                Storage::Device(place) if place.known.is_none() && place.memory.has_values() => {
                    Some(place.memory.record_event()?)
                }
                _ => None,
            },
        })
    }

    /// Copy of the tensor's bytes in host memory. For a device tensor this waits for the device.
    ///
    /// # Errors
    /// [`KernelError::NoValues`] on the meta device, and errors of the device.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        match &*self.storage {
            Storage::Meta { .. } => Err(KernelError::NoValues {
                op: "to_bytes",
                shape: self.shape,
            }),
            #[cfg(feature = "cuda")]
            Storage::Device(place) => {
                let start = self.start_elems * self.dtype.size_bytes();
                let mut out = vec![0; self.size_bytes()];
                match &place.known {
                    Some(known) => out.copy_from_slice(&known[start..start + self.size_bytes()]),
                    None if !place.memory.has_values() => {
                        return Err(KernelError::NoValues {
                            op: "to_bytes",
                            shape: self.shape,
                        });
                    }
                    None => place
                        .memory
                        .read(place.placed.offset() + start as u64, &mut out)?,
                }
                Ok(out)
            }
            Storage::Block(_) | Storage::Foreign { .. } => Ok(self.as_bytes().to_vec()),
        }
    }

    /// Shape of the tensor: the extent of each axis.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Extent of axis `axis`, counted from 0. Panics if the tensor has no such axis.
    #[must_use]
    pub fn dim(&self, axis: usize) -> usize {
        self.shape.dims()[axis]
    }

    /// Element type of the tensor.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements of the tensor.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.shape.elems()
    }

    /// Size of all elements in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.elems() * self.dtype.size_bytes()
    }

    /// Whether the tensor has no values, as on the meta device.
    #[must_use]
    pub fn is_meta(&self) -> bool {
        match &*self.storage {
            Storage::Meta { .. } => true,
            #[cfg(feature = "cuda")]
            Storage::Device(place) => !place.memory.has_values(),
            Storage::Block(_) | Storage::Foreign { .. } => false,
        }
    }

    /// Tensor with another shape and the same elements in the same order. It shares the memory.
    ///
    /// # Errors
    /// When the numbers of elements differ.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.elems() != self.elems() {
            return shape_error("reshape", format!("{} -> {shape}", self.shape));
        }
        Ok(Self {
            shape,
            ..self.clone()
        })
    }

    /// Rows `start..start + len` of the outermost axis, as a tensor that shares the memory.
    ///
    /// # Errors
    /// When the range is out of bounds.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        let dims = self.shape.dims();
        let Some((&outer, inner)) = dims.split_first() else {
            return shape_error("narrow", "a scalar has no axis");
        };
        if start + len > outer {
            return shape_error(
                "narrow",
                format!("{start}..{} of {}", start + len, self.shape),
            );
        }
        let stride: usize = inner.iter().product();
        let mut shape = dims.to_vec();
        shape[0] = len;
        let start_elems = self.start_elems + start * stride;
        Ok(Self {
            start_elems,
            shape: Shape::new(&shape),
            ..self.clone()
        })
    }

    /// Converts to a writable tensor, if this is the only handle and covers a whole block of a pool.
    ///
    /// # Errors
    /// Returns the tensor unchanged if it is shared, covers a part of a block, or is outside a pool.
    pub fn into_mut(self) -> std::result::Result<TensorMut, Self> {
        let Self {
            storage,
            start_elems,
            shape,
            dtype,
        } = self;
        let bytes = shape.elems() * dtype.size_bytes();
        let storage = match Arc::try_unwrap(storage) {
            Ok(Storage::Block(block)) if start_elems == 0 && block.as_bytes().len() == bytes => {
                return Ok(TensorMut {
                    block,
                    shape,
                    dtype,
                });
            }
            Ok(other) => Arc::new(other),
            Err(shared) => shared,
        };
        Err(Self {
            storage,
            start_elems,
            shape,
            dtype,
        })
    }

    /// Elements of a tensor in host memory, without a copy.
    ///
    /// # Panics
    /// When `T` is not the dtype or the tensor has no values on the host. Backends check this before.
    #[must_use]
    pub fn as_slice<T: Element>(&self) -> &[T] {
        assert_eq!(T::DTYPE, self.dtype, "tensor is {}", self.dtype);
        bytemuck::cast_slice(self.as_bytes())
    }

    /// Bytes of a tensor in host memory, without a copy.
    ///
    /// # Panics
    /// When the tensor has no values on the host.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let all = match &*self.storage {
            Storage::Block(block) => block.as_bytes(),
            Storage::Foreign { bytes, .. } => (**bytes).as_ref(),
            #[cfg(feature = "cuda")]
            Storage::Device(_) => panic!("a tensor on a device is read with to_bytes"),
            Storage::Meta { .. } => panic!("a tensor of the meta device has no values"),
        };
        let size = self.dtype.size_bytes();
        &all[self.start_elems * size..(self.start_elems + self.elems()) * size]
    }

    /// Bytes of the tensor on the host: borrowed if it is in host memory, else copied as by
    /// [`Tensor::to_bytes`].
    ///
    /// # Errors
    /// As [`Tensor::to_bytes`].
    pub fn host_bytes(&self) -> Result<Cow<'_, [u8]>> {
        if self.is_meta() || self.is_on_device() {
            return self.to_bytes().map(Cow::Owned);
        }
        Ok(Cow::Borrowed(self.as_bytes()))
    }

    /// Elements of an f32 tensor on the host: borrowed if it is in host memory, else copied from the device.
    ///
    /// # Errors
    /// As [`Tensor::to_f32_vec`].
    ///
    /// # Panics
    /// When the dtype is not f32.
    pub fn host_f32(&self) -> Result<Cow<'_, [f32]>> {
        assert_eq!(self.dtype, DType::F32, "tensor is {}", self.dtype);
        if self.is_meta() || self.is_on_device() {
            return self.to_f32_vec().map(Cow::Owned);
        }
        Ok(Cow::Borrowed(self.as_slice()))
    }

    /// Copies the elements of an f32, bf16 or f16 tensor to the host and converts them to `f32`.
    ///
    /// # Errors
    /// [`KernelError::NoValues`] on the meta device, [`KernelError::DType`] for other dtypes, and errors of
    /// the device.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        if self.is_meta() {
            return Err(KernelError::NoValues {
                op: "to_f32_vec",
                shape: self.shape,
            });
        }
        let fetched;
        let bytes = if self.is_on_device() {
            fetched = self.to_bytes()?;
            &fetched
        } else {
            self.as_bytes()
        };
        let word = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        let words = bytes.chunks_exact(2).map(word);
        Ok(match self.dtype {
            DType::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            DType::BF16 => words.map(|x| half::bf16::from_bits(x).to_f32()).collect(),
            DType::F16 => words.map(|x| half::f16::from_bits(x).to_f32()).collect(),
            got => {
                return Err(KernelError::DType {
                    op: "to_f32_vec",
                    got,
                    expected: "a float",
                });
            }
        })
    }
}

/// Writable tensor in host memory, under construction. [`TensorMut::freeze`] makes it immutable.
#[derive(Debug)]
pub struct TensorMut {
    block: Block,
    shape: Shape,
    dtype: DType,
}

impl TensorMut {
    /// Allocates a tensor in host memory with unspecified contents.
    ///
    /// # Errors
    /// When the pool is full.
    pub fn new(pool: &Pool, tag: Tag, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into();
        let block = pool.take(shape.elems() * dtype.size_bytes(), tag)?;
        Ok(Self {
            block,
            shape,
            dtype,
        })
    }

    /// Allocates a tensor in host memory, filled with zeros.
    ///
    /// # Errors
    /// When the pool is full.
    pub fn zeros(pool: &Pool, tag: Tag, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let mut out = Self::new(pool, tag, shape, dtype)?;
        out.block.as_bytes_mut().fill(0);
        Ok(out)
    }

    /// Shape of the tensor: the extent of each axis.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Elements of the tensor, for writing.
    ///
    /// # Panics
    /// When `T` is not the dtype.
    #[must_use]
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(T::DTYPE, self.dtype, "tensor is {}", self.dtype);
        bytemuck::cast_slice_mut(self.block.as_bytes_mut())
    }

    /// Bytes of all elements, for writing.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.block.as_bytes_mut()
    }

    /// Turns the filled memory into an immutable [`Tensor`], without a copy.
    #[must_use]
    pub fn freeze(self) -> Tensor {
        let Self {
            block,
            shape,
            dtype,
        } = self;
        Tensor {
            storage: Arc::new(Storage::Block(block)),
            start_elems: 0,
            shape,
            dtype,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_and_reshape_share_the_memory() {
        let pool = Pool::new("device", None);
        let t =
            Tensor::from_slice(&pool, Tag::Activations, [3, 2], &[0i32, 1, 2, 3, 4, 5]).unwrap();
        let tail = t.narrow(1, 2).unwrap();
        assert_eq!(tail.as_slice::<i32>(), [2, 3, 4, 5]);
        assert_eq!(
            tail.reshape([4])
                .unwrap()
                .narrow(3, 1)
                .unwrap()
                .as_slice::<i32>(),
            [5]
        );
        assert_eq!(pool.stats().in_use, 64);
        assert!(t.narrow(2, 2).is_err());
        drop(t);
        drop(tail);
        assert_eq!(pool.stats().in_use, 0);
    }

    #[test]
    fn only_the_last_handle_of_a_whole_block_is_writable() {
        let pool = Pool::new("device", None);
        let t = Tensor::from_slice(&pool, Tag::Cache, [2, 2], &[0i32, 1, 2, 3]).unwrap();
        let other = t.clone();
        let t = t.into_mut().unwrap_err();
        drop(other);
        let part = t.narrow(1, 1).unwrap();
        drop(t);
        assert_eq!(part.into_mut().unwrap_err().as_slice::<i32>(), [2, 3]);
        let t = Tensor::from_slice(&pool, Tag::Cache, [2, 2], &[0i32, 1, 2, 3]).unwrap();
        let mut writable = t.into_mut().unwrap();
        writable.as_mut_slice::<i32>()[3] = 9;
        assert_eq!(writable.freeze().as_slice::<i32>(), [0, 1, 2, 9]);
        let null = Tensor::null(&pool, Tag::Cache, [2], DType::F32).unwrap();
        assert!(null.into_mut().is_err());
    }

    #[test]
    fn foreign_memory_must_be_long_enough() {
        let bytes: ForeignBytes = Arc::new(vec![0u8; 64]);
        assert!(Tensor::from_foreign(bytes.clone(), None, 8, [8], DType::F32).is_ok());
        assert!(Tensor::from_foreign(bytes, None, 9, [8], DType::F32).is_err());
    }
}
