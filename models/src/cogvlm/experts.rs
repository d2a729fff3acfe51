//! Two sets of weights in one layer: rows are taken apart, each part goes through its own product, and the results
//! are put together again. No row is computed twice.

use crate::autograd::{Rows, Scope, Var};
use crate::error::Result;
use kernels::Tensor;

/// Token rows (i32) by the expert that computes them; neither is empty.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Text, and the rows of a picture that count as text.
    pub language: Tensor,
    /// Pictures.
    pub vision: Tensor,
}

/// A layer for text beside one for pictures.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Routed<L> {
    pub(super) language: L,
    pub(super) vision: L,
}

impl<L> Routed<L> {
    /// `run` of the one layer on its rows of `x [t, c]` and of the other on the rest: `N` values `[t, ..]`. Without
    /// `experts` all rows are text.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    pub(super) fn forward<const N: usize>(
        &self,
        scope: &Scope<'_>,
        x: &Var,
        experts: Option<&Experts>,
        run: impl Fn(&L, &Var) -> Result<[Var; N]>,
    ) -> Result<[Var; N]> {
        let Some(experts) = experts else {
            return run(&self.language, x);
        };
        let part = |layer: &L, rows: &Tensor| {
            let own = scope.gather_rows(x, rows)?;
            scope.with_rows(Rows::Tokens, rows, || run(layer, &own))
        };
        let language = part(&self.language, &experts.language)?;
        let vision = part(&self.vision, &experts.vision)?;
        let t = x.shape().rows();
        let merged = language
            .iter()
            .zip(&vision)
            .map(|(l, v)| scope.merge_rows(&[(l, &experts.language), (v, &experts.vision)], t));
        let merged: Vec<Var> = merged.collect::<Result<_>>()?;
        Ok(merged.try_into().expect("N values of each expert"))
    }
}
