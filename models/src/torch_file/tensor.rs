//! Tensors as views of storages, checked in wide arithmetic.

use super::{Result, TorchError};
use std::rc::Rc;

/// Number format of a tensor in a file of `torch.save`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TorchDtype {
    /// `torch.float32`.
    F32,
    /// `torch.float16`.
    F16,
    /// `torch.bfloat16`.
    BF16,
    /// `torch.float64`.
    F64,
    /// `torch.int64`.
    I64,
    /// `torch.int32`.
    I32,
    /// `torch.int16`.
    I16,
    /// `torch.int8`.
    I8,
    /// `torch.uint8`.
    U8,
    /// `torch.bool`.
    Bool,
}

impl TorchDtype {
    /// The format of the class `torch.{class}`.
    pub(super) fn of_class(class: &str) -> Option<Self> {
        Some(match class {
            "FloatStorage" => Self::F32,
            "HalfStorage" => Self::F16,
            "BFloat16Storage" => Self::BF16,
            "DoubleStorage" => Self::F64,
            "LongStorage" => Self::I64,
            "IntStorage" => Self::I32,
            "ShortStorage" => Self::I16,
            "CharStorage" => Self::I8,
            "ByteStorage" => Self::U8,
            "BoolStorage" => Self::Bool,
            _ => return None,
        })
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Name of the format in safetensors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I16 => "I16",
            Self::I8 => "I8",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
        }
    }
}

/// A storage, or a range of one.
#[derive(Clone, Debug)]
pub(super) struct Storage {
    pub(super) dtype: TorchDtype,
    /// Name of the storage in the file.
    pub(super) key: Rc<str>,
    /// Elements of the whole storage.
    pub(super) whole_elems: u64,
    /// First element of the range.
    pub(super) first: u64,
    /// Elements of the range.
    pub(super) elems: u64,
}

impl Storage {
    /// Fails unless the range is inside the storage, whose bytes can be counted.
    pub(super) fn checked(self) -> Result<Self> {
        let end = self.first.checked_add(self.elems);
        let bytes = self.whole_elems.checked_mul(self.dtype.size_bytes() as u64);
        match end.is_some_and(|end| end <= self.whole_elems) && bytes.is_some() {
            true => Ok(self),
            false => Err(self.error("is a range outside its storage")),
        }
    }

    pub(super) fn error(&self, reason: &'static str) -> TorchError {
        TorchError::Tensor {
            name: format!("storage {}", self.key),
            reason,
        }
    }

    /// Bytes of the whole storage.
    pub(super) fn whole_bytes(&self) -> u64 {
        self.whole_elems * self.dtype.size_bytes() as u64
    }
}

/// A strided view of a storage that is inside it. Offset and strides count elements.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) storage: Storage,
    offset: u64,
    shape: Vec<usize>,
    strides: Vec<u64>,
}

impl View {
    pub(super) fn new(
        storage: Storage,
        offset: i128,
        sizes: &[i128],
        strides: &[i128],
    ) -> Result<Self> {
        let wrong = |reason| Err(storage.error(reason));
        let small = |values: &[i128]| -> Option<Vec<u64>> {
            let values = values.iter().map(|value| i64::try_from(*value).ok());
            values.map(|value| u64::try_from(value?).ok()).collect()
        };
        let numbers = (small(&[offset]), small(sizes), small(strides));
        let (Some(offset), Some(shape), Some(strides)) = numbers else {
            return wrong("has a negative or huge size, stride or offset");
        };
        let offset = offset[0];
        if shape.len() != strides.len() {
            return wrong("has another number of sizes than of strides");
        }
        let axes = || shape.iter().zip(&strides);
        let mut elems = 1u128;
        for size in &shape {
            // The order of the factors does not matter to whether a factor is 0.
            elems = match elems.checked_mul(u128::from(*size)) {
                Some(elems) => elems,
                None if shape.contains(&0) => 0,
                None => return wrong("has more elements than can be counted"),
            };
        }
        let mut last = u128::from(offset);
        for (size, stride) in axes() {
            let reach = u128::from(size.saturating_sub(1)) * u128::from(*stride);
            last = last.saturating_add(reach);
        }
        let limit = u128::from(storage.elems);
        if elems > 0 && last >= limit || u128::from(offset) > limit {
            return wrong("is read outside its bounds");
        }
        let shape = shape.iter().map(|size| usize::try_from(*size)).collect();
        match shape {
            Ok(shape) => Ok(Self {
                storage,
                offset,
                shape,
                strides,
            }),
            Err(_) => wrong("has a negative or huge size, stride or offset"),
        }
    }

    /// Number of elements.
    pub(super) fn elems(&self) -> u128 {
        self.shape.iter().map(|size| *size as u128).product()
    }
}

/// A tensor in a file: its format, shape, and where its elements are. All elements are inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchTensor {
    /// Number format.
    pub dtype: TorchDtype,
    /// Extents.
    pub shape: Vec<usize>,
    /// Elements between neighbors along each axis.
    pub strides: Vec<u64>,
    /// First byte of the first element in the file.
    pub at: u64,
}

impl TorchTensor {
    pub(super) fn new(view: &View, storage_at: u64) -> Self {
        let dtype = view.storage.dtype;
        let first = view.storage.first + view.offset;
        Self {
            dtype,
            shape: view.shape.clone(),
            strides: view.strides.clone(),
            at: storage_at + first * dtype.size_bytes() as u64,
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements are in row-major order without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *size != 1 && *stride != expected {
                return self.elems() == 0;
            }
            expected = expected.saturating_mul(*size as u64);
        }
        true
    }

    /// Number of elements from the first to the last one in the file, gaps included.
    #[must_use]
    pub fn span(&self) -> usize {
        if self.elems() == 0 {
            return 0;
        }
        let axes = self.shape.iter().zip(&self.strides);
        1 + axes
            .map(|(size, stride)| (size - 1) * *stride as usize)
            .sum::<usize>()
    }

    /// Position of the element `index` (row-major), in elements after the first one.
    #[must_use]
    pub fn position(&self, index: usize) -> usize {
        let axes = self.shape.iter().zip(&self.strides).rev();
        let mut rest = index;
        axes.map(|(size, stride)| {
            let along = rest % size;
            rest /= size;
            along * *stride as usize
        })
        .sum()
    }
}
