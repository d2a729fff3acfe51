//! Operations on tables of rows: gather, scatter, replace.

use super::matrix::narrow;
use super::parallel;
use super::{CpuBackend, floats};
use crate::error::{KernelError, Result};
use crate::pool::Tag;
use crate::{DType, Float, Shape, Tensor, TensorMut};

/// Checks that all row numbers are below `rows`.
pub(super) fn checked(op: &'static str, index: &[i32], rows: usize) -> Result<()> {
    match index
        .iter()
        .find(|i| usize::try_from(**i).map_or(true, |i| i >= rows))
    {
        Some(i) => Err(KernelError::Index {
            op,
            index: i64::from(*i),
            rows,
        }),
        None => Ok(()),
    }
}

impl CpuBackend {
    pub(super) fn gather_rows_op(
        &self,
        table: &Tensor,
        index: &Tensor,
        shape: Shape,
    ) -> Result<Tensor> {
        let index = index.as_slice::<i32>();
        checked("gather_rows", index, table.dim(0))?;
        let mut out = TensorMut::new(&self.pool, Tag::Activations, shape, table.dtype())?;
        let row = out
            .as_bytes_mut()
            .len()
            .checked_div(index.len())
            .unwrap_or(0);
        let table = table.as_bytes();
        parallel::chunks(out.as_bytes_mut(), row, |start, out| {
            for (out, i) in out.chunks_exact_mut(row).zip(&index[start / row..]) {
                out.copy_from_slice(&table[*i as usize * row..][..row]);
            }
        });
        Ok(out.freeze())
    }

    pub(super) fn scatter_add_rows_op(
        &self,
        x: &Tensor,
        index: &Tensor,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor> {
        let rows = shape.dims()[0];
        let index = index.as_slice::<i32>();
        checked("scatter_add_rows", index, rows)?;
        let mut out = TensorMut::zeros(&self.pool, Tag::Activations, shape, dtype)?;
        let row = x.elems().checked_div(index.len()).unwrap_or(0);
        if row > 0 {
            floats!(x.dtype(), T => floats!(dtype, U => {
                scatter::<T, U>(x.as_slice(), index, row, out.as_mut_slice());
            }));
        }
        Ok(out.freeze())
    }

    pub(super) fn transpose_each_op(&self, x: &Tensor, shape: Shape) -> Result<Tensor> {
        let (a, b) = (x.dim(1), x.dim(2));
        let size = x.dtype().size_bytes();
        let mut out = TensorMut::new(&self.pool, Tag::Activations, shape, x.dtype())?;
        let matrix = a * b * size;
        let from = x.as_bytes();
        parallel::chunks(out.as_bytes_mut(), matrix, |start, out| {
            let from = &from[start..][..out.len()];
            for (from, out) in from.chunks_exact(matrix).zip(out.chunks_exact_mut(matrix)) {
                for (i, element) in out.chunks_exact_mut(size).enumerate() {
                    let (column, row) = (i / a, i % a);
                    element.copy_from_slice(&from[(row * b + column) * size..][..size]);
                }
            }
        });
        Ok(out.freeze())
    }

    pub(super) fn replace_rows_op(
        &self,
        base: &Tensor,
        index: &Tensor,
        rows: Option<&Tensor>,
    ) -> Result<Tensor> {
        let index = index.as_slice::<i32>();
        checked("replace_rows", index, base.dim(0))?;
        let mut out = TensorMut::new(&self.pool, Tag::Activations, base.shape(), base.dtype())?;
        out.as_bytes_mut().copy_from_slice(base.as_bytes());
        replace(&mut out, index, rows);
        Ok(out.freeze())
    }

    pub(super) fn write_rows_op(
        &self,
        base: Tensor,
        index: &Tensor,
        rows: &Tensor,
    ) -> Result<Tensor> {
        checked("write_rows", index.as_slice(), base.dim(0))?;
        match base.into_mut() {
            Ok(mut own) => {
                replace(&mut own, index.as_slice(), Some(rows));
                Ok(own.freeze())
            }
            Err(shared) => self.replace_rows_op(&shared, index, Some(rows)),
        }
    }
}

/// Replaces row `index[n]` of `out` by row `n` of `rows`, or by zeros.
fn replace(out: &mut TensorMut, index: &[i32], rows: Option<&Tensor>) {
    let count = out.shape().dims()[0];
    let bytes = out.as_bytes_mut();
    let row = bytes.len().checked_div(count).unwrap_or(0);
    for (n, i) in index.iter().enumerate() {
        let out = &mut bytes[*i as usize * row..][..row];
        match rows {
            Some(rows) => out.copy_from_slice(&rows.as_bytes()[n * row..][..row]),
            None => out.fill(0),
        }
    }
}

/// Sums rows with the same target row in their order, in f32, and stores each sum once.
fn scatter<T: Float, U: Float>(x: &[T], index: &[i32], row: usize, out: &mut [U]) {
    let mut order: Vec<(i32, usize)> = index.iter().copied().zip(0..).collect();
    order.sort_unstable();
    let mut sum = vec![0.0f32; row];
    for group in order.chunk_by(|a, b| a.0 == b.0) {
        sum.fill(0.0);
        for (_, source) in group {
            for (s, x) in sum.iter_mut().zip(&x[source * row..][..row]) {
                *s += x.to_f32();
            }
        }
        narrow(&sum, &mut out[group[0].0 as usize * row..][..row]);
    }
}
