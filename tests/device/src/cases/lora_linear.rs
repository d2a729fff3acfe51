//! Linear layers with adapters, forward and backward, compared with f64.

use anyhow::{Context, Result, ensure};
use kernels::DType;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::ops::grouped as grouped_kernels;
use kernels::cuda::ops::lora_linear::{Gradients, LoraLinear};
use kernels::cuda::ops::product::{self as product_kernels, Choice};
use kernels::cuda::ops::tile::Tile;
use kernels::cuda::ops::workspace::Workspace;

use super::layer::{Shape, compare, draw, forward_error, magnitudes, narrow_error, run_product};
use super::operand::{Operand, launch_all};
use super::{Case, Effort, grouped, product};
use crate::machine::Machine;
use crate::reference::{Lora, absolute, matmul, transpose};

/// Forward and backward of layers with odd sizes and all ranks; the tiles of products.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = product::cases(&product_kernels::choosable());
    cases.extend(grouped::cases(&grouped_kernels::choosable(), effort));
    cases.extend(layers(shapes(effort)));
    cases.push(Case::new("adapters that share s", check_stacked_adapters));
    cases.push(Case::new("gradient of a weight", check_weight_gradient));
    if effort == Effort::Gpu {
        for r in [0, 16, 64] {
            cases.push(Case::new(
                format!("layer of a 7B model, rank {r}"),
                move |machine| check_large(machine, r),
            ));
        }
    }
    cases
}

/// Layers in f32: the same launches on another kernel.
pub(super) fn plain_layers(effort: Effort) -> Vec<Case> {
    let mut sizes = vec![(129, 101, 75, 0), (63, 40, 264, 4), (200, 136, 41, 40)];
    if effort == Effort::Gpu {
        sizes.push((500, 1152, 1030, 8));
    }
    layers(sizes.into_iter().map(|(t, n, k, r)| Shape {
        dtype: DType::F32,
        t,
        n,
        k,
        r,
        bias: r != 4,
        scale: 0.3,
        multiprocessors: 132,
    }))
}

/// Forward and backward of each layer.
fn layers(shapes: impl IntoIterator<Item = Shape>) -> Vec<Case> {
    let both = |shape: Shape| {
        [
            Case::new(format!("forward of {shape:?}"), move |machine| {
                check_forward(machine, shape)
            }),
            Case::new(format!("backward of {shape:?}"), move |machine| {
                check_backward(machine, shape)
            }),
        ]
    };
    shapes.into_iter().flat_map(both).collect()
}

fn shapes(effort: Effort) -> Vec<Shape> {
    let tokens = [1, 63, 127, 129, 200];
    let sizes = [(72, 40), (136, 104), (40, 264), (80, 75), (101, 48)];
    let ranks = [0, 1, 4, 8, 16, 40, 64, 128];
    let ranks = ranks.into_iter().enumerate();
    let mut shapes: Vec<Shape> = ranks
        .map(|(i, r)| Shape {
            dtype: DType::BF16,
            t: tokens[i % 5],
            n: sizes[i % 5].0,
            k: sizes[i % 5].1,
            r,
            bias: i % 2 == 0,
            scale: [2.0, 0.5, 0.3][i % 3],
            multiprocessors: [132, 1][i % 2],
        })
        .collect();
    shapes.extend([(0, true), (16, true), (12, false)].map(|(r, bias)| Shape {
        dtype: DType::F16,
        t: 129,
        n: 101,
        k: 72,
        r,
        bias,
        scale: 2.0,
        multiprocessors: 132,
    }));
    let large = [
        (1000, 1152, 588, 8),
        (300, 1152, 4304, 16),
        (2049, 640, 1024, 64),
    ];
    if effort == Effort::Gpu {
        shapes.extend(large.map(|(t, n, k, r)| Shape {
            dtype: DType::BF16,
            t,
            n,
            k,
            r,
            bias: true,
            scale: 2.0,
            multiprocessors: 132,
        }));
    }
    shapes
}

/// `y` of two runs that must agree.
fn run_forward(machine: &mut dyn Machine, layer: &LoraLinear, sms: u32) -> Result<Vec<u8>> {
    let mut count = Workspace::new(Address::NULL);
    layer
        .forward::<Launch>(Address(256), sms, &mut count)
        .context("no kernel")?;
    let mut all = Vec::new();
    for _ in 0..2 {
        let space = machine.allocate(count.bytes() as usize)?;
        let y = machine.output::<u8>(layer.t * layer.n * layer.dtype.size_bytes())?;
        let launches = layer.forward(y.address, sms, &mut Workspace::new(space.address));
        launch_all(machine, &launches.context("no kernel")?)?;
        all.push(machine.download::<u8>(y)?);
    }
    ensure!(all[0] == all[1], "two runs differ");
    Ok(all.swap_remove(0))
}

fn check_forward(machine: &mut dyn Machine, shape: Shape) -> Result<()> {
    let layer = draw(machine, shape)?;
    let y = run_forward(machine, &layer.on_device, shape.multiprocessors)?;
    let sizes = magnitudes(&layer.exact).forward();
    let inherited = forward_error(shape.dtype, &layer.exact);
    let depth = shape.k + shape.r;
    compare(
        "y",
        (shape.dtype, &y),
        &layer.exact.forward(),
        depth,
        &sizes,
        &inherited,
    )
}

fn check_backward(machine: &mut dyn Machine, shape: Shape) -> Result<()> {
    let Shape {
        dtype, t, n, k, r, ..
    } = shape;
    let layer = draw(machine, shape)?;
    let dy = Operand::draw(machine, dtype, "dy", t * n, 1.0)?;
    let mut all = Vec::new();
    for _ in 0..2 {
        let dx = machine.output::<u8>(t * k * dtype.size_bytes())?;
        let (da, db) = (machine.output::<f32>(r * k)?, machine.output::<f32>(n * r)?);
        let gradients = Gradients {
            dx: dx.address,
            d_lora_a: da.address,
            d_lora_b: db.address,
        };
        let (on_device, sms) = (layer.on_device, shape.multiprocessors);
        let mut count = Workspace::new(Address::NULL);
        on_device
            .backward::<Launch>(dy.address(), gradients, sms, &mut count)
            .context("no kernel")?;
        let mut space = Workspace::new(machine.allocate(count.bytes() as usize)?.address);
        let launches = on_device.backward(dy.address(), gradients, sms, &mut space);
        launch_all(machine, &launches.context("no kernel")?)?;
        let bytes = [dx, da, db].map(|buffer| machine.download::<u8>(buffer));
        all.push(bytes.into_iter().collect::<Result<Vec<_>>>()?);
    }
    ensure!(all[0] == all[1], "two runs differ");
    let [exact, sizes] = [&layer.exact, &magnitudes(&layer.exact)];
    let size_dy = absolute(&dy.values);
    let (want, size) = (exact.backward(&dy.values), sizes.backward(&size_dy));
    let s = narrow_error(dtype, exact.scale, &exact.x, &exact.a, [t, r, k]);
    let columns = transpose(&exact.b, n, r);
    let ds = narrow_error(dtype, exact.scale, &dy.values, &columns, [t, r, n]);
    let inherited = [
        matmul(&ds, &sizes.a, t, k, r),
        matmul(&transpose(&ds, t, r), &sizes.x, r, k, t),
        matmul(&transpose(&size_dy, t, n), &s, n, r, t),
    ];
    let got = &all[0];
    let f32 = DType::F32;
    compare(
        "dx",
        (dtype, &got[0]),
        &want[0],
        n + r,
        &size[0],
        &inherited[0],
    )?;
    compare(
        "d_lora_a",
        (f32, &got[1]),
        &want[1],
        t,
        &size[1],
        &inherited[1],
    )?;
    compare(
        "d_lora_b",
        (f32, &got[2]),
        &want[2],
        t,
        &size[2],
        &inherited[2],
    )
}

/// Two adapters with stacked A: both layers read their columns of one `s`.
fn check_stacked_adapters(machine: &mut dyn Machine) -> Result<()> {
    let shape = Shape {
        dtype: DType::BF16,
        t: 70,
        n: 48,
        k: 56,
        r: 24,
        bias: true,
        scale: 2.0,
        multiprocessors: 132,
    };
    let layer = draw(machine, shape)?;
    let s = machine.output::<u16>(shape.t * layer.on_device.padded_rank())?;
    run_product(machine, &layer.on_device.down(s.address))?;
    let exact = &layer.exact;
    for (first, r) in [(0, 8), (8, 16)] {
        let lora_b = Operand::draw(machine, shape.dtype, "own b", shape.n * r, 0.5)?;
        let one = LoraLinear {
            r,
            lora_b: lora_b.address(),
            ..layer.on_device
        };
        let y = machine.output::<u16>(shape.t * shape.n)?;
        let columns = Address(s.address.0 + 2 * first as u64);
        run_product(
            machine,
            &one.output(columns, layer.on_device.padded_rank(), y.address),
        )?;
        let exact = Lora {
            a: exact.a[first * shape.k..(first + r) * shape.k].to_vec(),
            b: lora_b.values,
            sizes: [shape.t, shape.n, shape.k, r],
            ..exact.clone()
        };
        let (want, size) = (exact.forward(), magnitudes(&exact).forward());
        let inherited = forward_error(shape.dtype, &exact);
        let y = machine.download::<u8>(y)?;
        compare(
            "y",
            (shape.dtype, &y),
            &want,
            shape.k + r,
            &size,
            &inherited,
        )?;
    }
    Ok(())
}

fn check_weight_gradient(machine: &mut dyn Machine) -> Result<()> {
    let shape = Shape {
        dtype: DType::BF16,
        t: 201,
        n: 72,
        k: 101,
        r: 0,
        bias: false,
        scale: 1.0,
        multiprocessors: 132,
    };
    let Shape { t, n, k, .. } = shape;
    let layer = draw(machine, shape)?;
    let dy = Operand::draw(machine, shape.dtype, "dy", t * n, 1.0)?;
    let out = machine.output::<f32>(n * k)?;
    run_product(
        machine,
        &layer.on_device.weight_gradient(dy.address(), out.address),
    )?;
    let product = |dy: &[f64], x: &[f64]| matmul(&transpose(dy, t, n), x, n, k, t);
    let want = product(&dy.values, &layer.exact.x);
    let size = product(&absolute(&dy.values), &absolute(&layer.exact.x));
    let got = machine.download::<u8>(out)?;
    compare(
        "d_weight",
        (DType::F32, &got),
        &want,
        t,
        &size,
        &vec![0.0; n * k],
    )
}

/// Compares some rows with the reference, and all rows bit for bit with the smallest tile.
fn check_large(machine: &mut dyn Machine, r: usize) -> Result<()> {
    let shape = Shape {
        dtype: DType::BF16,
        t: 8191,
        n: 4096,
        k: 4096,
        r,
        bias: true,
        scale: 2.0,
        multiprocessors: 132,
    };
    let layer = draw(machine, shape)?;
    let y = run_forward(machine, &layer.on_device, shape.multiprocessors)?;
    let rows: Vec<usize> = (0..shape.t).step_by(420).chain([shape.t - 1]).collect();
    let pick = |bytes: usize| move |row: &usize| row * bytes..(row + 1) * bytes;
    let exact = Lora {
        x: rows
            .iter()
            .map(pick(shape.k))
            .flat_map(|at| layer.exact.x[at].to_vec())
            .collect(),
        sizes: [rows.len(), shape.n, shape.k, r],
        ..layer.exact
    };
    let sample: Vec<u8> = rows
        .iter()
        .map(pick(2 * shape.n))
        .flat_map(|at| y[at].to_vec())
        .collect();
    let (want, size) = (exact.forward(), magnitudes(&exact).forward());
    let inherited = forward_error(shape.dtype, &exact);
    compare(
        "y",
        (shape.dtype, &sample),
        &want,
        shape.k + r,
        &size,
        &inherited,
    )?;

    let s = machine.output::<u16>(shape.t * layer.on_device.padded_rank())?;
    if r > 0 {
        run_product(machine, &layer.on_device.down(s.address))?;
    }
    let other = machine.output::<u16>(shape.t * shape.n)?;
    let product = layer
        .on_device
        .output(s.address, layer.on_device.padded_rank(), other.address);
    let small = Tile::all()
        .find(|tile| (tile.m, tile.n) == (64, 64))
        .context("no small tile")?;
    let choice = Choice {
        tile: small,
        parts: 1,
    };
    let launches = product.launches(choice, 132, &mut Workspace::new(Address::NULL));
    launch_all(machine, &launches.context("no kernel")?)?;
    ensure!(
        machine.download::<u8>(other)? == y,
        "the smallest tile gives other bits"
    );
    Ok(())
}
