//! Linear layers with random operands: one with or without an adapter, or two over row groups.

use anyhow::Result;
use kernels::DType;
use kernels::cuda::launch::{Address, Launch};
use kernels::cuda::ops::grouped::{Group, Grouped, OfRows};
use kernels::cuda::ops::grouped_lora::{self, AdaptedGroup, Adapter, GroupedLora};
use kernels::cuda::ops::lora_linear::{Gradients, LoraLinear};
use kernels::cuda::ops::pointwise;
use kernels::cuda::ops::shared_grouped_lora::{self, SharedGroupedLora};

use super::bench::Operands;

/// Tokens, output features and input features at the scale.
pub(super) fn sizes(on: &Operands<'_>, shape: [usize; 3]) -> [usize; 3] {
    shape.map(|n| on.of(n))
}

/// A layer with random operands of scaled sizes.
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
        dropped: None,
    })
}

/// The launches of `y`.
pub(super) fn forward(on: &mut Operands<'_>, layer: &LoraLinear) -> Result<Vec<Launch>> {
    let y = on.output(layer.dtype.size_bytes() * layer.t * layer.n)?;
    on.with_scratch(|sms, space| layer.forward(y, sms, space))
}

/// The launches of `dx` and, with an adapter, of its gradients.
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

/// The launches of the weight gradient.
pub(super) fn weight_gradient(
    on: &mut Operands<'_>,
    layer: &LoraLinear,
    dy: Address,
) -> Result<Vec<Launch>> {
    let d_weight = on.output(4 * layer.n * layer.k)?;
    let product = layer.weight_gradient(dy, d_weight);
    on.with_scratch(|sms, space| product.launches(product.choose(sms), sms, space))
}

/// Two layers over two row groups.
pub(super) struct TwoLayers {
    /// The first layer, taken over all rows.
    pub(super) first: LoraLinear,
    /// `[t, n]`.
    pub(super) dy: Address,
    groups: [Group; 2],
}

/// Rows of both row groups, in alternating stretches like images and text.
fn stretches(t: usize, vision: usize) -> [Vec<i32>; 2] {
    // Half of the text comes before the image, half after it.
    let front = (t - vision) / 2;
    let image = front..front + vision;
    let (inside, outside) = (0..t as i32).partition(|row| image.contains(&(*row as usize)));
    [outside, inside]
}

impl TwoLayers {
    /// Two layers, of which the second has `vision` rows.
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

    /// One launch for both layers: `y`, or `dx` with `backward`.
    pub(super) fn product(&self, on: &mut Operands<'_>, backward: bool) -> Result<Vec<Launch>> {
        let LoraLinear { dtype, t, .. } = self.first;
        let (a, n, k) = match backward {
            true => (self.dy, self.first.k, self.first.n),
            false => (self.first.x, self.first.n, self.first.k),
        };
        let layers = Grouped {
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
            y_line: n,
        };
        on.with_scratch(|sms, space| layers.launches(layers.choose(sms), sms, space))
    }

    /// The launches of both weight gradients.
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

/// Two layers with adapters over two row groups, and the addresses of their results.
pub(super) struct AdaptedLayers {
    layers: GroupedLora,
    /// Low-rank activations of the adapters, stored by forward.
    s: Address,
    y: Address,
    gradients: grouped_lora::Gradients,
}

impl AdaptedLayers {
    /// Two layers like `first`, of which the second has `vision` rows.
    pub(super) fn new(on: &mut Operands<'_>, first: &LoraLinear, vision: usize) -> Result<Self> {
        let LoraLinear {
            dtype, t, n, k, r, ..
        } = *first;
        let second = layer(on, dtype, [t, n, k], r)?;
        let rows = stretches(t, vision);
        let mut group = |layer: &LoraLinear, rows: &[i32]| -> Result<AdaptedGroup> {
            Ok(AdaptedGroup {
                rows: on.values(rows)?,
                m: rows.len(),
                weight: layer.weight,
                bias: Address::NULL,
                adapter: Some(Adapter {
                    r,
                    lora_a: layer.lora_a,
                    lora_b: layer.lora_b,
                    scale: layer.scale,
                    dropped: layer.dropped,
                }),
            })
        };
        let groups = [group(first, &rows[0])?, group(&second, &rows[1])?];
        let layers = GroupedLora {
            dtype,
            t,
            n,
            k,
            x: first.x,
            groups,
        };
        let bytes = dtype.size_bytes();
        let mut adapter =
            || -> Result<[Address; 2]> { Ok([on.output(4 * r * k)?, on.output(4 * n * r)?]) };
        let adapters = [adapter()?, adapter()?];
        Ok(Self {
            s: on.output(bytes * t * layers.line())?,
            y: on.output(bytes * t * n)?,
            gradients: grouped_lora::Gradients {
                dx: on.output(bytes * t * k)?,
                adapters,
            },
            layers,
        })
    }

    /// The launches of `y`, or of all gradients for `dy`.
    pub(super) fn launches(
        &self,
        on: &mut Operands<'_>,
        dy: Address,
        backward: bool,
    ) -> Result<Vec<Launch>> {
        on.with_scratch(|sms, space| match backward {
            false => self.layers.forward(self.s, self.y, sms, space),
            true => self.layers.backward(dy, self.s, self.gradients, sms, space),
        })
    }
}

/// Three such pairs with one input, like queries, keys and values of experts: separately, and with stacked adapters.
pub(super) struct SharedAdaptedLayers {
    pairs: Vec<AdaptedLayers>,
    layers: Vec<GroupedLora>,
    dy: Vec<Address>,
    s: Address,
    /// Stacked adapters of each row group.
    stacked: [Address; 2],
    d_stacked: [Address; 2],
}

impl SharedAdaptedLayers {
    /// Pairs of layers like `first`, of which the second ones have `vision` rows.
    pub(super) fn new(on: &mut Operands<'_>, first: &LoraLinear, vision: usize) -> Result<Self> {
        let LoraLinear {
            dtype, t, n, k, r, ..
        } = *first;
        let mut pairs = vec![AdaptedLayers::new(on, first, vision)?];
        while pairs.len() < 3 {
            let other = layer(on, dtype, [t, n, k], r)?;
            let mut pair = AdaptedLayers::new(on, &other, vision)?;
            let one = pairs[0].layers;
            pair.layers.x = one.x;
            for (own, one) in pair.layers.groups.iter_mut().zip(one.groups) {
                own.rows = one.rows;
            }
            pairs.push(pair);
        }
        let layers: Vec<GroupedLora> = pairs.iter().map(|pair| pair.layers).collect();
        let line = shared_grouped_lora::line(&layers);
        let dy = pairs.iter().map(|_| on.normal(dtype, t * n, 1.0));
        Ok(Self {
            dy: dy.collect::<Result<_>>()?,
            s: on.output(dtype.size_bytes() * t * line)?,
            stacked: [
                on.normal(dtype, line * k, 0.02)?,
                on.normal(dtype, line * k, 0.02)?,
            ],
            d_stacked: [on.output(4 * line * k)?, on.output(4 * line * k)?],
            pairs,
            layers,
        })
    }

    /// The launches of every `y`, or of all gradients, computed together.
    pub(super) fn together(&self, on: &mut Operands<'_>, backward: bool) -> Result<Vec<Launch>> {
        let all = SharedGroupedLora {
            layers: &self.layers,
            stacked: self.stacked,
        };
        let y: Vec<Address> = self.pairs.iter().map(|pair| pair.y).collect();
        let d_lora_b = self.pairs.iter();
        let d_lora_b = d_lora_b.map(|pair| pair.gradients.adapters.map(|[_, b]| b));
        let d_lora_b: Vec<[Address; 2]> = d_lora_b.collect();
        let gradients = shared_grouped_lora::Gradients {
            dx: self.pairs[0].gradients.dx,
            d_stacked: self.d_stacked,
            d_lora_b: &d_lora_b,
        };
        on.with_scratch(|sms, space| match backward {
            false => all.forward(self.s, &y, sms, space),
            true => all.backward(&self.dy, self.s, gradients, sms, space),
        })
    }

    /// The launches of each pair separately, with the sums of their dx.
    pub(super) fn apart(&self, on: &mut Operands<'_>, backward: bool) -> Result<Vec<Launch>> {
        let mut launches = Vec::new();
        let sum = self.pairs[0].gradients.dx;
        for (i, (pair, dy)) in self.pairs.iter().zip(&self.dy).enumerate() {
            launches.extend(pair.launches(on, *dy, backward)?);
            if backward && i > 0 {
                let GroupedLora { dtype, t, k, .. } = pair.layers;
                let (own, elems) = (pair.gradients.dx, (t * k) as u64);
                launches.extend(pointwise::add(dtype, sum, own, sum, elems));
            }
        }
        Ok(launches)
    }
}
