//! Grouped LoRA layers that share one input and one partition of rows, such as query, key and value
//! projections of experts. It extends [`super::grouped_lora`] as [`super::shared_lora`] extends
//! [`super::lora_linear`]. Each expert's A matrices are stacked:
//!
//! | result | passes over `x` | instead of |
//! |---|---|---|
//! | `s[row] = scale * x[row] [A1_g; A2_g; ..]^T` | 1 | one a layer |
//! | `[dA1_g; dA2_g; ..] = ds[rows_g]^T x[rows_g]` | 1 | one a layer |
//!
//! Everything else is as for one pair of layers: each `y` and each layer's own `dx` is written by one product, and
//! `ds` and `dB` take one pass over each `dy`. The own `dx` are added in `dtype`, the last layer's first, as
//! [`crate::AdaptedLinearGrads::dx`] is defined.
//!
//! Within each expert, all layers must have an adapter or none, with equal scale and dropout. So the adapters' input
//! is one dropout of `x`, and so is its gradient.

use super::grouped_lora::{AdaptedGroup, Adapter, GroupedLora, run};
use super::pointwise;
use super::workspace::Workspace;
use crate::cuda::launch::{Address, Launch};

/// Grouped LoRA layers that share one input and one partition of rows (see [`share`]), with their stacked A
/// matrices.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedGroupedLora<'a> {
    /// Layers that read the same input, e.g. those for queries, keys and values. Each is a pair with one
    /// layer per expert.
    pub layers: &'a [GroupedLora],
    /// Stacked A matrices of each expert that has adapters, `[line, k]`: A of each layer, followed by zero
    /// rows up to its [`GroupedLora::line`].
    pub stacked: [Address; 2],
}

/// Addresses that the backward of a [`SharedGroupedLora`] writes gradients to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gradients<'a> {
    /// Gradient of the input, `[t, k]` in the layers' dtype. [`Address::NULL`] if it is not needed.
    pub dx: Address,
    /// Gradients of the A matrices of each expert that has adapters, f32 `[line, k]`, stacked as
    /// [`SharedGroupedLora::stacked`].
    pub d_stacked: [Address; 2],
    /// Gradients of matrix B, f32 `[n, r]`, indexed by layer, then expert. Not written for an expert without
    /// adapter.
    pub d_lora_b: &'a [[Address; 2]],
}

/// Leading dimension in elements of `s` and `ds`, which contain the columns of all layers: the number of rows
/// of a stacked A.
#[must_use]
pub fn line(layers: &[GroupedLora]) -> usize {
    layers.iter().map(GroupedLora::line).sum()
}

/// Whether the A matrices of these layers can be stacked: same input, same partition of rows, and equal
/// adapter options within each expert.
#[must_use]
pub fn share(layers: &[GroupedLora]) -> bool {
    let alike = |(one, other): (&AdaptedGroup, &AdaptedGroup)| {
        let of = |group: &AdaptedGroup| {
            let adapter = group.adapter;
            adapter.map(|adapter| (adapter.scale.to_bits(), adapter.dropped))
        };
        (one.rows, one.m) == (other.rows, other.m) && of(one) == of(other)
    };
    layers.windows(2).all(|pair| {
        let [one, other] = [&pair[0], &pair[1]];
        (one.dtype, one.t, one.k, one.x) == (other.dtype, other.t, other.k, other.x)
            && one.groups.iter().zip(&other.groups).all(alike)
    })
}

impl SharedGroupedLora<'_> {
    /// All adapters of each expert as one adapter, of layers without outputs. `None` without layers.
    fn all(&self) -> Option<GroupedLora> {
        let first = self.layers.first()?;
        let mut all = GroupedLora { n: 0, ..*first };
        for (group, stacked) in all.groups.iter_mut().zip(self.stacked) {
            group.adapter = group.adapter.map(|adapter| Adapter {
                r: line(self.layers),
                lora_a: stacked,
                ..adapter
            });
        }
        Some(all)
    }

    /// Layers, each with the address of its columns in a matrix `[t, line]` of the layers' dtype.
    fn columns(&self, matrix: Address) -> Vec<(&GroupedLora, Address)> {
        let mut at = matrix.0;
        let places = self.layers.iter().map(|layer| {
            let own = Address(at);
            at += (layer.line() * layer.dtype.size_bytes()) as u64;
            (layer, own)
        });
        places.collect()
    }

    /// Launches of the forward, which write each layer's output `y`. They also write `s [t, line]`, the
    /// outputs of the A matrices, in the rows that have adapters. `None` when the dtype has no kernel.
    #[must_use]
    pub fn forward(
        &self,
        s: Address,
        y: &[Address],
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let line = line(self.layers);
        let mut launches = self.all()?.inner(s, multiprocessors, workspace)?;
        let outputs = self.columns(s).into_iter().zip(y);
        let outputs = outputs.map(|((layer, s), y)| layer.output((s, line), *y));
        launches.extend(run(outputs, multiprocessors, workspace)?);
        Some(launches)
    }

    /// Launches of the backward, which write the gradients for each layer's `dy [t, n]`, given the `s` of the
    /// forward. `None` when the dtype has no kernel.
    #[must_use]
    pub fn backward(
        &self,
        dy: &[Address],
        s: Address,
        gradients: Gradients<'_>,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let (all, line, sms) = (self.all()?, line(self.layers), multiprocessors);
        let mark = workspace.mark();
        let ds = workspace.take((all.t * line * all.dtype.size_bytes()) as u64);
        let mut launches = Vec::new();
        let places = self.columns(s).into_iter().zip(self.columns(ds));
        let results = dy.iter().zip(gradients.d_lora_b);
        for (((layer, s), (_, ds)), (dy, to)) in places.zip(results) {
            launches.extend(layer.low_gradients(*dy, ([s, ds], line), *to, sms, workspace)?);
        }
        let before = workspace.mark();
        let (seen, dropouts) = all.seen(workspace)?;
        launches.extend(dropouts);
        launches.extend(all.lora_a_gradients([ds, seen], gradients.d_stacked, sms, workspace)?);
        workspace.release(before);
        let dx = gradients.dx;
        if dx != Address::NULL {
            for (i, ((layer, ds), dy)) in self.columns(ds).into_iter().zip(dy).rev().enumerate() {
                let before = workspace.mark();
                let own = match i {
                    0 => dx,
                    _ => all.input_rows(workspace),
                };
                let input = layer.input_gradient(*dy, (ds, line), own);
                launches.extend(run([input], sms, workspace)?);
                if i > 0 {
                    let elems = (all.t * all.k) as u64;
                    launches.push(pointwise::add(all.dtype, dx, own, dx, elems)?);
                }
                workspace.release(before);
            }
            launches.extend(all.add_seen_gradient(ds, dx, sms, workspace)?);
        }
        workspace.release(mark);
        Some(launches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::cuda::launch::Arg;

    const X: Address = Address(1 << 40);

    /// Pair of layers with 600 and 424 rows, at addresses that nothing reads.
    fn pair(i: u64, r: [usize; 2]) -> GroupedLora {
        let group = |g: usize| AdaptedGroup {
            rows: Address((2 + g as u64) << 40),
            m: [600, 424][g],
            weight: Address((10 + 2 * i + g as u64) << 40),
            bias: Address::NULL,
            adapter: Some(Adapter {
                r: r[g],
                lora_a: Address((20 + 2 * i + g as u64) << 40),
                lora_b: Address((30 + 2 * i + g as u64) << 40),
                scale: 0.5,
                dropped: None,
            }),
        };
        GroupedLora {
            dtype: DType::BF16,
            t: 1024,
            n: 1536,
            k: 512,
            x: X,
            groups: [group(0), group(1)],
        }
    }

    fn reading(launches: &[Launch], what: Address) -> usize {
        let reads = |launch: &&Launch| {
            let mut args = launch.args.iter();
            args.any(|arg| matches!(arg, Arg::Address(at) if *at == what))
        };
        launches.iter().filter(reads).count()
    }

    #[test]
    fn the_input_and_each_gradient_are_read_once_for_all_adapters() {
        let layers = [0, 1, 2].map(|i| pair(i, [16, 64]));
        assert!(share(&layers) && line(&layers) == 3 * 64);
        let all = SharedGroupedLora {
            layers: &layers,
            stacked: [Address(40 << 40), Address(41 << 40)],
        };
        let y = [50, 51, 52].map(|at| Address(at << 40));
        let mut space = Workspace::new(Address(60 << 40));
        let s = Address(61 << 40);
        let launches = all.forward(s, &y, 108, &mut space).unwrap();
        // `s` once, plus the products of the weights.
        assert_eq!(reading(&launches, X), 1 + 3);
        assert_eq!(launches.len(), 1 + 3);
        let gradients = Gradients {
            dx: Address(62 << 40),
            d_stacked: [Address(63 << 40), Address(64 << 40)],
            d_lora_b: &[70, 72, 74].map(|at| [Address(at << 40), Address((at + 1) << 40)]),
        };
        let launches = all.backward(&y, s, gradients, 108, &mut space).unwrap();
        assert_eq!(reading(&launches, X), 2);
        // Each expert's rows once for ds and dB, all rows once for dx.
        for dy in y {
            assert_eq!(reading(&launches, dy), 2 + 1);
        }
    }

    #[test]
    fn only_adapters_with_equal_inputs_and_groups_share_launches() {
        let layers = [pair(0, [4, 8]), pair(1, [16, 5])];
        assert!(share(&layers) && share(&layers[..1]) && share(&[]));
        let changed = |change: fn(&mut GroupedLora)| {
            let mut layers = layers;
            change(&mut layers[1]);
            share(&layers)
        };
        assert!(changed(|layer| layer.n = 8));
        assert!(!changed(|layer| layer.x = Address(7)));
        assert!(!changed(|layer| layer.groups[1].rows = Address(7)));
        assert!(!changed(|layer| layer.groups[0].adapter = None));
        assert!(!changed(|layer| {
            if let Some(adapter) = &mut layer.groups[1].adapter {
                adapter.scale = 0.25;
            }
        }));
    }
}
