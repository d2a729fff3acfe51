//! Linear layers: matrix product, bias gradient, LoRA adapters.

use super::gemm::{Depth, Out, Product, multiply, part_step, workspace};
use super::matrix::{Floats, Matrix, widen};
use super::parallel::workers;
use super::pointwise::{Store, drop_into};
use super::simd::multiversion;
use super::{CpuBackend, Space, floats};
use crate::adapted::{AdaptedParts, AdaptedRows, AdapterGrads, LoraArgs, LoraGrads};
use crate::backend::{MatmulArgs, SumPart, Transpose};
use crate::check::{self, LoraSizes, Sizes};
use crate::error::{Result, shape_error};
use crate::pool::Tag;
use crate::{DType, Float, Tensor, TensorMut};
use rayon::prelude::*;

/// Rows per partial sum of a column sum.
const SUM_ROWS: usize = 256;

fn oriented(x: &Tensor, transpose: Transpose) -> Matrix<'_> {
    match transpose {
        Transpose::No => Matrix::of(x),
        Transpose::Yes => Matrix::of(x).transposed(),
    }
}

fn product<'a>(a: Matrix<'a>, b: Matrix<'a>, factor: f32) -> Product<'a> {
    Product::new(a, b, factor)
}

/// Elements of an output tensor of this dtype, for writing by a matrix product.
fn writable(out: &mut TensorMut, dtype: DType) -> Out<'_> {
    match dtype {
        DType::BF16 => Out::BF16(out.as_mut_slice()),
        DType::F16 => Out::F16(out.as_mut_slice()),
        _ => Out::F32 {
            data: out.as_mut_slice(),
            accumulate: false,
        },
    }
}

/// Elements of workspace of a product with its bias converted to f32.
pub(crate) fn matmul_space(args: &MatmulArgs<'_>, Sizes { m, n, k }: Sizes) -> usize {
    let bias = args.bias.map_or(0, |_| n);
    bias + workspace(m, n, &[k], args.out)
}

/// Elements of workspace of a product as a part of a sum over `whole` rows.
pub(crate) fn matmul_part_space(Sizes { m, n, k }: Sizes, whole: usize) -> usize {
    workspace(m, n, &[Depth { k, whole }], DType::F32)
}

pub(crate) fn lora_space(args: &LoraArgs<'_>, s: LoraSizes) -> usize {
    let LoraSizes { t, n, k, r } = s;
    let bias = args.bias.map_or(0, |_| n);
    let down = workspace(t, r, &[k], DType::F32);
    let up = workspace(t, n, &[k, r], args.x.dtype());
    t * r + bias + down.max(up)
}

/// Elements of workspace of the gradients of a layer for a part of `whole` rows.
pub(crate) fn lora_backward_space(
    args: &LoraArgs<'_>,
    need_dx: bool,
    s: LoraSizes,
    whole: usize,
) -> usize {
    let LoraSizes { t, n, k, r } = s;
    let f = DType::F32;
    let rows = Depth { k: t, whole };
    // With dropout, the base's and the adapter's part of dx are separate products.
    let dx = |k_of: &[usize]| match need_dx {
        true => workspace(t, k, k_of, args.x.dtype()),
        false => 0,
    };
    let most = [
        workspace(t, r, &[k], f),
        workspace(t, r, &[n], f),
        workspace(n, r, &[rows], f),
        workspace(r, k, &[rows], f),
        match args.dropout {
            Some(_) => dx(&[n]).max(dx(&[r])),
            None => dx(&[n, r]),
        },
    ];
    2 * t * r + most.into_iter().max().unwrap_or(0)
}

/// Elements of the partial sums of a column sum over `m` rows.
pub(crate) fn column_sum_space(m: usize, n: usize) -> usize {
    m.div_ceil(SUM_ROWS) * n
}

/// Converts `bias` to f32 at the front of `space`. Returns it and the rest of `space`.
fn take_bias<'s>(
    bias: Option<&Tensor>,
    space: &'s mut [f32],
) -> (Option<&'s [f32]>, &'s mut [f32]) {
    let Some(bias) = bias else {
        return (None, space);
    };
    let (out, rest) = space.split_at_mut(bias.elems());
    Floats::of(bias).widen(0, out);
    (Some(out), rest)
}

impl CpuBackend {
    pub(super) fn matmul_op(&self, args: &MatmulArgs<'_>, sizes: Sizes) -> Result<Tensor> {
        let mut out = self.output([sizes.m, sizes.n], args.out)?;
        let mut space = Space::take(&self.pool, matmul_space(args, sizes))?;
        let (bias, rest) = take_bias(args.bias, space.floats());
        let a = oriented(args.a, args.transpose_a);
        let b = oriented(args.b, args.transpose_b);
        multiply(
            self.math,
            &[product(a, b, 1.0)],
            bias,
            writable(&mut out, args.out),
            rest,
        );
        Ok(out.freeze())
    }

    /// Checks a part of a sum over rows, and returns the tensor of `shape` that it is added to.
    fn continued(
        &self,
        op: &'static str,
        sum: Option<Tensor>,
        shape: [usize; 2],
        tag: Tag,
    ) -> Result<TensorMut> {
        let Some(sum) = sum else {
            return TensorMut::new(&self.pool, tag, shape, DType::F32);
        };
        if (sum.shape(), sum.dtype()) != (shape.into(), DType::F32) {
            return shape_error(op, format!("sum {} for {shape:?}", sum.shape()));
        }
        let copy = |shared: Tensor| -> Result<TensorMut> {
            let mut own = TensorMut::new(&self.pool, tag, shape, DType::F32)?;
            own.as_bytes_mut().copy_from_slice(shared.as_bytes());
            Ok(own)
        };
        sum.into_mut().or_else(copy)
    }

    pub(super) fn matmul_part_op(
        &self,
        args: &MatmulArgs<'_>,
        sizes: Sizes,
        sum: Option<Tensor>,
        part: SumPart,
    ) -> Result<Tensor> {
        const OP: &str = "matmul_part";
        check::part(OP, part, sizes.k, part_step(part.total), sum.is_some())?;
        let accumulate = sum.is_some();
        let mut out = self.continued(OP, sum, [sizes.m, sizes.n], Tag::Activations)?;
        let mut space = Space::take(&self.pool, matmul_part_space(sizes, part.total))?;
        let a = oriented(args.a, args.transpose_a);
        let product = product(a, oriented(args.b, args.transpose_b), 1.0).part_of(part.total);
        let data = out.as_mut_slice();
        multiply(
            self.math,
            &[product],
            None,
            Out::F32 { data, accumulate },
            space.floats(),
        );
        Ok(out.freeze())
    }

    fn lora_op(&self, args: &LoraArgs<'_>, s: LoraSizes) -> Result<Tensor> {
        let dtype = args.x.dtype();
        let mut out = self.output([s.t, s.n], dtype)?;
        let seen = self.seen(args)?;
        let mut space = Space::take(&self.pool, lora_space(args, s))?;
        let (u, rest) = space.floats().split_at_mut(s.t * s.r);
        let (bias, rest) = take_bias(args.bias, rest);
        let x = Matrix::of(args.x);
        let a = Matrix::of(args.lora_a).transposed();
        let seen = seen.as_ref().map_or(x, Matrix::of);
        multiply(self.math, &[product(seen, a, 1.0)], None, f32_out(u), rest);
        let u = Matrix::new(Floats::F32(u), s.t, s.r);
        let products = [
            product(x, Matrix::of(args.weight).transposed(), 1.0),
            product(u, Matrix::of(args.lora_b).transposed(), args.scale),
        ];
        multiply(self.math, &products, bias, writable(&mut out, dtype), rest);
        Ok(out.freeze())
    }

    fn lora_backward_op(
        &self,
        args: &LoraArgs<'_>,
        dy: &Tensor,
        need_dx: bool,
        s: LoraSizes,
        sum: Option<AdapterGrads>,
        whole: usize,
    ) -> Result<LoraGrads> {
        const OP: &str = "adapted_linear_backward";
        let (dtype, accumulate) = (args.x.dtype(), sum.is_some());
        let [a, b] = sum.map_or([None, None], |[a, b]| [Some(a), Some(b)]);
        let mut d_lora_a = self.continued(OP, a, [s.r, s.k], Tag::Gradients)?;
        let mut d_lora_b = self.continued(OP, b, [s.n, s.r], Tag::Gradients)?;
        let mut dx = if need_dx {
            Some(self.output(args.x.shape(), dtype)?)
        } else {
            None
        };
        let seen = self.seen(args)?;
        let floats = lora_backward_space(args, need_dx, s, whole);
        let mut space = Space::take(&self.pool, floats)?;
        let (u, rest) = space.floats().split_at_mut(s.t * s.r);
        let (du, rest) = rest.split_at_mut(s.t * s.r);
        let dy = Matrix::of(dy);
        let x = Matrix::of(seen.as_ref().unwrap_or(args.x));
        let (a, b) = (Matrix::of(args.lora_a), Matrix::of(args.lora_b));
        multiply(
            self.math,
            &[product(x, a.transposed(), 1.0)],
            None,
            f32_out(u),
            rest,
        );
        multiply(self.math, &[product(dy, b, 1.0)], None, f32_out(du), rest);
        let u = Matrix::new(Floats::F32(u), s.t, s.r);
        let du = Matrix::new(Floats::F32(du), s.t, s.r);
        let gradients = [
            (dy.transposed(), u, &mut d_lora_b),
            (du.transposed(), x, &mut d_lora_a),
        ];
        for (left, right, to) in gradients {
            let data = to.as_mut_slice();
            let product = product(left, right, args.scale).part_of(whole);
            multiply(
                self.math,
                &[product],
                None,
                Out::F32 { data, accumulate },
                rest,
            );
        }
        drop(seen);
        if let Some(dx) = &mut dx {
            let terms = [
                product(dy, Matrix::of(args.weight), 1.0),
                product(du, a, args.scale),
            ];
            match &args.dropout {
                None => multiply(self.math, &terms, None, writable(dx, dtype), rest),
                Some(dropout) => {
                    let [base, own] = terms;
                    multiply(self.math, &[base], None, writable(dx, dtype), rest);
                    let mut d_seen = self.output(args.x.shape(), dtype)?;
                    multiply(self.math, &[own], None, writable(&mut d_seen, dtype), rest);
                    drop_into(&dropout.of(&d_seen.freeze()), dx, Store::Add);
                }
            }
        }
        Ok(LoraGrads {
            dx: dx.map(TensorMut::freeze),
            d_lora_a: d_lora_a.freeze(),
            d_lora_b: d_lora_b.freeze(),
        })
    }

    /// Adapter's input after dropout; `None` without dropout.
    fn seen(&self, args: &LoraArgs<'_>) -> Result<Option<Tensor>> {
        let dropout = args.dropout.map(|dropout| dropout.of(args.x));
        dropout.map(|args| self.dropout_op(&args)).transpose()
    }

    pub(super) fn column_sum_op(&self, x: &Tensor) -> Result<Tensor> {
        let (m, n) = (x.shape().rows(), x.shape().last());
        let mut out = TensorMut::zeros(&self.pool, Tag::Gradients, [n], DType::F32)?;
        let mut space = Space::take(&self.pool, column_sum_space(m, n))?;
        if x.elems() > 0 {
            let partials = space.floats();
            floats!(x.dtype(), T => column_partials(x.as_slice::<T>(), n, partials));
            sum_partials(partials, out.as_mut_slice());
        }
        Ok(out.freeze())
    }

    /// As [`CpuBackend::column_sum_op`] for a part of the rows. Before the last part the result is `[2, n]`: the sum of the
    /// partial sums that are complete, and the one that is not.
    pub(super) fn column_sum_part_op(
        &self,
        x: &Tensor,
        sum: Option<Tensor>,
        part: SumPart,
    ) -> Result<Tensor> {
        const OP: &str = "column_sum_part";
        let (m, n) = (x.shape().rows(), x.shape().last());
        check::part(OP, part, m, part_step(part.total), sum.is_some())?;
        let begins = sum.is_none();
        let mut state = self.continued(OP, sum, [2, n], Tag::Gradients)?;
        let (whole, open) = state.as_mut_slice::<f32>().split_at_mut(n);
        if begins {
            whole.fill(0.0);
            open.fill(0.0);
        }
        floats!(x.dtype(), T => {
            for (i, row) in x.as_slice::<T>().chunks_exact(n.max(1)).enumerate() {
                add_row(row, open);
                let end = part.first + i + 1;
                if end.is_multiple_of(SUM_ROWS) || end == part.total {
                    add_partial(open, whole);
                    open.fill(0.0);
                }
            }
        });
        let state = state.freeze();
        match part.first + m == part.total {
            true => state.narrow(0, 1)?.reshape([n]),
            false => Ok(state),
        }
    }
}

impl AdaptedRows for CpuBackend {
    fn layer(&self, args: &LoraArgs<'_>) -> Result<Tensor> {
        let sizes = check::lora(args)?;
        let operands = [args.x, args.weight, args.lora_a, args.lora_b];
        check::values("adapted_linear", &operands)?;
        self.lora_op(args, sizes)
    }

    fn layer_backward(&self, args: &LoraArgs<'_>, dy: &Tensor, need_dx: bool) -> Result<LoraGrads> {
        let sizes = check::lora(args)?;
        let operands = [args.x, args.weight, args.lora_a, args.lora_b, dy];
        check::values("adapted_linear_backward", &operands)?;
        self.lora_backward_op(args, dy, need_dx, sizes, None, sizes.t)
    }
}

impl AdaptedParts for CpuBackend {
    fn layer_backward_part(
        &self,
        args: &LoraArgs<'_>,
        dy: &Tensor,
        need_dx: bool,
        sum: Option<AdapterGrads>,
        part: SumPart,
    ) -> Result<LoraGrads> {
        const OP: &str = "adapted_linear_backward_part";
        let sizes = check::lora(args)?;
        check::part(OP, part, sizes.t, part_step(part.total), sum.is_some())?;
        check::values(OP, &[args.x, args.weight, args.lora_a, args.lora_b, dy])?;
        self.lora_backward_op(args, dy, need_dx, sizes, sum, part.total)
    }
}

fn f32_out(data: &mut [f32]) -> Out<'_> {
    Out::F32 {
        data,
        accumulate: false,
    }
}

fn column_partials<T: Float>(x: &[T], n: usize, partials: &mut [f32]) {
    let blocks = x.chunks(SUM_ROWS * n);
    if x.len() < super::parallel::MIN_PARALLEL_ELEMS || workers() == 1 {
        blocks
            .zip(partials.chunks_exact_mut(n))
            .for_each(|(x, sum)| add_rows(x, sum));
    } else {
        x.par_chunks(SUM_ROWS * n)
            .zip(partials.par_chunks_exact_mut(n))
            .for_each(|(x, sum)| add_rows(x, sum));
    }
}

multiversion! {
    fn add_rows<T: Float>(x: &[T], sum: &mut [f32]) {
        sum.fill(0.0);
        for row in x.chunks_exact(sum.len()) {
            for (s, x) in sum.iter_mut().zip(row) {
                *s += x.to_f32();
            }
        }
    }
}

multiversion! {
    fn add_row<T: Float>(row: &[T], sum: &mut [f32]) {
        for (s, x) in sum.iter_mut().zip(row) {
            *s += x.to_f32();
        }
    }
}

fn add_partial(partial: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(partial).for_each(|(o, p)| *o += p);
}

/// `out = sum of partials`, added in order.
pub(crate) fn sum_partials(partials: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    if !out.is_empty() {
        for partial in partials.chunks_exact(out.len()) {
            add_partial(partial, out);
        }
    }
}

/// Converts a parameter to f32 at the front of `space`. Returns it and the rest of `space`.
pub(crate) fn widened_parameter<'s>(
    x: &Tensor,
    space: &'s mut [f32],
) -> (&'s [f32], &'s mut [f32]) {
    let (out, rest) = space.split_at_mut(x.elems());
    floats!(x.dtype(), T => widen(x.as_slice::<T>(), out));
    (out, rest)
}
