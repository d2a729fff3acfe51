//! Grouped LoRA: two layers with adapters over a partition of the rows, without copying rows.

use super::CudaBackend;
use super::products::common;
use crate::Tensor;
use crate::cuda::launch::Address;
use crate::cuda::ops::routed_lora::{
    AdaptedGroup as Group, Adapter, Gradients, RoutedLora as Layers,
};
use crate::error::{Result, shape_error};
use crate::pool::Tag;
use crate::routed_lora::{self, AdaptedGroup, RoutedLora, RoutedLoraArgs, RoutedLoraGrads, Sizes};

impl CudaBackend {
    /// Layers as the kernels take them, in one dtype, with the tensors that back their addresses. `None` if no kernel
    /// supports them: no adapter, an adapter of rank 0, or operands of different dtypes.
    pub(super) fn adapted_groups(
        &self,
        op: &'static str,
        args: &RoutedLoraArgs<'_>,
        sizes: Sizes,
    ) -> Result<Option<(Layers, Vec<Tensor>)>> {
        let Sizes { t, n, k, r } = sizes;
        let x = args.x;
        let operands = args.groups.iter().flat_map(|group| {
            let halves = group
                .adapter
                .map(|adapter| [adapter.lora_a, adapter.lora_b]);
            let base = [Some(group.weight), group.bias].into_iter().flatten();
            base.chain(halves.into_iter().flatten())
        });
        let dtype = common([x].into_iter().chain(operands));
        if r == [None; 2] || r.contains(&Some(0)) || dtype != x.dtype() {
            return Ok(None);
        }
        let mut held = Vec::with_capacity(9);
        let mut place = |x: &Tensor| -> Result<Address> {
            let x = self.operand(op, x, dtype)?;
            let address = self.address(op, &x)?;
            held.push(x);
            Ok(address)
        };
        let x = place(x)?;
        let mut group = |group: &AdaptedGroup<'_>, r: Option<usize>| -> Result<Group> {
            let adapter = match (group.adapter, r) {
                (Some(adapter), Some(r)) => Some(Adapter {
                    r,
                    lora_a: place(adapter.lora_a)?,
                    lora_b: place(adapter.lora_b)?,
                    scale: adapter.scale,
                    dropped: self.dropped(op, adapter.dropout)?,
                }),
                _ => None,
            };
            Ok(Group {
                rows: self.address(op, group.rows)?,
                m: group.rows.elems(),
                weight: place(group.weight)?,
                bias: group.bias.map_or(Ok(Address::NULL), &mut place)?,
                adapter,
            })
        };
        let [first, second] = &args.groups;
        let layers = Layers {
            dtype,
            t,
            n,
            k,
            x,
            groups: [group(first, r[0])?, group(second, r[1])?],
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
        let x = args.x;
        if dy.shape() != [sizes.t, sizes.n].into() {
            return shape_error(
                OP,
                format!("dy {} for [{}, {}]", dy.shape(), sizes.t, sizes.n),
            );
        }
        // The bias does not affect the gradients.
        let unbiased = RoutedLoraArgs {
            groups: args.groups.map(|group| AdaptedGroup {
                bias: None,
                ..group
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
        let mut adapters = [None, None];
        let mut places = [[Address::NULL; 2]; 2];
        for ((to, places), r) in adapters.iter_mut().zip(&mut places).zip(sizes.r) {
            if let Some(r) = r {
                let halves = [self.gradient([r, sizes.k])?, self.gradient([sizes.n, r])?];
                *places = [self.address(OP, &halves[0])?, self.address(OP, &halves[1])?];
                *to = Some(halves);
            }
        }
        let gradients = Gradients {
            dx: dx
                .as_ref()
                .map_or(Ok(Address::NULL), |dx| self.address(OP, dx))?,
            adapters: places,
        };
        let (s, dy_at) = (self.address(OP, &inner)?, self.address(OP, &dy)?);
        self.run_in_workspace(OP, |space| layers.backward(dy_at, s, gradients, sms, space))?;
        drop((held, dy));
        Ok(RoutedLoraGrads { dx, adapters })
    }
}
