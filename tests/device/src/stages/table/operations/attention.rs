//! Attention rows, with tensor cores and without.

use anyhow::{Context, Result};
use kernels::DType;
use kernels::cuda::device_kind::AttentionBackward::{self, Fused, Split};
use kernels::cuda::ops::attention::{Gradients, Inputs, Outputs, Plan, Problem};

use super::{Amount, Prepared, Rows, Targets};
use crate::stages::Target;
use crate::stages::table::bench::Operands;

/// Shape of one attention row.
#[derive(Clone, Copy)]
struct Shape {
    dtype: DType,
    name: &'static str,
    batch: usize,
    length: usize,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    causal: bool,
}

const fn shape(
    dtype: DType,
    name: &'static str,
    (batch, length): (usize, usize),
    (heads, kv_heads): (u32, u32),
    head_dim: u32,
    causal: bool,
) -> Shape {
    Shape {
        dtype,
        name,
        batch,
        length,
        heads,
        kv_heads,
        head_dim,
        causal,
    }
}

const BF16: DType = DType::BF16;
const F16: DType = DType::F16;

/// Shapes of language models and vision towers; one with few rows, which has smaller tiles; one without tensor cores.
const SHAPES: [Shape; 10] = [
    shape(BF16, "d128 causal 4096 28:4", (2, 4096), (28, 4), 128, true),
    shape(
        BF16,
        "d128 full 4096 16:16",
        (2, 4096),
        (16, 16),
        128,
        false,
    ),
    shape(
        BF16,
        "d112 full 1226 16:16",
        (8, 1226),
        (16, 16),
        112,
        false,
    ),
    shape(BF16, "d80 full 1024 16:16", (10, 1024), (16, 16), 80, false),
    shape(BF16, "d72 full 1024 16:16", (10, 1024), (16, 16), 72, false),
    shape(BF16, "d64 full 1226 16:16", (8, 1226), (16, 16), 64, false),
    shape(BF16, "d128 causal 512 28:4", (1, 512), (28, 4), 128, true),
    shape(F16, "d128 causal 4096 28:4", (2, 4096), (28, 4), 128, true),
    shape(F16, "d72 full 1024 16:16", (10, 1024), (16, 16), 72, false),
    shape(
        DType::F32,
        "d128 causal 1024 16:16",
        (2, 1024),
        (16, 16),
        128,
        true,
    ),
];

/// Targets of a shape. PyTorch's flash backend has head dims of 64 and 128 and pads others: 72 and 80 to 96, 112 to
/// 128. So ours must be faster there, and may be slightly slower at 128. Few rows and f32 have no target.
fn targets(shape: Shape) -> Targets {
    let torch = match shape.head_dim {
        _ if shape.dtype == DType::F32 || shape.length < 1024 => None,
        128 => Some(Target::AtLeast(0.9)),
        72 | 80 | 112 => Some(Target::AtLeast(1.1)),
        _ => None,
    };
    Targets { copy: None, torch }
}

pub(super) fn add(rows: &mut Rows) {
    for shape in SHAPES {
        let mut add = |which: &str, backward| {
            let name = format!("attention {} {} {which}", shape.dtype, shape.name);
            rows.add(name, targets(shape), move |on| row(on, shape, backward));
        };
        add("forward", None);
        add("backward", Some(Split));
        if shape.dtype != DType::F32 {
            add("backward, fused", Some(Fused));
        }
    }
}

/// `backward`: the kernels of the backward; `None` for the forward.
fn row(
    on: &mut Operands<'_>,
    shape: Shape,
    backward: Option<AttentionBackward>,
) -> Result<Prepared> {
    let (dtype, size, length) = (shape.dtype, shape.dtype.size_bytes(), on.of(shape.length));
    let starts: Vec<usize> = (0..=shape.batch).map(|i| i * length).collect();
    let problem = Problem {
        dtype,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        q_starts: &starts,
        k_starts: &starts,
        causal: shape.causal,
        scale: 1.0 / (shape.head_dim as f32).sqrt(),
        multiprocessors: on.bench.multiprocessors(),
        shared_bytes: on.bench.shared_bytes(),
        backward: backward.unwrap_or_default(),
    };
    let plan = Plan::new(&problem).context("an attention")?;
    let tokens = shape.batch * length;
    let row = |heads: u32| tokens * (heads * shape.head_dim) as usize;
    let (q_elements, k_elements) = (row(shape.heads), row(shape.kv_heads));
    let inputs = Inputs {
        q: on.normal(dtype, q_elements, 1.0)?,
        k: on.normal(dtype, k_elements, 1.0)?,
        v: on.normal(dtype, k_elements, 1.0)?,
        table: on.values(plan.table())?,
    };
    let outputs = Outputs {
        out: on.output(size * q_elements)?,
        lse: on.output(4 * tokens * shape.heads as usize)?,
    };
    let forward = plan.forward(inputs, outputs);
    // Two products of 2 t s d operations each. With a causal mask half of the scores are masked.
    let (t, d) = (length as f64, f64::from(shape.head_dim));
    let masked = if shape.causal { 0.5 } else { 1.0 };
    let flops = 4.0 * t * t * d * f64::from(shape.heads) * shape.batch as f64 * masked;
    let amount = match plan.uses_tensor_cores() {
        true => Amount::Flops,
        false => Amount::PlainFlops,
    };
    if backward.is_none() {
        return Ok((amount(flops), vec![forward]));
    }
    // Backward reads the results of forward.
    for launch in &forward {
        on.bench.launch(launch)?;
    }
    let gradients = Gradients {
        dout: on.normal(dtype, q_elements, 1.0)?,
        dq: on.output(size * q_elements)?,
        dk: on.output(size * k_elements)?,
        dv: on.output(size * k_elements)?,
        workspace: on.output(plan.workspace_bytes().max(16) as usize)?,
    };
    let launches = plan.backward(inputs, outputs, gradients);
    // Counted as the five products that are needed, however many are computed.
    Ok((amount(2.5 * flops), vec![launches]))
}
