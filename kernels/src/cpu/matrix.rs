//! Views of matrices and their conversion to f32.

use super::simd::multiversion;
use crate::{DType, Float, Tensor};
use half::{bf16, f16};

/// Borrowed elements of a float tensor, as a slice of its dtype.
#[derive(Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Floats<'a> {
    /// Elements of a tensor whose dtype was checked to be a float.
    pub(crate) fn of(x: &'a Tensor) -> Self {
        match x.dtype() {
            DType::BF16 => Self::BF16(x.as_slice()),
            DType::F16 => Self::F16(x.as_slice()),
            _ => Self::F32(x.as_slice()),
        }
    }

    /// The elements from index `start` to the end. Panics if `start` is past the end.
    pub(crate) fn from(self, start: usize) -> Self {
        match self {
            Self::F32(x) => Self::F32(&x[start..]),
            Self::BF16(x) => Self::BF16(&x[start..]),
            Self::F16(x) => Self::F16(&x[start..]),
        }
    }

    /// Converts the elements from `start` on into `out`.
    pub(crate) fn widen(self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        match self {
            Self::F32(x) => out.copy_from_slice(&x[range]),
            Self::BF16(x) => widen(&x[range], out),
            Self::F16(x) => widen(&x[range], out),
        }
    }

    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::BF16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }
}

multiversion! {
    /// Converts the elements of `x` to f32 in `out`. The conversion is exact.
    pub(crate) fn widen<T: Float>(x: &[T], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = x.to_f32();
        }
    }
}

multiversion! {
    /// Converts the f32 elements of `x` to the dtype of `out`, rounded to nearest even.
    pub(crate) fn narrow<T: Float>(x: &[f32], out: &mut [T]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = T::from_f32(*x);
        }
    }
}

/// View of a matrix of any float type. One of its two strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: Floats<'a>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A tensor as a matrix, with its leading axes folded into rows.
    pub(crate) fn of(x: &'a Tensor) -> Self {
        Self::new(Floats::of(x), x.shape().rows(), x.shape().last())
    }

    /// View of `data` as a `rows` × `cols` matrix with contiguous rows.
    pub(crate) fn new(data: Floats<'a>, rows: usize, cols: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
        }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// View of `rows` × `cols` elements with contiguous rows, `stride` elements apart.
    pub(crate) fn strided(data: Floats<'a>, rows: usize, cols: usize, stride: usize) -> Self {
        Self {
            row_stride: stride,
            ..Self::new(data, rows, cols)
        }
    }

    pub(crate) fn data(&self) -> Floats<'a> {
        self.data
    }

    /// Row stride and column stride in elements.
    pub(crate) fn strides(&self) -> (usize, usize) {
        (self.row_stride, self.col_stride)
    }

    /// View of the rows `start..start + rows` with all columns.
    pub(crate) fn row_range(self, start: usize, rows: usize) -> Self {
        self.part(start, 0, rows, self.cols)
    }

    /// Submatrix of `rows` × `cols` elements from (`row`, `col`) on.
    pub(crate) fn part(self, row: usize, col: usize, rows: usize, cols: usize) -> Self {
        let data = if rows * cols == 0 {
            self.data
        } else {
            self.data
                .from(row * self.row_stride + col * self.col_stride)
        };
        Self {
            data,
            rows,
            cols,
            ..self
        }
    }
}
