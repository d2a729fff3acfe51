//! Adapted linear layers of one input. Their adapters are stacked: `s` of all is one product over `x`, and so are all
//! gradients of A. A pass over `x` is what an adapter costs most, so that three layers cost little more than one:
//!
//! | result | passes over `x` | instead of |
//! |---|---|---|
//! | `s = scale * x [A1; A2; ..]^T` | 1 | one a layer, twice: forward keeps it for backward |
//! | `[dA1; dA2; ..] = ds^T x` | 1 | one a layer |
//!
//! For queries, keys and values of 8192 tokens and 4096 features in bf16 that are 134 MB of `x` instead of 604 MB.
//! Everything else is as for one layer: `y` and the layers' own `dx` are written by one product each, `ds` and `dB` take
//! one pass over each `dy`. The own `dx` are added in `dtype`, the last layer's first, as their definition says.

use super::lora_gradients::LoraGradients;
use super::lora_linear::{LoraLinear, run};
use super::pointwise;
use super::workspace::Workspace;
use crate::cuda::launch::{Address, Launch};

/// Layers with one `x`, `t`, `k`, dtype and scale, each with an adapter, and their stacked A.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedLora<'a> {
    /// The layers.
    pub layers: &'a [LoraLinear],
    /// `[line, k]`: A of each layer, followed by rows of zeros up to its padded rank.
    pub stacked: Address,
}

/// Where gradients go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gradients<'a> {
    /// `[t, k]` in the layers' dtype; [`Address::NULL`] when nobody needs it.
    pub dx: Address,
    /// `[line, k]` f32: those of A, stacked as A is.
    pub d_stacked: Address,
    /// `[n, r]` f32 of each layer.
    pub d_lora_b: &'a [Address],
}

/// Elements of a row of `s` and `ds` of all layers, and rows of the stacked A: the padded ranks one behind the other.
#[must_use]
pub fn line(layers: &[LoraLinear]) -> usize {
    layers.iter().map(LoraLinear::padded_rank).sum()
}

impl SharedLora<'_> {
    /// All adapters as one of a layer without outputs; `None` without layers.
    fn all(&self) -> Option<LoraLinear> {
        Some(LoraLinear {
            n: 0,
            r: line(self.layers),
            lora_a: self.stacked,
            ..*self.layers.first()?
        })
    }

    /// The layers, each with the place of its columns in a matrix `[t, line]` of the layers' dtype.
    fn columns(&self, matrix: Address) -> Vec<(&LoraLinear, Address)> {
        let mut first = 0;
        let places = self.layers.iter().map(|layer| {
            let at = Address(matrix.0 + (first * layer.dtype.size_bytes()) as u64);
            first += layer.padded_rank();
            (layer, at)
        });
        places.collect()
    }

    /// `y` of each layer; `s [t, line]` is written. `None` when the dtype has no kernel.
    #[must_use]
    pub fn forward(
        &self,
        s: Address,
        y: &[Address],
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let line = line(self.layers);
        let down = self.all()?.down(s);
        let outputs = self.columns(s).into_iter().zip(y);
        let outputs = outputs.map(|((layer, s), y)| layer.output(s, line, *y));
        run(
            [down].into_iter().chain(outputs),
            multiprocessors,
            workspace,
        )
    }

    /// The gradients for the layers' `dy` `[t, n]`, with the `s` of the forward pass. `None` when the dtype has no kernel.
    #[must_use]
    pub fn backward(
        &self,
        dy: &[Address],
        s: Address,
        gradients: Gradients<'_>,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
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
                dy: *dy,
                s,
                lora_b: layer.lora_b,
                scale: layer.scale,
                ds,
                d_lora_b: *d_lora_b,
            };
            if pass.fits() {
                launches.extend(pass.launches(workspace)?);
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
        let d_stacked = all.lora_a_gradient(ds, gradients.d_stacked);
        launches.extend(run([d_stacked], multiprocessors, workspace)?);
        if gradients.dx != Address::NULL {
            let elems = all.t * all.k;
            for (i, ((layer, ds), dy)) in self.columns(ds).into_iter().zip(dy).rev().enumerate() {
                let before = workspace.mark();
                let own = match i {
                    0 => gradients.dx,
                    _ => workspace.take((elems * size) as u64),
                };
                let mut input = layer.input_gradient(*dy, ds, own);
                // The adapter's term, behind that of the weight.
                if let Some(term) = &mut input.terms[1] {
                    term.a_line = line;
                }
                launches.extend(run([input], multiprocessors, workspace)?);
                if i > 0 {
                    let sum = gradients.dx;
                    launches.push(pointwise::add(all.dtype, sum, own, sum, elems as u64)?);
                }
                workspace.release(before);
            }
        }
        workspace.release(mark);
        Some(launches)
    }
}
