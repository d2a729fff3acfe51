//! RMS norm and layer norm, compared with f64.

use anyhow::{Result, ensure};
use kernels::cuda::launch::Address;
use kernels::cuda::ops::norm::{self, Backward, Forward, Kind, Shape};
use kernels::cuda::ops::pointwise::{self, RopeShape};
use kernels::{DType, Direction, RopeLayout};

use super::{Case, Effort};
use crate::machine::{Buffer, Machine};
use crate::numbers::{bytes, first_difference, values, widened};
use crate::random::Operands;
use crate::reference;
use crate::tolerance::{self, NormRow};

const DTYPES: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::BF16, DType::F32),
    (DType::F16, DType::F16),
    (DType::F16, DType::F32),
];
const EPS: f32 = 1e-6;

/// Sizes around chunks and warps in all dtypes. Larger sizes in two dtypes fill the registers or loop over blocks.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let small = [(1, 8), (3, 1), (5, 72), (4, 100), (17, 264), (3, 1032)];
    let large: &[_] = match effort {
        // The last two have more rows than backward has row groups.
        Effort::Emulated => &[(2, 4104), (1, 8200), (2200, 8), (280, 9)],
        Effort::Gpu => &[
            (3000, 1152),
            (2048, 4096),
            (600, 8192),
            (300, 16384),
            (70_000, 64),
            (700, 4097),
        ],
    };
    let mut cases = Vec::new();
    for kind in [Kind::Rms, Kind::Layer] {
        let mut add = |dtype: DType, weight_dtype: DType, (rows, c): (usize, usize), extra| {
            let shape = Shape {
                kind,
                dtype,
                weight_dtype,
                rows: rows as u64,
                c: c as u32,
                eps: EPS,
            };
            let residual = if extra { " with a residual" } else { "" };
            let name = format!("norm {kind:?} {dtype}/{weight_dtype} [{rows}, {c}]{residual}");
            cases.push(Case::new(name, move |machine| check(machine, shape, extra)));
        };
        for (dtype, weight_dtype) in DTYPES {
            for size in small {
                add(dtype, weight_dtype, size, false);
                add(dtype, weight_dtype, size, true);
            }
            // Rows of 16-bit elements that have their own kernel in every module.
            add(dtype, weight_dtype, (1, 16384), dtype != DType::F32);
        }
        for &size in large {
            add(DType::BF16, DType::F32, size, true);
            add(DType::F32, DType::F32, size, false);
        }
        if kind == Kind::Rms {
            cases.extend(heads());
        }
        let name = format!("norm {kind:?}, unaligned rows");
        cases.push(Case::new(name, move |machine| {
            check_unaligned(machine, kind)
        }));
    }
    cases
}

/// Heads that are normalized and rotated at once: whole, half, and with elements that do not rotate.
fn heads() -> Vec<Case> {
    let sizes = [
        [5, 3, 128, 64],
        [9, 2, 64, 16],
        [3, 1, 48, 24],
        [2, 2, 8, 4],
        [2, 5, 256, 128],
    ];
    let layouts = [RopeLayout::HalfSplit, RopeLayout::Interleaved];
    let mut cases = Vec::new();
    for (dtype, weight_dtype) in DTYPES {
        for (size, layout) in sizes.into_iter().flat_map(|s| layouts.map(|l| (s, l))) {
            let name = format!("norm of heads {dtype}/{weight_dtype} {size:?}, rotated {layout:?}");
            cases.push(Case::new(name, move |machine| {
                check_rotated(machine, [dtype, weight_dtype], size, layout)
            }));
        }
    }
    cases
}

/// The bits of a norm and a rotation, one after the other.
fn check_rotated(
    machine: &mut dyn Machine,
    [dtype, weight_dtype]: [DType; 2],
    [tokens, heads, d, w]: [usize; 4],
    layout: RopeLayout,
) -> Result<()> {
    let shape = Shape {
        kind: Kind::Rms,
        dtype,
        weight_dtype,
        rows: (tokens * heads) as u64,
        c: d as u32,
        eps: EPS,
    };
    let elements = tokens * heads * d;
    let mut draw = |name, n, dtype| {
        let values = Operands::new(6).normal(name, n, 1.0);
        machine.upload(&bytes(dtype, &values)).map(|b| b.address)
    };
    let x = draw("x", elements, dtype)?;
    let weight = draw("weight", d, weight_dtype)?;
    let cos = draw("cos", tokens * w, DType::F32)?;
    let sin = draw("sin", tokens * w, DType::F32)?;
    let size = elements * dtype.size_bytes();
    let [normed, turned, fused] = [
        machine.output::<u8>(size)?,
        machine.output::<u8>(size)?,
        machine.output::<u8>(size)?,
    ];
    let first = Forward {
        x,
        residual: Address::NULL,
        sum: Address::NULL,
        weight,
        bias: Address::NULL,
        y: normed.address,
    };
    let rotated = norm::Rotated {
        x,
        weight,
        cos,
        sin,
        y: fused.address,
    };
    let angles = RopeShape {
        tokens: tokens as u64,
        heads: heads as u32,
        d: d as u32,
        w: w as u32,
    };
    let from = [normed.address, cos, sin, turned.address];
    let sizes = [heads as u32, w as u32];
    for launch in [
        norm::forward(&shape, &first),
        pointwise::rope(dtype, from, angles, layout, Direction::Forward),
        norm::rotated(&shape, &rotated, sizes, layout),
    ] {
        machine.launch(&launch.expect("sizes that go together"))?;
    }
    let [want, got] = [
        machine.download::<u8>(turned)?,
        machine.download::<u8>(fused)?,
    ];
    let at = want.iter().zip(&got).position(|(want, got)| want != got);
    ensure!(at.is_none(), "other bits at byte {at:?}");
    Ok(())
}

/// Inputs of a norm, with a different mean and scale in every row.
struct Drawn {
    shape: Shape,
    /// The addend of the residual stream, or the input alone.
    x: Vec<f32>,
    residual: Option<Vec<f32>>,
    /// The input of the norm: `x`, or the rounded sum of `x` and `residual`.
    sum: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
    d_sum: Option<Vec<f32>>,
}

impl Drawn {
    fn new(shape: Shape, extra: bool) -> Self {
        let (rows, c) = (shape.rows as usize, shape.c as usize);
        let draw = |name, n, dtype, scale| widened(dtype, &Operands::new(4).normal(name, n, scale));
        let mut x = draw("x", rows * c, DType::F32, 1.0);
        for (r, row) in x.chunks_exact_mut(c).enumerate() {
            let (scale, mean) = ([1.0, 0.01, 30.0][r % 3], [0.0, 0.02, -40.0, 0.5][r % 4]);
            row.iter_mut().for_each(|x| *x = *x * scale + mean);
        }
        let x = widened(shape.dtype, &x);
        let residual = extra.then(|| draw("residual", rows * c, shape.dtype, 1.0));
        let sum = match &residual {
            Some(residual) => {
                let sums = x.iter().zip(residual).map(|(x, r)| x + r);
                widened(shape.dtype, &sums.collect::<Vec<_>>())
            }
            None => x.clone(),
        };
        Self {
            shape,
            sum,
            x,
            residual,
            weight: draw("weight", c, shape.weight_dtype, 1.0),
            bias: draw("bias", c, shape.weight_dtype, 1.0),
            dy: draw("dy", rows * c, shape.dtype, 1.0),
            d_sum: extra.then(|| draw("d_sum", rows * c, shape.dtype, 1.0)),
        }
    }

    fn layer(&self) -> bool {
        self.shape.kind == Kind::Layer
    }

    /// Error bounds and normalized elements of every row.
    fn rows(&self) -> Vec<(NormRow, Vec<f64>)> {
        let c = self.shape.c as usize;
        let eps = f64::from(EPS);
        let row = |row: &[f32]| {
            let row = wide(row);
            let (mean, scale) = reference::statistics(&row, eps, self.layer());
            let cancel = match self.layer() {
                true => scale / reference::statistics(&row, eps, false).1,
                false => 0.0,
            };
            let normal = row.iter().map(|x| (x - mean) * scale).collect();
            (NormRow::new(c, scale, cancel), normal)
        };
        self.sum.chunks_exact(c).map(row).collect()
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

fn close(what: &str, got: &[f32], want: &[f64], allowed: impl Fn(usize) -> f64) -> Result<()> {
    ensure!(got.len() == want.len(), "{what}: {} elements", got.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let (error, allowed) = ((f64::from(*got) - want).abs(), allowed(i));
        ensure!(
            error <= allowed,
            "{what}[{i}]: {got} instead of {want}, off by {error:e}, allowed {allowed:e}"
        );
    }
    Ok(())
}

fn check(machine: &mut dyn Machine, shape: Shape, extra: bool) -> Result<()> {
    let drawn = Drawn::new(shape, extra);
    let rows = drawn.rows();
    check_forward(machine, &drawn, &rows)?;
    check_backward(machine, &drawn, &rows)
}

fn optional(machine: &mut dyn Machine, dtype: DType, values: Option<&[f32]>) -> Result<Address> {
    Ok(match values {
        Some(values) => machine.upload(&bytes(dtype, values))?.address,
        None => Address::NULL,
    })
}

fn check_forward(
    machine: &mut dyn Machine,
    drawn: &Drawn,
    rows: &[(NormRow, Vec<f64>)],
) -> Result<()> {
    let Shape {
        dtype,
        weight_dtype,
        ..
    } = drawn.shape;
    let c = drawn.shape.c as usize;
    let size = drawn.x.len() * dtype.size_bytes();
    let (y, sum) = (machine.output::<u8>(size)?, machine.output::<u8>(size)?);
    let bias = drawn.layer().then_some(&drawn.bias[..]);
    let at = Forward {
        x: machine.upload(&bytes(dtype, &drawn.x))?.address,
        residual: optional(machine, dtype, drawn.residual.as_deref())?,
        sum: drawn
            .residual
            .as_ref()
            .map_or(Address::NULL, |_| sum.address),
        weight: machine.upload(&bytes(weight_dtype, &drawn.weight))?.address,
        bias: optional(machine, weight_dtype, bias)?,
        y: y.address,
    };
    machine.launch(&norm::forward(&drawn.shape, &at).expect("dtypes that go together"))?;
    if drawn.residual.is_some() {
        let got = values(dtype, &machine.download::<u8>(sum)?);
        let at = first_difference(&got, &drawn.sum);
        ensure!(at.is_none(), "the sum with the residual differs at {at:?}");
    }
    let got = values(dtype, &machine.download::<u8>(y)?);
    let (weight, bias) = (wide(&drawn.weight), bias.map(wide));
    let elements = || {
        rows.iter()
            .flat_map(|(row, normal)| normal.iter().map(|n| (*row, *n)))
    };
    // RMS norm rounds the normalized element.
    let normals: Vec<[f64; 2]> = match drawn.layer() {
        true => elements().map(|(row, n)| [n, row.normal(n)]).collect(),
        false => elements().map(|(row, n)| row.rounded(dtype, n)).collect(),
    };
    let bias = |i: usize| bias.as_ref().map_or(0.0, |b| b[i % c]);
    let values = normals.iter().enumerate();
    let want: Vec<f64> = values
        .map(|(i, [n, _])| n * weight[i % c] + bias(i))
        .collect();
    close("y", &got, &want, |i| {
        NormRow::value(dtype, normals[i], weight[i % c], bias(i))
    })
}

struct Gradients {
    dx: Vec<f32>,
    d_weight: Vec<f32>,
    d_bias: Option<Vec<f32>>,
}

fn run_backward(machine: &mut dyn Machine, drawn: &Drawn) -> Result<Gradients> {
    let Shape {
        dtype,
        weight_dtype,
        ..
    } = drawn.shape;
    let c = drawn.shape.c as usize;
    let dx = machine.output::<u8>(drawn.x.len() * dtype.size_bytes())?;
    let [d_weight, d_bias] = [machine.output::<f32>(c)?, machine.output::<f32>(c)?];
    let workspace = machine.output::<u8>(norm::workspace_bytes(&drawn.shape) as usize)?;
    let at = Backward {
        x: machine.upload(&bytes(dtype, &drawn.sum))?.address,
        weight: machine.upload(&bytes(weight_dtype, &drawn.weight))?.address,
        dy: machine.upload(&bytes(dtype, &drawn.dy))?.address,
        d_sum: optional(machine, dtype, drawn.d_sum.as_deref())?,
        dx: dx.address,
        d_weight: d_weight.address,
        d_bias: if drawn.layer() {
            d_bias.address
        } else {
            Address::NULL
        },
        workspace: workspace.address,
    };
    for launch in norm::backward(&drawn.shape, &at).expect("dtypes that go together") {
        machine.launch(&launch)?;
    }
    let mut read = |buffer: Buffer| machine.download::<f32>(buffer);
    Ok(Gradients {
        d_weight: read(d_weight)?,
        d_bias: drawn.layer().then(|| read(d_bias)).transpose()?,
        dx: values(dtype, &machine.download::<u8>(dx)?),
    })
}

fn check_backward(
    machine: &mut dyn Machine,
    drawn: &Drawn,
    rows: &[(NormRow, Vec<f64>)],
) -> Result<()> {
    let got = run_backward(machine, drawn)?;
    let (dtype, c) = (drawn.shape.dtype, drawn.shape.c as usize);
    let (x, weight, dy) = (wide(&drawn.sum), wide(&drawn.weight), wide(&drawn.dy));
    let (mut dx, mut dw, db) =
        reference::norm_backward(&x, &weight, &dy, EPS.into(), drawn.layer());
    if let Some(d_sum) = &drawn.d_sum {
        dx = reference::add(&dx, &wide(d_sum), 1.0);
    }
    // Magnitudes of the row means, and terms of the parameter gradients over rows.
    let mut sizes = Vec::with_capacity(rows.len());
    if !drawn.layer() {
        dw.fill(0.0);
    }
    let (mut terms, mut errors, mut dy_sizes) = (vec![0.0; c], vec![0.0; c], vec![0.0; c]);
    for ((row, normal), dy) in rows.iter().zip(dy.chunks_exact(c)) {
        let mean = |of: &dyn Fn(usize) -> f64| (0..c).map(of).sum::<f64>() / c as f64;
        let mean_g = match drawn.layer() {
            true => mean(&|j| (dy[j] * weight[j]).abs()),
            false => 0.0,
        };
        let gx = mean(&|j| dy[j] * weight[j] * normal[j]);
        let gx_size = mean(&|j| (dy[j] * weight[j] * normal[j]).abs());
        sizes.push([mean_g, gx_size, gx]);
        for j in 0..c {
            terms[j] += (dy[j] * normal[j]).abs();
            dy_sizes[j] += dy[j].abs();
            if drawn.layer() {
                errors[j] += dy[j].abs() * row.normal(normal[j]);
            } else {
                let [rounded, error] = row.rounded(dtype, normal[j]);
                dw[j] += dy[j] * rounded;
                errors[j] += dy[j].abs() * error;
            }
        }
    }
    close("dx", &got.dx, &dx, |i| {
        let ((row, normal), j) = (&rows[i / c], i % c);
        let pair = [dy[i] * weight[j], normal[j]];
        let added = drawn.d_sum.as_ref().map_or(0.0, |d| f64::from(d[i].abs()));
        row.input_gradient(dtype, dx[i], pair, sizes[i / c]) + 2.0 * tolerance::U32 * added
    })?;
    let rows = rows.len();
    close("d_weight", &got.d_weight, &dw, |j| {
        tolerance::norm_parameter(rows, terms[j], errors[j])
    })?;
    if let Some(d_bias) = &got.d_bias {
        close("d_bias", d_bias, &db, |j| {
            tolerance::norm_parameter(rows, dy_sizes[j], 0.0)
        })?;
    }
    Ok(())
}

/// Rows that do not start at a multiple of 16 bytes use the general kernels, with the same result up to the order of
/// sums.
fn check_unaligned(machine: &mut dyn Machine, kind: Kind) -> Result<()> {
    let shape = Shape {
        kind,
        dtype: DType::BF16,
        weight_dtype: DType::BF16,
        rows: 3,
        c: 64,
        eps: EPS,
    };
    let drawn = Drawn::new(shape, false);
    let mut shifted = |values: &[f32]| -> Result<Address> {
        let mut all = vec![0.0; 3];
        all.extend(values);
        let buffer = machine.upload(&bytes(DType::BF16, &all))?;
        Ok(Address(buffer.address.0 + 6))
    };
    let (x, weight) = (shifted(&drawn.x)?, shifted(&drawn.weight)?);
    let bias = shifted(&drawn.bias)?;
    let y = machine.output::<u8>(drawn.x.len() * 2)?;
    let at = Forward {
        x,
        residual: Address::NULL,
        sum: Address::NULL,
        weight,
        bias,
        y: y.address,
    };
    machine.launch(&norm::forward(&shape, &at).expect("dtypes that go together"))?;
    let got = values(DType::BF16, &machine.download::<u8>(y)?);
    let bias = drawn.layer().then(|| wide(&drawn.bias));
    let (sum, weight) = (wide(&drawn.sum), wide(&drawn.weight));
    let want = reference::norm(&sum, &weight, bias.as_deref(), EPS.into());
    // Two roundings to bf16: of the normalized element and of the result.
    close("y", &got, &want, |i| {
        let product = want[i] - bias.as_ref().map_or(0.0, |b| b[i % 64]);
        1.01 * (tolerance::store(DType::BF16, want[i]) + tolerance::store(DType::BF16, product))
    })
}
