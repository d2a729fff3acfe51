//! Rows of elementwise operations, dropout and rotary positions.

use anyhow::{Context, Result};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::ops::pointwise::{self, RopeShape};
use kernels::{DType, Direction, Gelu, RopeLayout};

use super::{Amount, DIRECTIONS, Prepared, Rows, Targets};
use crate::stages::table::bench::Operands;

const DTYPE: DType = DType::BF16;
/// Sets that alternate, so none stays in the cache. Together they have hundreds of megabytes.
const SETS: usize = 4;

/// An operation whose operands and results have the same elements: number of operands and of results, and the launch on
/// them.
type Elements = (
    usize,
    usize,
    fn(&[Address], &[Address], u64) -> Option<Launch>,
);

pub(super) fn add(rows: &mut Rows) {
    // Every operation is rounded separately, as on the CPU, so nothing is contracted or approximated. An exponential
    // and a division take longer than the memory needs for a 16-bit element.
    let elements: [(&str, [usize; 2], Targets, Elements); 8] = [
        (
            "swiglu bf16 8192x13696 forward",
            [8192, 13_696],
            Targets::computed(6, 55),
            SWIGLU,
        ),
        (
            "swiglu bf16 8192x13696 backward",
            [8192, 13_696],
            Targets::computed(10, 64),
            SWIGLU_BACKWARD,
        ),
        (
            "gelu tanh bf16 10240x4304 forward",
            [10_240, 4304],
            Targets::computed(4, 57),
            GELU_TANH,
        ),
        (
            "gelu tanh bf16 10240x4304 backward",
            [10_240, 4304],
            Targets::computed(6, 74),
            GELU_TANH_BACKWARD,
        ),
        (
            "gelu erf bf16 9808x15360 forward",
            [9808, 15_360],
            Targets::computed(4, 85),
            GELU_ERF,
        ),
        (
            "gelu erf bf16 9808x15360 backward",
            [9808, 15_360],
            Targets::computed(6, 94),
            GELU_ERF_BACKWARD,
        ),
        (
            "add bf16 8192x4096",
            [8192, 4096],
            Targets::COPY_AND_TORCH,
            ADD,
        ),
        (
            "scale bf16 8192x4096",
            [8192, 4096],
            Targets::COPY_AND_TORCH,
            SCALE,
        ),
    ];
    for (name, extents, targets, operation) in elements {
        rows.add(name, targets, move |on| {
            elements_row(on, extents, operation)
        });
    }
    // Ten rounds of the generator for four elements. PyTorch draws as many numbers with the same generator.
    let targets = Targets {
        torch: Targets::COPY_AND_TORCH.torch,
        ..Targets::computed(16, 170)
    };
    rows.add("dropout bf16 8192x4096", targets, dropout_row);
    for (layout, word) in [
        (RopeLayout::HalfSplit, "halves"),
        (RopeLayout::Interleaved, "pairs"),
    ] {
        for (direction, which) in [
            (Direction::Forward, DIRECTIONS[0].1),
            (Direction::Inverse, DIRECTIONS[1].1),
        ] {
            let name = format!("rope {word} bf16 8192x32x128 {which}");
            rows.add(name, Targets::COPY, move |on| {
                rope_row(on, layout, direction, 64)
            });
        }
    }
    // The second half of each head is copied unchanged.
    let name = "rope pairs bf16 8192x32x128, half of a head, forward";
    rows.add(name, Targets::COPY, |on| {
        rope_row(on, RopeLayout::Interleaved, Direction::Forward, 32)
    });
}

const SWIGLU: Elements = (2, 1, |x, y, n| {
    pointwise::swiglu(DTYPE, x[0], x[1], y[0], n)
});
const SWIGLU_BACKWARD: Elements = (3, 2, |x, y, n| {
    pointwise::swiglu_backward(DTYPE, [x[0], x[1], x[2]], [y[0], y[1]], n)
});
const GELU_TANH: Elements = (1, 1, |x, y, n| {
    pointwise::gelu(DTYPE, Gelu::Tanh, x[0], y[0], n)
});
const GELU_TANH_BACKWARD: Elements = (2, 1, |x, y, n| {
    pointwise::gelu_backward(DTYPE, Gelu::Tanh, [x[0], x[1]], y[0], n)
});
const GELU_ERF: Elements = (1, 1, |x, y, n| {
    pointwise::gelu(DTYPE, Gelu::Erf, x[0], y[0], n)
});
const GELU_ERF_BACKWARD: Elements = (2, 1, |x, y, n| {
    pointwise::gelu_backward(DTYPE, Gelu::Erf, [x[0], x[1]], y[0], n)
});
const ADD: Elements = (2, 1, |x, y, n| pointwise::add(DTYPE, x[0], x[1], y[0], n));
const SCALE: Elements = (1, 1, |x, y, n| pointwise::scale(DTYPE, x[0], 0.5, y[0], n));

fn elements_row(
    on: &mut Operands<'_>,
    [t, c]: [usize; 2],
    (operands, results, launch): Elements,
) -> Result<Prepared> {
    let n = on.of(t) * on.of(c);
    let size = DTYPE.size_bytes();
    let mut sets = Vec::new();
    for _ in 0..SETS {
        let x: Vec<Address> = (0..operands)
            .map(|_| on.normal(DTYPE, n, 1.0))
            .collect::<Result<_>>()?;
        let y: Vec<Address> = (0..results)
            .map(|_| on.output(n * size))
            .collect::<Result<_>>()?;
        sets.push(vec![launch(&x, &y, n as u64).context("floats")?]);
    }
    let bytes = (operands + results) * n * size;
    Ok((Amount::Bytes(bytes as f64), sets))
}

fn dropout_row(on: &mut Operands<'_>) -> Result<Prepared> {
    let (t, k) = (on.of(8192), on.of(4096));
    let size = DTYPE.size_bytes();
    // Integers that identify rows for dropout.
    let numbers: Vec<[i32; 2]> = (0..t as i32).map(|row| [row / 1024, row % 1024]).collect();
    let numbers = on.values(&numbers)?;
    let mut sets = Vec::new();
    for _ in 0..SETS {
        let x = on.normal(DTYPE, t * k, 1.0)?;
        let y = on.output(t * k * size)?;
        let extents = [t as u64, k as u64];
        let launch = pointwise::dropout(DTYPE, [x, numbers, y], extents, [1, 2], 0.1);
        sets.push(vec![launch.context("floats")?]);
    }
    Ok((Amount::Bytes((2 * t * k * size + 8 * t) as f64), sets))
}

fn rope_row(
    on: &mut Operands<'_>,
    layout: RopeLayout,
    direction: Direction,
    w: usize,
) -> Result<Prepared> {
    const D: usize = 128;
    let (tokens, heads) = (on.of(8192), on.of(32));
    let shape = RopeShape {
        tokens: tokens as u64,
        heads: heads as u32,
        d: D as u32,
        w: w as u32,
    };
    let (elements, size) = (tokens * heads * D, DTYPE.size_bytes());
    let [cos, sin] = [
        on.normal(DType::F32, tokens * w, 0.5)?,
        on.normal(DType::F32, tokens * w, 0.5)?,
    ];
    let mut sets = Vec::new();
    for _ in 0..SETS {
        let x = on.normal(DTYPE, elements, 1.0)?;
        let y = on.output(elements * size)?;
        let launch = pointwise::rope(DTYPE, [x, cos, sin, y], shape, layout, direction);
        sets.push(vec![launch.context("floats")?]);
    }
    let bytes = 2 * elements * size + 8 * tokens * w;
    Ok((Amount::Bytes(bytes as f64), sets))
}
