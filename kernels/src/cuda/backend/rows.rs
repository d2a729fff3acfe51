//! Operations on tables of rows, and sums over rows.

use super::CudaBackend;
use crate::check;
use crate::cuda::launch::Address;
use crate::cuda::ops::rows::{self, Groups, Scatter};
use crate::error::{KernelError, Result};
use crate::pool::Tag;
use crate::{Backend, DType, Shape, Tensor};
use std::collections::BTreeMap;

/// Row numbers of a table of `rows` rows, from the host's copy or fetched from the device.
pub(super) fn numbers(op: &'static str, index: &Tensor, rows: usize) -> Result<Vec<i32>> {
    let bytes = index.to_bytes()?;
    let numbers: Vec<i32> = bytes
        .chunks_exact(4)
        .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let outside = |i: &&i32| usize::try_from(**i).map_or(true, |i| i >= rows);
    match numbers.iter().find(outside) {
        Some(i) => Err(KernelError::Index {
            op,
            index: i64::from(*i),
            rows,
        }),
        None => Ok(numbers),
    }
}

/// Bytes per row of `table`.
fn row_bytes(table: &Tensor) -> u64 {
    let rows = table.dim(0).max(1);
    (table.size_bytes() / rows) as u64
}

impl CudaBackend {
    /// `sum`, if any, plus the column sums of each stretch of `x`.
    pub(super) fn column_sums(&self, x: &Tensor, mut sum: Option<Tensor>) -> Result<Tensor> {
        let rows = x.shape().rows();
        let x = x.reshape([rows, x.shape().last()])?;
        for (first, len) in self.stretches(rows) {
            let own = self.column_sum_op(&x.narrow(first, len)?, None)?;
            sum = Some(match sum {
                Some(sum) => self.add(&sum, &own)?,
                None => own,
            });
        }
        Ok(sum.expect("at least one stretch"))
    }

    /// Column sum of all rows, or of the rows that `index` names.
    pub(super) fn column_sum_op(&self, x: &Tensor, index: Option<&Tensor>) -> Result<Tensor> {
        const OP: &str = "column_sum";
        check::float(OP, x)?;
        let (rows, c) = (x.shape().rows(), x.shape().last() as u64);
        let t = match index {
            Some(index) => numbers(OP, index, rows)?.len(),
            None => rows,
        } as u64;
        let index_at = index.map_or(Ok(Address::NULL), |index| self.address(OP, index))?;
        let y = self.gradient([c as usize])?;
        if t == 0 {
            self.zero(OP, &y)?;
            return Ok(y);
        }
        let workspace = self.scratch(rows::column_sum_workspace_bytes(t, c))?;
        let at = self.address(OP, &workspace)?;
        let (x_at, y_at) = (self.address(OP, x)?, self.address(OP, &y)?);
        let launches = rows::column_sum((x.dtype(), DType::F32), x_at, index_at, [t, c], at, y_at);
        self.run_some(OP, launches)?;
        Ok(y)
    }

    pub(super) fn gather_rows_op(
        &self,
        table: &Tensor,
        index: &Tensor,
        shape: Shape,
    ) -> Result<Tensor> {
        const OP: &str = "gather_rows";
        numbers(OP, index, table.dim(0))?;
        let out = self.output(shape, table.dtype())?;
        let launch = rows::gather_rows(
            self.address(OP, table)?,
            self.address(OP, index)?,
            self.address(OP, &out)?,
            index.elems() as u64,
            row_bytes(table),
        );
        self.run(OP, [launch])?;
        Ok(out)
    }

    pub(super) fn scatter_add_rows_op(
        &self,
        x: &Tensor,
        index: &Tensor,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor> {
        const OP: &str = "scatter_add_rows";
        let groups = Groups::of(&numbers(OP, index, shape.dims()[0])?);
        let out = self.zeros(shape, dtype, Tag::Activations)?;
        let c = x.elems().checked_div(index.elems()).unwrap_or(0);
        if c == 0 {
            return Ok(out);
        }
        // Sums are stored in f32 or in the dtype of the summands.
        let x = match x.dtype() == dtype || dtype == DType::F32 {
            true => x.clone(),
            false => self.cast(x, DType::F32)?,
        };
        let stored = match x.dtype() == dtype || dtype == DType::F32 {
            true => out.clone(),
            false => self.zeros(shape, DType::F32, Tag::Workspace)?,
        };
        let sources = self.integers(OP, &groups.sources)?;
        let starts = self.integers(OP, &groups.starts)?;
        let targets = self.integers(OP, &groups.targets)?;
        let at = Scatter {
            x: self.address(OP, &x)?,
            sources: self.address(OP, &sources)?,
            starts: self.address(OP, &starts)?,
            targets: self.address(OP, &targets)?,
            y: self.address(OP, &stored)?,
        };
        let dtypes = (x.dtype(), stored.dtype());
        let launch = rows::scatter_add_rows(dtypes, &at, groups.targets.len() as u64, c as u64);
        self.run_some(OP, launch.map(|l| [l]))?;
        self.cast(&stored, dtype)
    }

    pub(super) fn transpose_each_op(&self, x: &Tensor, shape: Shape) -> Result<Tensor> {
        const OP: &str = "transpose_each";
        let out = self.output(shape, x.dtype())?;
        let dims = [x.dim(0), x.dim(1), x.dim(2)].map(|d| d as u64);
        let (from, to) = (self.address(OP, x)?, self.address(OP, &out)?);
        let launch = rows::transpose_each(from, to, dims, x.dtype().size_bytes() as u64);
        self.run_some(OP, launch.map(|l| [l]))?;
        Ok(out)
    }

    pub(super) fn replace_rows_op(
        &self,
        base: &Tensor,
        index: &Tensor,
        rows: Option<&Tensor>,
    ) -> Result<Tensor> {
        const OP: &str = "replace_rows";
        let out = self.copy_of(OP, base, Tag::Activations)?;
        self.put(OP, &out, index, rows)?;
        Ok(out)
    }

    pub(super) fn write_rows_op(
        &self,
        base: Tensor,
        index: &Tensor,
        rows: &Tensor,
    ) -> Result<Tensor> {
        if !base.is_sole() {
            return self.replace_rows_op(&base, index, Some(rows));
        }
        self.put("write_rows", &base, index, Some(rows))?;
        Ok(base)
    }

    /// Replaces row `index[i]` of `out` by row `i` of `rows`, or by zeros. The last of equal indices wins.
    fn put(
        &self,
        op: &'static str,
        out: &Tensor,
        index: &Tensor,
        rows: Option<&Tensor>,
    ) -> Result<()> {
        let numbers = numbers(op, index, out.dim(0))?;
        if numbers.is_empty() {
            return Ok(());
        }
        let (to, from): (Vec<i32>, Vec<i32>) = match numbers.is_sorted_by(|a, b| a < b) {
            true => (numbers.clone(), (0..).take(numbers.len()).collect()),
            false => {
                let last: BTreeMap<i32, i32> = numbers.into_iter().zip(0..).collect();
                last.into_iter().unzip()
            }
        };
        let (to_rows, from_rows) = (self.integers(op, &to)?, self.integers(op, &from)?);
        let launch = rows::put_rows(
            rows.map_or(Ok(Address::NULL), |rows| self.address(op, rows))?,
            self.address(op, &from_rows)?,
            self.address(op, &to_rows)?,
            self.address(op, out)?,
            to.len() as u64,
            row_bytes(out),
        );
        self.run(op, [launch])
    }
}
