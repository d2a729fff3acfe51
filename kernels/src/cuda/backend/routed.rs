//! Two linear layers over a partition of rows, without copies of the rows.

use super::CudaBackend;
use super::products::common;
use super::rows::numbers;
use crate::RoutedArgs;
use crate::backend::Transpose;
use crate::check::Sizes;
use crate::cuda::launch::Address;
use crate::cuda::ops::routed::{Group, OfRows, Routed};
use crate::error::Result;
use crate::routed::partition;
use crate::{Backend, Shape, Tensor};

impl CudaBackend {
    pub(super) fn routed_op(&self, args: &RoutedArgs<'_>, shape: Shape) -> Result<Tensor> {
        const OP: &str = "routed_matmul";
        let (t, k, n) = (args.a.dim(0), args.a.dim(1), shape.last());
        partition(args, t)?;
        let operands = args.groups.iter().flat_map(|g| [Some(g.b), g.bias]);
        let dtype = common([args.a].into_iter().chain(operands.flatten()));
        let a = self.operand(OP, args.a, dtype)?;
        let y = self.output(shape, dtype)?;
        let mut held = Vec::with_capacity(4);
        let mut groups = [Group {
            rows: Address::NULL,
            m: 0,
            b: Address::NULL,
            bias: Address::NULL,
        }; 2];
        for (to, group) in groups.iter_mut().zip(args.groups) {
            let mut place = |x: &Tensor| -> Result<Address> {
                let x = self.operand(OP, x, dtype)?;
                let address = self.address(OP, &x)?;
                held.push(x);
                Ok(address)
            };
            *to = Group {
                rows: self.address(OP, group.rows)?,
                m: group.rows.elems(),
                b: place(group.b)?,
                bias: group.bias.map_or(Ok(Address::NULL), place)?,
            };
        }
        let routed = Routed {
            dtype,
            transpose_b: args.transpose_b == Transpose::No,
            t,
            n,
            k,
            a: self.address(OP, &a)?,
            groups,
            y: self.address(OP, &y)?,
        };
        let multiprocessors = self.executor.multiprocessors();
        let tile = routed.choose(multiprocessors);
        self.run_in_workspace(OP, |space| routed.launches(tile, multiprocessors, space))?;
        drop(held);
        self.cast(&y, args.a.dtype())
    }

    pub(super) fn of_rows_op(
        &self,
        a: &Tensor,
        b: &Tensor,
        rows: &Tensor,
        Sizes { m, n, k }: Sizes,
    ) -> Result<Tensor> {
        const OP: &str = "matmul_of_rows";
        numbers(OP, rows, a.dim(0))?;
        let dtype = common([a, b]);
        let (a, b) = (self.operand(OP, a, dtype)?, self.operand(OP, b, dtype)?);
        let y = self.gradient([m, n])?;
        let product = OfRows {
            dtype,
            t: a.dim(0),
            m,
            n,
            rows: self.address(OP, rows)?,
            k,
            a: self.address(OP, &a)?,
            b: self.address(OP, &b)?,
            y: self.address(OP, &y)?,
        };
        let multiprocessors = self.executor.multiprocessors();
        let choice = product.choose(multiprocessors);
        self.run_in_workspace(OP, |space| product.launches(choice, multiprocessors, space))?;
        Ok(y)
    }
}
