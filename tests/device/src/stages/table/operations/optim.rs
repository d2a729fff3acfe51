//! Rows of an update: casts, dequantized weights, sums and norms of gradients, steps of `AdamW`.

use anyhow::{Context, Result};
use kernels::cuda::launch::Address;
use kernels::cuda::ops::adamw::{self, Form};
use kernels::cuda::ops::grad_norm::{self, Clip, SquareSums};
use kernels::cuda::ops::{accumulate, cast, unpack};
use kernels::{Codebook, DType, Quantization, Shape};
use optim::AdamW;

use super::{Amount, Prepared, Rows, Targets};
use crate::stages::table::bench::Operands;

pub(super) fn add(rows: &mut Rows) {
    let (f32, bf16, f16) = (DType::F32, DType::BF16, DType::F16);
    for (from, to) in [(f32, bf16), (bf16, f32), (f32, f16)] {
        let name = format!("cast {from} to {to}, 256 Mi");
        rows.add(name, Targets::COPY, move |on| cast_row(on, from, to));
    }
    for (quantization, to) in [
        (Quantization::four_bit(Codebook::Nf4, true), bf16),
        (Quantization::Int8, bf16),
    ] {
        let name = format!("unpack {quantization} to {to}, 256 Mi");
        rows.add(name, Targets::COPY, move |on| {
            unpack_row(on, quantization, to)
        });
    }
    // PyTorch has no copy of master weights, and no update of 16-bit weights with f32 moments.
    let forms = [
        (
            "adamw f32, f32 gradient",
            Form::F32,
            f32,
            Targets::COPY_AND_TORCH,
        ),
        (
            "adamw f32 master + bf16 copy, bf16 gradient (28 B)",
            Form::MasterBf16,
            bf16,
            Targets::COPY,
        ),
        (
            "adamw f32 master + f16 copy, f16 gradient (28 B)",
            Form::MasterF16,
            f16,
            Targets::COPY,
        ),
        (
            "adamw bf16 weights, f32 moments, bf16 gradient (22 B)",
            Form::Bf16,
            bf16,
            Targets::COPY,
        ),
        (
            "adamw pure bf16, bf16 gradient",
            Form::PureBf16,
            bf16,
            Targets::COPY_AND_TORCH,
        ),
        // Two searches an element.
        (
            "adamw f32, 8-bit moments, f32 gradient (16 B)",
            Form::F32Blocks,
            f32,
            Targets::computed(16, 350),
        ),
        (
            "adamw f32 master + bf16 copy, 8-bit moments, bf16 gradient (16 B)",
            Form::MasterBf16Blocks,
            bf16,
            Targets::computed(16, 350),
        ),
        (
            "adamw f32 master + f16 copy, 8-bit moments, f16 gradient (16 B)",
            Form::MasterF16Blocks,
            f16,
            Targets::computed(16, 350),
        ),
        (
            "adamw bf16 weights, 8-bit moments, bf16 gradient (10 B)",
            Form::Bf16Blocks,
            bf16,
            Targets::computed(10, 510),
        ),
    ];
    for (name, form, grad, targets) in forms {
        rows.add(name, targets, move |on| adamw_row(on, form, grad));
    }
    rows.add(
        "sums of gradients in bf16, rounded stochastically",
        Targets::COPY,
        accumulate_row,
    );
    for dtype in [f32, bf16, f16] {
        let name = format!("gradient norm {dtype}");
        rows.add(name, Targets::COPY, move |on| norm_row(on, dtype));
    }
    // A few sums: the time of a launch.
    rows.add("clip factor of 8 ranks", Targets::NONE, clip_row);
}

fn cast_row(on: &mut Operands<'_>, from: DType, to: DType) -> Result<Prepared> {
    let n = on.scale.params;
    let x = on.normal(from, n as usize, 1.0)?;
    let y = on.output(n as usize * to.size_bytes())?;
    let launch = cast::launch(from, x, to, y, n).context("floats")?;
    let bytes = (from.size_bytes() + to.size_bytes()) as f64 * n as f64;
    Ok((Amount::Bytes(bytes), vec![vec![launch]]))
}

fn unpack_row(on: &mut Operands<'_>, quantization: Quantization, to: DType) -> Result<Prepared> {
    let columns = 1 << 12;
    let n = (on.scale.params as usize).next_multiple_of(columns);
    let shape = Shape::new(&[n / columns, columns]);
    // Zero is a valid code and a valid magnitude.
    let x = on.zeros(quantization.bytes(shape))?;
    let y = on.output(n * to.size_bytes())?;
    let launch = unpack::launch(quantization, x, shape, to, y).context("a float")?;
    let bytes = (quantization.bytes(shape) + n * to.size_bytes()) as f64;
    Ok((Amount::Bytes(bytes), vec![vec![launch]]))
}

fn adamw_row(on: &mut Operands<'_>, form: Form, grad_dtype: DType) -> Result<Prepared> {
    let n = on.scale.params as usize;
    let grad = on.normal(grad_dtype, n, 1e-3)?;
    let weight = on.normal(form.weight(), n, 0.02)?;
    let copy = match form.copy() {
        Some(dtype) => on.output(n * dtype.size_bytes())?,
        None => Address::NULL,
    };
    // Zero is a valid second moment, and a valid code.
    let zeros = n * form.moment_dtype().size_bytes();
    let exp_avg = match form.moment_dtype() {
        DType::U8 => on.zeros(zeros)?,
        dtype => on.normal(dtype, n, 1e-4)?,
    };
    let exp_avg_sq = on.zeros(zeros)?;
    let absmax = match form.moment_dtype() {
        DType::U8 => {
            let bytes = 4 * n.div_ceil(Form::BLOCK_ELEMS);
            [on.zeros(bytes)?, on.zeros(bytes)?]
        }
        _ => [Address::NULL; 2],
    };
    let window = adamw::AdamWChunk {
        form,
        grad_dtype,
        grad,
        weight,
        copy,
        exp_avg,
        exp_avg_sq,
        absmax,
        n: n as u64,
        first_element: 0,
    };
    let scalars = AdamW::default().scalars(10, 1e-3, 0.1, 1.0, 1)?;
    let scalars = on.values(&[scalars])?;
    let launch = adamw::launch(&window, scalars, Address::NULL).context("a form of AdamW")?;
    let bytes = form.bytes(grad_dtype) as f64 * n as f64;
    Ok((Amount::Bytes(bytes), vec![vec![launch]]))
}

fn accumulate_row(on: &mut Operands<'_>) -> Result<Prepared> {
    let n = on.scale.params;
    let values = on.normal(DType::F32, n as usize, 1e-3)?;
    let sums = on.normal(DType::BF16, n as usize, 1e-3)?;
    let place = accumulate::RoundingCounter {
        key: [1, 2],
        time: 3,
        first_element: 0,
    };
    let when = on.values(&accumulate::when(place))?;
    let launch = accumulate::launch(sums, values, n, (0, when), false);
    Ok((Amount::Bytes(8.0 * n as f64), vec![vec![launch]]))
}

fn norm_row(on: &mut Operands<'_>, dtype: DType) -> Result<Prepared> {
    let n = on.scale.params;
    let x = on.normal(dtype, n as usize, 1.0)?;
    let workspace = on.output(grad_norm::workspace_bytes(n) as usize)?;
    let sum = on.output(8)?;
    let launches = grad_norm::square_sum(dtype, x, n, workspace, sum, false).context("floats")?;
    let bytes = (dtype.size_bytes() as u64 * n) as f64;
    Ok((Amount::Bytes(bytes), vec![launches.into()]))
}

fn clip_row(on: &mut Operands<'_>) -> Result<Prepared> {
    const RANKS: usize = 8;
    let sums = SquareSums {
        squares: 4.0,
        loss: 100.0,
        tokens: 50.0,
    };
    let sums = on.values(&[sums; RANKS])?;
    let out = on.output(size_of::<Clip>())?;
    let launch = grad_norm::clip(sums, RANKS, Some(1.0), out).context("a few ranks")?;
    let bytes = RANKS * size_of::<SquareSums>() + size_of::<Clip>();
    Ok((Amount::Bytes(bytes as f64), vec![vec![launch]]))
}
