//! Two adapted linear layers over a partition of rows, without copies of the rows.

use super::CudaBackend;
use super::products::common;
use crate::Tensor;
use crate::backend::LoraArgs;
use crate::check::LoraSizes;
use crate::cuda::launch::Address;
use crate::cuda::ops::routed_lora::{AdaptedGroup, Gradients, RoutedLora as Layers};
use crate::error::{Result, shape_error};
use crate::pool::Tag;
use crate::routed_lora::{self, RoutedLora, RoutedLoraArgs, RoutedLoraGrads};

impl CudaBackend {
    /// The layers in one dtype, with the tensors that addresses stand for. `None` where there is no kernel for them: an
    /// adapter without ranks, operands of unlike dtypes.
    fn adapted_groups(
        &self,
        op: &'static str,
        args: &RoutedLoraArgs<'_>,
        sizes: LoraSizes,
    ) -> Result<Option<(Layers, Vec<Tensor>)>> {
        let operands = |layer: &LoraArgs<'_>| {
            let tensors = [layer.weight, layer.lora_a, layer.lora_b];
            tensors
                .map(Clone::clone)
                .into_iter()
                .chain(layer.bias.cloned())
        };
        let LoraSizes { t, n, k, r } = sizes;
        let [first, second] = &args.layers;
        let x = first.x;
        let all: Vec<Tensor> = operands(first).chain(operands(second)).collect();
        let dtype = common([x].into_iter().chain(&all));
        if r == 0 || dtype != x.dtype() {
            return Ok(None);
        }
        let mut held = Vec::with_capacity(all.len() + 1);
        let mut place = |x: &Tensor| -> Result<Address> {
            let x = self.operand(op, x, dtype)?;
            let address = self.address(op, &x)?;
            held.push(x);
            Ok(address)
        };
        let x = place(x)?;
        let mut group = |i: usize| -> Result<AdaptedGroup> {
            let (layer, rows) = (&args.layers[i], args.rows[i]);
            Ok(AdaptedGroup {
                rows: self.address(op, rows)?,
                m: rows.elems(),
                weight: place(layer.weight)?,
                bias: layer.bias.map_or(Ok(Address::NULL), &mut place)?,
                lora_a: place(layer.lora_a)?,
                lora_b: place(layer.lora_b)?,
            })
        };
        let layers = Layers {
            dtype,
            t,
            n,
            k,
            r,
            x,
            scale: first.scale,
            groups: [group(0)?, group(1)?],
        };
        Ok(Some((layers, held)))
    }

    pub(super) fn routed_lora_op(&self, args: &RoutedLoraArgs<'_>) -> Result<RoutedLora> {
        const OP: &str = "routed_lora";
        let sizes = routed_lora::check(args)?;
        let Some((layers, held)) = self.adapted_groups(OP, args, sizes)? else {
            return routed_lora::forward(self, args);
        };
        let y = self.output([sizes.t, sizes.n], layers.dtype)?;
        let inner = self.output([sizes.t, layers.line()], layers.dtype)?;
        let (s, to) = (self.address(OP, &inner)?, self.address(OP, &y)?);
        let sms = self.executor.multiprocessors();
        self.run_in_workspace(OP, |space| layers.forward(s, to, sms, space))?;
        drop(held);
        Ok(RoutedLora {
            y,
            inner: Some(inner),
        })
    }

    pub(super) fn routed_lora_backward_op(
        &self,
        args: &RoutedLoraArgs<'_>,
        dy: &Tensor,
        inner: Option<&Tensor>,
        need_dx: bool,
    ) -> Result<RoutedLoraGrads> {
        const OP: &str = "routed_lora_backward";
        let sizes = routed_lora::check(args)?;
        let x = args.layers[0].x;
        if dy.shape() != [sizes.t, sizes.n].into() {
            return shape_error(
                OP,
                format!("dy {} for [{}, {}]", dy.shape(), sizes.t, sizes.n),
            );
        }
        // The bias has no part in the gradients.
        let unbiased = RoutedLoraArgs {
            layers: args.layers.map(|layer| LoraArgs {
                bias: None,
                ..layer
            }),
            ..*args
        };
        let groups = match dy.dtype() == x.dtype() {
            true => self.adapted_groups(OP, &unbiased, sizes)?,
            false => None,
        };
        let Some((layers, held)) = groups else {
            return routed_lora::backward(self, args, dy, need_dx);
        };
        let (dtype, sms) = (layers.dtype, self.executor.multiprocessors());
        let inner = match inner {
            Some(inner) if inner.shape() == [sizes.t, layers.line()].into() => inner.clone(),
            Some(inner) => return shape_error(OP, format!("{inner:?} of other layers")),
            None => {
                let inner = self.uninit([sizes.t, layers.line()], dtype, Tag::Workspace)?;
                let s = self.address(OP, &inner)?;
                self.run_in_workspace(OP, |space| layers.inner(s, sms, space))?;
                inner
            }
        };
        let dy = self.operand(OP, dy, dtype)?;
        let dx = match need_dx {
            true => Some(self.output(x.shape(), dtype)?),
            false => None,
        };
        let adapter = || -> Result<[Tensor; 2]> {
            Ok([
                self.gradient([sizes.r, sizes.k])?,
                self.gradient([sizes.n, sizes.r])?,
            ])
        };
        let adapters = [adapter()?, adapter()?];
        let place = |half: usize| -> Result<[Address; 2]> {
            Ok([
                self.address(OP, &adapters[0][half])?,
                self.address(OP, &adapters[1][half])?,
            ])
        };
        let gradients = Gradients {
            dx: dx
                .as_ref()
                .map_or(Ok(Address::NULL), |dx| self.address(OP, dx))?,
            d_lora_a: place(0)?,
            d_lora_b: place(1)?,
        };
        let (s, dy_at) = (self.address(OP, &inner)?, self.address(OP, &dy)?);
        self.run_in_workspace(OP, |space| layers.backward(dy_at, s, gradients, sms, space))?;
        drop((held, dy));
        Ok(RoutedLoraGrads { dx, adapters })
    }
}
