//! Copies and sums around products: bit-equal, since the order of the sums is fixed. Rows of sums are written in order
//! or to the rows of a list.

use anyhow::{Result, ensure};
use half::bf16;
use kernels::DType;
use kernels::cuda::launch::{Address, Arg, Launch};
use kernels::cuda::ops::product::parts_module;

use super::operand::{Operand, decode, encode};
use super::{Case, Effort};
use crate::machine::Machine;
use crate::random::Operands;

/// Rows shorter and longer than 16 bytes; sums of one part and of several.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let rows = match effort {
        Effort::Emulated => 300,
        Effort::Gpu => 300_000,
    };
    let pads = [(1, 8), (7, 8), (9, 16), (588, 592)]
        .into_iter()
        .map(move |(from, to)| {
            let name = format!("pad {rows} lines of {from} to {to}");
            Case::new(name, move |machine| check_pad(machine, rows, from, to))
        });
    let dtypes = [
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F32),
        (DType::F32, DType::F32),
    ];
    let sums = dtypes
        .into_iter()
        .zip([(1, false), (2, true), (5, false), (4, true), (3, true)])
        .map(move |((dtype, out), (parts, named))| {
            let to = if named { "named rows" } else { "rows" };
            let name = format!("sum {parts} parts of {rows} rows to {to} of {out}");
            Case::new(name, move |machine| {
                check_sum(machine, (rows, named), parts, dtype, out)
            })
        });
    pads.chain(sums).collect()
}

/// A grid in which each thread makes several rounds.
const GRID: [u32; 3] = [3, 1, 1];

fn check_pad(machine: &mut dyn Machine, lines: usize, from: usize, to: usize) -> Result<()> {
    let values = Operands::new(5).normal("x", lines * from, 1.0);
    let x: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
    let (source, target) = (machine.upload(&x)?, machine.output::<bf16>(lines * to)?);
    let module = parts_module(DType::BF16, DType::BF16);
    machine.launch(&Launch {
        module: module.expect("float dtypes"),
        kernel: "pad_lines",
        grid: GRID,
        threads: 256,
        shared_bytes: 0,
        args: vec![
            Arg::Address(source.address),
            Arg::Address(target.address),
            Arg::U64(lines as u64),
            Arg::I32(from as i32),
            Arg::I32(to as i32),
        ],
    })?;
    let got = machine.download::<u16>(target)?;
    for (i, got) in got.into_iter().enumerate() {
        let (line, column) = (i / to, i % to);
        let want = if column < from {
            x[line * from + column].to_bits()
        } else {
            0
        };
        ensure!(got == want, "line {line}, column {column}");
    }
    Ok(())
}

fn check_sum(
    machine: &mut dyn Machine,
    (m, named): (usize, bool),
    parts: usize,
    dtype: DType,
    out: DType,
) -> Result<()> {
    let (n, line, scale) = (13, 15, 0.3f32);
    // In reverse, every second row of a larger result.
    let lines = if named { 2 * m } else { m };
    let place = |row: usize| if named { 2 * (m - 1 - row) } else { row };
    let rows: Vec<i32> = (0..m).map(|row| place(row) as i32).collect();
    let rows = match named {
        true => machine.upload(&rows)?.address,
        false => Address::NULL,
    };
    let partial = Operands::new(7).normal("parts", parts * m * n, 1.0);
    let bias = Operand::draw(machine, dtype, "bias", n, 1.0)?;
    let source = machine.upload(&partial)?;
    let target = machine.output::<u8>(lines * line * out.size_bytes())?;
    machine.launch(&Launch {
        module: parts_module(dtype, out).expect("float dtypes"),
        kernel: "sum_parts",
        grid: GRID,
        threads: 256,
        shared_bytes: 0,
        args: vec![
            Arg::Address(source.address),
            Arg::I32(parts as i32),
            Arg::U64(m as u64),
            Arg::U64(n as u64),
            Arg::Address(bias.address()),
            Arg::F32(scale),
            Arg::Address(target.address),
            Arg::U64(line as u64),
            Arg::Address(rows),
        ],
    })?;
    let got = decode(out, &machine.download::<u8>(target)?);
    for row in 0..m {
        let got = &got[place(row) * line..][..line];
        for (column, got) in got[..n].iter().enumerate() {
            let at = |part: usize| partial[(part * m + row) * n + column];
            let sum = (1..parts).fold(at(0), |sum, part| sum + at(part));
            let want = sum.mul_add(scale, bias.values[column] as f32);
            let want = decode(out, &encode(out, &[want]))[0];
            ensure!(
                *got == want,
                "row {row}, column {column}: {got} instead of {want}"
            );
        }
        ensure!(
            got[n..].iter().all(|x| x.is_nan()),
            "row {row} was written past its end"
        );
    }
    for (at, got) in got.chunks_exact(line).enumerate() {
        let others = !named || at % 2 == 0 || got.iter().all(|x| x.is_nan());
        ensure!(others, "row {at}, which is not named, was written");
    }
    Ok(())
}
