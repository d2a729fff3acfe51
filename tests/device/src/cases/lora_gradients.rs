//! `ds` and `dB` from one pass over `dy`, compared with f64. With a list of rows the bits are also compared with a pass
//! over these rows alone.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::lora_gradients::LoraGradients;
use kernels::cuda::ops::workspace::Workspace;

use super::grouped::{gathered, scattered};
use super::layer::compare;
use super::operand::{Operand, decode, encode, launch_all};
use super::{Case, Effort};
use crate::machine::{Machine, POISON};
use crate::random::Operands;
use crate::reference::{absolute, matmul, transpose};

/// Every rank in both dtypes: one row, ragged tiles, several slices of columns and ranges of rows, consecutive and
/// listed rows.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let (bf16, f16) = (DType::BF16, DType::F16);
    let mut shapes = vec![
        (bf16, [1, 8, 1]),
        (bf16, [37, 520, 16]),
        (bf16, [290, 40, 5]),
        (bf16, [33, 136, 32]),
        (f16, [20, 72, 12]),
        (f16, [19, 528, 24]),
        (bf16, [37, 520, 64]),
        (bf16, [21, 40, 50]),
        (bf16, [300, 24, 33]),
        (f16, [18, 72, 48]),
    ];
    if effort == Effort::Gpu {
        shapes.extend([
            (bf16, [3000, 1152, 16]),
            (bf16, [1025, 4096, 31]),
            (bf16, [2049, 4096, 50]),
            (f16, [600, 1152, 64]),
        ]);
    }
    let mut cases: Vec<Case> = shapes
        .iter()
        .map(|(dtype, sizes)| {
            let (dtype, sizes @ [t, n, r]) = (*dtype, *sizes);
            let name = format!("ds and dB of {t} tokens, {n} features, rank {r}, {dtype}");
            Case::new(name, move |machine| check(machine, dtype, sizes, None))
        })
        .collect();
    // All rows in another order, and a part of more rows.
    for (i, (dtype, sizes)) in shapes.into_iter().enumerate() {
        let [t, n, r] = sizes;
        let all = t + [0, 1, 29][i % 3];
        let name = format!("ds and dB of {t} of {all} tokens, {n} features, rank {r}, {dtype}");
        cases.push(Case::new(name, move |machine| {
            check(machine, dtype, sizes, Some(all))
        }));
    }
    cases
}

/// Operands of a pass, and the positions of its rows.
struct Operation {
    dtype: DType,
    /// Summed rows, features, rank.
    sizes: [usize; 3],
    /// Number of all rows.
    all: usize,
    /// Elements from row to row of `s` and `ds`.
    line: usize,
    /// List of the summed rows; null for consecutive ones.
    rows: Address,
    dy: Address,
    s: Address,
    lora_b: Address,
}

const SCALE: f32 = 0.5;

/// Runs the pass twice, checks that the bytes agree, and returns those of `ds` `[all, line]` and `dB`.
fn run(machine: &mut dyn Machine, operation: &Operation) -> Result<[Vec<u8>; 2]> {
    let Operation {
        dtype,
        sizes: [t, n, r],
        all,
        line,
        ..
    } = *operation;
    let mut both = Vec::new();
    for _ in 0..2 {
        let ds = machine.output::<u8>(all * line * 2)?;
        let db = machine.output::<u8>(n * r * 4)?;
        let pass = LoraGradients {
            dtype,
            t,
            n,
            r,
            padded_rank: r.next_multiple_of(16),
            line,
            rows: operation.rows,
            dy: operation.dy,
            s: operation.s,
            lora_b: operation.lora_b,
            scale: SCALE,
            ds: ds.address,
            d_lora_b: db.address,
        };
        ensure!(pass.fits(), "one pass is not possible");
        let mut count = Workspace::new(Address::NULL);
        pass.launches(&mut count).context("no kernel")?;
        let space = machine.allocate(count.bytes() as usize)?;
        let launches = pass.launches(&mut Workspace::new(space.address));
        launch_all(machine, &launches.context("no kernel")?)?;
        both.push([machine.download::<u8>(ds)?, machine.download::<u8>(db)?]);
    }
    ensure!(both[0] == both[1], "two runs differ");
    Ok(both.swap_remove(0))
}

/// The first `c` bytes of each listed row, where rows are `line` bytes apart.
fn picked(bytes: &[u8], rows: &[i32], [c, line]: [usize; 2]) -> Vec<u8> {
    let rows = rows.iter().map(|row| &bytes[*row as usize * line..][..c]);
    rows.flatten().copied().collect()
}

/// Checks a pass. With `rows` it sums a list out of so many rows, otherwise consecutive rows.
fn check(
    machine: &mut dyn Machine,
    dtype: DType,
    sizes: [usize; 3],
    rows: Option<usize>,
) -> Result<()> {
    let [t, n, r] = sizes;
    let rank = r.next_multiple_of(16);
    let all = rows.unwrap_or(t);
    // With a list, the columns of another layer follow.
    let line = rank + rows.map_or(0, |_| 16);
    let dy = Operand::draw(machine, dtype, "dy", all * n, 1.0)?;
    let lora_b = Operand::draw(machine, dtype, "lora_b", n * r, 0.5)?;
    // Columns after the rank are zeros.
    let mut s = Operands::new(12).normal("s", all * line, 1.0);
    for row in s.chunks_exact_mut(line) {
        row[r..rank].fill(0.0);
    }
    let s = encode(dtype, &s);
    let mut table: Vec<i32> = (0..t as i32).collect();
    let mut list = Address::NULL;
    if rows.is_some() {
        table = scattered(all)[..t].to_vec();
        list = machine.upload(&table)?.address;
    }
    let operation = Operation {
        dtype,
        sizes,
        all,
        line,
        rows: list,
        dy: dy.address(),
        s: machine.upload(&s)?.address,
        lora_b: lora_b.address(),
    };
    let [ds, db] = run(machine, &operation)?;
    let own_ds = picked(&ds, &table, [rank * 2, line * 2]);
    let own_s = picked(&s, &table, [rank * 2, line * 2]);
    let own_dy = gathered(&dy.values, &table, n);
    if rows.is_some() {
        let written = table.iter().map(|row| *row as usize);
        let written: BTreeSet<usize> = written.collect();
        for (row, ds) in ds.chunks_exact(line * 2).enumerate() {
            let kept = if written.contains(&row) {
                &ds[rank * 2..]
            } else {
                ds
            };
            ensure!(
                kept.iter().all(|byte| *byte == POISON),
                "row {row} of ds was written outside its place"
            );
        }
        let values: Vec<f32> = own_dy.iter().map(|x| *x as f32).collect();
        let behind_each_other = Operation {
            all: t,
            line: rank,
            rows: Address::NULL,
            dy: machine.upload(&encode(dtype, &values))?.address,
            s: machine.upload(&own_s)?.address,
            ..operation
        };
        let alone = run(machine, &behind_each_other)?;
        ensure!(
            alone == [own_ds.clone(), db.clone()],
            "the rows alone give other bits"
        );
    }

    // As wide as the rows of `ds`, with zeros after the rank.
    let wide: Vec<f64> = lora_b
        .values
        .chunks_exact(r)
        .flat_map(|row| {
            row.iter()
                .copied()
                .chain(std::iter::repeat_n(0.0, rank - r))
        })
        .collect();
    let factor = f64::from(SCALE);
    let scaled = |x: Vec<f64>| -> Vec<f64> { x.into_iter().map(|x| x * factor).collect() };
    let want = scaled(matmul(&own_dy, &wide, t, rank, n));
    let size = scaled(matmul(&absolute(&own_dy), &absolute(&wide), t, rank, n));
    let none = vec![0.0; (t * rank).max(n * r)];
    compare("ds", (dtype, &own_ds), &want, n, &size, &none)?;

    let s: Vec<f64> = decode(dtype, &own_s)
        .chunks_exact(rank)
        .flat_map(|row| row[..r].to_vec())
        .collect();
    let columns = transpose(&own_dy, t, n);
    let want = matmul(&columns, &s, n, r, t);
    let size = matmul(&absolute(&columns), &absolute(&s), n, r, t);
    compare("dB", (DType::F32, &db), &want, t, &size, &none)
}
