//! Grouped products: two layers over two row groups. They are compared with f64, and bit for bit with one product of
//! each group's gathered rows.

use anyhow::{Context, Result, ensure};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::grouped::{Group, Grouped, OfRows};
use kernels::cuda::ops::product::{Choice, Product, Term, Variant};
use kernels::cuda::ops::tile::Tile;
use kernels::cuda::ops::workspace::Workspace;

use super::operand::{Operand, decode, encode, launch_all};
use super::{Case, Effort};
use crate::machine::Machine;
use crate::random::Operands;
use crate::reference::{absolute, add_bias, matmul, transpose};
use crate::tolerance;

/// Shape of a grouped product.
#[derive(Clone, Copy, Debug)]
struct Shape {
    dtype: DType,
    /// Rows of both row groups.
    m: [usize; 2],
    n: usize,
    k: usize,
    bias: [bool; 2],
    /// Whether it computes dx instead of y.
    backward: bool,
    /// Ranks of the adapters whose terms enter the sums; 0 without an adapter.
    r: [usize; 2],
    /// Columns that `b` lacks, per row group. In `y` they are zeros.
    absent: [usize; 2],
}

/// Each variant with ragged tiles in both row groups; row groups without rows and with one row; sums over listed rows.
pub(super) fn cases(variants: &[Variant], effort: Effort) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, &(dtype, _, transpose, tile)) in variants.iter().enumerate() {
        let n = tile.n as usize - 3 + 11 * (i % 2);
        if transpose[0] {
            let (rows, parts) = ([100, 33, 1][i % 3], 1 + i as u32 % 3);
            let sizes = [tile.m as usize + 5, n];
            cases.push(Case::new(
                format!("sum over {rows} of 120 rows, {dtype}, {sizes:?}, {parts} parts, {tile:?}"),
                move |machine| check_sum(machine, dtype, sizes, [120, rows], tile, parts),
            ));
            continue;
        }
        let shape = Shape {
            dtype,
            m: [tile.m as usize + 9, 21 + i],
            n,
            k: [40, 72, 75][i % 3],
            bias: [i % 2 == 0, i % 3 == 0],
            backward: transpose[1],
            r: [0; 2],
            absent: [0; 2],
        };
        cases.push(grouped_case(shape, tile));
        // Ranks of a whole step of the sum, of several parts, and ranks that are no multiple of a copy.
        let adapted = Shape {
            r: [[16, 16], [40, 5], [5, 0], [0, 12]][i % 4],
            absent: [3 * (i % 2), 5 * (i % 3)],
            ..shape
        };
        cases.push(grouped_case(adapted, tile));
    }
    // The last forward variant has a small tile.
    let forward = |variant: &&Variant| variant.2 == [false, false];
    let of_rows = |variant: &&Variant| variant.2[0];
    let (Some(&(dtype, _, _, tile)), Some(&(sum_dtype, _, _, sum_tile))) = (
        variants.iter().rfind(forward),
        variants.iter().rfind(of_rows),
    ) else {
        return cases;
    };
    let (one, two) = (tile.m as usize, 2 * tile.m as usize);
    for m in [[0, 0], [0, 7], [two + 1, 0], [1, one], [one, 1], [two, one]] {
        let shape = Shape {
            dtype,
            m,
            n: 24,
            k: 56,
            bias: [true, false],
            backward: false,
            r: [4; 2],
            absent: [0; 2],
        };
        cases.push(grouped_case(shape, tile));
    }
    let sizes = [40, 24];
    cases.push(Case::new(
        format!("sum over no rows, {sum_dtype}"),
        move |machine| check_sum(machine, sum_dtype, sizes, [50, 0], sum_tile, 1),
    ));
    if effort == Effort::Gpu {
        let shape = Shape {
            dtype,
            m: [1300, 225],
            n: 520,
            k: 640,
            bias: [true; 2],
            backward: false,
            r: [50; 2],
            absent: [0; 2],
        };
        cases.extend(variants.iter().filter(forward).map(|variant| {
            let dtype = variant.0;
            grouped_case(Shape { dtype, ..shape }, variant.3)
        }));
    }
    cases
}

fn grouped_case(shape: Shape, tile: Tile) -> Case {
    Case::new(format!("routed {shape:?}, {tile:?}"), move |machine| {
        check_grouped(machine, shape, tile)
    })
}

/// Numbers below `t` in a scattered order.
pub(super) fn scattered(t: usize) -> Vec<i32> {
    let mut rows: Vec<i32> = (0..t as i32).collect();
    rows.sort_by_key(|row| (*row as u32).wrapping_mul(0x9e37_79b1));
    rows
}

/// Rows `rows` of a table whose rows have `c` values.
pub(super) fn gathered(table: &[f64], rows: &[i32], c: usize) -> Vec<f64> {
    rows.iter()
        .flat_map(|row| table[*row as usize * c..][..c].to_vec())
        .collect()
}

/// Each row of `low` values extended with zeros to `line` values.
fn padded(rows: &[f32], low: usize, line: usize) -> Vec<f32> {
    let rows = rows.chunks_exact(low.max(1));
    let zeros = std::iter::repeat_n(0.0, line - low);
    rows.flat_map(|row| row.iter().copied().chain(zeros.clone()))
        .collect()
}

/// Scales of the sums of a row group with an adapter.
const FACTORS: [f32; 2] = [0.25, 0.5];

impl Shape {
    /// Scale of a row group's sums.
    fn scale(&self, group: usize) -> f32 {
        match self.r[group] {
            0 => 1.0,
            _ => FACTORS[group],
        }
    }
}

/// `s [t, line]`. The first values of a row are as many as the rank of its row group, then zeros follow up to the next
/// multiple of 8. Nobody may read the random numbers after them, nor a row without an adapter.
fn low_rows(shape: Shape, rows: [&[i32]; 2], line: usize) -> Vec<u8> {
    let mut s = Operands::new(17).normal("s", (shape.m[0] + shape.m[1]) * line, 1.0);
    for (rows, r) in rows.into_iter().zip(shape.r) {
        for row in rows {
            s[*row as usize * line..][r..r.next_multiple_of(8)].fill(0.0);
        }
    }
    encode(shape.dtype, &s)
}

/// The first `r` of each row's `line` values.
fn gathered_columns(table: &[f64], line: usize, r: usize) -> Vec<f64> {
    let rows = table.chunks_exact(line.max(1));
    rows.flat_map(|row| row[..r].to_vec()).collect()
}

fn check_grouped(machine: &mut dyn Machine, shape: Shape, tile: Tile) -> Result<()> {
    let Shape { dtype, n, k, .. } = shape;
    let t = shape.m[0] + shape.m[1];
    let all = scattered(t);
    let rows = all.split_at(shape.m[0]);
    let a = Operand::draw(machine, dtype, "a", t * k, 1.0)?;
    let line = shape.r[0].max(shape.r[1]).next_multiple_of(16);
    let s = low_rows(shape, [rows.0, rows.1], line);
    let s_at = match line {
        0 => Address::NULL,
        _ => machine.upload(&s)?.address,
    };
    let s = decode(dtype, &s);
    let mut weights = Vec::new();
    for (i, rows) in [rows.0, rows.1].into_iter().enumerate() {
        let (r, b_rows) = (shape.r[i], n - shape.absent[i]);
        let b = Operand::draw(machine, dtype, &format!("b{i}"), b_rows * k, 1.0)?;
        let low_b = Operand::draw(machine, dtype, &format!("low{i}"), b_rows * r, 1.0)?;
        let bias = if shape.bias[i] { n } else { 0 };
        let bias = Operand::draw(machine, dtype, &format!("bias{i}"), bias, 1.0)?;
        let table = if rows.is_empty() {
            Address::NULL
        } else {
            machine.upload(rows)?.address
        };
        weights.push((b, bias, table, rows, low_b));
    }
    let groups = [0, 1].map(|i: usize| Group {
        rows: weights[i].2,
        m: weights[i].3.len(),
        b: weights[i].0.address(),
        b_rows: n - shape.absent[i],
        low_b: weights[i].4.address(),
        r: shape.r[i],
        bias: weights[i].1.address(),
        scale: shape.scale(i),
    });
    let mut runs = Vec::new();
    for _ in 0..2 {
        let y = machine.output::<u8>(t * n * dtype.size_bytes())?;
        let grouped = Grouped {
            dtype,
            transpose_b: shape.backward,
            t,
            n,
            k,
            a: a.address(),
            s: s_at,
            s_line: line,
            groups,
            y: y.address,
            y_line: n,
        };
        let mut count = Workspace::new(Address::NULL);
        grouped.launches(tile, 1, &mut count).context("no kernel")?;
        let space = machine.allocate(count.bytes() as usize)?;
        // With few multiprocessors a block walks the tiles in several groups.
        let launches = grouped.launches(tile, 1, &mut Workspace::new(space.address));
        launch_all(machine, &launches.context("no kernel")?)?;
        runs.push(machine.download::<u8>(y)?);
    }
    ensure!(runs[0] == runs[1], "two runs differ");
    let got = decode(dtype, &runs[0]);
    for (i, (b, bias, _, rows, low_b)) in weights.iter().enumerate() {
        let (r, b_rows, scale) = (shape.r[i], n - shape.absent[i], shape.scale(i));
        let own = gathered(&a.values, rows, k);
        let low = gathered(&s, rows, line);
        let low = gathered_columns(&low, line, r);
        // `[k, n]`, with zeros after the existing columns.
        let columns = |b: &[f64], k: usize| -> Vec<f64> {
            let columns = match shape.backward {
                true => b.to_vec(),
                false => transpose(b, b_rows, k),
            };
            let rows = columns.chunks_exact(b_rows);
            let zeros = std::iter::repeat_n(0.0, n - b_rows);
            rows.flat_map(|row| row.iter().copied().chain(zeros.clone()))
                .collect()
        };
        let (main, adapter) = (columns(&b.values, k), columns(&low_b.values, r));
        let m = rows.len();
        let both = |f: fn(&[f64]) -> Vec<f64>| -> Vec<f64> {
            let main = matmul(&f(&own), &f(&main), m, n, k);
            let adapter = matmul(&f(&low), &f(&adapter), m, n, r);
            let both = main.iter().zip(&adapter);
            both.map(|(x, y)| (x + y) * f64::from(scale)).collect()
        };
        let mut want = both(<[f64]>::to_vec);
        let mut size = both(absolute);
        if shape.bias[i] {
            add_bias(&mut want, &bias.values);
            add_bias(&mut size, &absolute(&bias.values));
        }
        let group = gathered(&got, rows, n);
        for (at, got) in group.iter().enumerate() {
            let allowed = tolerance::tensor_product(dtype, k + r, want[at], size[at]);
            ensure!(
                (got - want[at]).abs() <= allowed,
                "group {i}, row {}, column {}: {got} instead of {}, allowed {allowed:e}",
                at / n,
                at % n,
                want[at]
            );
        }
        let low: Vec<f32> = low.iter().map(|x| *x as f32).collect();
        let low = padded(&low, r, r.next_multiple_of(16));
        let alone = product_alone(machine, (shape, i), tile, (&own, &low), [b, low_b, bias])?;
        ensure!(group == alone, "group {i} alone gives other bits");
    }
    Ok(())
}

/// The values of one product over a row group's rows, gathered to consecutive ones.
fn product_alone(
    machine: &mut dyn Machine,
    (shape, group): (Shape, usize),
    tile: Tile,
    (rows, low): (&[f64], &[f32]),
    [b, low_b, bias]: [&Operand; 3],
) -> Result<Vec<f64>> {
    let Shape { dtype, n, k, .. } = shape;
    let (r, b_rows) = (shape.r[group], n - shape.absent[group]);
    let m = rows.len() / k;
    if m == 0 {
        return Ok(Vec::new());
    }
    let values: Vec<f32> = rows.iter().map(|x| *x as f32).collect();
    let a = machine.upload(&encode(dtype, &values))?;
    let y = machine.output::<u8>(m * n * dtype.size_bytes())?;
    let term = |a: Address, a_line: usize, b: &Operand, k: usize| Term {
        a,
        a_line,
        b: b.address(),
        b_line: if shape.backward { b_rows } else { k },
        k,
    };
    let adapter = match r {
        0 => None,
        _ => {
            let s = machine.upload(&encode(dtype, low))?.address;
            Some(term(s, r.next_multiple_of(16), low_b, r))
        }
    };
    let product = Product {
        dtype,
        out: dtype,
        transpose_a: false,
        transpose_b: shape.backward,
        m,
        n,
        b_rows,
        terms: [Some(term(a.address, k, b, k)), adapter],
        bias: bias.address(),
        scale: shape.scale(group),
        y: y.address,
        y_line: n,
    };
    let choice = Choice { tile, parts: 1 };
    let space = machine.allocate(product.workspace_bytes(choice) as usize)?;
    let launches = product.launches(choice, 1, &mut Workspace::new(space.address));
    launch_all(machine, &launches.context("no kernel")?)?;
    Ok(decode(dtype, &machine.download::<u8>(y)?))
}

fn check_sum(
    machine: &mut dyn Machine,
    dtype: DType,
    [m, n]: [usize; 2],
    [t, k]: [usize; 2],
    tile: Tile,
    parts: u32,
) -> Result<()> {
    let rows = &scattered(t)[..k];
    // With several parts, operands are rows of larger matrices, since adapter outputs are padded.
    let [a_line, b_line] = if parts > 1 { [m + 3, n + 8] } else { [m, n] };
    let a = Operand::draw(machine, dtype, "a", t * a_line, 1.0)?;
    let b = Operand::draw(machine, dtype, "b", t * b_line, 1.0)?;
    let table = if k == 0 {
        Address::NULL
    } else {
        machine.upload(rows)?.address
    };
    let y = machine.output::<u8>(m * n * 4)?;
    let product = OfRows {
        dtype,
        t,
        m,
        n,
        rows: table,
        k,
        a: a.address(),
        a_line,
        b: b.address(),
        b_line,
        y: y.address,
    };
    let choice = Choice { tile, parts };
    let mut count = Workspace::new(Address::NULL);
    product
        .launches(choice, 1, &mut count)
        .context("no kernel")?;
    let space = machine.allocate(count.bytes() as usize)?;
    let launches = product.launches(choice, 1, &mut Workspace::new(space.address));
    launch_all(machine, &launches.context("no kernel")?)?;
    let got = decode(DType::F32, &machine.download::<u8>(y)?);
    let front = |table: &[f64], line: usize, c: usize| -> Vec<f64> {
        let rows = table.chunks_exact(line);
        rows.flat_map(|row| row[..c].to_vec()).collect()
    };
    let rows_of_a = gathered(&front(&a.values, a_line, m), rows, m);
    let rows_of_a = transpose(&rows_of_a, k, m);
    let rows_of_b = gathered(&front(&b.values, b_line, n), rows, n);
    let want = matmul(&rows_of_a, &rows_of_b, m, n, k);
    let size = matmul(&absolute(&rows_of_a), &absolute(&rows_of_b), m, n, k);
    for (i, got) in got.into_iter().enumerate() {
        let allowed = tolerance::tensor_product(DType::F32, k, want[i], size[i]);
        ensure!(
            (got - want[i]).abs() <= allowed,
            "row {}, column {}: {got} instead of {}, allowed {allowed:e}",
            i / n,
            i % n,
            want[i]
        );
    }
    Ok(())
}
