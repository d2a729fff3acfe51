//! Grouped matrix products: rows are read and written in place, without gathered copies.

use super::CudaBackend;
use super::products::common;
use super::rows::numbers;
use crate::backend::Transpose;
use crate::check::Sizes;
use crate::cuda::launch::Address;
use crate::cuda::ops::grouped::{Group, Grouped, OfRows};
use crate::cuda::ops::rows;
use crate::error::Result;
use crate::grouped::{GroupedMatmulArgs, partition, split};
use crate::pool::Tag;
use crate::tensor::OnDevice;
use crate::{Backend, DType, Shape, Tensor};

impl CudaBackend {
    pub(super) fn partition_rows_op(&self, second: &[bool]) -> Result<[Tensor; 2]> {
        const OP: &str = "partition_rows";
        let lists = split(second);
        let [first, n] = [lists[0].len(), second.len()];
        let mask = self.uninit([n], DType::U8, Tag::Workspace)?;
        let bytes: Vec<u8> = second.iter().map(|second| u8::from(*second)).collect();
        self.write(OP, &mask, &bytes)?;
        // The host stores its copy of the lists, for later checks of row numbers.
        let known = lists.concat();
        let place = OnDevice {
            memory: self.memory.clone(),
            placed: self.pool.place(4 * n, Tag::Activations)?,
            known: Some(bytemuck::cast_slice(&known).into()),
        };
        let rows = Tensor::on_device(place, [n].into(), DType::I32);
        if n > 0 {
            let (from, to) = (self.address(OP, &mask)?, self.address(OP, &rows)?);
            self.run_some(
                OP,
                rows::partition_rows(from, n, first, to).map(|one| [one]),
            )?;
        }
        Ok([rows.narrow(0, first)?, rows.narrow(first, n - first)?])
    }

    pub(super) fn grouped_op(&self, args: &GroupedMatmulArgs<'_>, shape: Shape) -> Result<Tensor> {
        const OP: &str = "grouped_matmul";
        let (t, k, n) = (args.a.dim(0), args.a.dim(1), shape.last());
        partition(OP, args.groups.map(|group| group.rows), t)?;
        let operands = args.groups.iter().flat_map(|g| [Some(g.b), g.bias]);
        let dtype = common([args.a].into_iter().chain(operands.flatten()));
        let a = self.operand(OP, args.a, dtype)?;
        let y = self.output(shape, dtype)?;
        let mut held = Vec::with_capacity(4);
        let mut groups = [Group::EMPTY; 2];
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
                b_rows: n,
                bias: group.bias.map_or(Ok(Address::NULL), place)?,
                ..Group::EMPTY
            };
        }
        let grouped = Grouped {
            dtype,
            transpose_b: args.transpose_b == Transpose::No,
            t,
            n,
            k,
            a: self.address(OP, &a)?,
            s: Address::NULL,
            s_line: 0,
            groups,
            y: self.address(OP, &y)?,
            y_line: n,
        };
        let multiprocessors = self.executor.multiprocessors();
        let tile = grouped.choose(multiprocessors);
        self.run_in_workspace(OP, |space| grouped.launches(tile, multiprocessors, space))?;
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
            a_line: m,
            b: self.address(OP, &b)?,
            b_line: n,
            y: self.address(OP, &y)?,
        };
        let multiprocessors = self.executor.multiprocessors();
        let choice = product.choose(multiprocessors);
        self.run_in_workspace(OP, |space| product.launches(choice, multiprocessors, space))?;
        Ok(y)
    }
}
