//! LoRA layers that share one input. Their A matrices are stacked: one product over `x` gives `s` of all layers, and
//! one gives all gradients of A. Passes over `x` are an adapter's main cost, so three layers cost little more than
//! one:
//!
//! | result | passes over `x` | instead of |
//! |---|---|---|
//! | `s = scale * x [A1; A2; ..]^T` | 1 | one a layer, twice: forward keeps it for backward |
//! | `[dA1; dA2; ..] = ds^T x` | 1 | one a layer |
//!
//! For query, key and value projections of 8192 tokens and 4096 features in bf16, this moves 134 MB of `x` instead of
//! 604 MB. Everything else is as for one layer: each `y` and each layer's own `dx` is written by one product, and
//! `ds` and `dB` take one pass over each `dy`. The own `dx` are added in `dtype`, the last layer's first, as
//! [`crate::AdaptedLinearGrads::dx`] is defined.
//!
//! Adapters with equal dropout, or none, share one input. If their dropouts differ, each adapter has its own input
//! and A is not stacked. The gradient of each distinct adapter input takes one more pass.

use super::lora_gradients::LoraGradients;
use super::lora_linear::{LoraLinear, run};
use super::pointwise;
use super::step::Step;
use super::workspace::Workspace;
use crate::cuda::launch::Address;

/// LoRA layers that share one input, with their stacked A matrices. They have equal `x`, `t`, `k`, dtype and
/// scale, and each has an adapter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedLora<'a> {
    /// Layers that read the same input, e.g. those for queries, keys and values.
    pub layers: &'a [LoraLinear],
    /// Stacked A matrices, `[line, k]`: A of each layer, followed by zero rows up to its padded rank. Read
    /// only if the layers are [`alike`].
    pub stacked: Address,
}

/// Addresses that the backward of a [`SharedLora`] writes gradients to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gradients<'a> {
    /// Gradient of the input, `[t, k]` in the layers' dtype. [`Address::NULL`] if it is not needed.
    pub dx: Address,
    /// Gradients of the A matrices, f32 `[line, k]`, stacked as [`SharedLora::stacked`].
    pub d_stacked: Address,
    /// Gradient of each layer's matrix B, f32 `[n, r]`.
    pub d_lora_b: &'a [Address],
}

/// Leading dimension in elements of `s` and `ds`, which contain the columns of all layers: the sum of the
/// padded ranks. It is also the number of rows of the stacked A.
#[must_use]
pub fn line(layers: &[LoraLinear]) -> usize {
    layers.iter().map(LoraLinear::padded_rank).sum()
}

/// Whether the adapters of all layers have the same dropout, and so the same input.
#[must_use]
pub fn alike(layers: &[LoraLinear]) -> bool {
    layers
        .windows(2)
        .all(|pair| pair[0].dropped == pair[1].dropped)
}

impl SharedLora<'_> {
    /// Adapters to compute, each with its first column in a matrix `[t, line]`: one stacked adapter, or each one.
    fn adapters(&self) -> Option<Vec<(LoraLinear, usize)>> {
        if alike(self.layers) {
            return Some(vec![(self.all()?, 0)]);
        }
        let mut first = 0;
        let each = self.layers.iter().map(|layer| {
            let at = first;
            first += layer.padded_rank();
            (*layer, at)
        });
        Some(each.collect())
    }

    /// Launches that compute `s = scale * x A^T` of all layers.
    fn down<S: Step>(
        &self,
        s: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<S>> {
        let line = line(self.layers);
        let mut launches = Vec::new();
        for (adapter, first) in self.adapters()? {
            let mark = workspace.mark();
            let (seeing, dropout) = adapter.seeing(workspace)?;
            launches.extend(dropout);
            let mut down = seeing.down(behind(s, first, adapter.dtype.size_bytes()));
            down.y_line = line;
            launches.extend(run([down], multiprocessors, workspace)?);
            workspace.release(mark);
        }
        Some(launches)
    }

    /// All adapters as one adapter, of a layer without outputs. `None` without layers.
    fn all(&self) -> Option<LoraLinear> {
        Some(LoraLinear {
            n: 0,
            r: line(self.layers),
            lora_a: self.stacked,
            ..*self.layers.first()?
        })
    }

    /// Layers, each with the address of its columns in a matrix `[t, line]` of the layers' dtype.
    fn columns(&self, matrix: Address) -> Vec<(&LoraLinear, Address)> {
        let mut first = 0;
        let places = self.layers.iter().map(|layer| {
            let at = behind(matrix, first, layer.dtype.size_bytes());
            first += layer.padded_rank();
            (layer, at)
        });
        places.collect()
    }

    /// Launches of the forward, which write each layer's output `y`. They also write `s [t, line]`, the
    /// outputs of the A matrices. `None` when the dtype has no kernel.
    #[must_use]
    pub fn forward<S: Step>(
        &self,
        s: Address,
        y: &[Address],
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<S>> {
        let line = line(self.layers);
        let mut launches = self.down(s, multiprocessors, workspace)?;
        for ((layer, s), y) in self.columns(s).into_iter().zip(y) {
            let output = layer.output(s, line, *y);
            launches.extend(S::wide(&output, multiprocessors, workspace)?);
        }
        Some(launches)
    }

    /// Launches of the backward, which write the gradients for each layer's `dy [t, n]`, given the `s` of the
    /// forward. `None` when the dtype has no kernel.
    #[must_use]
    pub fn backward<S: Step>(
        &self,
        dy: &[Address],
        s: Address,
        gradients: Gradients<'_>,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<S>> {
        let all = self.all()?;
        let (line, size) = (line(self.layers), all.dtype.size_bytes());
        let mark = workspace.mark();
        let ds = workspace.take((all.t * line * size) as u64);
        let mut launches = Vec::new();
        let places = self.columns(s).into_iter().zip(self.columns(ds));
        for (((layer, s), (_, ds)), (dy, d_lora_b)) in places.zip(dy.iter().zip(gradients.d_lora_b))
        {
            let pass = LoraGradients {
                dtype: layer.dtype,
                t: layer.t,
                n: layer.n,
                r: layer.r,
                padded_rank: layer.padded_rank(),
                line,
                rows: Address::NULL,
                dy: *dy,
                s,
                lora_b: layer.lora_b,
                scale: layer.scale,
                ds,
                d_lora_b: *d_lora_b,
            };
            if pass.fits() {
                launches.extend(pass.launches(workspace)?.into_iter().map(S::from));
                continue;
            }
            let mut down = layer.down_gradient(*dy, ds);
            down.y_line = line;
            let mut d_lora_b = layer.lora_b_gradient(*dy, s, *d_lora_b);
            if let Some(term) = &mut d_lora_b.terms[0] {
                term.b_line = line;
            }
            launches.extend(run([down, d_lora_b], multiprocessors, workspace)?);
        }
        let adapters = self.adapters()?;
        for (adapter, first) in &adapters {
            let before = workspace.mark();
            let (seeing, dropout) = adapter.seeing(workspace)?;
            launches.extend(dropout);
            let to = behind(gradients.d_stacked, first * all.k, size_of::<f32>());
            let mut d_lora_a = seeing.lora_a_gradient(behind(ds, *first, size), to);
            if let Some(term) = &mut d_lora_a.terms[0] {
                term.a_line = line;
            }
            launches.extend(run([d_lora_a], multiprocessors, workspace)?);
            workspace.release(before);
        }
        if gradients.dx != Address::NULL {
            let elems = all.t * all.k;
            for (i, ((layer, ds), dy)) in self.columns(ds).into_iter().zip(dy).rev().enumerate() {
                let before = workspace.mark();
                let own = match i {
                    0 => gradients.dx,
                    _ => workspace.take((elems * size) as u64),
                };
                let mut input = layer.input_gradient(*dy, ds, own);
                // The adapter's term, after that of the weight.
                if let Some(term) = &mut input.terms[1] {
                    term.a_line = line;
                }
                launches.extend(S::wide(&input, multiprocessors, workspace)?);
                if i > 0 {
                    let sum = gradients.dx;
                    launches.push(pointwise::add(all.dtype, sum, own, sum, elems as u64)?.into());
                }
                workspace.release(before);
            }
            for (adapter, first) in adapters.iter().rev() {
                let ds = (behind(ds, *first, size), line);
                launches.extend(adapter.add_seen_gradient(
                    ds,
                    gradients.dx,
                    multiprocessors,
                    workspace,
                )?);
            }
        }
        workspace.release(mark);
        Some(launches)
    }
}

/// Address after `elements` elements of `size` bytes.
fn behind(start: Address, elements: usize, size: usize) -> Address {
    Address(start.0 + (elements * size) as u64)
}
