//! Matrix products, and single linear layers with adapters.

use super::CudaBackend;
use super::library_step::LibraryStep;
use crate::adapted::{AdapterDropout, AdapterGrads, LoraArgs, LoraGrads};
use crate::backend::{MatmulArgs, Transpose};
use crate::check::{LoraSizes, Sizes};
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::{LibraryUse, Multiply, WORKSPACE_BYTES};
use crate::cuda::ops::lora_linear::{Gradients, LoraLinear};
use crate::cuda::ops::pointwise::{self, Dropped};
use crate::cuda::ops::product::{Product, Term};
use crate::cuda::ops::workspace::Workspace;
use crate::error::Result;
use crate::{Backend, DType, Tag, Tensor};

/// The dtype of all operands if they share one, otherwise f32, to which every other is widened without loss.
pub(super) fn common<'t>(operands: impl IntoIterator<Item = &'t Tensor>) -> DType {
    let mut operands = operands.into_iter();
    let first = operands.next().map_or(DType::F32, Tensor::dtype);
    if operands.all(|x| x.dtype() == first) {
        first
    } else {
        DType::F32
    }
}

impl CudaBackend {
    /// Address of the row `first` of `x`, whose leading axes are folded into rows.
    pub(super) fn row(&self, op: &'static str, x: &Tensor, first: usize) -> Result<Address> {
        let line = x.shape().last() * x.dtype().size_bytes();
        Ok(self.address(op, x)?.after(first * line))
    }

    /// Runs one product, with the library if it supports the product.
    pub(super) fn product(&self, op: &'static str, product: &Product) -> Result<()> {
        self.product_or(op, product, |multiply| Some(*multiply))?;
        Ok(())
    }

    /// Adds a product to `sum` if the library can do both in one call (returns `true`), else writes it to
    /// `product.y`. `sum` is f32 and as large as `y`.
    pub(super) fn product_added_to(
        &self,
        op: &'static str,
        product: &Product,
        sum: Address,
    ) -> Result<bool> {
        self.product_or(op, product, |multiply| multiply.added_to(sum))
    }

    /// Runs the product `library` if the library supports it (returns `true`), else `product` with the own kernel.
    /// Scratch memory is enough for either, because only the run knows what the library refuses.
    fn product_or(
        &self,
        op: &'static str,
        product: &Product,
        library: impl Fn(&Multiply) -> Option<Multiply>,
    ) -> Result<bool> {
        let multiprocessors = self.executor.multiprocessors();
        let choice = product.choose(multiprocessors);
        let own = |space: &mut Workspace| product.launches(choice, multiprocessors, space);
        let multiply = match self.executor.library() {
            LibraryUse::Nothing => None,
            _ => Multiply::of(product).as_ref().and_then(library),
        };
        let Some(multiply) = multiply else {
            self.run_in_workspace(op, own)?;
            return Ok(false);
        };
        let mut counted = Workspace::new(Address::NULL);
        // The library may support a product that has no own kernel.
        let bytes = own(&mut counted).map_or(0, |_| counted.bytes());
        let scratch = self.scratch(bytes.max(WORKSPACE_BYTES) + 256)?;
        let start = Address(self.address(op, &scratch)?.0.next_multiple_of(256));
        // SAFETY: the addresses are those of the product, built from tensors that the operation holds. The scratch
        // memory has room for the workspace after an aligned start.
        let queued = unsafe { self.executor.multiply(&multiply, start, WORKSPACE_BYTES) };
        if self.counted(op, queued)? {
            return Ok(true);
        }
        self.run_some(op, own(&mut Workspace::new(start)))?;
        Ok(false)
    }

    /// Runs the steps of adapted layers: `library` where the library computes these, else `own`.
    pub(super) fn run_layers(
        &self,
        op: &'static str,
        own: impl Fn(&mut Workspace) -> Option<Vec<Launch>>,
        library: impl Fn(&mut Workspace) -> Option<Vec<LibraryStep>>,
    ) -> Result<()> {
        if self.executor.library() < LibraryUse::AdaptedLayers {
            return self.run_in_workspace(op, own);
        }
        let (_scratch, steps) = self.in_workspace(op, library)?;
        for step in self.possible(op, steps)? {
            match step {
                LibraryStep::Launch(launch) => self.run(op, [launch])?,
                LibraryStep::Product {
                    calls,
                    workspace,
                    own,
                } => {
                    if !self.multiply_all(op, &calls, workspace)? {
                        self.run(op, own)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs the calls of a product. `false`, if the library refuses one; its result is then undefined.
    fn multiply_all(
        &self,
        op: &'static str,
        calls: &[Multiply],
        workspace: Address,
    ) -> Result<bool> {
        for call in calls {
            // SAFETY: the addresses are those of a product of tensors that the operation holds. The scratch memory is in
            // the operation's workspace.
            let queued = unsafe { self.executor.multiply(call, workspace, WORKSPACE_BYTES) };
            if !self.counted(op, queued)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The product, or `sum` with the product added in place. `sum` is f32 `[m, n]`, as the result then is. The rows of `a`,
    /// which the product maps or sums over, are computed in stretches.
    pub(super) fn matmul_op(
        &self,
        args: &MatmulArgs<'_>,
        sizes: Sizes,
        mut sum: Option<Tensor>,
    ) -> Result<Tensor> {
        const OP: &str = "matmul";
        let Sizes { m, n, k } = sizes;
        let dtype = common([args.a, args.b].into_iter().chain(args.bias));
        let a = self.operand(OP, args.a, dtype)?;
        let b = self.operand(OP, args.b, dtype)?;
        let bias = args.bias.map(|x| self.operand(OP, x, dtype)).transpose()?;
        let (transpose_a, transpose_b) = (
            args.transpose_a == Transpose::Yes,
            args.transpose_b == Transpose::No,
        );
        let sums = transpose_a || sum.is_some();
        let parts: Vec<_> = self.stretches(if sums { k } else { m }).collect();
        // A product is stored in its operands' dtype or in f32.
        let stored = match args.out == dtype && !(sums && parts.len() > 1) {
            true => dtype,
            false => DType::F32,
        };
        let (a_at, b_at) = (self.address(OP, &a)?, self.address(OP, &b)?);
        let bias_at = bias.as_ref();
        let bias_at = bias_at.map_or(Ok(Address::NULL), |bias| self.address(OP, bias))?;
        let size = dtype.size_bytes();
        // The product of the stretch from row `first` on, written to `y`.
        let product = |(first, len): (usize, usize), y: Address| {
            let mut term = Term {
                a: a_at,
                a_line: if transpose_a { m } else { k },
                b: b_at,
                b_line: if transpose_b { n } else { k },
                k: if sums { len } else { k },
            };
            let line = if sums && !transpose_a { 1 } else { term.a_line };
            term.a = term.a.after(first * line * size);
            if sums {
                let line = if transpose_b { n } else { 1 };
                term.b = term.b.after(first * line * size);
            }
            Product {
                dtype,
                out: stored,
                transpose_a,
                transpose_b,
                m: if sums { m } else { len },
                n,
                b_rows: n,
                terms: [(term.k > 0).then_some(term), None],
                bias: bias_at,
                scale: 1.0,
                y,
                y_line: n,
            }
        };
        if !sums {
            let y = self.output([m, n], stored)?;
            let at = self.address(OP, &y)?;
            for part in parts {
                let to = at.after(part.0 * n * stored.size_bytes());
                self.product(OP, &product(part, to))?;
            }
            return self.cast(&y, args.out);
        }
        for part in parts {
            let y = match sum.is_some() {
                true => self.uninit([m, n], stored, Tag::Workspace)?,
                false => self.output([m, n], stored)?,
            };
            let product = product(part, self.address(OP, &y)?);
            let Some(sum) = &sum else {
                self.product(OP, &product)?;
                sum = Some(y);
                continue;
            };
            let to = self.address(OP, sum)?;
            if !self.product_added_to(OP, &product, to)? {
                let n = (m * n) as u64;
                let launch = pointwise::add(DType::F32, to, product.y, to, n);
                self.run_some(OP, launch.map(|launch| [launch]))?;
            }
        }
        self.cast(&sum.expect("at least one stretch"), args.out)
    }

    /// The layer in one dtype, with the tensors of its addresses.
    pub(super) fn layer(
        &self,
        op: &'static str,
        args: &LoraArgs<'_>,
        sizes: LoraSizes,
        dtype: DType,
    ) -> Result<(LoraLinear, Vec<Tensor>)> {
        let mut held = Vec::with_capacity(5);
        let dropped = self.dropped(op, args.dropout)?;
        let mut place = |x: &Tensor| -> Result<Address> {
            let x = self.operand(op, x, dtype)?;
            let address = self.address(op, &x)?;
            held.push(x);
            Ok(address)
        };
        let layer = LoraLinear {
            dtype,
            t: sizes.t,
            n: sizes.n,
            k: sizes.k,
            r: sizes.r,
            x: place(args.x)?,
            weight: place(args.weight)?,
            bias: args.bias.map_or(Ok(Address::NULL), &mut place)?,
            lora_a: place(args.lora_a)?,
            lora_b: place(args.lora_b)?,
            scale: args.scale,
            dropped,
        };
        held.extend(args.dropout.map(|dropout| dropout.rows.clone()));
        Ok((layer, held))
    }

    /// Converts an adapter's dropout to kernel operands: the tensor of row words becomes its device address.
    pub(super) fn dropped(
        &self,
        op: &'static str,
        dropout: Option<AdapterDropout<'_>>,
    ) -> Result<Option<Dropped>> {
        let dropped = |AdapterDropout { rows, key, p }| -> Result<Dropped> {
            let rows = self.address(op, rows)?;
            Ok(Dropped { rows, key, p })
        };
        dropout.map(dropped).transpose()
    }

    pub(super) fn lora_op(&self, args: &LoraArgs<'_>, sizes: LoraSizes) -> Result<Tensor> {
        const OP: &str = "adapted_linear";
        let all = [args.x, args.weight, args.lora_a, args.lora_b];
        let dtype = common(all.into_iter().chain(args.bias));
        let (layer, held) = self.layer(OP, args, sizes, dtype)?;
        let y = self.output([sizes.t, sizes.n], dtype)?;
        let multiprocessors = self.executor.multiprocessors();
        for (first, len) in self.stretches(sizes.t) {
            let (layer, at) = (layer.rows(first, len), self.row(OP, &y, first)?);
            self.run_layers(
                OP,
                |space| layer.forward(at, multiprocessors, space),
                |space| layer.forward(at, multiprocessors, space),
            )?;
        }
        drop(held);
        self.cast(&y, args.x.dtype())
    }

    pub(super) fn lora_backward_op(
        &self,
        args: &LoraArgs<'_>,
        dy: &Tensor,
        need_dx: bool,
        sizes: LoraSizes,
        mut sum: Option<AdapterGrads>,
    ) -> Result<LoraGrads> {
        const OP: &str = "adapted_linear_backward";
        let LoraSizes { t, n, k, r } = sizes;
        let all = [args.x, args.weight, args.lora_a, args.lora_b, dy];
        let dtype = common(all);
        // The bias does not affect the gradients.
        let unbiased = LoraArgs {
            bias: None,
            ..*args
        };
        let (layer, held) = self.layer(OP, &unbiased, sizes, dtype)?;
        let dy = self.operand(OP, dy, dtype)?;
        let dx = match need_dx {
            true => Some(self.output(args.x.shape(), dtype)?),
            false => None,
        };
        let multiprocessors = self.executor.multiprocessors();
        for (first, len) in self.stretches(t) {
            let (d_lora_a, d_lora_b) = (self.gradient([r, k])?, self.gradient([n, r])?);
            let (layer, dy_at) = (layer.rows(first, len), self.row(OP, &dy, first)?);
            let dx = dx.as_ref();
            let gradients = Gradients {
                dx: dx.map_or(Ok(Address::NULL), |dx| self.row(OP, dx, first))?,
                d_lora_a: self.address(OP, &d_lora_a)?,
                d_lora_b: self.address(OP, &d_lora_b)?,
            };
            self.run_layers(
                OP,
                |space| layer.backward(dy_at, gradients, multiprocessors, space),
                |space| layer.backward(dy_at, gradients, multiprocessors, space),
            )?;
            sum = Some(match sum {
                Some([a, b]) => [self.add(&a, &d_lora_a)?, self.add(&b, &d_lora_b)?],
                None => [d_lora_a, d_lora_b],
            });
        }
        let [d_lora_a, d_lora_b] = sum.expect("at least one stretch");
        drop(held);
        let dx = dx.map(|dx| self.cast(&dx, args.x.dtype())).transpose()?;
        Ok(LoraGrads {
            dx,
            d_lora_a,
            d_lora_b,
        })
    }
}
