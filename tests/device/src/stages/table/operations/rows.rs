//! Rows for tables: embeddings, partitioned rows, transposed matrices, sums over rows.

use anyhow::{Context, Result};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::rows::{self as ops, Groups, Scatter};
use optim::rng::RandomStream;

use super::{Amount, Prepared, Rows, Targets};
use crate::stages::table::bench::Operands;

const DTYPE: DType = DType::BF16;
const VOCABULARY: usize = 150_528;
const TOKENS: usize = 8192;
const WIDTH: usize = 4096;
/// Rows of a partition among those of all tokens.
const PART: usize = 6144;
/// As for elementwise operations.
const SETS: usize = 4;

/// Adds the rows. Only the embedding has a target: it only moves rows, once for all tokens. The others are small beside
/// the products around them.
pub(super) fn add(rows: &mut Rows) {
    rows.add(
        "embedding bf16 8192 rows of 150528x4096",
        Targets::COPY,
        embedding_row,
    );
    rows.add(
        "embedding gradient f32 of bf16, 8192 rows of 150528x4096",
        Targets::NONE,
        embedding_gradient_row,
    );
    for (x, word) in [(true, "rows"), (false, "zeros")] {
        let name = format!("{word} put bf16 6144 of 8192x4096");
        rows.add(name, Targets::NONE, move |on| put_row(on, x));
    }
    rows.add(
        "numbers of 8192 rows by group, 6144 of the second",
        Targets::NONE,
        partition_row,
    );
    for dtype in [DTYPE, DType::F32] {
        let name = format!("transposed {dtype} 64x1024x1152");
        rows.add(name, Targets::NONE, move |on| transpose_row(on, dtype));
    }
    for (dtype, part) in [(DTYPE, false), (DType::F32, false), (DTYPE, true)] {
        let name = match part {
            true => format!("sums over 6144 of 8192 rows {dtype} x4096"),
            false => format!("sums over 8192 rows {dtype} x4096"),
        };
        rows.add(name, Targets::NONE, move |on| sums_row(on, dtype, part));
    }
}

/// `n` numbers below `limit`, most of them different.
fn numbers(set: usize, n: usize, limit: usize) -> Vec<i32> {
    let stream = RandomStream::new(3, "rows");
    (0..n as u64)
        .map(|i| (stream.bits(set as u64, i) % limit as u64) as i32)
        .collect()
}

/// The rows of a part, placed like images between text.
fn part(t: usize, part: usize) -> Vec<i32> {
    let first = (t - part) / 2;
    (first as i32..).take(part).collect()
}

fn embedding_row(on: &mut Operands<'_>) -> Result<Prepared> {
    let (v, t, c) = (on.of(VOCABULARY), on.of(TOKENS), on.of(WIDTH));
    let line = c * DTYPE.size_bytes();
    let table = on.normal(DTYPE, v * c, 0.02)?;
    let mut sets = Vec::new();
    for set in 0..SETS {
        let index = on.values(&numbers(set, t, v))?;
        let y = on.output(t * line)?;
        let launch = ops::gather_rows(table, index, y, t as u64, line as u64);
        sets.push(vec![launch]);
    }
    Ok((Amount::Bytes((2 * t * line + 4 * t) as f64), sets))
}

fn embedding_gradient_row(on: &mut Operands<'_>) -> Result<Prepared> {
    let (v, t, c) = (on.of(VOCABULARY), on.of(TOKENS), on.of(WIDTH));
    let d_table = on.zeros(4 * v * c)?;
    let mut sets = Vec::new();
    let mut bytes = 0;
    for set in 0..SETS {
        let groups = Groups::of(&numbers(set, t, v));
        let at = Scatter {
            x: on.normal(DTYPE, t * c, 1e-3)?,
            sources: on.values(&groups.sources)?,
            starts: on.values(&groups.starts)?,
            targets: on.values(&groups.targets)?,
            y: d_table,
        };
        let targets = groups.targets.len();
        let launch = ops::scatter_add_rows((DTYPE, DType::F32), &at, targets as u64, c as u64);
        sets.push(vec![launch.context("floats")?]);
        bytes = (t * DTYPE.size_bytes() + 4 * targets) * c;
    }
    Ok((Amount::Bytes(bytes as f64), sets))
}

fn put_row(on: &mut Operands<'_>, with_rows: bool) -> Result<Prepared> {
    let (t, n, c) = (on.of(TOKENS), on.of(PART), on.of(WIDTH));
    let line = c * DTYPE.size_bytes();
    let from: Vec<i32> = (0..n as i32).collect();
    let (from, to) = (on.values(&from)?, on.values(&part(t, n))?);
    let mut sets = Vec::new();
    for _ in 0..SETS {
        let x = match with_rows {
            true => on.normal(DTYPE, n * c, 1.0)?,
            false => Address::NULL,
        };
        let y = on.output(t * line)?;
        let launch = ops::put_rows(x, from, to, y, n as u64, line as u64);
        sets.push(vec![launch]);
    }
    let passes = 1 + usize::from(with_rows);
    Ok((Amount::Bytes((passes * n * line) as f64), sets))
}

fn partition_row(on: &mut Operands<'_>) -> Result<Prepared> {
    let (t, n) = (on.of(TOKENS), on.of(PART));
    let mut mask = vec![0u8; t];
    for row in part(t, n) {
        mask[row as usize] = 1;
    }
    let (mask, rows) = (on.values(&mask)?, on.output(4 * t)?);
    let launch = ops::partition_rows(mask, t, t - n, rows).context("few rows")?;
    Ok((Amount::Bytes((5 * t) as f64), vec![vec![launch]]))
}

fn transpose_row(on: &mut Operands<'_>, dtype: DType) -> Result<Prepared> {
    let [n, a, b] = [64, 1024, 1152].map(|n| on.of(n));
    let (elements, size) = (n * a * b, dtype.size_bytes());
    let x = on.normal(dtype, elements, 1.0)?;
    let y = on.output(elements * size)?;
    let extents = [n, a, b].map(|n| n as u64);
    let launch = ops::transpose_each(x, y, extents, size as u64).context("elements")?;
    Ok((
        Amount::Bytes((2 * elements * size) as f64),
        vec![vec![launch]],
    ))
}

fn sums_row(on: &mut Operands<'_>, dtype: DType, of_part: bool) -> Result<Prepared> {
    let (t, c) = (on.of(TOKENS), on.of(WIDTH));
    let (rows, index) = match of_part {
        true => {
            let part = part(t, on.of(PART));
            (part.len(), on.values(&part)?)
        }
        false => (t, Address::NULL),
    };
    let extents = [rows as u64, c as u64];
    let workspace = ops::column_sum_workspace_bytes(extents[0], extents[1]);
    let workspace = on.output(workspace as usize)?;
    let y = on.output(4 * c)?;
    let mut sets = Vec::new();
    for _ in 0..SETS {
        let x = on.normal(dtype, t * c, 1.0)?;
        let launches = ops::column_sum((dtype, DType::F32), x, index, extents, workspace, y);
        sets.push(launches.context("floats")?.into());
    }
    let bytes = rows * c * dtype.size_bytes() + 4 * c;
    Ok((Amount::Bytes(bytes as f64), sets))
}
