//! Attention forward with an online softmax.
#![allow(unsafe_code, reason = "heads interleave in the output")]

use super::{Head, K_TILE, Q_TILE, Sequence, Tile, flops, products_space, sequences, tile_extents};
use crate::backend::{AttentionArgs, AttentionOut};
use crate::check::AttentionSizes;
use crate::cpu::gemm::multiply_here;
use crate::cpu::matrix::{Floats, Matrix, narrow};
use crate::cpu::parallel::{self, MIN_PARALLEL_FLOPS, Shared, run_tasks};
use crate::cpu::simd::multiversion;
use crate::cpu::{CpuBackend, CpuMath, Space, floats, math, reduce};
use crate::error::Result;
use crate::{DType, Float};

fn tasks(args: &AttentionArgs<'_>, h: usize) -> Vec<(Sequence, usize, usize)> {
    let mut all = Vec::new();
    for sequence in sequences(args) {
        for head in 0..h {
            // Late queries attend to the most keys. They come first, so threads finish at about the same time.
            let firsts = (0..sequence.queries).step_by(Q_TILE).rev();
            all.extend(firsts.map(|first| (sequence, head, first)));
        }
    }
    all
}

fn scratch(args: &AttentionArgs<'_>, d: usize) -> usize {
    let (queries, keys) = tile_extents(args);
    queries * (keys + d + 2) + products_space(queries, keys, d, false)
}

/// Elements of workspace: one scratch buffer per thread.
pub(crate) fn space(args: &AttentionArgs<'_>, s: AttentionSizes) -> usize {
    parallel::slots(tasks(args, s.h).len()) * scratch(args, s.d)
}

impl CpuBackend {
    pub(in crate::cpu) fn attention_op(
        &self,
        args: &AttentionArgs<'_>,
        s: AttentionSizes,
    ) -> Result<AttentionOut> {
        let mut out = self.output(args.q.shape(), args.q.dtype())?;
        let mut lse = self.output([s.t, s.h], DType::F32)?;
        let mut space = Space::take(&self.pool, space(args, s))?;
        let tasks = tasks(args, s.h);
        let parallel = flops(args, s) >= MIN_PARALLEL_FLOPS;
        floats!(args.q.dtype(), T => {
            let run = Run {
                math: self.math,
                args,
                sizes: s,
                out: Shared::new(out.as_mut_slice::<T>()),
                lse: Shared::new(lse.as_mut_slice()),
            };
            run_tasks(tasks.len(), space.floats(), scratch(args, s.d), parallel, |i, scratch| {
                let (sequence, head, first) = tasks[i];
                run.query_tile(sequence, head, first, scratch);
            });
        });
        Ok(AttentionOut {
            out: out.freeze(),
            lse: lse.freeze(),
        })
    }
}

struct Run<'a, T> {
    math: CpuMath,
    args: &'a AttentionArgs<'a>,
    sizes: AttentionSizes,
    out: Shared<'a, T>,
    lse: Shared<'a, f32>,
}

impl<T: Float> Run<'_, T> {
    fn query_tile(&self, sequence: Sequence, head: usize, first: usize, scratch: &mut [f32]) {
        let (args, AttentionSizes { h, g, d, .. }) = (self.args, self.sizes);
        let rows = Q_TILE.min(sequence.queries - first);
        let (q_tile, k_tile) = tile_extents(args);
        let (scores, scratch) = scratch.split_at_mut(q_tile * k_tile);
        let (sums, scratch) = scratch.split_at_mut(q_tile * d);
        let (maxima, scratch) = scratch.split_at_mut(q_tile);
        let (totals, scratch) = scratch.split_at_mut(q_tile);
        let packed = &mut scratch[..products_space(q_tile, k_tile, d, false)];
        let (sums, maxima, totals) = (
            &mut sums[..rows * d],
            &mut maxima[..rows],
            &mut totals[..rows],
        );
        sums.fill(0.0);
        maxima.fill(f32::NEG_INFINITY);
        totals.fill(0.0);
        let view = |x, heads, head| Head {
            data: Floats::of(x),
            heads,
            head,
            d,
        };
        let kv_head = head / (h / g);
        let (k, v) = (view(args.k, g, kv_head), view(args.v, g, kv_head));
        let q = view(args.q, h, head).rows(sequence.q_start + first, rows);
        let visible = sequence.visible(first + rows - 1, args.causal);
        for key in (0..visible).step_by(K_TILE) {
            // A tile's size does not depend on the mask, so neither do the bits.
            let keys = K_TILE.min(sequence.keys - key);
            let tile = Tile {
                sequence,
                causal: args.causal,
                q: (first, rows),
                k: (key, keys),
            };
            let scores = &mut scores[..rows * keys];
            let kt = k.rows(sequence.k_start + key, keys).transposed();
            multiply_here(self.math, q, kt, args.scale, false, scores, packed);
            softmax_tile(tile, scores, maxima, totals, sums);
            let v = v.rows(sequence.k_start + key, keys);
            let p = Matrix::new(Floats::F32(scores), rows, keys);
            multiply_here(self.math, p, v, 1.0, true, sums, packed);
        }
        for i in 0..rows {
            let row = (sequence.q_start + first + i) * h + head;
            let line = &mut sums[i * d..][..d];
            if totals[i] > 0.0 || totals[i].is_nan() {
                let inverse = 1.0 / totals[i];
                line.iter_mut().for_each(|x| *x *= inverse);
            }
            // SAFETY: this task alone writes these rows of this head.
            let (out, lse) = unsafe { (self.out.part(row * d, d), self.lse.part(row, 1)) };
            narrow(line, out);
            lse[0] = maxima[i] + totals[i].ln();
        }
    }
}

multiversion! {
    /// Converts scores to exponentials relative to the running maxima, and rescales the previous sums.
    fn softmax_tile(
        tile: Tile,
        scores: &mut [f32],
        maxima: &mut [f32],
        totals: &mut [f32],
        sums: &mut [f32],
    ) {
        let (rows, keys) = (tile.q.1, tile.k.1);
        let d = sums.len() / rows;
        for (i, row) in scores.chunks_exact_mut(keys).enumerate() {
            let (seen, hidden) = row.split_at_mut(tile.visible(i));
            hidden.fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let top = reduce::max(seen);
            let top = if top > maxima[i] { top } else { maxima[i] };
            for s in seen.iter_mut() {
                *s = math::weight(*s - top);
            }
            let before = math::weight(maxima[i] - top);
            totals[i] = totals[i] * before + reduce::sum(seen, |x| x);
            maxima[i] = top;
            for s in &mut sums[i * d..][..d] {
                *s *= before;
            }
        }
    }
}
