//! Stage `products`: matrix products beside cuBLASLt's, two layers over a partition of rows beside one layer of all rows,
//! and layers with adapters beside plain ones, each pair measured in the same run. Every row is written; a target that is
//! missed, or that nothing can be compared for, is a failure of the stage.

use anyhow::Result;
use kernels::DType;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::{CublasLt, WORKSPACE_BYTES};
use kernels::cuda::ops::lora_linear::{Gradients, LoraLinear};
use kernels::cuda::ops::pointwise;
use kernels::cuda::ops::shared_lora::{self, SharedLora};

use super::bench::{Bench, OnGpu, Operands, Scale};
use super::layers::{self, TwoLayers};
use super::peers;
use crate::stages::{Report, Setting, Target, queue};

/// Tokens, features out and in: layers of 7 B models, and of their vision towers.
const SHAPES: [[usize; 3]; 4] = [
    [8192, 4096, 4096],
    [8192, 11008, 4096],
    [8192, 4096, 11008],
    [9808, 15360, 1792],
];
/// Of the layers with adapters, and of two over a partition.
const LAYER: [usize; 3] = [8192, 4096, 4096];
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
    let library = CublasLt::open(&gpu, &setting.search).map_err(|error| error.to_string());
    let scale = Scale {
        divisor: 1,
        params: 0,
    };
    all(&mut OnGpu::new(&gpu, library), scale, &mut report, &torch);
    report
}

/// Every row, on any device.
pub(super) fn all(bench: &mut dyn Bench, scale: Scale, report: &mut Report, torch: Torch<'_>) {
    let mut part = |what: &str, part: &dyn Fn(&mut Operands<'_>, &mut Report) -> Result<()>| {
        report.part(what, |report| {
            let done = part(&mut Operands::new(bench, scale), report);
            done.and(bench.clear())
        });
    };
    for shape in SHAPES {
        part("product", &|on, report| plain(on, report, shape, torch));
    }
    for vision in [2048, 6144] {
        part("two layers", &|on, report| {
            routed(on, report, vision, torch)
        });
    }
    for r in [16, 64] {
        part("adapted layer", &|on, report| adapted(on, report, r, torch));
        part("adapted layers", &|on, report| shared(on, report, r));
    }
}

/// Adds what PyTorch takes for a row of this name and time.
type Torch<'t> = &'t dyn Fn(&str, f64) -> String;

fn time(on: &mut Operands<'_>, launches: Vec<Launch>) -> Result<f64> {
    on.bench.time(&[launches])
}

fn flops([t, n, k]: [usize; 3]) -> f64 {
    2.0 * t as f64 * n as f64 * k as f64
}

fn teraflops(flops: f64, milliseconds: f64) -> String {
    format!("{:.0} TFLOP/s", flops / milliseconds * 1e-9)
}

/// Our product and cuBLASLt's.
fn plain(
    on: &mut Operands<'_>,
    report: &mut Report,
    shape: [usize; 3],
    torch: Torch<'_>,
) -> Result<()> {
    let [t, n, k] = shape;
    let name = format!("product bf16 {t}x{n}x{k}");
    let sizes @ [t, n, _] = layers::sizes(on, shape);
    let layer = layers::layer(on, DTYPE, sizes, 0)?;
    let launches = layers::forward(on, &layer)?;
    let own = time(on, launches)?;
    let y = on.output(DTYPE.size_bytes() * t * n)?;
    let scratch = (on.output(WORKSPACE_BYTES as usize)?, WORKSPACE_BYTES);
    let product = queue::product_of(DTYPE, sizes, [layer.x, layer.weight, y]);
    let theirs = on.bench.time_product(&product, scratch);
    let mut compared = teraflops(flops(sizes), own);
    compared += &match &theirs {
        Ok(theirs) => format!(
            ", cuBLASLt {theirs:.3} ms: {:.2}x (target {PRODUCT_TARGET})",
            theirs / own
        ),
        Err(error) => format!(", no cuBLASLt: {error:#}"),
    };
    compared += &torch(&name, own);
    report.row(&name, format!("{own:.3} ms"), compared);
    match theirs {
        Ok(theirs) => report.target(&name, theirs / own, PRODUCT_TARGET),
        Err(error) => report.failure(format!("{name}: not judged, no cuBLASLt: {error:#}")),
    }
    Ok(())
}

/// One launch for two layers, forward, dx and both dW, and the same for one layer of all rows.
fn routed(
    on: &mut Operands<'_>,
    report: &mut Report,
    vision: usize,
    torch: Torch<'_>,
) -> Result<()> {
    let name =
        |which| format!("two layers bf16 8192x4096x4096, {vision} rows of the second, {which}");
    let sizes = layers::sizes(on, LAYER);
    let rows = on.of(vision);
    let layers = TwoLayers::new(on, DTYPE, sizes, rows)?;
    let LoraLinear { t, n, k, .. } = layers.first;
    for (backward, which, columns) in [(false, "forward", n), (true, "dx", k)] {
        let together = layers.product(on, backward)?;
        let y = on.output(DTYPE.size_bytes() * t * columns)?;
        let all_rows = match backward {
            true => layers.first.input_gradient(layers.dy, Address::NULL, y),
            false => layers.first.output(Address::NULL, 0, y),
        };
        let single =
            on.with_scratch(|sms, space| all_rows.launches(all_rows.choose(sms), sms, space))?;
        compare(on, report, &name(which), [together, single], torch)?;
    }
    let together = layers.weight_gradients(on)?;
    let single = layers::weight_gradient(on, &layers.first, layers.dy)?;
    compare(on, report, &name("dW"), [together, single], torch)
}

/// Launches of two layers beside one product of all rows.
fn compare(
    on: &mut Operands<'_>,
    report: &mut Report,
    name: &str,
    [two, one]: [Vec<Launch>; 2],
    torch: Torch<'_>,
) -> Result<()> {
    let flops = flops(layers::sizes(on, LAYER));
    let (two, one) = (time(on, two)?, time(on, one)?);
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
fn shared(on: &mut Operands<'_>, report: &mut Report, r: usize) -> Result<()> {
    let sizes @ [t, n, k] = layers::sizes(on, LAYER);
    let flops = 3.0 * flops(sizes);
    let first = layers::layer(on, DTYPE, sizes, r)?;
    let mut all = vec![first];
    for _ in 0..2 {
        let other = layers::layer(on, DTYPE, sizes, r)?;
        all.push(LoraLinear {
            x: first.x,
            ..other
        });
    }
    let line = shared_lora::line(&all);
    let stacked = SharedLora {
        layers: &all,
        stacked: on.normal(DTYPE, line * k, 0.02)?,
    };
    let (s, d_stacked) = (on.output(2 * t * line)?, on.output(4 * line * k)?);
    let mut places = |elems: usize| -> Result<Vec<Address>> {
        all.iter().map(|_| on.output(4 * elems)).collect()
    };
    let (y, d_lora_b, dx) = (places(t * n)?, places(n * r)?, places(t * k)?);
    let dy: Vec<Address> = all
        .iter()
        .map(|_| on.normal(DTYPE, t * n, 1.0))
        .collect::<Result<_>>()?;
    for backward in [false, true] {
        let together = on.with_scratch(|sms, space| match backward {
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
        for (i, layer) in all.iter().enumerate() {
            apart.extend(on.with_scratch(|sms, space| match backward {
                false => layer.forward(y[i], sms, space),
                true => {
                    let gradients = Gradients {
                        dx: dx[i],
                        d_lora_a: d_stacked,
                        d_lora_b: d_lora_b[i],
                    };
                    let mut launches = layer.backward(dy[i], gradients, sms, space)?;
                    if i > 0 {
                        let n = (t * k) as u64;
                        launches.push(pointwise::add(DTYPE, dx[0], dx[i], dx[0], n)?);
                    }
                    Some(launches)
                }
            })?);
        }
        let (together, apart) = (time(on, together)?, time(on, apart)?);
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
fn adapted(on: &mut Operands<'_>, report: &mut Report, r: usize, torch: Torch<'_>) -> Result<()> {
    let sizes = layers::sizes(on, LAYER);
    let with = layers::layer(on, DTYPE, sizes, r)?;
    let without = LoraLinear { r: 0, ..with };
    for which in ["forward", "backward"] {
        let mut times = Vec::new();
        for layer in [&with, &without] {
            let launches = match which {
                "forward" => layers::forward(on, layer),
                _ => layers::backward(on, layer),
            };
            times.push(time(on, launches?)?);
        }
        let (adapted, plain) = (times[0], times[1]);
        let target = match which {
            "forward" => format!(" (target {FORWARD_TARGET})"),
            _ => String::new(),
        };
        let name = format!("adapted product bf16 8192x4096x4096 rank {r} {which}");
        let compared = format!(
            "{}, {:.2} of the plain product's {plain:.3} ms{target}{}",
            teraflops(flops(sizes), adapted),
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
