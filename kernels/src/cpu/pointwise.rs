//! Elementwise operations and rotary position embedding.

use super::matrix::{narrow, widen};
use super::parallel;
use super::simd::multiversion;
use super::{CpuBackend, floats, math};
use crate::backend::{Direction, DropoutArgs, Gelu, RopeLayout};
use crate::error::Result;
use crate::random::philox4x32;
use crate::{DType, Float, Tensor, TensorMut};

/// How a result is stored over the current value of the output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Store {
    Write,
    /// Added to the current value, with a rounding.
    Add,
}

/// Writes the dropout of `args` to `out`, of the same shape and dtype.
pub(super) fn drop_into(args: &DropoutArgs<'_>, out: &mut TensorMut, store: Store) {
    let (x, k) = (args.x, args.x.shape().last());
    let rows = args.rows.as_slice::<i32>();
    // Both constants are accurate enough: p to 2^-32, the factor to one rounding.
    let threshold = (f64::from(args.p) * 4_294_967_296.0) as u32;
    let factor = 1.0 / (1.0 - args.p);
    floats!(x.dtype(), T => {
        let x = x.as_slice::<T>();
        parallel::chunks(out.as_mut_slice::<T>(), k.max(1), |start, out| {
            for (r, out) in out.chunks_exact_mut(k).enumerate() {
                let at = start + r * k;
                let row = [rows[2 * (at / k)] as u32, rows[2 * (at / k) + 1] as u32];
                for (c, y) in out.chunks_mut(4).enumerate() {
                    let words = philox4x32([row[0], row[1], c as u32, 0], args.key);
                    for (i, y) in y.iter_mut().enumerate() {
                        let kept = words[i] >= threshold;
                        let x = Float::to_f32(x[at + 4 * c + i]);
                        let x = T::from_f32(if kept { x * factor } else { 0.0 });
                        *y = match store {
                            Store::Write => x,
                            Store::Add => T::from_f32(Float::to_f32(*y) + Float::to_f32(x)),
                        };
                    }
                }
            }
        });
    });
}

impl CpuBackend {
    pub(super) fn cast_op(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        let mut out = self.output(x.shape(), dtype)?;
        floats!(x.dtype(), T => floats!(dtype, U => {
            let x = x.as_slice::<T>();
            parallel::chunks(out.as_mut_slice::<U>(), 1, |start, out| {
                convert(&x[start..start + out.len()], out);
            });
        }));
        Ok(out.freeze())
    }

    pub(super) fn add_op(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let mut out = self.output(a.shape(), a.dtype())?;
        floats!(a.dtype(), T => {
            let (a, b) = (a.as_slice::<T>(), b.as_slice::<T>());
            parallel::chunks(out.as_mut_slice::<T>(), 1, |start, out| {
                let range = start..start + out.len();
                add_all(&a[range.clone()], &b[range], out);
            });
        });
        Ok(out.freeze())
    }

    pub(super) fn scale_op(&self, x: &Tensor, factor: f32) -> Result<Tensor> {
        let mut out = self.output(x.shape(), x.dtype())?;
        floats!(x.dtype(), T => {
            let x = x.as_slice::<T>();
            parallel::chunks(out.as_mut_slice::<T>(), 1, |start, out| {
                scale_all(&x[start..start + out.len()], factor, out);
            });
        });
        Ok(out.freeze())
    }

    pub(super) fn dropout_op(&self, args: &DropoutArgs<'_>) -> Result<Tensor> {
        let mut out = self.output(args.x.shape(), args.x.dtype())?;
        drop_into(args, &mut out, Store::Write);
        Ok(out.freeze())
    }

    pub(super) fn gelu_op(&self, x: &Tensor, kind: Gelu) -> Result<Tensor> {
        let mut out = self.output(x.shape(), x.dtype())?;
        floats!(x.dtype(), T => {
            let x = x.as_slice::<T>();
            parallel::chunks(out.as_mut_slice::<T>(), 1, |start, out| {
                let x = &x[start..start + out.len()];
                match kind {
                    Gelu::Tanh => gelu_tanh(x, out),
                    Gelu::Erf => gelu_erf(x, out),
                }
            });
        });
        Ok(out.freeze())
    }

    pub(super) fn gelu_backward_op(&self, x: &Tensor, dy: &Tensor, kind: Gelu) -> Result<Tensor> {
        let mut out = self.output(x.shape(), x.dtype())?;
        floats!(x.dtype(), T => {
            let (x, dy) = (x.as_slice::<T>(), dy.as_slice::<T>());
            parallel::chunks(out.as_mut_slice::<T>(), 1, |start, out| {
                let range = start..start + out.len();
                let (x, dy) = (&x[range.clone()], &dy[range]);
                match kind {
                    Gelu::Tanh => gelu_tanh_backward(x, dy, out),
                    Gelu::Erf => gelu_erf_backward(x, dy, out),
                }
            });
        });
        Ok(out.freeze())
    }

    pub(super) fn swiglu_op(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        let mut out = self.output(gate.shape(), gate.dtype())?;
        floats!(gate.dtype(), T => {
            let (gate, up) = (gate.as_slice::<T>(), up.as_slice::<T>());
            parallel::chunks(out.as_mut_slice::<T>(), 1, |start, out| {
                let range = start..start + out.len();
                swiglu(&gate[range.clone()], &up[range], out);
            });
        });
        Ok(out.freeze())
    }

    pub(super) fn swiglu_backward_op(
        &self,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let mut d_gate = self.output(gate.shape(), gate.dtype())?;
        let mut d_up = self.output(gate.shape(), gate.dtype())?;
        floats!(gate.dtype(), T => {
            let (gate, up, dy) = (gate.as_slice::<T>(), up.as_slice::<T>(), dy.as_slice::<T>());
            parallel::chunks(d_gate.as_mut_slice::<T>(), 1, |start, out| {
                let range = start..start + out.len();
                swiglu_d_gate(&gate[range.clone()], &up[range.clone()], &dy[range], out);
            });
            // d_up = dy * silu(gate)
            parallel::chunks(d_up.as_mut_slice::<T>(), 1, |start, out| {
                let range = start..start + out.len();
                swiglu(&gate[range.clone()], &dy[range], out);
            });
        });
        Ok((d_gate.freeze(), d_up.freeze()))
    }

    pub(super) fn rope_op(
        &self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        layout: RopeLayout,
        direction: Direction,
    ) -> Result<Tensor> {
        let (h, d, w) = (x.dim(1), x.dim(2), cos.dim(1));
        let mut out = self.output(x.shape(), x.dtype())?;
        let (cos, sin) = (cos.as_slice::<f32>(), sin.as_slice::<f32>());
        let sign = match direction {
            Direction::Forward => 1.0,
            Direction::Inverse => -1.0,
        };
        floats!(x.dtype(), T => {
            let x = x.as_slice::<T>();
            parallel::chunks(out.as_mut_slice::<T>(), h * d, |start, out| {
                let x = &x[start..start + out.len()];
                let tokens = start / (h * d)..(start + out.len()) / (h * d);
                let range = tokens.start * w..tokens.end * w;
                let (cos, sin) = (&cos[range.clone()], &sin[range]);
                match layout {
                    RopeLayout::HalfSplit => rope_half(x, cos, sin, sign, h, d, w, out),
                    RopeLayout::Interleaved => rope_pairs(x, cos, sin, sign, h, d, w, out),
                }
            });
        });
        Ok(out.freeze())
    }
}

fn convert<T: Float, U: Float>(x: &[T], out: &mut [U]) {
    let mut wide = [0.0f32; 512];
    for (x, out) in x.chunks(wide.len()).zip(out.chunks_mut(wide.len())) {
        widen(x, &mut wide[..x.len()]);
        narrow(&wide[..x.len()], out);
    }
}

multiversion! {
    fn add_all<T: Float>(a: &[T], b: &[T], out: &mut [T]) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = T::from_f32(a.to_f32() + b.to_f32());
        }
    }
}

multiversion! {
    fn scale_all<T: Float>(x: &[T], factor: f32, out: &mut [T]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = T::from_f32(x.to_f32() * factor);
        }
    }
}

/// sqrt(2 / pi), and the cubic coefficient of the tanh approximation.
const TANH_SCALE: f32 = 0.797_884_6;
const TANH_CUBE: f32 = 0.044_715;

multiversion! {
    fn gelu_tanh<T: Float>(x: &[T], out: &mut [T]) {
        for (o, x) in out.iter_mut().zip(x) {
            let x = x.to_f32();
            // 0.5 (1 + tanh u) = sigmoid(2 u), without cancellation.
            let u = TANH_SCALE * (x + TANH_CUBE * x * x * x);
            *o = T::from_f32(x * math::sigmoid(2.0 * u));
        }
    }
}

multiversion! {
    fn gelu_tanh_backward<T: Float>(x: &[T], dy: &[T], out: &mut [T]) {
        for ((o, x), dy) in out.iter_mut().zip(x).zip(dy) {
            let x = x.to_f32();
            let u = TANH_SCALE * (x + TANH_CUBE * x * x * x);
            let du = TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * x * x);
            let s = math::sigmoid(2.0 * u);
            *o = T::from_f32(dy.to_f32() * (s + x * s * (1.0 - s) * 2.0 * du));
        }
    }
}

multiversion! {
    fn gelu_erf<T: Float>(x: &[T], out: &mut [T]) {
        for (o, x) in out.iter_mut().zip(x) {
            let x = x.to_f32();
            *o = T::from_f32(x * math::normal(x).0);
        }
    }
}

multiversion! {
    fn gelu_erf_backward<T: Float>(x: &[T], dy: &[T], out: &mut [T]) {
        for ((o, x), dy) in out.iter_mut().zip(x).zip(dy) {
            let x = x.to_f32();
            let (cdf, pdf) = math::normal(x);
            *o = T::from_f32(dy.to_f32() * (cdf + x * pdf));
        }
    }
}

multiversion! {
    /// `silu(gate) * up`
    fn swiglu<T: Float>(gate: &[T], up: &[T], out: &mut [T]) {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            let g = g.to_f32();
            *o = T::from_f32(g * math::sigmoid(g) * u.to_f32());
        }
    }
}

multiversion! {
    fn swiglu_d_gate<T: Float>(gate: &[T], up: &[T], dy: &[T], out: &mut [T]) {
        for (((o, g), u), dy) in out.iter_mut().zip(gate).zip(up).zip(dy) {
            let g = g.to_f32();
            let s = math::sigmoid(g);
            *o = T::from_f32(dy.to_f32() * u.to_f32() * s * (1.0 + g * (1.0 - s)));
        }
    }
}

multiversion! {
    fn rope_half<T: Float>(
        x: &[T],
        cos: &[f32],
        sin: &[f32],
        sign: f32,
        h: usize,
        d: usize,
        w: usize,
        out: &mut [T],
    ) {
        for (head, (x, out)) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
            let angles = head / h * w..(head / h + 1) * w;
            let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
            let (x1, x2) = (&x[..w], &x[w..2 * w]);
            let (rotated, rest) = out.split_at_mut(2 * w);
            let (o1, o2) = rotated.split_at_mut(w);
            for i in 0..w {
                let (a, b, s) = (x1[i].to_f32(), x2[i].to_f32(), sin[i] * sign);
                o1[i] = T::from_f32(a * cos[i] - b * s);
                o2[i] = T::from_f32(b * cos[i] + a * s);
            }
            rest.copy_from_slice(&x[2 * w..]);
        }
    }
}

multiversion! {
    fn rope_pairs<T: Float>(
        x: &[T],
        cos: &[f32],
        sin: &[f32],
        sign: f32,
        h: usize,
        d: usize,
        w: usize,
        out: &mut [T],
    ) {
        for (head, (x, out)) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
            let angles = head / h * w..(head / h + 1) * w;
            let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
            let (rotated, rest) = out.split_at_mut(2 * w);
            let pairs = rotated.chunks_exact_mut(2).zip(x.chunks_exact(2));
            for (((o, x), c), s) in pairs.zip(cos).zip(sin) {
                let (a, b, s) = (x[0].to_f32(), x[1].to_f32(), s * sign);
                o[0] = T::from_f32(a * c - b * s);
                o[1] = T::from_f32(b * c + a * s);
            }
            rest.copy_from_slice(&x[2 * w..]);
        }
    }
}
