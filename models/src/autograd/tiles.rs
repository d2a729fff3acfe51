//! Tiles of rows: a part of a segment that runs on some rows after the other, so that its inner values exist for one tile
//! only. Backward runs each tile again.
//!
//! Gradients of parameters are sums over all rows. Each tile continues the sums of the tile before
//! ([`Backend::part_step`](kernels::Backend::part_step)), so they have the bits of a run without tiles. On a GPU all of a
//! feed-forward layer's products are computed on stretches of rows, with or without tiles
//! ([`Backend::feed_forward`](kernels::Backend::feed_forward)).

use super::dropout::Dropout;
use super::scope::{Mode, Scope};
use super::sweep::{Grad, Sweep};
use super::tape::Observers;
use super::var::{Slot, Var};
use crate::error::Result;
use engine::ParamId;
use kernels::{Backend, DType, Shape, SumPart, Tag, Tensor};
use std::ops::Range;
use std::rc::Rc;

/// Key of a sum: the number of its operation, and that of the sum among those of the operation.
type Key = (usize, usize);

/// Sum over the rows of all tiles so far, of the gradient of a parameter or of some rows of it.
struct RowSum {
    key: Key,
    id: ParamId,
    rows: Option<Range<usize>>,
    /// `None` while a tile continues it.
    sum: Option<Tensor>,
}

/// Sums over rows that tiles continue one after the other.
pub(super) struct TileSums {
    part: SumPart,
    /// In the order in which the first tile ends them.
    all: Vec<RowSum>,
}

impl TileSums {
    fn new(total: usize) -> Self {
        Self {
            part: SumPart { first: 0, total },
            all: Vec::new(),
        }
    }

    /// Rows of the current tile.
    pub(super) fn part(&self) -> SumPart {
        self.part
    }

    /// The sum of the tiles before; `None` in the first tile.
    pub(super) fn take(&mut self, key: Key) -> Option<Tensor> {
        let mut all = self.all.iter_mut();
        all.find(|own| own.key == key)?.sum.take()
    }

    /// Stores the sum `key` of the tiles so far.
    pub(super) fn put(&mut self, key: Key, id: ParamId, rows: Option<Range<usize>>, sum: Tensor) {
        let sum = Some(sum);
        match self.all.iter_mut().find(|own| own.key == key) {
            Some(own) => own.sum = sum,
            None => self.all.push(RowSum { key, id, rows, sum }),
        }
    }

    /// Adds the sums to the gradients of their parameters, in the order of a sweep without tiles.
    fn add_to(self, sweep: &mut Sweep<'_>) -> Result<()> {
        for own in self.all {
            if let Some(sum) = own.sum {
                sweep.row_sum(own.key.1, own.id, own.rows, sum)?;
            }
        }
        Ok(())
    }
}

/// What a tile runs: a function of its rows, each row by itself.
type Body = dyn Fn(&Scope<'_>, &Var) -> Result<Var>;

/// A tensor that tiles of rows are written to.
struct Rows(Tensor);

impl Rows {
    fn new(on: &dyn Backend, shape: Shape, dtype: DType) -> Result<Self> {
        Ok(Self(on.zeros(shape, dtype, Tag::Activations)?))
    }

    fn write(self, on: &dyn Backend, first: usize, rows: &Tensor) -> Result<Self> {
        let index: Vec<i32> = (first..first + rows.dim(0)).map(|row| row as i32).collect();
        let (bytes, shape) = (bytemuck::cast_slice(&index), Shape::new(&[index.len()]));
        let index = on.upload(bytes, shape, DType::I32, Tag::Workspace)?;
        Ok(Self(on.write_rows(self.0, &index, rows)?))
    }
}

/// First row and length of each tile of `step` of `total` rows.
fn tiles(total: usize, step: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..total)
        .step_by(step)
        .map(move |first| (first, step.min(total - first)))
}

/// What backward needs of a value that was computed in tiles.
struct Tiled {
    input: Tensor,
    slot: Option<Slot>,
    step: usize,
    dropout: Option<Dropout>,
    row_names: Option<Tensor>,
    body: Rc<Body>,
}

impl Tiled {
    /// Gradients of the tiles, one after the other: of the input, and of the parameters.
    fn backward(self, sweep: &mut Sweep<'_>, dy: &Tensor) -> Result<()> {
        let (on, total) = (sweep.backend(), self.input.dim(0));
        let mut dx = match self.slot {
            Some(_) => Some(Rows::new(on, self.input.shape(), self.input.dtype())?),
            None => None,
        };
        let mut sums = TileSums::new(total);
        for (first, len) in tiles(total, self.step) {
            sums.part.first = first;
            let grad = self.tile(sweep, first, &dy.narrow(first, len)?, &mut sums)?;
            dx = match (dx, grad) {
                (Some(dx), Some(grad)) => Some(dx.write(on, first, &grad)?),
                (dx, _) => dx,
            };
        }
        sums.add_to(sweep)?;
        match dx {
            Some(Rows(dx)) => sweep.add(self.slot, dx),
            None => Ok(()),
        }
    }

    /// Runs the tile from row `first` on again, and sweeps it from its gradient `dy`. Returns the gradient of its input.
    fn tile(
        &self,
        sweep: &Sweep<'_>,
        first: usize,
        dy: &Tensor,
        sums: &mut TileSums,
    ) -> Result<Option<Tensor>> {
        let ((access, lease), dropout) = (sweep.under(), self.dropout.as_ref());
        let none = Observers::default();
        let scope = Scope::new(access, lease, none, dropout, Mode::Recompute, 1.0);
        let len = dy.dim(0);
        let scope = scope.of_rows(self.row_names.clone(), first..first + len);
        let x = scope.enter(self.input.narrow(first, len)?, self.slot.is_some());
        let shape = x.shape();
        let y = (self.body)(&scope, &x)?;
        drop(x);
        let seeds = y.slot().map(|slot| (slot, Grad::Tensor(dy.clone())));
        drop(y);
        let inputs = usize::from(self.slot.is_some());
        let record = scope.into_record();
        let mut grads = record.sweep_tile((access, lease), seeds, inputs, sums)?;
        let grad = grads.pop().flatten();
        let dtype = self.input.dtype();
        let grad = grad.map(|grad| super::sweep::dense(sweep.backend(), grad, shape, dtype));
        grad.transpose()
    }
}

impl Scope<'_> {
    /// Number of rows of a tile of a value of `total` rows; `None` if it is not computed in tiles.
    pub(crate) fn tile_rows(&self, total: usize) -> Option<usize> {
        let step = self.backend().part_step(total).max(1);
        let rows = self.tiling()?.get().next_multiple_of(step);
        (rows < total).then_some(rows)
    }

    /// Whether a feed-forward layer of `total` rows is computed in tiles, or in stretches on a GPU.
    pub(crate) fn is_in_parts(&self, total: usize) -> bool {
        let on = self.backend();
        let in_stretches = on.feed_forward().is_some() && total > on.part_step(total);
        in_stretches || self.tile_rows(total).is_some()
    }

    /// `body` of `x [t, c]`, which computes each row by itself with the parameters `params`. If the tape has a tile
    /// size ([`Tape::with_mlp_tiles`](super::Tape::with_mlp_tiles)) that is smaller than `t`, it runs on one tile of rows
    /// after the other, and only `x` is stored for backward. The operations of `body` may sum over rows only for gradients
    /// of linear layers.
    ///
    /// # Errors
    /// When `body` fails or memory runs out.
    pub fn in_tiles(
        &self,
        x: &Var,
        params: &[ParamId],
        body: impl Fn(&Scope<'_>, &Var) -> Result<Var> + 'static,
    ) -> Result<Var> {
        let (input, on) = (x.value().clone(), self.backend());
        let total = input.dim(0);
        let Some(step) = self.tile_rows(total) else {
            return self.in_feed_forward(|| body(self, x));
        };
        let row_names = self.row_names();
        let mut value: Option<Rows> = None;
        for (first, len) in tiles(total, step) {
            let scope = self.plain().of_rows(row_names.clone(), first..first + len);
            let own = body(&scope, &scope.enter(input.narrow(first, len)?, false))?;
            let own = own.into_value();
            let rows = match value {
                Some(rows) => rows,
                None => Rows::new(on, Shape::new(&[total, own.shape().last()]), own.dtype())?,
            };
            value = Some(rows.write(on, first, &own)?);
        }
        let Some(Rows(value)) = value else {
            return body(self, x);
        };
        let tiled = Tiled {
            input,
            slot: x.slot(),
            step,
            dropout: self.dropout_state().cloned(),
            row_names,
            body: Rc::new(body),
        };
        self.record("tiles", value, &[x], params, move |sweep, dy| {
            tiled.backward(sweep, &dy)
        })
    }
}
