//! Layer norm and RMS norm over the last axis.

use super::linear::{sum_partials, widened_parameter};
use super::parallel::{self, MIN_PARALLEL_ELEMS, workers};
use super::reduce::{sum, sum2, sum3};
use super::simd::multiversion;
use super::{CpuBackend, Space, floats};
use crate::backend::NormGrads;
use crate::error::Result;
use crate::{Float, Tensor};
use rayon::prelude::*;

/// Rows per partial sum of the parameter gradients.
const BLOCK_ROWS: usize = 64;

/// Kind of normalization, with its parameters as f32.
#[derive(Clone, Copy)]
enum Norm<'a> {
    Layer { weight: &'a [f32], bias: &'a [f32] },
    Rms { weight: &'a [f32] },
}

/// Elements of workspace of the forward: the parameters as f32.
pub(crate) fn space(c: usize, params: usize) -> usize {
    params * c
}

/// Elements of workspace of the backward: the weight as f32 and the partial sums.
pub(crate) fn backward_space(rows: usize, c: usize, params: usize) -> usize {
    c + rows.div_ceil(BLOCK_ROWS) * params * c
}

impl CpuBackend {
    pub(super) fn norm_op(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        eps: f32,
    ) -> Result<Tensor> {
        let c = x.shape().last();
        let mut out = self.output(x.shape(), x.dtype())?;
        let params = 1 + usize::from(bias.is_some());
        let mut space = Space::take(&self.pool, space(c, params))?;
        let (weight, rest) = widened_parameter(weight, space.floats());
        let norm = match bias {
            Some(bias) => Norm::Layer {
                weight,
                bias: widened_parameter(bias, rest).0,
            },
            None => Norm::Rms { weight },
        };
        floats!(x.dtype(), T => {
            let x = x.as_slice::<T>();
            parallel::chunks(out.as_mut_slice::<T>(), c, |start, out| {
                let x = &x[start..start + out.len()];
                match norm {
                    Norm::Layer { weight, bias } => layer_rows(x, weight, bias, eps, out),
                    Norm::Rms { weight } => rms_rows(x, weight, eps, out),
                }
            });
        });
        Ok(out.freeze())
    }

    pub(super) fn norm_backward_op(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        eps: f32,
        layer: bool,
    ) -> Result<NormGrads> {
        let (rows, c) = (x.shape().rows(), x.shape().last());
        let params = 1 + usize::from(layer);
        let mut dx = self.output(x.shape(), x.dtype())?;
        let mut d_weight = self.gradient([c])?;
        let mut d_bias = if layer {
            Some(self.gradient([c])?)
        } else {
            None
        };
        let mut space = Space::take(&self.pool, backward_space(rows, c, params))?;
        let (weight, partials) = widened_parameter(weight, space.floats());
        if x.elems() > 0 {
            floats!(x.dtype(), T => {
                let args = Backward { x: x.as_slice::<T>(), dy: dy.as_slice(), weight, eps, layer };
                args.run(dx.as_mut_slice(), partials, params * c);
            });
        }
        let mut sums = vec![0.0; params * c];
        sum_partials(partials, &mut sums);
        d_weight.as_mut_slice().copy_from_slice(&sums[..c]);
        if let Some(d_bias) = &mut d_bias {
            d_bias.as_mut_slice().copy_from_slice(&sums[c..]);
        }
        Ok(NormGrads {
            dx: dx.freeze(),
            d_weight: d_weight.freeze(),
            d_bias: d_bias.map(crate::TensorMut::freeze),
        })
    }
}

struct Backward<'a, T> {
    x: &'a [T],
    dy: &'a [T],
    weight: &'a [f32],
    eps: f32,
    layer: bool,
}

impl<T: Float> Backward<'_, T> {
    fn run(&self, dx: &mut [T], partials: &mut [f32], partial: usize) {
        let block = BLOCK_ROWS * self.weight.len();
        if self.x.len() < MIN_PARALLEL_ELEMS || workers() == 1 {
            dx.chunks_mut(block)
                .zip(partials.chunks_exact_mut(partial))
                .enumerate()
                .for_each(|(i, (dx, sums))| self.block(i * block, dx, sums));
        } else {
            dx.par_chunks_mut(block)
                .zip(partials.par_chunks_exact_mut(partial))
                .enumerate()
                .for_each(|(i, (dx, sums))| self.block(i * block, dx, sums));
        }
    }

    fn block(&self, start: usize, dx: &mut [T], sums: &mut [f32]) {
        let range = start..start + dx.len();
        let (x, dy) = (&self.x[range.clone()], &self.dy[range]);
        if self.layer {
            layer_rows_backward(x, dy, self.weight, self.eps, dx, sums);
        } else {
            rms_rows_backward(x, dy, self.weight, self.eps, dx, sums);
        }
    }
}

/// Mean and reciprocal standard deviation of a row (biased variance plus `eps`).
#[inline(always)]
fn statistics<T: Float>(x: &[T], eps: f32) -> (f32, f32) {
    let n = x.len() as f32;
    let mean = sum(x, |x| x) / n;
    let var = sum(x, |x| (x - mean) * (x - mean)) / n;
    (mean, 1.0 / (var + eps).sqrt())
}

/// Reciprocal root mean square of a row, with `eps`.
#[inline(always)]
fn inverse_rms<T: Float>(x: &[T], eps: f32) -> f32 {
    1.0 / (sum(x, |x| x * x) / x.len() as f32 + eps).sqrt()
}

multiversion! {
    fn layer_rows<T: Float>(x: &[T], weight: &[f32], bias: &[f32], eps: f32, out: &mut [T]) {
        let c = weight.len();
        for (x, out) in x.chunks_exact(c).zip(out.chunks_exact_mut(c)) {
            let (mean, scale) = statistics(x, eps);
            for (((o, x), w), b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
                *o = T::from_f32((x.to_f32() - mean) * scale * w + b);
            }
        }
    }
}

multiversion! {
    fn rms_rows<T: Float>(x: &[T], weight: &[f32], eps: f32, out: &mut [T]) {
        let c = weight.len();
        for (x, out) in x.chunks_exact(c).zip(out.chunks_exact_mut(c)) {
            let scale = inverse_rms(x, eps);
            for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
                let normal = T::from_f32(x.to_f32() * scale).to_f32();
                *o = T::from_f32(normal * w);
            }
        }
    }
}

multiversion! {
    /// Layer norm backward of some rows. `sums` receives the gradients of the weight, then of the bias.
    fn layer_rows_backward<T: Float>(
        x: &[T],
        dy: &[T],
        weight: &[f32],
        eps: f32,
        dx: &mut [T],
        sums: &mut [f32],
    ) {
        let c = weight.len();
        sums.fill(0.0);
        let (d_weight, d_bias) = sums.split_at_mut(c);
        let rows = x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c));
        for ((x, dy), dx) in rows {
            let (mean, scale) = statistics(x, eps);
            let mean_g = sum2(dy, weight, |dy, w| dy * w) / c as f32;
            let mean_gx =
                sum3(dy, weight, x, |dy, w, x| dy * w * ((x - mean) * scale)) / c as f32;
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                let normal = (x.to_f32() - mean) * scale;
                *dx = T::from_f32(scale * (dy.to_f32() * w - mean_g - normal * mean_gx));
            }
            for (((dw, db), x), dy) in d_weight.iter_mut().zip(&mut *d_bias).zip(x).zip(dy) {
                *dw += dy.to_f32() * ((x.to_f32() - mean) * scale);
                *db += dy.to_f32();
            }
        }
    }
}

multiversion! {
    /// RMS norm backward of some rows. `sums` receives the gradient of the weight.
    fn rms_rows_backward<T: Float>(
        x: &[T],
        dy: &[T],
        weight: &[f32],
        eps: f32,
        dx: &mut [T],
        sums: &mut [f32],
    ) {
        let c = weight.len();
        sums.fill(0.0);
        let rows = x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c));
        for ((x, dy), dx) in rows {
            let scale = inverse_rms(x, eps);
            let mean_gx = sum3(dy, weight, x, |dy, w, x| dy * w * (x * scale)) / c as f32;
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                let normal = x.to_f32() * scale;
                *dx = T::from_f32(scale * (dy.to_f32() * w - normal * mean_gx));
            }
            for ((dw, x), dy) in sums.iter_mut().zip(x).zip(dy) {
                *dw += dy.to_f32() * T::from_f32(x.to_f32() * scale).to_f32();
            }
        }
    }
}
