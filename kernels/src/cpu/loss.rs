//! Fused output projection and cross entropy, over chunks of supervised rows and tiles of the vocabulary.
//!
//! A small vocabulary is one tile. A large one is streamed in tiles with a running maximum and sum, so chunks have
//! enough rows to amortize packing the weight. Its backward computes the logits twice. Tiles depend on the vocabulary
//! only, so a row's loss does not depend on other rows.

use super::gemm::{Out, Product, multiply, workspace};
use super::matrix::{Floats, Matrix, narrow};
use super::parallel::{self, MIN_PARALLEL_ELEMS, workers};
use super::simd::multiversion;
use super::{CpuBackend, CpuMath, Space, floats, math, reduce};
use crate::backend::{IGNORED_LABEL, LossGrads, LossNeeds};
use crate::check::LossSizes;
use crate::error::{KernelError, Result};
use crate::pool::Tag;
use crate::{DType, Float, Tensor, TensorMut};
use rayon::prelude::*;

/// Maximum logits in memory at one time (32 MiB).
const LOGITS: usize = 8 << 20;
/// Maximum number of supervised rows that are processed together.
const CHUNK_ROWS: usize = 1024;
/// Largest vocabulary that is one tile. Its chunks have at least 256 rows.
const ONE_TILE: usize = LOGITS / 256;

/// Partition into chunks of rows and tiles of the vocabulary.
#[derive(Clone, Copy)]
struct Cuts {
    rows: usize,
    cols: usize,
    v: usize,
    c: usize,
    supervised: usize,
}

impl Cuts {
    fn new(sizes: LossSizes, supervised: usize) -> Self {
        let LossSizes { c, v, .. } = sizes;
        let cols = if v <= ONE_TILE {
            v
        } else {
            LOGITS / CHUNK_ROWS
        };
        let rows = (LOGITS / cols.max(1)).min(CHUNK_ROWS).min(supervised);
        Self {
            rows,
            cols,
            v,
            c,
            supervised,
        }
    }

    /// Elements of workspace: gathered rows, a tile of logits, gradients of the rows, and the products' workspace.
    fn space(&self, need: Option<LossNeeds>) -> usize {
        let Self {
            rows, cols, v, c, ..
        } = *self;
        if rows == 0 || v == 0 {
            return 0;
        }
        let f = DType::F32;
        let last = |all: usize, part: usize| (all - 1) % part + 1;
        let mut products = 0;
        for rows in [rows, last(self.supervised, rows)] {
            for cols in [cols, last(v, cols)] {
                products = products.max(workspace(rows, cols, &[c], f));
                if need.is_some_and(|n| n.hidden) {
                    products = products.max(workspace(rows, c, &[cols], f));
                }
                if need.is_some_and(|n| n.weight) {
                    products = products.max(workspace(cols, c, &[rows], f));
                }
            }
        }
        let d_hidden = if need.is_some_and(|n| n.hidden) {
            rows * c
        } else {
            0
        };
        rows * c + rows * cols + d_hidden + products
    }
}

/// Number of f32 elements of workspace for a loss with `supervised` rows that have a label.
pub(crate) fn space(sizes: LossSizes, supervised: usize, need: Option<LossNeeds>) -> usize {
    Cuts::new(sizes, supervised).space(need)
}

/// Softmax statistics of one row, updated tile by tile: maximum, sum of exponentials, and the label's logit.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f64,
    label: f32,
}

const START: Running = Running {
    max: f32::NEG_INFINITY,
    sum: 0.0,
    label: 0.0,
};

impl Running {
    fn log_sum(&self) -> f64 {
        f64::from(self.max) + self.sum.ln()
    }

    fn loss(&self) -> f32 {
        (self.log_sum() - f64::from(self.label)) as f32
    }
}

fn supervised(labels: &[i32], v: usize) -> Result<Vec<usize>> {
    let mut rows = Vec::new();
    for (row, label) in labels.iter().enumerate() {
        if *label == IGNORED_LABEL {
            continue;
        }
        if usize::try_from(*label).map_or(true, |l| l >= v) {
            return Err(KernelError::Index {
                op: "linear_cross_entropy",
                index: i64::from(*label),
                rows: v,
            });
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Operands of a call, and its supervised rows.
struct Head<'a> {
    math: CpuMath,
    hidden: Floats<'a>,
    weight: Matrix<'a>,
    labels: &'a [i32],
    rows: Vec<usize>,
    cuts: Cuts,
}

impl<'a> Head<'a> {
    fn new(
        math: CpuMath,
        hidden: &'a Tensor,
        weight: &'a Tensor,
        labels: &'a Tensor,
        sizes: LossSizes,
    ) -> Result<Self> {
        let labels = labels.as_slice::<i32>();
        let rows = supervised(labels, sizes.v)?;
        let cuts = Cuts::new(sizes, rows.len());
        Ok(Self {
            math,
            hidden: Floats::of(hidden),
            weight: Matrix::of(weight),
            labels,
            rows,
            cuts,
        })
    }

    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> {
        let Cuts { cols, v, .. } = self.cuts;
        (0..v)
            .step_by(cols.max(1))
            .map(move |first| (first, cols.min(v - first)))
    }

    /// Copies these rows of the hidden states to the front of `space`, in their own dtype.
    fn gather<'s>(&self, rows: &[usize], space: &'s mut [f32]) -> Matrix<'s> {
        let c = self.cuts.c;
        let floats = match self.hidden {
            Floats::F32(x) => Floats::F32(gather_rows(x, rows, c, space)),
            Floats::BF16(x) => Floats::BF16(gather_rows(x, rows, c, space)),
            Floats::F16(x) => Floats::F16(gather_rows(x, rows, c, space)),
        };
        Matrix::new(floats, rows.len(), c)
    }

    fn logits(&self, hidden: Matrix<'_>, tile: (usize, usize), out: &mut [f32], ws: &mut [f32]) {
        let weight = self.weight.row_range(tile.0, tile.1).transposed();
        let product = Product::new(hidden, weight, 1.0);
        multiply(self.math, &[product], None, into(out, false), ws);
    }

    /// Label of row `row` relative to the start of a tile, if the label is in the tile.
    fn label_in(&self, row: usize, tile: (usize, usize)) -> Option<usize> {
        let label = self.labels[row] as usize;
        (tile.0..tile.0 + tile.1)
            .contains(&label)
            .then(|| label - tile.0)
    }

    /// Computes statistics of the rows over the whole vocabulary. `logits` keeps the last tile.
    fn statistics(
        &self,
        rows: &[usize],
        hidden: Matrix<'_>,
        logits: &mut [f32],
        ws: &mut [f32],
    ) -> Vec<Running> {
        let mut running = vec![START; rows.len()];
        for tile in self.tiles() {
            let logits = &mut logits[..rows.len() * tile.1];
            self.logits(hidden, tile, logits, ws);
            for_rows(logits, &mut running, tile.1, |i, logits, running| {
                update(logits, running);
                if let Some(label) = self.label_in(rows[i], tile) {
                    running.label = logits[label];
                }
            });
        }
        running
    }
}

/// Copies the rows `rows` of `x`, `c` elements each, to the front of `space`.
fn gather_rows<'s, T: Float>(x: &[T], rows: &[usize], c: usize, space: &'s mut [f32]) -> &'s [T] {
    let out = &mut bytemuck::cast_slice_mut::<f32, T>(space)[..rows.len() * c];
    parallel::chunks(out, c, |start, out| {
        for (out, row) in out.chunks_exact_mut(c).zip(&rows[start / c..]) {
            out.copy_from_slice(&x[row * c..][..c]);
        }
    });
    out
}

fn into(data: &mut [f32], accumulate: bool) -> Out<'_> {
    Out::F32 { data, accumulate }
}

fn for_rows(
    logits: &mut [f32],
    running: &mut [Running],
    cols: usize,
    f: impl Fn(usize, &mut [f32], &mut Running) + Sync,
) {
    if logits.len() < MIN_PARALLEL_ELEMS || workers() == 1 {
        let rows = logits.chunks_exact_mut(cols).zip(running);
        rows.enumerate().for_each(|(i, (l, r))| f(i, l, r));
    } else {
        let rows = logits.par_chunks_exact_mut(cols).zip(running);
        rows.enumerate().for_each(|(i, (l, r))| f(i, l, r));
    }
}

multiversion! {
    /// Updates the softmax statistics of one row with a tile of its logits.
    fn update(logits: &[f32], running: &mut Running) {
        let top = reduce::max(logits);
        let top = if top > running.max { top } else { running.max };
        let mut sum = 0.0;
        // f32 within 1024 logits, f64 across.
        for stretch in logits.chunks(1024) {
            sum += f64::from(reduce::sum(stretch, |x| math::weight(x - top)));
        }
        running.sum = running.sum * f64::from(math::weight(running.max - top)) + sum;
        running.max = top;
    }
}

multiversion! {
    /// Replaces logits by `factor * softmax`.
    fn scaled_softmax(logits: &mut [f32], log_sum: f32, factor: f32) {
        for x in logits {
            *x = factor * math::weight(*x - log_sum);
        }
    }
}

impl CpuBackend {
    pub(super) fn loss_op(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        sizes: LossSizes,
    ) -> Result<Tensor> {
        let head = Head::new(self.math, hidden, weight, labels, sizes)?;
        let mut losses = TensorMut::zeros(&self.pool, Tag::Activations, [sizes.t], DType::F32)?;
        if head.rows.is_empty() {
            return Ok(losses.freeze());
        }
        let Cuts { rows, cols, c, .. } = head.cuts;
        let mut space = Space::take(&self.pool, head.cuts.space(None))?;
        let (h, rest) = space.floats().split_at_mut(rows * c);
        let (logits, ws) = rest.split_at_mut(rows * cols);
        let out = losses.as_mut_slice::<f32>();
        for chunk in head.rows.chunks(rows) {
            let h = head.gather(chunk, h);
            for (row, stats) in chunk.iter().zip(head.statistics(chunk, h, logits, ws)) {
                out[*row] = stats.loss();
            }
        }
        Ok(losses.freeze())
    }

    pub(super) fn loss_backward_op(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        factor: f32,
        need: LossNeeds,
        sizes: LossSizes,
    ) -> Result<LossGrads> {
        let head = Head::new(self.math, hidden, weight, labels, sizes)?;
        let zeros = |tag, shape, dtype| TensorMut::zeros(&self.pool, tag, shape, dtype);
        let mut losses = zeros(Tag::Activations, [sizes.t].into(), DType::F32)?;
        let mut d_hidden = match need.hidden {
            true => Some(zeros(Tag::Activations, hidden.shape(), hidden.dtype())?),
            false => None,
        };
        let mut d_weight = match need.weight {
            true if head.rows.is_empty() => {
                Some(zeros(Tag::Gradients, weight.shape(), DType::F32)?)
            }
            // The first chunk overwrites all of it.
            true => Some(self.gradient(weight.shape())?),
            false => None,
        };
        if !head.rows.is_empty() {
            let floats = head.cuts.space(Some(need));
            let mut space = Space::take(&self.pool, floats)?;
            let mut out = Outputs {
                losses: losses.as_mut_slice(),
                d_hidden: d_hidden.as_mut(),
                d_weight: d_weight.as_mut().map(TensorMut::as_mut_slice),
            };
            head.backward(factor, &mut out, space.floats());
        }
        Ok(LossGrads {
            losses: losses.freeze(),
            d_hidden: d_hidden.map(TensorMut::freeze),
            d_weight: d_weight.map(TensorMut::freeze),
        })
    }
}

/// Destinations of losses and gradients in the backward.
struct Outputs<'a> {
    losses: &'a mut [f32],
    d_hidden: Option<&'a mut TensorMut>,
    d_weight: Option<&'a mut [f32]>,
}

impl Head<'_> {
    fn backward(&self, factor: f32, outputs: &mut Outputs<'_>, space: &mut [f32]) {
        let Outputs {
            losses,
            d_hidden,
            d_weight,
        } = outputs;
        let Cuts {
            rows, cols, v, c, ..
        } = self.cuts;
        let (h, rest) = space.split_at_mut(rows * c);
        let (logits, rest) = rest.split_at_mut(rows * cols);
        let d_rows = if d_hidden.is_some() { rows * c } else { 0 };
        let (dh, ws) = rest.split_at_mut(d_rows);
        for (number, chunk) in self.rows.chunks(rows).enumerate() {
            let n = chunk.len();
            let h = self.gather(chunk, h);
            let mut stats = self.statistics(chunk, h, logits, ws);
            for (row, stats) in chunk.iter().zip(&stats) {
                losses[*row] = stats.loss();
            }
            for tile in self.tiles() {
                let logits = &mut logits[..n * tile.1];
                if cols < v {
                    self.logits(h, tile, logits, ws);
                }
                for_rows(logits, &mut stats, tile.1, |i, logits, stats| {
                    scaled_softmax(logits, stats.log_sum() as f32, factor);
                    if let Some(label) = self.label_in(chunk[i], tile) {
                        logits[label] -= factor;
                    }
                });
                let grad = Matrix::new(Floats::F32(logits), n, tile.1);
                if d_hidden.is_some() {
                    let b = self.weight.row_range(tile.0, tile.1);
                    let product = Product::new(grad, b, 1.0);
                    multiply(
                        self.math,
                        &[product],
                        None,
                        into(&mut dh[..n * c], tile.0 > 0),
                        ws,
                    );
                }
                if let Some(d_weight) = d_weight {
                    let out = &mut d_weight[tile.0 * c..][..tile.1 * c];
                    let a = grad.transposed();
                    let out = into(out, number > 0);
                    multiply(self.math, &[Product::new(a, h, 1.0)], None, out, ws);
                }
            }
            if let Some(d_hidden) = d_hidden {
                floats!(self.hidden.dtype(), T => spread(chunk, dh, d_hidden.as_mut_slice::<T>(), c));
            }
        }
    }
}

/// Stores row `i` of `dh` in row `rows[i]` of `out`.
fn spread<T: Float>(rows: &[usize], dh: &[f32], out: &mut [T], c: usize) {
    for (row, dh) in rows.iter().zip(dh.chunks_exact(c)) {
        narrow(dh, &mut out[row * c..][..c]);
    }
}
