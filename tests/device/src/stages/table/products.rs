//! Stage `products`. It compares matrix products with cuBLASLt's, two layers over row groups with one layer over all
//! rows, and layers with adapters with plain ones. Each pair is measured in the same run. Every row is written. A
//! missed target, or a missing comparison, is a failure of the stage.

use anyhow::{Result, anyhow};
use kernels::DType;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::matmul::{CublasLt, LibraryUse, Multiply, WORKSPACE_BYTES};
use kernels::cuda::ops::lora_linear::{Gradients, LoraLinear};
use kernels::cuda::ops::pointwise;
use kernels::cuda::ops::product::Product;
use kernels::cuda::ops::shared_lora::{self, SharedLora};

use super::bench::{Bench, OnGpu, Operands, Scale};
use super::layers::{self, AdaptedLayers, SharedAdaptedLayers, TwoLayers};
use super::{SMALL, peers};
use crate::stages::{Report, Setting, Target};

/// Tokens, output features and input features: layers of 7 B models and of their vision towers.
const SHAPES: [[usize; 3]; 4] = [
    [8192, 4096, 4096],
    [8192, 11008, 4096],
    [8192, 4096, 11008],
    [9808, 15360, 1792],
];
/// Sizes of the layers with adapters, and of two layers over row groups.
const LAYER: [usize; 3] = [8192, 4096, 4096];
/// Share of cuBLASLt's speed, and the share where `mma.sync` reaches 63 to 65 % of the tensor cores' peak. Runs use the
/// library there, also for adapted layers.
const PRODUCT_TARGET: Target = Target::AtLeast(0.7);
const SLOW_PRODUCT_TARGET: Target = Target::AtLeast(0.6);
/// Share of the speed of one product over all rows.
const GROUPED_TARGET: Target = Target::AtLeast(0.9);
/// Largest time of a layer with an adapter, forward and backward, relative to the plain product (of `y`, of `dx`).
/// Forward adds `s` and the low-rank term: `2 r / k` of the product's operations in one pass over `x`. Backward adds
/// the term, `ds`, `dB` and `dA`: `4 r / k` in one pass over `dy` and one over `x`, twice as much.
const ADAPTED_TARGETS: [Target; 2] = [Target::AtMost(1.15), Target::AtMost(1.3)];
/// Largest time of two layers with adapters, relative to one plain product over all rows: the product of both
/// allowances.
const GROUPED_ADAPTED_TARGETS: [Target; 2] = [Target::AtMost(1.28), Target::AtMost(1.44)];

const DTYPE: DType = DType::BF16;

const PASSES: [(bool, &str); 2] = [(false, "forward"), (true, "backward")];

/// Use of a plain product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    Forward,
    InputGradient,
    WeightGradient,
}

/// Measures the rows. PyTorch's times are added where it has the same operation.
#[must_use]
pub fn run(setting: &Setting) -> Report {
    let mut report = setting.report("products");
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
        divisor: SMALL.pow(u32::from(setting.small)),
        params: 0,
    };
    all(
        &mut OnGpu::new(&gpu, library, setting),
        scale,
        &mut report,
        &torch,
    );
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
        part("product", &|on, report| {
            plain(on, report, (DTYPE, Use::Forward), shape, torch)
        });
    }
    for dtype in [DType::BF16, DType::F16] {
        for made in [Use::Forward, Use::InputGradient, Use::WeightGradient] {
            if (dtype, made) != (DTYPE, Use::Forward) {
                part("product", &|on, report| {
                    plain(on, report, (dtype, made), LAYER, torch)
                });
            }
        }
    }
    for vision in [2048, 6144] {
        part("two layers", &|on, report| {
            grouped(on, report, vision, torch)
        });
    }
    for r in [16, 64] {
        part("adapted layer", &|on, report| adapted(on, report, r, torch));
        part("adapted layers", &|on, report| shared(on, report, r));
        part("two adapted layers", &|on, report| {
            grouped_lora(on, report, r)
        });
        part("two adapted layers of one input", &|on, report| {
            shared_grouped_lora(on, report, r)
        });
    }
}

/// Returns PyTorch's figure for a row of this name and time.
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

/// Adds the row of our product and cuBLASLt's.
fn plain(
    on: &mut Operands<'_>,
    report: &mut Report,
    (dtype, made): (DType, Use),
    shape: [usize; 3],
    torch: Torch<'_>,
) -> Result<()> {
    let [t, n, k] = shape;
    let which = match made {
        Use::Forward => "",
        Use::InputGradient => " dx",
        Use::WeightGradient => " dW",
    };
    let name = format!("product {dtype} {t}x{n}x{k}{which}");
    let sizes @ [t, n, k] = layers::sizes(on, shape);
    let layer = layers::layer(on, dtype, sizes, 0)?;
    let bytes = dtype.size_bytes();
    let product = match made {
        Use::Forward => layer.output(Address::NULL, 0, on.output(bytes * t * n)?),
        Use::InputGradient => {
            let dy = on.normal(dtype, t * n, 1.0)?;
            layer.input_gradient(dy, Address::NULL, on.output(bytes * t * k)?)
        }
        Use::WeightGradient => {
            let dy = on.normal(dtype, t * n, 1.0)?;
            layer.weight_gradient(dy, on.output(4 * n * k)?)
        }
    };
    let launches =
        on.with_scratch(|sms, space| product.launches(product.choose(sms), sms, space))?;
    let own = time(on, launches)?;
    let theirs = library(on, &product);
    let target = match on.bench.library() {
        LibraryUse::AdaptedLayers => SLOW_PRODUCT_TARGET,
        _ => PRODUCT_TARGET,
    };
    let mut compared = teraflops(flops(sizes), own);
    compared += &match &theirs {
        Ok(theirs) => format!(
            ", cuBLASLt {theirs:.3} ms: {:.2}x (target {target})",
            theirs / own
        ),
        Err(error) => format!(", no cuBLASLt: {error:#}"),
    };
    compared += &torch(&name, own);
    report.row(&name, format!("{own:.3} ms"), compared);
    match theirs {
        Ok(theirs) => report.target(&name, theirs / own, target),
        Err(error) => report.failure(format!("{name}: not judged, no cuBLASLt: {error:#}")),
    }
    Ok(())
}

/// The library's time for a product, or the reason for its absence.
fn library(on: &mut Operands<'_>, product: &Product) -> Result<f64> {
    let scratch = (on.output(WORKSPACE_BYTES as usize)?, WORKSPACE_BYTES);
    match Multiply::of(product) {
        Some(product) => on.bench.time_product(&product, scratch),
        None => Err(anyhow!("it takes no such lines")),
    }
}

/// Our operation compared with the single library product that a run without adapters or row groups would use. Without the
/// library these rows are not judged, since the rows of plain products already count as missing.
struct Library {
    time: Result<f64>,
    target: Target,
}

impl Library {
    fn of(on: &mut Operands<'_>, product: &Product, target: Target) -> Self {
        let time = library(on, product);
        Self { time, target }
    }

    /// Our time as a multiple of the library's, or our speed as a share of it, as the target requires.
    fn ratio(&self, own: f64, theirs: f64) -> f64 {
        match self.target {
            Target::AtLeast(_) => theirs / own,
            Target::AtMost(_) => own / theirs,
        }
    }

    fn words(&self, own: f64) -> String {
        match &self.time {
            Ok(theirs) => format!(
                ", cuBLASLt's product {theirs:.3} ms: {:.2}x (target {})",
                self.ratio(own, *theirs),
                self.target
            ),
            Err(error) => format!(", not judged by cuBLASLt: {error:#}"),
        }
    }

    fn judge(&self, name: &str, own: f64, report: &mut Report) {
        if let Ok(theirs) = &self.time {
            let what = format!("{name} beside cuBLASLt's product");
            report.target(&what, self.ratio(own, *theirs), self.target);
        }
    }
}

/// One launch for two layers (forward, dx, both dW), and the same for one layer over all rows.
fn grouped(
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
        compare(on, report, &name(which), (together, &all_rows), torch)?;
    }
    let together = layers.weight_gradients(on)?;
    let y = on.output(4 * n * k)?;
    let all_rows = layers.first.weight_gradient(layers.dy, y);
    compare(on, report, &name("dW"), (together, &all_rows), torch)
}

/// Compares the launches of two layers with one product over all rows, ours and the library's.
fn compare(
    on: &mut Operands<'_>,
    report: &mut Report,
    name: &str,
    (two, all_rows): (Vec<Launch>, &Product),
    torch: Torch<'_>,
) -> Result<()> {
    let flops = flops(layers::sizes(on, LAYER));
    let one = on.with_scratch(|sms, space| all_rows.launches(all_rows.choose(sms), sms, space))?;
    let (two, one) = (time(on, two)?, time(on, one)?);
    let library = Library::of(on, all_rows, GROUPED_TARGET);
    let compared = format!(
        "{}, one product {one:.3} ms: {:.2}x (target {GROUPED_TARGET}){}{}",
        teraflops(flops, two),
        one / two,
        library.words(two),
        torch(name, two)
    );
    report.row(name, format!("{two:.3} ms"), compared);
    report.target(name, one / two, GROUPED_TARGET);
    library.judge(name, two, report);
    Ok(())
}

/// Rows of the second of two adapted layers.
const VISION: usize = 6144;

/// Two layers with adapters over row groups, as experts have them. They are compared with one adapted layer over all
/// rows and with the library's plain product.
fn grouped_lora(on: &mut Operands<'_>, report: &mut Report, r: usize) -> Result<()> {
    let sizes = layers::sizes(on, LAYER);
    let one = Stacked::new(on, 1, r)?;
    let rows = on.of(VISION);
    let two = AdaptedLayers::new(on, &one.layers[0], rows)?;
    let plain = LoraLinear {
        r: 0,
        ..one.layers[0]
    };
    for (backward, which) in PASSES {
        let together = two.launches(on, one.dy[0], backward)?;
        let single = one.launches(on, backward)?;
        let product = match backward {
            false => plain.output(Address::NULL, 0, one.y[0]),
            true => plain.input_gradient(one.dy[0], Address::NULL, one.dx),
        };
        let (together, single) = (time(on, together)?, time(on, single)?);
        let target = GROUPED_ADAPTED_TARGETS[usize::from(backward)];
        let library = Library::of(on, &product, target);
        let name = format!(
            "two adapted layers bf16 8192x4096x4096 rank {r}, {VISION} rows of the second, {which}"
        );
        let compared = format!(
            "{}, one adapted layer {single:.3} ms: {:.2}x (target {GROUPED_TARGET}){}",
            teraflops(flops(sizes), together),
            single / together,
            library.words(together)
        );
        report.row(&name, format!("{together:.3} ms"), compared);
        report.target(&name, single / together, GROUPED_TARGET);
        library.judge(&name, together, report);
    }
    Ok(())
}

/// Queries, keys and values of experts with adapters: stacked, and each pair separately with the sums of their dx.
fn shared_grouped_lora(on: &mut Operands<'_>, report: &mut Report, r: usize) -> Result<()> {
    let sizes = layers::sizes(on, LAYER);
    let flops = 3.0 * flops(sizes);
    let first = layers::layer(on, DTYPE, sizes, r)?;
    let rows = on.of(VISION);
    let all = SharedAdaptedLayers::new(on, &first, rows)?;
    for (backward, which) in PASSES {
        let (together, apart) = (all.together(on, backward)?, all.apart(on, backward)?);
        let (together, apart) = (time(on, together)?, time(on, apart)?);
        let name = format!(
            "three of two adapted layers of one x bf16 8192x4096x4096 rank {r}, {VISION} rows of the second, {which}"
        );
        beside_each(report, name, flops, [together, apart]);
    }
    Ok(())
}

/// The row of layers with one input, which has no target: milliseconds together, and separately.
fn beside_each(report: &mut Report, name: String, flops: f64, [together, apart]: [f64; 2]) {
    report.row(
        name,
        format!("{together:.3} ms"),
        format!(
            "{}, {:.2} of {apart:.3} ms each for itself",
            teraflops(flops, together),
            together / apart
        ),
    );
}

/// Layers of one input with stacked adapters, as models run them, and the addresses of their results.
struct Stacked {
    layers: Vec<LoraLinear>,
    a: Address,
    d_a: Address,
    /// Low-rank activations of the adapters, stored by forward.
    s: Address,
    y: Vec<Address>,
    dy: Vec<Address>,
    d_lora_b: Vec<Address>,
    dx: Address,
}

impl Stacked {
    fn new(on: &mut Operands<'_>, count: usize, r: usize) -> Result<Self> {
        let sizes @ [t, n, k] = layers::sizes(on, LAYER);
        let mut layers = vec![layers::layer(on, DTYPE, sizes, r)?];
        while layers.len() < count {
            let other = layers::layer(on, DTYPE, sizes, r)?;
            layers.push(LoraLinear {
                x: layers[0].x,
                ..other
            });
        }
        let line = shared_lora::line(&layers);
        let mut places = |bytes: usize| -> Result<Vec<Address>> {
            layers.iter().map(|_| on.output(bytes)).collect()
        };
        let (y, d_lora_b) = (places(2 * t * n)?, places(4 * n * r)?);
        let dy = layers.iter().map(|_| on.normal(DTYPE, t * n, 1.0));
        Ok(Self {
            dy: dy.collect::<Result<_>>()?,
            a: on.normal(DTYPE, line * k, 0.02)?,
            d_a: on.output(4 * line * k)?,
            s: on.output(2 * t * line)?,
            dx: on.output(2 * t * k)?,
            layers,
            y,
            d_lora_b,
        })
    }

    fn launches(&self, on: &mut Operands<'_>, backward: bool) -> Result<Vec<Launch>> {
        let stacked = SharedLora {
            layers: &self.layers,
            stacked: self.a,
        };
        let gradients = shared_lora::Gradients {
            dx: self.dx,
            d_stacked: self.d_a,
            d_lora_b: &self.d_lora_b,
        };
        on.with_scratch(|sms, space| match backward {
            false => stacked.forward(self.s, &self.y, sms, space),
            true => stacked.backward(&self.dy, self.s, gradients, sms, space),
        })
    }
}

impl Stacked {
    /// Milliseconds of the first layer where the library computes its wide product. The parts are timed one by one.
    fn through_library(&self, on: &mut Operands<'_>, backward: bool) -> Result<f64> {
        let stacked = SharedLora {
            layers: &self.layers[..1],
            stacked: self.a,
        };
        let gradients = shared_lora::Gradients {
            dx: Address::NULL,
            d_stacked: self.d_a,
            d_lora_b: &self.d_lora_b,
        };
        let narrow = on.with_scratch(|sms, space| match backward {
            false => stacked.forward(self.s, &[], sms, space),
            true => stacked.backward(&self.dy, self.s, gradients, sms, space),
        })?;
        let layer = &self.layers[0];
        let wide = match backward {
            false => layer.output(self.s, layer.padded_rank(), self.y[0]),
            true => layer.input_gradient(self.dy[0], self.s, self.dx),
        };
        let calls = Multiply::of_adapted(&wide).ok_or_else(|| anyhow!("no such calls"))?;
        let scratch = (on.output(WORKSPACE_BYTES as usize)?, WORKSPACE_BYTES);
        let mut sum = time(on, narrow)?;
        for call in &calls {
            sum += on.bench.time_product(call, scratch)?;
        }
        Ok(sum)
    }
}

/// Queries, keys and values with adapters: stacked, and each separately with the sums of their dx.
fn shared(on: &mut Operands<'_>, report: &mut Report, r: usize) -> Result<()> {
    let sizes @ [t, _, k] = layers::sizes(on, LAYER);
    let flops = 3.0 * flops(sizes);
    let all = Stacked::new(on, 3, r)?;
    let own_dx = on.output(2 * t * k)?;
    for (backward, which) in PASSES {
        let together = all.launches(on, backward)?;
        let mut apart = Vec::new();
        for (i, layer) in all.layers.iter().enumerate() {
            apart.extend(on.with_scratch(|sms, space| match backward {
                false => layer.forward(all.y[i], sms, space),
                true => {
                    let dx = if i == 0 { all.dx } else { own_dx };
                    let gradients = Gradients {
                        dx,
                        d_lora_a: all.d_a,
                        d_lora_b: all.d_lora_b[i],
                    };
                    let mut launches = layer.backward(all.dy[i], gradients, sms, space)?;
                    if i > 0 {
                        let n = (t * k) as u64;
                        launches.push(pointwise::add(DTYPE, all.dx, dx, all.dx, n)?);
                    }
                    Some(launches)
                }
            })?);
        }
        let (together, apart) = (time(on, together)?, time(on, apart)?);
        let name = format!("three adapted products of one x bf16 8192x4096x4096 rank {r} {which}");
        beside_each(report, name, flops, [together, apart]);
    }
    Ok(())
}

/// Forward and backward of a layer with an adapter, compared with the plain product and its dx.
fn adapted(on: &mut Operands<'_>, report: &mut Report, r: usize, torch: Torch<'_>) -> Result<()> {
    let with = Stacked::new(on, 1, r)?;
    let without = LoraLinear {
        r: 0,
        ..with.layers[0]
    };
    for (backward, which) in PASSES {
        let adapted = with.launches(on, backward)?;
        let plain = match backward {
            false => layers::forward(on, &without),
            true => layers::backward(on, &without),
        };
        let (adapted, plain) = (time(on, adapted)?, time(on, plain?)?);
        let product = match backward {
            false => without.output(Address::NULL, 0, with.y[0]),
            true => without.input_gradient(with.dy[0], Address::NULL, with.dx),
        };
        let target = ADAPTED_TARGETS[usize::from(backward)];
        let library = Library::of(on, &product, target);
        let name = format!("adapted product bf16 8192x4096x4096 rank {r} {which}");
        let calls = with.through_library(on, backward);
        let calls_words = match &calls {
            Ok(calls) => format!(", with cuBLASLt's wide products {calls:.3} ms"),
            Err(_) => String::new(),
        };
        // What a run does on this GPU.
        let used = match (on.bench.library(), calls) {
            (LibraryUse::AdaptedLayers, Ok(calls)) => calls,
            _ => adapted,
        };
        let compared = format!(
            "{}, {:.2} of the plain product's {plain:.3} ms (target {target}){calls_words}{}{}",
            teraflops(flops(layers::sizes(on, LAYER)), adapted),
            adapted / plain,
            library.words(used),
            torch(&name, adapted)
        );
        report.row(&name, format!("{adapted:.3} ms"), compared);
        report.target(&name, adapted / plain, target);
        library.judge(&name, used, report);
    }
    Ok(())
}
