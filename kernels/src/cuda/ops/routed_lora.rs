//! Two adapted linear layers over a partition of rows, such as the experts of CogVLM: every row is read where it lies and
//! written where it belongs, its adapter's term entering the sum as in [`super::lora_linear`].
//!
//! | result | launches | passes over rows |
//! |---|---|---|
//! | `s[row] = scale * x[row] A_g^T` | one, narrow | `x` |
//! | `y[row] = [x[row] \| s[row]] [W_g \| B_g]^T + bias_g` | one | `x`, `y` |
//! | `ds[row] = scale * dy[row] B_g` | one, narrow | `dy` |
//! | `dB_g = dy[rows_g]^T s[rows_g]` | one each | `dy` |
//! | `dA_g = ds[rows_g]^T x[rows_g]` | one each | `x` |
//! | `dx[row] = [dy[row] \| ds[row]] [W_g ; A_g]` | one | `dy`, `dx` |
//!
//! Forward keeps `s`. Taking the rows apart instead, and putting results together again, reads and writes `x`, `y`, `dy` and
//! `dx` once more each, and gives every group a product of its own that fills the GPU less well.

use super::routed::{Group, Low, OfRows, Routed};
use super::workspace::Workspace;
use crate::DType;
use crate::cuda::launch::{Address, Launch};

/// One layer and its rows; addresses as in [`super::lora_linear::LoraLinear`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdaptedGroup {
    /// i32 `[m]`. No row is in both groups.
    pub rows: Address,
    /// How many; may be 0.
    pub m: usize,
    /// `[n, k]`.
    pub weight: Address,
    /// `[n]`, or [`Address::NULL`].
    pub bias: Address,
    /// `[r, k]`.
    pub lora_a: Address,
    /// `[n, r]`.
    pub lora_b: Address,
}

/// Two layers of one shape, rank and scale.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RoutedLora {
    /// Of all operands and results.
    pub dtype: DType,
    /// Rows of both groups.
    pub t: usize,
    /// Features out.
    pub n: usize,
    /// Features in.
    pub k: usize,
    /// Rank, at least 1.
    pub r: usize,
    /// `[t, k]`.
    pub x: Address,
    /// Of the adapters' term.
    pub scale: f32,
    /// The layers.
    pub groups: [AdaptedGroup; 2],
}

/// Where gradients go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gradients {
    /// `[t, k]` in the layers' dtype; [`Address::NULL`] when nobody needs it.
    pub dx: Address,
    /// `[r, k]` f32 of each layer.
    pub d_lora_a: [Address; 2],
    /// `[n, r]` f32 of each layer.
    pub d_lora_b: [Address; 2],
}

impl RoutedLora {
    /// Elements of a row of `s` and `ds`: the rank, padded with zeros to a multiple of 16.
    #[must_use]
    pub const fn line(&self) -> usize {
        self.r.next_multiple_of(16)
    }

    fn low(&self, s: Address) -> Low {
        Low {
            s,
            line: self.line(),
            r: self.r,
        }
    }

    /// Groups with operands that `choose` takes of each layer: b, that of the adapter, bias.
    fn groups(&self, choose: impl Fn(&AdaptedGroup) -> [Address; 3]) -> [Group; 2] {
        self.groups.map(|group| {
            let [b, low_b, bias] = choose(&group);
            Group {
                rows: group.rows,
                m: group.m,
                b,
                low_b,
                bias,
            }
        })
    }

    /// A product of rows without adapter, bias and scale.
    fn product(&self, [n, b_rows, k]: [usize; 3], a: Address, groups: [Group; 2]) -> Routed {
        Routed {
            dtype: self.dtype,
            transpose_b: false,
            t: self.t,
            n,
            b_rows,
            k,
            a,
            low: None,
            scale: 1.0,
            groups,
            y: Address::NULL,
        }
    }

    /// `s [t, line]`.
    fn down(&self, s: Address) -> Routed {
        let groups = self.groups(|group| [group.lora_a, Address::NULL, Address::NULL]);
        Routed {
            scale: self.scale,
            y: s,
            ..self.product([self.line(), self.r, self.k], self.x, groups)
        }
    }

    /// `y [t, n]`; `s [t, line]` is written. `None` when the dtype has no kernel.
    #[must_use]
    pub fn forward(
        &self,
        s: Address,
        y: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let groups = self.groups(|group| [group.weight, group.lora_b, group.bias]);
        let output = Routed {
            low: Some(self.low(s)),
            y,
            ..self.product([self.n, self.n, self.k], self.x, groups)
        };
        run([self.down(s), output], multiprocessors, workspace)
    }

    /// `s [t, line]` alone, as [`RoutedLora::forward`] writes it.
    #[must_use]
    pub fn inner(
        &self,
        s: Address,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        run([self.down(s)], multiprocessors, workspace)
    }

    /// The gradients for `dy` `[t, n]`, with the `s` of the forward pass. `None` when the dtype has no kernel.
    #[must_use]
    pub fn backward(
        &self,
        dy: Address,
        s: Address,
        gradients: Gradients,
        multiprocessors: u32,
        workspace: &mut Workspace,
    ) -> Option<Vec<Launch>> {
        let Self {
            dtype, t, n, k, r, ..
        } = *self;
        let line = self.line();
        let mark = workspace.mark();
        let ds = workspace.take((t * line * dtype.size_bytes()) as u64);
        let groups = self.groups(|group| [group.lora_b, Address::NULL, Address::NULL]);
        let down = Routed {
            transpose_b: true,
            scale: self.scale,
            y: ds,
            ..self.product([line, r, n], dy, groups)
        };
        let mut launches = run([down], multiprocessors, workspace)?;
        for (i, group) in self.groups.iter().enumerate() {
            let of_rows = |[m, n]: [usize; 2], [a, b]: [(Address, usize); 2], y| OfRows {
                dtype,
                t,
                m,
                n,
                rows: group.rows,
                k: group.m,
                a: a.0,
                a_line: a.1,
                b: b.0,
                b_line: b.1,
                y,
            };
            let products = [
                of_rows([n, r], [(dy, n), (s, line)], gradients.d_lora_b[i]),
                of_rows([r, k], [(ds, line), (self.x, k)], gradients.d_lora_a[i]),
            ];
            for product in products {
                let choice = product.choose(multiprocessors);
                launches.extend(product.launches(choice, multiprocessors, workspace)?);
            }
        }
        if gradients.dx != Address::NULL {
            let groups = self.groups(|group| [group.weight, group.lora_a, Address::NULL]);
            let input = Routed {
                transpose_b: true,
                low: Some(self.low(ds)),
                y: gradients.dx,
                ..self.product([k, k, n], dy, groups)
            };
            launches.extend(run([input], multiprocessors, workspace)?);
        }
        workspace.release(mark);
        Some(launches)
    }
}

fn run<const N: usize>(
    products: [Routed; N],
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
