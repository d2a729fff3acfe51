//! Cross entropy: the CPU's bits, except for the last bit of a loss, where the device's logarithm may round
//! differently.

use anyhow::{Context, Result, ensure};
use kernels::cuda::ops::loss::{self, RUNNING_BYTES, Tile};
use kernels::{Backend, DType, LossNeeds, Shape, Tag};

use super::host::cpu;
use super::{Case, Effort};
use crate::machine::Machine;
use crate::numbers::{values, widened};
use crate::random::Operands;
use crate::tolerance;

/// Vocabularies below, at and above one stretch, whole and in tiles.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let rows = match effort {
        Effort::Emulated => 5,
        Effort::Gpu => 700,
    };
    let mut cases = Vec::new();
    for out in [DType::F32, DType::BF16, DType::F16] {
        for (v, cols) in [
            (7, 7),
            (1024, 1024),
            (1500, 1500),
            (1500, 700),
            (9001, 9001),
        ] {
            let name = format!("{rows} rows, vocabulary {v} in tiles of {cols}, gradients {out}");
            cases.push(Case::new(name, move |machine| {
                check(machine, rows, [v, cols], out)
            }));
        }
    }
    cases
}

fn check(machine: &mut dyn Machine, rows: usize, [v, cols]: [usize; 2], out: DType) -> Result<()> {
    const FACTOR: f32 = 0.125;
    let mut logits = Operands::new(51).normal("logits", rows * v, 3.0);
    // A row with one dominant logit, and one with equal logits.
    logits[v / 2] = 90.0;
    logits[v..2 * v].fill(-5.0);
    let labels: Vec<i32> = (0..rows).map(|r| ((r * 37 + v - 1) % v) as i32).collect();
    let label_buffer = machine.upload(&labels)?;
    let running = machine.output::<u8>(rows * RUNNING_BYTES as usize)?;
    let tiles: Vec<(usize, usize)> = (0..v)
        .step_by(cols)
        .map(|first| (first, cols.min(v - first)))
        .collect();
    let mut at = Vec::new();
    for &(first, count) in &tiles {
        let part: Vec<f32> = (0..rows)
            .flat_map(|r| logits[r * v + first..][..count].iter().copied())
            .collect();
        at.push(Tile {
            logits: machine.upload(&part)?.address,
            labels: label_buffer.address,
            running: running.address,
            rows: rows as u32,
            cols: count as u32,
            first: first as u32,
        });
    }
    for tile in &at {
        machine.launch(&loss::statistics(tile).expect("extents of a grid"))?;
    }
    // Losses go to every second row. The other rows are not supervised.
    let rows_of: Vec<i32> = (0..rows as i32).map(|r| 2 * r + 1).collect();
    let (rows_of, losses) = (
        machine.upload(&rows_of)?,
        machine.upload(&vec![0.0f32; 2 * rows + 1])?,
    );
    let launch = loss::losses(
        running.address,
        rows_of.address,
        losses.address,
        rows as u32,
    );
    machine.launch(&launch.expect("rows of a grid"))?;
    let want = reference(rows, v, &logits, &labels, FACTOR)?;
    let whole = cols == v;
    let got = machine.download::<f32>(losses)?;
    for (i, got) in got.into_iter().enumerate() {
        let want = if i % 2 == 1 { want.losses[i / 2] } else { 0.0 };
        let allowed = tolerance::loss(f64::from(want), 90.0);
        let error = f64::from((got - want).abs());
        let fits = if whole {
            tolerance::neighbours(got, want)
        } else {
            error <= allowed
        };
        ensure!(fits, "loss {i}: {got:e} instead of {want:e}");
    }
    let rounded = widened(out, &want.gradients);
    for (tile, &(first, count)) in at.iter().zip(&tiles) {
        let line = count.next_multiple_of(8);
        let y = machine.output::<u8>(rows * line * out.size_bytes())?;
        let launch = loss::gradients(tile, out, y.address, line as u32, FACTOR);
        machine.launch(&launch.expect("float dtypes"))?;
        let got = values(out, &machine.download::<u8>(y)?);
        for (i, got) in got.into_iter().enumerate() {
            if i % line >= count {
                ensure!(got == 0.0, "{got:e} behind the end of row {}", i / line);
                continue;
            }
            let (row, column) = (i / line, i % line + first);
            let want = rounded[row * v + column];
            let at_label = labels[row] as usize == column;
            let share = f64::from(want.abs()) + if at_label { f64::from(FACTOR) } else { 0.0 };
            let allowed = tolerance::softmax_gradient(out, f64::from(want), share, 90.0);
            let error = f64::from((got - want).abs());
            // On one tile the sums are the CPU's. On several tiles the f64 sums cover other stretches.
            let fits = if whole {
                got.to_bits() == want.to_bits()
            } else {
                error <= allowed
            };
            ensure!(
                fits,
                "row {row}, column {column}: {got:e} instead of {want:e}, allowed {allowed:e}"
            );
        }
    }
    Ok(())
}

struct Reference {
    losses: Vec<f32>,
    /// Gradients of the logits, `[rows, v]`.
    gradients: Vec<f32>,
}

/// The loss on the CPU with the identity as hidden states and the logits as weight. Every product is then exact, and
/// the weight gradients are those of the logits.
fn reference(
    rows: usize,
    v: usize,
    logits: &[f32],
    labels: &[i32],
    factor: f32,
) -> Result<Reference> {
    let cpu = cpu();
    let tensor = |values: &[f32], dims: &[usize]| {
        let bytes = bytemuck::cast_slice(values);
        cpu.upload(bytes, Shape::new(dims), DType::F32, Tag::Activations)
    };
    let identity: Vec<f32> = (0..rows * rows)
        .map(|i| if i / rows == i % rows { 1.0 } else { 0.0 })
        .collect();
    let columns: Vec<f32> = (0..v * rows)
        .map(|i| logits[i % rows * v + i / rows])
        .collect();
    let labels = bytemuck::cast_slice(labels);
    let labels = cpu.upload(labels, Shape::new(&[rows]), DType::I32, Tag::Activations)?;
    let need = LossNeeds {
        hidden: false,
        weight: true,
    };
    let grads = cpu.linear_cross_entropy_backward(
        &tensor(&identity, &[rows, rows])?,
        &tensor(&columns, &[v, rows])?,
        &labels,
        factor,
        need,
    )?;
    let of_columns = grads.d_weight.context("it was asked for")?.to_f32_vec()?;
    Ok(Reference {
        losses: grads.losses.to_f32_vec()?,
        gradients: (0..rows * v)
            .map(|i| of_columns[i % v * rows + i / v])
            .collect(),
    })
}
