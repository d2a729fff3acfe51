//! A linear layer with an adapter on a machine, and its reference with tolerances.

use anyhow::{Context, Result, ensure};
use kernels::DType;
use kernels::cuda::ops::lora_linear::LoraLinear;
use kernels::cuda::ops::product::Product;
use kernels::cuda::ops::workspace::Workspace;

use super::operand::{Operand, decode, launch_all};
use crate::machine::Machine;
use crate::reference::{Lora, absolute, matmul, transpose};
use crate::tolerance;

/// Shape of a layer to check.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) dtype: DType,
    pub(super) t: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) r: usize,
    pub(super) bias: bool,
    pub(super) scale: f32,
    /// Number of multiprocessors for the choice of tiles.
    pub(super) multiprocessors: u32,
}

/// A layer on a machine, with the values of its operands.
pub(super) struct Layer {
    pub(super) on_device: LoraLinear,
    pub(super) exact: Lora,
}

/// Draws a layer with random operands.
pub(super) fn draw(machine: &mut dyn Machine, shape: Shape) -> Result<Layer> {
    let Shape {
        dtype, t, n, k, r, ..
    } = shape;
    let depth = 1.0 / (k as f32).sqrt();
    let x = Operand::draw(machine, dtype, "x", t * k, 1.0)?;
    let weight = Operand::draw(machine, dtype, "weight", n * k, depth)?;
    let lora_a = Operand::draw(machine, dtype, "lora_a", r * k, depth)?;
    let lora_b = Operand::draw(machine, dtype, "lora_b", n * r, 0.5)?;
    let bias = Operand::draw(machine, dtype, "bias", if shape.bias { n } else { 0 }, 1.0)?;
    Ok(Layer {
        on_device: LoraLinear {
            dtype,
            t,
            n,
            k,
            r,
            x: x.address(),
            weight: weight.address(),
            bias: bias.address(),
            lora_a: lora_a.address(),
            lora_b: lora_b.address(),
            scale: shape.scale,
            dropped: None,
        },
        exact: Lora {
            x: x.values,
            weight: weight.values,
            bias: shape.bias.then_some(bias.values),
            a: lora_a.values,
            b: lora_b.values,
            scale: f64::from(shape.scale),
            sizes: [t, n, k, r],
        },
    })
}

/// The same layer with the magnitudes of all operands.
pub(super) fn magnitudes(exact: &Lora) -> Lora {
    Lora {
        x: absolute(&exact.x),
        weight: absolute(&exact.weight),
        bias: exact.bias.as_deref().map(absolute),
        a: absolute(&exact.a),
        b: absolute(&exact.b),
        ..exact.clone()
    }
}

/// Error bound of the 16-bit rows `scale * x y^T`, for `x [t, depth]` and `y [r, depth]`.
pub(super) fn narrow_error(
    dtype: DType,
    scale: f64,
    x: &[f64],
    y: &[f64],
    [t, r, k]: [usize; 3],
) -> Vec<f64> {
    let y = transpose(y, r, k);
    let rows = matmul(x, &y, t, r, k);
    let sizes = matmul(&absolute(x), &absolute(&y), t, r, k);
    let error =
        |(row, size): (f64, f64)| tolerance::tensor_product(dtype, k, scale * row, scale * size);
    rows.into_iter().zip(sizes).map(error).collect()
}

/// Compares with the tolerance of the product plus that of its low-rank operand.
pub(super) fn compare(
    name: &str,
    (dtype, bytes): (DType, &[u8]),
    want: &[f64],
    depth: usize,
    magnitude: &[f64],
    inherited: &[f64],
) -> Result<()> {
    let got = decode(dtype, bytes);
    ensure!(got.len() == want.len(), "{name} has {} elements", got.len());
    for (i, got) in got.into_iter().enumerate() {
        let own = tolerance::tensor_product(dtype, depth, want[i], magnitude[i]);
        let (want, allowed) = (want[i], own + inherited[i]);
        ensure!(
            (got - want).abs() <= allowed,
            "{name}[{i}] is {got} instead of {want}, allowed {allowed:e}"
        );
    }
    Ok(())
}

/// Possible change of `y` by the rounding of `s`.
pub(super) fn forward_error(dtype: DType, exact: &Lora) -> Vec<f64> {
    let [t, n, k, r] = exact.sizes;
    let s = narrow_error(dtype, exact.scale, &exact.x, &exact.a, [t, r, k]);
    matmul(&s, &transpose(&absolute(&exact.b), n, r), t, n, r)
}

/// Runs the launches of one product, with workspace of the size they need.
pub(super) fn run_product(machine: &mut dyn Machine, product: &Product) -> Result<()> {
    let choice = product.choose(132);
    let space = machine.allocate(product.workspace_bytes(choice) as usize)?;
    let launches = product.launches(choice, 132, &mut Workspace::new(space.address));
    launch_all(machine, &launches.context("no kernel")?)
}
