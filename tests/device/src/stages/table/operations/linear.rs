//! Linear layers by our own kernels. The stage `products` compares others with cuBLASLt.

use anyhow::Result;
use kernels::DType;

use super::{Amount, DIRECTIONS, Prepared, Rows, Targets};
use crate::stages::table::bench::Operands;
use crate::stages::table::layers::{self, TwoLayers};

/// Tokens, output features and input features.
const SHAPE: [usize; 3] = [8192, 4096, 4096];
/// Rows of the second of two layers.
const VISION: usize = 2048;

/// The timed part of two layers.
#[derive(Clone, Copy)]
enum Of {
    Output,
    Input,
    Weights,
}

pub(super) fn add(rows: &mut Rows) {
    let (bf16, f16, f32) = (DType::BF16, DType::F16, DType::F32);
    let forward = [
        (bf16, 0),
        (bf16, 16),
        (bf16, 64),
        // Its rows are first copied to rows of whole words.
        (bf16, 12),
        (f16, 0),
        (f16, 16),
        (f32, 0),
        (f32, 16),
    ];
    for (dtype, r) in forward {
        let name = format!("linear {dtype} 8192x4096x4096 rank {r}");
        rows.add(name, Targets::NONE, move |on| row(on, dtype, r, false));
    }
    for dtype in [f16, f32] {
        let name = format!("linear {dtype} 8192x4096x4096 rank 16 backward");
        rows.add(name, Targets::NONE, move |on| row(on, dtype, 16, true));
    }
    for dtype in [bf16, f32] {
        let name = format!("linear {dtype} 8192x4096x4096 dW");
        rows.add(name, Targets::NONE, move |on| weight_row(on, dtype));
    }
    // The stage `products` has these in bf16.
    for (of, which) in [
        (Of::Output, DIRECTIONS[0].1),
        (Of::Input, "dx"),
        (Of::Weights, "dW"),
    ] {
        let name = format!("two layers f32 8192x4096x4096, {VISION} rows of the second, {which}");
        rows.add(name, Targets::NONE, move |on| two_layers_row(on, f32, of));
    }
}

/// Floating-point operations, by the kernels of the dtype.
fn amount(dtype: DType, flops: f64) -> Amount {
    match dtype {
        DType::F32 => Amount::PlainFlops(flops),
        _ => Amount::Flops(flops),
    }
}

fn row(on: &mut Operands<'_>, dtype: DType, r: usize, backward: bool) -> Result<Prepared> {
    let sizes @ [t, n, k] = layers::sizes(on, SHAPE);
    let layer = layers::layer(on, dtype, sizes, r)?;
    let (launches, adapter) = match backward {
        // Recomputed low-rank activations, their gradient, and the gradients of A and B.
        true => (layers::backward(on, &layer)?, 3.0),
        false => (layers::forward(on, &layer)?, 1.0),
    };
    let flops = 2.0 * t as f64 * (n as f64 * k as f64 + adapter * r as f64 * (n + k) as f64);
    Ok((amount(dtype, flops), vec![launches]))
}

fn weight_row(on: &mut Operands<'_>, dtype: DType) -> Result<Prepared> {
    let sizes @ [t, n, k] = layers::sizes(on, SHAPE);
    let layer = layers::layer(on, dtype, sizes, 0)?;
    let dy = on.normal(dtype, t * n, 1.0)?;
    let launches = layers::weight_gradient(on, &layer, dy)?;
    let flops = 2.0 * t as f64 * n as f64 * k as f64;
    Ok((amount(dtype, flops), vec![launches]))
}

fn two_layers_row(on: &mut Operands<'_>, dtype: DType, of: Of) -> Result<Prepared> {
    let sizes @ [t, n, k] = layers::sizes(on, SHAPE);
    let vision = on.of(VISION);
    let layers = TwoLayers::new(on, dtype, sizes, vision)?;
    let launches = match of {
        Of::Output => layers.product(on, false)?,
        Of::Input => layers.product(on, true)?,
        Of::Weights => layers.weight_gradients(on)?,
    };
    let flops = 2.0 * t as f64 * n as f64 * k as f64;
    Ok((amount(dtype, flops), vec![launches]))
}
