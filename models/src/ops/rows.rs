//! Operations that gather, merge and replace rows.

use crate::autograd::{Scope, Var};
use crate::error::{ModelError, Result};
use engine::ParamId;
use kernels::{DType, Shape, Tag, Tensor};

impl Scope<'_> {
    /// Embedding lookup: rows `index` (i32 `[t]`) of a table parameter `[v, c]`, giving `[t, c]`.
    ///
    /// # Errors
    /// When an index lies outside the table, the parameter is not in the unit whose weights are gathered, or memory
    /// runs out.
    pub fn embedding(&self, table: ParamId, index: &Tensor) -> Result<Var> {
        let value = self.backend().gather_rows(self.weight(table)?, index)?;
        let index = index.clone();
        self.record("embedding", value, &[], &[table], move |sweep, dy| {
            let rows = sweep.weight(table)?.dim(0);
            let grad = sweep
                .backend()
                .scatter_add_rows(&dy, &index, rows, DType::F32)?;
            sweep.param(table, grad)
        })
    }

    /// Gathers the rows `index` (i32 `[m]`) of `x [t, c]` into `[m, c]`. A row may occur several times.
    ///
    /// # Errors
    /// When an index is out of range or memory runs out.
    pub fn gather_rows(&self, x: &Var, index: &Tensor) -> Result<Var> {
        let value = self.backend().gather_rows(x.value(), index)?;
        let (slot, index) = (x.slot(), index.clone());
        let (rows, dtype) = (x.value().dim(0), x.dtype());
        self.record("gather_rows", value, &[x], &[], move |sweep, dy| {
            let dx = sweep.backend().scatter_add_rows(&dy, &index, rows, dtype)?;
            sweep.add(slot, dx)
        })
    }

    /// Merges the rows of several parts into one `[t, c]`. A part is rows and their i32 index: its row `i`
    /// becomes row `index[i]` of the result. Together the indices name each of the `t` rows once.
    ///
    /// # Errors
    /// When widths or dtypes differ, an index is out of range, or memory runs out.
    pub fn merge_rows(&self, parts: &[(&Var, &Tensor)], t: usize) -> Result<Var> {
        let Some((first, _)) = parts.first() else {
            return Err(ModelError::NoGradient);
        };
        let backend = self.backend();
        let shape = Shape::new(&[t, first.shape().last()]);
        let mut value = backend.zeros(shape, first.dtype(), Tag::Activations)?;
        for (part, index) in parts {
            value = backend.write_rows(value, index, part.value())?;
        }
        let inputs: Vec<&Var> = parts.iter().map(|(part, _)| *part).collect();
        let back: Vec<_> = parts
            .iter()
            .map(|(p, i)| (p.slot(), (*i).clone()))
            .collect();
        self.record("merge_rows", value, &inputs, &[], move |sweep, dy| {
            for (slot, index) in back {
                if slot.is_some() {
                    let part = sweep.backend().gather_rows(&dy, &index)?;
                    sweep.add(slot, part)?;
                }
            }
            Ok(())
        })
    }

    /// Transposes each matrix of `x [n, a, b]`: `[n, b, a]`.
    ///
    /// # Errors
    /// When `x` does not have three axes or memory runs out.
    pub fn transpose_each(&self, x: &Var) -> Result<Var> {
        let value = self.backend().transpose_each(x.value())?;
        let slot = x.slot();
        self.record("transpose_each", value, &[x], &[], move |sweep, dy| {
            let dx = sweep.backend().transpose_each(&dy)?;
            sweep.add(slot, dx)
        })
    }

    /// Returns `base [t, c]` with its row `index[i]` (i32 `[m]`) replaced by row `i` of `rows [m, c]`. No
    /// index may occur twice. The gradient of a replaced row of `base` is zero.
    ///
    /// # Errors
    /// When an index is out of range or memory runs out.
    pub fn replace_rows(&self, base: &Var, index: &Tensor, rows: &Var) -> Result<Var> {
        let value = self
            .backend()
            .replace_rows(base.value(), index, Some(rows.value()))?;
        let (base_slot, rows_slot, index) = (base.slot(), rows.slot(), index.clone());
        self.record(
            "replace_rows",
            value,
            &[base, rows],
            &[],
            move |sweep, dy| {
                let backend = sweep.backend();
                if base_slot.is_some() {
                    let d_base = backend.replace_rows(&dy, &index, None)?;
                    sweep.add(base_slot, d_base)?;
                }
                if rows_slot.is_some() {
                    let d_rows = backend.gather_rows(&dy, &index)?;
                    sweep.add(rows_slot, d_rows)?;
                }
                Ok(())
            },
        )
    }
}
