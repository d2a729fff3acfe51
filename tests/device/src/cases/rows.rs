//! Rows gathered, replaced, transposed and added: bit-equal to the CPU. Column sums stay within their bound.

use anyhow::{Context, Result, ensure};
use kernels::cuda::launch::Address;
use kernels::cuda::ops::rows::{self, Groups, Scatter};
use kernels::{Backend, DType};

use super::host::{Twin, cpu, result, same};
use super::operand::launch_all;
use super::{Case, Effort};
use crate::machine::Machine;
use crate::numbers::{values, widened};
use crate::random::Operands;
use crate::tolerance;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Gather, replace and transpose with rows of every copy unit. Partitions with fewer and with more rows than one pass
/// numbers.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let (table, moved) = match effort {
        Effort::Emulated => (50, 33),
        Effort::Gpu => (50_000, 20_011),
    };
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::U8] {
        for (c, offset) in [(64, 0), (64, 1), (6, 0), (1, 0)] {
            let name = format!("gather {moved} of {table} rows of {c} {dtype}, {offset} off");
            cases.push(Case::new(name, move |machine| {
                gather(machine, dtype, [table, moved, c], offset)
            }));
            let name = format!("replace {moved} of {table} rows of {c} {dtype}, {offset} off");
            cases.push(Case::new(name, move |machine| {
                replace(machine, dtype, [table, moved, c], offset)
            }));
        }
        for dims in [[1, 32, 32], [3, 33, 65], [2, 5, 100], [4, 1, 7]] {
            let name = format!("transpose {dims:?} {dtype}");
            cases.push(Case::new(name, move |machine| {
                transpose(machine, dtype, dims)
            }));
        }
    }
    let mut partitions = vec![
        (1, 2),
        (17, 3),
        (4096, 5),
        (4097, 1),
        (9000, 4),
        (300, 1000),
    ];
    if effort == Effort::Gpu {
        partitions.push((1 << 20, 3));
    }
    for (n, every) in partitions {
        let name = format!("{n} rows by group, every {every}. of the second");
        cases.push(Case::new(name, move |machine| partition(machine, n, every)));
    }
    cases
}

/// Added rows: targets named never, once and often; sums over few and many rows.
#[must_use]
pub fn sum_cases(effort: Effort) -> Vec<Case> {
    let (sources, deep) = match effort {
        Effort::Emulated => (70, 600),
        Effort::Gpu => (20_000, 60_001),
    };
    let mut cases = Vec::new();
    for from in DTYPES {
        for to in [from, DType::F32] {
            if from == DType::F32 && to != from {
                continue;
            }
            for c in [5, 300] {
                let name = format!("scatter {sources} rows of {c} {from} into {to}");
                cases.push(Case::new(name, move |machine| {
                    scatter(machine, (from, to), sources, c)
                }));
            }
            for (rows, c) in [(1, 3), (255, 40), (deep, 33)] {
                let name = format!("columns of [{rows}, {c}] {from} into {to}");
                cases.push(Case::new(name, move |machine| {
                    columns(machine, (from, to), [rows, c])
                }));
            }
        }
    }
    cases
}

fn indices(name: &str, n: usize, limit: usize) -> Vec<i32> {
    let all = Operands::new(41).below(name, n, limit);
    all.into_iter().map(|i| i as i32).collect()
}

fn gather(
    machine: &mut dyn Machine,
    dtype: DType,
    [rows, moved, c]: [usize; 3],
    offset: usize,
) -> Result<()> {
    let numbers = Operands::new(42).normal("table", rows * c, 1.0);
    let table = Twin::new(machine, dtype, &[rows, c], &numbers, offset)?;
    let index = Twin::integers(machine, &[moved], &indices("gather", moved, rows))?;
    let (buffer, y) = result(machine, dtype, moved * c, offset)?;
    let bytes = (c * dtype.size_bytes()) as u64;
    let launch = rows::gather_rows(table.address, index.address, y, moved as u64, bytes);
    machine.launch(&launch)?;
    let want = cpu().gather_rows(&table.host, &index.host)?;
    same(machine, "gathered", buffer, &want)
}

/// Writes the base row by row, then replaces rows by those of another table and by zeros.
fn replace(
    machine: &mut dyn Machine,
    dtype: DType,
    [rows, moved, c]: [usize; 3],
    offset: usize,
) -> Result<()> {
    let draw = |name, n| Operands::new(43).normal(name, n, 1.0);
    let base = Twin::new(machine, dtype, &[rows, c], &draw("base", rows * c), 0)?;
    let other = draw("rows", moved * c);
    let other = Twin::new(machine, dtype, &[moved, c], &other, offset)?;
    // Each row occurs once: the step and the number of rows are coprime.
    let to: Vec<i32> = (0..moved).map(|i| (i * 7 % rows) as i32).collect();
    let all: Vec<i32> = (0..rows as i32).collect();
    let in_order = Twin::integers(machine, &[rows], &all)?;
    let index = Twin::integers(machine, &[moved], &to)?;
    let bytes = (c * dtype.size_bytes()) as u64;
    for values in [Some(&other), None] {
        let (buffer, y) = result(machine, dtype, rows * c, 0)?;
        let order = in_order.address;
        let copy = rows::put_rows(base.address, order, order, y, rows as u64, bytes);
        let address = values.map_or(Address::NULL, |twin| twin.address);
        let put = rows::put_rows(address, order, index.address, y, moved as u64, bytes);
        launch_all(machine, &[copy, put])?;
        let want = cpu().replace_rows(&base.host, &index.host, values.map(|twin| &twin.host))?;
        same(machine, "replaced", buffer, &want)?;
    }
    Ok(())
}

fn partition(machine: &mut dyn Machine, n: usize, every: usize) -> Result<()> {
    // Any non-zero byte selects the second list. If `every` exceeds the number of rows, none is selected.
    let mask: Vec<u8> = (1..=n)
        .map(|i| if i % every == 0 { 1 + i as u8 % 255 } else { 0 })
        .collect();
    let mask = &mask;
    let rows = |second: bool| (0..n as i32).filter(move |i| (mask[*i as usize] != 0) == second);
    let want: Vec<i32> = rows(false).chain(rows(true)).collect();
    let first = rows(false).count();
    let (from, to) = (machine.upload(mask)?, machine.output::<i32>(n)?);
    let launch = rows::partition_rows(from.address, n, first, to.address);
    launch_all(machine, &[launch.context("few rows")?])?;
    ensure!(machine.download::<i32>(to)? == want, "other rows");
    Ok(())
}

fn transpose(machine: &mut dyn Machine, dtype: DType, dims: [usize; 3]) -> Result<()> {
    let n = dims.iter().product();
    let x = Operands::new(44).normal("x", n, 1.0);
    let x = Twin::new(machine, dtype, &dims, &x, 0)?;
    let (buffer, y) = result(machine, dtype, n, 0)?;
    let size = dtype.size_bytes() as u64;
    let launch = rows::transpose_each(x.address, y, dims.map(|d| d as u64), size);
    machine.launch(&launch.expect("extents of a grid"))?;
    let want = cpu().transpose_each(&x.host)?;
    same(machine, "transposed", buffer, &want)
}

fn scatter(
    machine: &mut dyn Machine,
    (from, to): (DType, DType),
    sources: usize,
    c: usize,
) -> Result<()> {
    let rows = sources;
    let x = Operands::new(45).normal("x", sources * c, 1.0);
    let x = Twin::new(machine, from, &[sources, c], &x, 0)?;
    // Squares cluster at the front, so some rows are named often and others never.
    let index: Vec<i32> = indices("scatter", sources, rows)
        .into_iter()
        .map(|i| i * i / rows as i32)
        .collect();
    let groups = Groups::of(&index);
    let mut upload = |numbers: &[i32]| Ok::<_, anyhow::Error>(machine.upload(numbers)?.address);
    let at = Scatter {
        x: x.address,
        sources: upload(&groups.sources)?,
        starts: upload(&groups.starts)?,
        targets: upload(&groups.targets)?,
        y: Address::NULL,
    };
    let y = machine.upload(&vec![0u8; rows * c * to.size_bytes()])?;
    let at = Scatter { y: y.address, ..at };
    let count = groups.targets.len() as u64;
    let launch = rows::scatter_add_rows((from, to), &at, count, c as u64);
    machine.launch(&launch.expect("float dtypes"))?;
    let index = Twin::integers(machine, &[sources], &index)?;
    let want = cpu().scatter_add_rows(&x.host, &index.host, rows, to)?;
    same(machine, "scattered", y, &want)
}

fn columns(
    machine: &mut dyn Machine,
    (from, to): (DType, DType),
    [rows, c]: [usize; 2],
) -> Result<()> {
    let x = widened(from, &Operands::new(46).normal("x", rows * c, 1.0));
    let twin = Twin::new(machine, from, &[rows, c], &x, 0)?;
    let all = column_sums(machine, (from, to), &twin, &x, None, [rows, c]);
    all.context("all rows")?;
    // Every third row, from the last to the first.
    let named: Vec<i32> = (0..rows as i32).rev().step_by(3).collect();
    let some = column_sums(machine, (from, to), &twin, &x, Some(&named), [rows, c]);
    some.context("named rows")
}

fn column_sums(
    machine: &mut dyn Machine,
    (from, to): (DType, DType),
    twin: &Twin,
    x: &[f32],
    named: Option<&[i32]>,
    [rows, c]: [usize; 2],
) -> Result<()> {
    let (index, named) = match named {
        Some(named) => (machine.upload(named)?.address, named.to_vec()),
        None => (Address::NULL, (0..rows as i32).collect()),
    };
    let rows = named.len();
    let sizes = [rows as u64, c as u64];
    let workspace = rows::column_sum_workspace_bytes(sizes[0], sizes[1]);
    let workspace = machine.output::<u8>(workspace as usize)?;
    let (buffer, y) = result(machine, to, c, 0)?;
    let launches = rows::column_sum((from, to), twin.address, index, sizes, workspace.address, y);
    launch_all(machine, &launches.expect("extents of a grid"))?;
    let got = values(to, &machine.download::<u8>(buffer)?);
    for (column, got) in got.into_iter().enumerate() {
        let terms = || named.iter().map(|r| f64::from(x[*r as usize * c + column]));
        let (want, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
        let allowed = tolerance::column_sum(to, rows, want, size);
        let error = (f64::from(got) - want).abs();
        ensure!(
            error <= allowed,
            "column {column}: {got} instead of {want}, off by {error:e}, allowed {allowed:e}"
        );
    }
    Ok(())
}
