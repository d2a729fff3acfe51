//! Grouped LoRA layers that share one input and one partition of rows.

use super::CudaBackend;
use crate::Tensor;
use crate::cuda::launch::Address;
use crate::cuda::ops::routed_lora::RoutedLora;
use crate::cuda::ops::shared_routed_lora::{Gradients, SharedRoutedLora as Layers, line, share};
use crate::error::{Result, shape_error};
use crate::pool::Tag;
use crate::routed_lora::{self, AdaptedGroup, RoutedLoraArgs};
use crate::shared_routed_lora::{
    self, SharedRoutedLora, SharedRoutedLoraGradArgs, SharedRoutedLoraGrads,
};

/// Pairs of layers with their A matrices stacked, and the tensors that back their addresses.
struct Stacked {
    layers: Vec<RoutedLora>,
    /// Stacked A matrices `[line, k]` for each row list that has adapters.
    stacked: [Address; 2],
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
    /// Stacks the adapters per row list. `None` if the layers cannot share a kernel, and for a single pair of layers,
    /// which needs no copy of its adapters.
    fn stack_groups(
        &self,
        op: &'static str,
        args: &[RoutedLoraArgs<'_>],
    ) -> Result<Option<Stacked>> {
        shared_routed_lora::check(args)?;
        if args.len() == 1 {
            return Ok(None);
        }
        let (mut layers, mut held) = (Vec::with_capacity(args.len()), Vec::new());
        for args in args {
            let sizes = routed_lora::check(args)?;
            let Some((layer, tensors)) = self.adapted_groups(op, args, sizes)? else {
                return Ok(None);
            };
            layers.push(layer);
            held.extend(tensors);
        }
        if !share(&layers) {
            return Ok(None);
        }
        let (line, k, dtype) = (line(&layers), layers[0].k, layers[0].dtype);
        let mut stacked = [Address::NULL; 2];
        for (i, to) in stacked.iter_mut().enumerate() {
            let adapters = layers.iter().filter_map(|layer| {
                let adapter = layer.groups[i].adapter?;
                Some((adapter.lora_a, [adapter.r, layer.line()]))
            });
            let adapters: Vec<_> = adapters.collect();
            if !adapters.is_empty() {
                let all = self.stack_rows(op, &adapters, k, dtype)?;
                *to = self.address(op, &all)?;
                held.push(all);
            }
        }
        Ok(Some(Stacked {
            layers,
            stacked,
            line,
            held,
        }))
    }

    pub(super) fn shared_routed_lora_op(
        &self,
        args: &[RoutedLoraArgs<'_>],
    ) -> Result<SharedRoutedLora> {
        const OP: &str = "shared_routed_lora";
        let Some(stacked) = self.stack_groups(OP, args)? else {
            return shared_routed_lora::forward(self, args);
        };
        let (t, dtype) = (stacked.layers[0].t, stacked.layers[0].dtype);
        let outputs = stacked.layers.iter();
        let outputs = outputs.map(|layer| self.output([t, layer.n], dtype));
        let y: Vec<Tensor> = outputs.collect::<Result<_>>()?;
        let inner = self.output([t, stacked.line], dtype)?;
        let to = y.iter().map(|y| self.address(OP, y));
        let to: Vec<Address> = to.collect::<Result<_>>()?;
        let (s, sms) = (self.address(OP, &inner)?, self.executor.multiprocessors());
        let layers = stacked.layers();
        self.run_in_workspace(OP, |space| layers.forward(s, &to, sms, space))?;
        drop(stacked.held);
        Ok(SharedRoutedLora {
            y,
            inner: vec![inner],
        })
    }

    pub(super) fn shared_routed_lora_backward_op(
        &self,
        args: &SharedRoutedLoraGradArgs<'_>,
    ) -> Result<SharedRoutedLoraGrads> {
        const OP: &str = "shared_routed_lora_backward";
        shared_routed_lora::check_backward(args)?;
        for (layer, dy) in args.layers.iter().zip(args.dy) {
            let sizes = routed_lora::check(layer)?;
            if dy.shape() != [sizes.t, sizes.n].into() {
                return shape_error(
                    OP,
                    format!("dy {} for [{}, {}]", dy.shape(), sizes.t, sizes.n),
                );
            }
        }
        // The bias does not affect the gradients.
        let unbiased = args.layers.iter().map(|layer| RoutedLoraArgs {
            groups: layer.groups.map(|group| AdaptedGroup {
                bias: None,
                ..group
            }),
            ..*layer
        });
        let unbiased: Vec<RoutedLoraArgs<'_>> = unbiased.collect();
        let x = unbiased[0].x;
        let stacked = match args.dy.iter().all(|dy| dy.dtype() == x.dtype()) {
            true => self.stack_groups(OP, &unbiased)?,
            false => None,
        };
        let Some(stacked) = stacked else {
            return shared_routed_lora::backward(self, args);
        };
        let (t, k, dtype) = (stacked.layers[0].t, stacked.layers[0].k, x.dtype());
        let (layers, sms) = (stacked.layers(), self.executor.multiprocessors());
        let inner = match args.inner {
            [inner] if inner.shape() == [t, stacked.line].into() => inner.clone(),
            [] => {
                let inner = self.uninit([t, stacked.line], dtype, Tag::Workspace)?;
                let s = self.address(OP, &inner)?;
                self.run_in_workspace(OP, |space| layers.forward(s, &[], sms, space))?;
                inner
            }
            inner => return shape_error(OP, format!("{inner:?} of other layers")),
        };
        let dy = args.dy.iter().map(|dy| self.operand(OP, dy, dtype));
        let dy: Vec<Tensor> = dy.collect::<Result<_>>()?;
        let dx = match args.need_dx {
            true => Some(self.output(x.shape(), dtype)?),
            false => None,
        };
        let mut d_stacked = [None, None];
        for (to, stacked_a) in d_stacked.iter_mut().zip(stacked.stacked) {
            if stacked_a != Address::NULL {
                *to = Some(self.gradient([stacked.line, k])?);
            }
        }
        let place = |x: Option<&Tensor>| x.map_or(Ok(Address::NULL), |x| self.address(OP, x));
        let (mut adapters, mut b_at) = (Vec::new(), Vec::new());
        let mut first = 0;
        for layer in &stacked.layers {
            let (mut own, mut places) = ([None, None], [Address::NULL; 2]);
            for (i, group) in layer.groups.iter().enumerate() {
                let (Some(adapter), Some(d_stacked)) = (group.adapter, &d_stacked[i]) else {
                    continue;
                };
                let d_lora_b = self.gradient([layer.n, adapter.r])?;
                places[i] = self.address(OP, &d_lora_b)?;
                // A view: it keeps the rows of the other layers alive too.
                own[i] = Some([d_stacked.narrow(first, adapter.r)?, d_lora_b]);
            }
            adapters.push(own);
            b_at.push(places);
            first += layer.line();
        }
        let dy_at = dy.iter().map(|dy| self.address(OP, dy));
        let dy_at: Vec<Address> = dy_at.collect::<Result<_>>()?;
        let [first, second] = &d_stacked;
        let gradients = Gradients {
            dx: place(dx.as_ref())?,
            d_stacked: [place(first.as_ref())?, place(second.as_ref())?],
            d_lora_b: &b_at,
        };
        let s = self.address(OP, &inner)?;
        self.run_in_workspace(OP, |space| {
            layers.backward(&dy_at, s, gradients, sms, space)
        })?;
        drop((stacked.held, dy));
        Ok(SharedRoutedLoraGrads { dx, adapters })
    }
}
