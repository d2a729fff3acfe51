//! Views of matrices and their widening to f32.

use super::parallel;
use super::simd::multiversion;
use crate::{DType, Float, Tensor};
use half::{bf16, f16};

/// Elements of a float tensor.
#[derive(Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Floats<'a> {
    /// The values of a tensor that was checked to be a float.
    pub(crate) fn of(x: &'a Tensor) -> Self {
        match x.dtype() {
            DType::BF16 => Self::BF16(x.as_slice()),
            DType::F16 => Self::F16(x.as_slice()),
            _ => Self::F32(x.as_slice()),
        }
    }

    /// Elements from `start` on.
    pub(crate) fn from(self, start: usize) -> Self {
        match self {
            Self::F32(x) => Self::F32(&x[start..]),
            Self::BF16(x) => Self::BF16(&x[start..]),
            Self::F16(x) => Self::F16(&x[start..]),
        }
    }

    /// Converts the elements behind `start` into `out`.
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
    /// `out[i] = x[i]`, exact.
    pub(crate) fn widen<T: Float>(x: &[T], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = x.to_f32();
        }
    }
}

multiversion! {
    /// `out[i] = x[i]`, rounded to nearest even.
    pub(crate) fn narrow<T: Float>(x: &[f32], out: &mut [T]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = T::from_f32(*x);
        }
    }
}

/// Rows or columns of f32 with a stride each.
#[derive(Clone, Copy)]
pub(crate) struct Dense<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> Dense<'a> {
    pub(crate) fn row_major(data: &'a [f32], cols: usize) -> Self {
        Self {
            data,
            row_stride: cols,
            col_stride: 1,
        }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// The view that starts at an element.
    pub(crate) fn at(self, row: usize, col: usize) -> Self {
        let start = row * self.row_stride + col * self.col_stride;
        Self {
            data: &self.data[start.min(self.data.len())..],
            ..self
        }
    }

    /// Whether an extent lies inside.
    pub(crate) fn holds(&self, rows: usize, cols: usize) -> bool {
        rows == 0
            || cols == 0
            || (rows - 1) * self.row_stride + (cols - 1) * self.col_stride < self.data.len()
    }
}

/// A matrix of any float type, one of whose strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: Floats<'a>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A tensor with its leading axes folded into rows.
    pub(crate) fn of(x: &'a Tensor) -> Self {
        Self::new(Floats::of(x), x.shape().rows(), x.shape().last())
    }

    /// Contiguous rows.
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

    pub(crate) fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Rows `start..start + rows`.
    pub(crate) fn row_range(self, start: usize, rows: usize) -> Self {
        self.part(start, 0, rows, self.cols)
    }

    fn part(self, row: usize, col: usize, rows: usize, cols: usize) -> Self {
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

    /// A part as f32: in place, or widened into the front of `space`, whose rest is returned.
    pub(crate) fn widened<'s>(
        self,
        row: usize,
        col: usize,
        rows: usize,
        cols: usize,
        space: &'s mut [f32],
    ) -> (Dense<'s>, &'s mut [f32])
    where
        'a: 's,
    {
        let part = self.part(row, col, rows, cols);
        if let Floats::F32(data) = part.data {
            let dense = Dense {
                data,
                row_stride: self.row_stride,
                col_stride: self.col_stride,
            };
            return (dense, space);
        }
        let (out, rest) = space.split_at_mut(rows * cols);
        let by_rows = self.col_stride == 1;
        let (line, stride) = if by_rows {
            (cols, self.row_stride)
        } else {
            (rows, self.col_stride)
        };
        parallel::chunks(out, line, |start, out| {
            for (i, out) in out.chunks_exact_mut(line).enumerate() {
                part.data.widen((start / line + i) * stride, out);
            }
        });
        let dense = Dense::row_major(out, line);
        (if by_rows { dense } else { dense.transposed() }, rest)
    }
}
