//! Linear layers with random operands: one with or without an adapter, two over a partition of rows.

use anyhow::Result;
use kernels::DType;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::ops::lora_linear::{Gradients, LoraLinear};
use kernels::cuda::ops::routed::{Group, OfRows, Routed};

use super::bench::Operands;

/// Tokens, features out and in, at the scale.
pub(super) fn sizes(on: &Operands<'_>, shape: [usize; 3]) -> [usize; 3] {
    shape.map(|n| on.of(n))
}

/// A layer with random operands of sizes that have the scale.
pub(super) fn layer(
    on: &mut Operands<'_>,
    dtype: DType,
    [t, n, k]: [usize; 3],
    r: usize,
) -> Result<LoraLinear> {
    Ok(LoraLinear {
        dtype,
        t,
        n,
        k,
        r,
        x: on.normal(dtype, t * k, 1.0)?,
        weight: on.normal(dtype, n * k, 0.02)?,
        bias: Address::NULL,
        lora_a: on.normal(dtype, r.max(1) * k, 0.02)?,
        lora_b: on.normal(dtype, n * r.max(1), 0.02)?,
        scale: 0.5,
    })
}

/// `y`.
pub(super) fn forward(on: &mut Operands<'_>, layer: &LoraLinear) -> Result<Vec<Launch>> {
    let y = on.output(layer.dtype.size_bytes() * layer.t * layer.n)?;
    on.with_scratch(|sms, space| layer.forward(y, sms, space))
}

/// `dx` and, with an adapter, its gradients.
pub(super) fn backward(on: &mut Operands<'_>, layer: &LoraLinear) -> Result<Vec<Launch>> {
    let LoraLinear {
        dtype, t, n, k, r, ..
    } = *layer;
    let dy = on.normal(dtype, t * n, 1.0)?;
    let gradients = Gradients {
        dx: on.output(dtype.size_bytes() * t * k)?,
        d_lora_a: on.output(4 * r.max(1) * k)?,
        d_lora_b: on.output(4 * n * r.max(1))?,
    };
    on.with_scratch(|sms, space| layer.backward(dy, gradients, sms, space))
}

/// The gradient of the weight.
pub(super) fn weight_gradient(
    on: &mut Operands<'_>,
    layer: &LoraLinear,
    dy: Address,
) -> Result<Vec<Launch>> {
    let d_weight = on.output(4 * layer.n * layer.k)?;
    let product = layer.weight_gradient(dy, d_weight);
    on.with_scratch(|sms, space| product.launches(product.choose(sms), sms, space))
}

/// Two layers over a partition of rows.
pub(super) struct TwoLayers {
    /// The first one over all rows.
    pub(super) first: LoraLinear,
    /// `[t, n]`.
    pub(super) dy: Address,
    groups: [Group; 2],
}

/// Rows of both groups, mixed as pictures and text are: in stretches.
fn stretches(t: usize, vision: usize) -> [Vec<i32>; 2] {
    // Half of the text stands in front of the picture, half behind it.
    let front = (t - vision) / 2;
    let picture = front..front + vision;
    let (inside, outside) = (0..t as i32).partition(|row| picture.contains(&(*row as usize)));
    [outside, inside]
}

impl TwoLayers {
    /// Of which the second has `vision` rows.
    pub(super) fn new(
        on: &mut Operands<'_>,
        dtype: DType,
        shape: [usize; 3],
        vision: usize,
    ) -> Result<Self> {
        let [t, n, k] = shape;
        let first = layer(on, dtype, shape, 0)?;
        let weights = [first.weight, on.normal(dtype, n * k, 0.02)?];
        let rows = stretches(t, vision);
        let mut groups = [Group::EMPTY; 2];
        for (i, group) in groups.iter_mut().enumerate() {
            group.rows = on.values(&rows[i])?;
            group.m = rows[i].len();
            group.b = weights[i];
        }
        let dy = on.normal(dtype, t * n, 1.0)?;
        Ok(Self { first, dy, groups })
    }

    /// One launch for both layers: `y`, or `dx` when `backward`.
    pub(super) fn product(&self, on: &mut Operands<'_>, backward: bool) -> Result<Vec<Launch>> {
        let LoraLinear { dtype, t, .. } = self.first;
        let (a, n, k) = match backward {
            true => (self.dy, self.first.k, self.first.n),
            false => (self.first.x, self.first.n, self.first.k),
        };
        let layers = Routed {
            dtype,
            transpose_b: backward,
            t,
            n,
            k,
            a,
            s: Address::NULL,
            s_line: 0,
            groups: self.groups.map(|group| Group { b_rows: n, ..group }),
            y: on.output(dtype.size_bytes() * t * n)?,
        };
        on.with_scratch(|sms, space| layers.launches(layers.choose(sms), sms, space))
    }

    /// Both gradients of weights.
    pub(super) fn weight_gradients(&self, on: &mut Operands<'_>) -> Result<Vec<Launch>> {
        let LoraLinear { dtype, t, n, k, .. } = self.first;
        let mut launches = Vec::new();
        for group in self.groups {
            let product = OfRows {
                dtype,
                t,
                m: n,
                n: k,
                rows: group.rows,
                k: group.m,
                a: self.dy,
                a_line: n,
                b: self.first.x,
                b_line: k,
                y: on.output(4 * n * k)?,
            };
            launches.extend(
                on.with_scratch(|sms, space| product.launches(product.choose(sms), sms, space))?,
            );
        }
        Ok(launches)
    }
}
