//! Grouped LoRA: two layers with adapters over a partition of the rows, such as CogVLM's experts. Every row is read
//! and written in place. The adapter's term extends the sum as in [`super::lora_linear`].
//!
//! | result | launches | passes over rows |
//! |---|---|---|
//! | `s[row] = scale * x[row] A_g^T` | one, narrow | `x` |
//! | `y[row] = [x[row] \| s[row]] [W_g \| B_g]^T + bias_g` | one | `x`, `y` |
//! | `ds[row] = scale * dy[row] B_g`, `dB_g = dy[rows_g]^T s[rows_g]` | one each ([`super::lora_gradients`]) | `dy` |
//! | `dA_g = ds[rows_g]^T x[rows_g]` | one each | `x` |
//! | `dx[row] = [dy[row] \| ds[row]] [W_g ; A_g]` | one | `dy`, `dx` |
//!
//! Two small launches each add the partial sums of the one pass over `dy`. With ranks above 64, in f32, or if lines
//! of `dy` are not multiples of 16 bytes, `ds` is one narrow launch and `dB_g` one per expert. `dy` is then read
//! twice.
//!
//! An expert may have no adapter; nothing of this is computed for its rows. With dropout, `seen` is one buffer for
//! all rows that have an adapter. It is written expert by expert before `s` and again before `dA` (one pass over `x`
//! each). The input's gradient is then `dx[row] = dy[row] W_g` plus the dropout of `ds[row] A_g`: one more small
//! product, added in a pass over three `[t, k]`. `dy` is read as above.
//!
//! Forward saves `s`. Gathering the rows and scattering the results would read and write `x`, `y`, `dy` and `dx` once
//! more. Each expert's separate product would also fill the GPU less well.

use super::grouped::{Group, Grouped, OfRows};
use super::lora_gradients::LoraGradients;
use super::pointwise::Dropped;
use super::workspace::Workspace;
use crate::DType;
use crate::cuda::launch::{Address, Launch};

/// LoRA adapter of one expert's layer. Addresses are aligned to 16 bytes, as in
/// [`super::lora_linear::LoraLinear`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adapter {
    /// Rank of the adapter, at least 1.
    pub r: usize,
    /// Matrix A of the adapter, `[r, k]`.
    pub lora_a: Address,
    /// Matrix B of the adapter, `[n, r]`.
    pub lora_b: Address,
    /// Factor on the adapter's output before it is added to the base layer's.
    pub scale: f32,
    /// Dropout of the adapter's input, or `None` for no dropout.
    pub dropped: Option<Dropped>,
}

/// Linear layer of one expert, with the numbers of the rows that it processes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdaptedGroup {
    /// Numbers of the input rows that the expert processes, i32 `[m]`. The two experts must not share a row.
    pub rows: Address,
    /// Number of rows of the expert; may be 0.
    pub m: usize,
    /// Weight of the base layer, `[n, k]`.
    pub weight: Address,
    /// Bias of the base layer, `[n]`, or [`Address::NULL`] for none.
    pub bias: Address,
    /// Adapter of the layer, or `None` for the base layer alone.
    pub adapter: Option<Adapter>,
}

/// Two linear layers of one shape, one per expert, each with an optional adapter. They process different rows
/// of one input.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GroupedLora {
    /// Dtype of all operands and results.
    pub dtype: DType,
    /// Number of rows of the input. Each belongs to one of the two experts.
    pub t: usize,
    /// Number of output features of both layers.
    pub n: usize,
    /// Number of input features of both layers.
    pub k: usize,
    /// Input of both layers, `[t, k]`.
    pub x: Address,
    /// Layer and rows of each of the two experts.
    pub groups: [AdaptedGroup; 2],
}

/// Addresses that the backward of a [`GroupedLora`] writes gradients to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gradients {
    /// Gradient of the input, `[t, k]` in the layers' dtype. [`Address::NULL`] if it is not needed.
    pub dx: Address,
    /// Gradients of each expert's matrices A and B, in this order: f32 `[r, k]` and `[n, r]`. Not written for
    /// a layer without adapter.
    pub adapters: [[Address; 2]; 2],
}

impl GroupedLora {
    /// Leading dimension in elements of `s` and `ds`, the outputs of the A matrices and their gradients: the
    /// larger rank padded with zeros to a multiple of 16.
    #[must_use]
    pub fn line(&self) -> usize {
        let ranks = self.groups.iter().filter_map(|group| group.adapter);
        let most = ranks.map(|adapter| adapter.r).max();
        most.unwrap_or(0).next_multiple_of(16)
    }

    /// Grouped product without bias: `[t, n]` with sums over `k`.
    fn product(&self, [n, k]: [usize; 2], a: Address, groups: [Group; 2]) -> Grouped {
        Grouped {
            dtype: self.dtype,
            transpose_b: false,
            t: self.t,
            n,
            k,
            a,
            s: Address::NULL,
            s_line: self.line(),
            groups,
            y: Address::NULL,
            y_line: n,
        }
    }

    /// Experts of a product with the base weights and the adapters' halves that `half` selects.
    fn weights(&self, b_rows: usize, half: impl Fn(&Adapter) -> Address) -> [Group; 2] {
        self.groups.map(|group| Group {
            rows: group.rows,
            m: group.m,
            b: group.weight,
            b_rows,
            low_b: group.adapter.as_ref().map_or(Address::NULL, &half),
            r: group.adapter.map_or(0, |adapter| adapter.r),
            ..Group::EMPTY
        })
    }

    /// Experts of a product with the adapters' halves alone, for the rows that have an adapter.
    fn halves(&self, half: impl Fn(&Adapter) -> Address) -> [Group; 2] {
        self.groups.map(|group| {
            group.adapter.map_or(Group::EMPTY, |adapter| Group {
                rows: group.rows,
                m: group.m,
                b: half(&adapter),
                b_rows: adapter.r,
                scale: adapter.scale,
                ..Group::EMPTY
            })
        })
    }

    /// Workspace for a copy of `x`.
    pub(super) fn input_rows(&self, workspace: &mut Workspace) -> Address {
        workspace.take((self.t * self.k * self.dtype.size_bytes()) as u64)
    }

    /// Dropout of each expert's adapter. `None` without an adapter, and for both if neither has dropout.
    fn dropped(&self) -> [Option<Dropped>; 2] {
        let own = |group: &AdaptedGroup| group.adapter.and_then(|adapter| adapter.dropped);
        let Some(any) = self.groups.iter().find_map(own) else {
            return [None; 2];
        };
        // An adapter without dropout shares the buffer with one that has it, so its rows are copied with a dropout of
        // 0.
        let all = Dropped { p: 0.0, ..any };
        let of = |group: AdaptedGroup| group.adapter.map(|adapter| adapter.dropped.unwrap_or(all));
        self.groups.map(of)
    }

    /// Input of the adapters, `[t, k]`. Only rows with an adapter are defined.
    pub(super) fn seen(&self, workspace: &mut Workspace) -> Option<(Address, Vec<Launch>)> {
        let dropped = self.dropped();
        if dropped == [None; 2] {
            return Some((self.x, Vec::new()));
        }
        let seen = self.input_rows(workspace);
        let launches = self.dropouts([self.x, Address::NULL, seen])?;
        Some((seen, launches))
    }

    /// Launches of `y = onto + dropout(x)`, with each expert's own dropout.
    fn dropouts(&self, operands: [Address; 3]) -> Option<Vec<Launch>> {
        let groups = self.groups.into_iter().zip(self.dropped());
        let launches = groups.filter_map(|(group, dropped)| {
            let dropped = dropped.filter(|_| group.m > 0)?;
            let sizes = [group.m as u64, self.k as u64];
            Some(dropped.launch(self.dtype, operands, group.rows, sizes))
        });
        launches.collect()
    }

    /// Launches of `dx += dropout(ds A_g)` for rows that have an adapter. Empty if no adapter has dropout.
    pub(super) fn add_seen_gradient(
        &self,
        ds: Address,
        dx: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        if self.dropped() == [None; 2] {
            return Some(Vec::new());
        }
        let mark = workspace.mark();
        let own = self.input_rows(workspace);
        let groups = self.groups.map(|group| {
            group.adapter.map_or(Group::EMPTY, |adapter| Group {
                rows: group.rows,
                m: group.m,
                // Not read, because the sum over it has no elements.
                b: adapter.lora_a,
                b_rows: self.k,
                low_b: adapter.lora_a,
                r: adapter.r,
                ..Group::EMPTY
            })
        });
        let product = Grouped {
            transpose_b: true,
            s: ds,
            y: own,
            ..self.product([self.k, 0], ds, groups)
        };
        let mut launches = run([product], multiprocessors, workspace)?;
        launches.extend(self.dropouts([own, dx, dx])?);
        workspace.release(mark);
        Some(launches)
    }

    /// Product `s [t, line]` of the adapters' input `x`.
    fn down(&self, x: Address, s: Address) -> Grouped {
        Grouped {
            y: s,
            ..self.product(
                [self.line(), self.k],
                x,
                self.halves(|adapter| adapter.lora_a),
            )
        }
    }

    /// Launches of the forward, which write the layers' output `y [t, n]`. They also write `s [t, line]`, the
    /// outputs of the A matrices, in the rows that have an adapter. `None` when the dtype has no kernel.
    #[must_use]
    pub fn forward(
        &self,
        s: Address,
        y: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let output = self.output((s, self.line()), y);
        let mut launches = self.inner(s, multiprocessors, workspace)?;
        launches.extend(run([output], multiprocessors, workspace)?);
        Some(launches)
    }

    /// Product of `y [t, n]` alone. `s` comes with the distance between its rows in elements.
    pub(super) fn output(&self, (s, s_line): (Address, usize), y: Address) -> Grouped {
        let mut groups = self.weights(self.n, |adapter| adapter.lora_b);
        for (to, group) in groups.iter_mut().zip(self.groups) {
            to.bias = group.bias;
        }
        Grouped {
            s,
            s_line,
            y,
            ..self.product([self.n, self.k], self.x, groups)
        }
    }

    /// Launches of the part of [`GroupedLora::forward`] that writes `s [t, line]`, the outputs of the A
    /// matrices, without the layers' output. `None` when the dtype has no kernel.
    #[must_use]
    pub fn inner(
        &self,
        s: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let mark = workspace.mark();
        let (seen, mut launches) = self.seen(workspace)?;
        launches.extend(run([self.down(seen, s)], multiprocessors, workspace)?);
        workspace.release(mark);
        Some(launches)
    }

    /// One pass for `ds` and `dB` over an expert's rows of `dy`, if that is possible.
    fn pass(
        &self,
        group: &AdaptedGroup,
        dy: Address,
        ([s, ds], line): ([Address; 2], usize),
        d_lora_b: Address,
    ) -> Option<LoraGradients> {
        let adapter = group.adapter?;
        let pass = LoraGradients {
            dtype: self.dtype,
            t: group.m,
            n: self.n,
            r: adapter.r,
            padded_rank: self.line(),
            line,
            rows: group.rows,
            dy,
            s,
            lora_b: adapter.lora_b,
            scale: adapter.scale,
            ds,
            d_lora_b,
        };
        pass.fits().then_some(pass)
    }

    /// Sum over an expert's rows of `a[row]^T b[row]`, `[m, n]` f32. Operands come with the distance between their
    /// rows in elements.
    fn of_rows(
        &self,
        group: &AdaptedGroup,
        [m, n]: [usize; 2],
        [a, b]: [(Address, usize); 2],
        y: Address,
    ) -> OfRows {
        OfRows {
            dtype: self.dtype,
            t: self.t,
            m,
            n,
            rows: group.rows,
            k: group.m,
            a: a.0,
            a_line: a.1,
            b: b.0,
            b_line: b.1,
            y,
        }
    }

    /// Launches of `ds` and the gradients of B. `s` and `ds` come with the distance between their rows in elements.
    /// In the rows that have an adapter, [`GroupedLora::line`] columns of `ds` are written.
    pub(super) fn low_gradients(
        &self,
        dy: Address,
        (low @ [s, ds], line): ([Address; 2], usize),
        d_lora_b: [Address; 2],
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let groups = self.groups.iter().zip(d_lora_b);
        let passes = groups.map(|(group, to)| self.pass(group, dy, (low, line), to));
        let passes: Vec<Option<LoraGradients>> = passes.collect();
        // Rows of `ds` that no single pass writes.
        let mut down = Grouped {
            transpose_b: true,
            y: ds,
            y_line: line,
            ..self.product(
                [self.line(), self.n],
                dy,
                self.halves(|adapter| adapter.lora_b),
            )
        };
        for (group, pass) in down.groups.iter_mut().zip(&passes) {
            if pass.is_some() {
                *group = Group::EMPTY;
            }
        }
        let mut launches = run([down], multiprocessors, workspace)?;
        for ((group, pass), to) in self.groups.iter().zip(passes).zip(d_lora_b) {
            if let Some(pass) = pass {
                launches.extend(pass.launches(workspace)?);
            } else if let Some(Adapter { r, .. }) = group.adapter {
                let sum = self.of_rows(group, [self.n, r], [(dy, self.n), (s, line)], to);
                let choice = sum.choose(multiprocessors);
                launches.extend(sum.launches(choice, multiprocessors, workspace)?);
            }
        }
        Some(launches)
    }

    /// Launches of the gradients of A from `ds [t, line]` and the adapters' input.
    pub(super) fn lora_a_gradients(
        &self,
        [ds, seen]: [Address; 2],
        d_lora_a: [Address; 2],
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let operands = [(ds, self.line()), (seen, self.k)];
        let mut launches = Vec::new();
        for (group, to) in self.groups.iter().zip(d_lora_a) {
            if let Some(Adapter { r, .. }) = group.adapter {
                let sum = self.of_rows(group, [r, self.k], operands, to);
                let choice = sum.choose(multiprocessors);
                launches.extend(sum.launches(choice, multiprocessors, workspace)?);
            }
        }
        Some(launches)
    }

    /// Launch that computes the input gradient `dx [t, k]` from the output gradient `dy` and from `ds`, the
    /// gradient of the adapters' inner product. `s_line` is the row stride of `ds` in elements. With dropout
    /// in an adapter, `dx` is the base layer's part only.
    pub(super) fn input_gradient(
        &self,
        dy: Address,
        (ds, s_line): (Address, usize),
        dx: Address,
    ) -> Grouped {
        let mut groups = self.weights(self.k, |adapter| adapter.lora_a);
        if self.dropped() != [None; 2] {
            groups.iter_mut().for_each(|group| group.r = 0);
        }
        Grouped {
            transpose_b: true,
            s: ds,
            s_line,
            y: dx,
            ..self.product([self.k, self.n], dy, groups)
        }
    }

    /// Launches of the backward, which write the gradients for the output gradient `dy [t, n]`, given the `s`
    /// of the forward. `None` when the dtype has no kernel.
    #[must_use]
    pub fn backward(
        &self,
        dy: Address,
        s: Address,
        gradients: Gradients,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let (line, sms) = (self.line(), multiprocessors);
        let mark = workspace.mark();
        let ds = workspace.take((self.t * line * self.dtype.size_bytes()) as u64);
        let [d_lora_a, d_lora_b] = [0, 1].map(|half| gradients.adapters.map(|own| own[half]));
        let mut launches = self.low_gradients(dy, ([s, ds], line), d_lora_b, sms, workspace)?;
        let before = workspace.mark();
        let (seen, dropouts) = self.seen(workspace)?;
        launches.extend(dropouts);
        launches.extend(self.lora_a_gradients([ds, seen], d_lora_a, sms, workspace)?);
        workspace.release(before);
        let dx = gradients.dx;
        if dx != Address::NULL {
            let input = self.input_gradient(dy, (ds, line), dx);
            launches.extend(run([input], sms, workspace)?);
            launches.extend(self.add_seen_gradient(ds, dx, sms, workspace)?);
        }
        workspace.release(mark);
        Some(launches)
    }
}

/// Launches of several products, one after the other.
pub(super) fn run(
    products: impl IntoIterator<Item = Grouped>,
    multiprocessors: u32,
    workspace: &mut Workspace,
) -> Option<Vec<Launch>> {
    let mut launches = Vec::new();
    for product in products {
        let tile = product.choose(multiprocessors);
        launches.extend(product.launches(tile, multiprocessors, workspace)?);
    }
    Some(launches)
}
