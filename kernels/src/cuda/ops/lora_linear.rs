//! LoRA layers, forward and backward, as matrix products.
//!
//! The adapter's term extends the sum of the base weight's product. So `y` and `dx` are written once, and the adapter
//! costs `r / k` more flops plus one pass over `x` (or `dy`):
//!
//! | result | products | bytes read and written, 16-bit |
//! |---|---|---|
//! | `s = scale * x A^T` `[t, r]` | one, narrow | `2 (t k + r k + t r)` |
//! | `y = [x \| s] [W \| B]^T + bias` | one | `2 (t k + n k + t n + t r + n r)` |
//! | `ds = scale * dy B` `[t, r]` | one, narrow | `2 (t n + n r + t r)` |
//! | `dx = [dy \| ds] [W ; A]` | one | `2 (t n + n k + t k + t r + r k)` |
//! | `ds` and `dB`, rank 64 or less | one pass ([`super::lora_gradients`]) | `2 (t n + n r + t r)`, partial sums |
//! | `dB = dy^T s`, `dA = ds^T x` | one each | `2 (t n + t r) + 4 n r`, `2 (t k + t r) + 4 r k` |
//!
//! Besides the product of `dx`, the backward of one layer passes over `x` twice (`s` is recomputed, and `dA`), and
//! over `dy` once (`ds` with `dB`). It passes over `dy` twice with ranks above 64, in f32, or if lines of `dy` are
//! not multiples of 16 bytes. A caller that saved `s` passes over `x` once ([`super::shared_lora`], also for a single
//! layer).
//!
//! With dropout the adapter has another input: `seen`, the dropout of `x`. It is written before `s` and again before
//! `dA`, so nothing is saved. The input's gradient is `dx = dy W + dropout(ds A)`: the second product is written
//! separately, and the dropout kernel adds it. Compared with the layer without dropout, this takes 2 more passes over
//! `[t, k]` forward and 6 backward. Separate operations would take 6 more over `[t, n]` forward and 3 or more
//! backward, and would save `seen`. `dy` is read as often as without dropout.
//!
//! `s` and `ds` are rounded once to the 16-bit type. This is the only rounding that separate operations in f32 would
//! not make. Lines that are not multiples of 8 elements (`r`, rarely `k` or `n`) are first copied to aligned lines.

use super::grouped;
use super::lora_gradients::LoraGradients;
use super::pointwise::Dropped;
use super::product::{Product, Term, choosable, module, parts_module};
use super::step::Step;
use super::workspace::Workspace;
use crate::DType;
use crate::cuda::launch::{Address, Launch};
use crate::cuda::module::Module;

/// Kernel modules of all products that a 16-bit layer may use. Without a compiler no other modules are
/// available.
#[must_use]
pub fn modules() -> Vec<Module> {
    let all = choosable().into_iter();
    all.filter_map(|(dtype, out, transpose, tile)| module(dtype, out, transpose, tile))
        .chain(grouped::modules())
        .collect()
}

/// Kernel modules of the copies and sums that products need: padding of rows, and adding the parts of a split
/// sum.
#[must_use]
pub fn parts_modules() -> Vec<Module> {
    let pairs = [
        (DType::BF16, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
        (DType::F16, DType::F32),
        (DType::F32, DType::F32),
    ];
    pairs
        .into_iter()
        .filter_map(|(dtype, out)| parts_module(dtype, out))
        .collect()
}

/// Linear layer with its LoRA adapter, for launches of forward and backward. Addresses are aligned to 16
/// bytes; all operands are dense, in `dtype`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LoraLinear {
    /// Dtype of all operands: bf16 or f16 on tensor cores, or f32 without them.
    pub dtype: DType,
    /// Number of tokens, which are the rows of the input and the output.
    pub t: usize,
    /// Number of output features.
    pub n: usize,
    /// Number of input features.
    pub k: usize,
    /// Rank of the adapter; 0 for a linear layer without one.
    pub r: usize,
    /// Input of the layer, `[t, k]`.
    pub x: Address,
    /// Weight of the base layer, `[n, k]`.
    pub weight: Address,
    /// Bias of the base layer, `[n]`, or [`Address::NULL`] for none.
    pub bias: Address,
    /// Matrix A of the adapter, `[r, k]`.
    pub lora_a: Address,
    /// Matrix B of the adapter, `[n, r]`.
    pub lora_b: Address,
    /// Factor on the adapter's output before it is added to the base layer's.
    pub scale: f32,
    /// Dropout of the adapter's input, or `None` for no dropout.
    pub dropped: Option<Dropped>,
}

/// Addresses that the backward of a [`LoraLinear`] writes gradients to. [`Address::NULL`] for a gradient that
/// is not needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gradients {
    /// Gradient of the input, `[t, k]` in the layer's dtype.
    pub dx: Address,
    /// Gradient of matrix A, f32 `[r, k]`.
    pub d_lora_a: Address,
    /// Gradient of matrix B, f32 `[n, r]`.
    pub d_lora_b: Address,
}

impl LoraLinear {
    /// Leading dimension in elements of `s` and `ds`, the output of matrix A and its gradient: the rank
    /// padded with zeros to a multiple of 16.
    #[must_use]
    pub const fn padded_rank(&self) -> usize {
        self.r.next_multiple_of(16)
    }

    /// The layer on `len` of its rows, from row `first` on.
    pub(in crate::cuda) fn rows(self, first: usize, len: usize) -> Self {
        let dropped = self.dropped.map(|dropped| Dropped {
            // Two words of 4 bytes name a row.
            rows: dropped.rows.after(8 * first),
            ..dropped
        });
        Self {
            t: len,
            x: self.x.after(first * self.k * self.dtype.size_bytes()),
            dropped,
            ..self
        }
    }

    /// The layer with the adapter's input as its `x`, and the launch that computes that input. `None` when the dtype
    /// has no kernel.
    pub(super) fn seeing<S: Step>(&self, workspace: &mut Workspace) -> Option<(Self, Option<S>)> {
        let Some(dropped) = self.dropped.filter(|_| self.r > 0) else {
            return Some((*self, None));
        };
        let (x, none) = (self.input_rows(workspace), Address::NULL);
        let sizes = [self.t as u64, self.k as u64];
        let launch = dropped.launch(self.dtype, [self.x, none, x], none, sizes)?;
        let dropped = None;
        Some((
            Self {
                x,
                dropped,
                ..*self
            },
            Some(launch.into()),
        ))
    }

    /// Launches of `dx += dropout(ds A)`, with rows of `ds` `line` elements apart. Empty without dropout, because the
    /// product of `dx` then contains this term.
    pub(super) fn add_seen_gradient<S: Step>(
        &self,
        (ds, line): (Address, usize),
        dx: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<S>> {
        let Some(dropped) = self.dropped.filter(|_| self.r > 0) else {
            return Some(Vec::new());
        };
        let mark = workspace.mark();
        let own = self.input_rows(workspace);
        let product = self
            .product([self.t, self.k, self.k], own, self.k)
            .transposed(false, true)
            .plus(ds, line, self.lora_a, self.k, self.r);
        let mut launches = run([product], multiprocessors, workspace)?;
        let sizes = [self.t as u64, self.k as u64];
        let launch = dropped.launch(self.dtype, [own, dx, dx], Address::NULL, sizes)?;
        launches.push(launch.into());
        workspace.release(mark);
        Some(launches)
    }

    /// Product for the output of matrix A: `s[t, padded_rank] = scale * x A^T`. Adapters that share `x` may
    /// be stacked: `lora_a` then has the rows of all adapters, and `r` is the sum of the ranks.
    /// [`LoraLinear::output`] takes each adapter's columns of `s`, which begin at multiples of 8.
    #[must_use]
    pub fn down(&self, s: Address) -> Product {
        self.product([self.t, self.padded_rank(), self.r], s, self.padded_rank())
            .times(self.scale)
            .plus(self.x, self.k, self.lora_a, self.k, self.k)
    }

    /// Product for the layer's output: `y[t, n] = [x | s] [W | B]^T + bias`. `s` is the output of matrix A,
    /// with leading dimension `s_line` in elements.
    #[must_use]
    pub fn output(&self, s: Address, s_line: usize, y: Address) -> Product {
        let mut product = self
            .product([self.t, self.n, self.n], y, self.n)
            .plus(self.x, self.k, self.weight, self.k, self.k)
            .plus(s, s_line, self.lora_b, self.r, self.r);
        product.bias = self.bias;
        product
    }

    /// Product for the gradient of matrix A's output: `ds[t, padded_rank] = scale * dy B`.
    #[must_use]
    pub fn down_gradient(&self, dy: Address, ds: Address) -> Product {
        self.product([self.t, self.padded_rank(), self.r], ds, self.padded_rank())
            .times(self.scale)
            .transposed(false, true)
            .plus(dy, self.n, self.lora_b, self.r, self.n)
    }

    /// Product for the gradient of the input: `dx[t, k] = [dy | ds] [W ; A]`, or `dy W` if the adapter has
    /// dropout.
    #[must_use]
    pub fn input_gradient(&self, dy: Address, ds: Address, dx: Address) -> Product {
        let r = self.dropped.map_or(self.r, |_| 0);
        self.product([self.t, self.k, self.k], dx, self.k)
            .transposed(false, true)
            .plus(dy, self.n, self.weight, self.k, self.n)
            .plus(ds, self.padded_rank(), self.lora_a, self.k, r)
    }

    /// Product for the gradient of the base weight: `d_weight[n, k] = dy^T x` in f32.
    #[must_use]
    pub fn weight_gradient(&self, dy: Address, d_weight: Address) -> Product {
        self.product([self.n, self.k, self.k], d_weight, self.k)
            .transposed(true, true)
            .to(DType::F32)
            .plus(dy, self.n, self.x, self.k, self.t)
    }

    /// Product for the gradient of matrix B: `d_lora_b[n, r] = dy^T s` in f32.
    #[must_use]
    pub fn lora_b_gradient(&self, dy: Address, s: Address, d_lora_b: Address) -> Product {
        self.product([self.n, self.r, self.r], d_lora_b, self.r)
            .transposed(true, true)
            .to(DType::F32)
            .plus(dy, self.n, s, self.padded_rank(), self.t)
    }

    /// Product for the gradient of matrix A: `d_lora_a[r, k] = ds^T x` in f32.
    #[must_use]
    pub fn lora_a_gradient(&self, ds: Address, d_lora_a: Address) -> Product {
        self.product([self.r, self.k, self.k], d_lora_a, self.k)
            .transposed(true, true)
            .to(DType::F32)
            .plus(ds, self.padded_rank(), self.x, self.k, self.t)
    }

    /// Launches of the forward, `y = x W^T + bias + scale * (x A^T) B^T` `[t, n]`, in order. `None` when the
    /// dtype has no kernel.
    #[must_use]
    pub fn forward<S: Step>(
        &self,
        y: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<S>> {
        let mark = workspace.mark();
        let s = self.adapter_rows(workspace);
        let mut launches = Vec::new();
        if self.r > 0 {
            let before = workspace.mark();
            let (seeing, dropout) = self.seeing(workspace)?;
            launches.extend(dropout);
            launches.extend(run([seeing.down(s)], multiprocessors, workspace)?);
            workspace.release(before);
        }
        let output = self.output(s, self.padded_rank(), y);
        launches.extend(S::wide(&output, multiprocessors, workspace)?);
        workspace.release(mark);
        Some(launches)
    }

    /// Launches of the backward, in order: the gradients for the output gradient `dy [t, n]`.
    /// `s = scale * x A^T` is recomputed. `None` when the dtype has no kernel.
    ///
    /// Bytes for 8192 tokens, 4096 features in and out, rank 16, in bf16: `s` 67 MB; `ds` and `dB` in one pass 67 MB
    /// plus 17 MB of partial sums (134 MB as two products); `dA` 67 MB; the product of `dx` as much as the forward.
    #[must_use]
    pub fn backward<S: Step>(
        &self,
        dy: Address,
        gradients: Gradients,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<S>> {
        let mark = workspace.mark();
        let (s, ds) = (self.adapter_rows(workspace), self.adapter_rows(workspace));
        let wanted = |address: Address| address != Address::NULL;
        let Gradients {
            dx,
            d_lora_a,
            d_lora_b,
        } = gradients;
        let pass = LoraGradients {
            dtype: self.dtype,
            t: self.t,
            n: self.n,
            r: self.r,
            padded_rank: self.padded_rank(),
            line: self.padded_rank(),
            rows: Address::NULL,
            dy,
            s,
            lora_b: self.lora_b,
            scale: self.scale,
            ds,
            d_lora_b,
        };
        let before = workspace.mark();
        let (seeing, dropout) = self.seeing(workspace)?;
        let mut launches: Vec<S> = dropout.into_iter().collect();
        let mut add = |product: Product, workspace: &mut Workspace| -> Option<()> {
            launches.extend(run([product], multiprocessors, workspace)?);
            Some(())
        };
        if self.r > 0 && wanted(d_lora_b) {
            add(seeing.down(s), workspace)?;
        }
        if self.r > 0 && wanted(d_lora_b) && pass.fits() {
            launches.extend(pass.launches(workspace)?.into_iter().map(S::from));
        } else if self.r > 0 {
            add(self.down_gradient(dy, ds), workspace)?;
            if wanted(d_lora_b) {
                add(self.lora_b_gradient(dy, s, d_lora_b), workspace)?;
            }
        }
        if self.r > 0 && wanted(d_lora_a) {
            let product = seeing.lora_a_gradient(ds, d_lora_a);
            launches.extend(run([product], multiprocessors, workspace)?);
        }
        workspace.release(before);
        if wanted(dx) {
            let input = self.input_gradient(dy, ds, dx);
            launches.extend(S::wide(&input, multiprocessors, workspace)?);
            let ds = (ds, self.padded_rank());
            launches.extend(self.add_seen_gradient(ds, dx, multiprocessors, workspace)?);
        }
        workspace.release(mark);
        Some(launches)
    }

    /// Workspace for `s` or `ds`.
    fn adapter_rows(&self, workspace: &mut Workspace) -> Address {
        workspace.take((self.t * self.padded_rank() * self.dtype.size_bytes()) as u64)
    }

    /// Workspace for a copy of `x`.
    fn input_rows(&self, workspace: &mut Workspace) -> Address {
        workspace.take((self.t * self.k * self.dtype.size_bytes()) as u64)
    }

    /// Product without terms, bias and scale.
    fn product(&self, [m, n, b_rows]: [usize; 3], y: Address, y_line: usize) -> Product {
        Product {
            dtype: self.dtype,
            out: self.dtype,
            transpose_a: false,
            transpose_b: false,
            m,
            n,
            b_rows,
            terms: [None; 2],
            bias: Address::NULL,
            scale: 1.0,
            y,
            y_line,
        }
    }
}

/// Launches of several products, one after the other.
pub(super) fn run<S: From<Launch>>(
    products: impl IntoIterator<Item = Product>,
    multiprocessors: u32,
    workspace: &mut Workspace,
) -> Option<Vec<S>> {
    let mut launches = Vec::new();
    for product in products {
        let own = product.launches(product.choose(multiprocessors), multiprocessors, workspace)?;
        launches.extend(own.into_iter().map(S::from));
    }
    Some(launches)
}

impl Product {
    const fn times(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    const fn to(mut self, out: DType) -> Self {
        self.out = out;
        self
    }

    const fn transposed(mut self, a: bool, b: bool) -> Self {
        (self.transpose_a, self.transpose_b) = (a, b);
        self
    }

    /// Adds a term. A term without elements is left out.
    fn plus(mut self, a: Address, a_line: usize, b: Address, b_line: usize, k: usize) -> Self {
        if k > 0 {
            let free = self.terms.iter_mut().find(|term| term.is_none());
            if let Some(free) = free {
                *free = Some(Term {
                    a,
                    a_line,
                    b,
                    b_line,
                    k,
                });
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::launch::Arg;

    fn layer(t: usize, n: usize, k: usize, r: usize) -> LoraLinear {
        LoraLinear {
            dtype: DType::BF16,
            t,
            n,
            k,
            r,
            x: Address(1 << 20),
            weight: Address(2 << 20),
            bias: Address::NULL,
            lora_a: Address(3 << 20),
            lora_b: Address(4 << 20),
            scale: 2.0,
            dropped: None,
        }
    }

    #[test]
    fn large_layers_use_the_large_tile_without_split_k() {
        let choice = layer(8192, 4096, 4096, 16)
            .output(Address(256), 16, Address(512))
            .choose(132);
        assert_eq!((choice.tile.m, choice.tile.n, choice.parts), (128, 256, 1));
        let choice = layer(8192, 4096, 4096, 16).down(Address(256)).choose(132);
        assert_eq!((choice.tile.m, choice.tile.n, choice.parts), (64, 16, 1));
    }

    #[test]
    fn the_number_of_parts_does_not_depend_on_the_gpu() {
        for (t, n, k, r) in [
            (1, 64, 8192, 4),
            (200, 4096, 11008, 64),
            (8192, 1152, 4304, 8),
        ] {
            let layer = layer(t, n, k, r);
            for product in [
                layer.down(Address(256)),
                layer.output(Address(256), 64, Address(512)),
                layer.lora_a_gradient(Address(256), Address(512)),
                layer.weight_gradient(Address(256), Address(512)),
            ] {
                let (small, large) = (product.choose(16), product.choose(200));
                assert_eq!(small.parts, large.parts);
                assert_eq!(small.tile.warps[2], large.tile.warps[2]);
                assert_eq!(small.tile.k, large.tile.k);
            }
        }
    }

    #[test]
    fn a_layer_without_adapter_is_one_launch() {
        let mut space = Workspace::new(Address::NULL);
        let launches: Vec<Launch> = layer(2048, 4096, 4096, 0)
            .forward(Address(512), 132, &mut space)
            .unwrap();
        assert_eq!(launches.len(), 1);
        assert_eq!(launches[0].args[5], Arg::Address(Address::NULL));
        assert_eq!(space.bytes(), 0);
    }
}
