//! The meta device: shapes, dtypes and bytes only, as PyTorch's `meta` device.

use crate::adapted::{
    self, AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs, AdaptedLinearGrads,
    AdaptedParts, AdaptedRows, AdapterGrads, AdapterSums, LoraArgs, LoraGrads,
};
use crate::backend::{
    AttentionArgs, AttentionGrads, AttentionOut, Backend, Device, Direction, DropoutArgs, Gelu,
    LossGrads, LossNeeds, MatmulArgs, NormGrads, RopeLayout, SumPart,
};
use crate::check;
use crate::cpu::workspace;
use crate::error::Result;
use crate::pool::{Pool, Tag};
use crate::quantized::Quantization;
use crate::{DType, Shape, Tensor};

/// Meta device in place of [`crate::CpuBackend`]: it computes nothing, but makes the same checks and counts
/// the bytes that the CPU would take. Workspace counts too, for the number of threads of the caller's rayon
/// pool. Values are unknown: indices are not checked, and every row of a loss counts as supervised.
#[derive(Clone, Debug)]
pub struct MetaBackend {
    pool: Pool,
}

impl MetaBackend {
    /// Meta device that counts the bytes of its tensors in `pool`.
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        Self { pool }
    }

    /// Meta device with its own pool, which has no memory limit.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::new(Pool::new("null", None))
    }

    fn output(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        Tensor::null(&self.pool, Tag::Activations, shape, dtype)
    }

    fn like(&self, x: &Tensor) -> Result<Tensor> {
        self.output(x.shape(), x.dtype())
    }

    /// Adapter's input after dropout; `None` without dropout.
    fn seen(&self, args: &LoraArgs<'_>) -> Result<Option<Tensor>> {
        args.dropout.map(|_| self.like(args.x)).transpose()
    }

    fn gradient(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        Tensor::null(&self.pool, Tag::Gradients, shape, DType::F32)
    }

    /// Counts workspace of `floats` f32 and frees it at once. The outputs exist already, as on a real device.
    fn touch(&self, floats: usize) -> Result<()> {
        if floats > 0 {
            drop(Tensor::null(
                &self.pool,
                Tag::Workspace,
                [floats],
                DType::F32,
            )?);
        }
        Ok(())
    }

    fn norm(&self, x: &Tensor, params: usize) -> Result<Tensor> {
        let out = self.like(x)?;
        self.touch(workspace::norm(x.shape().last(), params))?;
        Ok(out)
    }

    fn norm_backward(&self, x: &Tensor, layer: bool) -> Result<NormGrads> {
        let c = x.shape().last();
        let grads = NormGrads {
            dx: self.like(x)?,
            d_weight: self.gradient([c])?,
            d_bias: if layer {
                Some(self.gradient([c])?)
            } else {
                None
            },
        };
        let params = 1 + usize::from(layer);
        self.touch(workspace::norm_backward(x.shape().rows(), c, params))?;
        Ok(grads)
    }
}

impl AdaptedRows for MetaBackend {
    fn layer(&self, args: &LoraArgs<'_>) -> Result<Tensor> {
        let sizes = check::lora(args)?;
        let out = self.output([sizes.t, sizes.n], args.x.dtype())?;
        let seen = self.seen(args)?;
        self.touch(workspace::lora(args, sizes))?;
        drop(seen);
        Ok(out)
    }

    fn layer_backward(&self, args: &LoraArgs<'_>, dy: &Tensor, need_dx: bool) -> Result<LoraGrads> {
        let (first, total) = (0, check::lora(args)?.t);
        self.layer_backward_part(args, dy, need_dx, None, SumPart { first, total })
    }
}

impl AdaptedParts for MetaBackend {
    fn layer_backward_part(
        &self,
        args: &LoraArgs<'_>,
        _dy: &Tensor,
        need_dx: bool,
        sum: Option<AdapterGrads>,
        part: SumPart,
    ) -> Result<LoraGrads> {
        const OP: &str = "adapted_linear_backward_part";
        let sizes = check::lora(args)?;
        let step = workspace::part_step(part.total);
        check::part(OP, part, sizes.t, step, sum.is_some())?;
        let new = || -> Result<AdapterGrads> {
            Ok([
                self.gradient([sizes.r, sizes.k])?,
                self.gradient([sizes.n, sizes.r])?,
            ])
        };
        let [d_lora_a, d_lora_b] = sum.map_or_else(new, Ok)?;
        let grads = LoraGrads {
            d_lora_a,
            d_lora_b,
            dx: if need_dx {
                Some(self.like(args.x)?)
            } else {
                None
            },
        };
        // The adapter's dropped input, and its gradient in the same place.
        let seen = self.seen(args)?;
        self.touch(workspace::lora_backward(args, need_dx, sizes, part.total))?;
        drop(seen);
        Ok(grads)
    }
}

impl Backend for MetaBackend {
    fn device(&self) -> Device {
        Device::Meta
    }

    fn has_values(&self) -> bool {
        false
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn upload(&self, bytes: &[u8], shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        check::upload(bytes, shape, dtype)?;
        Tensor::null(&self.pool, tag, shape, dtype)
    }

    fn zeros(&self, shape: Shape, dtype: DType, tag: Tag) -> Result<Tensor> {
        Tensor::null(&self.pool, tag, shape, dtype)
    }

    fn cast(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        check::float("cast", x)?;
        check::float_dtype("cast", dtype)?;
        if x.dtype() == dtype {
            return Ok(x.clone());
        }
        self.output(x.shape(), dtype)
    }

    fn dequantize(
        &self,
        quantized: &Tensor,
        quantization: Quantization,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor> {
        check::dequantize(quantized, quantization, shape, dtype)?;
        Tensor::null(&self.pool, Tag::Gathered, shape, dtype)
    }

    fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        check::same("add", a, b)?;
        self.like(a)
    }

    fn scale(&self, x: &Tensor, _factor: f32) -> Result<Tensor> {
        check::float("scale", x)?;
        self.like(x)
    }

    fn dropout(&self, args: DropoutArgs<'_>) -> Result<Tensor> {
        check::dropout(&args)?;
        self.like(args.x)
    }

    fn matmul(&self, args: MatmulArgs<'_>) -> Result<Tensor> {
        let sizes = check::matmul(&args)?;
        let out = self.output([sizes.m, sizes.n], args.out)?;
        self.touch(workspace::matmul(&args, sizes))?;
        Ok(out)
    }

    fn column_sum(&self, x: &Tensor) -> Result<Tensor> {
        check::float("column_sum", x)?;
        let out = self.gradient([x.shape().last()])?;
        self.touch(workspace::column_sum(x.shape().rows(), x.shape().last()))?;
        Ok(out)
    }

    fn part_step(&self, total: usize) -> usize {
        workspace::part_step(total)
    }

    fn matmul_part(
        &self,
        args: MatmulArgs<'_>,
        sum: Option<Tensor>,
        part: SumPart,
    ) -> Result<Tensor> {
        let sizes = check::matmul(&args)?;
        let step = self.part_step(part.total);
        check::part("matmul_part", part, sizes.k, step, sum.is_some())?;
        let out = || self.output([sizes.m, sizes.n], DType::F32);
        let out = sum.map_or_else(out, Ok)?;
        self.touch(workspace::matmul_part(sizes, part.total))?;
        Ok(out)
    }

    fn column_sum_part(&self, x: &Tensor, sum: Option<Tensor>, part: SumPart) -> Result<Tensor> {
        const OP: &str = "column_sum_part";
        check::float(OP, x)?;
        let (m, n) = (x.shape().rows(), x.shape().last());
        check::part(OP, part, m, self.part_step(part.total), sum.is_some())?;
        let state = sum.map_or_else(|| self.gradient([2, n]), Ok)?;
        match part.first + m == part.total {
            true => state.narrow(0, 1)?.reshape([n]),
            false => Ok(state),
        }
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

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, _eps: f32) -> Result<Tensor> {
        check::norm("layer_norm", x, &[weight, bias])?;
        self.norm(x, 2)
    }

    fn layer_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        _eps: f32,
    ) -> Result<NormGrads> {
        check::norm("layer_norm_backward", x, &[weight])?;
        check::same("layer_norm_backward", x, dy)?;
        self.norm_backward(x, true)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, _eps: f32) -> Result<Tensor> {
        check::norm("rms_norm", x, &[weight])?;
        self.norm(x, 1)
    }

    fn rms_norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        _eps: f32,
    ) -> Result<NormGrads> {
        check::norm("rms_norm_backward", x, &[weight])?;
        check::same("rms_norm_backward", x, dy)?;
        self.norm_backward(x, false)
    }

    fn gelu(&self, x: &Tensor, _kind: Gelu) -> Result<Tensor> {
        check::float("gelu", x)?;
        self.like(x)
    }

    fn gelu_backward(&self, x: &Tensor, dy: &Tensor, _kind: Gelu) -> Result<Tensor> {
        check::same("gelu_backward", x, dy)?;
        self.like(x)
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        check::same("swiglu", gate, up)?;
        self.like(gate)
    }

    fn swiglu_backward(&self, gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
        check::same("swiglu_backward", gate, up)?;
        check::same("swiglu_backward", gate, dy)?;
        Ok((self.like(gate)?, self.like(up)?))
    }

    fn rope(
        &self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        _layout: RopeLayout,
        _direction: Direction,
    ) -> Result<Tensor> {
        check::rope(x, cos, sin)?;
        self.like(x)
    }

    fn attention(&self, args: AttentionArgs<'_>) -> Result<AttentionOut> {
        let sizes = check::attention(&args)?;
        let saved = AttentionOut {
            out: self.like(args.q)?,
            lse: self.output([sizes.t, sizes.h], DType::F32)?,
        };
        self.touch(workspace::attention(&args, sizes))?;
        Ok(saved)
    }

    fn attention_backward(
        &self,
        args: AttentionArgs<'_>,
        saved: &AttentionOut,
        dout: &Tensor,
    ) -> Result<AttentionGrads> {
        let sizes = check::attention_backward(&args, &saved.out, &saved.lse, dout)?;
        let grads = AttentionGrads {
            dq: self.like(args.q)?,
            dk: self.like(args.k)?,
            dv: self.like(args.v)?,
        };
        self.touch(workspace::attention_backward(&args, sizes))?;
        Ok(grads)
    }

    fn gather_rows(&self, table: &Tensor, index: &Tensor) -> Result<Tensor> {
        let shape = check::gather_rows(table, index)?;
        self.output(shape, table.dtype())
    }

    fn scatter_add_rows(
        &self,
        x: &Tensor,
        index: &Tensor,
        rows: usize,
        out: DType,
    ) -> Result<Tensor> {
        let shape = check::scatter_add_rows(x, index, rows, out)?;
        self.output(shape, out)
    }

    fn transpose_each(&self, x: &Tensor) -> Result<Tensor> {
        self.output(check::transpose_each(x)?, x.dtype())
    }

    fn replace_rows(&self, base: &Tensor, index: &Tensor, rows: Option<&Tensor>) -> Result<Tensor> {
        check::replace_rows(base, index, rows)?;
        self.like(base)
    }

    fn write_rows(&self, base: Tensor, index: &Tensor, rows: &Tensor) -> Result<Tensor> {
        check::replace_rows(&base, index, Some(rows))?;
        Ok(base)
    }

    fn linear_cross_entropy(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
    ) -> Result<Tensor> {
        let sizes = check::loss(hidden, weight, labels)?;
        let out = self.output([sizes.t], DType::F32)?;
        self.touch(workspace::loss(sizes, sizes.t, None))?;
        Ok(out)
    }

    fn linear_cross_entropy_backward(
        &self,
        hidden: &Tensor,
        weight: &Tensor,
        labels: &Tensor,
        _factor: f32,
        need: LossNeeds,
    ) -> Result<LossGrads> {
        let sizes = check::loss(hidden, weight, labels)?;
        let grads = LossGrads {
            losses: self.output([sizes.t], DType::F32)?,
            d_hidden: if need.hidden {
                Some(self.like(hidden)?)
            } else {
                None
            },
            d_weight: if need.weight {
                Some(self.gradient(weight.shape())?)
            } else {
                None
            },
        };
        self.touch(workspace::loss(sizes, sizes.t, Some(need)))?;
        Ok(grads)
    }
}
