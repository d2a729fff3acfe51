//! The rows of the table. Names equal those of `scripts/gpu_peers.py`, where PyTorch does the same.

use anyhow::{Context, Result};
use bytemuck::bytes_of;
use kernels::DType;
use kernels::cuda::gpu::{Gpu, Memory};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::ops::adamw::{self, Form};
use kernels::cuda::ops::attention::{self, Gradients, Inputs, Outputs, Problem};
use kernels::cuda::ops::lora_linear::LoraLinear;
use kernels::cuda::ops::norm::{self, Backward, Forward, Kind};
use kernels::cuda::ops::workspace::Workspace;
use kernels::cuda::ops::{accumulate, cast, grad_norm};
use optim::AdamW;
use optim::rng::RandomStream;

use super::{Amount, Operands};
use crate::stages::queue;

/// What a row is made of: how much it does, and its launches on one or more sets of operands.
type Prepared = (Amount, Vec<Vec<Launch>>);
/// Makes a row's operands.
pub(super) type Prepare = Box<dyn Fn(&mut Operands<'_>) -> Result<Prepared>>;

/// Parameters of the optimizer's rows: 256 Mi where the memory allows.
pub(super) fn params(gpu: &Gpu) -> u64 {
    let free = gpu.memory_info().map_or(0, |(free, _)| free as u64);
    (free / 64).clamp(1 << 20, 1 << 28) & !0xfff
}

/// Every row.
pub(super) fn all(params: u64) -> Vec<(String, Prepare)> {
    let mut rows: Vec<(String, Prepare)> = Vec::new();
    let mut add = |name: String, prepare: Prepare| rows.push((name, prepare));
    add("cast f32 to bf16, 256 Mi".into(), Box::new(cast_row));
    let forms = [
        ("adamw f32, f32 gradient", Form::F32, DType::F32),
        (
            "adamw f32 master + bf16 copy, bf16 gradient (28 B)",
            Form::MasterBf16,
            DType::BF16,
        ),
        (
            "adamw bf16 weights, f32 moments, bf16 gradient (22 B)",
            Form::Bf16,
            DType::BF16,
        ),
        (
            "adamw pure bf16, bf16 gradient",
            Form::PureBf16,
            DType::BF16,
        ),
    ];
    for (name, form, grad) in forms {
        add(
            name.into(),
            Box::new(move |on| adamw_row(on, form, grad, params)),
        );
    }
    add(
        "sums of gradients in bf16, rounded stochastically".into(),
        Box::new(move |on| accumulate_row(on, params)),
    );
    for dtype in [DType::F32, DType::BF16] {
        add(
            format!("gradient norm {dtype}"),
            Box::new(move |on| norm_row(on, dtype, params)),
        );
    }
    for (kind, word) in [(Kind::Rms, "rms"), (Kind::Layer, "layer")] {
        for c in [4096, 1152] {
            let name = |which| format!("{word} norm bf16 16384x{c} {which}");
            add(
                name("forward"),
                Box::new(move |on| normalise_row(on, kind, c, false)),
            );
            add(
                name("backward"),
                Box::new(move |on| normalise_row(on, kind, c, true)),
            );
        }
    }
    for shape in SHAPES {
        let name = |which| format!("attention bf16 {} {which}", shape.name);
        add(
            name("forward"),
            Box::new(move |on| attention_row(on, shape, false)),
        );
        add(
            name("backward"),
            Box::new(move |on| attention_row(on, shape, true)),
        );
    }
    for r in [0, 16, 64] {
        let name = format!("linear bf16 8192x4096x4096 rank {r}");
        add(name, Box::new(move |on| linear_row(on, r)));
    }
    rows
}

/// Fills memory with standard normal values times `scale`: a million of them, repeated.
pub(super) fn fill_normal(gpu: &Gpu, dtype: DType, memory: &Memory, scale: f32) -> Result<()> {
    const N: u64 = 1 << 20;
    let stream = RandomStream::new(2, "normal");
    let values: Vec<f32> = (0..N).map(|i| stream.normal(i) * scale).collect();
    let wide: &[u8] = bytemuck::cast_slice(&values);
    let narrow: Vec<u8> = match dtype {
        DType::F32 => wide.to_vec(),
        DType::BF16 => values
            .iter()
            .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())
            .collect(),
        DType::F16 => values
            .iter()
            .flat_map(|x| half::f16::from_f32(*x).to_le_bytes())
            .collect(),
        other => anyhow::bail!("{other} is no float"),
    };
    let first = narrow.len().min(memory.bytes());
    gpu.write(memory, 0, &narrow[..first])?;
    let mut filled = first;
    while filled < memory.bytes() {
        let n = filled.min(memory.bytes() - filled);
        queue::repeat(gpu, memory, filled, n)?;
        filled += n;
    }
    gpu.synchronize()?;
    Ok(())
}

fn cast_row(on: &mut Operands<'_>) -> Result<Prepared> {
    let n = params(on.gpu);
    let x = on.normal(DType::F32, n, 1.0)?;
    let y = on.output(2 * n)?;
    let launch = cast::launch(DType::F32, x, DType::BF16, y, n).context("floats")?;
    Ok((Amount::Bytes(6.0 * n as f64), vec![vec![launch]]))
}

fn adamw_row(on: &mut Operands<'_>, form: Form, grad_dtype: DType, n: u64) -> Result<Prepared> {
    let grad = on.normal(grad_dtype, n, 1e-3)?;
    let weight = on.normal(form.weight(), n, 0.02)?;
    let copy = match form.copy() {
        Some(dtype) => on.output(n * dtype.size_bytes() as u64)?,
        None => Address::NULL,
    };
    let exp_avg = on.normal(form.moment(), n, 1e-4)?;
    // A second moment is positive: the square of nothing is a valid start.
    let exp_avg_sq = on.zeros(n * form.moment().size_bytes() as u64)?;
    let window = adamw::Window {
        form,
        grad_dtype,
        grad,
        weight,
        copy,
        exp_avg,
        exp_avg_sq,
        n,
        first_element: 0,
    };
    let scalars = AdamW::default().scalars(10, 1e-3, 0.1, 1.0, 1)?;
    let scalars = on.bytes(bytes_of(&scalars))?;
    let launch = adamw::launch(&window, scalars, Address::NULL).context("a form of AdamW")?;
    let bytes = form.bytes(grad_dtype) as f64 * n as f64;
    Ok((Amount::Bytes(bytes), vec![vec![launch]]))
}

fn accumulate_row(on: &mut Operands<'_>, n: u64) -> Result<Prepared> {
    let values = on.normal(DType::F32, n, 1e-3)?;
    let sums = on.normal(DType::BF16, n, 1e-3)?;
    let place = accumulate::Place {
        key: [1, 2],
        time: 3,
        first_element: 0,
    };
    let when = on.bytes(bytemuck::cast_slice(&accumulate::when(place)))?;
    let launch = accumulate::launch(sums, values, n, (0, when), false);
    Ok((Amount::Bytes(8.0 * n as f64), vec![vec![launch]]))
}

fn norm_row(on: &mut Operands<'_>, dtype: DType, n: u64) -> Result<Prepared> {
    let x = on.normal(dtype, n, 1.0)?;
    let workspace = on.output(grad_norm::workspace_bytes(n))?;
    let sum = on.output(8)?;
    let launches = grad_norm::square_sum(dtype, x, n, workspace, sum, false).context("floats")?;
    let bytes = (dtype.size_bytes() as u64 * n) as f64;
    Ok((Amount::Bytes(bytes), vec![launches.into()]))
}

fn normalise_row(on: &mut Operands<'_>, kind: Kind, c: u32, backward: bool) -> Result<Prepared> {
    const ROWS: u64 = 16_384;
    let dtype = DType::BF16;
    let shape = norm::Shape {
        kind,
        dtype,
        weight_dtype: dtype,
        rows: ROWS,
        c,
        eps: 1e-6,
    };
    let elements = ROWS * u64::from(c);
    let (width, layer) = (u64::from(c), kind == Kind::Layer);
    let weight = on.normal(dtype, width, 1.0)?;
    let bias = if layer {
        on.normal(dtype, width, 1.0)?
    } else {
        Address::NULL
    };
    let mut sets = Vec::new();
    for _ in 0..4 {
        let x = on.normal(dtype, elements, 1.0)?;
        let y = on.output(2 * elements)?;
        if backward {
            let dy = on.normal(dtype, elements, 1.0)?;
            let d_weight = on.output(4 * width)?;
            let d_bias = if layer {
                on.output(4 * width)?
            } else {
                Address::NULL
            };
            let workspace = on.output(norm::workspace_bytes(&shape))?;
            let at = Backward {
                x,
                weight,
                dy,
                d_sum: Address::NULL,
                dx: y,
                d_weight,
                d_bias,
                workspace,
            };
            sets.push(norm::backward(&shape, &at).context("a norm")?.into());
        } else {
            let at = Forward {
                x,
                residual: Address::NULL,
                sum: Address::NULL,
                weight,
                bias,
                y,
            };
            sets.push(vec![norm::forward(&shape, &at).context("a norm")?]);
        }
    }
    let passes = if backward { 6.0 } else { 4.0 };
    Ok((Amount::Bytes(passes * elements as f64), sets))
}

/// One attention of the table.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    batch: usize,
    length: usize,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    causal: bool,
}

const fn shape(
    name: &'static str,
    (batch, length): (usize, usize),
    (heads, kv_heads): (u32, u32),
    head_dim: u32,
    causal: bool,
) -> Shape {
    Shape {
        name,
        batch,
        length,
        heads,
        kv_heads,
        head_dim,
        causal,
    }
}

const SHAPES: [Shape; 6] = [
    shape("d128 causal 4096 28:4", (2, 4096), (28, 4), 128, true),
    shape("d128 full 4096 16:16", (2, 4096), (16, 16), 128, false),
    shape("d112 full 1226 16:16", (8, 1226), (16, 16), 112, false),
    shape("d80 full 1024 16:16", (10, 1024), (16, 16), 80, false),
    shape("d72 full 1024 16:16", (10, 1024), (16, 16), 72, false),
    shape("d64 full 1226 16:16", (8, 1226), (16, 16), 64, false),
];

fn attention_row(on: &mut Operands<'_>, shape: Shape, backward: bool) -> Result<Prepared> {
    let starts: Vec<usize> = (0..=shape.batch).map(|i| i * shape.length).collect();
    let problem = Problem {
        dtype: DType::BF16,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        q_starts: &starts,
        k_starts: &starts,
        causal: shape.causal,
        scale: 1.0 / (shape.head_dim as f32).sqrt(),
        multiprocessors: on.gpu.facts().multiprocessors,
    };
    let plan = attention::Plan::new(&problem).context("an attention")?;
    let tokens = (shape.batch * shape.length) as u64;
    let row = |heads: u32| tokens * u64::from(heads * shape.head_dim);
    let (q_elements, k_elements) = (row(shape.heads), row(shape.kv_heads));
    let inputs = Inputs {
        q: on.normal(DType::BF16, q_elements, 1.0)?,
        k: on.normal(DType::BF16, k_elements, 1.0)?,
        v: on.normal(DType::BF16, k_elements, 1.0)?,
        table: on.bytes(bytemuck::cast_slice(plan.table()))?,
    };
    let outputs = Outputs {
        out: on.output(2 * q_elements)?,
        lse: on.output(4 * tokens * u64::from(shape.heads))?,
    };
    let forward = plan.forward(inputs, outputs);
    // Two products of 2 t s d each; half of the scores are masked where it is causal.
    let (t, d) = (shape.length as f64, f64::from(shape.head_dim));
    let masked = if shape.causal { 0.5 } else { 1.0 };
    let flops = 4.0 * t * t * d * f64::from(shape.heads) * shape.batch as f64 * masked;
    if !backward {
        return Ok((Amount::Flops(flops), vec![forward]));
    }
    // The backward reads what the forward wrote.
    for launch in &forward {
        queue::launch(on.gpu, launch)?;
    }
    let gradients = Gradients {
        dout: on.normal(DType::BF16, q_elements, 1.0)?,
        dq: on.output(2 * q_elements)?,
        dk: on.output(2 * k_elements)?,
        dv: on.output(2 * k_elements)?,
        workspace: on.output(plan.workspace_bytes().max(16))?,
    };
    let launches = plan.backward(inputs, outputs, gradients);
    // Counted as the five products that are needed, however many are computed.
    Ok((Amount::Flops(2.5 * flops), vec![launches]))
}

fn linear_row(on: &mut Operands<'_>, r: usize) -> Result<Prepared> {
    let (t, n, k) = (8192usize, 4096usize, 4096usize);
    let dtype = DType::BF16;
    let layer = LoraLinear {
        dtype,
        t,
        n,
        k,
        r,
        x: on.normal(dtype, (t * k) as u64, 1.0)?,
        weight: on.normal(dtype, (n * k) as u64, 0.02)?,
        bias: Address::NULL,
        lora_a: on.normal(dtype, (r.max(1) * k) as u64, 0.02)?,
        lora_b: on.normal(dtype, (n * r.max(1)) as u64, 0.02)?,
        scale: 0.5,
    };
    let y = on.output((2 * t * n) as u64)?;
    let multiprocessors = on.gpu.facts().multiprocessors;
    let mut counting = Workspace::new(Address::NULL);
    layer
        .forward(y, multiprocessors, &mut counting)
        .context("a linear layer")?;
    let scratch = on.output(counting.bytes().max(256))?;
    let mut workspace = Workspace::new(scratch);
    let launches = layer
        .forward(y, multiprocessors, &mut workspace)
        .context("a linear layer")?;
    let flops = 2.0 * t as f64 * (n as f64 * k as f64 + r as f64 * (n + k) as f64);
    Ok((Amount::Flops(flops), vec![launches]))
}
