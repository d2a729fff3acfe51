//! Stage `products`: matrix products beside cuBLASLt's, two layers over a partition of rows beside one layer of all rows,
//! and layers with adapters beside plain ones, each pair measured in the same run. Every row is written; a target that is
//! missed, or that nothing can be compared for, is a failure of the stage.

use anyhow::{Context, Result};
use kernels::DType;
use kernels::cuda::gpu::{Gpu, Memory};
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::{CublasLt, WORKSPACE_BYTES};
use kernels::cuda::ops::lora_linear::{Gradients, LoraLinear};
use kernels::cuda::ops::pointwise;
use kernels::cuda::ops::routed::{Group, OfRows, Routed};
use kernels::cuda::ops::shared_lora::{self, SharedLora};
use kernels::cuda::ops::workspace::Workspace;

use super::{BUDGET, Operands, peers, works};
use crate::stages::{Report, Setting, Target, median_milliseconds, queue};

/// Tokens, features out and in: layers of 7 B models, and of their vision towers.
const SHAPES: [[usize; 3]; 4] = [
    [8192, 4096, 4096],
    [8192, 11008, 4096],
    [8192, 4096, 11008],
    [9808, 15360, 1792],
];
/// Of cuBLASLt's speed.
const PRODUCT_TARGET: Target = Target::AtLeast(0.7);
/// Of the speed of one product of all rows.
const ROUTED_TARGET: Target = Target::AtLeast(0.9);
/// Most time of a layer with an adapter, relative to the plain one.
const FORWARD_TARGET: Target = Target::AtMost(1.15);

const DTYPE: DType = DType::BF16;

/// Measures; PyTorch's times are added where it does the same.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = Report::new("products");
    let gpu = match setting.gpu() {
        Ok(gpu) => gpu,
        Err(error) => {
            report.failure(format!("{error:#}"));
            return report;
        }
    };
    let peers = peers(setting, "products", 0);
    let torch = |name: &str, milliseconds: f64| {
        let peer = peers.get(name);
        peer.map_or(String::new(), |peer| {
            format!(", torch {peer:.3} ms: {:.2}x", peer / milliseconds)
        })
    };
    for shape in SHAPES {
        report.part("product", |report| {
            plain(setting, &gpu, report, shape, &torch)
        });
    }
    for vision in [2048, 6144] {
        report.part("two layers", |report| routed(&gpu, report, vision, &torch));
    }
    for r in [16, 64] {
        report.part("adapted layer", |report| adapted(&gpu, report, r, &torch));
        report.part("adapted layers", |report| shared(&gpu, report, r));
    }
    report
}

/// Adds what PyTorch takes for a row of this name and time.
type Torch<'t> = &'t dyn Fn(&str, f64) -> String;

fn time(gpu: &Gpu, launches: &[Launch]) -> Result<f64> {
    median_milliseconds(gpu, BUDGET, |_| {
        launches
            .iter()
            .try_for_each(|launch| queue::launch(gpu, launch))
    })
}

fn teraflops(flops: f64, milliseconds: f64) -> String {
    format!("{:.0} TFLOP/s", flops / milliseconds * 1e-9)
}

fn operands(gpu: &Gpu) -> Operands<'_> {
    Operands {
        gpu,
        memory: Vec::new(),
    }
}

/// A layer with random operands.
fn layer(on: &mut Operands<'_>, [t, n, k]: [usize; 3], r: usize) -> Result<LoraLinear> {
    Ok(LoraLinear {
        dtype: DTYPE,
        t,
        n,
        k,
        r,
        x: on.normal(DTYPE, (t * k) as u64, 1.0)?,
        weight: on.normal(DTYPE, (n * k) as u64, 0.02)?,
        bias: Address::NULL,
        lora_a: on.normal(DTYPE, (r.max(1) * k) as u64, 0.02)?,
        lora_b: on.normal(DTYPE, (n * r.max(1)) as u64, 0.02)?,
        scale: 0.5,
    })
}

/// The launches of `build`, with scratch memory of the size that it asks for.
fn with_scratch(
    on: &mut Operands<'_>,
    build: impl Fn(&mut Workspace) -> Option<Vec<Launch>>,
) -> Result<Vec<Launch>> {
    let mut count = Workspace::new(Address::NULL);
    build(&mut count).context("no kernel")?;
    let scratch = on.output(count.bytes().max(256))?;
    build(&mut Workspace::new(scratch)).context("no kernel")
}

fn forward(on: &mut Operands<'_>, layer: &LoraLinear) -> Result<Vec<Launch>> {
    let y = on.output((2 * layer.t * layer.n) as u64)?;
    let sms = on.gpu.facts().multiprocessors;
    with_scratch(on, |space| layer.forward(y, sms, space))
}

/// dx and, with an adapter, its gradients.
fn backward(on: &mut Operands<'_>, layer: &LoraLinear) -> Result<Vec<Launch>> {
    let LoraLinear { t, n, k, r, .. } = *layer;
    let dy = on.normal(DTYPE, (t * n) as u64, 1.0)?;
    let gradients = Gradients {
        dx: on.output((2 * t * k) as u64)?,
        d_lora_a: on.output((4 * r.max(1) * k) as u64)?,
        d_lora_b: on.output((4 * n * r.max(1)) as u64)?,
    };
    let sms = on.gpu.facts().multiprocessors;
    with_scratch(on, |space| layer.backward(dy, gradients, sms, space))
}

/// Our product and cuBLASLt's.
fn plain(
    setting: &Setting,
    gpu: &Gpu,
    report: &mut Report,
    shape: [usize; 3],
    torch: Torch<'_>,
) -> Result<()> {
    let [t, n, k] = shape;
    let name = format!("product bf16 {t}x{n}x{k}");
    let flops = 2.0 * t as f64 * n as f64 * k as f64;
    let mut on = operands(gpu);
    let layer = layer(&mut on, shape, 0)?;
    let own = time(gpu, &forward(&mut on, &layer)?)?;
    let mut compared = teraflops(flops, own);
    let beside = match CublasLt::open(gpu, &setting.search) {
        Ok(library) => {
            let matrix = |elements: usize, scale: f32| -> Result<Memory> {
                let memory = gpu.allocate(2 * elements)?;
                works::fill_normal(gpu, DTYPE, &memory, scale)?;
                Ok(memory)
            };
            let all = [
                matrix(t * k, 1.0)?,
                matrix(n * k, 0.02)?,
                matrix(t * n, 1.0)?,
                gpu.allocate(WORKSPACE_BYTES as usize)?,
            ];
            let theirs = median_milliseconds(gpu, BUDGET, |_| {
                queue::product(gpu, &library, DTYPE, shape, &all)
            })?;
            compared += &format!(
                ", cuBLASLt {theirs:.3} ms: {:.2}x (target {PRODUCT_TARGET})",
                theirs / own
            );
            Ok(theirs / own)
        }
        Err(error) => {
            compared += &format!(", no cuBLASLt: {error}");
            Err(error.to_string())
        }
    };
    compared += &torch(&name, own);
    report.row(&name, format!("{own:.3} ms"), compared);
    match beside {
        Ok(ratio) => report.target(&name, ratio, PRODUCT_TARGET),
        Err(error) => report.failure(format!("{name}: not judged, no cuBLASLt: {error}")),
    }
    Ok(())
}

/// Rows of both groups, mixed as pictures and text are: in stretches.
fn stretches(t: usize, vision: usize) -> [Vec<i32>; 2] {
    // Half of the text stands in front of the picture, half behind it.
    let front = (t - vision) / 2;
    let picture = front..front + vision;
    let (inside, outside) = (0..t as i32).partition(|row| picture.contains(&(*row as usize)));
    [outside, inside]
}

/// One launch for two layers, forward, dx and both dW, and the same for one layer of all rows.
fn routed(gpu: &Gpu, report: &mut Report, vision: usize, torch: Torch<'_>) -> Result<()> {
    let shape @ [t, n, k] = [8192, 4096, 4096];
    let flops = 2.0 * t as f64 * n as f64 * k as f64;
    let sms = gpu.facts().multiprocessors;
    let mut on = operands(gpu);
    let first = layer(&mut on, shape, 0)?;
    let weights = [first.weight, on.normal(DTYPE, (n * k) as u64, 0.02)?];
    let dy = on.normal(DTYPE, (t * n) as u64, 1.0)?;
    let rows = stretches(t, vision);
    let mut groups = [Group {
        rows: Address::NULL,
        m: 0,
        b: Address::NULL,
        low_b: Address::NULL,
        bias: Address::NULL,
    }; 2];
    for (i, group) in groups.iter_mut().enumerate() {
        group.rows = on.bytes(bytemuck::cast_slice(&rows[i]))?;
        group.m = rows[i].len();
        group.b = weights[i];
    }
    for backward in [false, true] {
        let (a, n, k) = if backward {
            (dy, k, n)
        } else {
            (first.x, n, k)
        };
        let layers = Routed {
            dtype: DTYPE,
            transpose_b: backward,
            t,
            n,
            b_rows: n,
            k,
            a,
            low: None,
            scale: 1.0,
            groups,
            y: on.output((2 * t * n) as u64)?,
        };
        let tile = layers.choose(sms);
        let launches = with_scratch(&mut on, |space| layers.launches(tile, sms, space))?;
        let y = on.output((2 * t * n) as u64)?;
        let all_rows = if backward {
            first.input_gradient(dy, Address::NULL, y)
        } else {
            first.output(Address::NULL, 0, y)
        };
        let choice = all_rows.choose(sms);
        let single = with_scratch(&mut on, |space| all_rows.launches(choice, sms, space))?;
        let which = if backward { "dx" } else { "forward" };
        let name = format!("two layers bf16 8192x4096x4096, {vision} rows of the second, {which}");
        compare(gpu, report, (&name, flops), &launches, &single, torch)?;
    }
    let mut launches = Vec::new();
    for group in groups {
        let product = OfRows {
            dtype: DTYPE,
            t,
            m: n,
            n: k,
            rows: group.rows,
            k: group.m,
            a: dy,
            a_line: n,
            b: first.x,
            b_line: k,
            y: on.output((4 * n * k) as u64)?,
        };
        let choice = product.choose(sms);
        launches.extend(with_scratch(&mut on, |space| {
            product.launches(choice, sms, space)
        })?);
    }
    let d_weight = on.output((4 * n * k) as u64)?;
    let all_rows = first.weight_gradient(dy, d_weight);
    let choice = all_rows.choose(sms);
    let single = with_scratch(&mut on, |space| all_rows.launches(choice, sms, space))?;
    let name = format!("two layers bf16 8192x4096x4096, {vision} rows of the second, dW");
    compare(gpu, report, (&name, flops), &launches, &single, torch)
}

/// Launches of two layers beside one product of all rows.
fn compare(
    gpu: &Gpu,
    report: &mut Report,
    (name, flops): (&str, f64),
    two: &[Launch],
    one: &[Launch],
    torch: Torch<'_>,
) -> Result<()> {
    let (two, one) = (time(gpu, two)?, time(gpu, one)?);
    let compared = format!(
        "{}, one product {one:.3} ms: {:.2}x (target {ROUTED_TARGET}){}",
        teraflops(flops, two),
        one / two,
        torch(name, two)
    );
    report.row(name, format!("{two:.3} ms"), compared);
    report.target(name, one / two, ROUTED_TARGET);
    Ok(())
}

/// Queries, keys and values with adapters: stacked, beside each for itself with the sums of their dx.
fn shared(gpu: &Gpu, report: &mut Report, r: usize) -> Result<()> {
    let shape @ [t, n, k] = [8192, 4096, 4096];
    let flops = 3.0 * 2.0 * t as f64 * n as f64 * k as f64;
    let (mut on, sms) = (operands(gpu), gpu.facts().multiprocessors);
    let first = layer(&mut on, shape, r)?;
    let mut layers = vec![first];
    for _ in 0..2 {
        let other = layer(&mut on, shape, r)?;
        layers.push(LoraLinear {
            x: first.x,
            ..other
        });
    }
    let line = shared_lora::line(&layers);
    let stacked = SharedLora {
        layers: &layers,
        stacked: on.normal(DTYPE, (line * k) as u64, 0.02)?,
    };
    let (s, d_stacked) = (
        on.output((2 * t * line) as u64)?,
        on.output((4 * line * k) as u64)?,
    );
    let mut places = |elems: usize| -> Result<Vec<Address>> {
        layers.iter().map(|_| on.output(4 * elems as u64)).collect()
    };
    let (y, d_lora_b, dx) = (places(t * n)?, places(n * r)?, places(t * k)?);
    let dy: Vec<Address> = layers
        .iter()
        .map(|_| on.normal(DTYPE, (t * n) as u64, 1.0))
        .collect::<Result<_>>()?;
    for backward in [false, true] {
        let together = with_scratch(&mut on, |space| match backward {
            false => stacked.forward(s, &y, sms, space),
            true => {
                let gradients = shared_lora::Gradients {
                    dx: dx[0],
                    d_stacked,
                    d_lora_b: &d_lora_b,
                };
                stacked.backward(&dy, s, gradients, sms, space)
            }
        })?;
        let mut apart = Vec::new();
        for (i, layer) in layers.iter().enumerate() {
            apart.extend(with_scratch(&mut on, |space| match backward {
                false => layer.forward(y[i], sms, space),
                true => {
                    let gradients = Gradients {
                        dx: dx[i],
                        d_lora_a: d_stacked,
                        d_lora_b: d_lora_b[i],
                    };
                    layer.backward(dy[i], gradients, sms, space)
                }
            })?);
            if backward && i > 0 {
                let sum = pointwise::add(DTYPE, dx[0], dx[i], dx[0], (t * k) as u64);
                apart.push(sum.context("no kernel")?);
            }
        }
        let (together, apart) = (time(gpu, &together)?, time(gpu, &apart)?);
        let which = if backward { "backward" } else { "forward" };
        report.row(
            format!("three adapted products of one x bf16 8192x4096x4096 rank {r} {which}"),
            format!("{together:.3} ms"),
            format!(
                "{}, {:.2} of {apart:.3} ms each for itself",
                teraflops(flops, together),
                together / apart
            ),
        );
    }
    Ok(())
}

/// Forward and backward of a layer with an adapter beside the plain product and its dx.
fn adapted(gpu: &Gpu, report: &mut Report, r: usize, torch: Torch<'_>) -> Result<()> {
    let shape @ [t, n, k] = [8192, 4096, 4096];
    let flops = 2.0 * t as f64 * n as f64 * k as f64;
    let mut on = operands(gpu);
    let with = layer(&mut on, shape, r)?;
    let without = LoraLinear { r: 0, ..with };
    for which in ["forward", "backward"] {
        let mut launches = |layer: &LoraLinear| match which {
            "forward" => forward(&mut on, layer),
            _ => backward(&mut on, layer),
        };
        let (adapted, plain) = (
            time(gpu, &launches(&with)?)?,
            time(gpu, &launches(&without)?)?,
        );
        let target = match which {
            "forward" => format!(" (target {FORWARD_TARGET})"),
            _ => String::new(),
        };
        let name = format!("adapted product bf16 8192x4096x4096 rank {r} {which}");
        let compared = format!(
            "{}, {:.2} of the plain product's {plain:.3} ms{target}{}",
            teraflops(flops, adapted),
            adapted / plain,
            torch(&name, adapted)
        );
        report.row(&name, format!("{adapted:.3} ms"), compared);
        if which == "forward" {
            report.target(&name, adapted / plain, FORWARD_TARGET);
        }
    }
    Ok(())
}
