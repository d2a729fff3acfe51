//! Rows of attention and of its gradients in f64, with an error bound for each element.

use std::ops::Range;

use crate::reference::Attention;
use crate::tolerance;

/// Elements and their error bounds.
#[derive(Clone, Debug)]
pub(super) struct Bounded {
    pub(super) want: Vec<f64>,
    pub(super) bound: Vec<f64>,
}

impl Bounded {
    fn zeros(n: usize) -> Self {
        Self {
            want: vec![0.0; n],
            bound: vec![0.0; n],
        }
    }

    /// Adds `weight * row`, where the weight has an error.
    fn add(&mut self, (weight, error): (f64, f64), row: &[f64], magnitude: &mut [f64]) {
        for (i, x) in row.iter().enumerate() {
            self.want[i] += weight * x;
            self.bound[i] += error * x.abs();
            magnitude[i] += (weight * x).abs();
        }
    }

    /// Adds the errors of a sum of `n` terms, of a factor and of the store.
    fn finish(
        mut self,
        rounding: tolerance::Attention,
        n: usize,
        scale: f64,
        magnitude: &[f64],
    ) -> Self {
        for (i, magnitude) in magnitude.iter().enumerate() {
            self.want[i] *= scale;
            let computed = scale * (self.bound[i] + rounding.sum(n, *magnitude));
            self.bound[i] = computed + rounding.store(self.want[i].abs() + computed);
        }
        self
    }
}

/// Inputs of backward per query and head, with errors.
#[derive(Clone, Debug)]
pub(super) struct Statistics {
    /// Log-sum-exp.
    pub(super) lse: Vec<(f64, f64)>,
    /// Sum of `out * dout`.
    pub(super) delta: Vec<(f64, f64)>,
}

/// Operands in f64, as the kernels get them.
#[derive(Clone, Debug)]
pub(super) struct Values {
    pub(super) q: Vec<f64>,
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
    pub(super) dout: Vec<f64>,
}

/// A call in f64.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exact<'a> {
    pub(super) shape: &'a Attention,
    pub(super) values: &'a Values,
    pub(super) rounding: tolerance::Attention,
}

/// Sum of products, and sum of their magnitudes.
fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    let products = a.iter().zip(b).map(|(a, b)| a * b);
    products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

impl Exact<'_> {
    fn head_of<'x>(&self, x: &'x [f64], row: usize, head: usize, heads: usize) -> &'x [f64] {
        &x[(row * heads + head) * self.shape.d..][..self.shape.d]
    }

    fn q_row<'x>(&self, x: &'x [f64], row: usize, head: usize) -> &'x [f64] {
        self.head_of(x, row, head, self.shape.h)
    }

    /// A row of K. `head` is a query head.
    fn k_row<'x>(&self, x: &'x [f64], key: usize, head: usize) -> &'x [f64] {
        let group = self.shape.h / self.shape.g;
        self.head_of(x, key, head / group, self.shape.g)
    }

    /// Index of the sequence that contains `row`.
    fn sequence(starts: &[usize], row: usize) -> usize {
        starts.partition_point(|start| *start <= row) - 1
    }

    fn sequence_rows(starts: &[usize], sequence: usize) -> Range<usize> {
        starts[sequence]..starts[sequence + 1]
    }

    /// Keys visible to a query row.
    fn keys(&self, row: usize) -> Range<usize> {
        let sequence = Self::sequence(&self.shape.q_starts, row);
        let q = Self::sequence_rows(&self.shape.q_starts, sequence);
        let k = Self::sequence_rows(&self.shape.k_starts, sequence);
        let hidden = if self.shape.causal {
            q.end - 1 - row
        } else {
            0
        };
        k.start..k.end.saturating_sub(hidden).max(k.start)
    }

    /// The scaled score with its error.
    fn score(&self, row: usize, head: usize, key: usize) -> (f64, f64) {
        let q = self.q_row(&self.values.q, row, head);
        let (sum, size) = dot(q, self.k_row(&self.values.k, key, head));
        let (score, size) = (self.shape.scale * sum, self.shape.scale.abs() * size);
        (score, self.rounding.score(self.shape.d, score, size))
    }

    /// A row of the output and its log-sum-exp.
    pub(super) fn forward(&self, row: usize, head: usize) -> (Bounded, (f64, f64)) {
        let (d, rounding) = (self.shape.d, self.rounding);
        let scores: Vec<_> = self
            .keys(row)
            .map(|key| self.score(row, head, key))
            .collect();
        let mut out = Bounded::zeros(d);
        if scores.is_empty() {
            return (out, (f64::NEG_INFINITY, 0.0));
        }
        let top = scores.iter().fold(f64::NEG_INFINITY, |top, s| top.max(s.0));
        let largest = scores.iter().fold(0.0, |size: f64, s| size.max(s.0.abs()));
        let lse = top + scores.iter().map(|s| (s.0 - top).exp()).sum::<f64>().ln();
        let mut magnitude = vec![0.0; d];
        let mut sum_relative = rounding.running_sum(scores.len());
        let mut worst: f64 = 0.0;
        for (score, key) in scores.iter().zip(self.keys(row)) {
            let p = (score.0 - lse).exp();
            let relative = rounding.exponential(*score, (largest, 0.0));
            // Weights are rounded before the division by their sum, which is at least one.
            let error = p * relative + rounding.weight(p);
            out.add(
                (p, error),
                self.k_row(&self.values.v, key, head),
                &mut magnitude,
            );
            worst = worst.max(relative);
        }
        sum_relative += worst;
        for (bound, magnitude) in out.bound.iter_mut().zip(&magnitude) {
            *bound += 1.01 * sum_relative * magnitude;
        }
        let lse_error = rounding.log_sum_exp(lse, sum_relative, largest);
        (
            out.finish(rounding, scores.len(), 1.0, &magnitude),
            (lse, lse_error),
        )
    }

    /// Statistics of the exact forward, with the errors that a kernel's forward may make.
    pub(super) fn statistics(&self) -> Statistics {
        let rows = (0..self.shape.queries())
            .flat_map(|row| (0..self.shape.h).map(move |head| (row, head)));
        let all = rows.map(|(row, head)| {
            let (out, lse) = self.forward(row, head);
            let dout = self.q_row(&self.values.dout, row, head);
            let (delta, size) = dot(&out.want, dout);
            let error = dot(&out.bound, dout).1;
            (lse, (delta, error + self.rounding.sum(self.shape.d, size)))
        });
        let (lse, delta) = all.unzip();
        Statistics { lse, delta }
    }

    /// Statistics that a kernel's backward reads after a forward with these results.
    pub(super) fn statistics_of(&self, out: &[f64], lse: &[f64]) -> Statistics {
        let rows = out
            .chunks_exact(self.shape.d)
            .zip(self.values.dout.chunks_exact(self.shape.d));
        let delta = rows.map(|(out, dout)| {
            let (delta, size) = dot(out, dout);
            (delta, self.rounding.sum(self.shape.d, size))
        });
        Statistics {
            lse: lse.iter().map(|lse| (*lse, 0.0)).collect(),
            delta: delta.collect(),
        }
    }

    /// The weight of a key and the gradient of its score (before `scale`), as the products use them.
    fn weights(&self, row: usize, head: usize, key: usize, from: &Statistics) -> [(f64, f64); 2] {
        let (d, rounding, at) = (self.shape.d, self.rounding, row * self.shape.h + head);
        let score = self.score(row, head, key);
        let p = (score.0 - from.lse[at].0).exp();
        let relative = rounding.exponential(score, from.lse[at]);
        let dout = self.q_row(&self.values.dout, row, head);
        let (dp, size) = dot(dout, self.k_row(&self.values.v, key, head));
        let (delta, delta_error) = from.delta[at];
        let ds = p * (dp - delta);
        let difference =
            delta_error + rounding.sum(d, size) + rounding.sum(0, dp.abs() + delta.abs());
        let ds_error = ds.abs() * relative + p * (1.0 + relative) * difference;
        let rounded = |x: f64, error: f64| (x, error + rounding.weight(x.abs() + error));
        [rounded(p, p * relative), rounded(ds, ds_error)]
    }

    /// A row of `dq`.
    pub(super) fn gradient_q(&self, row: usize, head: usize, from: &Statistics) -> Bounded {
        let mut dq = Bounded::zeros(self.shape.d);
        let mut magnitude = vec![0.0; self.shape.d];
        let keys = self.keys(row);
        for key in keys.clone() {
            let [_, ds] = self.weights(row, head, key, from);
            dq.add(ds, self.k_row(&self.values.k, key, head), &mut magnitude);
        }
        dq.finish(self.rounding, keys.len(), self.shape.scale, &magnitude)
    }

    /// A row of `dk` and of `dv`.
    pub(super) fn gradient_kv(
        &self,
        key: usize,
        kv_head: usize,
        from: &Statistics,
    ) -> [Bounded; 2] {
        let group = self.shape.h / self.shape.g;
        let sequence = Self::sequence(&self.shape.k_starts, key);
        let rows = Self::sequence_rows(&self.shape.q_starts, sequence);
        let mut sums = [(); 2].map(|()| (Bounded::zeros(self.shape.d), vec![0.0; self.shape.d]));
        let mut terms = 0;
        for head in kv_head * group..(kv_head + 1) * group {
            for row in rows.clone().filter(|row| self.keys(*row).contains(&key)) {
                let [p, ds] = self.weights(row, head, key, from);
                let [dk, dv] = &mut sums;
                dk.0.add(ds, self.q_row(&self.values.q, row, head), &mut dk.1);
                dv.0.add(p, self.q_row(&self.values.dout, row, head), &mut dv.1);
                terms += 1;
            }
        }
        let [(dk, dk_size), (dv, dv_size)] = sums;
        let scale = self.shape.scale;
        [
            dk.finish(self.rounding, terms, scale, &dk_size),
            dv.finish(self.rounding, terms, 1.0, &dv_size),
        ]
    }
}
