//! CPU device: rayon tasks, own matrix products, f32 arithmetic.

mod attention;
mod gemm;
mod linear;
mod loss;
mod math;
mod matrix;
mod norm;
mod parallel;
mod pointwise;
mod reduce;
mod rows;
pub(crate) mod simd;
pub(crate) mod workspace;

use crate::adapted::{
    self, AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs, AdaptedLinearGrads, AdapterSums,
};
use crate::backend::{
    AttentionArgs, AttentionGrads, AttentionOut, Backend, Device, Direction, DropoutArgs, Gelu,
    LossGrads, LossNeeds, MatmulArgs, NormGrads, RopeLayout, SumPart,
};
use crate::check;
use crate::error::Result;
use crate::pool::{Pool, Tag};
use crate::quantized::Quantization;
use crate::{DType, Shape, Tensor, TensorMut};

/// CPU device: operations on host memory, on the threads of the caller's rayon pool.
///
/// Results have the same bits for any number of threads. They may differ between types of processor. Forward
/// operations on rows (products, norms, losses) give a row the same bits in any batch.
#[derive(Clone, Debug)]
pub struct CpuBackend {
    pool: Pool,
    math: CpuMath,
}

/// Order in which products of bf16 matrices are summed on CPUs. It decides the bits of results.
///
/// Every processor computes both. Products of f16, and those of two f32 matrices, have the order of
/// [`CpuMath::Portable`] always.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CpuMath {
    /// One chain of fused multiply-adds in f32 over up to 256 elements of `k`.
    #[default]
    Portable,
    /// The order of the tiles of AMX (Intel, since Sapphire Rapids): for each 32 elements of `k` a chain over the even
    /// and one over the odd ones. An f32 matrix is rounded to bf16 before it is multiplied with one of bf16: attention's
    /// probabilities, the inner values of adapters, gradients of the loss. Other processors compute it in f32 arithmetic, with equal bits and more time than
    /// [`CpuMath::Portable`] takes.
    Amx,
}

impl CpuMath {
    /// The order that this processor computes fastest. AMX counts if the system allows it and if its products of a few
    /// tiles have the bits of the definition.
    #[must_use]
    pub fn native() -> Self {
        match gemm::has_amx() {
            true => Self::Amx,
            false => Self::Portable,
        }
    }

    /// `portable` or `amx`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Amx => "amx",
        }
    }
}

impl CpuBackend {
    /// CPU device whose tensors come from `pool`.
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        Self {
            pool,
            math: CpuMath::Portable,
        }
    }

    /// The device with this order of sums.
    #[must_use]
    pub fn with_math(self, math: CpuMath) -> Self {
        Self { math, ..self }
    }

    /// CPU device with its own pool, which has no memory limit.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::new(Pool::new("device", None))
    }

    fn output(&self, shape: impl Into<Shape>, dtype: DType) -> Result<TensorMut> {
        TensorMut::new(&self.pool, Tag::Activations, shape, dtype)
    }

    fn gradient(&self, shape: impl Into<Shape>) -> Result<TensorMut> {
        TensorMut::new(&self.pool, Tag::Gradients, shape, DType::F32)
    }
}

/// Temporary f32 memory of one operation.
struct Space(Option<TensorMut>);

impl Space {
    fn take(pool: &Pool, floats: usize) -> Result<Self> {
        if floats == 0 {
            return Ok(Self(None));
        }
        TensorMut::new(pool, Tag::Workspace, [floats], DType::F32).map(|t| Self(Some(t)))
    }

    fn floats(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Some(t) => t.as_mut_slice(),
            None => &mut [],
        }
    }
}

/// Evaluates an expression with `$T` standing for the Rust type of a float dtype.
macro_rules! floats {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $T = half::f16;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}
use floats;

impl Backend for CpuBackend {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn upload(&self, bytes: &[u8], shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        check::upload(bytes, shape, dtype)?;
        let mut out = TensorMut::new(&self.pool, tag, shape, dtype)?;
        out.as_bytes_mut().copy_from_slice(bytes);
        Ok(out.freeze())
    }

    fn zeros(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        TensorMut::zeros(&self.pool, tag, shape, dtype).map(TensorMut::freeze)
    }

    fn cast(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        check::float("cast", x)?;
        check::float_dtype("cast", dtype)?;
        check::values("cast", &[x])?;
        self.cast_op(x, dtype)
    }

    fn dequantize(
        &self,
        quantized: &Tensor,
        quantization: Quantization,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor> {
        check::dequantize(quantized, quantization, shape, dtype)?;
        check::values("dequantize", &[quantized])?;
        let mut out = TensorMut::new(&self.pool, Tag::Gathered, shape, dtype)?;
        floats!(dtype, T => quantization.dequantize(quantized.as_bytes(), shape, out.as_mut_slice::<T>()));
        Ok(out.freeze())
    }

    fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        check::same("add", a, b)?;
        check::values("add", &[a, b])?;
        self.add_op(a, b)
    }

    fn scale(&self, x: &Tensor, factor: f32) -> Result<Tensor> {
        check::float("scale", x)?;
        check::values("scale", &[x])?;
        self.scale_op(x, factor)
    }

    fn dropout(&self, args: DropoutArgs<'_>) -> Result<Tensor> {
        check::dropout(&args)?;
        check::values("dropout", &[args.x, args.rows])?;
        self.dropout_op(&args)
    }

    fn matmul(&self, args: MatmulArgs<'_>) -> Result<Tensor> {
        let sizes = check::matmul(&args)?;
        check::values("matmul", &[args.a, args.b])?;
        self.matmul_op(&args, sizes)
    }

    fn column_sum(&self, x: &Tensor) -> Result<Tensor> {
        check::float("column_sum", x)?;
        check::values("column_sum", &[x])?;
        self.column_sum_op(x)
    }

    fn part_step(&self, total: usize) -> usize {
        gemm::part_step(total)
    }

    fn matmul_part(
        &self,
        args: MatmulArgs<'_>,
        sum: Option<Tensor>,
        part: SumPart,
    ) -> Result<Tensor> {
        let sizes = check::matmul(&args)?;
        check::values("matmul_part", &[args.a, args.b])?;
        self.matmul_part_op(&args, sizes, sum, part)
    }

    fn column_sum_part(&self, x: &Tensor, sum: Option<Tensor>, part: SumPart) -> Result<Tensor> {
        check::float("column_sum_part", x)?;
        check::values("column_sum_part", &[x])?;
        self.column_sum_part_op(x, sum, part)
    }

    fn adapted_linear(&self, args: AdaptedLinearArgs<'_>) -> Result<AdaptedLinear> {
        adapted::check("adapted_linear", &args)?;
        adapted::forward(self, &args)
    }

    fn adapted_linear_backward(
        &self,
        args: AdaptedLinearGradArgs<'_>,
    ) -> Result<AdaptedLinearGrads> {
        adapted::check_backward("adapted_linear_backward", &args)?;
        adapted::backward(self, &args)
    }

    fn adapted_linear_backward_part(
        &self,
        args: AdaptedLinearGradArgs<'_>,
        sums: AdapterSums,
        part: SumPart,
    ) -> Result<AdaptedLinearGrads> {
        adapted::check_backward("adapted_linear_backward_part", &args)?;
        adapted::backward_part(self, &args, sums, part)
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
        check::norm("layer_norm", x, &[weight, bias])?;
        check::values("layer_norm", &[x, weight, bias])?;
        self.norm_op(x, weight, Some(bias), eps)
    }

    fn layer_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        eps: f32,
    ) -> Result<NormGrads> {
        const OP: &str = "layer_norm_backward";
        check::norm(OP, x, &[weight])?;
        check::same(OP, x, dy)?;
        check::values(OP, &[x, weight, dy])?;
        self.norm_backward_op(x, weight, dy, eps, true)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
        check::norm("rms_norm", x, &[weight])?;
        check::values("rms_norm", &[x, weight])?;
        self.norm_op(x, weight, None, eps)
    }

    fn rms_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        eps: f32,
    ) -> Result<NormGrads> {
        const OP: &str = "rms_norm_backward";
        check::norm(OP, x, &[weight])?;
        check::same(OP, x, dy)?;
        check::values(OP, &[x, weight, dy])?;
        self.norm_backward_op(x, weight, dy, eps, false)
    }

    fn gelu(&self, x: &Tensor, kind: Gelu) -> Result<Tensor> {
        check::float("gelu", x)?;
        check::values("gelu", &[x])?;
        self.gelu_op(x, kind)
    }

    fn gelu_backward(&self, x: &Tensor, dy: &Tensor, kind: Gelu) -> Result<Tensor> {
        check::same("gelu_backward", x, dy)?;
        check::values("gelu_backward", &[x, dy])?;
        self.gelu_backward_op(x, dy, kind)
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        check::same("swiglu", gate, up)?;
        check::values("swiglu", &[gate, up])?;
        self.swiglu_op(gate, up)
    }

    fn swiglu_backward(&self, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
        check::same("swiglu_backward", gate, up)?;
        check::same("swiglu_backward", gate, dy)?;
        check::values("swiglu_backward", &[gate, up, dy])?;
        self.swiglu_backward_op(gate, up, dy)
    }

    fn rope(
        &self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        layout: RopeLayout,
        direction: Direction,
    ) -> Result<Tensor> {
        check::rope(x, cos, sin)?;
        check::values("rope", &[x, cos, sin])?;
        self.rope_op(x, cos, sin, layout, direction)
    }

    fn attention(&self, args: AttentionArgs<'_>) -> Result<AttentionOut> {
        let sizes = check::attention(&args)?;
        check::values("attention", &[args.q, args.k, args.v])?;
        self.attention_op(&args, sizes)
    }

    fn attention_backward(
        &self,
        args: AttentionArgs<'_>,
        saved: &AttentionOut,
        dout: &Tensor,
    ) -> Result<AttentionGrads> {
        let sizes = check::attention_backward(&args, &saved.out, &saved.lse, dout)?;
        let operands = [args.q, args.k, args.v, &saved.out, &saved.lse, dout];
        check::values("attention_backward", &operands)?;
        self.attention_backward_op(&args, saved, dout, sizes)
    }

    fn gather_rows(&self, table: &Tensor, index: &Tensor) -> Result<Tensor> {
        let shape = check::gather_rows(table, index)?;
        check::values("gather_rows", &[table, index])?;
        self.gather_rows_op(table, index, shape)
    }

    fn scatter_add_rows(
        &self,
        x: &Tensor,
        index: &Tensor,
        rows: usize,
        out: DType,
    ) -> Result<Tensor> {
        let shape = check::scatter_add_rows(x, index, rows, out)?;
        check::values("scatter_add_rows", &[x, index])?;
        self.scatter_add_rows_op(x, index, shape, out)
    }

    fn transpose_each(&self, x: &Tensor) -> Result<Tensor> {
        let shape = check::transpose_each(x)?;
        check::values("transpose_each", &[x])?;
        self.transpose_each_op(x, shape)
    }

    fn replace_rows(&self, base: &Tensor, index: &Tensor, rows: Option<&Tensor>) -> Result<Tensor> {
        check::replace_rows(base, index, rows)?;
        check::values("replace_rows", &[base, index, rows.unwrap_or(base)])?;
        self.replace_rows_op(base, index, rows)
    }

    fn write_rows(&self, base: Tensor, index: &Tensor, rows: &Tensor) -> Result<Tensor> {
        check::replace_rows(&base, index, Some(rows))?;
        check::values("write_rows", &[&base, index, rows])?;
        self.write_rows_op(base, index, rows)
    }

    fn linear_cross_entropy(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
    ) -> Result<Tensor> {
        let sizes = check::loss(hidden, weight, labels)?;
        check::values("linear_cross_entropy", &[hidden, weight, labels])?;
        self.loss_op(hidden, weight, labels, sizes)
    }

    fn linear_cross_entropy_backward(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        factor: f32,
        need: LossNeeds,
    ) -> Result<LossGrads> {
        let sizes = check::loss(hidden, weight, labels)?;
        check::values("linear_cross_entropy_backward", &[hidden, weight, labels])?;
        self.loss_backward_op(hidden, weight, labels, factor, need, sizes)
    }
}
