//! Grouped matrix product (grouped GEMM): two layers over a partition of rows. Contains the operands and a reference
//! implementation, which defines the results and serves devices without a kernel.

use crate::backend::{MatmulArgs, Transpose};
use crate::check;
use crate::error::{KernelError, Result, shape_error};
use crate::pool::Tag;
use crate::{Backend, DType, Tensor};

/// Operands of [`Backend::grouped_matmul`]: `y[row] = a[row] @ op(b) + bias`, with `b` and `bias` of the
/// group that the row belongs to.
#[derive(Clone, Copy, Debug)]
pub struct GroupedMatmulArgs<'a> {
    /// Left operand, `[t, k]`. Each of its rows is multiplied by the matrix of the row's group.
    pub a: &'a Tensor,
    /// The two row groups with their matrices. Every row of `a` is in exactly one group.
    pub groups: [MatmulGroup<'a>; 2],
    /// Whether the matrix `b` of each group is stored transposed, as `[n, k]`.
    pub transpose_b: Transpose,
}

/// One of the two row groups of a [`GroupedMatmulArgs`]: its rows, and the matrix and bias for these rows.
#[derive(Clone, Copy, Debug)]
pub struct MatmulGroup<'a> {
    /// Numbers of the group's rows in `a`, i32 `[m]`, possibly empty.
    pub rows: &'a Tensor,
    /// Right operand for the group's rows, `[k, n]`, or `[n, k]` when transposed (the layout of a linear
    /// weight).
    pub b: &'a Tensor,
    /// Bias, `[n]`, added to the group's rows, or `None`.
    pub bias: Option<&'a Tensor>,
}

/// Fails unless the groups name every row below `t` exactly once. Meta tensors are not checked.
pub(crate) fn partition(op: &'static str, rows: [&Tensor; 2], t: usize) -> Result<()> {
    let mut seen = vec![false; t];
    for rows in rows.iter().filter(|rows| !rows.is_meta()) {
        for row in rows.to_bytes()?.chunks_exact(4) {
            let row = i32::from_le_bytes([row[0], row[1], row[2], row[3]]);
            let place = usize::try_from(row).ok().and_then(|row| seen.get_mut(row));
            let Some(place) = place else {
                return Err(KernelError::Index {
                    op,
                    index: i64::from(row),
                    rows: t,
                });
            };
            if std::mem::replace(place, true) {
                return shape_error(op, format!("row {row} is named twice"));
            }
        }
    }
    // `check::groups` has compared the number of rows with `t`, so no row is missing.
    Ok(())
}

/// Row numbers where `second` is false, and where it is true, each in ascending order.
pub(crate) fn split(second: &[bool]) -> [Vec<i32>; 2] {
    let mut rows = [Vec::new(), Vec::new()];
    for (row, second) in second.iter().enumerate() {
        rows[usize::from(*second)].push(row as i32);
    }
    rows
}

/// Implementation of [`Backend::partition_rows`] that splits the rows on the host and uploads the row numbers.
pub(crate) fn partition_rows<B: Backend + ?Sized>(on: &B, second: &[bool]) -> Result<[Tensor; 2]> {
    let [first, second] = split(second);
    let place = |rows: &[i32]| {
        let bytes = bytemuck::cast_slice(rows);
        on.upload(bytes, [rows.len()].into(), DType::I32, Tag::Activations)
    };
    Ok([place(&first)?, place(&second)?])
}

const OP: &str = "grouped_matmul";

/// [`Backend::grouped_matmul`], one product per group on gathered rows.
pub(crate) fn matmul<B: Backend + ?Sized>(on: &B, args: &GroupedMatmulArgs<'_>) -> Result<Tensor> {
    let (shape, dtype) = (check::grouped(args)?, args.a.dtype());
    partition(OP, args.groups.map(|group| group.rows), args.a.dim(0))?;
    let mut y = on.zeros(shape, dtype, Tag::Activations)?;
    for group in args.groups.iter().filter(|group| group.rows.elems() > 0) {
        let own = on.gather_rows(args.a, group.rows)?;
        let part = on.matmul(MatmulArgs {
            a: &own,
            transpose_a: Transpose::No,
            b: group.b,
            transpose_b: args.transpose_b,
            bias: group.bias,
            out: dtype,
        })?;
        drop(own);
        y = on.write_rows(y, group.rows, &part)?;
    }
    Ok(y)
}

/// [`Backend::matmul_of_rows`], one product on gathered rows.
pub(crate) fn matmul_of_rows<B: Backend + ?Sized>(
    on: &B,
    a: &Tensor,
    b: &Tensor,
    rows: &Tensor,
) -> Result<Tensor> {
    check::matmul_of_rows(a, b, rows)?;
    on.matmul(MatmulArgs {
        a: &on.gather_rows(a, rows)?,
        transpose_a: Transpose::Yes,
        b: &on.gather_rows(b, rows)?,
        transpose_b: Transpose::No,
        bias: None,
        out: DType::F32,
    })
}
