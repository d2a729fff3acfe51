//! LoRA layers that share one input.

use super::CudaBackend;
use crate::backend::LoraArgs;
use crate::check;
use crate::cuda::launch::Address;
use crate::cuda::ops::lora_linear::LoraLinear;
use crate::cuda::ops::shared_lora::{Gradients, SharedLora as Layers, alike, line};
use crate::error::{Result, shape_error};
use crate::pool::Tag;
use crate::shared_lora::{self, SharedLora, SharedLoraGradArgs, SharedLoraGrads};
use crate::{DType, Tensor};

/// Layers with their A matrices stacked, and the tensors that back their addresses.
struct Stacked {
    layers: Vec<LoraLinear>,
    /// Stacked A matrices, `[line, k]`.
    stacked: Address,
    line: usize,
    held: Vec<Tensor>,
}

impl Stacked {
    fn layers(&self) -> Layers<'_> {
        Layers {
            layers: &self.layers,
            stacked: self.stacked,
        }
    }
}

impl CudaBackend {
    /// Stacks the adapters of the layers. `None` if the layers cannot share a kernel: different inputs, dtypes or
    /// scales, or an adapter of rank 0.
    fn stack(&self, op: &'static str, args: &[LoraArgs<'_>]) -> Result<Option<Stacked>> {
        shared_lora::check(args)?;
        let first = args[0];
        let (dtype, at) = (first.x.dtype(), self.address(op, first.x)?);
        let mut fits = true;
        for args in args {
            let tensors = [args.x, args.weight, args.lora_a, args.lora_b];
            fits &= tensors
                .into_iter()
                .chain(args.bias)
                .all(|x| x.dtype() == dtype)
                && self.address(op, args.x)? == at
                && args.scale.to_bits() == first.scale.to_bits()
                && check::lora(args)?.r > 0;
        }
        if !fits {
            return Ok(None);
        }
        let x = self.operand(op, first.x, dtype)?;
        let (mut layers, mut held) = (Vec::with_capacity(args.len()), vec![x.clone()]);
        for args in args {
            let own = LoraArgs { x: &x, ..*args };
            let (layer, tensors) = self.layer(op, &own, check::lora(&own)?, dtype)?;
            layers.push(layer);
            held.extend(tensors);
        }
        let (line, k) = (line(&layers), first.x.shape().last());
        if !alike(&layers) {
            return Ok(Some(Stacked {
                layers,
                stacked: Address::NULL,
                line,
                held,
            }));
        }
        if let [layer] = &*layers
            && layer.padded_rank() == layer.r
        {
            let stacked = layer.lora_a;
            return Ok(Some(Stacked {
                layers,
                stacked,
                line,
                held,
            }));
        }
        let own = layers.iter();
        let own = own.map(|layer| (layer.lora_a, [layer.r, layer.padded_rank()]));
        let stacked = self.stack_rows(op, &own.collect::<Vec<_>>(), k, dtype)?;
        let start = self.address(op, &stacked)?;
        held.push(stacked);
        Ok(Some(Stacked {
            layers,
            stacked: start,
            line,
            held,
        }))
    }

    /// Stacks matrices of `k` columns. Each part has its own number of rows and its padded number of rows; the
    /// padding is zero.
    pub(super) fn stack_rows(
        &self,
        op: &'static str,
        parts: &[(Address, [usize; 2])],
        k: usize,
        dtype: DType,
    ) -> Result<Tensor> {
        let rows = parts.iter().map(|(_, [_, padded])| padded).sum();
        let stacked = self.uninit([rows, k], dtype, Tag::Workspace)?;
        if parts.iter().any(|(_, [own, padded])| padded > own) {
            self.zero(op, &stacked)?;
        }
        let row = (k * dtype.size_bytes()) as u64;
        let mut to = self.address(op, &stacked)?;
        for (from, [own, padded]) in parts {
            // SAFETY: the matrix has `own` rows of `k` elements, and the tensor of all padded rows has room for them
            // from `to` on.
            let queued = unsafe { self.executor.copy(*from, to, *own as u64 * row) };
            self.counted(op, queued)?;
            to = Address(to.0 + *padded as u64 * row);
        }
        Ok(stacked)
    }

    pub(super) fn shared_lora_op(&self, args: &[LoraArgs<'_>]) -> Result<SharedLora> {
        const OP: &str = "shared_lora";
        let Some(stacked) = self.stack(OP, args)? else {
            return shared_lora::forward(self, args);
        };
        let (t, dtype) = (args[0].x.shape().rows(), args[0].x.dtype());
        let outputs = stacked
            .layers
            .iter()
            .map(|layer| self.output([t, layer.n], dtype));
        let y: Vec<Tensor> = outputs.collect::<Result<_>>()?;
        let inner = self.output([t, stacked.line], dtype)?;
        let to = y.iter().map(|y| self.address(OP, y));
        let to: Vec<Address> = to.collect::<Result<_>>()?;
        let (s, sms) = (self.address(OP, &inner)?, self.executor.multiprocessors());
        let layers = stacked.layers();
        self.run_in_workspace(OP, |space| layers.forward(s, &to, sms, space))?;
        drop(stacked.held);
        Ok(SharedLora {
            y,
            inner: Some(inner),
        })
    }

    pub(super) fn shared_lora_backward_op(
        &self,
        args: &SharedLoraGradArgs<'_>,
    ) -> Result<SharedLoraGrads> {
        const OP: &str = "shared_lora_backward";
        shared_lora::check_backward(args)?;
        for (layer, dy) in args.layers.iter().zip(args.dy) {
            check::lora_backward(layer, dy)?;
        }
        // The bias does not affect the gradients.
        let unbiased = args.layers.iter().map(|layer| LoraArgs {
            bias: None,
            ..*layer
        });
        let unbiased: Vec<LoraArgs<'_>> = unbiased.collect();
        let x = unbiased[0].x;
        let dtypes = args.dy.iter().all(|dy| dy.dtype() == x.dtype());
        let stacked = match dtypes {
            true => self.stack(OP, &unbiased)?,
            false => None,
        };
        let Some(stacked) = stacked else {
            return shared_lora::backward(self, args);
        };
        let (t, k, dtype) = (x.shape().rows(), x.shape().last(), x.dtype());
        let (layers, sms) = (stacked.layers(), self.executor.multiprocessors());
        let inner = match args.inner {
            Some(inner) if inner.shape() == [t, stacked.line].into() => inner.clone(),
            Some(inner) => return shape_error(OP, format!("{inner:?} of other layers")),
            None => {
                let inner = self.uninit([t, stacked.line], dtype, Tag::Workspace)?;
                let s = self.address(OP, &inner)?;
                self.run_in_workspace(OP, |space| layers.forward(s, &[], sms, space))?;
                inner
            }
        };
        let dy = args.dy.iter().map(|dy| self.operand(OP, dy, dtype));
        let dy: Vec<Tensor> = dy.collect::<Result<_>>()?;
        let dx = match args.need_dx {
            true => Some(self.output(x.shape(), dtype)?),
            false => None,
        };
        let d_stacked = self.gradient([stacked.line, k])?;
        let d_lora_b = stacked.layers.iter();
        let d_lora_b = d_lora_b.map(|layer| self.gradient([layer.n, layer.r]));
        let d_lora_b: Vec<Tensor> = d_lora_b.collect::<Result<_>>()?;
        let places = |tensors: &[Tensor]| -> Result<Vec<Address>> {
            tensors.iter().map(|x| self.address(OP, x)).collect()
        };
        let (dy_at, b_at) = (places(&dy)?, places(&d_lora_b)?);
        let gradients = Gradients {
            dx: match &dx {
                Some(dx) => self.address(OP, dx)?,
                None => Address::NULL,
            },
            d_stacked: self.address(OP, &d_stacked)?,
            d_lora_b: &b_at,
        };
        let s = self.address(OP, &inner)?;
        self.run_in_workspace(OP, |space| {
            layers.backward(&dy_at, s, gradients, sms, space)
        })?;
        let mut first = 0;
        let mut adapters = Vec::with_capacity(stacked.layers.len());
        for (layer, d_lora_b) in stacked.layers.iter().zip(d_lora_b) {
            // A view: it keeps the rows of the other layers alive too.
            adapters.push([d_stacked.narrow(first, layer.r)?, d_lora_b]);
            first += layer.padded_rank();
        }
        drop((stacked.held, dy));
        Ok(SharedLoraGrads { dx, adapters })
    }
}
