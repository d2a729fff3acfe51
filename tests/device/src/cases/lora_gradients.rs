//! `ds` and `dB` in one pass over `dy`, against f64.

use anyhow::{Context, Result};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::lora_gradients::LoraGradients;
use kernels::cuda::ops::workspace::Workspace;

use super::layer::compare;
use super::operand::{Operand, decode, encode, launch_all};
use super::{Case, Effort};
use crate::machine::Machine;
use crate::random::Operands;
use crate::reference::{absolute, matmul, transpose};

/// Every rank in both dtypes: one row, ragged tiles, several slices of columns and ranges of rows.
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
    let case = |(dtype, sizes): (DType, [usize; 3])| {
        let [t, n, r] = sizes;
        let name = format!("ds and dB of {t} tokens, {n} features, rank {r}, {dtype}");
        Case::new(name, move |machine| check(machine, dtype, sizes))
    };
    shapes.into_iter().map(case).collect()
}

fn check(machine: &mut dyn Machine, dtype: DType, [t, n, r]: [usize; 3]) -> Result<()> {
    let rank = r.next_multiple_of(16);
    let scale = 0.5f32;
    let dy = Operand::draw(machine, dtype, "dy", t * n, 1.0)?;
    let lora_b = Operand::draw(machine, dtype, "lora_b", n * r, 0.5)?;
    // Columns behind the rank are zeros.
    let mut s = Operands::new(12).normal("s", t * rank, 1.0);
    for row in s.chunks_exact_mut(rank) {
        row[r..].fill(0.0);
    }
    let s = encode(dtype, &s);
    let s_at = machine.upload(&s)?.address;
    let mut all = Vec::new();
    for _ in 0..2 {
        let ds = machine.output::<u8>(t * rank * 2)?;
        let db = machine.output::<u8>(n * r * 4)?;
        let pass = LoraGradients {
            dtype,
            t,
            n,
            r,
            padded_rank: rank,
            line: rank,
            dy: dy.address(),
            s: s_at,
            lora_b: lora_b.address(),
            scale,
            ds: ds.address,
            d_lora_b: db.address,
        };
        anyhow::ensure!(pass.fits(), "one pass is not possible");
        let mut count = Workspace::new(Address::NULL);
        pass.launches(&mut count).context("no kernel")?;
        let space = machine.allocate(count.bytes() as usize)?;
        let launches = pass.launches(&mut Workspace::new(space.address));
        launch_all(machine, &launches.context("no kernel")?)?;
        all.push([machine.download::<u8>(ds)?, machine.download::<u8>(db)?]);
    }
    anyhow::ensure!(all[0] == all[1], "two runs differ");

    // As wide as the rows of ds: zeros behind the rank.
    let wide: Vec<f64> = lora_b
        .values
        .chunks_exact(r)
        .flat_map(|row| {
            row.iter()
                .copied()
                .chain(std::iter::repeat_n(0.0, rank - r))
        })
        .collect();
    let factor = f64::from(scale);
    let scaled = |x: Vec<f64>| -> Vec<f64> { x.into_iter().map(|x| x * factor).collect() };
    let want = scaled(matmul(&dy.values, &wide, t, rank, n));
    let size = scaled(matmul(&absolute(&dy.values), &absolute(&wide), t, rank, n));
    let none = vec![0.0; (t * rank).max(n * r)];
    compare("ds", (dtype, &all[0][0]), &want, n, &size, &none)?;

    let s: Vec<f64> = decode(dtype, &s)
        .chunks_exact(rank)
        .flat_map(|row| row[..r].to_vec())
        .collect();
    let columns = transpose(&dy.values, t, n);
    let want = matmul(&columns, &s, n, r, t);
    let size = matmul(&absolute(&columns), &absolute(&s), n, r, t);
    compare("dB", (DType::F32, &all[0][1]), &want, t, &size, &none)
}
