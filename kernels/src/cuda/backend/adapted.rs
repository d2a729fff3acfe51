//! Adapted linear layers. Projections whose adapters are alike run with these stacked, one narrow product for all;
//! others run one after the other. Layers of row groups read and write rows in place, without gathered copies.

use super::CudaBackend;
use super::products::common;
use crate::adapted::{
    self, AdaptedLayer, AdaptedLinear, AdaptedLinearArgs, AdaptedLinearGradArgs,
    AdaptedLinearGrads, AdaptedParts, AdaptedRows, AdapterGrads, AdapterSums, GroupedLayers,
    LoraArgs, LoraGrads,
};
use crate::backend::SumPart;
use crate::check;
use crate::cuda::launch::{Address, Launch};
use crate::cuda::ops::grouped_lora::{self, AdaptedGroup, Adapter, GroupedLora};
use crate::cuda::ops::lora_linear::LoraLinear;
use crate::cuda::ops::shared_grouped_lora::{self, SharedGroupedLora};
use crate::cuda::ops::shared_lora::{self, SharedLora};
use crate::cuda::ops::step::Step;
use crate::cuda::ops::workspace::Workspace;
use crate::error::{Result, shape_error};
use crate::pool::Tag;
use crate::{DType, Tensor};

/// Operands of projections of one input, as device addresses.
enum Layers {
    /// One layer per projection, for all rows.
    Whole(Vec<LoraLinear>),
    /// Two layers per projection, one for each row group.
    Grouped(Vec<GroupedLora>),
}

/// Projections of one input whose A matrices are stacked into one.
struct Stacked {
    layers: Layers,
    /// `[line, k]` of each row group: A of each projection. NULL for a group without adapters, and for unlike dropouts.
    adapters: [Address; 2],
    /// Elements of a row of the adapters' inner outputs.
    line: usize,
    /// Tensors whose addresses are used here, so that they stay allocated.
    held: Vec<Tensor>,
}

/// Addresses that the gradients of stacked adapters are written to.
struct Gradients<'a> {
    /// Gradient of the input, `[t, k]`, or NULL if it is not needed.
    dx: Address,
    /// Gradient of the stacked A, f32 `[line, k]`, of each row group.
    d_lora_a: [Address; 2],
    /// Gradient of B, f32 `[n, r]`, of each projection and row group.
    d_lora_b: &'a [[Address; 2]],
}

impl Stacked {
    /// Number of rows, number of columns and dtype of the input.
    fn input(&self) -> (usize, usize, DType) {
        match &self.layers {
            Layers::Whole(layers) => (layers[0].t, layers[0].k, layers[0].dtype),
            Layers::Grouped(layers) => (layers[0].t, layers[0].k, layers[0].dtype),
        }
    }

    /// Number of output columns of each projection.
    fn widths(&self) -> Vec<usize> {
        match &self.layers {
            Layers::Whole(layers) => layers.iter().map(|layer| layer.n).collect(),
            Layers::Grouped(layers) => layers.iter().map(|layer| layer.n).collect(),
        }
    }

    /// Rows of the stacked A that each projection takes, and the ranks of its groups.
    fn ranks(&self) -> Vec<(usize, Vec<Option<usize>>)> {
        match &self.layers {
            Layers::Whole(layers) => {
                let own = layers.iter();
                own.map(|layer| (layer.padded_rank(), vec![Some(layer.r)]))
                    .collect()
            }
            Layers::Grouped(layers) => {
                let rank = |group: &AdaptedGroup| group.adapter.map(|adapter| adapter.r);
                let own = layers.iter();
                own.map(|layer| (layer.line(), layer.groups.iter().map(rank).collect()))
                    .collect()
            }
        }
    }

    /// Whether each of the two row groups has adapters.
    fn adapted(&self) -> [bool; 2] {
        match &self.layers {
            Layers::Whole(_) => [true, false],
            Layers::Grouped(_) => self.adapters.map(|adapters| adapters != Address::NULL),
        }
    }

    /// The layers on `len` of their rows, from row `first` on. Layers of row groups are not cut: they keep all rows.
    fn rows(&self, first: usize, len: usize) -> Self {
        let layers = match &self.layers {
            Layers::Whole(layers) => {
                Layers::Whole(layers.iter().map(|layer| layer.rows(first, len)).collect())
            }
            Layers::Grouped(layers) => Layers::Grouped(layers.clone()),
        };
        Self {
            layers,
            held: Vec::new(),
            ..*self
        }
    }

    /// `y` of each projection; `s [t, line]` is written. Without `y` only `s`.
    fn forward<S: Step>(
        &self,
        s: Address,
        y: &[Address],
        multiprocessors: u32,
        space: &mut Workspace,
    ) -> Option<Vec<S>> {
        match &self.layers {
            Layers::Whole(layers) => {
                let stacked = self.adapters[0];
                SharedLora { layers, stacked }.forward(s, y, multiprocessors, space)
            }
            Layers::Grouped(layers) => {
                let stacked = self.adapters;
                let layers = SharedGroupedLora { layers, stacked };
                steps(layers.forward(s, y, multiprocessors, space))
            }
        }
    }

    fn backward<S: Step>(
        &self,
        dy: &[Address],
        s: Address,
        to: &Gradients<'_>,
        multiprocessors: u32,
        space: &mut Workspace,
    ) -> Option<Vec<S>> {
        match &self.layers {
            Layers::Whole(layers) => {
                let stacked = self.adapters[0];
                let d_lora_b: Vec<Address> = to.d_lora_b.iter().map(|groups| groups[0]).collect();
                let to = shared_lora::Gradients {
                    dx: to.dx,
                    d_stacked: to.d_lora_a[0],
                    d_lora_b: &d_lora_b,
                };
                SharedLora { layers, stacked }.backward(dy, s, to, multiprocessors, space)
            }
            Layers::Grouped(layers) => {
                let stacked = self.adapters;
                let to = shared_grouped_lora::Gradients {
                    dx: to.dx,
                    d_stacked: to.d_lora_a,
                    d_lora_b: to.d_lora_b,
                };
                let layers = SharedGroupedLora { layers, stacked };
                steps(layers.backward(dy, s, to, multiprocessors, space))
            }
        }
    }
}

/// Launches as steps.
fn steps<S: Step>(launches: Option<Vec<Launch>>) -> Option<Vec<S>> {
    Some(launches?.into_iter().map(S::from).collect())
}

impl CudaBackend {
    /// The projections with their adapters stacked; `None` where these cannot share.
    fn stack(&self, op: &'static str, args: &AdaptedLinearArgs<'_>) -> Result<Option<Stacked>> {
        match args.row_groups {
            None => self.stack_whole(op, args),
            Some(_) => self.stack_grouped(op, args),
        }
    }

    /// Adapters cannot share with unlike dtypes or factors, nor where a projection has no adapter or one without ranks.
    fn stack_whole(
        &self,
        op: &'static str,
        args: &AdaptedLinearArgs<'_>,
    ) -> Result<Option<Stacked>> {
        let dtype = args.x.dtype();
        let all = args.projections.iter();
        let all = all.map(|layers| layers[0].adapted(args.x));
        let Some(all) = all.collect::<Option<Vec<LoraArgs<'_>>>>() else {
            return Ok(None);
        };
        for own in &all {
            let tensors = [own.x, own.weight, own.lora_a, own.lora_b];
            let mut tensors = tensors.into_iter().chain(own.bias);
            let fits = tensors.all(|x| x.dtype() == dtype)
                && own.scale.to_bits() == all[0].scale.to_bits()
                && check::lora(own)?.r > 0;
            if !fits {
                return Ok(None);
            }
        }
        let x = self.operand(op, args.x, dtype)?;
        let (mut layers, mut held) = (Vec::with_capacity(all.len()), vec![x.clone()]);
        for own in all {
            let own = LoraArgs { x: &x, ..own };
            let (layer, tensors) = self.layer(op, &own, check::lora(&own)?, dtype)?;
            layers.push(layer);
            held.extend(tensors);
        }
        let adapters = match &*layers {
            _ if !shared_lora::alike(&layers) => Address::NULL,
            [layer] if layer.padded_rank() == layer.r => layer.lora_a,
            _ => {
                let own = layers.iter();
                let own = own.map(|layer| (layer.lora_a, [layer.r, layer.padded_rank()]));
                let own: Vec<_> = own.collect();
                let stacked = self.stack_rows(op, &own, args.x.shape().last(), dtype)?;
                let at = self.address(op, &stacked)?;
                held.push(stacked);
                at
            }
        };
        Ok(Some(Stacked {
            line: shared_lora::line(&layers),
            layers: Layers::Whole(layers),
            adapters: [adapters, Address::NULL],
            held,
        }))
    }

    /// A single projection is not stacked: it needs no copy of its adapters.
    fn stack_grouped(
        &self,
        op: &'static str,
        args: &AdaptedLinearArgs<'_>,
    ) -> Result<Option<Stacked>> {
        if args.projections.len() == 1 {
            return Ok(None);
        }
        let (mut layers, mut held) = (Vec::with_capacity(args.projections.len()), Vec::new());
        for own in args.projections {
            let grouped = args.grouped(own);
            let own = grouped.map(|grouped| self.grouped_layers(op, &grouped));
            let Some((layer, tensors)) = own.transpose()?.flatten() else {
                return Ok(None);
            };
            layers.push(layer);
            held.extend(tensors);
        }
        if !shared_grouped_lora::share(&layers) {
            return Ok(None);
        }
        let (k, dtype) = (layers[0].k, layers[0].dtype);
        let mut adapters = [Address::NULL; 2];
        for (i, to) in adapters.iter_mut().enumerate() {
            let own = layers.iter().filter_map(|layer| {
                let adapter = layer.groups[i].adapter?;
                Some((adapter.lora_a, [adapter.r, layer.line()]))
            });
            let own: Vec<_> = own.collect();
            if !own.is_empty() {
                let all = self.stack_rows(op, &own, k, dtype)?;
                *to = self.address(op, &all)?;
                held.push(all);
            }
        }
        Ok(Some(Stacked {
            line: shared_grouped_lora::line(&layers),
            layers: Layers::Grouped(layers),
            adapters,
            held,
        }))
    }

    /// Matrices of `k` columns one above the other. Each has its own rows, and rows of zeros up to its padded number.
    fn stack_rows(
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
            // SAFETY: the matrix has `own` rows of `k` elements, and so many are behind `to` in the tensor of all padded
            // rows.
            let queued = unsafe { self.executor.copy(*from, to, *own as u64 * row) };
            self.counted(op, queued)?;
            to = Address(to.0 + *padded as u64 * row);
        }
        Ok(stacked)
    }

    /// A projection over row groups in one dtype, with the tensors of the addresses. `None` without a kernel for
    /// it: no adapter, one without ranks, operands of unlike dtypes.
    fn grouped_layers(
        &self,
        op: &'static str,
        args: &GroupedLayers<'_>,
    ) -> Result<Option<(GroupedLora, Vec<Tensor>)>> {
        let (x, layers) = (args.x, &args.layers);
        let rank = |layer: &AdaptedLayer<'_>| layer.adapter.map(|adapter| adapter.lora_a.dim(0));
        let ranks = layers.each_ref().map(rank);
        let operands = layers.iter().flat_map(|layer| {
            let halves = layer.adapter.map(|own| [own.lora_a, own.lora_b]);
            let base = [Some(layer.weight), layer.bias].into_iter().flatten();
            base.chain(halves.into_iter().flatten())
        });
        let dtype = common([x].into_iter().chain(operands));
        if ranks == [None; 2] || ranks.contains(&Some(0)) || dtype != x.dtype() {
            return Ok(None);
        }
        let mut held = Vec::with_capacity(9);
        let mut place = |x: &Tensor| -> Result<Address> {
            let x = self.operand(op, x, dtype)?;
            let address = self.address(op, &x)?;
            held.push(x);
            Ok(address)
        };
        let at = place(x)?;
        let mut group = |i: usize| -> Result<AdaptedGroup> {
            let (layer, rows) = (&layers[i], args.rows[i]);
            let adapter = match (layer.adapter, ranks[i]) {
                (Some(adapter), Some(r)) => Some(Adapter {
                    r,
                    lora_a: place(adapter.lora_a)?,
                    lora_b: place(adapter.lora_b)?,
                    scale: adapter.scale,
                    dropped: self.dropped(op, adapter.dropout)?,
                }),
                _ => None,
            };
            Ok(AdaptedGroup {
                rows: self.address(op, rows)?,
                m: rows.elems(),
                weight: place(layer.weight)?,
                bias: layer.bias.map_or(Ok(Address::NULL), &mut place)?,
                adapter,
            })
        };
        let layers = GroupedLora {
            dtype,
            t: x.dim(0),
            n: layers[0].weight.dim(0),
            k: x.dim(1),
            x: at,
            groups: [group(0)?, group(1)?],
        };
        Ok(Some((layers, held)))
    }

    /// Inner outputs `[t, line]` of a forward call, or workspace for them if there are none. Other shapes are an error.
    fn inner(
        &self,
        op: &'static str,
        inner: &[Tensor],
        [t, line]: [usize; 2],
        dtype: DType,
    ) -> Result<(Tensor, bool)> {
        match inner {
            [] => Ok((self.uninit([t, line], dtype, Tag::Workspace)?, false)),
            [inner] if inner.shape() == [t, line].into() => Ok((inner.clone(), true)),
            inner => shape_error(op, format!("{inner:?} of other layers")),
        }
    }

    pub(super) fn adapted_op(&self, args: &AdaptedLinearArgs<'_>) -> Result<AdaptedLinear> {
        const OP: &str = "adapted_linear";
        adapted::check(OP, args)?;
        let Some(stacked) = self.stack(OP, args)? else {
            return adapted::forward(self, args);
        };
        let (t, _, dtype) = stacked.input();
        let outputs = stacked.widths().into_iter();
        let outputs = outputs.map(|n| self.output([t, n], dtype));
        let y: Vec<Tensor> = outputs.collect::<Result<_>>()?;
        let inner = self.output([t, stacked.line], dtype)?;
        let sms = self.executor.multiprocessors();
        for (first, len) in self.parts_of(args) {
            let to = y.iter().map(|y| self.row(OP, y, first));
            let to: Vec<Address> = to.collect::<Result<_>>()?;
            let (part, s) = (stacked.rows(first, len), self.row(OP, &inner, first)?);
            self.run_layers(
                OP,
                |space| part.forward(s, &to, sms, space),
                |space| part.forward(s, &to, sms, space),
            )?;
        }
        drop(stacked.held);
        Ok(AdaptedLinear {
            y,
            inner: vec![inner],
        })
    }

    /// Gradients of all rows, or of a part of them. Those of the adapters are added to `sums`, empty for the first part.
    pub(super) fn adapted_backward_op(
        &self,
        args: &AdaptedLinearGradArgs<'_>,
        mut sums: AdapterSums,
        part: SumPart,
    ) -> Result<AdaptedLinearGrads> {
        const OP: &str = "adapted_linear_backward";
        adapted::check_backward(OP, args)?;
        let x = args.forward.x;
        let unbiased = args.forward.projections.iter();
        let unbiased = unbiased.map(|own| own.iter().map(|layer| layer.unbiased()).collect());
        let unbiased: Vec<Vec<AdaptedLayer<'_>>> = unbiased.collect();
        let unbiased = AdaptedLinearArgs {
            projections: &unbiased,
            ..args.forward
        };
        let stacked = match args.dy.iter().all(|dy| dy.dtype() == x.dtype()) {
            true => self.stack(OP, &unbiased)?,
            false => None,
        };
        let Some(stacked) = stacked else {
            return match args.forward.row_groups {
                Some(_) => adapted::backward(self, args),
                None => adapted::backward_part(self, args, sums, part),
            };
        };
        let ((t, _, dtype), sms) = (stacked.input(), self.executor.multiprocessors());
        let (inner, known) = self.inner(OP, args.inner, [t, stacked.line], dtype)?;
        let dy = args.dy.iter().map(|dy| self.operand(OP, dy, dtype));
        let dy: Vec<Tensor> = dy.collect::<Result<_>>()?;
        let dx = match args.need_dx {
            true => Some(self.output(x.shape(), dtype)?),
            false => None,
        };
        for (first, len) in self.parts_of(&args.forward) {
            let (part, s) = (stacked.rows(first, len), self.row(OP, &inner, first)?);
            if !known {
                self.run_in_workspace(OP, |space| part.forward(s, &[], sms, space))?;
            }
            let dy_at = dy.iter().map(|dy| self.row(OP, dy, first));
            let dy_at: Vec<Address> = dy_at.collect::<Result<_>>()?;
            let dx = dx.as_ref();
            let dx = dx.map_or(Ok(Address::NULL), |dx| self.row(OP, dx, first))?;
            let own = AdaptedLinearGrads {
                dx: None,
                adapters: self.part_gradients(&part, &dy_at, s, dx)?,
            };
            sums = adapted::plus(self, own, sums)?.adapters;
        }
        drop((stacked.held, dy));
        Ok(AdaptedLinearGrads { dx, adapters: sums })
    }

    /// Gradients of the adapters of all rows of `stacked`. The gradient of its input is written to `dx`.
    fn part_gradients(
        &self,
        stacked: &Stacked,
        dy: &[Address],
        s: Address,
        dx: Address,
    ) -> Result<AdapterSums> {
        const OP: &str = "adapted_linear_backward";
        let ((_, k, _), sms) = (stacked.input(), self.executor.multiprocessors());
        let mut d_stacked = [None, None];
        for (to, adapted) in d_stacked.iter_mut().zip(stacked.adapted()) {
            if adapted {
                *to = Some(self.gradient([stacked.line, k])?);
            }
        }
        let (mut adapters, mut b_at, mut first) = (Vec::new(), Vec::new(), 0);
        for ((columns, ranks), n) in stacked.ranks().into_iter().zip(stacked.widths()) {
            let (mut own, mut places) = (vec![None; ranks.len()], [Address::NULL; 2]);
            for (i, r) in ranks.into_iter().enumerate() {
                let (Some(r), Some(d_stacked)) = (r, &d_stacked[i]) else {
                    continue;
                };
                let d_lora_b = self.gradient([n, r])?;
                places[i] = self.address(OP, &d_lora_b)?;
                // A view: the rows of the others live as long.
                own[i] = Some([d_stacked.narrow(first, r)?, d_lora_b]);
            }
            adapters.push(own);
            b_at.push(places);
            first += columns;
        }
        let place = |x: Option<&Tensor>| x.map_or(Ok(Address::NULL), |x| self.address(OP, x));
        let [whole, second] = &d_stacked;
        let gradients = Gradients {
            dx,
            d_lora_a: [place(whole.as_ref())?, place(second.as_ref())?],
            d_lora_b: &b_at,
        };
        self.run_layers(
            OP,
            |space| stacked.backward(dy, s, &gradients, sms, space),
            |space| stacked.backward(dy, s, &gradients, sms, space),
        )?;
        Ok(adapters)
    }

    /// The parts of the rows that layers are computed in. Row groups are one part.
    fn parts_of(&self, args: &AdaptedLinearArgs<'_>) -> Vec<(usize, usize)> {
        let t = args.x.shape().rows();
        match args.row_groups {
            Some(_) => vec![(0, t)],
            None => self.stretches(t).collect(),
        }
    }
}

impl AdaptedRows for CudaBackend {
    fn layer(&self, args: &LoraArgs<'_>) -> Result<Tensor> {
        self.lora_op(args, check::lora(args)?)
    }

    fn layer_backward(&self, args: &LoraArgs<'_>, dy: &Tensor, need_dx: bool) -> Result<LoraGrads> {
        self.lora_backward_op(args, dy, need_dx, check::lora(args)?, None)
    }

    fn grouped(&self, args: &GroupedLayers<'_>) -> Result<(Tensor, Option<Tensor>)> {
        const OP: &str = "adapted_linear";
        let Some((layers, held)) = self.grouped_layers(OP, args)? else {
            return Ok((adapted::gathered(self, args)?, None));
        };
        let y = self.output([layers.t, layers.n], layers.dtype)?;
        let inner = self.output([layers.t, layers.line()], layers.dtype)?;
        let (s, to) = (self.address(OP, &inner)?, self.address(OP, &y)?);
        let sms = self.executor.multiprocessors();
        self.run_in_workspace(OP, |space| layers.forward(s, to, sms, space))?;
        drop(held);
        Ok((y, Some(inner)))
    }

    fn grouped_backward(
        &self,
        args: &GroupedLayers<'_>,
        dy: &Tensor,
        inner: Option<&Tensor>,
        need_dx: bool,
    ) -> Result<(Option<Tensor>, Vec<Option<AdapterGrads>>)> {
        const OP: &str = "adapted_linear_backward";
        let x = args.x;
        let unbiased = GroupedLayers {
            layers: args.layers.map(AdaptedLayer::unbiased),
            ..*args
        };
        let layers = match dy.dtype() == x.dtype() {
            true => self.grouped_layers(OP, &unbiased)?,
            false => None,
        };
        let Some((layers, held)) = layers else {
            return adapted::gathered_backward(self, args, dy, need_dx);
        };
        let (dtype, sms) = (layers.dtype, self.executor.multiprocessors());
        let inner = inner.map_or(&[][..], std::slice::from_ref);
        let (inner, known) = self.inner(OP, inner, [layers.t, layers.line()], dtype)?;
        let s = self.address(OP, &inner)?;
        if !known {
            self.run_in_workspace(OP, |space| layers.inner(s, sms, space))?;
        }
        let dy = self.operand(OP, dy, dtype)?;
        let dx = match need_dx {
            true => Some(self.output(x.shape(), dtype)?),
            false => None,
        };
        let mut adapters = vec![None, None];
        let mut places = [[Address::NULL; 2]; 2];
        for ((to, places), group) in adapters.iter_mut().zip(&mut places).zip(&layers.groups) {
            if let Some(Adapter { r, .. }) = group.adapter {
                let halves = [self.gradient([r, layers.k])?, self.gradient([layers.n, r])?];
                *places = [self.address(OP, &halves[0])?, self.address(OP, &halves[1])?];
                *to = Some(halves);
            }
        }
        let gradients = grouped_lora::Gradients {
            dx: match &dx {
                Some(dx) => self.address(OP, dx)?,
                None => Address::NULL,
            },
            adapters: places,
        };
        let dy_at = self.address(OP, &dy)?;
        self.run_in_workspace(OP, |space| layers.backward(dy_at, s, gradients, sms, space))?;
        drop((held, dy));
        Ok((dx, adapters))
    }
}

impl AdaptedParts for CudaBackend {
    fn layer_backward_part(
        &self,
        args: &LoraArgs<'_>,
        dy: &Tensor,
        need_dx: bool,
        sum: Option<AdapterGrads>,
        _part: SumPart,
    ) -> Result<LoraGrads> {
        self.lora_backward_op(args, dy, need_dx, check::lora(args)?, sum)
    }
}
