//! Reference implementation in f64 of every operation and its gradients, without optimizations.

use kernels::{Gelu, IGNORED_LABEL, RopeLayout};

/// `a [m, k] @ b [k, n]`.
pub(crate) fn matmul(a: &[f64], b: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for p in 0..k {
            for j in 0..n {
                out[i * n + j] += a[i * k + p] * b[p * n + j];
            }
        }
    }
    out
}

/// Transpose of `x [rows, cols]`.
pub(crate) fn transpose(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols)
        .map(|i| x[i % rows * cols + i / rows])
        .collect()
}

pub(crate) fn absolute(x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| x.abs()).collect()
}

pub(crate) fn add(a: &[f64], b: &[f64], factor: f64) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + factor * b).collect()
}

pub(crate) fn add_bias(x: &mut [f64], bias: &[f64]) {
    for row in x.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
    }
}

pub(crate) fn column_sum(x: &[f64], n: usize) -> Vec<f64> {
    let mut out = vec![0.0; n];
    for row in x.chunks_exact(n) {
        out.iter_mut().zip(row).for_each(|(o, x)| *o += x);
    }
    out
}

/// Operands of a LoRA layer.
#[derive(Clone, Debug)]
pub(crate) struct Lora {
    pub(crate) x: Vec<f64>,
    pub(crate) weight: Vec<f64>,
    pub(crate) bias: Option<Vec<f64>>,
    pub(crate) a: Vec<f64>,
    pub(crate) b: Vec<f64>,
    pub(crate) scale: f64,
    /// `t`, `n`, `k`, `r`.
    pub(crate) sizes: [usize; 4],
}

impl Lora {
    pub(crate) fn forward(&self) -> Vec<f64> {
        let [t, n, k, r] = self.sizes;
        let u = matmul(&self.x, &transpose(&self.a, r, k), t, r, k);
        let y = matmul(&self.x, &transpose(&self.weight, n, k), t, n, k);
        let low = matmul(&u, &transpose(&self.b, n, r), t, n, r);
        let mut y = add(&y, &low, self.scale);
        if let Some(bias) = &self.bias {
            add_bias(&mut y, bias);
        }
        y
    }

    /// `[dx, d_lora_a, d_lora_b]`.
    pub(crate) fn backward(&self, dy: &[f64]) -> [Vec<f64>; 3] {
        let [t, n, k, r] = self.sizes;
        let u = matmul(&self.x, &transpose(&self.a, r, k), t, r, k);
        let du = matmul(dy, &self.b, t, r, n);
        let low = matmul(&du, &self.a, t, k, r);
        let dx = add(&matmul(dy, &self.weight, t, k, n), &low, self.scale);
        let scaled = |x: Vec<f64>| x.into_iter().map(|x| x * self.scale).collect();
        let da = scaled(matmul(&transpose(&du, t, r), &self.x, r, k, t));
        let db = scaled(matmul(&transpose(dy, t, n), &u, n, r, t));
        [dx, da, db]
    }
}

/// Mean (0 for RMS norm) and the factor that normalizes a row.
pub(crate) fn statistics(x: &[f64], eps: f64, layer: bool) -> (f64, f64) {
    let n = x.len() as f64;
    let mean = if layer {
        x.iter().sum::<f64>() / n
    } else {
        0.0
    };
    let var = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (var + eps).sqrt())
}

pub(crate) fn norm(x: &[f64], weight: &[f64], bias: Option<&[f64]>, eps: f64) -> Vec<f64> {
    let c = weight.len();
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(c) {
        let (mean, scale) = statistics(row, eps, bias.is_some());
        out.extend(
            (0..c).map(|j| (row[j] - mean) * scale * weight[j] + bias.map_or(0.0, |b| b[j])),
        );
    }
    out
}

/// Gradients `(dx, d_weight, d_bias)`.
pub(crate) fn norm_backward(
    x: &[f64],
    weight: &[f64],
    dy: &[f64],
    eps: f64,
    layer: bool,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let c = weight.len();
    let (mut dx, mut dw, mut db) = (Vec::new(), vec![0.0; c], vec![0.0; c]);
    for (row, dy) in x.chunks_exact(c).zip(dy.chunks_exact(c)) {
        let (mean, scale) = statistics(row, eps, layer);
        let normal: Vec<f64> = row.iter().map(|x| (x - mean) * scale).collect();
        let g: Vec<f64> = dy.iter().zip(weight).map(|(d, w)| d * w).collect();
        let mean_g = if layer {
            g.iter().sum::<f64>() / c as f64
        } else {
            0.0
        };
        let mean_gx = g.iter().zip(&normal).map(|(g, n)| g * n).sum::<f64>() / c as f64;
        for j in 0..c {
            dx.push(scale * (g[j] - mean_g - normal[j] * mean_gx));
            dw[j] += dy[j] * normal[j];
            db[j] += dy[j];
        }
    }
    (dx, dw, db)
}

/// Error function as a series of positive terms, so without cancellation.
pub(crate) fn erf(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

pub(crate) fn gelu(x: f64, kind: Gelu) -> f64 {
    match kind {
        Gelu::Erf => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Gelu::Tanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + u.tanh())
        }
    }
}

pub(crate) fn gelu_slope(x: f64, kind: Gelu) -> f64 {
    let pi = std::f64::consts::PI;
    match kind {
        Gelu::Erf => {
            0.5 * (1.0 + erf(x / 2f64.sqrt())) + x * (-0.5 * x * x).exp() / (2.0 * pi).sqrt()
        }
        Gelu::Tanh => {
            let u = (2.0 / pi).sqrt() * (x + 0.044715 * x * x * x);
            let du = (2.0 / pi).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
            0.5 * (1.0 + u.tanh()) + 0.5 * x * du / u.cosh().powi(2)
        }
    }
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn swiglu(gate: f64, up: f64) -> f64 {
    gate * sigmoid(gate) * up
}

/// Derivatives with respect to gate and up.
pub(crate) fn swiglu_slopes(gate: f64, up: f64) -> (f64, f64) {
    let s = sigmoid(gate);
    (up * s * (1.0 + gate * (1.0 - s)), gate * s)
}

/// Rotation of `x [t, h, d]` by angles whose tables are `[t, w]`.
pub(crate) fn rope(
    x: &[f64],
    (cos, sin): (&[f64], &[f64]),
    (h, d, w): (usize, usize, usize),
    layout: RopeLayout,
    sign: f64,
) -> Vec<f64> {
    let mut out = x.to_vec();
    for (head, (x, out)) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
        for i in 0..w {
            let (c, s) = (cos[head / h * w + i], sign * sin[head / h * w + i]);
            let (a, b) = match layout {
                RopeLayout::HalfSplit => (i, i + w),
                RopeLayout::Interleaved => (2 * i, 2 * i + 1),
            };
            out[a] = x[a] * c - x[b] * s;
            out[b] = x[b] * c + x[a] * s;
        }
    }
    out
}

/// Parameters of an attention call, without its values.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    pub(crate) q_starts: Vec<usize>,
    pub(crate) k_starts: Vec<usize>,
    pub(crate) h: usize,
    pub(crate) g: usize,
    pub(crate) d: usize,
    pub(crate) causal: bool,
    pub(crate) scale: f64,
}

impl Attention {
    pub(crate) fn queries(&self) -> usize {
        *self.q_starts.last().unwrap()
    }

    pub(crate) fn keys(&self) -> usize {
        *self.k_starts.last().unwrap()
    }

    /// (Query row, head, key rows) of every row of scores.
    fn rows(&self) -> Vec<(usize, usize, std::ops::Range<usize>)> {
        let mut all = Vec::new();
        let sequences = self.q_starts.windows(2).zip(self.k_starts.windows(2));
        for (q, k) in sequences {
            let (queries, keys) = (q[1] - q[0], k[1] - k[0]);
            for i in 0..queries {
                let visible = match self.causal {
                    true => (i + 1 + keys).saturating_sub(queries),
                    false => keys,
                };
                for head in 0..self.h {
                    all.push((q[0] + i, head, k[0]..k[0] + visible));
                }
            }
        }
        all
    }

    fn at(&self, row: usize, head: usize, heads: usize) -> std::ops::Range<usize> {
        let start = (row * heads + head) * self.d;
        start..start + self.d
    }

    /// Log-sum-exp and probabilities of one row.
    fn weights(
        &self,
        q: &[f64],
        k: &[f64],
        head: usize,
        keys: std::ops::Range<usize>,
    ) -> (f64, Vec<f64>) {
        let kv = head / (self.h / self.g);
        let dot = |key: usize| -> f64 {
            let k = &k[self.at(key, kv, self.g)];
            self.scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()
        };
        let scores: Vec<f64> = keys.map(dot).collect();
        let top = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
        let lse = top + scores.iter().map(|s| (s - top).exp()).sum::<f64>().ln();
        (lse, scores.iter().map(|s| (s - lse).exp()).collect())
    }

    /// `(out, lse)`.
    pub(crate) fn forward(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let mut out = vec![0.0; q.len()];
        let mut lse = vec![f64::NEG_INFINITY; self.queries() * self.h];
        for (row, head, keys) in self.rows() {
            if keys.is_empty() {
                continue;
            }
            let at = self.at(row, head, self.h);
            let (sum, p) = self.weights(&q[at.clone()], k, head, keys.clone());
            lse[row * self.h + head] = sum;
            for (p, key) in p.iter().zip(keys) {
                let v = &v[self.at(key, head / (self.h / self.g), self.g)];
                out[at.clone()]
                    .iter_mut()
                    .zip(v)
                    .for_each(|(o, v)| *o += p * v);
            }
        }
        (out, lse)
    }

    /// `(dq, dk, dv)`.
    pub(crate) fn backward(
        &self,
        (q, k, v): (&[f64], &[f64], &[f64]),
        dout: &[f64],
    ) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        for (row, head, keys) in self.rows() {
            let at = self.at(row, head, self.h);
            let (_, p) = self.weights(&q[at.clone()], k, head, keys.clone());
            let kv = head / (self.h / self.g);
            let go = &dout[at.clone()];
            let dot = |x: &[f64]| x.iter().zip(go).map(|(a, b)| a * b).sum::<f64>();
            let dp: Vec<f64> = keys
                .clone()
                .map(|key| dot(&v[self.at(key, kv, self.g)]))
                .collect();
            let delta: f64 = p.iter().zip(&dp).map(|(p, d)| p * d).sum();
            for ((p, dp), key) in p.iter().zip(&dp).zip(keys) {
                let ds = self.scale * p * (dp - delta);
                let there = self.at(key, kv, self.g);
                for j in 0..self.d {
                    dq[at.start + j] += ds * k[there.start + j];
                    dk[there.start + j] += ds * q[at.start + j];
                    dv[there.start + j] += p * go[j];
                }
            }
        }
        (dq, dk, dv)
    }
}

/// Losses per row, and the gradients of `factor * sum`.
pub(crate) struct Loss {
    pub(crate) losses: Vec<f64>,
    pub(crate) d_hidden: Vec<f64>,
    pub(crate) d_weight: Vec<f64>,
}

pub(crate) fn cross_entropy(
    hidden: &[f64],
    weight: &[f64],
    labels: &[i32],
    c: usize,
    factor: f64,
) -> Loss {
    let v = weight.len() / c;
    let mut all = Loss {
        losses: vec![0.0; labels.len()],
        d_hidden: vec![0.0; hidden.len()],
        d_weight: vec![0.0; weight.len()],
    };
    for (row, label) in labels
        .iter()
        .enumerate()
        .filter(|(_, l)| **l != IGNORED_LABEL)
    {
        let h = &hidden[row * c..][..c];
        let logits = matmul(weight, h, v, 1, c);
        let top = logits.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
        let lse = top + logits.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
        all.losses[row] = lse - logits[*label as usize];
        for (i, logit) in logits.iter().enumerate() {
            let g = factor * ((logit - lse).exp() - f64::from(u8::from(i == *label as usize)));
            for j in 0..c {
                all.d_hidden[row * c + j] += g * weight[i * c + j];
                all.d_weight[i * c + j] += g * h[j];
            }
        }
    }
    all
}
