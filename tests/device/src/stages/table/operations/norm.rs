//! Rows of RMS norm and layer norm.

use anyhow::{Context, Result};
use kernels::cuda::launch::Address;
use kernels::cuda::ops::norm::{self, Backward, Forward, Kind, Shape};
use kernels::{DType, RopeLayout};

use super::{Amount, DIRECTIONS, Prepared, Rows, Targets};
use crate::stages::table::bench::Operands;

/// Shape of a norm.
#[derive(Clone, Copy)]
struct Norm {
    kind: Kind,
    dtype: DType,
    rows: usize,
    /// Row length as a scaled part and an unscaled remainder, which decides how rows are read.
    c: [usize; 2],
    /// Whether a residual is added first and its gradient at the end.
    residual: bool,
}

pub(super) fn add(rows: &mut Rows) {
    let usual = |kind, dtype, c| Norm {
        kind,
        dtype,
        rows: 16_384,
        c: [c, 0],
        residual: false,
    };
    for (kind, word) in [(Kind::Rms, "rms"), (Kind::Layer, "layer")] {
        let widths = [
            (DType::BF16, 4096),
            (DType::BF16, 1152),
            (DType::F16, 4096),
            (DType::F32, 4096),
        ];
        for (dtype, c) in widths {
            for (backward, which) in DIRECTIONS {
                let name = format!("{word} norm {dtype} 16384x{c} {which}");
                let norm = usual(kind, dtype, c);
                rows.add(name, Targets::COPY_AND_TORCH, move |on| {
                    row(on, norm, backward)
                });
            }
        }
    }
    let name = "rms norm of heads and rope bf16 8192x32x128";
    rows.add(name, Targets::COPY, rotated_row);
    let bf16 = usual(Kind::Rms, DType::BF16, 4096);
    for (backward, which) in DIRECTIONS {
        // PyTorch adds the residual in a separate kernel.
        let norm = Norm {
            residual: true,
            ..bf16
        };
        let name = format!("rms norm bf16 16384x4096 with residual {which}");
        rows.add(name, Targets::COPY, move |on| row(on, norm, backward));
        let norm = Norm {
            rows: 8192,
            c: [12_288, 0],
            ..bf16
        };
        let name = format!("rms norm bf16 8192x12288 {which}");
        rows.add(name, Targets::COPY_AND_TORCH, move |on| {
            row(on, norm, backward)
        });
        // Rows of no multiple of 16 bytes: supported, though no model has them.
        let norm = Norm {
            c: [4096, 4],
            ..bf16
        };
        let name = format!("rms norm bf16 16384x4100 {which}");
        rows.add(name, Targets::NONE, move |on| row(on, norm, backward));
    }
}

/// Heads of queries, normalized and rotated in one pass.
fn rotated_row(on: &mut Operands<'_>) -> Result<Prepared> {
    const D: usize = 128;
    let dtype = DType::BF16;
    let (tokens, heads, w) = (on.of(8192), on.of(32), D / 2);
    let shape = Shape {
        kind: Kind::Rms,
        dtype,
        weight_dtype: dtype,
        rows: (tokens * heads) as u64,
        c: D as u32,
        eps: 1e-6,
    };
    let (elements, size) = (tokens * heads * D, dtype.size_bytes());
    let weight = on.normal(dtype, D, 1.0)?;
    let [cos, sin] = [
        on.normal(DType::F32, tokens * w, 0.5)?,
        on.normal(DType::F32, tokens * w, 0.5)?,
    ];
    let mut sets = Vec::new();
    for _ in 0..4 {
        let at = norm::Rotated {
            x: on.normal(dtype, elements, 1.0)?,
            weight,
            cos,
            sin,
            y: on.output(elements * size)?,
        };
        let sizes = [heads as u32, w as u32];
        let launch = norm::rotated(&shape, &at, sizes, RopeLayout::HalfSplit);
        sets.push(vec![launch.context("heads")?]);
    }
    let bytes = 2 * elements * size + 8 * tokens * w;
    Ok((Amount::Bytes(bytes as f64), sets))
}

fn row(on: &mut Operands<'_>, norm: Norm, backward: bool) -> Result<Prepared> {
    let Norm {
        kind,
        dtype,
        residual,
        ..
    } = norm;
    let rows = on.of(norm.rows);
    // The widest rows stay wide, since they have their own kernel.
    let c = match norm.c {
        [c, _] if c > 8192 => c,
        [c, rest] => on.of(c) + rest,
    };
    let shape = Shape {
        kind,
        dtype,
        weight_dtype: dtype,
        rows: rows as u64,
        c: c as u32,
        eps: 1e-6,
    };
    let (elements, size, layer) = (rows * c, dtype.size_bytes(), kind == Kind::Layer);
    let weight = on.normal(dtype, c, 1.0)?;
    let bias = match layer {
        true => on.normal(dtype, c, 1.0)?,
        false => Address::NULL,
    };
    let mut sets = Vec::new();
    for _ in 0..4 {
        let x = on.normal(dtype, elements, 1.0)?;
        let beside = match residual {
            true => on.normal(dtype, elements, 1.0)?,
            false => Address::NULL,
        };
        let y = on.output(elements * size)?;
        if backward {
            let dy = on.normal(dtype, elements, 1.0)?;
            let d_weight = on.output(4 * c)?;
            let d_bias = match layer {
                true => on.output(4 * c)?,
                false => Address::NULL,
            };
            let workspace = on.output(norm::workspace_bytes(&shape) as usize)?;
            let at = Backward {
                x,
                weight,
                dy,
                d_sum: beside,
                dx: y,
                d_weight,
                d_bias,
                workspace,
            };
            sets.push(norm::backward(&shape, &at).context("a norm")?.into());
        } else {
            let sum = match residual {
                true => on.output(elements * size)?,
                false => Address::NULL,
            };
            let at = Forward {
                x,
                residual: beside,
                sum,
                weight,
                bias,
                y,
            };
            sets.push(vec![norm::forward(&shape, &at).context("a norm")?]);
        }
    }
    let passes = match (backward, residual) {
        (false, false) => 2,
        (false, true) | (true, true) => 4,
        (true, false) => 3,
    };
    Ok((Amount::Bytes((passes * elements * size) as f64), sets))
}
