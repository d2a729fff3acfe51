//! Attention backward: scores are recomputed tile by tile from the saved log-sum-exp, as in FlashAttention.
#![allow(unsafe_code, reason = "heads interleave in the outputs")]

use super::{
    BACKWARD_SCRATCH, Head, K_TILE, Q_TILE, Sequence, Tile, flops, products_space, sequences,
    tile_extents,
};
use crate::backend::{AttentionArgs, AttentionGrads, AttentionOut};
use crate::check::AttentionSizes;
use crate::cpu::gemm::multiply_here;
use crate::cpu::matrix::{Floats, Matrix, narrow};
use crate::cpu::parallel::{self, MIN_PARALLEL_FLOPS, Shared, run_tasks};
use crate::cpu::simd::multiversion;
use crate::cpu::{CpuBackend, CpuMath, Space, floats, math, reduce};
use crate::error::Result;
use crate::{Float, Tensor};

fn scratch(args: &AttentionArgs<'_>, d: usize) -> usize {
    let (queries, keys) = tile_extents(args);
    let longest = sequences(args).iter().map(|s| s.keys).max().unwrap_or(0);
    2 * longest * d + queries * (2 * keys + d) + products_space(queries, keys, d, true)
}

/// Elements of workspace: one scratch buffer per thread, on few enough threads to stay below the limit.
pub(crate) fn space(args: &AttentionArgs<'_>, s: AttentionSizes) -> usize {
    let scratch = scratch(args, s.d);
    let tasks = (args.q_starts.len() - 1) * s.g;
    let fits = BACKWARD_SCRATCH.checked_div(scratch).unwrap_or(1).max(1);
    parallel::slots(tasks).min(fits) * scratch
}

impl CpuBackend {
    pub(in crate::cpu) fn attention_backward_op(
        &self,
        args: &AttentionArgs<'_>,
        saved: &AttentionOut,
        dout: &Tensor,
        s: AttentionSizes,
    ) -> Result<AttentionGrads> {
        let dtype = args.q.dtype();
        let mut dq = self.output(args.q.shape(), dtype)?;
        let mut dk = self.output(args.k.shape(), dtype)?;
        let mut dv = self.output(args.v.shape(), dtype)?;
        let mut space = Space::take(&self.pool, space(args, s))?;
        let all = sequences(args);
        let parallel = flops(args, s) >= MIN_PARALLEL_FLOPS;
        floats!(dtype, T => {
            let run = Run {
                math: self.math,
                args,
                sizes: s,
                out: saved.out.as_slice::<T>(),
                lse: saved.lse.as_slice(),
                dout,
                dq: Shared::new(dq.as_mut_slice::<T>()),
                dk: Shared::new(dk.as_mut_slice::<T>()),
                dv: Shared::new(dv.as_mut_slice::<T>()),
            };
            let tasks = all.len() * s.g;
            run_tasks(tasks, space.floats(), scratch(args, s.d), parallel, |i, scratch| {
                run.key_head(all[i / s.g], i % s.g, scratch);
            });
        });
        Ok(AttentionGrads {
            dq: dq.freeze(),
            dk: dk.freeze(),
            dv: dv.freeze(),
        })
    }
}

struct Run<'a, T> {
    math: CpuMath,
    args: &'a AttentionArgs<'a>,
    sizes: AttentionSizes,
    out: &'a [T],
    lse: &'a [f32],
    dout: &'a Tensor,
    dq: Shared<'a, T>,
    dk: Shared<'a, T>,
    dv: Shared<'a, T>,
}

/// Slices of the scratch buffer that one task of the backward uses.
struct Scratch<'s> {
    dk: &'s mut [f32],
    dv: &'s mut [f32],
    p: &'s mut [f32],
    dp: &'s mut [f32],
    dq: &'s mut [f32],
    packed: &'s mut [f32],
}

impl<'s> Scratch<'s> {
    fn new(args: &AttentionArgs<'_>, keys: usize, d: usize, all: &'s mut [f32]) -> Self {
        let (q_tile, k_tile) = tile_extents(args);
        let mut rest = all;
        let mut take = |len: usize| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(len);
            rest = tail;
            part
        };
        let (dk, dv) = (take(keys * d), take(keys * d));
        dk.fill(0.0);
        dv.fill(0.0);
        let (p, dp) = (take(q_tile * k_tile), take(q_tile * k_tile));
        Self {
            dk,
            dv,
            p,
            dp,
            dq: take(q_tile * d),
            packed: take(products_space(q_tile, k_tile, d, true)),
        }
    }
}

impl<T: Float> Run<'_, T> {
    fn key_head(&self, sequence: Sequence, kv_head: usize, scratch: &mut [f32]) {
        let AttentionSizes { h, g, d, .. } = self.sizes;
        let mut scratch = Scratch::new(self.args, sequence.keys, d, scratch);
        for head in kv_head * (h / g)..(kv_head + 1) * (h / g) {
            for first in (0..sequence.queries).step_by(Q_TILE) {
                self.query_tile(sequence, kv_head, head, first, &mut scratch);
            }
        }
        for i in 0..sequence.keys {
            let row = ((sequence.k_start + i) * g + kv_head) * d;
            // SAFETY: this task alone writes these rows of this key/value head.
            let (dk, dv) = unsafe { (self.dk.part(row, d), self.dv.part(row, d)) };
            narrow(&scratch.dk[i * d..][..d], dk);
            narrow(&scratch.dv[i * d..][..d], dv);
        }
    }

    fn query_tile(
        &self,
        sequence: Sequence,
        kv_head: usize,
        head: usize,
        first: usize,
        scratch: &mut Scratch<'_>,
    ) {
        let (args, AttentionSizes { h, g, d, .. }) = (self.args, self.sizes);
        let rows = Q_TILE.min(sequence.queries - first);
        let view = |x, heads, head| Head {
            data: Floats::of(x),
            heads,
            head,
            d,
        };
        let (k, v) = (view(args.k, g, kv_head), view(args.v, g, kv_head));
        let row = sequence.q_start + first;
        let q = view(args.q, h, head).rows(row, rows);
        let dout = view(self.dout, h, head).rows(row, rows);
        let mut lse = [0.0; Q_TILE];
        let mut delta = [0.0; Q_TILE];
        for i in 0..rows {
            lse[i] = self.lse[(row + i) * h + head];
            let at = ((row + i) * h + head) * d;
            delta[i] = row_product(&self.out[at..][..d], &self.dout.as_slice::<T>()[at..][..d]);
        }
        let dq = &mut scratch.dq[..rows * d];
        dq.fill(0.0);
        let visible = sequence.visible(first + rows - 1, args.causal);
        for key in (0..visible).step_by(K_TILE) {
            let keys = K_TILE.min(sequence.keys - key);
            let tile = Tile {
                sequence,
                causal: args.causal,
                q: (first, rows),
                k: (key, keys),
            };
            let k = k.rows(sequence.k_start + key, keys);
            let v = v.rows(sequence.k_start + key, keys);
            let p = &mut scratch.p[..rows * keys];
            let dp = &mut scratch.dp[..rows * keys];
            multiply_here(
                self.math,
                q,
                k.transposed(),
                args.scale,
                false,
                p,
                &mut *scratch.packed,
            );
            multiply_here(
                self.math,
                dout,
                v.transposed(),
                1.0,
                false,
                dp,
                &mut *scratch.packed,
            );
            softmax_backward(tile, &lse, &delta, p, dp);
            let [p, ds] = [&*p, &*dp].map(|x| Matrix::new(Floats::F32(x), rows, keys));
            let part = key * d..(key + keys) * d;
            let dv = &mut scratch.dv[part.clone()];
            multiply_here(
                self.math,
                p.transposed(),
                dout,
                1.0,
                true,
                dv,
                &mut *scratch.packed,
            );
            let dk = &mut scratch.dk[part];
            multiply_here(
                self.math,
                ds.transposed(),
                q,
                args.scale,
                true,
                dk,
                &mut *scratch.packed,
            );
            multiply_here(self.math, ds, k, args.scale, true, dq, &mut *scratch.packed);
        }
        for i in 0..rows {
            // SAFETY: this task alone writes these rows of the query heads that share its key/value head.
            let out = unsafe { self.dq.part(((row + i) * h + head) * d, d) };
            narrow(&dq[i * d..][..d], out);
        }
    }
}

multiversion! {
    fn row_product<T: Float>(out: &[T], dout: &[T]) -> f32 {
        reduce::sum2(out, dout, |a, b| a * b)
    }
}

multiversion! {
    /// Converts scores to probabilities in `p`, and replaces `dp` by the gradient of the scores.
    fn softmax_backward(tile: Tile, lse: &[f32], delta: &[f32], p: &mut [f32], dp: &mut [f32]) {
        let keys = tile.k.1;
        for (i, (p, dp)) in p.chunks_exact_mut(keys).zip(dp.chunks_exact_mut(keys)).enumerate() {
            let visible = tile.visible(i);
            p[visible..].fill(0.0);
            dp[visible..].fill(0.0);
            for (p, dp) in p[..visible].iter_mut().zip(&mut dp[..visible]) {
                *p = math::weight(*p - lse[i]);
                *dp = *p * (*dp - delta[i]);
            }
        }
    }
}
